"""SPRL on MiniGrid: PPO whose reward is reduced by a k-shortest-path cost, judged by a learned reachability network.

Paper: "Shortest-Path Constrained Reinforcement Learning for Sparse Reward Tasks", Sohn, Lee et al., ICML 2021.

    python ppo_sprl_minigrid.py                                      # SPRL on FourRooms-7x7, minutes on a laptop
    python ppo_sprl_minigrid.py --env-id MiniGrid-KeyDoors-7x7-v0 --cost-scale 0    # the same code as plain PPO

Differences from the paper. Cells are fed as one-hot codes (`--encoding raw` for the plain numbers); the defaults of the
learning rate, of lambda and of the percentile are what we measured to work best (README; the docstrings name the
paper's values); a time limit bootstraps; the RNet's MiniGrid architecture is not in the paper: its branch is the
policy's convolutions.
"""

import contextlib
import difflib
import io
import itertools
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

import gymnasium as gym
import minigrid
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium.envs.registration import load_env_creator
from minigrid.core.constants import OBJECT_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.world_object import Door, Goal
from minigrid.envs import DoorKeyEnv, DynamicObstaclesEnv, FourRoomsEnv
from minigrid.minigrid_env import MiniGridEnv
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
    env_id: str = "MiniGrid-FourRooms-7x7-v0"
    """MiniGrid-{FourRooms,KeyDoors}-{7x7,11x11}-v0, MiniGrid-NineRooms-v0 or any id of the minigrid package"""
    total_timesteps: int = 500_000
    """total environment steps of the experiment"""
    learning_rate: float = 0.003
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
    max_episode_steps: int = 100
    """time limit of an episode, a truncation (paper: MiniGrid 100, Fetch 50, Atari 10,000; DMLab's is its own)"""
    encoding: Literal["onehot", "raw"] = "onehot"
    """network input: one-hot cell codes, or the paper's plain numbers divided by 10"""
    stack_observations: int = 0
    """m: the policy sees the last m observations besides the current one (paper: 0 is best; Atari 3)"""

    # SPRL
    cost_scale: float = 0.01
    """lambda, the weight of the k-SP cost; 0 is plain PPO (paper: MiniGrid 0.002, DMLab 0.06, Atari and Fetch 0.05)"""
    cost_bias: float = 0.0
    """the reward becomes r + lambda * (bias - cost) (paper: 0, Fetch 1; authors' DMLab code: 0.5)"""
    k: int = 2
    """k of the k-SP constraint; RNet positives lie within k steps (paper: MiniGrid 2, DMLab and Fetch 10, Atari 12)"""
    tolerance: int = 1
    """Delta t: how far apart the compared older states lie, >= 0 (paper: 1)"""
    num_tolerance_samples: int = 60
    """N: s_t is compared with s_{t-(k+n*Delta t)}, n = 1..N (paper: MiniGrid 60, DMLab and Atari 200, Fetch 20)"""
    cost_percentile: float = 97.0
    """the cost is 1 where this percentile of the N outputs exceeds 0.5 (paper: 90)"""
    rnet: Literal["learned", "oracle"] = "learned"
    """judge reachability by the learned network, or by the grid's own dynamics (GT-SPRL, Appendix B)"""
    ring_size: int = 60_000
    """the RNet learns from the agent's last this many steps (paper: MiniGrid and DMLab 60K, Atari and Fetch 30K)"""
    negative_bias: int = 20
    """Delta-: negatives lie at least k + Delta- steps after the anchor (paper: 20; Atari 80, Fetch 12)"""
    positive_bias: int = 5
    """Delta+: the next anchor lies 1..Delta+ steps after the positive (paper: 5)"""
    negative_cap: bool = False
    """draw negatives from the first 10 % beyond k + Delta- (authors' code) and not up to the segment's end (paper)"""
    rnet_intervals: tuple[int, int, int] = (6_000, 12_000, 36_000)
    """steps between RNet trainings in the first 1M steps, the next 1M, then (paper: 6K, 12K, 36K; Atari 6K, 150K)"""
    rnet_start: int = 15_000
    """steps in the ring before the first RNet training (authors' code: 15K)"""
    rnet_triplets: int = 2_500
    """most triplets, two pairs each, of one RNet training (authors' code: 15K, one epoch)"""
    rnet_batch_size: int = 64
    """triplets per RNet minibatch (authors' code: 64)"""
    rnet_learning_rate: float = 1e-3
    """learning rate of the RNet's Adam (authors' code: 3e-4)"""
    rnet_weight_decay: float = 1e-4
    """L2 penalty of the RNet (authors' DMLab code: 1e-4), on Atari decoupled weight decay (paper: 0.03)"""
    label_smoothing: float = 0.1
    """label smoothing of the RNet's loss (authors' code: 0.1)"""
    heldout_pairs: int = 15_000
    """pairs of each kind that measure the RNet's accuracy before it trains on them (paper: 15K; Atari, Fetch 7,500)"""
    rnet_ready_accuracy: float = 0.75
    """the cost is 0 until the mean of the last 20 training accuracies passes this (authors' code: 0.75)"""


RANGES = {  # what check_args accepts: (lowest, highest)
    (1, 2**31 - 1): "total_timesteps num_steps num_minibatches update_epochs k num_tolerance_samples ring_size "
    "positive_bias rnet_triplets rnet_batch_size rnet_intervals heldout_pairs",
    (1, 10**7): "max_episode_steps",
    (1, 2**16): "num_envs",
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


class NineRooms(FourRooms):
    """3x3 rooms with a gap in every wall between two of them (paper, section 6.6)."""

    def _gen_grid(self, width, height):
        self.grid = Grid(width, height)
        self.grid.wall_rect(0, 0, width, height)
        side = (width - 1) // 3
        for wall in (side, 2 * side):
            self.grid.vert_wall(wall, 0)
            self.grid.horz_wall(0, wall)
        for wall in (side, 2 * side):
            for corner in (0, side, 2 * side):
                self.grid.set(wall, self._rand_int(corner + 1, corner + side), None)
                self.grid.set(self._rand_int(corner + 1, corner + side), wall, None)
        self.place_agent()
        self.place_obj(Goal())


WORLDS = {
    "MiniGrid-FourRooms-7x7-v0": partial(FourRooms, size=7),
    "MiniGrid-FourRooms-11x11-v0": partial(FourRooms, size=11),
    "MiniGrid-KeyDoors-7x7-v0": partial(KeyDoors, size=7),
    "MiniGrid-KeyDoors-11x11-v0": partial(KeyDoors, size=11),
    "MiniGrid-NineRooms-v0": partial(NineRooms, size=13),
}


class FullyObservable:
    """Mixed into a Farama environment: it shows the whole grid, encoded anew only when an object moved or changed."""

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


def make_world(env_id, **kwargs):
    """One environment by its id, made fully observable by subclassing whatever class Farama registered."""
    if env_id in WORLDS:
        cls, kwargs = WORLDS[env_id].func, {**WORLDS[env_id].keywords, **kwargs}
    else:
        known = [i for i, spec in gym.registry.items() if str(spec.entry_point).startswith("minigrid")] + list(WORLDS)
        if env_id not in known:
            close = difflib.get_close_matches(env_id, known, n=3, cutoff=0.4)
            fail(f"--env-id {env_id} is unknown, close: {', '.join(close) or 'none'}; all: {', '.join(sorted(known))}")
        spec = gym.spec(env_id)
        cls, kwargs = load_env_creator(spec.entry_point), {**spec.kwargs, **kwargs}
    return type(cls.__name__, (FullyObservable, cls), {})(**kwargs)


class GridWorlds(gym.vector.VectorEnv):
    """num_envs MiniGrid worlds with the NEXT_STEP autoreset of gymnasium and EnvPool: the step after an episode's last
    ignores its action and returns the next episode's first observation with reward 0."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    resumable, reward_range = True, (-1, 1)

    def __init__(self, env_id, num_envs, max_episode_steps):
        try:
            self.worlds = [make_world(env_id, max_steps=max_episode_steps) for _ in range(num_envs)]
            self.worlds[0].reset(seed=0)
        except FileNotFoundError as error:  # the wheel of minigrid lacks the patterns of its WFC worlds
            fail(f"--env-id {env_id} cannot be built: {error}")
        self.num_envs = num_envs
        shape = (self.worlds[0].width, self.worlds[0].height, 3)
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.single_action_space = self.worlds[0].action_space
        self.map_size = shape[:2]
        self.done = np.zeros(num_envs, bool)

    def _begin(self, i):
        """Starts world i's next episode and notes what rebuilds it: the random state before, the actions since."""
        self.rng_states[i], self.actions[i] = self.worlds[i].np_random.bit_generator.state, []
        return self.worlds[i].reset()[0]["image"]

    def reset(self, *, seed=None, options=None):
        self.rng_states, self.actions = [None] * self.num_envs, [None] * self.num_envs
        self.done[:] = False
        for i, world in enumerate(self.worlds):
            gym.Env.reset(world, seed=None if seed is None else seed + i)  # seeds only, as SyncVectorEnv does
        return np.stack([self._begin(i) for i in range(self.num_envs)]), {}

    def step(self, actions):
        obs = np.empty((self.num_envs, *self.single_observation_space.shape), np.uint8)
        rewards = np.zeros(self.num_envs)
        terminations, truncations = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for i, (world, action) in enumerate(zip(self.worlds, actions.tolist())):
            if self.done[i]:
                obs[i] = self._begin(i)
            else:
                self.actions[i].append(action)
                image, rewards[i], terminations[i], truncations[i], _ = world.step(action)
                obs[i] = image["image"]
        self.done = terminations | truncations
        return obs, rewards, terminations, truncations, {}

    def state_dict(self):
        actions = [list(actions) for actions in self.actions]
        return {"rng_states": list(self.rng_states), "actions": actions, "done": self.done.tolist()}

    def play_back(self, state):
        """Brings every world back to where it was: same random state, same actions, by Farama's own rules. All arrive
        together; yields how many steps are left."""
        self.reset()
        for left in range(max(map(len, state["actions"])), -1, -1):
            for i, (world, actions) in enumerate(zip(self.worlds, state["actions"])):
                if len(actions) == left:
                    world.np_random.bit_generator.state = state["rng_states"][i]
                    self._begin(i)
                elif len(actions) > left:
                    world.step(actions[-left - 1])
            yield left
        self.actions, self.done = [list(actions) for actions in state["actions"]], np.array(state["done"])

    def load_state_dict(self, state):
        for _ in self.play_back(state):
            pass

    def learning_rewards(self, rewards, valid):
        """What the agent learns from, of the rewards (T, N) as they came."""
        return rewards

    def positions(self):
        """The agents' true (x, y), (N, 2), within map_size."""
        return np.array([world.agent_pos for world in self.worlds])

    def render(self):
        return self.worlds[0].get_frame(highlight=False, tile_size=32)


def make_envs(args):
    return GridWorlds(args.env_id, args.num_envs, args.max_episode_steps)


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
class GridCNN(nn.Module):
    """The paper's MiniGrid trunk: three 2x2 SAME convolutions of 16, 8, 8 channels with CReLU after each."""

    def __init__(self, obs_shape, encoding, num_frames=1):
        super().__init__()
        width, height, _ = obs_shape
        codes = (11, 6, 4)  # object types, colours, states (doors have 3, the agent's direction 4)
        self.encoding = encoding
        self.register_buffer("channel", torch.repeat_interleave(torch.arange(3), torch.tensor(codes)), persistent=False)
        self.register_buffer("code", torch.cat([torch.arange(n, dtype=torch.uint8) for n in codes]), persistent=False)
        in_channels = num_frames * (sum(codes) if encoding == "onehot" else 3)
        self.convs = nn.ModuleList(
            layer_init(nn.Conv2d(inputs, outputs, 2, padding=1))
            for inputs, outputs in ((in_channels, 16), (32, 8), (16, 8))
        )
        self.out_features = 16 * width * height
        self.to(memory_format=torch.channels_last)

    def forward(self, obs):  # (B, frames, W, H, 3) uint8
        x = obs.movedim(1, 3)  # (B, W, H, frames, 3)
        x = (x.index_select(-1, self.channel) == self.code).float() if self.encoding == "onehot" else x / 10
        x = x.flatten(3).permute(0, 3, 1, 2)  # (B, C, W, H), channels_last in memory
        for conv in self.convs:
            x = conv(x)[:, :, 1:, 1:]  # padded on all sides; SAME pads an even kernel at the end only
            x = torch.cat([x, -x], 1).relu_()  # CReLU
        return x.permute(0, 2, 3, 1).flatten(1)  # no copy in channels_last


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
    trunk = GridCNN(envs.single_observation_space.shape, args.encoding, 1 + args.stack_observations)
    network = nn.Sequential(trunk, layer_init(nn.Linear(trunk.out_features, 512)), nn.ReLU())
    return Agent(network, 512, int(envs.single_action_space.n))


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
class GridRNet(nn.Module):
    """Siamese network: can the late state be reached from the early one in at most k - 1 steps? The comparator's first
    layer acts on the concatenation of two embeddings, W [a; b] = W_early a + W_late b, so both products are computed
    once per frame (`embed`) and a pair costs one addition and the layers after it (`compare`)."""

    m, chunk = 0, 16_384  # it sees single frames; pairs compared at a time, so that they stay in the cache

    def __init__(self, envs, args, hidden=256):
        super().__init__()
        trunk = GridCNN(envs.single_observation_space.shape, args.encoding)
        self.branch = nn.Sequential(trunk, nn.Linear(trunk.out_features, 128), nn.ReLU())
        self.early = nn.Linear(128, hidden)
        self.late = nn.Linear(128, hidden, bias=False)
        # begin with the difference of the embeddings, for most of the task is to tell "same" from "other": held-out
        # accuracy 0.82 after two trainings and not 0.55
        self.late.weight.data = -self.early.weight.data
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(hidden, 1))

    def embed(self, frames):  # (B, 1, W, H, 3) uint8 -> (B, 2, hidden): as the early and as the late state of a pair
        embedding = self.branch(frames)
        return torch.stack([self.early(embedding), self.late(embedding)], 1)

    def compare(self, early, late):  # (B, hidden), (B, hidden) -> (B,) logits
        return self.head(early + late).squeeze(-1)


def make_rnet(envs, args):
    return GridRNet(envs, args)


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


class Oracle:
    """GT-SPRL (Appendix B): can the late state be reached in at most k - 1 steps? Found by breadth-first search with
    Farama's own step(), keys and doors included. `observe` gives each state a number and keeps its ball, the numbers of
    all states within k - 1 steps; `compare` looks a pair up. Deterministic worlds only."""

    chunk = 16_384  # pairs looked up at a time

    def __init__(self, worlds, radius):
        self.worlds, self.radius, self.count, self.balls = worlds, radius, 0, {}
        self.grids, self.numbers = [None for _ in worlds], [{} for _ in worlds]

    def get_state(self, world):
        doors = tuple((cell.is_open, cell.is_locked) for cell in world.grid.grid if isinstance(cell, Door))
        return tuple(world.grid.grid), doors, tuple(map(int, world.agent_pos)), int(world.agent_dir), world.carrying

    def set_state(self, world, state):
        cells, doors, world.agent_pos, world.agent_dir, world.carrying = state
        world.grid.grid = list(cells)
        for door, flags in zip((cell for cell in cells if isinstance(cell, Door)), doors):
            door.is_open, door.is_locked = flags

    def ball(self, world, start):
        """All states within `radius` steps of start; the world is left as it was."""
        step_count, world.gen_obs = world.step_count, lambda: None  # nobody looks at these steps
        places = [(item, item.cur_pos) for item in (*start[0], start[-1]) if item]
        ball, frontier = {start}, [start]
        for _ in range(self.radius):
            found = {}
            for state in frontier:
                for action in range(world.action_space.n):
                    self.set_state(world, state)
                    ended = MiniGridEnv.step(world, action)[2]  # the grid's rules, without a subclass's bookkeeping
                    found[self.get_state(world)] = ended
            frontier = [state for state, ended in found.items() if state not in ball and not ended]
            ball |= found.keys()
        self.set_state(world, start)
        for item, place in places:
            item.cur_pos = place
        world.step_count = step_count
        del world.gen_obs
        return ball

    def observe(self):
        """The numbers (N,) of the states that the worlds are in now."""
        now = np.zeros(len(self.worlds), np.int64)
        for i, world in enumerate(self.worlds):
            if self.grids[i] is not world.grid:  # a new episode: another grid of other objects
                self.grids[i], self.numbers[i] = world.grid, {}
            start = self.get_state(world)
            now[i] = self._number(i, start)
            if now[i] not in self.balls:
                self.balls[int(now[i])] = np.array([self._number(i, state) for state in self.ball(world, start)])
        return now

    def _number(self, i, state):
        if state not in self.numbers[i]:
            self.numbers[i][state] = self.count = self.count + 1
        return self.numbers[i][state]

    def forget(self, numbers):
        """Drops the balls of all states that are not among the numbers."""
        self.balls = {number: self.balls[number] for number in np.unique(numbers).tolist() if number}

    def compare(self, early, late):  # (B, 1), (B, 1) numbers -> (B,) logits, infinitely sure
        pairs = [number * 2**32 + self.balls[number] for number in np.unique(early.cpu()).tolist()]
        hits = np.isin((early * 2**32 + late).cpu().numpy(), np.concatenate(pairs))
        return torch.from_numpy(np.where(hits, np.inf, -np.inf)).float().squeeze(-1).to(early.device)


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
    method = ("sprl" if args.rnet == "learned" else "gt-sprl") if args.cost_scale else "ppo"

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
    rnet = ring = oracle = observe = None
    schedule = Schedule(args.rnet_start, ready=method == "gt-sprl")
    if method == "sprl":
        rnet = make_rnet(envs, args).to(device).eval()
        rnet_optimizer = torch.optim.Adam(
            rnet.parameters(), lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay, fused=True
        )
        ring = Ring(args.ring_size // args.num_envs, args.num_envs, obs_shape, obs_dtype, device)
        learned |= {"rnet": rnet, "rnet_optimizer": rnet_optimizer, "schedule": schedule}
        learned |= {"ring": ring} if args.save_ring else {}
    elif method == "gt-sprl":
        if isinstance(envs.worlds[0], DynamicObstaclesEnv):
            fail(f"--rnet oracle knows no dice, and {args.env_id} throws them, accepted: --rnet learned")
        oracle = Oracle(envs.worlds, args.k - 1)
        observe = oracle.observe
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
    next_obs, _ = envs.reset(seed=args.seed)
    next_done = np.zeros(args.num_envs, bool)
    obs[past] = torch.from_numpy(next_obs)

    if checkpoint:
        try:
            load_learned(learned | ({"ring": ring} if ring else {}), checkpoint)
            if rnet:  # what the command line says holds, not what the optimiser was saved with
                rnet_optimizer.param_groups[0].update(lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay)
            for left in envs.play_back(checkpoint["worlds"]):
                if observe and left <= past:
                    states[past - left] = observe()
            obs[past] = checkpoint["next_obs"]
            if "past_obs" in checkpoint:
                rows = len(checkpoint["past_obs"]) - 1
                if rows != past:
                    raise ValueError(f"it has a window of {rows} frames, not {past}")
                obs[: past + 1], depths[: past + 1] = checkpoint["past_obs"], checkpoint["past_depths"]
                ages[: past + 1] = checkpoint["past_ages"]
            first_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
            elapsed = checkpoint["elapsed"]
            episode_returns = np.array(checkpoint["episode_returns"])
            episode_lengths = np.array(checkpoint["episode_lengths"])
            next_done, history = np.array(checkpoint["next_done"]), checkpoint["history"]
            recent.extend(checkpoint["recent"])
            np.random.set_state(("MT19937", checkpoint["numpy_rng"][0].numpy(), *checkpoint["numpy_rng"][1:]))
            torch.set_rng_state(checkpoint["torch_rng"])
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            fail(f"--resume {args.resume} does not fit these settings: {error!r:.100}")
    elif observe:
        states[past] = observe()

    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = make_run_dir(run_name if args.run_name is None else args.run_name, args.resume)
    command = checkpoint["command"] if checkpoint else shlex.join(["python", script, *sys.argv[1:]])
    versions = {
        "commit": find_commit(),
        "python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__,
        "gymnasium": gym.__version__, "minigrid": minigrid.__version__,
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
        lost = ["the replay ring"] * bool(ring and "ring" not in checkpoint)
        lost += ["the frames before it"] * bool(past and "past_obs" not in checkpoint)
        say(f"resumed at step {global_step:,}" + f", without {' and '.join(lost)}" * bool(lost))

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
            with torch.inference_mode():
                if oracle:
                    oracle.forget(states)
                    embeddings = torch.from_numpy(states)[..., None, None].expand(-1, -1, 2, -1).to(device)
                else:  # each frame is embedded once, and once more after the RNet has changed
                    new = torch.arange(0 if embeddings is None else past + 1, len(obs), device=device)
                    new = embed_frames(rnet.embed, obs, depths, new, rnet.m)
                    embeddings = new if embeddings is None else torch.cat([embeddings[-past - 1 :], new])
                cost = ksp_cost(
                    oracle or rnet, embeddings, ages[past + 1 :], args.k, args.tolerance, args.num_tolerance_samples,
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
                with torch.inference_mode():
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
