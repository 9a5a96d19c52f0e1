"""SPRL on Atari: PPO whose reward is reduced by a k-shortest-path cost, judged by a learned reachability network.

Paper: "Shortest-Path Constrained Reinforcement Learning for Sparse Reward Tasks", Sohn, Lee et al., ICML 2021.

    python ppo_sprl_atari.py                                                      # Montezuma's Revenge, on a GPU
    python ppo_sprl_atari.py --env-id Freeway-v5 --rnet-width 16 --rnet-input embedding-difference   # bearable on a CPU

Differences from the paper: a time limit bootstraps; the RNet's ResNet ends in an FC layer on all places and has
GroupNorm, its weight decay is decoupled, a training has 2,500 triplets (README says why); `--rnet-input
embedding-difference` is ours.
"""

import contextlib
import difflib
import io
import itertools
import math
import os
import platform
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import envpool
import envpool.registration
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ARGS ################################################################################################################
@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment, part of the run's name"""
    seed: int = 1
    """seed of the networks, the sampling and the worlds"""
    torch_deterministic: bool = True
    """if toggled, `torch.backends.cudnn.deterministic=True`"""
    cuda: bool = True
    """if toggled, use CUDA when there is a CUDA device"""
    compile: bool = False
    """if toggled, compile the policy's network with torch.compile: a slow start, then faster steps on a GPU"""
    track: bool = False
    """if toggled, mirror the charts to Weights & Biases (WANDB_MODE=offline works)"""
    wandb_project_name: str = "sprl"
    """the project's name in Weights & Biases"""
    wandb_entity: str | None = None
    """the entity (team) of the Weights & Biases project"""
    run_name: str | None = None
    """folder of this run below runs/ (default: env id, exp name, seed and time)"""
    checkpoint_interval: int = 100_000
    """environment steps between two checkpoints, 0: only at the end (one is always written at the end and on Ctrl-C)"""
    resume: str | None = None
    """path of an agent.pt to go on from; its settings hold unless a flag says otherwise"""
    save_ring: bool = False
    """if toggled, checkpoints hold the replay ring too; then a resumed MiniGrid run repeats an unbroken one exactly"""

    # PPO
    env_id: str = "MontezumaRevenge-v5"
    """MontezumaRevenge-v5, Freeway-v5, MsPacman-v5, Gravitar-v5, Seaquest-v5, Hero-v5 or any Atari id of EnvPool"""
    total_timesteps: int = 10_000_000
    """total environment steps of the experiment"""
    learning_rate: float = 5e-4
    """learning rate of the policy's Adam (paper: MiniGrid 0.003, SPRL there 0.01; Atari and Fetch 5e-4; DMLab 3e-4)"""
    num_envs: int = 12
    """number of parallel environments (paper: 12)"""
    num_steps: int = 256
    """steps per environment and rollout (authors' code: 256)"""
    anneal_lr: bool = True
    """anneal the learning rate linearly to 0"""
    gamma: float = 0.99
    """discount factor, in [0, 1]"""
    gae_lambda: float = 0.95
    """lambda of the generalized advantage estimation, in [0, 1]"""
    num_minibatches: int = 4
    """minibatches per epoch; divides num_envs * num_steps"""
    update_epochs: int = 4
    """epochs over each rollout"""
    norm_adv: bool = True
    """normalize the advantages in each minibatch"""
    clip_coef: float = 0.1
    """clipping range of the policy ratio (authors' code: 0.1)"""
    anneal_clip: bool = True
    """anneal the clipping range linearly to 0 (authors' code)"""
    clip_vloss: bool = True
    """clip the value loss by the same range"""
    ent_coef: float = 0.01
    """entropy bonus (paper: 0.01; SPRL, ECO and ICM on Fetch 0.001; DMLab 0.001 to 0.007 by method)"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the policy's gradient"""
    max_episode_steps: int = 10_000
    """time limit of an episode, a truncation (paper: MiniGrid 100, Fetch 50, Atari 10,000; DMLab's is its own)"""
    stack_observations: int = 3
    """m: the policy sees the last m observations besides the current one (paper: 0 is best; Atari 3)"""

    # SPRL
    cost_scale: float = 0.05
    """lambda, the weight of the k-SP cost; 0 is plain PPO (paper: MiniGrid 0.002, DMLab 0.06, Atari and Fetch 0.05)"""
    cost_bias: float = 0.0
    """the reward becomes r + lambda * (bias - cost) (paper: 0, Fetch 1; authors' DMLab code: 0.5)"""
    k: int = 12
    """k of the k-SP constraint; RNet positives lie within k steps (paper: MiniGrid 2, DMLab and Fetch 10, Atari 12)"""
    tolerance: int = 1
    """Delta t: how far apart the compared older states lie, >= 0 (paper: 1)"""
    num_tolerance_samples: int = 200
    """N: s_t is compared with s_{t-(k+n*Delta t)}, n = 1..N (paper: MiniGrid 60, DMLab and Atari 200, Fetch 20)"""
    cost_percentile: float = 90.0
    """the cost is 1 where this percentile of the N outputs exceeds 0.5 (paper: 90)"""
    ring_size: int = 30_000
    """the RNet learns from the agent's last this many steps (paper: MiniGrid and DMLab 60K, Atari and Fetch 30K)"""
    negative_bias: int = 80
    """Delta-: negatives lie at least k + Delta- steps after the anchor (paper: 20; Atari 80, Fetch 12)"""
    positive_bias: int = 5
    """Delta+: the next anchor lies 1..Delta+ steps after the positive (paper: 5)"""
    negative_cap: bool = False
    """draw negatives from the first 10 % beyond k + Delta- (authors' code) and not up to the segment's end (paper)"""
    rnet_intervals: tuple[int, int, int] = (6_000, 150_000, 150_000)
    """steps between RNet trainings in the first 1M steps, the next 1M, then (paper: 6K, 12K, 36K; Atari 6K, 150K)"""
    rnet_start: int = 15_000
    """steps in the ring before the first RNet training (authors' code: 15K)"""
    rnet_triplets: int = 2_500
    """most triplets, two pairs each, of one RNet training (authors' code: 15K, one epoch)"""
    rnet_batch_size: int = 64
    """triplets per RNet minibatch (authors' code: 64)"""
    rnet_learning_rate: float = 3e-4
    """learning rate of the RNet's Adam (authors' code: 3e-4)"""
    rnet_weight_decay: float = 0.03
    """L2 penalty of the RNet (authors' DMLab code: 1e-4), on Atari decoupled weight decay (paper: 0.03)"""
    label_smoothing: float = 0.1
    """label smoothing of the RNet's loss (authors' code: 0.1)"""
    heldout_pairs: int = 7_500
    """pairs of each kind that measure the RNet's accuracy before it trains on them (paper: 15K; Atari, Fetch 7,500)"""
    rnet_ready_accuracy: float = 0.75
    """the cost is 0 until the mean of the last 20 training accuracies passes this (authors' code: 0.75)"""
    rnet_input: Literal["pixel-difference", "embedding-difference"] = "pixel-difference"
    """compare (s_t, s_t - s_{t-k}) as images, a network pass per pair (paper), or as embeddings, a pass per state"""
    rnet_width: int = 64
    """channels of the RNet's first residual blocks; its FC layers have 8 times as many (paper: 64; 16 suits a CPU)"""


RANGES = {  # what check_args accepts: (lowest, highest)
    (1, 2**31 - 1): "total_timesteps num_steps num_minibatches update_epochs k num_tolerance_samples ring_size "
    "positive_bias rnet_triplets rnet_batch_size rnet_intervals heldout_pairs",
    (1, 10**7): "max_episode_steps",
    (1, 2**16): "num_envs",
    (1, 1024): "rnet_width",
    (0, 2**31 - 1): "checkpoint_interval tolerance negative_bias rnet_start",
    (0, 2**30): "seed",
    (0, 1000): "stack_observations",
    (0, np.inf): "learning_rate clip_coef ent_coef vf_coef max_grad_norm cost_scale rnet_learning_rate "
    "rnet_weight_decay",
    (0, 1): "gamma gae_lambda label_smoothing rnet_ready_accuracy",
    (0, 100): "cost_percentile",
    (-np.inf, np.inf): "cost_bias",
}


def fail(message):
    """Ends the program the way a wrong command line should: one line, exit code 2."""
    sys.exit(print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr) or 2)


def say(message):
    """Prints a line; a run whose output goes to a full disk goes on without it."""
    try:
        print(message, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w")  # or its buffer would be tried again at the end


def parse_args(default):
    """The command line on top of the default settings; tyro's boxed errors become one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(Args, default=default)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()[1:]]
        said = itertools.takewhile(lambda line: not line.startswith("─"), lines)
        kind = next((line.split()[1] for line in lines if re.fullmatch(r"--[\w-]+ [A-Z|{].*", line)), None)
        said = " ".join(said).rstrip(".")
        accepted = "" if "xpected" in said else f", accepted: {kind or 'what --help lists'}"
        fail(said + accepted)


def check_args(args):
    """Refuses what cannot work, by name, before anything is built or written."""
    for (low, high), names in RANGES.items():
        for name in names.split():
            value = getattr(args, name)
            values = value if isinstance(value, tuple) else (value,)
            fits = (isinstance(n, (int, float)) and low <= n <= high and abs(n) != np.inf for n in values)
            if not all(fits):
                fail(f"--{name.replace('_', '-')} {value} is out of range, accepted: {low} to {high}")
    batch = args.num_envs * args.num_steps
    if batch % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches}, accepted: a divisor of num_envs * num_steps = {batch}")


def check_window(args):
    window = max(args.num_tolerance_samples * args.tolerance, args.negative_bias) + args.k
    if args.cost_scale and args.ring_size // args.num_envs <= window:
        need = (window + 1) * args.num_envs
        fail(f"--ring-size {args.ring_size} is shorter than the window, accepted: {need} or more for these settings")
    if args.cost_scale and args.rnet_start > args.ring_size // args.num_envs * args.num_envs:
        fail(f"--rnet-start {args.rnet_start} is never in the ring, accepted: up to --ring-size {args.ring_size}")


# ENVIRONMENT #########################################################################################################
class AtariGames(gym.vector.VectorEnv):
    """EnvPool's Atari with the paper's preprocessing: 84x84 grey, every action four times, all 18 actions, no end at a
    lost life. Frames come singly and rewards as the game gave them; NEXT_STEP autoreset is EnvPool's own."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    resumable = False  # the emulator's state cannot be saved
    reward_range = (-(2**31), 2**31 - 1)  # ALE counts in 32 bits
    map_size = (24 * 256, 256)  # Montezuma's Revenge: rooms side by side

    def __init__(self, env_id, num_envs, max_episode_steps):
        known = [i for i, spec in envpool.registration.registry.specs.items() if spec[0] == "envpool.atari"]
        if env_id not in known:
            close = difflib.get_close_matches(env_id, known, n=3, cutoff=0.4)
            fail(f"--env-id {env_id} is unknown, close: {', '.join(close) or 'none'}; all: {', '.join(sorted(known))}")
        self.env_id, self.num_envs = env_id, num_envs
        self.make = partial(
            envpool.make_gymnasium, env_id, num_envs=num_envs, max_episode_steps=max_episode_steps, stack_num=1,
            frame_skip=4, img_height=84, img_width=84, gray_scale=True, episodic_life=False, reward_clip=False,
            full_action_space=True, repeat_action_probability=0.0, noop_max=30, use_fire_reset=True,
        )  # fmt: skip
        self.single_observation_space = gym.spaces.Box(0, 255, (84, 84, 1), np.uint8)
        self.single_action_space = gym.spaces.Discrete(18)

    def reset(self, *, seed=None, options=None):
        self.pool = self.make(seed=seed or 0)
        obs, info = self.pool.reset()
        self.frames, self.ram = obs.transpose(0, 2, 3, 1), info["ram"]
        return self.frames, {}

    def step(self, actions):
        obs, rewards, terminations, truncations, info = self.pool.step(actions)
        self.frames, self.ram = obs.transpose(0, 2, 3, 1), info["ram"]
        return self.frames, rewards, terminations, truncations & ~terminations, {}

    def learning_rewards(self, rewards, valid):
        """The rewards (T, N) clipped to [-1, 1]."""
        return rewards.clip(-1, 1)

    def positions(self):
        """The agents' true (x, y), (N, 2), within map_size: bytes 42 and 43 of the RAM, the room is byte 3."""
        if not self.env_id.startswith("MontezumaRevenge"):
            fail(f"--env-id {self.env_id}: no position is known, accepted: MontezumaRevenge-v5")
        room, x, y = self.ram[:, (3, 42, 43)].astype(np.int64).T
        return np.stack([room % 24 * 256 + x, y], 1)

    def render(self):
        return self.frames[0].repeat(3, 0).repeat(3, 1).repeat(3, 2)  # larger, and grey as RGB

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def close(self):
        pass


def make_envs(args):
    return AtariGames(args.env_id, args.num_envs, args.max_episode_steps)


def find_fault(envs, obs, rewards):
    """What the worlds returned that no world may, in words, or None; cheap enough to be asked at every step."""
    if getattr(envs, "died", None):  # a process of DeepMind Lab
        return f"{envs.died}, see above"
    low, high = envs.reward_range
    wrong = ~((low <= rewards) & (rewards <= high))  # of NaN too
    if wrong.any():
        return f"environment {wrong.argmax()} returned the reward {rewards[wrong][0]}, accepted: {low} to {high}"
    if obs.dtype.kind == "f" and not np.isfinite(obs).all():
        return f"environment {np.argwhere(~np.isfinite(obs))[0, 0]} returned a state with {obs[~np.isfinite(obs)][0]}"


# AGENT ###############################################################################################################
class NatureCNN(nn.Module):
    """The trunk of Mnih et al. (2015), on images (B, frames, 84, 84, C) uint8."""

    def __init__(self, obs_shape, num_frames=1):
        super().__init__()
        self.convs = nn.Sequential(
            layer_init(nn.Conv2d(num_frames * obs_shape[-1], 32, 8, stride=4)), nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
        )  # fmt: skip
        self.dense = layer_init(nn.Linear(64 * 7 * 7, 512))
        self.out_features = 512
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):
        return self.dense(self.convs(to_image(obs)).flatten(1)).relu()


def to_image(obs):
    """(B, frames, H, W, C) uint8 -> (B, frames * C, H, W) in [0, 1], channels_last in memory."""
    return (obs.movedim(1, 3).flatten(3) / 255).permute(0, 3, 1, 2)


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, network, out_features, num_actions):
        super().__init__()
        self.network = network
        self.actor = layer_init(nn.Linear(out_features, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(out_features, 1), std=1)

    def get_action_and_value(self, obs, action=None):
        hidden = self.network(obs)
        probs = Categorical(logits=self.actor(hidden), validate_args=False)  # validating would wait for the device
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden).squeeze(-1)


def make_agent(envs, args):
    trunk = NatureCNN(envs.single_observation_space.shape, 1 + args.stack_observations)
    return Agent(trunk, trunk.out_features, int(envs.single_action_space.n))


def storage(shape, dtype, device):
    """Zeros for frames. What the machine has no room for is refused now: it would fill up in the middle of the run."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[1]
    size = np.prod(shape, dtype=float) * dtype.itemsize
    if size > room:
        names = ("num_envs", "num_steps", "stack_observations", "ring_size", "memory_size")
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names if hasattr(Args, name))
        fail(f"{flags}: frames of {shape} want {size / 1e9:.0f} GB, accepted: less than the {room / 1e9:.0f} GB here")
    return torch.zeros(shape, dtype=dtype, device=device)


def stack_frames(frames, depths, rows, envs, m):
    """What a network sees (B, m + 1, ...): the frames at (rows, envs), each after the m before it. An episode's first
    frame is repeated before it, so no stack crosses an episode; `depths` counts the steps since the episode began."""
    if m == 0:
        return frames[rows, envs].unsqueeze(1)
    back = torch.minimum(torch.arange(m, -1, -1, device=rows.device), depths[rows, envs].unsqueeze(1))  # (B, m + 1)
    return frames[(rows.unsqueeze(1) - back) % len(frames), envs.unsqueeze(1)]


def embed_frames(embed, frames, depths, rows, m, chunk=1024):
    """embed() of all environments' frames in these rows, (T, N, ...), by chunks that stay in the cache."""
    envs = torch.arange(frames.shape[1], device=frames.device)
    places = torch.cartesian_prod(rows, envs).split(chunk)
    parts = [embed(stack_frames(frames, depths, *place.T, m)) for place in places]
    return torch.cat(parts).unflatten(0, (len(rows), len(envs)))


def gae(rewards, values, terminations, dones, gamma, gae_lambda):
    """Generalized advantages (T, N) of values (T + 1, N). With NEXT_STEP autoreset values[t + 1] is the value of the
    state that step t led to, also where the episode ends: so a truncation bootstraps and a termination does not."""
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])
    delta = rewards + gamma * values[1:] * ~terminations - values[:-1]
    discount = gamma * gae_lambda * ~dones
    for t in reversed(range(len(rewards))):
        advantages[t] = lastgaelam = delta[t] + discount[t] * lastgaelam
    return advantages


# REACHABILITY NETWORK ################################################################################################
class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(1, outputs), nn.GroupNorm(1, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(1, outputs))

    def forward(self, x):
        return (self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """84x84 images -> 8 * width features: a 7x7/2 and max-pool stem, stages of residual blocks that double the width
    and halve the size, FC. The mean over all places, usual before it, would forget where things are; BatchNorm's
    running averages would lag behind a network that changes a lot in its first training."""

    def __init__(self, channels, blocks, width):
        super().__init__()
        layers = [nn.Conv2d(channels, width, 7, 2, padding=3, bias=False), nn.GroupNorm(1, width), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2, padding=1)]
        inputs = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                outputs = width * 2**stage
                layers += [ResidualBlock(inputs, outputs, 2 if stage and not block else 1)]
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        side = math.ceil(21 / 2 ** (len(blocks) - 1))  # the stem leaves 21 of 84
        self.dense = nn.Linear(inputs * side**2, 8 * width)
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        return self.dense(self.blocks(images).flatten(1)).relu()


class ImageRNet(nn.Module):
    """Siamese network: can the late state be reached from the early one in at most k - 1 steps? A ResNet embeds each
    state once. FC layers, of 512 at the paper's width of 64, compare two embeddings; the first of them is split,
    W [a; b] = W_early a + W_late b, so both products are computed once per state (`embed`). That is at once the layer
    on (b, b - a), only with other weights: it begins as one that sees the difference alone."""

    chunk = 16_384  # pairs compared at a time, so that they stay in the cache

    def __init__(self, envs, args, blocks, num_layers, m):
        super().__init__()
        self.m = m  # it sees the last m frames besides the current one
        channels = (m + 1) * envs.single_observation_space.shape[-1]
        self.branch = ResNet(channels, blocks, args.rnet_width)
        features = 8 * args.rnet_width
        self.early = nn.Linear(features, features)
        self.late = nn.Linear(features, features, bias=False)
        self.late.weight.data = -self.early.weight.data
        layers = [nn.ReLU()]
        for _ in range(num_layers - 1):
            layers += [nn.Linear(features, features), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(features, 1))

    def embed(self, frames):  # (B, m + 1, H, W, C) uint8 -> (B, 2, features): as the early and as the late state
        embedding = self.branch(to_image(frames))
        return torch.stack([self.early(embedding), self.late(embedding)], 1)

    def compare(self, early, late):  # (..., features), (..., features) -> (...) logits
        return self.head(early + late).squeeze(-1)


class PixelRNet(nn.Module):
    """The paper's Atari network: a ResNet on the images (s_t, s_t - s_{t-k}). A difference of images can't be embedded
    once per state, so `embed` passes the frames on and every pair costs a whole pass (`compare`)."""

    chunk = 256  # pairs compared at a time: their images must fit the memory

    def __init__(self, envs, args, blocks, num_layers, m):
        super().__init__()
        self.m = m
        channels = 2 * (m + 1) * envs.single_observation_space.shape[-1]
        layers, features = [ResNet(channels, blocks, args.rnet_width)], 8 * args.rnet_width
        for _ in range(num_layers):
            layers += [nn.Linear(features, features), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Linear(features, 1))

    def embed(self, frames):  # (B, m + 1, H, W, C) uint8 -> (B, 2, m + 1, H, W, C)
        return frames.unsqueeze(1).expand(-1, 2, *frames.shape[1:])

    def compare(self, early, late):  # (B, m + 1, H, W, C) uint8, twice -> (B,) logits
        early, late = to_image(early), to_image(late)
        return self.network(torch.cat([late, late - early], 1)).squeeze(-1)


def make_rnet(envs, args):
    network = PixelRNet if args.rnet_input == "pixel-difference" else ImageRNet
    return network(envs, args, (2, 2, 1), 3, args.stack_observations)


def compare_pairs(rnet, embeddings, early, late):
    """Logits of pairs of embeddings (B, 2, ...), given by their numbers, by chunks of bounded memory."""
    logits = torch.zeros(len(early), device=embeddings.device)
    for start in range(0, len(early), rnet.chunk):
        mb = slice(start, start + rnet.chunk)
        logits[mb] = rnet.compare(embeddings[early[mb], 0], embeddings[late[mb], 1])
    return logits


class Ring:
    """The last steps of each environment. `ages` counts a frame's steps since its segment began; a segment is cut at an
    episode's start and after a non-zero reward, and no pair ever crosses a cut. `depths` counts since the episode's."""

    def __init__(self, num_rows, num_envs, obs_shape, dtype, device):
        self.frames = storage((num_rows, num_envs, *obs_shape), dtype, device)
        self.depths, self.ages = torch.zeros((2, num_rows, num_envs), dtype=torch.int64, device=device)
        self.head = self.size = self.unseen = 0  # next row to write, rows in use, rows the RNet has not trained on

    def add(self, frames, depths, ages):
        frames, depths, ages = (part[-len(self.frames) :] for part in (frames, depths, ages))
        rows = (self.head + torch.arange(len(frames), device=frames.device)) % len(self.frames)
        self.frames[rows], self.depths[rows], self.ages[rows] = frames, depths, ages
        self.head = (self.head + len(frames)) % len(self.frames)
        self.size, self.unseen = (min(n + len(frames), len(self.frames)) for n in (self.size, self.unseen))

    def rows(self, newest):
        """Storage rows of the newest frames, oldest first."""
        return (self.head - newest + torch.arange(newest, device=self.frames.device)) % len(self.frames)

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        if state["frames"].shape != self.frames.shape:
            raise ValueError(f"a ring of {tuple(state['frames'].shape)}, not {tuple(self.frames.shape)}")
        for name in ("frames", "depths", "ages"):
            getattr(self, name).copy_(state[name])
        self.head, self.size, self.unseen = state["head"], state["size"], state["unseen"]


def segment_ends(ages):
    """For each frame (T, N), oldest first, the row of the last frame of its segment."""
    steps = torch.arange(len(ages), device=ages.device).unsqueeze(1)
    is_last = torch.cat([ages[1:] == 0, torch.ones_like(ages[:1], dtype=torch.bool)])
    return torch.where(is_last, steps, len(ages)).flip(0).cummin(0).values.flip(0)


def uniform(low, high):
    """Integers drawn uniformly from [low, high], both tensors, both ends included."""
    draw = torch.rand(low.shape, device=low.device, dtype=torch.float64)
    return low + (draw * (high - low + 1)).long()


def sample_triplets(ages, k, negative_bias, positive_bias, negative_cap, num_triplets):
    """Algorithm 1 over all segments at once: rows of anchors, positives and negatives, their environments, and how many
    of them are real (the real ones come first). Every frame draws the anchor that would follow it; the anchors that
    Algorithm 1 visits are those on the path from the oldest frame, found by pointer doubling instead of a walk."""
    (num_rows, num_envs), device = ages.shape, ages.device
    steps = torch.arange(num_rows, device=device).unsqueeze(1).expand(ages.shape)
    ends = segment_ends(ages)
    positives = uniform(steps + 1, steps + k)
    jump = uniform(positives + 1, positives + positive_bias)
    jump = torch.where(jump <= ends, jump, ends + 1)  # a segment's first anchor is its first frame
    jump = torch.cat([jump, torch.full_like(jump[:1], num_rows)])  # the row behind the newest leads to itself
    visited = torch.zeros_like(jump)
    visited[0] = 1
    for _ in range(num_rows.bit_length()):
        visited = visited.scatter_reduce(0, jump, visited, "amax")
        jump = jump.gather(0, jump)
    nearest = steps + k + negative_bias
    furthest = torch.minimum(ends, nearest + (k + negative_bias) // 10) if negative_cap else ends
    usable = (visited[:-1] == 1) & (nearest <= ends)
    negatives = uniform(nearest, furthest)
    order = (torch.rand(ages.shape, device=device) + usable).flatten().topk(min(num_triplets, ages.numel())).indices
    rows, envs = order // num_envs, order % num_envs
    return rows, positives[rows, envs], negatives[rows, envs], envs, usable.sum()


def sample_heldout(ages, k, tolerance, negative_bias, num_samples):
    """Appendix B's validation pairs: positives from [t+1, t+k+Dt], negatives from [t+k+Dt+D-, t+k+Dt+2D-]."""
    num_envs, device = ages.shape[1], ages.device
    steps = torch.arange(len(ages), device=device).unsqueeze(1)
    ends = segment_ends(ages)
    usable = (steps + k + tolerance + negative_bias <= ends).flatten()
    pick = (torch.rand(num_samples, device=device, dtype=torch.float64) * usable.sum()).long()
    order = usable.long().argsort(descending=True, stable=True)[pick]
    rows, envs = order // num_envs, order % num_envs
    positives = uniform(rows + 1, rows + k + tolerance)
    nearest = rows + k + tolerance + negative_bias
    negatives = uniform(nearest, torch.minimum(nearest + negative_bias, ends[rows, envs]))
    return rows, positives, negatives, envs, usable.sum()


def rnet_logits(rnet, anchors, positives, negatives):
    """R(anchor, positive) and R(anchor, negative) as logits; each frame is embedded once. Both kinds of pairs are one
    batch: normalized apart, they would look alike."""
    anchors, *others = rnet.embed(torch.cat([anchors, positives, negatives])).chunk(3)
    return rnet.compare(anchors[:, 0].repeat(2, *[1] * (anchors.ndim - 2)), torch.cat(others)[:, 1]).chunk(2)


def rnet_loss(positive_logits, negative_logits, label_smoothing):
    """-log R(anc, +) - log(1 - R(anc, -)), Eq. 20, with smoothed labels."""
    smooth = torch.full_like(positive_logits, label_smoothing / 2)
    return F.binary_cross_entropy_with_logits(positive_logits, 1 - smooth) + F.binary_cross_entropy_with_logits(
        negative_logits, smooth
    )


def rnet_accuracy(positive_logits, negative_logits):
    return torch.cat([positive_logits > 0, negative_logits < 0]).float().mean()


class Schedule:
    """When the RNet trains next, and whether its last 20 training accuracies are good enough for it to be asked."""

    def __init__(self, next_step, ready):
        self.next_step, self.ready, self.accuracies = next_step, ready, []

    def trained(self, global_step, intervals, accuracies, ready_accuracy):
        self.next_step = global_step + intervals[(global_step >= 1e6) + (global_step >= 2e6)]
        self.accuracies = (self.accuracies + accuracies)[-20:]
        self.ready = sum(self.accuracies) / 20 > ready_accuracy

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


# INTRINSIC REWARD ####################################################################################################
def percentile(scores, q):
    """numpy's percentile of the last axis, linear interpolation included, by the largest few values only."""
    position = q / 100 * (scores.shape[-1] - 1)
    below = int(position)
    top = scores.topk(scores.shape[-1] - below, sorted=True).values  # the last of them is sorted(scores)[below]
    above = top[..., -2] if top.shape[-1] > 1 else top[..., -1]
    return torch.lerp(top[..., -1], above, position - below)


def ksp_cost(rnet, embeddings, ages, k, tolerance, num_tolerance_samples, q):
    """The k-SP cost (T, N) of the newest T frames: c_t = I[ the q-th percentile over n = 1..N of
    Rnet_{k-1}(s_{t-(k+n*Dt)}, s_t) > 0.5 ], Eq. 18 for N = 1. A pair counts as 0 unless both states are in one segment:
    the older lies k + n*Dt steps back, so the state's age (T, N) must be at least that (no reward, no reset between).
    The ages live on the host, so the valid pairs are listed without waiting for the device. A state with so few of them
    that the zeros of the others reach the percentile costs nothing, and is not looked at."""
    (num_steps, num_envs), device = ages.shape, embeddings.device
    gaps = k + tolerance * np.arange(1, num_tolerance_samples + 1)  # (N,)
    fewest = max(len(gaps) - 1 - int(q / 100 * (len(gaps) - 1)), 1)  # non-zero outputs below which the percentile is 0
    steps, envs, samples = ((ages[..., None] >= gaps) & (ages >= gaps[fewest - 1])[..., None]).nonzero()
    late = (len(embeddings) - num_steps + steps) * num_envs + envs
    pairs = np.stack([late - gaps[samples] * num_envs, late, (steps * num_envs + envs) * len(gaps) + samples])
    early, late, slots = torch.from_numpy(pairs).to(device, non_blocking=True)
    scores = torch.zeros(num_steps * num_envs * len(gaps), device=device)
    scores[slots] = compare_pairs(rnet, embeddings.flatten(0, 1), early, late).sigmoid()
    scores = scores.view(num_steps, num_envs, len(gaps))
    return (percentile(scores, q) > 0.5).float()


# CHECKPOINTS AND CHARTS ##############################################################################################
def warn(message):
    """Says in one line, above the progress bar, what the run goes on without."""
    with contextlib.suppress(OSError):  # stderr may be a file on the disk that is full
        tqdm.write(f"{os.path.basename(sys.argv[0])}: warning: {message}", file=sys.stderr)


def save_checkpoint(progress, learned, path):
    """Writes beside the old file and renames, so that there is a whole checkpoint at every moment."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # somebody may have removed it
        with open(f"{path}.tmp", "wb") as file:
            torch.save({**progress, **{name: part.state_dict() for name, part in learned.items()}}, file)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name without its content
        os.replace(f"{path}.tmp", path)
        return True
    except (OSError, RuntimeError) as error:  # a full disk must not end the run, nor cost the older checkpoint
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        cause = error if isinstance(error, OSError) else error.__context__ or error  # torch hides the disk's own words
        older = "an older one stays" if os.path.exists(path) else "there is none yet"
        warn(f"could not save {path}, {older}: {cause!r:.100}")
        return False


def load_checkpoint(path, script):
    """Reads a checkpoint without running any code in it; says in one line what is wrong with a bad one."""
    if not os.path.isfile(path):
        fail(f"--resume {path}: no such file, accepted: an agent.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        found, *_ = (checkpoint[name] for name in ("script", "command", "iteration", "global_step"))
        dict(checkpoint["args"])["env_id"]
    except Exception as error:
        fail(f"--resume {path} is truncated or no checkpoint, accepted: an agent.pt of {script} ({error!r:.100})")
    if found != script:
        fail(f"--resume {path} was written by {found}, accepted: an agent.pt of {script}")
    return checkpoint


def resume_args(path, script):
    """The settings of a run that goes on, its own with the command line on top, and its checkpoint. What would make it
    another run is refused."""
    checkpoint = load_checkpoint(path, script)
    old = {name: value for name, value in checkpoint["args"].items() if hasattr(Args, name)}
    unknown = checkpoint["args"].keys() - old.keys()
    if unknown:
        warn(f"--resume {path}: these settings of it are not known here, left out: {', '.join(sorted(unknown))}")
    args = parse_args(Args(**old | {"resume": path}))
    for name in ("env_id", "seed", "num_envs", "num_steps"):
        flag, before, now = f"--{name.replace('_', '-')}", old.get(name, getattr(Args, name)), getattr(args, name)
        if before != now:
            fail(f"{flag} {now} with --resume {path}, accepted: {before}, by which it was trained")
    folder = os.path.dirname(os.path.abspath(path))
    if args.run_name not in (old.get("run_name"), os.path.basename(folder)):
        fail(f"--run-name {args.run_name} with --resume {path}, accepted: no other folder than the checkpoint's own")
    if os.path.basename(path) != "agent.pt" and os.path.exists(f"{folder}/agent.pt"):
        fail(f"--resume {path} would overwrite the agent.pt beside it, accepted: a checkpoint in a folder of its own")
    return args, checkpoint


def load_learned(learned, checkpoint):
    """Gives each part what the checkpoint has of it, all but the ring, which need not be there."""
    unused = {"rnet", "icm"} & checkpoint.keys() - learned.keys()
    if unused:
        raise ValueError(f"its {', '.join(unused)} would be lost")
    for name, part in learned.items():
        if name != "ring" or name in checkpoint:
            part.load_state_dict(checkpoint[name])


def make_run_dir(run_name, resume):
    """The folder of the run, made if missing: below runs/, or where the checkpoint lies. Nothing is overwritten."""
    flag, run_dir = f"--run-name {run_name}", os.path.join("runs", run_name)
    if resume is not None:
        flag, run_dir = f"--resume {resume}", os.path.dirname(os.path.abspath(resume))
    elif os.path.normpath(run_name).startswith((".", "/")):
        fail(f"{flag}, accepted: a name below runs/")
    elif os.path.exists(f"{run_dir}/agent.pt"):
        fail(f"{flag}: {run_dir}/agent.pt exists; --resume it or choose another name")
    try:
        os.makedirs(run_dir, exist_ok=True)
        with open(f"{run_dir}/agent.pt.tmp", "wb"):
            os.remove(f"{run_dir}/agent.pt.tmp")
    except OSError as error:
        fail(f"{flag}: {run_dir} cannot be written, accepted: a folder that can ({error!r:.100})")
    return run_dir


def find_commit():
    """Of this script, if git is here and knows it."""
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


class TensorBoard(SummaryWriter):
    """With W&B's names of log and finish."""

    finish = SummaryWriter.close

    def log(self, charts, step):
        for name, value in charts.items():
            self.add_scalar(name, value, step)
        self.flush()  # a checkpoint must not know more than the charts do


def quiet_excepthook(failed):
    """What TensorBoard's thread cannot write is said by log_charts, without its traceback."""
    if type(failed.thread).__name__ != "_AsyncWriterThread" or not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def log_charts(sinks, charts, global_step):
    """Gives the charts to TensorBoard and W&B. One that fails (a full disk, a removed folder, no network) is said once
    and left out; the run goes on, and the checkpoint's history keeps the curve."""
    for name, sink in list(sinks.items()):
        try:
            sink.log(charts, step=global_step)
        except Exception as error:
            warn(f"{name} fails at step {global_step}, going on without it: {error!r:.100}")
            del sinks[name]


def plot_curve(history, title, path):
    """Draws every column of the history against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for row in history for name in row if name not in ("step", "length")))
    if not names:  # no episode has ended yet
        return
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names):
        axis.plot(*zip(*((row["step"], row[name]) for row in history if name in row)))
        axis.set(title=name.replace("_", " "), xlabel="environment steps")
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        warn(f"could not draw {path}: {error!r:.100}")
    plt.close(figure)


if __name__ == "__main__":
    # SETUP ###########################################################################################################
    args, checkpoint = parse_args(Args()), None
    script = os.path.basename(__file__)
    if args.resume is not None:
        args, checkpoint = resume_args(args.resume, script)
    check_args(args)
    check_window(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = max(1, args.total_timesteps // batch_size)
    method = "sprl" if args.cost_scale else "ppo"

    stop_signals = []  # SIGINT and SIGTERM: save what is learned, then end
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop_signals.append(received))
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")

    envs = make_envs(args)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    obs_shape, obs_dtype = obs_space.shape, getattr(torch, str(obs_space.dtype))
    agent = make_agent(envs, args).to(device)
    if args.compile:
        agent.network.compile()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    learned = {"agent": agent, "optimizer": optimizer}
    rnet = ring = observe = None
    schedule = Schedule(args.rnet_start, ready=False)
    if method == "sprl":
        rnet = make_rnet(envs, args).to(device).eval()
        rnet_optimizer = torch.optim.AdamW(  # as a penalty in Adam's gradient a decay of 0.03 leaves nothing to learn
            rnet.parameters(), lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay, fused=True
        )
        ring = Ring(args.ring_size // args.num_envs, args.num_envs, obs_shape, obs_dtype, device)
        learned |= {"rnet": rnet, "rnet_optimizer": rnet_optimizer, "schedule": schedule}
        learned |= {"ring": ring} if args.save_ring else {}
    method_charts = {"cost_rate": "sprl/cost_rate", "rnet_accuracy": "rnet/heldout_accuracy"}

    # rows before `past` hold what the window and the frame stack still need of earlier rollouts
    window = args.k + args.num_tolerance_samples * args.tolerance if args.cost_scale else 0
    past = window + args.stack_observations
    obs = storage((past + args.num_steps + 1, args.num_envs, *obs_shape), obs_dtype, device)
    depths = torch.zeros(obs.shape[:2], dtype=torch.int64, device=device)  # steps since the frame's episode began
    ages = np.zeros(obs.shape[:2], np.int64)  # steps since its segment began: since the episode did, or the last reward
    states = np.zeros(obs.shape[:2], np.int64)  # what `observe` says of the frame
    action_shape, action_dtype = action_space.shape, getattr(torch, str(action_space.dtype))
    actions = torch.zeros((args.num_steps, args.num_envs, *action_shape), dtype=action_dtype, device=device)
    logprobs = torch.zeros((args.num_steps, args.num_envs), device=device)
    values = torch.zeros((args.num_steps + 1, args.num_envs), device=device)
    rewards = np.zeros((args.num_steps, args.num_envs), np.float32)
    terminations = np.zeros((args.num_steps, args.num_envs), bool)
    truncations = np.zeros((args.num_steps, args.num_envs), bool)
    valid = np.zeros((args.num_steps, args.num_envs), bool)  # False on the rows that autoreset inserts
    every_env = torch.arange(args.num_envs, device=device)

    first_iteration, global_step, elapsed = 1, 0, 0.0
    episode_returns, episode_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, np.int64)
    recent = deque(maxlen=100)  # returns of the last episodes
    history = []  # one row of charts per iteration
    embeddings = None  # of obs, while the RNet stays as it is
    next_obs, _ = envs.reset(seed=args.seed + (1_000 * checkpoint["iteration"] if checkpoint else 0))
    next_done = np.zeros(args.num_envs, bool)
    obs[past] = torch.from_numpy(next_obs)

    if checkpoint:
        try:
            load_learned(learned | ({"ring": ring} if ring else {}), checkpoint)
            if rnet:  # what the command line says holds, not what the optimiser was saved with
                rnet_optimizer.param_groups[0].update(lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay)
            envs.load_state_dict(checkpoint["worlds"])
            if ring:
                ring.unseen = 0  # the window starts empty, and what is in it is asked of the held-out pairs
            first_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
            elapsed = checkpoint["elapsed"]
            history = checkpoint["history"]
            recent.extend(checkpoint["recent"])
            np.random.set_state(("MT19937", checkpoint["numpy_rng"][0].numpy(), *checkpoint["numpy_rng"][1:]))
            torch.set_rng_state(checkpoint["torch_rng"])
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            fail(f"--resume {args.resume} does not fit these settings: {error!r:.100}")

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = make_run_dir(run_name if args.run_name is None else args.run_name, args.resume)
    command = checkpoint["command"] if checkpoint else shlex.join(["python", script, *sys.argv[1:]])
    versions = {
        "commit": find_commit(),
        "python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__,
        "gymnasium": gym.__version__, "envpool": envpool.__version__,
    }  # fmt: skip
    threading.excepthook = quiet_excepthook
    table = "\n".join(f"|{key}|{value}|" for key, value in {**vars(args), **versions, "command": command}.items())
    try:
        sinks = {"TensorBoard": TensorBoard(run_dir, purge_step=global_step + 1 if checkpoint else None)}
        sinks["TensorBoard"].add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        sinks["TensorBoard"].flush()
    except OSError as error:
        fail(f"{run_dir} cannot be written, accepted: a --run-name or --resume whose folder can ({error!r:.100})")
    wandb_id = checkpoint and checkpoint.get("wandb_id")  # a resumed run goes on with its own charts
    if args.track:
        try:
            import wandb

            sinks["W&B"] = wandb.init(
                project=args.wandb_project_name, entity=args.wandb_entity, name=os.path.basename(run_dir), dir=run_dir,
                config={**asdict(args), **versions, "command": command}, group=args.env_id, job_type=method,
                tags=[method, args.env_id], id=wandb_id, resume="allow",
            )  # fmt: skip
            wandb_id = sinks["W&B"].id
        except Exception as error:
            warn(f"W&B cannot be reached, going on without it: {error!r:.100}")
    say(f"{method} on {args.env_id} ({device}), writing to {run_dir}")
    if ring:
        say(f"ring: {len(ring.frames)} steps x {args.num_envs} environments, {ring.frames.nbytes / 1e6:.1f} MB")
    if checkpoint:
        lost = ", without the replay ring" * bool(ring and "ring" not in checkpoint)
        say(f"resumed at step {global_step:,} with new episodes, a simulator's state cannot be saved{lost}")

    progress, next_checkpoint = None, global_step + (args.checkpoint_interval or np.inf)
    fault = None  # what ends the run with exit code 1
    start_time, start_step = time.time(), global_step
    bar = tqdm(total=num_iterations * batch_size, initial=global_step, unit="step", smoothing=0.05, mininterval=1.0)

    for iteration in range(first_iteration, num_iterations + 1):
        frac = 1.0 - (iteration - 1.0) / num_iterations
        optimizer.param_groups[0]["lr"] = frac * args.learning_rate if args.anneal_lr else args.learning_rate
        clip_coef = frac * args.clip_coef if args.anneal_clip else args.clip_coef
        charts = {}
        finished_returns, finished_lengths = [], []

        # ROLLOUT #####################################################################################################
        for step in range(args.num_steps):
            if stop_signals:
                break
            row = past + step
            with torch.inference_mode():
                policy_obs = stack_frames(
                    obs, depths, torch.full_like(every_env, row), every_env, args.stack_observations
                )
                action, logprob, _, value = agent.get_action_and_value(policy_obs)
            actions[step], logprobs[step], values[step] = action, logprob, value
            try:
                next_obs, reward, terminations[step], truncations[step], _ = envs.step(action.cpu().numpy())
                fault = None if stop_signals else find_fault(envs, next_obs, reward)  # a stop may reach the workers too
            except Exception as error:
                traceback.print_exc()
                fault = f"{type(error).__name__}, see above"
            if fault:
                fault = f"{args.env_id} at step {global_step + (step + 1) * args.num_envs}: {fault}"
                break
            valid[step], rewards[step] = ~next_done, reward
            next_done = terminations[step] | truncations[step]
            obs[row + 1] = torch.from_numpy(next_obs).to(device, non_blocking=True)
            ages[row + 1] = np.where(valid[step] & (reward == 0), ages[row] + 1, 0)
            episode_returns = np.where(valid[step], episode_returns + reward, 0.0)
            episode_lengths = np.where(valid[step], episode_lengths + 1, 0)
            depths[row + 1] = (depths[row] + 1) * torch.from_numpy(valid[step]).to(device, non_blocking=True)
            if observe:
                states[row + 1] = observe()
            finished_returns += episode_returns[next_done].tolist()
            finished_lengths += episode_lengths[next_done].tolist()
        if stop_signals or fault:
            break  # the rollout is left out: the checkpoint of the last iteration's end is whole
        global_step += batch_size

        # INTRINSIC REWARD ############################################################################################
        total_rewards = torch.from_numpy(envs.learning_rewards(rewards, valid)).to(device)
        if schedule.ready:
            with torch.inference_mode(), torch.autocast(device.type, enabled=device.type == "cuda"):
                # each state is embedded once, and once more after the RNet has changed
                new = torch.arange(0 if embeddings is None else past + 1, len(obs), device=device)
                new = embed_frames(rnet.embed, obs, depths, new, rnet.m)
                embeddings = new if embeddings is None else torch.cat([embeddings[-past - 1 :], new])
                cost = ksp_cost(
                    rnet, embeddings, ages[past + 1 :], args.k, args.tolerance, args.num_tolerance_samples,
                    args.cost_percentile,
                )  # fmt: skip
            total_rewards = total_rewards + args.cost_scale * (args.cost_bias - cost)  # Eq. 15, with a bias
            charts["sprl/cost_rate"] = (cost * torch.from_numpy(valid).to(device)).sum() / max(1, int(valid.sum()))

        # ADVANTAGE ###################################################################################################
        with torch.inference_mode():
            policy_obs = stack_frames(
                obs, depths, torch.full_like(every_env, row + 1), every_env, args.stack_observations
            )
            values[-1] = agent.get_action_and_value(policy_obs)[3]
        device_terminations = torch.from_numpy(terminations).to(device)
        dones = torch.from_numpy(terminations | truncations).to(device)
        advantages = gae(total_rewards, values, device_terminations, dones, args.gamma, args.gae_lambda)
        returns = advantages + values[:-1]

        # UPDATE POLICY ###############################################################################################
        b_logprobs, b_actions, b_advantages = logprobs.flatten(), actions.flatten(0, 1), advantages.flatten()
        b_returns, b_values = returns.flatten(), values[:-1].flatten()
        b_inds = np.flatnonzero(valid)  # no row that autoreset inserted; short rollouts may have no other
        clipfracs = []
        for _ in range(args.update_epochs if len(b_inds) else 0):
            np.random.shuffle(b_inds)
            for host_inds in np.array_split(b_inds, min(args.num_minibatches, len(b_inds))):
                mb_inds = torch.from_numpy(host_inds).to(device, non_blocking=True)
                mb_rows, mb_envs = past + mb_inds // args.num_envs, mb_inds % args.num_envs
                mb_obs = stack_frames(obs, depths, mb_rows, mb_envs, args.stack_observations)
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb_obs, b_actions[mb_inds])
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()
                with torch.no_grad():
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfracs.append(((ratio - 1.0).abs() > clip_coef).float().mean())

                mb_advantages = b_advantages[mb_inds]
                if args.norm_adv and len(host_inds) > 1:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                # Policy loss
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                # Value loss
                v_loss = (newvalue - b_returns[mb_inds]) ** 2
                if args.clip_vloss:
                    v_clipped = b_values[mb_inds] + (newvalue - b_values[mb_inds]).clamp(-clip_coef, clip_coef)
                    v_loss = torch.max(v_loss, (v_clipped - b_returns[mb_inds]) ** 2)
                v_loss = 0.5 * v_loss.mean()

                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef

                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], args.max_grad_norm)
                optimizer.step()
        if clipfracs:
            charts |= {
                "losses/value_loss": v_loss, "losses/policy_loss": pg_loss, "losses/entropy": entropy_loss,
                "losses/approx_kl": approx_kl, "losses/clipfrac": torch.stack(clipfracs).mean(),
                "losses/grad_norm": grad_norm,
                "losses/weight_norm": nn.utils.get_total_norm([part.detach() for part in agent.parameters()]),
            }  # fmt: skip

        # UPDATE RNET #################################################################################################
        if ring:
            ring.add(obs[past:-1], depths[past:-1], torch.from_numpy(ages[past:-1]).to(device))
        trainable = ring and ring.size > rnet.m and ring.size * args.num_envs >= args.rnet_start
        if trainable and global_step >= schedule.next_step:
            # accuracy on what the RNet has not trained on yet (Appendix B)
            newest = min(ring.unseen, 12_288 // args.num_envs, ring.size - rnet.m)  # a frame comes with the m before it
            if embeddings is not None:  # made for the cost by the same network, with one row more than the ring has
                newest = min(newest, len(embeddings) - 1)
            rows = ring.rows(newest)
            *triplets, count = sample_heldout(
                ring.ages[rows], args.k, args.tolerance, args.negative_bias, args.heldout_pairs
            )
            if int(count) > 0:
                with torch.inference_mode(), torch.autocast(device.type, enabled=device.type == "cuda"):
                    if embeddings is None:
                        unseen = embed_frames(rnet.embed, ring.frames, ring.depths, rows, rnet.m)
                    else:
                        unseen = embeddings[-newest - 1 : -1]
                    unseen = unseen.flatten(0, 1)
                    anchors, positives, negatives = (part * args.num_envs + triplets[3] for part in triplets[:3])
                    positive_logits = compare_pairs(rnet, unseen, anchors, positives)
                    negative_logits = compare_pairs(rnet, unseen, anchors, negatives)
                    charts["rnet/heldout_accuracy"] = rnet_accuracy(positive_logits, negative_logits)
            rows = ring.rows(ring.size - rnet.m)
            *triplets, count = sample_triplets(
                ring.ages[rows], args.k, args.negative_bias, args.positive_bias, args.negative_cap, args.rnet_triplets
            )
            triplets = torch.stack(triplets)[:, : int(count)]
            batch_accuracies = []
            rnet.train()
            for *mb_rows, mb_envs in triplets.split(args.rnet_batch_size, 1) if triplets.shape[1] else ():
                mb_frames = (stack_frames(ring.frames, ring.depths, rows[r], mb_envs, rnet.m) for r in mb_rows)
                positive_logits, negative_logits = rnet_logits(rnet, *mb_frames)
                loss = rnet_loss(positive_logits, negative_logits, args.label_smoothing)
                rnet_optimizer.zero_grad()
                loss.backward()
                rnet_optimizer.step()
                batch_accuracies.append(rnet_accuracy(positive_logits.detach(), negative_logits.detach()))
            rnet.eval()
            if batch_accuracies:
                batch_accuracies = torch.stack(batch_accuracies).tolist()
                charts |= {"rnet/train_accuracy": np.mean(batch_accuracies), "rnet/loss": loss}
                charts["rnet/grad_norm"] = nn.utils.get_total_norm([part.grad for part in rnet.parameters()])
                charts["rnet/weight_norm"] = nn.utils.get_total_norm([part.detach() for part in rnet.parameters()])
                embeddings, ring.unseen = None, 0
            schedule.trained(global_step, args.rnet_intervals, batch_accuracies, args.rnet_ready_accuracy)
            charts |= {"rnet/triplets": count, "rnet/ready": float(schedule.ready)}

        # LOG #########################################################################################################
        sps = (global_step - start_step) / (time.time() - start_time)
        charts |= {"charts/learning_rate": optimizer.param_groups[0]["lr"], "charts/SPS": sps}
        if finished_returns:
            recent.extend(finished_returns)
            charts |= {
                "charts/episodic_return": np.mean(finished_returns),
                "charts/episodic_length": np.mean(finished_lengths),
                "charts/success_rate": np.mean(np.array(finished_returns) > 0),
            }
        charts = {name: torch.as_tensor(value).item() for name, value in charts.items()}  # waits for the device
        log_charts(sinks, charts, global_step)
        broken = [f"{name} is {value}" for name, value in charts.items() if not np.isfinite(value)]
        if broken:  # then so are the networks: what they are now must not be saved
            fault, progress = f"{', '.join(broken)} at step {global_step}", None
            break
        names = {
            "return": "charts/episodic_return",
            "success": "charts/success_rate",
            "length": "charts/episodic_length",
        }
        names |= method_charts
        history.append({"step": global_step} | {key: charts[name] for key, name in names.items() if name in charts})
        shown = {key: row[key] for row in history[-10:] for key in names if key in row and key != "length"}
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            bar.set_postfix({key: f"{value:.2f}" for key, value in shown.items()}, refresh=False)
            bar.update(batch_size)

        # CHECKPOINT ##################################################################################################
        obs[: past + 1] = obs[-past - 1 :].clone()
        depths[: past + 1] = depths[-past - 1 :].clone()
        ages[: past + 1], states[: past + 1] = ages[-past - 1 :].copy(), states[-past - 1 :].copy()
        _, *numpy_rng = np.random.get_state()
        progress = {  # all that the next rollout will change, so that it can be left out when it is interrupted
            "script": script, "args": asdict(args), "versions": versions, "command": command, "iteration": iteration,
            "global_step": global_step, "elapsed": elapsed + time.time() - start_time, "history": history,
            "recent": list(recent), "worlds": envs.state_dict(), "next_obs": obs[past].clone(),
            "next_done": next_done.tolist(), "episode_returns": episode_returns.tolist(),
            "episode_lengths": episode_lengths.tolist(), "numpy_rng": [torch.from_numpy(numpy_rng[0]), *numpy_rng[1:]],
            "torch_rng": torch.get_rng_state(), "cuda_rng": torch.cuda.get_rng_state_all(),
            "wandb_id": wandb_id,
        }  # fmt: skip
        if args.save_ring:
            kept = [part[: past + 1].clone() for part in (obs, depths, torch.from_numpy(ages))]
            progress |= dict(zip(("past_obs", "past_depths", "past_ages"), kept))
        if global_step + batch_size > next_checkpoint:  # the next end of an iteration would be too late
            if save_checkpoint(progress, learned, f"{run_dir}/agent.pt") and "TensorBoard" not in sinks:
                with contextlib.suppress(OSError):  # there is room again
                    sinks["TensorBoard"] = TensorBoard(run_dir)
            next_checkpoint = global_step + args.checkpoint_interval

    with contextlib.suppress(OSError):
        bar.close()
    saved = True
    if progress:
        saved = save_checkpoint(progress, learned, f"{run_dir}/agent.pt")
        plot_curve(history, f"{method} on {args.env_id}, seed {args.seed}", f"{run_dir}/curve.png")
    envs.close()
    kept = os.path.exists(f"{run_dir}/agent.pt")
    if stop_signals:
        resume = shlex.join(["python", script, "--resume", f"{run_dir}/agent.pt"])
        resume = f", resume: {resume}" if kept else " before anything was learned"
        say(f"stopped by {signal.Signals(stop_signals[0]).name}{resume}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    say(
        f"{method} {args.env_id} seed {args.seed}: return {np.mean(recent or [0]):.3f}, success "
        f"{np.mean(np.array(recent or [0]) > 0):.2f} over the last {len(recent)} episodes, {global_step:,} steps in "
        f"{elapsed + time.time() - start_time:.0f} s, {peak:.1f} GB of memory at most"
        + f"; {run_dir}/agent.pt, {run_dir}/curve.png"
        * kept
    )
    if fault:
        resume = f"{run_dir}/agent.pt is the last good checkpoint" if kept else "no checkpoint was written yet"
        with contextlib.suppress(OSError):
            print(f"{script}: error: {fault}; {resume}", file=sys.stderr)
    for sink in sinks.values():
        with contextlib.suppress(Exception):  # all is saved by now
            sink.finish()
    if fault or not saved:
        sys.exit(1)
