"""Draws an agent's trajectories of low and of high k-SP cost side by side (SPRL, Appendix C).

    python analysis/trajectories.py runs/<name>/agent.pt                       # runs/<name>/trajectories.png
    python analysis/trajectories.py runs/<name>/agent.pt --seed 2 --episodes 500 --out pictures
    python analysis/trajectories.py runs/<ppo>/agent.pt --judge runs/<sprl>/agent.pt     # PPO's, by the RNet of SPRL

Plays episodes on fresh layouts and asks for the k-SP cost of every step: of the checkpoint's own reachability network
(RNet) or another one's, on MiniGrid without any of the true reachability. The figure shows trajectories of the quarter
with the lowest mean cost per step and of the quarter with the highest, spread evenly over each quarter and not chosen.
The first steps of an episode have nothing to be compared with: the mean is over the others, or short episodes would
cost little merely for being short, and a trajectory without others is left out. A path goes from purple to yellow as
time passes; it is shaken a little, so that what overlaps is seen and turning in place becomes a scribble.

On MiniGrid a trajectory is an episode, on its own map, for every episode has another layout. On Montezuma's Revenge it
is 60 steps, as in the paper, over the picture they begin with. Another domain adds a line to VIEWS: where its agents
are, what to draw below the path, into how many steps an episode is cut, and its name.
"""

import csv
import os
from dataclasses import dataclass, field

import matplotlib
import numpy as np
import torch
import tyro
from evaluate import fail, first_line, load_run, load_script, parse_args, play, summary, written_whole
from tqdm import tqdm

SPRL = "ppo_sprl_minigrid.py"  # has the cost and the oracle, and the settings of the cost where a checkpoint has none
TILE, COLUMNS, ROWS = 16, 4, 3  # pixels of a grid square; maps per quarter


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]
    """path of the agent.pt that a training wrote"""
    episodes: int = 200
    """episodes to play, 4 to 100000"""
    seed: int = 1
    """seed of the layouts and of the sampled actions, at least 0"""
    out: str | None = None
    """folder of trajectories.csv and trajectories.png, made if missing (default: the checkpoint's)"""
    judge: str | None = None
    """path of an agent.pt of the same domain whose RNet tells the cost (default: the checkpoint itself)"""


# DOMAINS #############################################################################################################
def grid_positions(envs):
    """Where the agents are, (N, 2), in pixels of the background."""
    return (envs.positions() + 0.5) * TILE - 0.5


def grid_background(envs, i):
    """Environment i's map without its agent, an image."""
    return envs.worlds[i].grid.render(TILE, agent_pos=(-1, -1))


def screen_positions(envs):
    """Montezuma's Revenge: the figure's middle on the 84x84 screen, 160x210 in the game, where y grows upwards."""
    x, y = envs.positions().T
    return np.stack([(x % 256 + 2) / 160 * 84, (317 - y) / 210 * 84], 1)


def screen_background(envs, i):
    """The game's picture as the agent saw it, grey as RGB."""
    return envs.frames[i].repeat(3, 2)


VIEWS = {  # by the class of the environments; the steps of a trajectory, where it is not the whole episode, and a name
    "GridWorlds": (grid_positions, grid_background, None, "MiniGrid"),
    "AtariGames": (screen_positions, screen_background, 60, "Montezuma's Revenge"),
}


# PLAY ################################################################################################################
@dataclass
class Episode:
    env: int
    background: np.ndarray
    frames: list = field(default_factory=list)  # T + 1 observations
    places: list = field(default_factory=list)  # T + 1 positions in pixels
    states: list = field(default_factory=list)  # T + 1 numbers of the oracle's, if there is one
    rewards: list = field(default_factory=list)  # T
    number: int = 0  # of the episode, in the order in which they ended
    start: int = 0  # the episode's step that is the first here


class Recorder:
    """Environments that keep what they show. Where the episode was over, a step begins the next one (NEXT_STEP)."""

    def __init__(self, envs, positions, background, observe=None):
        self.envs, self.positions, self.background, self.observe = envs, positions, background, observe
        self.finished = []

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def _note(self, obs, begins, rewards=None):
        places = self.positions(self.envs)
        states = self.observe() if self.observe else np.zeros(self.envs.num_envs, int)
        for i in range(self.envs.num_envs):
            if begins[i]:
                self.running[i] = Episode(i, self.background(self.envs, i))
            else:
                self.running[i].rewards.append(float(rewards[i]))
            self.running[i].frames.append(np.copy(obs[i]))
            self.running[i].places.append(np.copy(places[i]))
            self.running[i].states.append(int(states[i]))

    def reset(self, **kwargs):
        obs, info = self.envs.reset(**kwargs)
        self.running, self.done = [None] * self.envs.num_envs, np.zeros(self.envs.num_envs, bool)
        self._note(obs, ~self.done)
        return obs, info

    def step(self, actions):
        obs, rewards, terminations, truncations, info = self.envs.step(actions)
        self._note(obs, self.done, rewards)
        self.done = terminations | truncations
        self.finished += [self.running[i] for i in np.flatnonzero(self.done)]
        return obs, rewards, terminations, truncations, info


def first_episodes(finished, quotas):
    """Environment i's first quotas[i] episodes, in the order in which they ended; the rest would favour short ones."""
    left, kept = np.array(quotas), []
    for episode in finished:
        left[episode.env] -= 1
        if left[episode.env] >= 0:
            kept.append(episode)
    return kept


# COST ################################################################################################################
def segment_ages(rewards):
    """Steps (T + 1,) since each frame's segment began: at the episode's start, or at the last non-zero reward."""
    ages = [0]
    for reward in rewards:
        ages.append(ages[-1] + 1 if reward == 0 else 0)
    return np.array(ages)


def first_cost(k, tolerance, num_tolerance_samples, q):
    """The least age that can have a cost: the percentile passes 0.5 if enough older states are there."""
    n = np.arange(1, num_tolerance_samples + 1)
    needed = next(i for i in n if np.percentile((n <= i).astype(float), q) > 0.5)
    return k + tolerance * needed


def step_costs(episode, sprl, judge, settings, embed_frames=None):
    """The k-SP cost (T,) of the episode's steps by the script's own ksp_cost; the judge is an RNet or the oracle."""
    ages = segment_ages(episode.rewards)[1:, None]
    if ages.max() < first_cost(*settings):  # and perhaps too short for any pair
        return np.zeros(len(ages))
    if embed_frames:
        frames = torch.from_numpy(np.stack(episode.frames)).unsqueeze(1)  # (T + 1, 1, ...): one environment
        rows = torch.arange(len(frames))
        embeddings = embed_frames(judge.embed, frames, rows.unsqueeze(1), rows, judge.m)
    else:
        embeddings = torch.tensor(episode.states)[:, None, None, None].expand(-1, -1, 2, -1)
    return sprl.ksp_cost(judge, embeddings, ages, *settings).squeeze(1).numpy()


def possible_costs(episode, costs, first):
    """The costs (T,), NaN at the steps that cannot have one because their segment began less than `first` steps ago."""
    return np.where(segment_ages(episode.rewards)[1:] >= first, costs, np.nan)


def quarters(costs):
    """Indices of the lowest and of the highest quarter of the costs, each from low to high; ties in order of play."""
    order = np.argsort(costs, kind="stable")
    size = max(1, len(order) // 4)
    return order[:size], order[-size:]


def spread(ranked, count):
    """At most `count` of them, evenly spaced, the first and the last included."""
    return ranked[np.unique(np.linspace(0, len(ranked) - 1, min(count, len(ranked))).round().astype(int))]


def cut(episode, costs, steps):
    """The episode and its costs in trajectories of so many steps, each on its first picture; a shorter rest is left."""
    for start in range(0, len(costs) - steps + 1, steps):
        part, after = slice(start, start + steps), slice(start, start + steps + 1)
        frames = episode.frames[after]
        background, places, states = frames[0].repeat(3, 2), episode.places[after], episode.states[after]
        rewards = episode.rewards[part]
        yield Episode(episode.env, background, frames, places, states, rewards, episode.number, start), costs[part]


# FIGURE ##############################################################################################################
def draw(episodes, costs, title, judge_name, first, path):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import LineCollection

    figure = plt.figure(figsize=(13.2, 5.9), layout="constrained")
    colours = plt.get_cmap("plasma")
    rng = np.random.default_rng(0)
    blocks = figure.subfigures(1, 2, wspace=0.05)
    for block, name, ranked in zip(blocks, ("lowest", "highest"), quarters(costs)):
        mean_steps = np.mean([len(episodes[i].rewards) for i in ranked])
        block.suptitle(
            f"{name} quarter of k-SP cost: {costs[ranked].min():.2f} to {costs[ranked].max():.2f} per step, "
            f"{mean_steps:.0f} steps on average",
            fontsize=10,
            weight="bold",
        )
        axes = block.subplots(ROWS, COLUMNS).ravel()
        for axis in axes:
            axis.axis("off")
        for axis, i in zip(axes, spread(ranked, len(axes))):
            episode, steps = episodes[i], len(episodes[i].rewards)
            axis.imshow(episode.background, alpha=0.75)
            shake = rng.uniform(-0.27, 0.27, (steps + 1, 2)) * min(TILE, len(episode.background) / 20)
            shake[[0, -1]] = 0  # the marks lie in the middle of their squares
            line = np.stack(episode.places) + shake
            pieces = LineCollection(
                np.stack([line[:-1], line[1:]], 1),
                colors=colours(np.linspace(0.25, 0.95, steps)),
                linewidths=1.5,
                alpha=0.9,
                capstyle="round",
            )
            axis.add_collection(pieces)
            axis.plot(*line[0], "o", markersize=6, color="white", markeredgecolor="black", zorder=3)
            axis.plot(*line[-1], "X", markersize=7, color=colours(0.95), markeredgecolor="black", zorder=3)
            axis.set_title(f"cost {costs[i]:.2f}, {steps} steps", fontsize=9, pad=3)
    caption = (
        f"{title}\nMean cost by {judge_name}, without the first {first - 1} steps of an episode and after a reward,"
        " which cannot cost. White dot: start; cross: end; purple to yellow: time."
    )
    figure.supxlabel(caption, fontsize=8.5, x=0.01, ha="left")
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def write_costs(episodes, costs, path):
    low, high = quarters(costs)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("episode", "start", "return", "steps", "cost_per_step", "quarter"))
        for i, episode in enumerate(episodes):
            quarter = "lowest" if i in low else "highest" if i in high else ""
            total, steps = f"{sum(episode.rewards):.4f}", len(episode.rewards)
            writer.writerow((episode.number, episode.start, total, steps, f"{costs[i]:.4f}", quarter))


def main(args):
    if not 4 <= args.episodes <= 100_000:
        fail(f"--episodes {args.episodes} is out of range, accepted: 4 to 100000")
    if args.seed < 0:
        fail(f"--seed {args.seed} is out of range, accepted: 0 or more")
    run = load_run(args.checkpoint, args.episodes, args.seed)
    checkpoint, script, run_args, envs = run.checkpoint, run.script, run.args, run.envs
    if type(envs).__name__ not in VIEWS:
        accepted = " and ".join(domain for *_, domain in VIEWS.values())
        fail(f"{args.checkpoint} plays {run_args.env_id}, accepted: agents of {accepted}")
    *view, length, domain = VIEWS[type(envs).__name__]
    judges = load_run(args.judge, args.episodes, args.seed) if args.judge else run
    if type(judges.envs).__name__ != type(envs).__name__:  # scripts have copies of one class
        fail(f"--judge {args.judge} plays {judges.args.env_id}, accepted: a checkpoint of {domain}")
    sprl = judges.script if hasattr(judges.script, "ksp_cost") else load_script(SPRL, args.checkpoint)

    names = ("k", "tolerance", "num_tolerance_samples", "cost_percentile")
    settings = [getattr(judges.args, name, getattr(sprl.Args, name)) for name in names]
    source = args.judge or args.checkpoint
    if "rnet" in judges.checkpoint:
        try:
            judge = judges.script.make_rnet(envs, judges.args).eval()
            judge.load_state_dict(judges.checkpoint["rnet"])
        except Exception as error:
            fail(f"{source} does not fit today's {judges.checkpoint['script']} ({first_line(error)})")
        observe, judge_name = None, f"{'another' if args.judge else 'the'} checkpoint's RNet"
        if not judges.checkpoint.get("schedule", {}).get("ready", True):
            judge_name += ", which its training did not trust yet"
    elif args.judge or not hasattr(envs, "worlds"):
        fail(f"{source} has no RNet to tell the cost, accepted: with --judge an agent.pt of SPRL or ECO on {domain}")
    else:
        judge = sprl.Oracle(envs.worlds, settings[0] - 1)
        observe, judge_name = judge.observe, "the true reachability (the checkpoint has no RNet)"
    judge_name += f", k = {settings[0]}, Dt = {settings[1]}, N = {settings[2]}, percentile {settings[3]:g}"
    out = args.out or os.path.dirname(args.checkpoint) or "."
    with written_whole(out, "trajectories.csv", "trajectories.png") as (table, picture):
        recorder = Recorder(envs, *view, observe)
        played = play(recorder, run.agent, script.stack_frames, run_args.stack_observations, run.quotas, run.world_seed)
        episodes = first_episodes(recorder.finished, run.quotas)
        embed_frames, first = None if observe else judges.script.embed_frames, first_cost(*settings)
        costs = []
        for number, episode in enumerate(tqdm(episodes, "costs")):
            episode.number = number
            with torch.inference_mode():
                found = step_costs(episode, sprl, judge, settings, embed_frames)
            costs.append(possible_costs(episode, found, first))
        if length:
            parts = [part for pair in zip(episodes, costs) for part in cut(*pair, length)]
            episodes, costs = [episode for episode, _ in parts], [found for _, found in parts]
        every, able = len(costs), [i for i, found in enumerate(costs) if not np.isnan(found).all()]
        if len(able) < 4:
            fail(f"--episodes {args.episodes} gave {len(able)} trajectories with a cost to tell, accepted: more")
        episodes, costs = [episodes[i] for i in able], np.array([np.nanmean(costs[i]) for i in able])
        title = f"{checkpoint['script']}, {run_args.env_id}, {checkpoint.get('global_step', 0):,} steps of training; "
        title += f"{len(episodes)} of {every} " if len(able) < every else f"{every} "
        title += f"trajectories of {length} steps" if length else "episodes"
        title += " (the others cannot cost)" if len(able) < every else ""
        title += ", an even spread of each quarter."
        title += "" if length else " Green: the goal."
        write_costs(episodes, costs, table)
        draw(episodes, costs, title, judge_name, first, picture)
    print(summary(*list(zip(*played))[1:], args.seed))
    print(f"k-SP cost per step by {judge_name}: {costs.mean():.3f}")
    for name, quarter in zip(("lowest", "highest"), quarters(costs)):
        steps = np.mean([len(episodes[i].rewards) for i in quarter])
        success = np.mean([sum(episodes[i].rewards) > 0 for i in quarter])
        print(f"{name} quarter: cost {costs[quarter].mean():.3f}, {steps:.1f} steps, success {success:.2f}")


if __name__ == "__main__":
    main(parse_args(Args))
