"""Counts exactly how many action sequences satisfy the k-SP constraint on a tabular four-rooms (SPRL, section 6.5).

    python analysis/trajectory_space.py                                        # runs/results/trajectory_space, seconds
    python analysis/trajectory_space.py --layout open --out runs/open_rooms    # rooms of 3x3 squares and not of 2x2

A state is a square (x, y); up, down, left and right move to the next square, a move into a wall stays in place. The
goal gives +1 and ends the episode. A trajectory satisfies the constraint if no step of it has a cost (Eq. 18, with true
distances), that is if never D(s_{t-k-Dt}, s_t) < k. The paper's r_t is the reward on arriving at s_t, and the cost asks
only that r_j = 0 for j < t, which holds at every step here: the step onto the goal is checked like any other.

Two counts. Sequences: of the 4^14 action sequences, those whose trajectory satisfies the constraint; the actions after
the goal are free, so a trajectory that reaches it after t steps counts 4^(14-t) times. Trajectories: the distinct lists
of squares up to the goal or the horizon, each once, whichever actions led along it. Each count is made twice: of all
trajectories, and of those that reach the goal.

Differences from the paper. Its figure shows doors, start and goal, its text does not name them; we take its
FourRooms-7x7, whose size includes the outer wall, with doors beside the middle, start and goal in opposite corners. It
searched all trajectories breadth-first; we merge histories, which is exact as well. Its text says "k = 3 and no
tolerance Dt = 2" leave 24 of 268M: here k = 3 leaves 20 trajectories for Dt = 0, but 16,100 for Dt = 2. So we also read
the text in other ways, on every map of four rooms, and record which of them give 24 (readings.csv, maps.csv).
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Literal

import matplotlib
import numpy as np
from common import check_ranges, parse_args, shortest_distances, write_csv, written_whole
from matplotlib.patches import Rectangle
from tqdm import tqdm

LAYOUTS = {  # S start, G goal, # wall; all beyond the edge is wall
    "walled": ("#######", "#S.#..#", "#.....#", "##.#.##", "#.....#", "#..#.G#", "#######"),
    "open": ("S..#...", ".......", "...#...", "#.###.#", "...#...", ".......", "...#..G"),
}
COUNTS = {  # what count() counts, and its title in tables and figure
    "sequences": "action sequences",
    "trajectories": "distinct trajectories",
    "goal_sequences": "action sequences that reach the goal",
    "goal_trajectories": "distinct trajectories that reach the goal",
}
PAPER_COUNT, PAPER_K, PAPER_TOLERANCE, PAPER_HORIZON = 24, 3, 2, 14  # section 6.5, its text
FILES = ("trajectory_space.csv", "readings.csv", "maps.csv", "trajectory_space.png")


@dataclass
class Args:
    layout: Literal["walled", "open"] = "walled"  # 7x7 with its outer wall (20 squares, as MiniGrid), or without (40)
    horizon: int = 14  # length of the action sequences, 1 to 16 (paper: 14)
    max_k: int = 7  # count for k = 1..max_k, 1 to 16
    max_tolerance: int = 5  # count for tolerances Dt = 0..max_tolerance, 0 to 16
    out: str = "runs/results/trajectory_space"  # folder of the tables and the figure, made if missing


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
    """The COUNTS that satisfy the constraint, in their order, by dynamic programming over time. Histories are merged if
    they agree on where they are and on the `pending` squares: those that a later step will be compared with."""
    gap = k + tolerance
    goal_sequences = goal_trajectories = 0
    layer = {(start, (start,) if gap <= horizon else ()): (1, 1)}
    for t in range(1, horizon + 1):
        next_layer = {}
        for (square, pending), (num_sequences, num_trajectories) in layer.items():
            for next_square, num_actions in moves[square].items():
                if t >= gap and distances[pending[0]][next_square] < k:  # c_t = 1, Eq. 18; pending[0] is s_{t-k-Dt}
                    continue
                if next_square == goal:
                    goal_sequences += num_sequences * num_actions * 4 ** (horizon - t)
                    goal_trajectories += num_trajectories
                    continue
                next_pending = pending[1:] if t >= gap else pending
                if t + gap <= horizon:
                    next_pending += (next_square,)
                merged = next_layer.get((next_square, next_pending), (0, 0))
                merged = merged[0] + num_sequences * num_actions, merged[1] + num_trajectories
                next_layer[next_square, next_pending] = merged
        layer = next_layer
    sequences = goal_sequences + sum(n for n, _ in layer.values())
    trajectories = goal_trajectories + sum(n for _, n in layer.values())
    return sequences, trajectories, goal_sequences, goal_trajectories


# READINGS OF THE PAPER'S NUMBER ######################################################################################
def four_rooms(room):
    """Every map of four rooms of room x room squares: one door a wall, start and goal in opposite corners."""
    for start_x, (upper, lower, left, right) in product((0, -1), product(range(room), repeat=4)):
        rows = [["."] * room + ["#"] + ["."] * room for _ in range(2 * room + 1)]
        rows[room] = ["#"] * (2 * room + 1)
        rows[upper][room] = rows[room + 1 + lower][room] = "."
        rows[room][left] = rows[room][room + 1 + right] = "."
        rows[0][start_x], rows[-1][-1 - start_x] = "S", "G"
        yield tuple("".join(row) for row in rows)


def count_readings():
    """How many maps give the paper's number, for each reading of "k = 3 and no tolerance Dt = 2"; and those maps.

    A step is forbidden if D < k or if D <= k, against the state k + Dt or k + Dt + 1 steps back, and Dt is 0, 1 or 2.
    That is D < least_distance against `lag` steps back: count() with k = least_distance, Dt = lag - least_distance."""
    rules = [(least, lag) for least in (PAPER_K, PAPER_K + 1) for lag in range(least, PAPER_K + PAPER_TOLERANCE + 2)]
    readings, found = [], []
    for outer_wall, (least_distance, lag) in tqdm(list(product((True, False), rules)), desc="readings", leave=False):
        maps, given = list(four_rooms(2 if outer_wall else 3)), Counter()
        reading = {"outer_wall": outer_wall, "least_distance": least_distance, "lag": lag, "maps": len(maps)}
        for rows in maps:
            start, goal, moves = read_layout(rows)
            distances = square_distances(moves, goal)
            counted = count(start, goal, moves, distances, least_distance, lag - least_distance, PAPER_HORIZON)
            for name in [name for name, number in zip(COUNTS, counted) if number == PAPER_COUNT]:
                given[name] += 1
                found.append(reading | {"count": name, "map": "/".join(rows)})
        readings.append(reading | {f"maps_{name}": given[name] for name in COUNTS})
    return readings, found


# TABLE AND FIGURE ####################################################################################################
def print_table(title, counts, column):
    tolerances = sorted({tolerance for _, tolerance in counts})
    print(f"\n{title}\n  k " + "".join(f"{f'Dt = {tolerance}':>14}" for tolerance in tolerances))
    for k in sorted({k for k, _ in counts}):
        print(f"{k:>3} " + "".join(f"{counts[k, tolerance][column]:>14,}" for tolerance in tolerances))


def describe(reading):
    rule = f"D > {reading['least_distance'] - 1} to the state {reading['lag']} steps back"
    return f"{rule}, {'with' if reading['outer_wall'] else 'without'} outer wall, {COUNTS[reading['count']]}"


def draw_map(axis, rows, title):
    start, goal, moves = read_layout(rows)
    for y, row in enumerate(rows):
        for x in range(len(row)):
            colour = {start: "#d62728", goal: "#2ca02c"}.get((x, y), "white" if (x, y) in moves else "#555555")
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="#bbbbbb", linewidth=0.8))
    for square, letter in ((start, "S"), (goal, "G")):
        axis.text(square[0] + 0.5, square[1] + 0.53, letter, ha="center", va="center", color="white", weight="bold")
    axis.set(xlim=(-0.1, len(rows) + 0.1), ylim=(len(rows) + 0.1, -0.1), aspect="equal")
    axis.set_title(title, fontsize=9)
    axis.axis("off")


def draw(args, counts, found, path):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(11, 8.2), layout="constrained")
    axes = figure.subplots(2, 3, width_ratios=(0.8, 1, 1))
    draw_map(axes[0, 0], LAYOUTS[args.layout], "the map of the coloured curves")
    axes[1, 0].axis("off")
    charts = dict(zip(COUNTS, axes[:, 1:].flat))
    total, tolerances = 4**args.horizon, sorted({tolerance for _, tolerance in counts})
    lowest = min(number for counted in counts.values() for number in counted if number)
    for column, (name, axis) in enumerate(charts.items()):
        axis.set_ylim(100 * lowest / total / 50, 200)  # room for text below the curves
        axis.set_yscale("log")
        for i, tolerance in enumerate(tolerances):
            line = [(k, 100 * counts[k, tolerance][column] / total) for k, dt in counts if dt == tolerance]
            colour = plt.get_cmap("viridis")(0.92 * i / max(len(tolerances) - 1, 1))
            axis.plot(*zip(*line), "o-", markersize=4, linewidth=1.6, color=colour, label=rf"$\Delta t$ = {tolerance}")
        axis.set(xlabel="k", xticks=range(1, args.max_k + 1))
        axis.set_ylabel(f"satisfying the k-SP constraint, % of $4^{{{args.horizon}}}$" if column % 2 == 0 else "")
        axis.set_title(COUNTS[name], fontsize=10)
        axis.grid(alpha=0.25, linewidth=0.6)
    caption = (
        f"Exact counts, horizon {args.horizon}. Sequences: the actions after the goal are free, a trajectory that "
        f"reaches it after t steps counts $4^{{{args.horizon}-t}}$ times.\nTrajectories: distinct lists of squares up "
        f"to the goal or the horizon, each counted once; as a share of all $4^{{{args.horizon}}}$ sequences too."
    )
    if args.horizon == PAPER_HORIZON and (PAPER_K, PAPER_TOLERANCE) in counts:
        for name in ("trajectories", "goal_trajectories"):
            column = list(COUNTS).index(name)
            here = (counts[PAPER_K, tolerance][column] for tolerance in (0, PAPER_TOLERANCE))
            draw_paper_number(charts[name], *here)
        if found:
            caption += draw_other_reading(charts, axes[1, 0], args.max_k, found)
    handles, labels = axes[1, 2].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], frameon=False, loc="outside right center")
    figure.supxlabel(caption, fontsize=8.5, x=0.02, ha="left")
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def draw_paper_number(axis, without_tolerance, with_tolerance):
    """A hollow star, and an arrow from it to what we count for the same k and Dt."""
    scale = 100 / 4**PAPER_HORIZON
    star = {"marker": "*", "markersize": 13, "markerfacecolor": "none", "color": "black", "linestyle": "none"}
    axis.plot(PAPER_K, scale * PAPER_COUNT, label=f"paper: {PAPER_COUNT}", **star)
    arrow = {"arrowstyle": "->", "linestyle": "dotted", "shrinkA": 7, "shrinkB": 3}
    axis.annotate("", (PAPER_K, scale * with_tolerance), (PAPER_K, scale * PAPER_COUNT), arrowprops=arrow)
    text = (
        f'paper: {PAPER_COUNT} for k = {PAPER_K}, $\\Delta t$ = {PAPER_TOLERANCE}, "no tolerance"\n'
        f"here: {with_tolerance:,} (arrow), and {without_tolerance:,} for $\\Delta t$ = 0"
    )
    axis.text(0.03, 0.04, text, transform=axis.transAxes, fontsize=8.5)


def draw_other_reading(charts, map_axis, max_k, found):
    """The first reading and map that give the paper's number, over k. Returns what the caption says of it."""
    reading = found[0]
    rows, column = reading["map"].split("/"), list(COUNTS).index(reading["count"])
    start, goal, moves = read_layout(rows)
    distances, farther = square_distances(moves, goal), reading["least_distance"] - PAPER_K
    tolerance, line = reading["lag"] - reading["least_distance"], []
    for k in range(1, max_k + 1):
        counted = count(start, goal, moves, distances, k + farther, tolerance, PAPER_HORIZON)
        line.append((k, 100 * counted[column] / 4**PAPER_HORIZON))
    axis = charts[reading["count"]]
    axis.plot(*zip(*line), "s--", color="#d6278f", markersize=4, linewidth=1.2, label="another reading")
    draw_map(map_axis, rows, "a map of the other reading")
    num_found = sum(describe(other) == describe(reading) for other in found)
    give = f"{num_found} of {reading['maps']} maps give {PAPER_COUNT}, one is drawn"
    return f"\nAnother reading, found by search, for k = {PAPER_K}: {describe(reading)}; {give}."


def main(args):
    check_ranges(args, horizon=(1, 16), max_k=(1, 16), max_tolerance=(0, 16))
    start, goal, moves = read_layout(LAYOUTS[args.layout])
    distances = square_distances(moves, goal)
    pairs = list(product(range(1, args.max_k + 1), range(args.max_tolerance + 1)))
    with written_whole(args.out, *FILES) as (table, readings_table, maps_table, picture):
        counts = {
            (k, tolerance): count(start, goal, moves, distances, k, tolerance, args.horizon)
            for k, tolerance in tqdm(pairs, desc="(k, Dt)", leave=False)
        }
        rows = []
        for (k, tolerance), counted in counts.items():
            share = f"{counted[0] / 4**args.horizon:.6g}"
            row = {"k": k, "tolerance": tolerance, "sequences": counted[0], "share": share}
            rows.append(row | dict(zip(COUNTS, counted)))
        write_csv(table, rows)
        readings, found = count_readings()
        write_csv(readings_table, readings)
        write_csv(maps_table, found)
        draw(args, counts, found, picture)
    print("\n".join(LAYOUTS[args.layout]))
    steps = distances[start][goal]
    print(f"start {start}, goal {goal} as (x, y), {steps} steps apart; {len(moves)} squares, horizon {args.horizon}")
    for column, title in enumerate(COUNTS.values()):
        print_table(f"{title}, those that satisfy the k-SP constraint", counts, column)
    print(f"\nthe paper's {PAPER_COUNT} for k = {PAPER_K}, in {len(readings) * len(COUNTS)} readings:")
    for reading in readings:
        for name in COUNTS:
            if reading[f"maps_{name}"]:
                print(f"{reading[f'maps_{name}']} of {reading['maps']} maps: {describe(reading | {'count': name})}")


if __name__ == "__main__":
    main(parse_args(Args))
