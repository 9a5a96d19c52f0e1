"""Draws an agent's trajectories of low and of high k-SP cost side by side (SPRL, Appendix C).

    python analysis/trajectories.py runs/<name>/agent.pt                       # runs/<name>/trajectories.png
    python analysis/trajectories.py runs/<name>/agent.pt --seed 2 --episodes 500 --out pictures
    python analysis/trajectories.py runs/<ppo>/agent.pt --judge runs/<sprl>/agent.pt     # PPO's, by the RNet of SPRL
    python analysis/trajectories.py runs/<name>/agent.pt --script my_sprl.py             # of your own script

Plays episodes on fresh layouts and asks for the k-SP cost of every step: of the checkpoint's own reachability network
(RNet) or another one's, on MiniGrid without any of the true reachability. The figure shows trajectories of the quarter
with the lowest mean cost per step and of the quarter with the highest, spread evenly over each quarter and not chosen.
The first steps of an episode have nothing to be compared with: the mean is over the others, or short episodes would
cost little merely for being short, and a trajectory without others is left out. A path goes from purple to yellow as
time passes; it is shaken a little, so that what overlaps is seen and turning in place becomes a scribble.

On MiniGrid a trajectory is an episode, on its own map, for every episode has another layout. On Montezuma's Revenge it
is 60 steps, as in the paper, over the picture they begin with. Another domain adds a line to VIEWS.
"""

import os
from dataclasses import dataclass, field

import matplotlib
import numpy as np
import torch
import tyro
from common import (
    ROOT,
    check_ranges,
    fail,
    load_rnet,
    load_run,
    load_script,
    parse_args,
    write_csv,
    written_whole,
)
from evaluate import play, summary
from minigrid.minigrid_env import MiniGridEnv
from oracle import Oracle
from tqdm import tqdm

SPRL = ROOT / "ppo_sprl_minigrid.py"  # has the cost, and its settings, where a checkpoint's script has none
TILE, COLUMNS, ROWS = 16, 4, 3  # pixels of a grid square; maps per quarter


@dataclass
class Args:
    checkpoint: tyro.conf.Positional[str]  # path of the agent.pt that a training wrote
    script: str | None = None  # path of your own script, if the checkpoint is not of one of ours
    episodes: int = 200  # episodes to play, 4 to 100000
    seed: int = 1  # of the layouts and of the sampled actions, at least 0
    out: str | None = None  # folder of trajectories.csv and trajectories.png (default: the checkpoint's)
    judge: str | None = None  # an agent.pt of the same domain whose RNet tells the cost (default: the checkpoint)
    judge_script: str | None = None  # path of your own script, if the judge is not of one of ours


# DOMAINS #############################################################################################################
def grid_places(positions):
    """Where the agents are, (N, 2), in pixels of the background."""
    return (positions + 0.5) * TILE - 0.5


def grid_background(envs, obs, i):
    """Environment i's map without its agent, an image."""
    return envs.worlds[i].grid.render(TILE, agent_pos=(-1, -1))


def screen_places(positions):
    """Montezuma's Revenge: the figure's middle on the 84x84 screen, 160x210 in the game, where y grows upwards."""
    x, y = positions.T
    return np.stack([(x % 256 + 2) / 160 * 84, (317 - y) / 210 * 84], 1)


def screen_background(envs, obs, i):
    """The game's picture as the agent saw it, grey as RGB."""
    return grey_picture(obs[i])


def grey_picture(obs):  # (frames, 84, 84)
    return obs[-1, :, :, None].repeat(3, 2)


VIEWS = {  # where agents are, what lies below their path, the steps of a trajectory if it is not the whole episode
    "MiniGrid": (grid_places, grid_background, None),
    "Montezuma's Revenge": (screen_places, screen_background, 60),
}


def find_domain(run):
    if isinstance(getattr(run.envs, "worlds", [None])[0], MiniGridEnv):
        return "MiniGrid"
    return "Montezuma's Revenge" if run.args.env_id.startswith("MontezumaRevenge") else None


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

    def __init__(self, envs, to_places, background, observe=None):
        self.envs, self.to_places, self.background, self.observe = envs, to_places, background, observe
        self.finished = []

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def note(self, obs, info, begins, rewards=None):
        places = self.to_places(info["position"])
        states = self.observe() if self.observe else np.zeros(self.envs.num_envs, int)
        for i in range(self.envs.num_envs):
            if begins[i]:
                self.running[i] = Episode(i, self.background(self.envs, obs, i))
            else:
                self.running[i].rewards.append(float(rewards[i]))
            self.running[i].frames.append(np.copy(obs[i]))
            self.running[i].places.append(np.copy(places[i]))
            self.running[i].states.append(int(states[i]))

    def reset(self, **kwargs):
        obs, info = self.envs.reset(**kwargs)
        self.running, self.done = [None] * self.envs.num_envs, np.zeros(self.envs.num_envs, bool)
        self.note(obs, info, ~self.done)
        return obs, info

    def step(self, actions):
        obs, rewards, terminations, truncations, info = self.envs.step(actions)
        self.note(obs, info, self.done, rewards)
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
def count_segment_steps(rewards):
    """Steps (T + 1,) since each state's segment began: at the episode's start, or at the last non-zero reward."""
    steps = [0]
    for reward in rewards:
        steps.append(steps[-1] + 1 if reward == 0 else 0)
    return np.array(steps)


def first_cost(gaps, percentile):
    """The fewest steps in a segment that can cost: the percentile passes 0.5 once enough older states are there."""
    return next(int(gap) for gap in gaps if np.percentile((gaps <= gap).astype(float), percentile) > 0.5)


def step_costs(episode, sprl, judge, gaps, percentile):
    """The k-SP cost (T,) of the episode's steps by the script's own ksp_cost; the judge is an RNet or the oracle."""
    segment_steps = count_segment_steps(episode.rewards)[1:, None]
    if segment_steps.max() < first_cost(gaps, percentile):  # and perhaps too short for any pair
        return np.zeros(len(segment_steps))
    if isinstance(judge, torch.nn.Module):
        embeddings = sprl.embed_all(judge, torch.from_numpy(np.stack(episode.frames)).unsqueeze(1))  # (T + 1, 1, 2, ..)
    else:
        embeddings = torch.tensor(episode.states)[:, None, None, None].expand(-1, -1, 2, -1)
    return sprl.ksp_cost(judge, embeddings, segment_steps, gaps, percentile).squeeze(1).numpy()


def possible_costs(episode, costs, first):
    """The costs (T,), NaN at the steps that cannot have one because their segment began less than `first` steps ago."""
    return np.where(count_segment_steps(episode.rewards)[1:] >= first, costs, np.nan)


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
        background, places, states = grey_picture(frames[0]), episode.places[after], episode.states[after]
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


def table_rows(episodes, costs):
    low, high = quarters(costs)
    rows = []
    for i, episode in enumerate(episodes):
        row = {"episode": episode.number, "start": episode.start, "return": sum(episode.rewards)}
        row |= {"steps": len(episode.rewards), "cost_per_step": costs[i]}
        rows.append(row | {"quarter": "lowest" if i in low else "highest" if i in high else ""})
    return rows


def choose_judge(run, judges, source, k):
    """Whom to ask for the cost, its name, and how to number the states if it is the oracle."""
    is_other, domain = judges is not run, find_domain(run)
    if "rnet" in judges.checkpoint:
        name = f"{'another' if is_other else 'the'} checkpoint's RNet"
        history, least = judges.checkpoint.get("history", []), judges.args.rnet_reliable_accuracy
        if not any(row.get("rnet/heldout_accuracy", 0) > least for row in history):
            name += ", which its training did not trust yet"
        return load_rnet(judges, source, run.envs), name, None
    if is_other or domain != "MiniGrid":
        fail(f"{source} has no RNet to tell the cost, accepted: with --judge an agent.pt of SPRL or ECO on {domain}")
    oracle = Oracle(run.envs, k - 1)
    return oracle, "the true reachability (the checkpoint has no RNet)", oracle.observe


def main(args):
    check_ranges(args, episodes=(4, 100_000), seed=(0, float("inf")))
    run = load_run(args.checkpoint, args.episodes, args.seed, args.script)
    domain = find_domain(run)
    if domain not in VIEWS:
        fail(f"{args.checkpoint} plays {run.args.env_id}, accepted: agents of {' and '.join(VIEWS)}")
    *view, length = VIEWS[domain]
    judges = load_run(args.judge, args.episodes, args.seed, args.judge_script) if args.judge else run
    if find_domain(judges) != domain:
        fail(f"--judge {args.judge} plays {judges.args.env_id}, accepted: a checkpoint of {domain}")
    sprl = judges.script if hasattr(judges.script, "ksp_cost") else load_script(SPRL)
    names = ("k", "tolerance", "num_tolerance_samples", "cost_percentile")
    k, tolerance, num_samples, percentile = (getattr(judges.args, name, getattr(sprl.Args, name)) for name in names)
    gaps = k + tolerance * np.arange(1, num_samples + 1)
    judge, judge_name, observe = choose_judge(run, judges, args.judge or args.checkpoint, k)
    judge_name += f", k = {k}, Dt = {tolerance}, N = {num_samples}, percentile {percentile:g}"
    out = args.out or os.path.dirname(args.checkpoint) or "."
    with written_whole(out, "trajectories.csv", "trajectories.png") as (table, picture):
        recorder = Recorder(run.envs, *view, observe)
        played = play(recorder, run.agent, run.quotas, run.world_seed)
        episodes = first_episodes(recorder.finished, run.quotas)
        first, costs = first_cost(gaps, percentile), []
        for number, episode in enumerate(tqdm(episodes, "costs")):
            episode.number = number
            found = step_costs(episode, sprl, judge, gaps, percentile)
            costs.append(possible_costs(episode, found, first))
        if length:
            parts = [part for pair in zip(episodes, costs) for part in cut(*pair, length)]
            episodes, costs = [episode for episode, _ in parts], [found for _, found in parts]
        every, able = len(costs), [i for i, found in enumerate(costs) if not np.isnan(found).all()]
        if len(able) < 4:
            fail(f"--episodes {args.episodes} gave {len(able)} trajectories with a cost to tell, accepted: more")
        episodes, costs = [episodes[i] for i in able], np.array([np.nanmean(costs[i]) for i in able])
        steps = run.checkpoint.get("global_step", 0)
        title = f"{os.path.basename(run.script.__file__)}, {run.args.env_id}, {steps:,} steps of training; "
        title += f"{len(able)} of {every} " if len(able) < every else f"{every} "
        title += f"trajectories of {length} steps" if length else "episodes"
        title += " (the others cannot cost)" if len(able) < every else ""
        title += ", an even spread of each quarter."
        title += "" if length else " Green: the goal."
        write_csv(table, table_rows(episodes, costs))
        draw(episodes, costs, title, judge_name, first, picture)
    print(summary(*list(zip(*played))[1:], args.seed))
    print(f"k-SP cost per step by {judge_name}: {costs.mean():.3f}")
    for name, quarter in zip(("lowest", "highest"), quarters(costs)):
        steps = np.mean([len(episodes[i].rewards) for i in quarter])
        success = np.mean([sum(episodes[i].rewards) > 0 for i in quarter])
        print(f"{name} quarter: cost {costs[quarter].mean():.3f}, {steps:.1f} steps, success {success:.2f}")


if __name__ == "__main__":
    main(parse_args(Args))
