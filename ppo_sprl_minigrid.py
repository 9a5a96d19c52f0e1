"""SPRL on MiniGrid: PPO whose reward is reduced by a k-shortest-path cost, judged by a learned reachability network.

Paper: "Shortest-Path Constrained Reinforcement Learning for Sparse Reward Tasks", Sohn, Lee et al., ICML 2021.

    python ppo_sprl_minigrid.py                                      # SPRL on FourRooms-7x7, minutes on a laptop
    python ppo_sprl_minigrid.py --env-id MiniGrid-KeyDoors-7x7-v0 --cost-scale 0    # the same code as plain PPO

Differences from the paper: cells are one-hot; learning rate, lambda and percentile are those that we measured best.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from filelock import FileLock
from matplotlib.figure import Figure
from minigrid.core.constants import OBJECT_TO_IDX
from minigrid.core.world_object import Door, Goal
from minigrid.envs import DoorKeyEnv, FourRoomsEnv
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ARGS ################################################################################################################
@dataclass
class Args:
    seed: int = 1  # of the networks, the sampling and the environments
    cuda: bool = True  # use CUDA if there is a CUDA device
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the large layers; auto: bf16 where it is fast, else fp32
    track: bool = False  # mirror the charts to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "sprl"  # the project in Weights & Biases
    run_name: str | None = None  # folder of this run below runs/ (default: environment, method, seed and time)
    checkpoint_interval: int = 100_000  # environment steps between checkpoints; one more at the end and on Ctrl-C
    capture_video: bool = False  # also a GIF of one episode at each interval, by analysis/evaluate.py
    resume: str | None = None  # path of an agent.pt to go on from; its settings hold unless a flag says otherwise

    # PPO
    env_id: str = "MiniGrid-FourRooms-7x7-v0"  # also KeyDoors, 11x11, or any registered MiniGrid world
    total_timesteps: int = 500_000  # environment steps of the experiment
    learning_rate: float = 0.003  # of the policy's Adam (paper's MiniGrid: 0.003, for SPRL 0.01)
    num_envs: int = 12  # parallel environments (authors' code: 12)
    num_steps: int = 256  # steps per environment and rollout (authors' code: 256)
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs over each rollout
    norm_adv: bool = True  # normalize the advantages in each minibatch
    clip_coef: float = 0.1  # clipping range of the policy ratio (authors' code: 0.1)
    anneal_clip: bool = True  # anneal the clipping range linearly to 0 (authors' code)
    clip_vloss: bool = True  # clip the value loss by the same range
    ent_coef: float = 0.01  # entropy bonus (paper's MiniGrid: 0.01)
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the policy's gradient
    max_episode_steps: int = 100  # time limit of an episode, a truncation (paper's MiniGrid: 100)
    encoding: Literal["onehot", "raw"] = "onehot"  # one-hot cell codes, or the paper's plain numbers divided by 10
    stack_observations: int = 0  # m: the policy also sees the last m observations (paper's MiniGrid: 0)

    # SPRL
    cost_scale: float = 0.01  # lambda, the weight of the k-SP cost; 0 is plain PPO (paper: 0.002)
    cost_bias: float = 0.0  # the reward becomes r + lambda * (bias - cost) (paper: 0)
    k: int = 2  # k of the k-SP constraint; RNet positives lie within k steps (paper: 2)
    tolerance: int = 1  # Delta t: how far apart the compared older states lie (paper: 1)
    num_tolerance_samples: int = 60  # N: s_t is compared with s_{t-(k+n*Delta t)}, n = 1..N (paper: 60)
    cost_percentile: float = 97.0  # the cost is 1 where this percentile of the N outputs exceeds 0.5 (paper: 90)
    rnet: Literal["learned", "oracle"] = "learned"  # the learned network, or the grid's own dynamics (GT-SPRL)
    ring_size: int = 60_000  # the RNet learns from the agent's last this many steps (paper's MiniGrid: 60K)
    negative_bias: int = 20  # Delta-: negatives lie at least k + Delta- steps after the anchor (paper: 20)
    positive_bias: int = 5  # Delta+: the next anchor lies 1..Delta+ steps after the positive (paper: 5)
    rnet_intervals: tuple[int, int, int] = (6_000, 12_000, 36_000)  # steps between RNet trainings: to 1M, to 2M, after
    rnet_start: int = 15_000  # steps in the ring before the first RNet training (authors' code: 30K)
    rnet_triplets: int = 2_500  # most triplets, two pairs each, of one RNet training (authors' code: 15K)
    rnet_batch_size: int = 128  # triplets per RNet minibatch (authors' code: 64)
    rnet_learning_rate: float = 1.5e-3  # of the RNet's Adam (authors' code: 3e-4)
    rnet_weight_decay: float = 1e-4  # L2 penalty of the RNet
    label_smoothing: float = 0.1  # of the RNet's loss (authors' code: 0.1)
    heldout_pairs: int = 15_000  # new pairs of each kind that measure the RNet's accuracy (paper's MiniGrid: 15K)
    rnet_reliable_accuracy: float = 0.75  # no cost until a heldout-out accuracy has passed this


SHOWN = ("charts/episodic_return", "charts/success_rate", "sprl/cost_rate", "rnet/heldout_accuracy")  # on bar and curve
MAY_BE_0 = ("seed", "stack_observations", "tolerance", "negative_bias", "rnet_start")  # other whole numbers: from 1
HIGHEST = {"gamma": 1, "gae_lambda": 1, "label_smoothing": 1, "rnet_reliable_accuracy": 1, "cost_percentile": 100}


def fail(message):
    """Ends the program as a wrong command line should: one line on stderr, exit code 2."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args(default):
    """The command line on top of the default settings. What is wrong with it is said in one line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            args = tyro.cli(Args, default=default)
    except SystemExit as end:
        if end.code:  # not --help; tyro draws a box
            fail(re.sub(r"[│╭╮╰╯─\s]+", " ", errors.getvalue()).strip())
        raise
    for name, value in vars(args).items():
        low, high = (1 if type(value) is int and name not in MAY_BE_0 else 0), HIGHEST.get(name, 2**31 - 1)
        if isinstance(value, (int, float)) and not low <= value <= high:
            fail(f"--{name.replace('_', '-')} {value} is out of range, accepted: {low} to {high}")
    return args


# ENVIRONMENT #########################################################################################################
class FourRooms(FourRoomsEnv):
    """Farama's FourRooms in the paper's sizes (its own is fixed to 19x19)."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = self.width = self.height = size


class KeyDoors(DoorKeyEnv):
    """Farama's DoorKey with the goal anywhere behind the door, as in the paper, and not always in the corner."""

    def _gen_grid(self, width, height):
        super()._gen_grid(width, height)
        door = next(i for i, cell in enumerate(self.grid.grid) if isinstance(cell, Door)) % width
        self.grid.set(width - 2, height - 2, None)
        self.place_obj(Goal(), top=(door + 1, 0), size=(width - door - 1, height))


for size in (7, 11):
    gym.register(f"MiniGrid-FourRooms-{size}x{size}-v0", FourRooms, kwargs={"size": size})
    gym.register(f"MiniGrid-KeyDoors-{size}x{size}-v0", KeyDoors, kwargs={"size": size})


class FullyObservable:
    """Mixed into a MiniGrid world: it shows the whole grid, encoded anew only when an object moved or changed."""

    _cells, _doors, _flags = None, (), ()

    def gen_obs(self):
        cells = self.grid.grid
        if self._cells != cells or self._flags != [(door.is_open, door.is_locked) for door in self._doors]:
            self._cells = cells.copy()
            self._doors = [cell for cell in cells if isinstance(cell, Door)]
            self._flags = [(door.is_open, door.is_locked) for door in self._doors]
            codes = [(OBJECT_TO_IDX["empty"], 0, 0) if cell is None else cell.encode() for cell in cells]
            self._image = np.array(codes, np.uint8).reshape(self.height, self.width, 3).swapaxes(0, 1)  # [x][y]
        image = self._image.copy()
        image[self.agent_pos[0], self.agent_pos[1]] = (OBJECT_TO_IDX["agent"], 0, self.agent_dir)
        return {"image": image, "direction": self.agent_dir, "mission": self.mission}


def make_world(env_id, max_episode_steps):
    """One world by its id, of a subclass that is fully observable."""
    world = gym.make(env_id, disable_env_checker=True).unwrapped
    world = type(type(world).__name__, (FullyObservable, type(world)), {})(**world.spec.kwargs)
    world.max_steps = max_episode_steps
    return world


class GridWorlds(gym.vector.VectorEnv):
    """num_envs MiniGrid worlds that show their last num_frames images, with the NEXT_STEP autoreset of gymnasium and
    EnvPool: the step after an episode's last ignores its action and returns the next episode's first observation."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, env_id, num_envs, num_frames, max_episode_steps):
        try:
            self.worlds = [make_world(env_id, max_episode_steps) for _ in range(num_envs)]
            self.worlds[0].reset(seed=0)
            self.num_envs, self.map_size = num_envs, (self.worlds[0].width, self.worlds[0].height)
        except Exception as error:  # gymnasium names ids that are close to an unknown one
            fail(f"--env-id {env_id}, accepted: any MiniGrid world, from a package as package:id ({error})")
        self.single_observation_space = gym.spaces.Box(0, 255, (num_frames, *self.map_size, 3), np.uint8)
        self.single_action_space = self.worlds[0].action_space
        self.frames = np.zeros((num_envs, *self.single_observation_space.shape), np.uint8)

    def reset(self, *, seed=None, options=None):
        for i, world in enumerate(self.worlds):
            gym.Env.reset(world, seed=None if seed is None else seed + i)  # seeds only, as SyncVectorEnv does
        self.done = np.ones(self.num_envs, bool)
        obs, *_, info = self.step(np.zeros(self.num_envs, int))
        return obs, info

    def step(self, actions):
        rewards = np.zeros(self.num_envs)
        terminations, truncations = np.zeros((2, self.num_envs), bool)
        for i, (world, action) in enumerate(zip(self.worlds, actions.tolist())):
            if self.done[i]:
                self.frames[i] = world.reset()[0]["image"]  # in all frames: no stack crosses an episode
            else:
                obs, rewards[i], terminations[i], truncations[i], _ = world.step(action)
                self.frames[i, :-1] = self.frames[i, 1:]
                self.frames[i, -1] = obs["image"]
        self.done = terminations | truncations
        info = {"position": np.array([world.agent_pos for world in self.worlds])}  # the true (x, y), for GT-Grid
        return self.frames.copy(), rewards, terminations, truncations, info

    def render(self):
        return self.worlds[0].get_frame(highlight=False, tile_size=32)


def make_envs(args):
    return GridWorlds(args.env_id, args.num_envs, 1 + args.stack_observations, args.max_episode_steps)


# AGENT ###############################################################################################################
class CellCodes(nn.Module):
    """The newest num_frames images (B, W, H, channels): their cells' one-hot codes, or the paper's plain numbers."""

    def __init__(self, encoding, num_frames):
        super().__init__()
        self.encoding, codes = encoding, (11, 6, 4)  # object types, colours, states (a door's 3, the agent's 4)
        self.num_frames, self.num_channels = num_frames, num_frames * (sum(codes) if encoding == "onehot" else 3)
        self.register_buffer("channel", torch.repeat_interleave(torch.arange(3), torch.tensor(codes)), persistent=False)
        self.register_buffer("code", torch.cat([torch.arange(n, dtype=torch.uint8) for n in codes]), persistent=False)

    def forward(self, obs):  # (B, frames, W, H, 3) uint8
        x = obs[:, -self.num_frames :].movedim(1, 3)  # (B, W, H, frames, 3)
        x = (x.index_select(-1, self.channel) == self.code).float() if self.encoding == "onehot" else x / 10
        return x.flatten(3)


class GridCNN(nn.Module):
    """The paper's MiniGrid trunk: three 2x2 SAME convolutions of 16, 8, 8 channels with CReLU after each."""

    def __init__(self, obs_shape, encoding):
        super().__init__()
        num_frames, width, height, _ = obs_shape
        self.codes = CellCodes(encoding, num_frames)
        channels = ((self.codes.num_channels, 16), (32, 8), (16, 8))
        self.convs = nn.ModuleList(layer_init(nn.Conv2d(*pair, 2)) for pair in channels)
        self.out_features = 16 * width * height
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):  # (B, frames, W, H, 3) uint8
        no_code = 255 if self.codes.encoding == "onehot" else 0
        obs = F.pad(obs, (0, 0, 0, 1, 0, 1), value=no_code)  # SAME pads an even kernel at the end; cheapest in uint8
        x = self.codes(obs).permute(0, 3, 1, 2)  # (B, C, W + 1, H + 1), channels_last in memory
        for i, conv in enumerate(self.convs):
            # CReLU, [relu(Wx), relu(-Wx)], without copies of the large Wx
            weight, bias = torch.cat([conv.weight, -conv.weight]), torch.cat([conv.bias, -conv.bias])
            x = F.conv2d(F.pad(x, (0, 1, 0, 1)) if i else x, weight, bias).relu_()
        return x.permute(0, 2, 3, 1).flatten(1)  # no copy in channels_last


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, network, out_features, num_actions):
        super().__init__()
        self.network, self.precision = network, contextlib.nullcontext()  # the heads are fp32 in every precision
        self.actor = layer_init(nn.Linear(out_features, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(out_features, 1), std=1)

    def get_action_and_value(self, obs, action=None):
        with self.precision:  # the same in rollout and update, or their ratio would be noise
            hidden = self.network(obs)
        hidden = hidden.float()
        probs = Categorical(logits=self.actor(hidden), validate_args=False)  # validating would wait for the device
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden).squeeze(-1)


def make_agent(envs, args):
    trunk = GridCNN(envs.single_observation_space.shape, args.encoding)
    network = nn.Sequential(trunk, layer_init(nn.Linear(trunk.out_features, 512)), nn.ReLU())
    return Agent(network, 512, int(envs.single_action_space.n))


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
class GridRNet(nn.Module):
    """Siamese network: can the late state be reached from the early one in at most k - 1 steps? The comparator's first
    layer is split, W [a; b] = W_early a + W_late b, and computed once per state (`embed`), not per pair (`compare`)."""

    def __init__(self, branch, dim, hidden=256):  # branch: observations -> (B, dim)
        super().__init__()
        self.branch = branch
        self.early = nn.Linear(dim, hidden)
        self.late = nn.Linear(dim, hidden, bias=False)
        self.late.weight.data = -self.early.weight.data  # begin with a difference, which learns sooner
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(hidden, 1))

    def embed(self, obs):  # (B, frames, W, H, 3) uint8 -> (B, 2, hidden): as the early and as the late state of a pair
        embedding = self.branch(obs)
        return torch.stack([self.early(embedding), self.late(embedding)], 1)

    def compare(self, early, late):  # (..., hidden), (..., hidden) -> (...) logits
        return self.head(early + late).squeeze(-1)


def make_rnet(envs, args):
    codes, (_, width, height, _) = CellCodes("onehot", num_frames=1), envs.single_observation_space.shape
    linear = layer_init(nn.Linear(codes.num_channels * width * height, 128))
    return GridRNet(nn.Sequential(codes, nn.Flatten(), linear, nn.ReLU()), 128)


@torch.inference_mode()
def embed_all(rnet, obs, chunk=256):
    """Embeddings (T, N, ...) of observations (T, N, ...), by chunks that stay in the cache."""
    return torch.cat([rnet.embed(part) for part in obs.flatten(0, 1).split(chunk)]).unflatten(0, obs.shape[:2])


@torch.inference_mode()
def compare_all(rnet, embeddings, early, late, chunk=2_048):
    """Logits of pairs of embeddings (T, N, 2, ...), given as numbers t * N + n, by chunks that stay in the cache."""
    as_early, as_late = embeddings.flatten(0, 1).unbind(1)
    pairs = zip(early.split(chunk), late.split(chunk))
    return torch.cat([rnet.compare(as_early.index_select(0, i), as_late.index_select(0, j)) for i, j in pairs]).float()


def rnet_loss(rnet, anchors, positives, negatives, label_smoothing):
    """Eq. 20, -log R(anc, +) - log(1 - R(anc, -)), with smoothed labels; and the accuracy."""
    embeddings = rnet.embed(torch.cat([anchors, positives, negatives]))
    early, late = embeddings[: len(anchors), 0], embeddings[len(anchors) :, 1]
    logits = rnet.compare(torch.cat([early, early]), late).float()  # one batch: BatchNorm must see both kinds
    is_positive = torch.arange(len(logits), device=logits.device) < len(anchors)
    labels = torch.where(is_positive, 1 - label_smoothing / 2, label_smoothing / 2)
    accuracy = ((logits > 0) == is_positive).float().mean()
    return 2 * F.binary_cross_entropy_with_logits(logits, labels), accuracy


class Ring:
    """The last states of each environment. `segment_steps` counts a state's steps since its segment began; a segment is
    cut at an episode's start and after a non-zero reward, and no pair ever crosses a cut."""

    def __init__(self, num_rows, obs):  # obs (T, N, ...) as they will be added
        self.obs = obs.new_zeros((num_rows, *obs.shape[1:]))
        self.segment_steps = np.zeros(self.obs.shape[:2], np.int64)  # on the host, where pairs are drawn
        self.head = self.size = 0  # next row to write, rows that can be read

    def add(self, obs, segment_steps):
        rows = (self.head + np.arange(len(obs))) % len(self.obs)
        self.obs[rows], self.segment_steps[rows] = obs, segment_steps
        self.head = (self.head + len(obs)) % len(self.obs)
        self.size = min(self.size + len(obs), len(self.obs))

    def rows(self, newest):  # of the newest states, oldest first
        return (self.head - newest + np.arange(newest)) % len(self.obs)


def segment_ends(segment_steps):
    """For each state (T, N), oldest first, the row of the last state of its segment."""
    is_last = np.append(segment_steps[1:] == 0, np.ones_like(segment_steps[:1], bool), 0)
    rows = np.arange(len(segment_steps))[:, None]
    return np.minimum.accumulate(np.where(is_last, rows, len(rows))[::-1])[::-1]


def sample_triplets(segment_steps, k, negative_bias, positive_bias):
    """Algorithm 1, a walk in all segments at once: anchors, positives, negatives, environments (4, B), shuffled."""
    anchors, envs = np.append(np.ones_like(segment_steps[:1], bool), segment_steps[1:] == 0, 0).nonzero()
    ends, triplets = segment_ends(segment_steps)[anchors, envs], [np.zeros((4, 0), np.int64)]
    while len(anchors):
        nearest = anchors + k + negative_bias
        positives = anchors + np.random.randint(1, k + 1, len(anchors))
        negatives = np.random.randint(nearest, np.maximum(ends, nearest) + 1)
        triplets.append(np.stack([anchors, positives, negatives, envs])[:, nearest <= ends])
        anchors = positives + np.random.randint(1, positive_bias + 1, len(anchors))
        walking = anchors <= ends
        anchors, envs, ends = anchors[walking], envs[walking], ends[walking]
    triplets = np.concatenate(triplets, 1)
    return triplets[:, np.random.permutation(triplets.shape[1])]


def sample_heldout(segment_steps, k, tolerance, negative_bias, num_pairs):
    """Appendix B's validation pairs: positives from [t+1, t+k+Dt], then as many negatives from [t+k+Dt+D-, t+k+Dt+2D-].
    The early and the late states (2, B) as numbers t * N + n."""
    ends, near = segment_ends(segment_steps), k + tolerance
    anchors, envs = (np.arange(len(ends))[:, None] + near + negative_bias <= ends).nonzero()
    pick = np.random.randint(0, len(anchors), num_pairs if len(anchors) else 0)
    anchors, envs, nearest = anchors[pick], envs[pick], anchors[pick] + near + negative_bias
    positives = np.random.randint(anchors + 1, anchors + near + 1)
    negatives = np.random.randint(nearest, np.minimum(nearest + negative_bias, ends[anchors, envs]) + 1)
    pairs = np.stack([np.append(anchors, anchors), np.append(positives, negatives)])
    return pairs * ends.shape[1] + np.append(envs, envs)


# INTRINSIC REWARD ####################################################################################################
def ksp_cost(rnet, embeddings, segment_steps, gaps, percentile):
    """The k-SP cost (T, N) of the newest T states: c_t = I[ percentile over n = 1..N of
    Rnet_{k-1}(s_{t-(k+n*Dt)}, s_t) > 0.5 ], Eq. 18 for N = 1. A pair counts as 0 unless both states are in one segment:
    the older lies gap = k + n*Dt steps back, and the state must have made that many steps in its segment."""
    (num_steps, num_envs), device = segment_steps.shape, embeddings.device
    steps, envs, samples = (segment_steps[..., None] >= gaps).nonzero()  # on the host: nothing waits for the device
    late = (len(embeddings) - num_steps + steps) * num_envs + envs
    slots = (steps * num_envs + envs) * len(gaps) + samples
    early, late, slots = torch.from_numpy(np.stack([late - gaps[samples] * num_envs, late, slots])).to(device)
    scores = torch.zeros(num_steps * num_envs * len(gaps), device=device)
    scores[slots] = compare_all(rnet, embeddings, early, late).sigmoid()
    return (scores.view(num_steps, num_envs, len(gaps)).quantile(percentile / 100, -1) > 0.5).float()


# CHECKPOINTS #########################################################################################################
def save_checkpoint(path, learned, **progress):
    """Writes beside the old file and renames, so that there is a whole checkpoint at every moment."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(progress | {name: part.state_dict() for name, part in learned.items()}, file)
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path, learned):
    """Fills what is learned; returns settings, command, global_step and history. Runs no code of the file."""
    try:
        if os.path.basename(path) != "agent.pt" or zipfile.ZipFile(path).testzip():
            raise ValueError("another name, or damaged")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in learned.items():
            part.load_state_dict(checkpoint[name])
        args = Args(**{**checkpoint["args"], "resume": path, "track": False})  # only a flag starts W&B
        return args, checkpoint["command"], checkpoint["global_step"], checkpoint["history"]
    except Exception as error:
        fail(f"--resume {path}, accepted: a whole agent.pt of this script and these settings ({error!r:.200})")


def plot_curve(history, path):
    """Draws the charts that tell how a run went: their points, and the mean over ten of them."""
    names = [name for name in SHOWN if any(name in row for row in history)]
    figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        points = np.array([(row["step"], row[name]) for row in history if name in row])
        axis.plot(*points.T, ".", alpha=0.3)
        axis.plot(*np.transpose([points[max(0, i - 9) : i + 1].mean(0) for i in range(len(points))]))
        axis.set(title=name.split("/")[1].replace("_", " "), xlabel="steps", ylim=(min(0, *points[:, 1]), None))
    figure.savefig(path)


if __name__ == "__main__":
    # SETUP ###########################################################################################################
    sys.stderr = sys.stderr or open(os.devnull, "w")  # it is None after 2>&-
    script, global_step, history = os.path.basename(__file__), 0, []
    command = shlex.join(["python", script, *sys.argv[1:]])
    args = parse_args(Args())
    if args.resume is not None:
        old_args, command, global_step, history = load_checkpoint(args.resume, {})
        args = parse_args(old_args)
    method = ("sprl" if args.rnet == "learned" else "gt-sprl") if args.cost_scale else "ppo"
    batch_size = args.num_envs * args.num_steps
    num_iterations = max(1, args.total_timesteps // batch_size)
    seed = args.seed + 1_000 * (global_step // batch_size)  # a resumed run must not repeat its first episodes
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    if args.precision == "auto":
        fast = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
        args.precision = "bf16" if fast else "fp32"

    envs = make_envs(args)
    agent = make_agent(envs, args).to(device)
    agent.precision = bf16 = torch.autocast(device.type, torch.bfloat16, args.precision == "bf16")
    embed_all, compare_all, rnet_loss = bf16(embed_all), bf16(compare_all), bf16(rnet_loss)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    learned = {"agent": agent, "optimizer": optimizer}  # what a checkpoint holds
    gaps = args.k + args.tolerance * np.arange(1, args.num_tolerance_samples + 1)  # a cost looks that many steps back
    window = int(gaps[-1])
    rnet = ring = None
    if method == "sprl":
        rnet = make_rnet(envs, args).to(device).eval()
        rnet_optimizer = torch.optim.Adam(rnet.parameters(), fused=True)  # its rate is set where it trains
        learned |= {"rnet": rnet, "rnet_optimizer": rnet_optimizer}
    elif method == "gt-sprl":
        from analysis.oracle import Oracle

        envs = rnet = Oracle(envs, args.k - 1, window)  # the worlds, which know what is reachable in them
    next_rnet_step, empty_trainings = global_step + args.rnet_start, 0  # a resumed run fills its ring first

    args.run_name = re.sub(r"[^\w.-]", "-", args.run_name or f"{args.env_id}__{method}__{seed}__{int(time.time())}")
    run_dir = os.path.dirname(args.resume) or "." if args.resume else f"runs/{args.run_name}"
    try:
        os.makedirs(run_dir, exist_ok=bool(args.resume))
        lock = FileLock(f"{run_dir}/lock", timeout=0).acquire()  # for as long as this process lives
    except OSError as error:
        fail(f"--run-name or --resume: {run_dir}, accepted: a new one, or to resume one without a live run ({error})")
    if args.resume:  # once more: now nobody else can write it
        *_, global_step, history = load_checkpoint(args.resume, learned)
    folder = os.path.dirname(os.path.abspath(__file__))
    commit = subprocess.getoutput(f"git -C {shlex.quote(folder)} describe --always --dirty --exclude=*")  # or an error
    origin = {"script": script, "command": command, "commit": commit, "args": asdict(args)}
    if args.track:
        import wandb

        names = dict(name=args.run_name, id=args.run_name, resume="allow", group=args.env_id, job_type=method)
        wandb.init(project=args.wandb_project_name, config=asdict(args), sync_tensorboard=True, save_code=True, **names)
    writer = SummaryWriter(run_dir, purge_step=global_step + 1 if args.resume else None)

    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    obs = torch.from_numpy(np.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), obs_space.dtype)).to(device)
    logprobs = torch.zeros((args.num_steps, args.num_envs), device=device)
    values = torch.zeros((args.num_steps + 1, args.num_envs), device=device)
    rewards = np.zeros((args.num_steps, args.num_envs), np.float32)
    actions = torch.from_numpy(np.zeros((*rewards.shape, *action_space.shape), action_space.dtype)).to(device)
    terminations, truncations, valid = np.zeros((3, args.num_steps, args.num_envs), bool)  # valid: not a reset's row
    segment_steps = np.zeros((args.num_steps + 1, args.num_envs), np.int64)  # since an episode's start or last reward
    episode_returns, episode_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, np.int64)
    next_done = np.zeros(args.num_envs, bool)
    obs[-1] = torch.from_numpy(envs.reset(seed=seed)[0])  # a rollout begins where the last one ended
    if method == "sprl":
        ring = Ring(max(args.ring_size // args.num_envs, args.num_steps, window + 1), obs)
        ring.add(obs[-1:], segment_steps[-1:])
    if rnet:
        embeddings = torch.cat(window * [embed_all(rnet, obs[-1:])])  # no pair has any but the last
    failure, start_time, start_step = None, time.time(), global_step
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, as Ctrl-C does
    try:
        print(f"{method} on {args.env_id} ({device}, {args.precision}), writing to {run_dir}", file=sys.stderr)
        iterations = range(global_step // batch_size + 1, num_iterations + 1)
        bar = tqdm(iterations, initial=iterations.start - 1, total=num_iterations, unit="step", unit_scale=batch_size)
        for iteration in bar:
            frac = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate if args.anneal_lr else args.learning_rate
            clip_coef = frac * args.clip_coef if args.anneal_clip else args.clip_coef
            charts, finished_returns, finished_lengths = {}, [], []

            # ROLLOUT #################################################################################################
            obs[0] = obs[-1]
            segment_steps[0] = segment_steps[-1]
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):  # bf16 weights are cast once
                for step in range(args.num_steps):
                    action, logprobs[step], _, values[step] = agent.get_action_and_value(obs[step])
                    next_obs, reward, terminations[step], truncations[step], info = envs.step(action.cpu().numpy())
                    actions[step] = action
                    obs[step + 1] = torch.from_numpy(next_obs).to(device, non_blocking=True)
                    valid[step], rewards[step] = ~next_done, reward
                    next_done = terminations[step] | truncations[step]
                    segment_steps[step + 1] = np.where(valid[step] & (reward == 0), segment_steps[step] + 1, 0)
                    episode_returns = np.where(valid[step], episode_returns + reward, 0.0)
                    episode_lengths = np.where(valid[step], episode_lengths + 1, 0)
                    finished_returns += episode_returns[next_done].tolist()
                    finished_lengths += episode_lengths[next_done].tolist()

            # INTRINSIC REWARD ########################################################################################
            total_rewards = torch.from_numpy(rewards).to(device)
            rnet_is_reliable = any(row.get("rnet/heldout_accuracy", 0) > args.rnet_reliable_accuracy for row in history)
            if rnet:  # each state is embedded once, and once more when the RNet has changed
                embeddings = torch.cat([embeddings[-window:], embed_all(rnet, obs[1:])])  # (window + T, N, 2, ...)
                cost = ksp_cost(rnet, embeddings, segment_steps[1:], gaps, args.cost_percentile)
                charts["sprl/cost_rate"] = (cost * torch.from_numpy(valid).to(device)).sum() / valid.sum()
            if rnet and (rnet_is_reliable or method == "gt-sprl"):
                total_rewards = total_rewards + args.cost_scale * (args.cost_bias - cost)  # Eq. 15, with a bias

            # ADVANTAGE ###############################################################################################
            with torch.inference_mode():
                values[-1] = agent.get_action_and_value(obs[-1])[3]
            ends = torch.from_numpy(np.stack([terminations, terminations | truncations])).to(device)
            advantages = gae(total_rewards, values, *ends, args.gamma, args.gae_lambda)
            returns = advantages + values[:-1]

            # UPDATE POLICY ###########################################################################################
            b_obs, b_actions, b_logprobs = obs[:-1].flatten(0, 1), actions.flatten(0, 1), logprobs.flatten()
            b_advantages, b_returns, b_values = advantages.flatten(), returns.flatten(), values[:-1].flatten()
            b_inds, clipfracs = np.flatnonzero(valid), []  # no row that autoreset inserted
            for _ in range(args.update_epochs):
                np.random.shuffle(b_inds)
                for mb_inds in np.array_split(b_inds, args.num_minibatches):
                    mb_inds = torch.from_numpy(mb_inds).to(device, non_blocking=True)
                    _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
                    logratio = newlogprob - b_logprobs[mb_inds]
                    ratio = logratio.exp()
                    with torch.no_grad():
                        old_approx_kl = (-logratio).mean()
                        approx_kl = ((ratio - 1) - logratio).mean()
                        clipfracs.append(((ratio - 1.0).abs() > clip_coef).float().mean())

                    mb_advantages = b_advantages[mb_inds]
                    if args.norm_adv:
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
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
            charts |= {"losses/policy_loss": pg_loss, "losses/value_loss": v_loss, "losses/entropy": entropy_loss}
            charts |= {"losses/approx_kl": approx_kl, "losses/clipfrac": torch.stack(clipfracs).mean()}
            unexplained = b_advantages[b_inds].var() / b_returns[b_inds].var().clamp(min=1e-8)
            charts |= {"losses/old_approx_kl": old_approx_kl, "losses/explained_variance": 1 - unexplained}
            charts |= {"losses/grad_norm": grad_norm, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
            global_step += batch_size

            # UPDATE RNET #############################################################################################
            if ring:
                ring.add(obs[1:], segment_steps[1:])
            if ring and global_step >= next_rnet_step:
                held = sample_heldout(segment_steps[1:], args.k, args.tolerance, args.negative_bias, args.heldout_pairs)
                if held.shape[1]:  # of the newest rollout, which the RNet has not trained on yet (Appendix B)
                    early, late = torch.from_numpy(held).to(device)
                    near, far = compare_all(rnet, embeddings[-args.num_steps :], early, late).chunk(2)
                    charts["rnet/heldout_accuracy"] = torch.cat([near > 0, far <= 0]).float().mean()

                rows = ring.rows(ring.size)
                triplets = sample_triplets(ring.segment_steps[rows], args.k, args.negative_bias, args.positive_bias)
                triplets, accuracies = triplets[:, : args.rnet_triplets], []
                triplets[:3] = rows[triplets[:3]]
                rnet_optimizer.param_groups[0] |= dict(lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay)
                if triplets.shape[1]:
                    rnet.train()
                    for mb_triplets in torch.from_numpy(triplets).to(device).split(args.rnet_batch_size, 1):
                        mb_obs = ring.obs[mb_triplets[:3], mb_triplets[3]]  # anchors, positives, negatives: (3, B, ...)
                        loss, accuracy = rnet_loss(rnet, *mb_obs, args.label_smoothing)
                        rnet_optimizer.zero_grad()
                        loss.backward()
                        rnet_optimizer.step()
                        accuracies.append(accuracy)
                    rnet.eval()
                    charts |= {"rnet/loss": loss, "rnet/train_accuracy": torch.stack(accuracies).mean()}
                    embeddings = embed_all(rnet, ring.obs[ring.rows(window)])
                charts["rnet/triplets"] = triplets.shape[1]
                empty_trainings = 0 if triplets.shape[1] else empty_trainings + 1
                if empty_trainings == 5:
                    print("\nno triplets in 5 RNet trainings: too dense rewards or too short episodes", file=sys.stderr)
                next_rnet_step = global_step + args.rnet_intervals[min(global_step // 1_000_000, 2)]

            # LOG #####################################################################################################
            charts["charts/SPS"] = (global_step - start_step) / (time.time() - start_time)
            if finished_returns:
                charts["charts/episodic_return"] = np.mean(finished_returns)
                charts["charts/episodic_length"] = np.mean(finished_lengths)
                charts["charts/success_rate"] = np.mean(np.array(finished_returns) > 0)
            charts = {name: torch.as_tensor(value).item() for name, value in charts.items()}  # waits for the device
            for name, value in charts.items():
                writer.add_scalar(name, value, global_step)
                if not np.isfinite(value):  # then the networks may be ruined: they must not be saved
                    sys.exit(f"error: {name} is {value} at step {global_step}, nothing of this iteration is saved")
            history.append({"step": global_step, **charts})
            bar.set_postfix({name.split("/")[1]: row[name] for row in history[-10:] for name in SHOWN if name in row})

            # CHECKPOINT ##############################################################################################
            if global_step % args.checkpoint_interval < batch_size or iteration == num_iterations:
                save_checkpoint(f"{run_dir}/agent.pt", learned, **origin, global_step=global_step, history=history)
                if args.capture_video:
                    evaluate = f"{folder}/analysis/evaluate.py", f"{run_dir}/agent.pt", "--script", __file__
                    subprocess.run([sys.executable, *evaluate, "--episodes=1", f"--video={run_dir}/{global_step}.gif"])
                if args.track and os.path.exists(f"{run_dir}/{global_step}.gif"):
                    wandb.log({"video": wandb.Video(f"{run_dir}/{global_step}.gif")})
    except (KeyboardInterrupt, OSError) as error:  # Ctrl-C or SIGTERM; a closed terminal, a full disk
        failure = error

    sys.tracebacklimit = 0  # what fails from here on, or a second Ctrl-C, ends it with one line
    if all(weight.isfinite().all() for weight in agent.parameters()):  # a stop may come before LOG has looked
        save_checkpoint(f"{run_dir}/agent.pt", learned, **origin, global_step=global_step, history=history)
    returns = [row["charts/episodic_return"] for row in history if "charts/episodic_return" in row][-10:]
    outcome = f"return {np.mean(returns):.3f}" if returns else "no episode has ended"
    print(f"\n{'stopped' if failure else 'done'} at step {global_step:,}, {outcome}, see {run_dir}", file=sys.stderr)
    envs.close()
    writer.close()
    if returns:
        plot_curve(history, f"{run_dir}/curve.png")
    if isinstance(failure, OSError):
        raise failure
