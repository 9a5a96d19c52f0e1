"""ICM: PPO with a bonus for transitions that a learned forward model, in a learned feature space, cannot yet predict.

Paper: "Curiosity-driven Exploration by Self-supervised Prediction", Pathak et al., ICML 2017; a baseline of the SPRL
paper, ICML 2021.

    python ppo_icm.py                                                # on FourRooms-7x7, minutes on a laptop
    python ppo_icm.py --env-id MiniGrid-KeyDoors-7x7-v0 --bonus-scale 0.3

Differences from the paper: those of ppo_sprl_minigrid.py, beside which this file is meant to be read. The features on
MiniGrid are not given; they are those of the RNet's branch there. On DeepMind Lab the worlds are those of
ppo_sprl_dmlab.py, which must then lie beside this file.
"""

import argparse
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
from importlib.metadata import version
from typing import Literal

import envpool
import envpool.registration
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
from minigrid.envs import DoorKeyEnv, FourRoomsEnv
from torch.distributions.categorical import Categorical
from torch.distributions.normal import Normal
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
    """MiniGrid-FourRooms-7x7-v0 or any id that a script ppo_sprl_*.py runs"""
    engine: Literal["auto", "deepmind_lab", "labmaze"] = "auto"
    """DeepMind Lab or the embedded stand-in, whose scores are not comparable; auto: deepmind_lab if it imports"""
    renderer: Literal["software", "hardware"] = "software"
    """how deepmind_lab draws: on the CPU or on a GPU"""
    level_cache: str | None = None
    """folder where deepmind_lab's compiled maps are kept: a maze seen before begins in 0.6 s, not in 7 to 15 s"""
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
    action_noise: float = 0.003
    """sigma of the Gaussian noise on Fetch's actions (paper: 0.003, not stated for SPRL; noise study 0.03, 0.1, 0.3)"""
    n_substeps: int = 20
    """Fetch's simulator steps per action; time limit x 20 / n_substeps (paper's sparsity study: 2, 3, 4, 6)"""

    # ICM
    bonus_scale: float = 0.1
    """weight of the bonus; 0 is plain PPO (paper on MiniGrid: ECO 0.001, ICM 0.1, GT-Grid 0.01)"""
    bonus_clip: float = 0.0
    """largest bonus before it is weighted, 0: no limit (authors' DMLab code: 1)"""
    forward_loss_weight: float = 0.8
    """share of the forward model in the curiosity loss, the inverse model has the rest (paper: 0.8; Atari, Fetch 1)"""
    icm_loss_scale: float = 0.3
    """weight of the curiosity loss in the joint loss (paper's table: 0.3)"""


DOMAINS = {  # the paper's settings where a domain's differ from the defaults above, which are MiniGrid's
    "minigrid": {},
    "atari": dict(
        total_timesteps=10_000_000, learning_rate=5e-4, max_episode_steps=10_000, stack_observations=3,
        bonus_scale=0.01, forward_loss_weight=1.0, icm_loss_scale=1.0,
    ),
    "fetch": dict(
        total_timesteps=1_000_000, learning_rate=5e-4, ent_coef=0.001, max_episode_steps=50, bonus_scale=0.001,
        forward_loss_weight=1.0, icm_loss_scale=1.0,
    ),
    "dmlab": dict(
        total_timesteps=20_000_000, learning_rate=2.5e-4, ent_coef=0.0042, bonus_scale=0.55, bonus_clip=1.0,
        forward_loss_weight=0.96, icm_loss_scale=64.0,
    ),
}  # fmt: skip
ONLY = {  # settings that are not for every domain, and whose they are
    "engine": ("dmlab",), "renderer": ("dmlab",), "level_cache": ("dmlab",), "encoding": ("minigrid",),
    "max_episode_steps": ("minigrid", "atari", "fetch"), "action_noise": ("fetch",), "n_substeps": ("fetch",),
}  # fmt: skip


def find_domain(env_id):
    """The domain that an id belongs to, by its looks; whether there is such a world is seen when it is made."""
    looks = {"minigrid": ("MiniGrid-", "BabyAI-"), "fetch": ("Fetch",), "dmlab": ("explore_",)}
    for domain, prefixes in looks.items():
        if env_id.startswith(prefixes):
            return domain
    if env_id.endswith("-v5"):
        return "atari"
    others = "MontezumaRevenge-v5, FetchReach-v4, explore_goal_locations_small"
    fail(f"--env-id {env_id} is unknown, accepted: ids like {Args.env_id}, {others}")


def domain_defaults(argv):
    """The paper's settings of the domain that --env-id names; --help shows them, flags go before them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env-id", "--env_id", nargs="?", default=Args.env_id, const=Args.env_id)
    env_id = parser.parse_known_args(argv)[0].env_id
    return Args(env_id=env_id, **DOMAINS[find_domain(env_id)])


RANGES = {  # what check_args accepts: (lowest, highest)
    (1, 2**31 - 1): "total_timesteps num_steps num_minibatches update_epochs",
    (1, 10**7): "max_episode_steps",
    (1, 2**16): "num_envs n_substeps",
    (0, 2**31 - 1): "checkpoint_interval",
    (0, 2**30): "seed",
    (0, 1000): "stack_observations",
    (0, np.inf): "learning_rate clip_coef ent_coef vf_coef max_grad_norm bonus_scale bonus_clip icm_loss_scale "
    "action_noise",
    (0, 1): "gamma gae_lambda forward_loss_weight",
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


def check_domain(args):
    """Refuses a setting that the worlds of --env-id would not look at."""
    domain = find_domain(args.env_id)
    for name, others in ONLY.items():
        value = getattr(args, name)
        if domain not in others and value != DOMAINS[domain].get(name, getattr(Args, name)):
            flag = f"--{name.replace('_', '-')} {value}"
            fail(f"{flag} says nothing to {args.env_id}, accepted: only with worlds of {', '.join(others)}")


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


FETCH_IDS = ("FetchReach-v4", "FetchPush-v4", "FetchSlide-v4", "FetchPickAndPlace-v4")


class FetchRobots(gym.vector.VectorEnv):
    """EnvPool's Fetch as the paper's sparse task: reward 1 and the end of the episode when the goal is reached, else 0.
    A state is the observation, the achieved and the desired goal. NEXT_STEP autoreset; EnvPool itself does it at the
    time limit, a termination, which it does not know, is followed by a reset of that robot alone."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    resumable = False  # the simulator's state cannot be saved
    reward_range = (0, 1)

    def __init__(self, env_id, num_envs, max_episode_steps, n_substeps, action_noise, gamma):
        if env_id not in FETCH_IDS:
            fail(f"--env-id {env_id} is unknown, accepted: {', '.join(FETCH_IDS)}")
        self.num_envs, self.action_noise, self.gamma = num_envs, action_noise, gamma
        self.max_episode_steps = max(1, round(max_episode_steps * 20 / n_substeps))
        # with EnvPool's own start of the slide 23 % of the goals lie beside the table
        slide = {"initial_slide0": 0.05} if "Slide" in env_id else {}
        self.make = partial(
            envpool.make_gymnasium, env_id, num_envs=num_envs, frame_skip=n_substeps,
            max_episode_steps=self.max_episode_steps, **slide,
        )  # fmt: skip
        self.single_action_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        dim = 16 if "Reach" in env_id else 31
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (dim,), np.float32)
        self.returns = np.zeros(num_envs)  # discounted sums of rewards, and the moments of all of them so far
        self.moments = np.zeros(3)  # count, sum, sum of squares

    def _state(self, obs):
        return np.concatenate([obs[key] for key in ("observation", "achieved_goal", "desired_goal")], 1).astype(
            np.float32
        )

    def reset(self, *, seed=None, options=None):
        self.pool, self.noise = self.make(seed=seed or 0), np.random.default_rng(seed)
        self.at_goal = np.zeros(self.num_envs, bool)
        return self._state(self.pool.reset()[0]), {}

    def step(self, actions):
        noise = self.action_noise * self.noise.standard_normal(actions.shape)
        # clipped before too, or a policy that asks for more than the bound would be free of noise
        actions = np.clip(np.clip(actions, -1, 1) + noise, -1, 1).astype(np.float32)
        states = np.empty((self.num_envs, *self.single_observation_space.shape), np.float32)
        truncations, reached = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        begin, on = np.flatnonzero(self.at_goal), np.flatnonzero(~self.at_goal)
        if len(on):
            obs, _, _, truncated, info = self.pool.step(actions[on], on)
            states[on] = self._state(obs)
            reached[on] = (info["is_success"] > 0) & (info["elapsed_step"] > 0)  # nobody went to a new episode's goal
            truncations[on] = truncated & ~reached[on]
        if len(begin):
            states[begin] = self._state(self.pool.reset(begin)[0])
        self.at_goal = reached
        return states, reached.astype(np.float64), reached.copy(), truncations, {}

    def learning_rewards(self, rewards, valid):
        """The rewards (T, N) divided by the running standard deviation of their discounted sums (Burda et al. 2018)."""
        for reward, counts in zip(rewards, valid):
            self.returns = np.where(counts, self.gamma * self.returns + reward, self.returns)
            sums = self.returns[counts]
            self.moments += len(sums), sums.sum(), np.square(sums).sum()
        count, total, squares = self.moments
        deviation = np.sqrt(max(squares / max(count, 1) - (total / max(count, 1)) ** 2, 0.0))
        return rewards / np.float32(deviation) if deviation > 0 else rewards

    def state_dict(self):
        return {"returns": self.returns.tolist(), "moments": self.moments.tolist()}

    def load_state_dict(self, state):
        if len(state["returns"]) != self.num_envs:
            raise ValueError(f"{len(state['returns'])} robots, not {self.num_envs}")
        self.returns, self.moments = np.array(state["returns"]), np.array(state["moments"])

    def close(self):
        pass


def load_lab():
    """ppo_sprl_dmlab.py, from where DeepMind Lab's worlds come."""
    try:
        import ppo_sprl_dmlab
    except ModuleNotFoundError as error:
        if error.name != "ppo_sprl_dmlab":
            raise
        fail("DeepMind Lab needs ppo_sprl_dmlab.py beside this file")
    return ppo_sprl_dmlab


def make_envs(args):
    domain = find_domain(args.env_id)
    if domain == "minigrid":
        return GridWorlds(args.env_id, args.num_envs, args.max_episode_steps)
    if domain == "dmlab":
        return load_lab().make_envs(args)
    if domain == "atari":
        return AtariGames(args.env_id, args.num_envs, args.max_episode_steps)
    return FetchRobots(
        args.env_id, args.num_envs, args.max_episode_steps, args.n_substeps, args.action_noise, args.gamma
    )


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


class StateMLP(nn.Module):
    """The paper's Fetch trunk: four FC(256) with ReLU."""

    def __init__(self, obs_shape, num_frames=1, width=256):
        super().__init__()
        sizes = [num_frames * obs_shape[0], width, width, width, width]
        self.layers = nn.ModuleList(layer_init(nn.Linear(*pair)) for pair in zip(sizes, sizes[1:]))
        self.out_features = width

    def forward(self, obs):  # (B, frames, dim) float32
        x = obs.flatten(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x


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


class GaussianAgent(nn.Module):
    """A diagonal Gaussian policy; what lies beyond the action space is clipped by the world, not here."""

    def __init__(self, network, out_features, action_dim):
        super().__init__()
        self.network = network
        self.actor = layer_init(nn.Linear(out_features, action_dim), std=0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(action_dim))
        self.critic = layer_init(nn.Linear(out_features, 1), std=1)

    def get_action_and_value(self, obs, action=None):
        hidden = self.network(obs)
        mean = self.actor(hidden)
        probs = Normal(mean, self.actor_logstd.exp().expand_as(mean), validate_args=False)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(-1), probs.entropy().sum(-1), self.critic(hidden).squeeze(-1)


def make_agent(envs, args):
    obs_shape, num_frames = envs.single_observation_space.shape, 1 + args.stack_observations
    domain = find_domain(args.env_id)
    if domain == "fetch":
        trunk = StateMLP(obs_shape, num_frames)
        return GaussianAgent(trunk, trunk.out_features, envs.single_action_space.shape[0])
    if domain in ("atari", "dmlab"):
        network, out_features = NatureCNN(obs_shape, num_frames), 512
    else:
        trunk = GridCNN(obs_shape, args.encoding, num_frames)
        network, out_features = nn.Sequential(trunk, layer_init(nn.Linear(trunk.out_features, 512)), nn.ReLU()), 512
    return Agent(network, out_features, int(envs.single_action_space.n))


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


# INTRINSIC REWARD ####################################################################################################
class ICM(nn.Module):
    """Features phi from which an inverse model can tell the action that led from one state to the next, and a forward
    model that predicts the next features from the action: its error is the bonus."""

    def __init__(self, envs, args, dim=128, hidden=256):
        super().__init__()
        obs_shape = envs.single_observation_space.shape
        domain = find_domain(args.env_id)
        of_images = domain in ("atari", "dmlab")
        self.m = args.stack_observations if of_images else 0  # frames it sees before the current one
        if domain == "fetch":
            trunk = StateMLP(obs_shape)
        elif of_images:
            trunk = NatureCNN(obs_shape, 1 + self.m)
        else:
            trunk = GridCNN(obs_shape, args.encoding)
        self.features = nn.Sequential(trunk, nn.Linear(trunk.out_features, dim), nn.ReLU())
        space = envs.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        self.action_dim = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.inverse = nn.Sequential(nn.Linear(2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, self.action_dim))
        self.predict = nn.Sequential(nn.Linear(dim + self.action_dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward_error(self, phi, next_phi, actions):
        """1/2 |phi^(s_{t+1}) - phi(s_{t+1})|^2 over the last axis."""
        actions = F.one_hot(actions, self.action_dim).float() if self.discrete else actions
        return 0.5 * (self.predict(torch.cat([phi, actions], -1)) - next_phi).square().sum(-1)

    def inverse_loss(self, phi, next_phi, actions):
        """-log p(a | s, s'): a categorical over discrete actions, a unit Gaussian (up to a constant) over others."""
        guess = self.inverse(torch.cat([phi, next_phi], -1))
        if self.discrete:
            return F.cross_entropy(guess, actions, reduction="none")
        return 0.5 * (guess - actions).square().sum(-1)


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
    args, checkpoint = parse_args(domain_defaults(sys.argv[1:])), None
    script = os.path.basename(__file__)
    if args.resume is not None:
        args, checkpoint = resume_args(args.resume, script)
    engine = ""  # of DeepMind Lab
    if find_domain(args.env_id) == "dmlab":
        args.engine = engine = load_lab().choose_engine(args.engine)
        if checkpoint and engine != checkpoint["args"]["engine"]:
            fail(f"--engine {engine} with --resume {args.resume}, accepted: {checkpoint['args']['engine']}")
    check_args(args)
    check_domain(args)
    batch_size = args.num_envs * args.num_steps
    num_iterations = max(1, args.total_timesteps // batch_size)
    method = "icm" if args.bonus_scale else "ppo"

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
    icm = ICM(envs, args).to(device) if method == "icm" else None
    optimizer = torch.optim.Adam(
        [*agent.parameters(), *(icm.parameters() if icm else ())], lr=args.learning_rate, eps=1e-5, fused=True
    )
    learned = {"agent": agent, "optimizer": optimizer} | ({"icm": icm} if icm else {})
    observe = None
    method += f" ({engine})" if engine else ""  # in all that is printed and drawn
    method_charts = {"bonus": "icm/bonus"}

    # rows before `past` hold what the frame stack still needs of earlier rollouts
    past = args.stack_observations
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
    new_worlds = checkpoint and not envs.resumable  # which must not be those that the run began with
    next_obs, _ = envs.reset(seed=args.seed + (1_000 * checkpoint["iteration"] if new_worlds else 0))
    next_done = np.zeros(args.num_envs, bool)
    obs[past] = torch.from_numpy(next_obs)

    if checkpoint:
        try:
            load_learned(learned, checkpoint)
            if envs.resumable:
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
            else:
                envs.load_state_dict(checkpoint["worlds"])
            first_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
            elapsed = checkpoint["elapsed"]
            if envs.resumable:
                episode_returns = np.array(checkpoint["episode_returns"])
                episode_lengths = np.array(checkpoint["episode_lengths"])
                next_done = np.array(checkpoint["next_done"])
            history = checkpoint["history"]
            recent.extend(checkpoint["recent"])
            np.random.set_state(("MT19937", checkpoint["numpy_rng"][0].numpy(), *checkpoint["numpy_rng"][1:]))
            torch.set_rng_state(checkpoint["torch_rng"])
            torch.cuda.set_rng_state_all(checkpoint["cuda_rng"][: torch.cuda.device_count()])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            fail(f"--resume {args.resume} does not fit these settings: {error!r:.100}")
    elif observe:
        states[past] = observe()
    world = f"{args.env_id}__{engine}" if engine else args.env_id
    run_name = f"{world}__{args.exp_name}__{args.seed}__{int(time.time())}" if args.run_name is None else args.run_name
    run_dir = make_run_dir(f"{run_name}-{engine}" if run_name and engine not in run_name else run_name, args.resume)
    command = checkpoint["command"] if checkpoint else shlex.join(["python", script, *sys.argv[1:]])
    versions = {
        "commit": find_commit(),
        "python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__,
        "gymnasium": gym.__version__, "minigrid": minigrid.__version__, "envpool": envpool.__version__,
        "labmaze": version("labmaze"),
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
    if checkpoint:
        episodes = " with new episodes, a simulator's state cannot be saved" * (not envs.resumable)
        lost = past and envs.resumable and "past_obs" not in checkpoint
        say(f"resumed at step {global_step:,}{episodes}" + ", without the frames before it" * bool(lost))

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
        if icm:
            with torch.inference_mode():  # each frame's features once
                rows = torch.arange(past, len(obs), device=device)
                phi = embed_frames(icm.features, obs, depths, rows, icm.m)
                bonus = icm.forward_error(phi[:-1], phi[1:], actions)
            if args.bonus_clip:
                bonus = bonus.clamp(max=args.bonus_clip)
            total_rewards = total_rewards + args.bonus_scale * bonus
            charts["icm/bonus"] = (bonus * torch.from_numpy(valid).to(device)).sum() / max(1, int(valid.sum()))

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

                # ICM loss
                if icm:
                    both = [stack_frames(obs, depths, mb_rows + ahead, mb_envs, icm.m) for ahead in (0, 1)]
                    phi, next_phi = icm.features(torch.cat(both)).chunk(2)
                    forward_loss = icm.forward_error(phi, next_phi, b_actions[mb_inds]).mean()
                    inverse_loss = icm.inverse_loss(phi, next_phi, b_actions[mb_inds]).mean()
                    weight = args.forward_loss_weight
                    loss = loss + args.icm_loss_scale * (weight * forward_loss + (1 - weight) * inverse_loss)
                    charts |= {"icm/forward_loss": forward_loss, "icm/inverse_loss": inverse_loss}

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
