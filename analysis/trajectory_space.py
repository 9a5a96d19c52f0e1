"""Counts exactly how many action sequences satisfy the k-SP constraint on a tabular four-rooms (SPRL, section 6.5).

    python analysis/trajectory_space.py                                        # runs/results/trajectory_space, seconds
    python analysis/trajectory_space.py --layout open --out runs/open_rooms    # rooms of 3x3 squares and not of 2x2

A state is a square (x, y); up, down, left and right move to the next square, a move into a wall stays in place. The
goal gives +1 and ends the episode. A trajectory satisfies the constraint if no step of it has a cost (Eq. 18, with true
distances), that is if never D(s_{t-k-Dt}, s_t) < k. The paper's r_t is the reward on arriving at s_t, and the cost asks
only that r_j = 0 for j < t, which holds at every step here: the step onto the goal is checked like any other.

Two counts. Sequences: of the 4^14 action sequences, those whose trajectory satisfies the constraint; the actions after
the goal are free, so a trajectory that reaches it after t steps counts 4^(14-t) times. Trajectories: the distinct lists
of squares up to the goal or the horizon, each once, whichever actions led along it.

Differences from the paper. Its figure shows doors, start and goal, its text does not name them; we take its
FourRooms-7x7, whose size includes the outer wall, with doors beside the middle, start and goal in opposite corners. It
searched all trajectories breadth-first; we merge histories, which is exact as well. Its text says "k = 3 and no
tolerance Dt = 2" leave 24 of 268M: here k = 3 leaves 20 trajectories for Dt = 0, but 16,100 for Dt = 2.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Literal

import matplotlib
import numpy as np
from common import check_ranges, parse_args, shortest_distances, write_csv, written_whole
from tqdm import tqdm

LAYOUTS = {  # S start, G goal, # wall; all beyond the edge is wall
    "walled": ("#######", "#S.#..#", "#.....#", "##.#.##", "#.....#", "#..#.G#", "#######"),
    "open": ("S..#...", ".......", "...#...", "#.###.#", "...#...", ".......", "...#..G"),
}


@dataclass
class Args:
    layout: Literal["walled", "open"] = "walled"  # 7x7 with its outer wall (20 squares, as MiniGrid), or without (40)
    horizon: int = 14  # length of the action sequences, 1 to 16 (paper: 14)
    max_k: int = 7  # count for k = 1..max_k, 1 to 16
    max_tolerance: int = 5  # count for tolerances Dt = 0..max_tolerance, 0 to 16
    out: str = "runs/results/trajectory_space"  # folder of trajectory_space.csv and .png, made if missing


# WORLD ###############################################################################################################
def read_layout(rows):
    """Start, goal, and for every free square {next square: number of actions that lead to it}."""
    squares = {(x, y): mark for y, row in enumerate(rows) for x, mark in enumerate(row) if mark != "#"}
    moves = {}
    for x, y in squares:
        reached = ((x, y - 1), (x, y + 1), (x - 1, y), (x + 1, y))
        moves[x, y] = Counter(square if square in squares else (x, y) for square in reached)
    where = {mark: square for square, mark in squares.items()}
    return where["S"], where["G"], moves


def square_distances(moves, goal):
    """{from: {to: steps}} over paths on which only the last square may be the goal (D_nr: no reward on the way)."""
    squares = list(moves)
    nexts = [[squares.index(to) for to in moves[square].elements()] for square in squares]
    nexts[squares.index(goal)] = 4 * [squares.index(goal)]  # no path goes on from it
    distances = shortest_distances(np.array(nexts), np.zeros((len(squares), 4), bool))
    return {square: dict(zip(squares, row)) for square, row in zip(squares, distances.tolist())}


# COUNT ###############################################################################################################
def count(start, goal, moves, distances, k, tolerance, horizon):
    """(sequences, trajectories) that satisfy the constraint, by dynamic programming over time. Histories are merged if
    they agree on where they are and on the `pending` squares: those that a later step will be compared with."""
    gap = k + tolerance
    sequences = trajectories = 0  # of the episodes that are over
    layer = {(start, (start,) if gap <= horizon else ()): (1, 1)}
    for t in range(1, horizon + 1):
        next_layer = {}
        for (square, pending), (num_sequences, num_trajectories) in layer.items():
            for next_square, num_actions in moves[square].items():
                if t >= gap and distances[pending[0]][next_square] < k:  # c_t = 1, Eq. 18; pending[0] is s_{t-k-Dt}
                    continue
                if next_square == goal:
                    sequences += num_sequences * num_actions * 4 ** (horizon - t)
                    trajectories += num_trajectories
                    continue
                next_pending = pending[1:] if t >= gap else pending
                if t + gap <= horizon:
                    next_pending += (next_square,)
                merged = next_layer.get((next_square, next_pending), (0, 0))
                merged = merged[0] + num_sequences * num_actions, merged[1] + num_trajectories
                next_layer[next_square, next_pending] = merged
        layer = next_layer
    return sequences + sum(n for n, _ in layer.values()), trajectories + sum(n for _, n in layer.values())


# TABLE AND FIGURE ####################################################################################################
def print_table(title, counts, column):
    tolerances = sorted({tolerance for _, tolerance in counts})
    print(f"\n{title}\n  k " + "".join(f"{f'Dt = {tolerance}':>14}" for tolerance in tolerances))
    for k in sorted({k for k, _ in counts}):
        print(f"{k:>3} " + "".join(f"{counts[k, tolerance][column]:>14,}" for tolerance in tolerances))


def draw(args, start, goal, moves, counts, path):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(10.2, 4.4), layout="constrained")
    grid, *charts = figure.subplots(1, 3)
    for y, row in enumerate(LAYOUTS[args.layout]):
        for x in range(len(row)):
            colour = {start: "#d62728", goal: "#2ca02c"}.get((x, y), "white" if (x, y) in moves else "#555555")
            grid.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="#bbbbbb", linewidth=0.8))
    for square, letter in ((start, "S"), (goal, "G")):
        grid.text(square[0] + 0.5, square[1] + 0.53, letter, ha="center", va="center", color="white", weight="bold")
    grid.set(xlim=(-0.1, 7.6), ylim=(7.1, -0.1), aspect="equal", title="7x7 four-rooms")
    grid.axis("off")

    total, tolerances = 4**args.horizon, sorted({tolerance for _, tolerance in counts})
    for column, (axis, title) in enumerate(zip(charts, ("action sequences", "distinct trajectories"))):
        for i, tolerance in enumerate(tolerances):
            line = [(k, 100 * counts[k, tolerance][column] / total) for k, dt in counts if dt == tolerance]
            colour = plt.get_cmap("viridis")(0.92 * i / max(len(tolerances) - 1, 1))
            axis.plot(*zip(*line), "o-", markersize=4, linewidth=1.6, color=colour, label=rf"$\Delta t$ = {tolerance}")
        axis.set(yscale="log", xlabel="k", xticks=range(1, args.max_k + 1), title=title)
        axis.grid(alpha=0.25, linewidth=0.6)
    charts[0].set_ylabel(f"satisfying the k-SP constraint, % of $4^{{{args.horizon}}}$")
    if args.horizon == 14:
        label = "paper's text: 24\n" r"(k = 3, $\Delta t$ = 2)"
        charts[1].plot(3, 100 * 24 / total, "k*", markersize=11, markerfacecolor="none", label=label)
    low = min(axis.get_ylim()[0] for axis in charts)
    for axis in charts:
        axis.set_ylim(low, 200)
    charts[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    caption = (
        f"Exact counts, horizon {args.horizon}. Sequences: the actions after the goal are free, a trajectory that "
        f"reaches it after t steps counts $4^{{{args.horizon}-t}}$ times.\nTrajectories: distinct lists of squares up "
        f"to the goal or the horizon, each counted once; as a share of all $4^{{{args.horizon}}}$ sequences too."
    )
    figure.supxlabel(caption, fontsize=8.5, x=0.02, ha="left")
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def main(args):
    check_ranges(args, horizon=(1, 16), max_k=(1, 16), max_tolerance=(0, 16))
    start, goal, moves = read_layout(LAYOUTS[args.layout])
    distances = square_distances(moves, goal)
    pairs = list(product(range(1, args.max_k + 1), range(args.max_tolerance + 1)))
    with written_whole(args.out, "trajectory_space.csv", "trajectory_space.png") as (table, picture):
        counts = {
            (k, tolerance): count(start, goal, moves, distances, k, tolerance, args.horizon)
            for k, tolerance in tqdm(pairs, desc="(k, Dt)", leave=False)
        }
        rows = []
        for (k, tolerance), (sequences, trajectories) in counts.items():
            share = f"{sequences / 4**args.horizon:.6g}"
            row = {"k": k, "tolerance": tolerance, "sequences": sequences, "share": share}
            rows.append(row | {"trajectories": trajectories})
        write_csv(table, rows)
        draw(args, start, goal, moves, counts, picture)
    print("\n".join(LAYOUTS[args.layout]))
    steps = distances[start][goal]
    print(f"start {start}, goal {goal} as (x, y), {steps} steps apart; {len(moves)} squares, horizon {args.horizon}")
    print_table(f"action sequences that satisfy the k-SP constraint, of {4**args.horizon:,}", counts, 0)
    print_table("distinct trajectories that satisfy it", counts, 1)


if __name__ == "__main__":
    main(parse_args(Args))
