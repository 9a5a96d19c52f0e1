"""How far agents get on KeyDoors, and what their RNet says of a way that they have perhaps never gone.

    python analysis/key_and_door.py runs/*KeyDoors-11x11*/agent.pt        # files in runs/results/key_and_door, seconds
    python analysis/key_and_door.py runs/<name>/agent.pt --episodes 500 --out runs/results/one

Each agent plays fresh layouts: in how many does it take the key, open the door, reach the goal? Then the shortest way
to the key, to the door and to the goal is walked on such layouts, and the agent's RNet, if it has one, judges its
states in pairs. On a shortest way two states that lie g steps apart are exactly that far apart, so a sound RNet calls
few pairs near once g is beyond k, in every part of the way alike.
"""

import os
from collections import deque
from dataclasses import dataclass

import matplotlib
import numpy as np
import torch
import tyro
from common import check_ranges, fail, load_rnet, load_run, parse_args, write_csv, written_whole
from curves import method_label, method_name, short_name
from evaluate import play
from minigrid.core.actions import Actions
from minigrid.core.constants import DIR_TO_VEC
from minigrid.core.world_object import Door, Goal, Key
from minigrid.envs import DoorKeyEnv

PARTS = {"before the key": "#0072B2", "from key to door": "#009E73", "behind the door": "#D55E00"}
GAPS = range(3, 11)


@dataclass
class Args:
    checkpoints: tyro.conf.Positional[tuple[str, ...]]  # agent.pt files of MiniGrid-KeyDoors-7x7-v0 or 11x11
    script: str | None = None  # path of your own script, if the checkpoints are not of ours
    episodes: int = 150  # episodes that an agent plays, and shortest ways that its RNet judges, 1 to 100000
    seed: int = 1  # of the layouts and the sampled actions, at least 0; never the layouts a training begins with
    out: str = "runs/results/key_and_door"  # folder of key_and_door.csv, pairs.csv and key_and_door.png


# THE AGENT ###########################################################################################################
class Watched:
    """The worlds of an agent, with a row (world, key taken, door opened, goal reached) of every finished episode."""

    def __init__(self, envs):
        self.envs, self.finished, self.actions = envs, [], np.zeros(int(envs.single_action_space.n), int)

    def __getattr__(self, name):
        return getattr(self.envs, name)

    def reset(self, **kwargs):
        self.seen, self.done = np.zeros((self.num_envs, 2), bool), np.zeros(self.num_envs, bool)
        return self.envs.reset(**kwargs)

    def step(self, actions):
        self.actions += np.bincount(actions[~self.done], minlength=len(self.actions))  # autoreset ignores the others
        result = self.envs.step(actions)
        _, rewards, terminations, truncations, _ = result
        self.seen[self.done] = False
        for i, world in enumerate(self.worlds):
            door = next(cell for cell in world.grid.grid if isinstance(cell, Door))
            self.seen[i] |= isinstance(world.carrying, Key), door.is_open
        self.done = terminations | truncations
        self.finished += [(int(i), *self.seen[i].tolist(), bool(rewards[i] > 0)) for i in np.flatnonzero(self.done)]
        return result


def how_far(run):
    """Shares of the episodes with the key taken, the door opened, the goal reached, and of toggling in the actions."""
    watched = Watched(run.envs)
    torch.manual_seed(run.world_seed)  # the same episodes whatever was played before
    play(watched, run.agent, run.quotas, run.world_seed)
    rows = [[row[1:] for row in watched.finished if row[0] == i][:quota] for i, quota in enumerate(run.quotas)]
    toggles = watched.actions[Actions.toggle] / watched.actions.sum()
    return dict(zip(("key", "door", "goal", "toggles"), [*np.concatenate(rows).mean(0), toggles]))


# THE SHORTEST WAY ####################################################################################################
def shortest_moves(world, target, facing):
    """Turns and steps, as few as can be, to the target square, or to face it; None if it cannot be reached."""
    start = (*map(int, world.agent_pos), int(world.agent_dir))
    before, queue = {start: None}, deque([start])
    while queue:
        x, y, direction = state = queue.popleft()
        ahead = (x + int(DIR_TO_VEC[direction][0]), y + int(DIR_TO_VEC[direction][1]))
        if target == (ahead if facing else (x, y)):
            moves = []
            while before[state]:
                state, move = before[state]
                moves.append(move)
            return moves[::-1]
        cell = world.grid.get(*ahead)
        nexts = {Actions.left: (x, y, (direction - 1) % 4), Actions.right: (x, y, (direction + 1) % 4)}
        if cell is None or cell.can_overlap():
            nexts[Actions.forward] = (*ahead, direction)
        for move, state_next in nexts.items():
            if state_next not in before:
                before[state_next] = state, move
                queue.append(state_next)


def shortest_way(world, seed):
    """The frames of the shortest way to key, door and goal on this layout, the part of PARTS that each lies in, and
    the last reward; None where the key is walled in."""
    frames, parts, reward = [world.reset(seed=seed)[0]["image"]], [0], 0
    for part, (kind, last) in enumerate(((Key, Actions.pickup), (Door, Actions.toggle), (Goal, None))):
        target = next((x, y) for x, y in np.ndindex(world.width, world.height) if type(world.grid.get(x, y)) is kind)
        moves = shortest_moves(world, target, facing=last is not None)
        if moves is None:
            return None
        for move in moves + [last] * (last is not None):
            obs, reward, *_ = world.step(move)
            frames.append(obs["image"])
            parts.append(part + (move == last))
    return np.stack(frames), np.array(parts), reward


def judge_pairs(script, rnet, frames, parts):
    """[(part, gap, whether the RNet calls the pair near), ...] of all pairs in one part that lie one of GAPS apart."""
    pairs = [(i, i + gap) for gap in GAPS for i in range(len(parts) - gap) if parts[i] == parts[i + gap]]
    if not pairs:
        return []
    embeddings = script.embed_all(rnet, torch.from_numpy(frames)[:, None, None])  # of one environment and one frame
    near = script.compare_all(rnet, embeddings, *torch.tensor(pairs).T) > 0
    return [(int(parts[i]), j - i, judged) for (i, j), judged in zip(pairs, near.tolist())]


# TABLE AND FIGURE ####################################################################################################
def draw(rows, episodes, path):
    """A panel per RNet: the share of pairs that it calls near against how far apart they are, a line per part."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    names = list(dict.fromkeys(row["run"] for row in rows))
    columns = min(4, len(names))
    shape = -(-len(names) // columns), columns
    size = (max(5.6, 3.2 * columns), 2.9 * shape[0] + 0.6)
    figure, axes = plt.subplots(*shape, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    for axis, name in zip(axes.flat, names):
        for part, colour in PARTS.items():
            line = [(row["gap"], row["near"]) for row in rows if row["run"] == name and row["part"] == part]
            if line:
                axis.plot(*zip(*line), color=colour, marker="o", markersize=3.5)
        axis.set(title=name, xlabel="steps between the two states", ylim=(-0.02, 1.02), xticks=GAPS)
        axis.grid(alpha=0.25, linewidth=0.6)
    for axis in axes[:, 0]:
        axis.set_ylabel("pairs that the RNet calls near")
    lines = [plt.Line2D([], [], color=colour, marker="o", markersize=3.5) for colour in PARTS.values()]
    title = f"pairs of states on the shortest way, {episodes} layouts"
    figure.legend(lines, PARTS, loc="outside lower center", ncols=3, frameon=False, title=title, title_fontsize=8)
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def main(args):
    if not args.checkpoints:
        fail("no checkpoint given, accepted: one or more agent.pt files")
    check_ranges(args, episodes=(1, 100_000), seed=(0, float("inf")))
    runs = {path: load_run(path, args.episodes, args.seed, args.script) for path in args.checkpoints}
    for path, run in runs.items():
        if not isinstance(getattr(run.envs, "worlds", [None])[0], DoorKeyEnv):
            fail(f"{path} plays {run.args.env_id}, accepted: agents on MiniGrid-KeyDoors-7x7-v0 or 11x11")
    rnets = {path: load_rnet(run, path) for path, run in runs.items() if "rnet" in run.checkpoint}
    agents, pairs = [], []
    names = ["key_and_door.csv", "pairs.csv", "key_and_door.png"] if rnets else ["key_and_door.csv"]
    with written_whole(args.out, *names) as files:
        for path, run in runs.items():
            settings = run.checkpoint["args"]
            method = method_name(method_label(os.path.basename(run.script.__file__), settings))
            name = f"{method}, {short_name(settings['env_id'])}, seed {settings['seed']}"
            if name in {row["run"] for row in agents}:
                name += f" ({len(agents) + 1})"
            agents.append({"run": name, "steps": run.checkpoint.get("global_step", 0), **how_far(run)})
            print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in list(agents[-1].items())[2:]))
            found = []
            for i in range(args.episodes if path in rnets else 0):
                way = shortest_way(run.envs.worlds[0], run.world_seed + i)
                found += judge_pairs(run.script, rnets[path], *way[:2]) if way else []
            for place in sorted({judgement[:2] for judgement in found}):
                near = [judgement for *where, judgement in found if tuple(where) == place]
                row = {"run": name, "part": list(PARTS)[place[0]], "gap": place[1], "pairs": len(near)}
                pairs.append(row | {"near": float(np.mean(near))})
        write_csv(files[0], agents)
        if rnets:
            write_csv(files[1], pairs)
            draw(pairs, args.episodes, files[2])


if __name__ == "__main__":
    main(parse_args(Args))
