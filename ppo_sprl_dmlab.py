"""SPRL on DeepMind Lab: PPO whose reward is reduced by a k-shortest-path cost, judged by a reachability network.

Paper: "Shortest-Path Constrained Reinforcement Learning for Sparse Reward Tasks", Sohn, Lee et al., ICML 2021.

    python ppo_sprl_dmlab.py --engine deepmind_lab --level-cache maps               # the real engine, if you built it
    python ppo_sprl_dmlab.py --env-id explore_object_rewards_many --rnet-width 16   # the stand-in, on a CPU

Differences from the paper: a time limit bootstraps; the RNet's ResNet ends in an FC layer on all places and has
GroupNorm; a training has 2,500 triplets. No registry has deepmind_lab. Without it a stand-in is played: mazes of the
same generator, drawn by a ray caster. Its scores are not DeepMind Lab's.
"""

import atexit
import contextlib
import functools
import importlib
import io
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
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
from PIL import Image
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import labmaze.assets
except ModuleNotFoundError:
    labmaze = None  # it has no wheels for Python 3.13, where make_envs refuses the stand-in


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
    env_id: str = "explore_goal_locations_small"  # also explore_goal_locations_large, explore_object_rewards_many
    engine: Literal["auto", "deepmind_lab", "labmaze"] = "auto"  # labmaze is a stand-in; auto: what can be imported
    renderer: Literal["software", "hardware"] = "software"  # deepmind_lab draws on the CPU or on a GPU
    level_cache: str | None = None  # a folder for deepmind_lab's compiled maps: known mazes begin 10 times faster
    total_timesteps: int = 20_000_000  # environment steps of the experiment
    learning_rate: float = 3e-4  # of the policy's Adam (paper: 3e-4)
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
    ent_coef: float = 0.004  # entropy bonus (paper: 0.004)
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 10.0  # largest norm of the policy's gradient (authors' code: 10)
    stack_observations: int = 0  # m: the policy also sees the last m observations (paper: 0)

    # SPRL
    cost_scale: float = 0.06  # lambda, the weight of the k-SP cost; 0 is plain PPO (paper: 0.06)
    cost_bias: float = 0.5  # the reward becomes r + lambda * (bias - cost) (authors' code: 0.5)
    k: int = 10  # k of the k-SP constraint; RNet positives lie within k steps (paper: 10)
    tolerance: int = 1  # Delta t: how far apart the compared older states lie (paper: 1)
    num_tolerance_samples: int = 200  # N: s_t is compared with s_{t-(k+n*Delta t)}, n = 1..N (paper: 200)
    cost_percentile: float = 90.0  # the cost is 1 where this percentile of the N outputs exceeds 0.5 (paper: 90)
    rnet_width: int = 64  # channels of the RNet's first blocks (authors' code: 32); FC layers have 8 times as many
    ring_size: int = 60_000  # the RNet learns from the agent's last this many steps (paper: 60K)
    negative_bias: int = 20  # Delta-: negatives lie at least k + Delta- steps after the anchor (paper: 20)
    positive_bias: int = 5  # Delta+: the next anchor lies 1..Delta+ steps after the positive (paper: 5)
    rnet_intervals: tuple[int, int, int] = (6_000, 12_000, 36_000)  # steps between RNet trainings: to 1M, to 2M, after
    rnet_start: int = 15_000  # steps in the ring before the first RNet training (authors' code: 30K)
    rnet_triplets: int = 2_500  # most triplets, two pairs each, of one RNet training (authors' code: 15K)
    rnet_batch_size: int = 64  # triplets per RNet minibatch (authors' code: 64)
    rnet_learning_rate: float = 3e-4  # of the RNet's Adam (authors' code: 3e-4)
    rnet_weight_decay: float = 1e-4  # L2 penalty of the RNet, added to the gradient as 1e-4 * w (authors' code: 4e-4)
    label_smoothing: float = 0.1  # of the RNet's loss (authors' code: 0.1)
    heldout_pairs: int = 15_000  # new pairs of each kind that measure the RNet's accuracy (paper: 15K)
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
TASKS = {  # steps of an episode, cells of the maze along a side, what labmaze makes it from, rewards of the objects
    "explore_goal_locations_small": (
        1_350, 11, dict(max_rooms=4, room_min_size=3, room_max_size=5, objects_per_room=4, spawns_per_room=5), [10.0],
    ),
    "explore_goal_locations_large": (
        1_800, 17, dict(max_rooms=9, room_min_size=3, room_max_size=3, objects_per_room=4, spawns_per_room=5), [10.0],
    ),
    "explore_object_rewards_many": (
        1_800, 13, dict(max_rooms=1, room_min_size=11, room_max_size=11, objects_per_room=16, spawns_per_room=5),
        4 * [2.0] + 4 * [-1.0],
    ),
}  # fmt: skip
# forward, backward, strafe left and right, look left and right, the same two with forward, fire
ACTIONS = np.zeros((9, 7), np.intc)  # as the engine takes them
ACTIONS[:, 0] = 0, 0, 0, 0, -20, 20, -20, 20, 0  # look left or right, in pixels
ACTIONS[:, 2] = 0, 0, -1, 1, 0, 0, 0, 0, 0  # strafe
ACTIONS[:, 3] = 1, -1, 0, 0, 0, 0, 1, 1, 0  # move
ACTIONS[8, 4] = 1  # fire
REPEAT = 4  # frames per action, at 60 a second
CELL = 100  # world units


class LabWorlds(gym.vector.VectorEnv):
    """What both engines have in common: frame stacks, positions, NEXT_STEP autoreset. An episode ends by its time
    alone, a truncation. An engine has start(seed), after which all episodes are to begin, and play(actions)."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, env_id, num_envs, num_frames):
        self.num_envs = num_envs
        self.episode_steps, self.size, self.maze_settings, self.object_rewards = TASKS[env_id]
        self.map_size = 2 * (CELL * self.size,)
        self.single_observation_space = gym.spaces.Box(0, 255, (num_frames, 84, 84, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(len(ACTIONS))
        self.frames = np.zeros((num_envs, *self.single_observation_space.shape), np.uint8)
        self.places = np.zeros((num_envs, 2))  # the agents' (x, y) in world units

    def reset(self, *, seed=None, options=None):
        self.start(seed or 0)
        self.done = np.ones(self.num_envs, bool)
        obs, *_, info = self.step(np.zeros(self.num_envs, int))
        return obs, info

    def step(self, actions):
        begins = self.done
        images, rewards, self.done = self.play(actions)
        self.frames[:, :-1] = self.frames[:, 1:]
        self.frames[:, -1] = images
        self.frames[begins] = images[begins, None]  # in all frames: no stack crosses an episode
        info = {"position": np.floor(self.places).astype(np.int64)}  # the true (x, y), for GT-Grid
        return self.frames.copy(), rewards, np.zeros(self.num_envs, bool), self.done.copy(), info

    def render(self):
        return self.frames[0, -1].copy()


class LevelCache:
    """Keeps compiled maps in a folder that all environments and runs may share."""

    def __init__(self, folder):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            fail(f"--level-cache {folder}, accepted: a folder that can be made ({error})")
        self.folder = os.path.abspath(folder)

    def fetch(self, key, pk3_path):
        path = os.path.join(self.folder, key)
        if not os.path.isfile(path):
            return False
        shutil.copyfile(path, pk3_path)
        return True

    def write(self, key, pk3_path):
        path = os.path.join(self.folder, key)
        shutil.copyfile(pk3_path, f"{path}.{os.getpid()}")
        os.replace(f"{path}.{os.getpid()}", path)  # nobody ever fetches half a map


def lab_worker(pipe, others, folder, env_id, renderer, level_cache):
    """A process with one DeepMind Lab. It receives a seed, then actions; each is answered by frame, position, reward
    and whether the episode has ended. The action after an end begins one. What goes wrong is sent as text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the trainer decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so does a cluster's SIGTERM
    os.environ["TMPDIR"] = folder  # where the engine makes its folder of maps
    for other in others:
        other.close()  # inherited; heldout open here, they would let processes outlive a trainer that was killed
    try:
        rng, running = np.random.default_rng(pipe.recv()), False
        config = {"width": "84", "height": "84", "logLevel": "WARN"}  # or it would print every maze
        lab = importlib.import_module("deepmind_lab").Lab(
            f"contributed/dmlab30/{env_id}", ["RGB_INTERLEAVED", "DEBUG.POS.TRANS"], config,
            renderer=renderer, level_cache=level_cache,
        )  # fmt: skip
        while True:
            action, reward = pipe.recv(), 0.0
            if running:
                reward = lab.step(ACTIONS[action], num_steps=REPEAT)
            else:
                lab.reset(seed=int(rng.integers(2**31 - 1)))
            running = lab.is_running()
            if running:  # after the last step there is no observation, the one before stays
                seen = lab.observations()
                frame, position = np.array(seen["RGB_INTERLEAVED"]), np.array(seen["DEBUG.POS.TRANS"])
            pipe.send((frame, position[:2], reward, not running))
    except (EOFError, ConnectionError):  # the trainer is gone
        lab = None  # which removes its maps
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # the last worker does it if the trainer could not
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(repr(error))


class DeepMindLab(LabWorlds):
    """The real engine, one process per environment; one that dies ends the run. Fresh environments repeat a seed's
    episodes bit by bit, and those that were reset before do not: so a second reset() starts new processes."""

    def __init__(self, env_id, num_envs, num_frames, renderer, level_cache):
        super().__init__(env_id, num_envs, num_frames)
        self.settings = env_id, renderer, LevelCache(level_cache) if level_cache else None
        self.fork()
        atexit.register(self.close)

    def fork(self):
        """Best done early, before torch has threads or a GPU. The engine is Linux's alone, so there is fork."""
        self.folder = tempfile.mkdtemp(prefix="sprl_dmlab_")  # for maps: a worker that is killed removes nothing
        self.pipes, self.processes, self.is_fresh = [], [], True
        context = multiprocessing.get_context("fork")
        for _ in range(self.num_envs):
            pipe, end = context.Pipe()
            settings = end, [*self.pipes, pipe], self.folder, *self.settings
            self.processes.append(context.Process(target=lab_worker, args=settings, daemon=True))
            self.processes[-1].start()
            end.close()
            self.pipes.append(pipe)

    def start(self, seed):
        if not self.is_fresh:
            self.close_extras()
            self.fork()
        self.is_fresh = False
        self.send([[seed, n] for n in range(self.num_envs)])

    def send(self, messages):
        for pipe, message in zip(self.pipes, messages):
            with contextlib.suppress(OSError):  # a dead one is noticed when it has to answer
                pipe.send(message)

    def play(self, actions):
        images, rewards = np.zeros((self.num_envs, 84, 84, 3), np.uint8), np.zeros(self.num_envs, np.float32)
        ends = np.zeros(self.num_envs, bool)
        self.send(actions.tolist())
        for n, pipe in enumerate(self.pipes):
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                answer = "it was killed"
            if isinstance(answer, str):
                sys.exit(f"error: environment {n} of deepmind_lab died: {answer}")
            images[n], self.places[n], rewards[n], ends[n] = answer
        return images, rewards, ends

    def close_extras(self, **kwargs):
        for pipe in self.pipes:
            pipe.close()  # which ends its process
        deadline = time.time() + 5
        for process in self.processes:
            process.join(max(0, deadline - time.time()))
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


# the engine's walls and floors, each also in bright: corridors have the first ones, rooms any of 20
WALLS = "1 green, 1 red, 2 yellow, 2 blue, 3 orange, 3 gray, 4 green, 4 red, 5 red, 5 yellow"
FLOORS = "1 orange, 1 blue, 2 blue, 2 green, 3 green, 3 blue, 4 blue, 4 orange, 5 blue, 5 orange"
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
    """All texels (T, 3) uint8, where in them the parts start, and the mask of objects, int32. Walls come plain and with
    decals, each in two lights, floors in one light, the HUD is one texel. All textures are stored by columns, so that a
    column of the screen reads its texels in order."""

    def load(path, size):
        image = Image.open(path).convert("RGBA").convert("RGB")
        return np.asarray(image.reduce(image.width // size), np.float32).transpose(1, 0, 2) / 255

    def load_all(paths, names):
        names = [name.split() for name in names.split(",")]
        names += [(style, f"{name}_bright") for style, name in names]
        return [load(paths(f"style_0{style}")[name], TEXTURE) for style, name in names]

    def levels(image, light=1.0):
        """Blurred, and a little darker, with distance."""
        blocks = ((2**level, light * 0.93**level) for level in range(LEVELS))
        means = (image.reshape(TEXTURE // n, n, TEXTURE // n, n, 3).mean((1, 3)) * dim for n, dim in blocks)
        return [mean.repeat(TEXTURE // len(mean), 0).repeat(TEXTURE // len(mean), 1) for mean in means]

    walls = []
    for plain in load_all(labmaze.assets.get_wall_texture_paths, WALLS):
        for decal in [None, *draw_figures(24)[2 : 2 + NUM_DECALS]]:
            image = plain.copy()
            if decal is not None:  # a picture in a frame, in colours that no object has
                image[16:48, 10:42], image[18:46, 12:40] = 0.1, 0.9 - 0.6 * decal[0, 0, :3]
                image[20:44, 14:38][decal[..., 3] == 1] = 0.1
            walls += [*levels(image), *levels(image, light=0.8)]
    floors = load_all(labmaze.assets.get_floor_texture_paths, FLOORS)
    box = labmaze.assets.get_sky_texture_paths("sky_03")
    sides = [load(path, 256) for path in (box.front, box.right, box.back, box.left)]
    quarter = (np.arange(SKY_TURN) + 0.5) / SKY_TURN * 4
    column = (np.tan((quarter % 1 - 0.5) * np.pi / 2) + 1) * 128
    sky = [sides[int(side)][int(x), :: 256 // SKY_RISE] for side, x in zip(quarter, column)]
    looks = np.zeros((NUM_LOOKS + 2, LOOK, TEXTURE, 4))  # the last is empty, and so is what lies below an object
    looks[:-1, :, :LOOK] = draw_figures(LOOK)

    parts = {"walls": walls, "floors": [level for image in floors for level in levels(image, light=0.9)]}
    parts |= {"sky": sky, "hud": [1, 0.69, 0], "looks": looks[..., :3]}
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
        hud = np.zeros((self.side, self.side), bool)  # an orange 100, the agent's health
        hud[76:83, [26, 29, 32, 35, 38]] = hud[[76, 82], 29:33] = hud[[76, 82], 35:39] = True
        self.hud = torch.from_numpy(np.flatnonzero(hud)).to(device)

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
        index = torch.cat([above, below], 1).flatten(1).index_fill_(1, self.hud, self.starts["hud"])
        return self.texels.index_select(0, index.flatten()).view(-1, self.side, self.side, 3)


PICKUP = np.array([[-50, -36], [44, 36]])  # least and most (x, y) from an object's centre: Quake III's box
RESPAWN = 2  # frames after the last good object was taken
CLEARANCE = 16  # from a wall
CORNERS = np.array([[1e-6 - CLEARANCE], [CLEARANCE - 1e-6]])
TURN = np.deg2rad(0.1056)  # per pixel and frame
# units a frame: Quake III's walk with a push that fades towards the top speed, fitted to the engine's measured speeds
FRICTION, STOP_SPEED, PUSH, PUSH_GAIN, PUSH_TOP = 0.0935, 1.69, 0.845, 0.3, 6.213


class LabMazes(LabWorlds):
    """The embedded stand-in: mazes of DeepMind Lab's own generator, drawn by a ray caster, with its speeds, rewards and
    respawns. For developing and comparing methods: its scores are not DeepMind Lab's."""

    def __init__(self, env_id, num_envs, num_frames, device):
        super().__init__(env_id, num_envs, num_frames)
        self.caster = RayCaster(num_envs, self.size, device)

    def start(self, seed):
        self.rngs = [np.random.default_rng([seed, n]) for n in range(self.num_envs)]
        seeds = (int(rng.integers(2**31 - 1)) for rng in self.rngs)
        self.mazes = [labmaze.RandomMaze(self.size, self.size, random_seed=s, **self.maze_settings) for s in seeds]
        count = len(self.object_rewards)
        self.solid = np.zeros((self.num_envs, self.size, self.size), bool)  # by y and x, both from the south-west
        self.velocities, self.headings = np.zeros(self.num_envs, complex), np.zeros(self.num_envs)
        self.objects = np.zeros((self.num_envs, count, 2))  # their (x, y) in world units
        self.present, self.looks = np.zeros((self.num_envs, count), bool), np.zeros((self.num_envs, count), int)
        self.spawn_cells, self.object_cells = ([None] * self.num_envs for _ in range(2))
        self.clocks, self.respawns = np.zeros((2, self.num_envs), int)  # steps so far; frames until a respawn

    def start_episode(self, n):
        """A new maze with new looks."""
        rng, maze = self.rngs[n], self.mazes[n]
        maze.regenerate()
        entities = np.flipud(maze.entity_layer)
        is_room = np.flipud(maze.variations_layer) != "."
        self.solid[n] = entities == "*"
        self.spawn_cells[n], self.object_cells[n] = (np.argwhere(entities == token)[:, ::-1] for token in "PG")
        wall, floor = rng.integers(0, 20, 2)
        decals = rng.integers(1, NUM_DECALS + 1, (4, *is_room.shape)) * (rng.random((4, *is_room.shape)) < 0.1)
        table, solid = np.zeros((5, GRID, GRID), np.int32), np.ones((GRID, GRID), np.float32)
        solid[: self.size, : self.size] = self.solid[n]
        table[0, : self.size, : self.size] = is_room * floor * LEVELS * TEXTURE**2
        table[1:, : self.size, : self.size] = (is_room * wall * (1 + NUM_DECALS) + decals) * 2 * LEVELS * TEXTURE**2
        self.caster.tables[n] = torch.from_numpy(table).flatten(1)
        self.caster.solid[n] = torch.from_numpy(solid).flatten()
        is_goal = len(self.object_rewards) == 1  # it has a look of its own
        self.looks[n] = NUM_LOOKS if is_goal else rng.permutation(NUM_LOOKS)
        self.clocks[n] = self.respawns[n] = 0
        self.place_objects(n)
        self.spawn(n)

    def place_objects(self, n):
        cells = self.object_cells[n]
        self.objects[n] = self.rngs[n].choice(cells, len(self.object_rewards), replace=False) * CELL + CELL / 2

    def spawn(self, n):
        self.present[n] = True
        self.places[n] = self.rngs[n].choice(self.spawn_cells[n]) * CELL + CELL / 2
        self.headings[n], self.velocities[n] = self.rngs[n].uniform(0, 2 * np.pi), 0

    def move(self, actions):
        """A frame of turning, friction and a push where it is wished to, in complex numbers; walls stop each axis for
        itself."""
        look, _, strafe, forward, *_ = ACTIONS[actions].T
        self.headings -= TURN * look
        wish = (forward - 1j * strafe) * np.exp(1j * self.headings)
        speed = np.maximum(abs(self.velocities), 1e-9)
        self.velocities *= (1 - FRICTION * np.maximum(1, STOP_SPEED / speed)).clip(0)
        push = PUSH_GAIN * (PUSH_TOP - (self.velocities * wish.conj()).real)
        self.velocities += push.clip(0, PUSH) * wish
        self.advance(0, self.velocities.real)
        self.advance(1, self.velocities.imag)

    def advance(self, axis, velocities):
        new, ahead = self.places[:, axis] + velocities, np.sign(velocities)
        cell = ((new + CLEARANCE * ahead) // CELL).astype(int)
        corners = (self.places[:, 1 - axis] + CORNERS) // CELL  # (2, N)
        cells = (corners.astype(int), cell) if axis == 0 else (cell, corners.astype(int))
        hit = self.solid[np.arange(self.num_envs), *cells].any(0)
        self.places[:, axis] = np.where(hit, (cell + (ahead < 0)) * CELL - CLEARANCE * ahead, new)
        velocities[hit] = 0  # a view

    def play(self, actions):
        begins, rewards = self.done, np.zeros(self.num_envs, np.float32)
        for _ in range(REPEAT):
            self.move(actions)
            self.respawns -= 1
            for n in np.flatnonzero(self.respawns == 0):
                if len(self.object_rewards) > 1:  # a goal stays where it is
                    self.place_objects(n)
                self.spawn(n)
            gaps = self.places[:, None] - self.objects  # (N, objects, 2)
            touched = ((gaps >= PICKUP[0]) & (gaps <= PICKUP[1])).all(2) & self.present & ~begins[:, None]
            rewards += touched @ self.object_rewards
            self.present &= ~touched
            left = (self.present * self.object_rewards > 0).any(1)
            self.respawns[touched.any(1) & ~left] = RESPAWN
        self.clocks += 1  # it runs on
        for n in np.flatnonzero(begins):
            self.start_episode(n)
        return self.draw(), rewards, ~begins & (self.clocks == self.episode_steps)

    def draw(self):
        objects = [self.objects / CELL, np.where(self.present, self.looks, -1)[..., None]]
        objects = np.concatenate(objects, 2).reshape(self.num_envs, -1)
        scene = np.concatenate([self.places / CELL, self.headings[:, None], objects], 1).astype(np.float32)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on a CPU each operation is so short that threads would only wait for one another
        images = self.caster.draw(torch.from_numpy(scene).to(self.caster.texels.device)).cpu().numpy()
        torch.set_num_threads(threads)
        return images


def make_envs(args):
    if args.env_id not in TASKS:
        fail(f"--env-id {args.env_id}, accepted: {', '.join(TASKS)}")
    try:
        if args.engine != "labmaze":
            importlib.import_module("deepmind_lab")
            args.engine = "deepmind_lab"  # also in the config that the run records, which must not say `auto`
    except Exception as error:
        if args.engine == "deepmind_lab":
            fail(f"--engine deepmind_lab does not import, accepted without it: labmaze ({error!r})")
        if not isinstance(error, ModuleNotFoundError) or error.name != "deepmind_lab":
            print(f"deepmind_lab is installed but does not import: {error!r}", file=sys.stderr)
        print(f"engine: labmaze, a stand-in whose scores are not DeepMind Lab's ({error!r})", file=sys.stderr)
        args.engine = "labmaze"
    if args.engine == "deepmind_lab":
        return DeepMindLab(args.env_id, args.num_envs, 1 + args.stack_observations, args.renderer, args.level_cache)
    if labmaze is None:
        fail("--engine labmaze needs the package labmaze, which can be installed in Python 3.11 and 3.12 only")
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    return LabMazes(args.env_id, args.num_envs, 1 + args.stack_observations, device)


# AGENT ###############################################################################################################
class ToImage(nn.Module):
    def forward(self, obs):  # (B, frames, 84, 84, 3) uint8 -> (B, frames * 3, 84, 84) in [0, 1], channels_last
        return obs.movedim(1, 3).flatten(3).float().mul_(1 / 255).permute(0, 3, 1, 2)  # faster than a division


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
    num_frames = envs.single_observation_space.shape[0]
    network = nn.Sequential(  # of Mnih et al. (2015)
        ToImage(),
        layer_init(nn.Conv2d(3 * num_frames, 32, 8, stride=4)), nn.ReLU(),
        layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(),
        layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
        nn.Flatten(), layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
    ).to(memory_format=torch.channels_last)  # fmt: skip
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


class LabRNet(nn.Module):
    """Siamese network: can the late state be reached from the early one in at most k - 1 steps? A ResNet embeds each
    state once. The comparator's first layer acts on the concatenation of two embeddings, W [a; b] = W_early a +
    W_late b, so both products are computed once per state (`embed`); a pair costs the layers after it (`compare`)."""

    def __init__(self, width, blocks, num_layers):
        super().__init__()
        widths = [width * 2**stage for stage, count in enumerate(blocks) for _ in range(count)]
        hidden, side = 8 * width, -(-21 // 2 ** (len(blocks) - 1))  # the stem leaves 21 of 84, each stage halves it
        self.branch = nn.Sequential(
            ToImage(), nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.GroupNorm(1, width), nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1), *(ResidualBlock(i, o, o // i) for i, o in zip([width, *widths], widths)),
            nn.Flatten(),  # the mean over all places, usual here, would forget where things are
            nn.Linear(widths[-1] * side**2, hidden), nn.ReLU(),
        ).to(memory_format=torch.channels_last)  # fmt: skip
        self.early = nn.Linear(hidden, hidden)
        self.late = nn.Linear(hidden, hidden, bias=False)
        self.late.weight.data = -self.early.weight.data  # begin with the difference of the embeddings
        layers = [nn.ReLU()]
        for _ in range(num_layers - 1):
            layers += [nn.Linear(hidden, hidden), nn.ReLU()]
        self.head = nn.Sequential(*layers, nn.Linear(hidden, 1))

    def embed(self, obs):  # (B, frames, 84, 84, 3) uint8 -> (B, 2, hidden): as the early and as the late state
        embedding = self.branch(obs[:, -1:])  # of the newest frame alone
        return torch.stack([self.early(embedding), self.late(embedding)], 1)

    def compare(self, early, late):  # (..., hidden), (..., hidden) -> (...) logits
        return self.head(early + late).squeeze(-1)


def make_rnet(envs, args, blocks=(2, 2, 1), num_layers=3):  # the paper's SPRL; ECO has a larger one
    return LabRNet(args.rnet_width, blocks, num_layers)


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
    method = "sprl" if args.cost_scale else "ppo"
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
    if args.resume and args.engine != old_args.engine:
        fail(f"--engine {args.engine} with --resume {args.resume}, accepted: {old_args.engine}, its own")
    method = f"{method}-{args.engine}"  # in all that is printed and drawn: the engines' scores are not comparable
    agent = make_agent(envs, args).to(device)
    agent.precision = bf16 = torch.autocast(device.type, torch.bfloat16, args.precision == "bf16")
    embed_all, compare_all, rnet_loss = bf16(embed_all), bf16(compare_all), bf16(rnet_loss)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    learned = {"agent": agent, "optimizer": optimizer}  # what a checkpoint holds
    gaps = args.k + args.tolerance * np.arange(1, args.num_tolerance_samples + 1)  # a cost looks that many steps back
    window = int(gaps[-1])
    rnet = ring = None
    if args.cost_scale:
        rnet = make_rnet(envs, args).to(device).eval()
        rnet_optimizer = torch.optim.Adam(rnet.parameters(), fused=True)  # its rate is set where it trains
        learned |= {"rnet": rnet, "rnet_optimizer": rnet_optimizer}
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
    if rnet:  # it sees the newest frame alone, so the ring holds no stacks
        ring = Ring(max(args.ring_size // args.num_envs, args.num_steps, window + 1), obs[:, :, -1:])
        ring.add(obs[-1:, :, -1:], segment_steps[-1:])
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
                    is_cut = (reward != 0) | (rewards[step - 1] != 0)  # the engine moves agents 2 frames later
                    valid[step], rewards[step] = ~next_done, reward
                    next_done = terminations[step] | truncations[step]
                    segment_steps[step + 1] = np.where(valid[step] & ~is_cut, segment_steps[step] + 1, 0)
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
            if rnet and rnet_is_reliable:
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
                ring.add(obs[1:, :, -1:], segment_steps[1:])
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
                if next_rnet_step == start_step + args.rnet_start and device.type == "cpu":  # the first training
                    eta = (args.total_timesteps - global_step) / (global_step - start_step) * (time.time() - start_time)
                    print(f"\nat least {eta / 3600:.1f} h on this CPU, less with `--rnet-width 16`", file=sys.stderr)
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
