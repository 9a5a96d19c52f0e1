"""Where four agents go on NineRooms: counts of their state transitions, as maps (SPRL, section 6.6).

    python analysis/transition_counts.py                                      # runs/results/transition_counts, 30 s
    python analysis/transition_counts.py --k 5 --layout 77 --out runs/counts  # another k and another set of doors

(a) Random: uniform over the seven actions, four of which do nothing here. (b) GT-UCB: plans with the true dynamics for
the bonus 1/sqrt(n), n the visits of the true state (x, y, direction) in all episodes so far, one sweep of value
iteration per step. (c) SPRL: minimises the k-SP cost with true distances and no reward; the goal is a square like any
other. (d) SPRL+Reward: the same, told only that arriving at the goal is a reward, which the cost's I[r = 0] needs; its
size is never used. As in MiniGrid the goal ends the episode.

What the paper leaves open. It shows the "converged behavior" of a trained policy and names no setting but k = 15. We do
not train: we compute what there is to converge to, the walk of the least discounted k-SP cost (Eq. 13 without
tolerance), by value iteration over all histories that matter, and draw evenly among equally good moves. What matters is
the longest shortest path that ends here, of at most k states: once s_t can be reached from s_j in fewer than t - j
steps, so can every state up to s_{j+k}, and the cost that is due at j + k is certain. It is charged, discounted, at
once, and s_j is forgotten. (With the default layout the best walks are laps of 36 states that come by none of them
twice, so a policy that sees s_t alone can walk them too.) An episode's last k states are charged as well, though their
cost would be due after its end. One layout serves all seeds, so that their counts can be averaged; the paper does not
give its layout, nor how many squares are rewarding, nor how many episodes it counts. Ours has one goal, in the room
opposite the start.
"""

from dataclasses import dataclass

import gymnasium as gym
import matplotlib
import numpy as np
import torch
import worlds  # noqa: F401, registers NineRooms
from common import (
    ROOT,
    check_ranges,
    load_script,
    parse_args,
    shortest_distances,
    write_csv,
    written_whole,
)
from minigrid.minigrid_env import MiniGridEnv
from tqdm import tqdm

GAMMA = 0.99


@dataclass
class Args:
    seeds: int = 4  # seeds 1..this of the agents' random choices, 1 to 100 (paper: 4)
    episodes: int = 40  # episodes per agent and seed, 1 to 10000 (paper: not given)
    steps: int = 500  # steps of an episode, 1 to 10000 (paper: 500)
    k: int = 15  # k of the k-SP constraint, 1 to 20 (paper: 15)
    layout: int = 240  # seed of NineRooms, 0 to 1000000: its doors, start and goal
    out: str = "runs/results/transition_counts"  # folder of transition_counts.csv and .png and table.csv


RANGES = {"seeds": (1, 100), "episodes": (1, 10_000), "steps": (1, 10_000), "k": (1, 20), "layout": (0, 1_000_000)}


# WORLD ###############################################################################################################
class StateGraph:
    """The world as tables, asked of its own step(): nexts (S, A) the state that an action leads to, ends (S, A) where
    that ends the episode. A state is (x, y, direction)."""

    def __init__(self, world, rewarded):
        self.start = (*map(int, world.agent_pos), int(world.agent_dir))
        squares = [(x, y) for y in range(world.height) for x in range(world.width)]
        self.goal = next(square for square in squares if getattr(world.grid.get(*square), "type", None) == "goal")
        if not rewarded:
            world.grid.set(*self.goal, None)
        self.squares = [square for square in squares if square == self.goal or world.grid.get(*square) is None]
        self.states = [(*square, direction) for square in self.squares for direction in range(4)]
        number = {state: i for i, state in enumerate(self.states)}
        self.nexts = np.zeros((len(self.states), int(world.action_space.n)), np.int64)
        self.ends = np.zeros(self.nexts.shape, bool)
        for i, a in np.ndindex(*self.nexts.shape):
            *world.agent_pos, world.agent_dir = self.states[i]
            world.agent_pos, world.step_count = tuple(world.agent_pos), 0
            self.ends[i, a] = MiniGridEnv.step(world, a)[2]  # terminated
            self.nexts[i, a] = number[*map(int, world.agent_pos), int(world.agent_dir)]
        self.first = number[self.start]
        self.moves = {(i, int(j)) for i, row in enumerate(self.nexts) for j in row if i != j}
        self.distances = shortest_distances(self.nexts, self.ends)


class TrueDistances:
    """A judge of the scripts' ksp_cost, in the place of an RNet: its embedding of a state is the state's number."""

    def __init__(self, distances, k):
        self.is_near = torch.from_numpy(distances < k)

    def compare(self, early, late):  # (B, 1), (B, 1) numbers -> (B,) logits, infinitely sure
        return torch.where(self.is_near[early, late], torch.inf, -torch.inf).squeeze(-1)


def walk_cost(distances, states, k):
    """c_t of a walk's states, t = 1.., Eq. 13: D_nr(s_{t-k}, s_t) < k. No state before the last is rewarded here."""
    script = load_script(ROOT / "ppo_sprl_minigrid.py")
    embeddings = torch.from_numpy(states)[:, None, None, None].expand(-1, -1, 2, -1)  # (T + 1, 1, 2, 1)
    segment_steps = np.arange(1, len(states))[:, None]
    cost = script.ksp_cost(TrueDistances(distances, k), embeddings, segment_steps, np.array([k]), percentile=50)
    return cost.squeeze(1).bool().numpy()


# AGENTS ##############################################################################################################
class Random:
    def __init__(self, graph, args):
        self.actions = list(range(graph.nexts.shape[1]))

    def begin(self):
        pass

    def best(self, state):
        """The actions to draw from, all equally good."""
        return self.actions

    def moved(self, action, state):
        """Takes note of the state that the action led to."""


class CountBonus(Random):
    """GT-UCB: the bonus for arriving at a state for the n-th time is 1/sqrt(n)."""

    def __init__(self, graph, args):
        self.first, self.nexts = graph.first, graph.nexts
        self.counts, self.values = np.zeros((2, len(graph.nexts)))

    def begin(self):
        self.counts[self.first] += 1

    def sweep(self):
        """One sweep of value iteration over all states; the counts change little from one step to the next."""
        self.q = (1 / np.sqrt(self.counts + 1) + GAMMA * self.values)[self.nexts]
        self.values = self.q.max(1)

    def best(self, state):
        self.sweep()
        return np.flatnonzero(self.q[state] > self.values[state] - 1e-9)

    def moved(self, action, state):
        self.counts[state] += 1


class ShortestPaths(Random):
    """SPRL: the least k-SP cost, as late as can be."""

    def __init__(self, graph, args):
        tables = np.concatenate([graph.nexts, graph.ends])
        self.actions = np.sort(np.unique(tables, axis=1, return_index=True)[1])  # four of the seven stand still
        self.windows, costs = enumerate_windows(graph, self.actions, args.k)
        self.q = least_cost(self.windows, costs)

    def begin(self):
        self.window = 0

    def best(self, state):
        q = self.q[self.window]
        return self.actions[q < q.min() + 1e-6]

    def moved(self, action, state):
        self.window = self.windows[self.window, np.searchsorted(self.actions, action)]


def enumerate_windows(graph, actions, k):
    """All windows that a walk from the start can have: its last states, up to k of them, as far as they are a shortest
    path. Returns the window (W, A) that an action leads to, W itself where the episode ends, and the cost (W, A) that
    it makes certain, discounted to the step of the action."""
    nexts, ends = graph.nexts[:, actions].tolist(), graph.ends[:, actions].tolist()
    distances = graph.distances.tolist()
    queue = [(graph.first,)]
    number, windows, costs = {queue[0]: 0}, [], []
    for window in queue:  # grows while we walk along it
        row, charged = [], []
        for to, end in zip(nexts[window[-1]], ends[window[-1]]):
            lost = 0  # states that `to` is nearer to than the steps since; all before such a state are such, too
            while lost < len(window) and distances[window[lost]][to] < len(window) - lost:
                lost += 1
            charged.append(sum(GAMMA ** (k - len(window) + i) for i in range(lost)))  # state i's cost is due then
            window_next = (window[lost:] + (to,))[-k:]
            if not end and window_next not in number:
                number[window_next] = len(queue)
                queue.append(window_next)
            row.append(-1 if end else number[window_next])
        windows.append(row)
        costs.append(charged)
    windows = np.array(windows)
    return np.where(windows < 0, len(windows), windows), np.array(costs)


def least_cost(windows, costs, block=4096):
    """The least discounted cost to come (W, A), by value iteration. Longer windows were found later and are updated
    first, so that one sweep carries a cost back along its whole path."""
    values = np.zeros(len(windows) + 1)  # the last one: the episode is over
    blocks = [slice(start, start + block) for start in range(0, len(windows), block)][::-1]
    change = 1.0
    while change > 1e-9:
        before = values.copy()
        for part in blocks:
            values[:-1][part] = (costs[part] + GAMMA * values[windows[part]]).min(1)
        change = np.abs(values - before).max()
    return costs + GAMMA * values[windows]


def walk(agent, graph, episodes, steps, rng, bar=None):
    """The states of every episode, as arrays."""
    walks = []
    for _ in range(episodes):
        agent.begin()
        states, ended = [graph.first], False
        while len(states) <= steps and not ended:
            actions = agent.best(states[-1])
            action = actions[int(rng.random() * len(actions))]
            ended = graph.ends[states[-1], action]
            states.append(int(graph.nexts[states[-1], action]))
            agent.moved(action, states[-1])
        walks.append(np.array(states))
        if bar:
            bar.update()
    return walks


# TABLE AND FIGURE ####################################################################################################
def count_transitions(walks, num_states):
    """How often (S, S) a walk went from state to state."""
    counts = np.zeros((num_states, num_states), np.int64)
    for states in walks:
        np.add.at(counts, (states[:-1], states[1:]), 1)
    return counts


def evenness(visits):
    """Entropy of the visits over that of even visits of all states: 1 even, 0 all in one state (Pielou)."""
    share = visits[visits > 0] / visits.sum()
    return float(-(share * np.log(share)).sum() / np.log(len(visits)))


def distinct_transitions(walks):
    """How many different changes of the state the walks have; standing still is none."""
    pairs = np.unique(np.concatenate([np.stack([states[:-1], states[1:]], 1) for states in walks]), axis=0)
    return np.count_nonzero(pairs[:, 0] != pairs[:, 1])


def measure(walks, graph, k):
    """One agent's and one seed's column of the table."""
    visits = np.bincount(np.concatenate(walks), minlength=len(graph.states))
    at_goal = np.array([state[:2] == graph.goal for state in graph.states])
    return {
        "steps per episode": np.mean([len(states) - 1 for states in walks]),
        "distinct transitions": distinct_transitions(walks),
        "the same in one episode": np.mean([distinct_transitions([states]) for states in walks]),
        "share of states visited": np.count_nonzero(visits) / len(visits),
        "evenness of the visits": evenness(visits),
        "k-SP cost per step": np.concatenate([walk_cost(graph.distances, states, k) for states in walks]).mean(),
        "episodes at the goal": np.mean([at_goal[states].any() for states in walks]),
    }


def make_table(rows):
    """Mean and standard error over seeds of every measure, a column per agent; printed and returned."""
    table = []
    print(f"{'':24}" + "".join(f"{agent:>17}" for agent in rows))
    for name in rows["Random"][0]:
        values = [np.array([row[name] for row in seeds]) for seeds in rows.values()]
        pairs = [(v.mean(), v.std(ddof=1) / np.sqrt(len(v)) if len(v) > 1 else 0.0) for v in values]
        row = {"measure": name}
        for agent, (mean, error) in zip(rows, pairs):
            row |= {agent: f"{mean:.5g}", f"{agent}, standard error": f"{error:.5g}"}
        table.append(row)
        digits = 1 if max(pairs)[0] > 1 else 3
        print(f"{name:24}" + "".join(f"{f'{mean:.{digits}f} ± {error:.{digits}f}':>17}" for mean, error in pairs))
    return table


def make_counts(counts, graph):
    """Every transition that was made, standing still included: from and to as x, y, direction, a column per seed."""
    rows, names = [], ("x", "y", "direction", "to_x", "to_y", "to_direction")
    for agent, table in counts.items():
        for i, j in np.argwhere(table.sum(0)):
            row = {"agent": agent} | dict(zip(names, (*graph.states[i], *graph.states[j])))
            rows.append(row | {f"seed_{seed + 1}": int(n) for seed, n in enumerate(table[:, i, j])})
    return rows


def draw(args, graph, counts, path):
    """Four maps. A bar from square to square is the moves in one direction, on the right-hand lane like traffic; the
    dot in a square is what was done inside it, turning or standing still."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import ListedColormap, LogNorm

    plt.rcParams.update({"font.size": 9})
    figure, axes = plt.subplots(1, len(counts), figsize=(13.2, 3.9), layout="constrained")
    total = args.episodes * args.seeds
    per_episode = {agent: table.sum(0) / total for agent, table in counts.items()}
    colours = ListedColormap(plt.get_cmap("plasma_r")(np.linspace(0.12, 1, 256)))  # its lightest end is lost on white
    size = max(x for x, _ in graph.squares) + 2
    maps = {}
    for agent, table in per_episode.items():
        maps[agent] = {}
        for i, j in np.argwhere(table):
            key = graph.states[i][:2], graph.states[j][:2]
            maps[agent][key] = maps[agent].get(key, 0) + table[i, j]
    scale = LogNorm(1 / total, max(max(squares.values()) for squares in maps.values()))
    for axis, (agent, squares), letter in zip(axes, maps.items(), "abcd"):
        axis.set_facecolor("#5a5a5a")  # walls
        for x, y in graph.squares:
            axis.add_patch(plt.Rectangle((x, y), 1, 1, facecolor="white", edgecolor="#e4e4e4", linewidth=0.5))
        patches, values = [], []
        for (a, b), count in sorted(squares.items(), key=lambda item: item[1]):  # the largest on top
            (x, y), (to_x, to_y) = a, b
            dx, dy = to_x - x, to_y - y
            if a == b:
                patches.append(plt.Circle((x + 0.5, y + 0.5), 0.13))
            else:  # in image coordinates, y down, (-dy, dx) is to the right of (dx, dy)
                centre_x, centre_y = (x + to_x + 1) / 2 - 0.24 * dy, (y + to_y + 1) / 2 + 0.24 * dx
                width, height = 0.78 * abs(dx) + 0.26 * abs(dy), 0.78 * abs(dy) + 0.26 * abs(dx)
                patches.append(plt.Rectangle((centre_x - width / 2, centre_y - height / 2), width, height))
            values.append(count)
        drawn = PatchCollection(patches, cmap=colours, norm=scale, linewidth=0)
        drawn.set_array(np.array(values))
        axis.add_collection(drawn)
        for (x, y), colour, text in ((graph.start[:2], "#e8710a", "S"), (graph.goal, "#1a8f3c", "G")):
            axis.add_patch(plt.Rectangle((x, y), 1, 1, fill=False, edgecolor=colour, linewidth=2.2, zorder=3))
            place = (x - 0.5, y + 0.53) if text == "S" else (x + 1.5, y + 0.53)
            axis.text(*place, text, ha="center", va="center", color="white", weight="bold", fontsize=8)
        axis.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xticks=[], yticks=[], title=f"({letter}) {agent}")
    bar = figure.colorbar(drawn, ax=axes, pad=0.01, fraction=0.02, aspect=28)
    bar.set_label("transitions per episode")
    caption = (
        f"Mean over {args.seeds} seeds x {args.episodes} episodes of at most {args.steps} steps, k = {args.k}. Bars: "
        "moves to the next square, in the right-hand lane of their direction; dots: turns and standing still. S start, "
        "G goal.\n(a) to (c) have no reward, the goal is a square like any other; in (d) it ends the episode."
    )
    figure.supxlabel(caption, fontsize=8.5, x=0.01, ha="left")
    figure.savefig(path, dpi=160, format="png")
    plt.close(figure)


def main(args):
    check_ranges(args, **RANGES)
    names = ("transition_counts.csv", "table.csv", "transition_counts.png")
    with written_whole(args.out, *names) as (table, summary, picture):
        world = gym.make("MiniGrid-NineRooms-v0").unwrapped
        agents = {
            "Random": (Random, False), "GT-UCB": (CountBonus, False),
            "SPRL": (ShortestPaths, False), "SPRL+Reward": (ShortestPaths, True),
        }  # fmt: skip
        graphs, counts, rows = {}, {}, {}
        with tqdm(total=len(agents) * args.seeds * args.episodes, unit="episode") as bar:
            for name, (kind, rewarded) in agents.items():
                if rewarded not in graphs:
                    world.reset(seed=args.layout)
                    graphs[rewarded] = StateGraph(world, rewarded)
                graph, tables, rows[name] = graphs[rewarded], [], []
                bar.set_description(f"{name}, planning" if kind is ShortestPaths else name)
                plan = kind(graph, args) if kind is ShortestPaths else None  # serves all seeds; visits do not
                bar.set_description(name)
                for seed in range(1, args.seeds + 1):
                    agent = plan or kind(graph, args)
                    walks = walk(agent, graph, args.episodes, args.steps, np.random.default_rng(seed), bar)
                    tables.append(count_transitions(walks, len(graph.states)))
                    rows[name].append(measure(walks, graph, args.k))
                counts[name] = np.stack(tables)
        graph = graphs[False]
        steps = min(graph.distances[graph.first, [graph.states.index((*graph.goal, d)) for d in range(4)]])
        print(
            f"start {graph.start}, goal {graph.goal}, {steps} steps apart; {len(graph.states)} states, "
            f"{len(graph.moves)} transitions"
        )
        write_csv(table, make_counts(counts, graph))
        write_csv(summary, make_table(rows))
        draw(args, graph, counts, picture)


if __name__ == "__main__":
    main(parse_args(Args))
