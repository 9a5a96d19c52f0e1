"""Steps/s of the fast worlds against minigrid's FullyObsWrapper in a SyncVectorEnv, and of DeepMind Lab's stand-in: 12
environments, random actions. All run on one thread; the clock is the process's CPU time, so that other load on the
machine does not count.

    OMP_NUM_THREADS=1 python tests/bench_world.py
"""

import statistics
import time

import gymnasium as gym
import numpy as np
from conftest import CANONICAL, farama, load

REPETITIONS, NUM_STEPS, NUM_ENVS = 7, 400, 12
BAR, LAB_BAR = 5.0, 3000  # times SyncVectorEnv; steps/s


def speed(envs, actions, seed):
    """Steps per second of CPU time."""
    envs.reset(seed=seed)
    start = time.process_time()
    for action in actions:
        envs.step(action)
    return actions.size / (time.process_time() - start)


if __name__ == "__main__":
    script = load(CANONICAL)
    for size in ("7x7", "11x11"):
        env_id = f"MiniGrid-FourRooms-{size}-v0"
        contenders = {
            "GridWorlds": script.GridWorlds(env_id, NUM_ENVS, 1, 100),
            "SyncVectorEnv": gym.vector.SyncVectorEnv([lambda env_id=env_id: farama(env_id)] * NUM_ENVS),
        }
        actions = np.random.default_rng(0).integers(0, 7, (NUM_STEPS, NUM_ENVS))
        speeds = {name: [] for name in contenders}
        for repetition in range(REPETITIONS):  # interleaved, so that a slower moment meets both
            for name, envs in contenders.items():
                speeds[name].append(speed(envs, actions, repetition))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        ratios = [ours / theirs for ours, theirs in zip(*speeds.values())]
        shown = ", ".join(f"{name} {median:,.0f} steps/s" for name, median in medians.items())
        ratio = statistics.median(ratios)
        print(f"{size}: {shown}, ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), bar {BAR}")
    lab = load("ppo_sprl_dmlab.py")
    for env_id, (length, *_) in lab.TASKS.items():  # a whole episode, and the mazes of the next
        actions = np.random.default_rng(0).integers(0, 9, (length + 150, NUM_ENVS))
        envs = lab.make_envs(lab.Args(env_id=env_id, engine="labmaze"))
        speeds = [speed(envs, actions, repetition) for repetition in range(3)]
        shown = f"{statistics.median(speeds):,.0f} steps/s ({min(speeds):,.0f} to {max(speeds):,.0f})"
        print(f"{env_id} (labmaze): {shown}, bar {LAB_BAR:,}")
