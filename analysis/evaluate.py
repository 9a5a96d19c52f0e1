"""Plays a trained agent on fresh layouts and prints its return.

    python analysis/evaluate.py runs/<name>/agent.pt                              # 100 episodes, actions as in training
    python analysis/evaluate.py runs/<name>/agent.pt --greedy --video agent.gif   # most likely actions, and a GIF
    python analysis/evaluate.py runs/<name>/agent.pt --script my_sprl.py          # of your own script
    python analysis/evaluate.py results/agents/MiniGrid-KeyDoors-7x7-v0__sprl__s1.pt --video agent.gif    # of ours

Args, make_envs and make_agent are taken from the script. A checkpoint names it, but chooses only among ours.
"""

import copy
import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from common import check_ranges, fail, first_line, load_run, parse_args
from gymnasium.envs.registration import load_env_creator
from PIL import Image
from tqdm import tqdm

os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a screen


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]  # path of the agent.pt that a training wrote
    script: str | None = None  # path of your own script, if the checkpoint is not of one of ours
    episodes: int = 100  # episodes to play, at least 1, shared evenly among the environments
    seed: int = 1  # of the layouts and the sampled actions, at least 0; never the layouts a training begins with
    greedy: bool = False  # take the most likely action instead of sampling
    video: str | None = None  # write the first three episodes of the first environment to this .gif


def most_likely(agent, obs, space):
    """The action of the highest probability: a Gaussian's mean, or of discrete ones asked of the agent one by one."""
    if isinstance(space, gym.spaces.Box):
        return agent.actor(agent.network(obs))
    num_actions = int(space.n)
    actions = torch.arange(num_actions, device=obs.device).repeat(len(obs))
    logprobs = agent.get_action_and_value(obs.repeat_interleave(num_actions, 0), actions)[1]
    return logprobs.view(-1, num_actions).argmax(1)


def render(envs):
    """Environment 0's image; vector environments of gymnasium's own return one for each."""
    image = envs.render()
    image = image[0] if isinstance(image, tuple | list) else image
    if image is None:
        fail("--video, accepted: a world that draws itself (its make_envs must hand on render_mode)")
    return image


def play(envs, agent, quotas, seed, greedy=False, frames=None, video_episodes=3, max_frames=300):
    """Plays until environment i has finished quotas[i] episodes and returns their rows (i, return, steps). Were it
    simply the first episodes to finish, short ones would be over-counted. `frames` collects environment 0's images."""
    device = next(agent.parameters()).device
    obs, _ = envs.reset(seed=seed)
    next_done, returns, lengths = np.zeros(envs.num_envs, bool), np.zeros(envs.num_envs), np.zeros(envs.num_envs, int)
    played, episodes = np.zeros(envs.num_envs, int), []
    if frames is not None:
        frames.append(render(envs))
    with tqdm(total=int(quotas.sum()), unit="episode") as bar:
        while (played < quotas).any():
            with torch.inference_mode():
                seen = torch.from_numpy(obs).to(device)
                if greedy:
                    action = most_likely(agent, seen, envs.single_action_space)
                else:
                    action = agent.get_action_and_value(seen)[0]
            obs, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
            if frames is not None and played[0] < min(quotas[0], video_episodes) and len(frames) < max_frames:
                frames.append(render(envs))
            valid = ~next_done  # False on the row that autoreset inserts
            next_done = terminations | truncations
            returns, lengths = np.where(valid, returns + reward, 0.0), np.where(valid, lengths + 1, 0)
            for i in np.flatnonzero(next_done & (played < quotas)):
                episodes.append((int(i), float(returns[i]), int(lengths[i])))
                played[i] += 1
                bar.update()
    return episodes


class DrawnFetch:
    """One Fetch robot of gymnasium-robotics, which can draw it as EnvPool cannot; the task is FetchRobots'."""

    num_envs = 1

    def __init__(self, run_args):
        import gymnasium_robotics

        gym.register_envs(gymnasium_robotics)
        spec = copy.deepcopy(gym.spec(run_args.env_id))
        time_limit = max(1, round(run_args.max_episode_steps * 20 / run_args.n_substeps))  # as FetchRobots has it

        class Robot(load_env_creator(spec.entry_point)):
            def _env_setup(self, initial_qpos):
                # the arm settles by them too, as EnvPool's does, to within 10 cm at 2 substeps
                usual, self.n_substeps = self.n_substeps, run_args.n_substeps
                super()._env_setup(initial_qpos)
                self.n_substeps = usual  # the constructor checks its frames per second

        spec.entry_point = Robot
        settings = {"max_episode_steps": time_limit, "width": 240, "height": 240, "render_mode": "rgb_array"}
        self.env, self.done, self.noise = gym.make(spec, **settings), False, run_args.action_noise
        self.env.unwrapped.n_substeps = run_args.n_substeps
        self.single_action_space = self.env.action_space

    def _state(self, obs):
        parts = (obs["observation"], obs["achieved_goal"], obs["desired_goal"])
        return np.concatenate(parts).astype(np.float32)[None]

    def reset(self, seed=None):
        return self._state(self.env.reset(seed=seed)[0]), {}

    def step(self, actions):
        if self.done:
            self.done = False
            return self.reset()[0], np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), {}
        noise = self.noise * self.env.np_random.standard_normal(actions[0].shape)
        action = np.clip(np.clip(actions[0], -1, 1) + noise, -1, 1)
        obs, _, _, truncated, info = self.env.step(action)
        reached = bool(info["is_success"])
        self.done = reached or truncated
        rewards, terminations = np.array([float(reached)]), np.array([reached])
        return self._state(obs), rewards, terminations, np.array([truncated and not reached]), {}

    def render(self):
        return self.env.render()


def summary(returns, lengths, seed):
    """One line; a success is a return above 0, as in the training's charts."""
    returns, count = np.asarray(returns), len(returns)
    spread = f" ± {returns.std(ddof=1) / np.sqrt(count):.3f}" if count > 1 else ""
    return (
        f"return {returns.mean():.3f}{spread}, success {(returns > 0).mean():.2f}, steps {np.mean(lengths):.1f} "
        f"over {count} episode{'s' * (count > 1)} (seed {seed})"
    )


def write_gif(frames, path, max_bytes=1_000_000):
    """A looped GIF of about 6 frames per second, halved in length until it is small enough. Returns its frames; PIL
    stores a frame that equals the one before it as a longer duration."""
    images = [Image.fromarray(frame).quantize(64, dither=Image.Dither.NONE) for frame in frames]
    while True:
        buffer = io.BytesIO()
        images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=160, loop=0)
        if len(images) == 1 or buffer.tell() <= max_bytes:
            break
        images = images[: len(images) // 2]
    Path(path).write_bytes(buffer.getvalue())
    return len(images)


def main(args):
    check_ranges(args, episodes=(1, math.inf), seed=(0, math.inf))
    if args.video and not (args.video.endswith(".gif") and Path(args.video).absolute().parent.is_dir()):
        fail(f"--video {args.video} cannot be written, accepted: a name that ends in .gif, in a folder that exists")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = load_run(args.checkpoint, args.episodes, args.seed, args.script, device, bool(args.video))
    frames, is_fetch = [] if args.video else None, run.args.env_id.startswith("Fetch")
    try:
        watched = None if is_fetch else frames
        episodes = play(run.envs, run.agent, run.quotas, run.world_seed, args.greedy, watched)
    except NotImplementedError:
        fail(f"--video {args.video} cannot be written, accepted: worlds that have a render()")
    if args.video and is_fetch:
        drawn = DrawnFetch(run.args)
        play(drawn, run.agent, np.array([3]), run.world_seed, args.greedy, frames)
        drawn.env.close()  # or its renderer complains when the program ends
    run.envs.close()
    _, returns, lengths = zip(*episodes)
    engine = {"LabMazes": ", engine labmaze", "DeepMindLab": ", engine deepmind_lab"}
    engine = engine.get(type(run.envs.unwrapped).__name__, "")  # the stand-in's scores are not DeepMind Lab's
    print(summary(returns, lengths, args.seed) + engine)
    if args.video:
        try:
            print(f"{args.video}: {write_gif(frames, args.video)} frames, {os.path.getsize(args.video) / 1e3:.0f} kB")
        except OSError as error:
            fail(f"--video {args.video} cannot be written ({first_line(error)})")


if __name__ == "__main__":
    main(parse_args(Args))
