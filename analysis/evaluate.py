"""Plays a trained agent on fresh layouts and prints its return.

    python analysis/evaluate.py runs/<name>/agent.pt                              # 100 episodes, actions as in training
    python analysis/evaluate.py runs/<name>/agent.pt --greedy --video agent.gif   # most likely actions, and a GIF

The checkpoint names its script, which must lie in the folder above; Args, make_envs, make_agent and stack_frames are
taken from it.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import io
import os
import re
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.envs.registration import load_env_creator
from PIL import Image
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]
    """path of the agent.pt that a training wrote"""
    episodes: int = 100
    """episodes to play, at least 1, shared evenly among the environments"""
    seed: int = 1
    """seed of the layouts and of the sampled actions, at least 0; never the layouts a training with it begins with"""
    greedy: bool = False
    """if toggled, take the most likely action instead of sampling"""
    video: str | None = None
    """write the first three episodes of the first environment to this .gif"""


def fail(message):
    """Ends the program the way a wrong command line should: one line, exit code 2."""
    sys.exit(print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr) or 2)


def parse_args(kind):
    """The command line as a `kind`; tyro's boxed errors, and what they say of the option meant, become one line."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(kind)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()[1:-1]]
        sections = re.split(" *(?:─{5,}|-{5,}) *", " ".join(lines))  # minus signs where stderr is not UTF-8
        fail("; ".join(section.rstrip(".") for section in sections[:-1] if section))  # the last one names --help


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


@contextlib.contextmanager
def written_whole(folder, *names):
    """Lends a temporary path for each file of the folder, made if missing. They get their names together when the block
    is through; if it fails or is stopped, what was there before stays."""
    paths = [os.path.join(folder, name) for name in names]
    try:
        os.makedirs(folder, exist_ok=True)
        yield [f"{path}.tmp" for path in paths]
        for path in paths:
            os.replace(f"{path}.tmp", path)
    except OSError as error:  # no permission, full disk, a file where a folder should be
        fail(f"--out {folder} cannot be written ({first_line(error)})")
    except KeyboardInterrupt:
        sys.exit(print("stopped, nothing was written", file=sys.stderr) or 130)
    finally:
        for path in paths:
            if os.path.exists(f"{path}.tmp"):
                os.remove(f"{path}.tmp")


def load_checkpoint(path, needs):
    """Reads a checkpoint without running any code in it; `needs` names the entries it must have, and their types."""
    if not os.path.isfile(path):
        fail(f"{path}: no such file, accepted: an agent.pt that a training wrote")
    try:
        with warnings.catch_warnings(action="ignore"):  # of other pickle protocols
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        fail(f"{path} is not a readable checkpoint: truncated, not one, or not plain values ({type(error).__name__})")
    for name, kind in needs.items():
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(name), kind):
            fail(f"{path} is not a checkpoint of a training: no {name!r} in it, accepted: an agent.pt")
    return checkpoint


def load_script(name, path):
    """The training script that a checkpoint names, as a module; only one that lies in ROOT is ever run."""
    accepted = sorted(script.name for script in ROOT.glob("ppo_*.py"))
    if name not in accepted:
        fail(f"{path} names the script {name[:80]!r}, accepted: {', '.join(accepted)}")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # a script may import another beside it
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), ROOT / name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        fail(f"{name} cannot be imported ({first_line(error)}), see its requirements")
    return module


@dataclass
class Run:
    checkpoint: dict
    script: types.ModuleType
    args: object
    envs: gym.vector.VectorEnv
    agent: torch.nn.Module
    quotas: np.ndarray  # episodes of each environment
    world_seed: int


def load_run(path, episodes, seed, device="cpu"):
    """A checkpoint's worlds, on layouts of their own, and its agent; seeds torch for the actions."""
    checkpoint = load_checkpoint(path, {"script": str, "args": dict, "agent": dict})
    script = load_script(checkpoint["script"], path)
    # Training begins with layouts seed, seed + 1, ...: a small seed would replay them, a hashed one lies far away.
    world_seed, action_seed = (int(word) >> 2 for word in np.random.SeedSequence(seed).generate_state(2))
    try:
        known = {field.name for field in dataclasses.fields(script.Args)}  # an older checkpoint may have other settings
        args = script.Args(**{name: value for name, value in checkpoint["args"].items() if name in known})
        args.num_envs, args.seed = min(episodes, args.num_envs), world_seed
        envs = script.make_envs(args)
        agent = script.make_agent(envs, args).to(device)
        agent.load_state_dict(checkpoint["agent"])
    except Exception as error:
        fail(f"{path} does not fit today's {checkpoint['script']} ({first_line(error)})")
    quotas = np.full(envs.num_envs, episodes // envs.num_envs)
    quotas[: episodes % envs.num_envs] += 1
    torch.manual_seed(action_seed)
    return Run(checkpoint, script, args, envs, agent, quotas, world_seed)


def most_likely(agent, policy_obs, space):
    """The action of the highest probability: a Gaussian's mean, or of discrete ones asked of the agent one by one."""
    if isinstance(space, gym.spaces.Box):
        return agent.actor(agent.network(policy_obs))
    num_actions = int(space.n)
    actions = torch.arange(num_actions, device=policy_obs.device).repeat(len(policy_obs))
    logprobs = agent.get_action_and_value(policy_obs.repeat_interleave(num_actions, 0), actions)[1]
    return logprobs.view(-1, num_actions).argmax(1)


def play(envs, agent, stack_frames, m, quotas, seed, greedy=False, frames=None, video_episodes=3, max_frames=300):
    """Plays until environment i has finished quotas[i] episodes and returns their rows (i, return, steps). Were it
    simply the first episodes to finish, short ones would be over-counted. `frames` collects environment 0's images."""
    device = next(agent.parameters()).device
    every_env = torch.arange(envs.num_envs, device=device)
    next_obs, _ = envs.reset(seed=seed)
    obs = torch.from_numpy(np.stack([next_obs] * (m + 1))).to(device)  # (m + 1, N, ...), the newest is last
    depths = torch.zeros((m + 1, envs.num_envs), dtype=torch.int64, device=device)  # steps since the episode began
    next_done, returns, lengths = np.zeros(envs.num_envs, bool), np.zeros(envs.num_envs), np.zeros(envs.num_envs, int)
    played, episodes = np.zeros(envs.num_envs, int), []
    if frames is not None:
        frames.append(envs.render())
    with tqdm(total=int(quotas.sum()), unit="episode") as bar:
        while (played < quotas).any():
            with torch.inference_mode():
                policy_obs = stack_frames(obs, depths, torch.full_like(every_env, m), every_env, m)
                if greedy:
                    action = most_likely(agent, policy_obs, envs.single_action_space)
                else:
                    action = agent.get_action_and_value(policy_obs)[0]
            next_obs, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
            if frames is not None and played[0] < min(quotas[0], video_episodes) and len(frames) < max_frames:
                frames.append(envs.render())
            valid = ~next_done  # False on the row that autoreset inserts
            next_done = terminations | truncations
            obs = torch.cat([obs[1:], torch.from_numpy(next_obs)[None].to(device)])
            depths = torch.cat([depths[1:], (depths[-1:] + 1) * torch.from_numpy(valid).to(device)])
            returns, lengths = np.where(valid, returns + reward, 0.0), np.where(valid, lengths + 1, 0)
            for i in np.flatnonzero(next_done & (played < quotas)):
                episodes.append((int(i), float(returns[i]), int(lengths[i])))
                played[i] += 1
                bar.update()
    return episodes


class DrawnFetch:
    """One Fetch robot of gymnasium-robotics, which can draw it as EnvPool cannot; the task is FetchRobots'."""

    num_envs = 1

    def __init__(self, run_args, max_episode_steps):
        os.environ.setdefault("MUJOCO_GL", "egl")  # draws without a screen
        import gymnasium_robotics

        gym.register_envs(gymnasium_robotics)
        spec = copy.deepcopy(gym.spec(run_args.env_id))

        class Robot(load_env_creator(spec.entry_point)):
            def _env_setup(self, initial_qpos):
                # the arm settles by them too, as EnvPool's does, to within 10 cm at 2 substeps
                usual, self.n_substeps = self.n_substeps, run_args.n_substeps
                super()._env_setup(initial_qpos)
                self.n_substeps = usual  # the constructor checks its frames per second

        spec.entry_point = Robot
        settings = {"max_episode_steps": max_episode_steps, "width": 240, "height": 240, "render_mode": "rgb_array"}
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
        return (
            self._state(obs),
            np.array([float(reached)]),
            np.array([reached]),
            np.array([truncated and not reached]),
            {},
        )

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
    if args.episodes < 1:
        fail(f"--episodes {args.episodes} is out of range, accepted: 1 or more")
    if args.seed < 0:
        fail(f"--seed {args.seed} is out of range, accepted: 0 or more")
    if args.video and not (args.video.endswith(".gif") and Path(args.video).absolute().parent.is_dir()):
        fail(f"--video {args.video} cannot be written, accepted: a name that ends in .gif, in a folder that exists")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = load_run(args.checkpoint, args.episodes, args.seed, device)
    envs, agent = run.envs, run.agent
    frames = [] if args.video else None
    settings = (run.script.stack_frames, run.args.stack_observations)
    watched = None if type(envs).__name__ == "FetchRobots" else frames
    episodes = play(envs, agent, *settings, run.quotas, run.world_seed, args.greedy, watched)
    if args.video and watched is None:
        drawn = DrawnFetch(run.args, envs.max_episode_steps)
        play(drawn, agent, *settings, np.array([3]), run.world_seed, args.greedy, frames)
        drawn.env.close()  # or its renderer complains when the program ends
    envs.close()
    _, returns, lengths = zip(*episodes)
    engine = {"LabMazes": ", engine labmaze", "DeepMindLab": ", engine deepmind_lab"}.get(type(envs).__name__, "")
    print(summary(returns, lengths, args.seed) + engine)  # the stand-in's scores are not DeepMind Lab's
    if args.video:
        try:
            print(f"{args.video}: {write_gif(frames, args.video)} frames, {os.path.getsize(args.video) / 1e3:.0f} kB")
        except OSError as error:
            fail(f"--video {args.video} cannot be written ({first_line(error)})")


if __name__ == "__main__":
    main(parse_args(Args))
