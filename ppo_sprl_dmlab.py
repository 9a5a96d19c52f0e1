"""SPRL on DeepMind Lab: PPO whose reward is reduced by a k-shortest-path cost, judged by a reachability network.

Paper: "Shortest-Path Constrained Reinforcement Learning for Sparse Reward Tasks", Sohn, Lee et al., ICML 2021.

    python ppo_sprl_dmlab.py --engine deepmind_lab --level-cache maps     # the real one, if you built it
    python ppo_sprl_dmlab.py --env-id explore_object_rewards_many --rnet-width 16    # else mazes of its generator

Differences from the paper: a time limit bootstraps; the RNet's ResNet ends in an FC layer on all places and has
GroupNorm, a training has 2,500 triplets (README says why). Without deepmind_lab, which no registry has, a stand-in is
played, mazes of the same generator drawn by a ray caster. Its scores are not DeepMind Lab's.
"""

import contextlib
import functools
import importlib
import io
import itertools
import math
import multiprocessing
import os
import platform
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Literal

import gymnasium as gym
import labmaze
import labmaze.assets
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image
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
    env_id: str = "explore_goal_locations_small"
    """explore_goal_locations_small, explore_goal_locations_large or explore_object_rewards_many"""
    engine: Literal["auto", "deepmind_lab", "labmaze"] = "auto"
    """DeepMind Lab or the embedded stand-in, whose scores are not comparable; auto: deepmind_lab if it imports"""
    renderer: Literal["software", "hardware"] = "software"
    """how deepmind_lab draws: on the CPU or on a GPU"""
    level_cache: str | None = None
    """folder where deepmind_lab's compiled maps are kept: a maze seen before begins in 0.6 s, not in 7 to 15 s"""
    total_timesteps: int = 20_000_000
    """total environment steps of the experiment"""
    learning_rate: float = 3e-4
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
    ent_coef: float = 0.004
    """entropy bonus (paper: 0.01; SPRL, ECO and ICM on Fetch 0.001; DMLab 0.001 to 0.007 by method)"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 10.0
    """largest norm of the policy's gradient"""
    stack_observations: int = 0
    """m: the policy sees the last m observations besides the current one (paper: 0 is best; Atari 3)"""

    # SPRL
    cost_scale: float = 0.06
    """lambda, the weight of the k-SP cost; 0 is plain PPO (paper: MiniGrid 0.002, DMLab 0.06, Atari and Fetch 0.05)"""
    cost_bias: float = 0.5
    """the reward becomes r + lambda * (bias - cost) (paper: 0, Fetch 1; authors' DMLab code: 0.5)"""
    k: int = 10
    """k of the k-SP constraint; RNet positives lie within k steps (paper: MiniGrid 2, DMLab and Fetch 10, Atari 12)"""
    tolerance: int = 1
    """Delta t: how far apart the compared older states lie, >= 0 (paper: 1)"""
    num_tolerance_samples: int = 200
    """N: s_t is compared with s_{t-(k+n*Delta t)}, n = 1..N (paper: MiniGrid 60, DMLab and Atari 200, Fetch 20)"""
    cost_percentile: float = 90.0
    """the cost is 1 where this percentile of the N outputs exceeds 0.5 (paper: 90)"""
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
    rnet_learning_rate: float = 3e-4
    """learning rate of the RNet's Adam (authors' code: 3e-4)"""
    rnet_weight_decay: float = 1e-4
    """L2 penalty of the RNet (authors' DMLab code: 1e-4), on Atari decoupled weight decay (paper: 0.03)"""
    label_smoothing: float = 0.1
    """label smoothing of the RNet's loss (authors' code: 0.1)"""
    heldout_pairs: int = 15_000
    """pairs of each kind that measure the RNet's accuracy before it trains on them (paper: 15K; Atari, Fetch 7,500)"""
    rnet_ready_accuracy: float = 0.75
    """the cost is 0 until the mean of the last 20 training accuracies passes this (authors' code: 0.75)"""
    rnet_width: int = 64
    """channels of the RNet's first residual blocks; its FC layers have 8 times as many (paper: 64; 16 suits a CPU)"""


RANGES = {  # what check_args accepts: (lowest, highest)
    (1, 2**31 - 1): "total_timesteps num_steps num_minibatches update_epochs k num_tolerance_samples ring_size "
    "positive_bias rnet_triplets rnet_batch_size rnet_intervals heldout_pairs",
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
TASKS = {  # steps of an episode, cells of the maze along a side, what labmaze makes it from, rewards of the objects
    "explore_goal_locations_small": (
        1_350, 11, dict(max_rooms=4, room_min_size=3, room_max_size=5, objects_per_room=4, spawns_per_room=1), [10.0],
    ),
    "explore_goal_locations_large": (
        1_800, 17, dict(max_rooms=9, room_min_size=3, room_max_size=3, objects_per_room=4, spawns_per_room=1), [10.0],
    ),
    "explore_object_rewards_many": (
        1_800, 13, dict(max_rooms=1, room_min_size=11, room_max_size=11, objects_per_room=16, spawns_per_room=4),
        4 * [2.0] + 4 * [-1.0],
    ),
}  # fmt: skip
# forward, backward, strafe left and right, look left and right, the same two with forward, fire, as DeepMind Lab's
# (look left-right, look down-up, strafe, move, fire, jump, crouch)
ACTIONS = np.array(
    [
        [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, -1, 0, 0, 0], [0, 0, -1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0],
        [-20, 0, 0, 0, 0, 0, 0], [20, 0, 0, 0, 0, 0, 0], [-20, 0, 0, 1, 0, 0, 0], [20, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
    ], dtype=np.intc,
)  # fmt: skip
REPEAT = 4  # frames per action, at 60 a second
CELL = 100  # world units
CLEARANCE, PICKUP = 16, 50  # from a wall, and from an object's centre along each axis
CORNERS = np.array([[1e-6 - CLEARANCE], [CLEARANCE - 1e-6]])
TURN = np.deg2rad(0.1056)  # per pixel and frame
# units a frame: Quake III's walk with a push that fades towards the top speed, fitted to the engine's measured speeds
FRICTION, STOP_SPEED, PUSH, PUSH_GAIN, PUSH_TOP = 0.0935, 1.69, 0.845, 0.3, 6.213


def choose_engine(engine):
    """What `auto` stands for here: deepmind_lab if it imports, else labmaze. Says so in one line."""
    if engine == "labmaze":
        return engine
    try:
        importlib.import_module("deepmind_lab")
    except Exception as error:
        if engine == "deepmind_lab":
            fail(f"--engine deepmind_lab does not import, accepted without it: labmaze ({error!r:.100})")
        say(f"engine: labmaze, a stand-in whose scores are not DeepMind Lab's ({error!r:.100})")
        return "labmaze"
    if engine == "auto":
        say("engine: deepmind_lab")
    return "deepmind_lab"


class LabWorlds(gym.vector.VectorEnv):
    """What both engines have in common. An episode ends by its time alone, a truncation; NEXT_STEP autoreset."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    resumable = False  # the engine's state cannot be saved, and the stand-in does as the engine does
    reward_range = (-1000, 1000)  # the tasks' own are +10, +2 and -1

    def __init__(self, env_id, num_envs):
        if env_id not in TASKS:
            fail(f"--env-id {env_id} is unknown, accepted: {', '.join(TASKS)}")
        self.env_id, self.num_envs = env_id, num_envs
        self.episode_steps, self.size, self.maze_settings, self.worths = TASKS[env_id]
        self.map_size = 2 * (CELL * self.size,)
        self.single_observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(len(ACTIONS))
        self.places = np.zeros((num_envs, 2))  # the agents' (x, y) in world units

    def learning_rewards(self, rewards, valid):
        """The rewards (T, N) as they are."""
        return rewards

    def positions(self):
        """The agents' true (x, y), (N, 2), in whole world units within map_size."""
        return np.floor(self.places).astype(np.int64)

    def render(self):
        """The first environment's frame."""
        return self.frames[0]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class LevelCache:
    """Keeps compiled maps in a folder that all environments and runs may share."""

    def __init__(self, folder):
        self.folder = os.path.abspath(folder)
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("not ours to write to")

    def fetch(self, key, pk3_path):
        try:
            shutil.copyfile(os.path.join(self.folder, key), pk3_path)
            return True
        except OSError:
            return False

    def write(self, key, pk3_path):
        path = os.path.join(self.folder, key)
        own = f"{path}.{os.getpid()}"
        try:
            if not os.path.isfile(path):  # written beside and renamed: nobody ever fetches half a map
                shutil.copyfile(pk3_path, own)
                os.replace(own, path)
        except OSError:  # full, or not ours: a cache must not end a run
            with contextlib.suppress(OSError):
                os.remove(own)


def lab_worker(pipe, others, env_id, renderer, level_cache):
    """A process with one DeepMind Lab. The seed, received first, and then each action are answered by frame, position,
    reward and whether the episode has ended; the action after an end begins one. What goes wrong is sent as text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the trainer decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()  # inherited; held open here, they would let processes outlive a trainer that was killed
    try:
        rng, running, action = np.random.default_rng(pipe.recv()), False, 0
        lab = importlib.import_module("deepmind_lab").Lab(
            f"contributed/dmlab30/{env_id}", ["RGB_INTERLEAVED", "DEBUG.POS.TRANS"], {"width": "84", "height": "84"},
            renderer=renderer, level_cache=level_cache,
        )  # fmt: skip
        while action is not None:
            reward = 0.0
            if running:
                reward = lab.step(ACTIONS[action], num_steps=REPEAT)
            else:
                lab.reset(seed=int(rng.integers(2**31 - 1)))
            running = lab.is_running()
            if running:  # after the last step there is no observation, the one before stays
                seen = lab.observations()
                frame, position = np.array(seen["RGB_INTERLEAVED"]), np.array(seen["DEBUG.POS.TRANS"])
            pipe.send((frame, position, reward, not running))
            action = pipe.recv()
    except EOFError:
        pass  # the trainer is gone
    except BaseException:
        pipe.send(traceback.format_exc())


class DeepMindLab(LabWorlds):
    """The real engine, one process per environment. Fresh environments repeat a seed's episodes bit by bit, and those
    that were reset before do not: so a second reset() starts new processes. If one dies in a step, its traceback is
    printed and `died` set, on which a training saves what it learned and ends with exit code 1."""

    def __init__(self, env_id, num_envs, renderer, level_cache):
        super().__init__(env_id, num_envs)
        try:
            self.settings = env_id, renderer, LevelCache(level_cache) if level_cache else None
        except OSError as error:
            fail(f"--level-cache {level_cache} cannot be made, accepted: a folder that can ({error!r:.100})")
        self.frames = np.zeros((num_envs, 84, 84, 3), np.uint8)
        self._start()

    def _start(self):
        """Forks: best done early, before torch has threads or a GPU. The engine is Linux's alone, so there is fork."""
        self.pipes, self.processes, self.fresh, self.died = [], [], True, None
        context = multiprocessing.get_context("fork")
        for _ in range(self.num_envs):
            pipe, end = context.Pipe()
            settings = end, [*self.pipes, pipe], *self.settings
            self.processes.append(context.Process(target=lab_worker, args=settings, daemon=True))
            self.processes[-1].start()
            end.close()
            self.pipes.append(pipe)

    def reset(self, *, seed=None, options=None):
        if not self.fresh:
            self.close()
            self._start()
        self.fresh = False
        self._exchange([[seed or 0, n] for n in range(self.num_envs)])
        if self.died:
            self.close()
            fail("deepmind_lab did not start, see above")
        return self.frames.copy(), {}

    def _exchange(self, messages):
        """Rewards and ends (N,) that these led to; frames and places are kept."""
        rewards, ends = np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, bool)
        for pipe, message in zip(self.pipes, messages):
            with contextlib.suppress(OSError):  # a dead one is noticed below
                pipe.send(message)
        for n, pipe in enumerate(self.pipes):
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                self.processes[n].join(5)
                answer = f"no traceback, exit code {self.processes[n].exitcode}"
            if isinstance(answer, str):
                warn(f"environment {n} of deepmind_lab died: {answer}")
                self.died = self.died or f"environment {n} of deepmind_lab died"
            else:
                self.frames[n], position, rewards[n], ends[n] = answer
                self.places[n] = position[:2]
        return rewards, ends

    def step(self, actions):
        if self.died:  # and whoever steps did not look
            raise RuntimeError(self.died)
        rewards, ends = self._exchange(actions.tolist())
        return self.frames.copy(), rewards, np.zeros_like(ends), ends, {}

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self.processes:
            process.join(5)
            process.terminate()
        self.pipes, self.processes = [], []


# what labmaze ships of the engine's style: corridors look the same everywhere, rooms one of 20 ways
CORRIDOR_WALL, CORRIDOR_FLOOR, SKY = "style_02 blue_bright", "style_01 blue", "sky_03"
ROOM_WALLS = """
    style_01 blue, style_01 cerise, style_01 green, style_01 purple, style_01 red, style_01 yellow, style_02 dblue,
    style_02 lgreen, style_02 purple, style_02 yellow, style_03 blue, style_03 cyan, style_03 orange, style_03 purple,
    style_04 cerise, style_04 green, style_04 purple, style_04 red, style_05 red, style_05 yellow"""
ROOM_FLOORS = """
    style_01 blue_team, style_01 orange, style_01 red_team, style_02 blue, style_02 green, style_02 orange,
    style_02 blue_bright, style_03 blue, style_03 green, style_03 orange, style_03 purple, style_03 red,
    style_03 blue_bright, style_04 blue, style_04 cyan, style_04 dorange, style_04 orange, style_05 blue,
    style_05 orange, style_05 orange_bright"""
TEXTURE, LEVELS = 64, 4  # texels along a texture's side; levels of detail, the nearest first
SKY_TURN, SKY_RISE = 512, 64  # texels all around, and from the horizon to 45 degrees up
NUM_DECALS, NUM_LOOKS, LOOK = 4, 8, 32  # pictures on walls; looks of objects, besides the goal's; texels along a side
GRID = 32  # cells along a side of the tables on the device, a power of 2


def draw_figures(size):
    """Colours and mask (9, size, size, 4) of 0 to 1, by columns: figures of eight kinds of objects, and the goal's."""
    x, y = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    radius, wide, tall = np.hypot(x, y), abs(x), abs(y)
    masks = [
        radius < 0.95, (wide < 0.8) & (tall < 0.8), wide < (y + 1) * 0.5, wide + tall < 0.95,
        (np.minimum(wide, tall) < 0.33) & (radius < 1), (radius > 0.5) & (radius < 0.95),
        (wide < tall * 0.8 + 0.1) & (tall < 0.95), (wide < 0.4) | ((y > 0.4) & (wide < 0.9)), radius < 1,
    ]  # fmt: skip
    colours = ["e63333", "3366ff", "ffd91a", "33cc4d", "ff8000", "c04de6", "1ad9d9", "ff99cc", "66ff33"]
    colours = np.array([list(bytes.fromhex(colour)) for colour in colours]) / 255
    shade = (1.1 - 0.4 * np.hypot(x + 0.4, y + 0.4))[..., None]  # lit from the upper left
    return np.stack([np.dstack([colour * shade, mask]) for colour, mask in zip(colours, masks)]).clip(0, 1)


@functools.cache
def make_textures():
    """All texels (T, 3) uint8, where in them the parts start, and the mask of objects, int32. Walls are the corridors',
    then the rooms', each plain and with its decals, each in two lights; so are floors, in one light. All textures are
    stored by columns, so that a column of the screen reads its texels in order."""

    def load(path, size):
        image = Image.open(path).convert("RGBA").convert("RGB")
        return np.asarray(image.reduce(image.width // size), np.float32).transpose(1, 0, 2) / 255

    def load_all(paths, *names):
        return [load(paths(style)[name], TEXTURE) for style, name in (n.split() for n in ",".join(names).split(","))]

    def levels(image, light=1.0):
        """Blurred, and a little darker, with distance."""
        blocks = ((2**level, light * 0.93**level) for level in range(LEVELS))
        means = (image.reshape(TEXTURE // n, n, TEXTURE // n, n, 3).mean((1, 3)) * dim for n, dim in blocks)
        return [mean.repeat(TEXTURE // len(mean), 0).repeat(TEXTURE // len(mean), 1) for mean in means]

    walls = []
    for plain in load_all(labmaze.assets.get_wall_texture_paths, CORRIDOR_WALL, ROOM_WALLS):
        for decal in [None, *draw_figures(24)[2 : 2 + NUM_DECALS]]:
            image = plain.copy()
            if decal is not None:  # a picture in a frame, in colours that no object has
                image[16:48, 10:42], image[18:46, 12:40] = 0.1, 0.9 - 0.6 * decal[0, 0, :3]
                image[20:44, 14:38][decal[..., 3] == 1] = 0.1
            walls += [*levels(image), *levels(image, light=0.8)]
    floors = load_all(labmaze.assets.get_floor_texture_paths, CORRIDOR_FLOOR, ROOM_FLOORS)
    box = labmaze.assets.get_sky_texture_paths(SKY)
    sides = [load(path, 256) for path in (box.front, box.right, box.back, box.left)]
    quarter = (np.arange(SKY_TURN) + 0.5) / SKY_TURN * 4
    column = (np.tan((quarter % 1 - 0.5) * np.pi / 2) + 1) * 128
    sky = [sides[int(side)][int(x), :: 256 // SKY_RISE] for side, x in zip(quarter, column)]
    looks = np.zeros((NUM_LOOKS + 2, LOOK, TEXTURE, 4))  # the last is empty, and so is what lies below an object
    looks[:-1, :, :LOOK] = draw_figures(LOOK)

    parts = {"walls": walls, "floors": [level for image in floors for level in levels(image, light=0.9)]}
    parts |= {"sky": sky, "looks": looks[..., :3]}
    parts = {name: np.reshape(part, (-1, 3)) for name, part in parts.items()}
    starts = dict(zip(parts, np.cumsum([0, *map(len, parts.values())]).tolist()))
    return (np.concatenate([*parts.values()]) * 255).astype(np.uint8), starts, looks[..., 3].ravel().astype(np.int32)


class RayCaster:
    """Draws what all agents see, (N, 84, 84, 3) uint8, in one go on the device: no loop over environments or rays.

    The field of view is 90 degrees both ways, eyes half a cell up, walls one cell high, objects half a cell high and
    wide. Lengths are in cells, x goes to the right and y up on the map, headings turn anticlockwise from x. On a CPU
    torch.where and comparisons cost ten times what arithmetic does, so whole frames are put together by arithmetic."""

    side, layers = 84, 2  # pixels; objects drawn behind one another in one column

    def __init__(self, num_envs, size, device):
        texels, self.starts, mask = make_textures()
        self.texels, self.mask = torch.from_numpy(texels).to(device), torch.from_numpy(mask).to(device)
        self.solid = torch.ones((num_envs, GRID * GRID), device=device)
        # for each cell where its floor's texels start, and those of the walls to its east, west, north and south
        self.tables = torch.zeros((num_envs, 5, GRID * GRID), dtype=torch.int32, device=device)
        every_env = torch.arange(num_envs, dtype=torch.int32, device=device).view(-1, 1)
        self.cell_base, self.table_base = every_env * GRID * GRID, every_env * 5 * GRID * GRID
        self.strides = torch.tensor([1, GRID], dtype=torch.int32, device=device).view(2, 1, 1)
        self.lines = torch.arange(1, size, device=device).view(-1, 1, 1, 1)  # of the grid
        self.line_cells = self.lines.int() * self.strides
        self.half = self.side // 2
        self.slopes = (torch.arange(self.side, device=device) + 0.5) / self.half - 1  # of columns, to the right
        self.steepness = self.slopes.abs().view(-1, 1) * TEXTURE  # of rows, up or down, in texels
        below = self.slopes[self.half :].view(-1, 1)
        self.floor_reach = TEXTURE * 0.5 / below  # how far away a row of the floor is, in texels
        self.floor_start = self.starts["floors"] + self.level(0.75 / below) * TEXTURE**2
        rise = (below.flip(0) / (1 + self.slopes**2).sqrt() * SKY_RISE).int()
        self.sky_start = self.starts["sky"] + SKY_RISE - 1 - rise  # (42, 84)
        self.sky_angle = self.slopes.atan()

    def level(self, depth):
        return (depth.log2() + 1).clamp(0, LEVELS - 1).int()

    def pick(self, source, index):
        return source.view(-1).index_select(0, index.flatten()).view(index.shape)

    def walls(self, x, y, dx, dy):
        """Of every ray (N, 84) the depth at which it meets a wall, and where the texels of that column of wall start. A
        ray enters new cells where it crosses the grid's lines: of all crossings the first into a solid cell counts,
        that is the one with the largest 1 / depth, which is negative behind the eyes and set to 0 for open cells."""
        start, rays = torch.stack([x, y]), torch.stack([dx, dy])  # (2, N, 1), (2, N, 84)
        rays = torch.where(rays.abs() < 1e-6, 1e-6, rays)
        gaps = self.lines - start  # (lines, 2, N, 1)
        gaps = torch.where(gaps == 0, 1e-6, gaps)
        back = (rays < 0).int()
        across = torch.addcmul(start.flip(0), gaps, rays.flip(0) / rays).clamp_(0, len(self.lines)).int()
        cells = self.line_cells + (self.cell_base - back * self.strides)
        cells = cells.addcmul_(across, self.strides.flip(0))  # (lines, 2, N, 84)
        nearness = self.pick(self.solid, cells).mul_(gaps.reciprocal()).mul_(rays).amax(0)
        depth, is_y = 1 / nearness.amax(0), nearness[1] > nearness[0]
        hit = start + depth * rays
        fronts = hit.round().int() - 1 + back  # the open cell before the wall, along each axis
        (hit_x, hit_y), (front_x, front_y), (west, south) = hit, fronts, back
        face_x = (1 + west) * GRID * GRID + front_x + hit_y.int() * GRID
        face_y = (3 + south) * GRID * GRID + front_y * GRID + hit_x.int()
        texels = self.pick(self.tables, self.table_base + torch.where(is_y, face_y, face_x))
        across = torch.where(is_y, hit_x, hit_y)
        column = ((across - across.floor()) * TEXTURE).int()
        return depth, texels + (is_y.int() * LEVELS + self.level(depth)) * TEXTURE**2 + column * TEXTURE

    def objects(self, objects, x, y, cos, sin, wall_depth):
        """Layers of objects, far ones first: (N, 84) where the texels of that column of an object start, and its depth.
        A column has those that are nearest and not behind the wall."""
        east, north, look = objects.unbind(-1)  # (N, objects)
        east, north = east - x, north - y
        z, right = (east * cos + north * sin)[..., None], (east * sin - north * cos)[..., None]
        column = (self.slopes * z - right) * 2 + 0.5  # (N, objects, 84): 0 to 1 across an object half a cell wide
        seen = (column >= 0) & (column < 1) & (z > 0.1) & (z < wall_depth) & (look[..., None] >= 0)
        z, order = torch.where(seen, z, 1e3).topk(min(self.layers, z.shape[1]), 1, largest=False)
        column = (column.gather(1, order) * LOOK).int()
        texels = (look.int()[..., None].expand(seen.shape).gather(1, order) * LOOK + column) * TEXTURE
        texels = torch.where(z < 1e3, texels, (NUM_LOOKS + 1) * LOOK * TEXTURE)
        return list(zip(texels.unbind(1), z.unbind(1)))[::-1]

    @torch.inference_mode()
    def draw(self, scene):
        """From numbers (N, 3 + 3 objects): the agent's x, y, heading, then each object's x, y and look (-1: none)."""
        half = self.half
        x, y, heading = scene[:, :3, None].unbind(1)  # (N, 1)
        cos, sin = heading.cos(), heading.sin()
        dx, dy = cos + sin * self.slopes, sin - cos * self.slopes  # (N, 84): a ray's step of depth 1
        depth, column = (part[:, None] for part in self.walls(x, y, dx, dy))  # (N, 1, 84)
        # rows of the wall's texture, counted from its middle both ways; from 64 on it is sky or floor
        row = torch.addcmul(torch.full_like(depth, TEXTURE / 2), depth, self.steepness).int()  # (N, 84, 84)
        outside = (row >> 6).clamp_(max=1)
        column = column + self.starts["walls"]

        turn = ((self.sky_angle - heading) * (SKY_TURN / (2 * np.pi))).floor().int() & SKY_TURN - 1
        sky = self.sky_start + (turn * SKY_RISE)[:, None]
        floor_x = torch.addcmul(TEXTURE * x[..., None], self.floor_reach, dx[:, None]).int()  # in texels
        floor_y = torch.addcmul(TEXTURE * y[..., None], self.floor_reach, dy[:, None]).int()
        cells = (floor_x >> 6 & GRID - 1).add_(self.table_base[..., None]).add_(floor_y >> 1 & (GRID - 1) * GRID)
        floor = self.pick(self.tables, cells).add_(floor_x.bitwise_and_(TEXTURE - 1), alpha=TEXTURE)
        floor = floor.add_(floor_y.bitwise_and_(TEXTURE - 1)).add_(self.floor_start)

        above, below = (column + (TEXTURE - 1)) - row[:, :half], column + row[:, half:]
        above.addcmul_(outside[:, :half], sky - above)
        below.addcmul_(outside[:, half:], floor - below)
        for look, z in self.objects(scene[:, 3:].unflatten(1, (-1, 3)), x, y, cos, sin, depth):
            # an object's rows go from the horizon, which is at its top, down to the floor
            texel = (z[:, None] * self.steepness[half:]).clamp_(max=TEXTURE - 1).int().add_(look[:, None])
            below.addcmul_(self.pick(self.mask, texel), texel + self.starts["looks"] - below)
        index = torch.cat([above, below], 1)
        return self.texels.index_select(0, index.flatten()).view(*index.shape, 3)


class LabMazes(LabWorlds):
    """The embedded stand-in: mazes of DeepMind Lab's own generator, drawn by a ray caster, with its speeds, rewards and
    respawns. For developing and comparing methods: its scores are not DeepMind Lab's."""

    def __init__(self, env_id, num_envs, device):
        super().__init__(env_id, num_envs)
        self.caster = RayCaster(num_envs, self.size, device)

    def reset(self, *, seed=None, options=None):
        self.rngs = [np.random.default_rng([seed or 0, n]) for n in range(self.num_envs)]
        seeds = (int(rng.integers(2**31 - 1)) for rng in self.rngs)
        self.mazes = [labmaze.RandomMaze(self.size, self.size, random_seed=s, **self.maze_settings) for s in seeds]
        count = len(self.worths)
        self.solid = np.zeros((self.num_envs, self.size, self.size), bool)  # by y and x, both from the south-west
        self.velocities, self.headings = np.zeros(self.num_envs, complex), np.zeros(self.num_envs)
        self.every_env = np.arange(self.num_envs)
        self.objects = np.zeros((self.num_envs, count, 2))  # their (x, y) in world units
        self.present, self.looks = np.zeros((self.num_envs, count), bool), np.zeros((self.num_envs, count), int)
        self.spawn_cells, self.object_cells = ([None] * self.num_envs for _ in range(2))
        self.clocks, self.done = np.zeros(self.num_envs, int), np.ones(self.num_envs, bool)
        return self.step(np.zeros(self.num_envs, int))[0], {}

    def _begin_episode(self, n):
        """A new maze with new looks."""
        rng, maze = self.rngs[n], self.mazes[n]
        maze.regenerate()
        entities = np.flipud(maze.entity_layer)
        is_room = np.flipud(maze.variations_layer) != "."
        self.solid[n] = entities == "*"
        self.spawn_cells[n], self.object_cells[n] = (np.argwhere(entities == token)[:, ::-1] for token in "PG")
        wall, floor = rng.integers(1, 21, 2)
        decals = rng.integers(1, NUM_DECALS + 1, (4, *is_room.shape)) * (rng.random((4, *is_room.shape)) < 0.15)
        table, solid = np.zeros((5, GRID, GRID), np.int32), np.ones((GRID, GRID), np.float32)
        solid[: self.size, : self.size] = self.solid[n]
        table[0, : self.size, : self.size] = is_room * floor * LEVELS * TEXTURE**2
        table[1:, : self.size, : self.size] = (is_room * wall * (1 + NUM_DECALS) + decals) * 2 * LEVELS * TEXTURE**2
        self.caster.tables[n] = torch.from_numpy(table).flatten(1)
        self.caster.solid[n] = torch.from_numpy(solid).flatten()
        # a goal has a look of its own, good objects share one and bad ones another
        good, bad = rng.choice(NUM_LOOKS, 2, replace=False)
        self.looks[n] = NUM_LOOKS if len(self.worths) == 1 else np.where(np.array(self.worths) > 0, good, bad)
        self.clocks[n] = 0
        self._place_objects(n)
        self._spawn(n)

    def _place_objects(self, n):
        cells = self.object_cells[n]
        self.objects[n] = self.rngs[n].choice(cells, len(self.worths), replace=False) * CELL + CELL / 2
        self.present[n] = True

    def _spawn(self, n):
        self.places[n] = self.rngs[n].choice(self.spawn_cells[n]) * CELL + CELL / 2
        self.headings[n], self.velocities[n] = self.rngs[n].uniform(0, 2 * np.pi), 0

    def _move(self, actions):
        """Four frames of turning, friction and a push where it is wished to, in complex numbers; then walls stop each
        axis for itself."""
        look, _, strafe, forward, *_ = ACTIONS[actions].T
        headings = self.headings - TURN * look * np.arange(1, REPEAT + 1)[:, None]  # (4, N)
        wishes, moved = (forward - 1j * strafe) * np.exp(1j * headings), 0
        for wish in wishes:
            speed = np.maximum(abs(self.velocities), 1e-9)
            self.velocities *= (1 - FRICTION * np.maximum(1, STOP_SPEED / speed)).clip(0)
            push = PUSH_GAIN * (PUSH_TOP - (self.velocities * wish.conj()).real)
            self.velocities += push.clip(0, PUSH) * wish
            moved = moved + self.velocities
        self.headings = headings[-1]
        self._advance(0, moved.real, self.velocities.real)
        self._advance(1, moved.imag, self.velocities.imag)

    def _advance(self, axis, moved, velocities):
        new, ahead = self.places[:, axis] + moved, np.sign(moved)
        cell = ((new + CLEARANCE * ahead) // CELL).astype(int)
        corners = (self.places[:, 1 - axis] + CORNERS) // CELL  # (2, N)
        cells = (corners.astype(int), cell) if axis == 0 else (cell, corners.astype(int))
        hit = self.solid[self.every_env, *cells].any(0)
        self.places[:, axis] = np.where(hit, (cell + (ahead < 0)) * CELL - CLEARANCE * ahead, new)
        velocities[hit] = 0  # a view

    def step(self, actions):
        self._move(actions)
        begins = self.done
        touched = self.present & (abs(self.objects - self.places[:, None]) < PICKUP).all(2) & ~begins[:, None]
        rewards = (touched * self.worths).sum(1).astype(np.float32)
        self.clocks += 1
        if len(self.worths) == 1:
            for n in np.flatnonzero(touched[:, 0]):  # the goal stays, and the clock runs on
                self._spawn(n)
        else:
            self.present &= ~touched
            left = (self.present * self.worths > 0).any(1)
            for n in np.flatnonzero(~left & ~begins):
                self._place_objects(n)
                self._spawn(n)
        for n in np.flatnonzero(begins):
            self._begin_episode(n)
        self.done = ~begins & (self.clocks == self.episode_steps)
        return self._draw(), rewards, np.zeros(self.num_envs, bool), self.done.copy(), {}

    def _draw(self):
        objects = [self.objects / CELL, np.where(self.present, self.looks, -1)[..., None]]
        objects = np.concatenate(objects, 2).reshape(self.num_envs, -1)
        scene = np.concatenate([self.places / CELL, self.headings[:, None], objects], 1).astype(np.float32)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on a CPU each operation is so short that threads would only wait for one another
        self.frames = self.caster.draw(torch.from_numpy(scene).to(self.caster.texels.device)).cpu().numpy()
        torch.set_num_threads(threads)
        return self.frames

    def close(self):
        pass


def make_envs(args):
    """From env_id, num_envs, engine, renderer and level_cache alone, so that other scripts can use it."""
    if choose_engine(args.engine) == "deepmind_lab":
        return DeepMindLab(args.env_id, args.num_envs, args.renderer, args.level_cache)
    for name in ("renderer", "level_cache"):
        value = getattr(args, name)
        if value != getattr(Args, name):
            fail(
                f"--{name.replace('_', '-')} {value} says nothing to labmaze, accepted: only with --engine deepmind_lab"
            )
    device = torch.device("cuda" if torch.cuda.is_available() and getattr(args, "cuda", True) else "cpu")
    return LabMazes(args.env_id, args.num_envs, device)


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


def make_rnet(envs, args):
    return ImageRNet(envs, args, (2, 2, 1), 3, args.stack_observations)


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
    args.engine = choose_engine(args.engine)
    if checkpoint and args.engine != checkpoint["args"]["engine"]:
        fail(f"--engine {args.engine} with --resume {args.resume}, accepted: {checkpoint['args']['engine']}")
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
        rnet_optimizer = torch.optim.Adam(
            rnet.parameters(), lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay, fused=True
        )
        ring = Ring(args.ring_size // args.num_envs, args.num_envs, obs_shape, obs_dtype, device)
        learned |= {"rnet": rnet, "rnet_optimizer": rnet_optimizer, "schedule": schedule}
        learned |= {"ring": ring} if args.save_ring else {}
    method = f"{method} ({args.engine})"  # in all that is printed and drawn
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

    run_name = f"{args.env_id}__{args.engine}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_name = run_name if args.run_name is None else args.run_name
    run_name += f"-{args.engine}" if run_name and args.engine not in run_name else ""
    run_dir = make_run_dir(run_name, args.resume)
    command = checkpoint["command"] if checkpoint else shlex.join(["python", script, *sys.argv[1:]])
    versions = {
        "commit": find_commit(),
        "python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__,
        "gymnasium": gym.__version__, "labmaze": version("labmaze"),
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
