"""The true reachability of MiniGrid (GT-SPRL, Appendix B)."""

import gymnasium as gym
import numpy as np
import torch
from minigrid.core.world_object import Door
from minigrid.envs import DynamicObstaclesEnv
from minigrid.minigrid_env import MiniGridEnv


class Oracle(gym.vector.VectorWrapper):
    """MiniGrid worlds that know what is reachable in them, with the methods of an RNet: can the late state be reached
    in at most `radius` steps? Found by breadth-first search with Farama's own step(), keys and doors included. Each
    state that is met gets a number and a ball, the numbers of all states within the radius. `embed` returns the numbers
    of the states met since it was last called, `compare` looks a pair up. Deterministic worlds only."""

    def __init__(self, envs, radius, window=0):  # window: how many steps before a rollout will be asked for
        super().__init__(envs)
        if isinstance(envs.worlds[0], DynamicObstaclesEnv):
            raise SystemExit("error: --rnet oracle, accepted: worlds without moving obstacles")
        self.radius, self.window, self.count, self.balls = radius, window, 0, {}
        self.grids, self.numbers = [None for _ in envs.worlds], [{} for _ in envs.worlds]
        self.met, self.embedded = [], []  # numbers of the states that wait for `embed`, and of those it has returned
        self.recent = np.zeros(0, np.int64)

    def reset(self, **kwargs):
        outcome = self.env.reset(**kwargs)
        self.met.append(self.observe())
        return outcome

    def step(self, actions):
        outcome = self.env.step(actions)
        self.met.append(self.observe())
        return outcome

    def observe(self):
        """The numbers (N,) of the states that the worlds are in now."""
        now = np.zeros(self.num_envs, np.int64)
        for i, world in enumerate(self.env.worlds):
            if self.grids[i] is not world.grid:  # a new episode: another grid of other objects
                self.grids[i], self.numbers[i] = world.grid, {}
            state = get_state(world)
            now[i] = self.number(i, state)
            if now[i] not in self.balls:
                self.balls[int(now[i])] = np.array([self.number(i, near) for near in ball(world, state, self.radius)])
        return now

    def number(self, i, state):
        if state not in self.numbers[i]:
            self.numbers[i][state] = self.count = self.count + 1
        return self.numbers[i][state]

    def embed(self, obs):  # (B, ...) -> (B, 2, 1) numbers, as the early and as the late state of a pair
        met = np.concatenate(self.met)
        numbers, self.met = met[: len(obs)], [met[len(obs) :]]
        self.embedded.append(numbers)
        if not len(self.met[0]):  # the whole rollout is embedded: of older states only the window will be asked for
            rollout = np.concatenate(self.embedded)
            kept = len(rollout) + max(len(rollout), self.window * self.num_envs)
            self.recent, self.embedded = np.append(self.recent, rollout)[-kept:], []
            self.balls = {number: self.balls[number] for number in np.unique(self.recent).tolist()}
        return torch.from_numpy(numbers)[:, None, None].expand(-1, 2, -1).to(obs.device)

    def compare(self, early, late):  # (B, 1), (B, 1) numbers -> (B,) logits, infinitely sure
        pairs = [number * 2**32 + self.balls[number] for number in np.unique(early.cpu()).tolist()]
        hits = np.isin((early * 2**32 + late).cpu().numpy(), np.concatenate([np.zeros(0, np.int64), *pairs]))
        return torch.from_numpy(np.where(hits, np.inf, -np.inf)).float().squeeze(-1).to(early.device)


def get_state(world):
    doors = tuple((cell.is_open, cell.is_locked) for cell in world.grid.grid if isinstance(cell, Door))
    return tuple(world.grid.grid), doors, tuple(map(int, world.agent_pos)), int(world.agent_dir), world.carrying


def set_state(world, state):
    cells, doors, world.agent_pos, world.agent_dir, world.carrying = state
    world.grid.grid = list(cells)
    for door, flags in zip((cell for cell in cells if isinstance(cell, Door)), doors):
        door.is_open, door.is_locked = flags


def ball(world, start, radius):
    """All states within `radius` steps of start; the world is left as it was."""
    step_count, world.gen_obs = world.step_count, lambda: None  # nobody looks at these steps
    places = [(item, item.cur_pos) for item in (*start[0], start[-1]) if item]
    found, frontier = {start}, [start]
    for _ in range(radius):
        reached = {}
        for state in frontier:
            for action in range(world.action_space.n):
                set_state(world, state)
                ended = MiniGridEnv.step(world, action)[2]  # the grid's rules, without a subclass's bookkeeping
                reached[get_state(world)] = ended
        frontier = [state for state, ended in reached.items() if state not in found and not ended]
        found |= reached.keys()
    set_state(world, start)
    for item, place in places:
        item.cur_pos = place
    world.step_count = step_count
    del world.gen_obs
    return found
