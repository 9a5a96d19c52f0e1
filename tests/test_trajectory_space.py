"""analysis/trajectory_space.py against every action sequence played out, matrix powers and numbers found by hand."""

import csv
import itertools
import os
import subprocess
import sys
from collections import Counter
from math import comb
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "analysis"))

import trajectory_space  # noqa: E402
from trajectory_space import COUNTS, LAYOUTS, count, count_readings, read_layout, square_distances  # noqa: E402

RING = ("S..", ".G.", "...")  # the way from (1, 0) to (1, 2) leads around the goal: 4 steps, not 2
NEAR = ("#######", "#..#..#", "#.S...#", "##.#.##", "#..G..#", "#..#..#", "#######")  # a goal in a door, 3 steps away


def counted(rows, k, tolerance, horizon):
    start, goal, moves = read_layout(rows)
    return count(start, goal, moves, square_distances(moves, goal), k, tolerance, horizon)


# SLOW READINGS OF THE SAME RULES #####################################################################################
def find(rows, mark):
    return next((x, y) for y, row in enumerate(rows) for x in range(len(row)) if row[x] == mark)


def play(rows, horizon):
    """The squares, up to the goal, of every action sequence in turn, on the map with a wall around it."""
    walled = ["#" * (len(rows[0]) + 2), *(f"#{row}#" for row in rows), "#" * (len(rows[0]) + 2)]
    start, goal = find(rows, "S"), find(rows, "G")
    for actions in itertools.product("udlr", repeat=horizon):
        states = [start]
        for action in actions:
            x, y = states[-1]
            to_x, to_y = {"u": (x, y - 1), "d": (x, y + 1), "l": (x - 1, y), "r": (x + 1, y)}[action]
            states.append((x, y) if walled[to_y + 1][to_x + 1] == "#" else (to_x, to_y))
            if states[-1] == goal:
                break
        yield tuple(states)


def relaxed_distances(rows):
    """D_nr by relaxing until nothing changes; no path goes on from the goal."""
    squares = [(x, y) for y, row in enumerate(rows) for x in range(len(row)) if row[x] != "#"]
    goal = find(rows, "G")
    distance = {(a, b): 0 if a == b else 1 if abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1 else 99
                for a in squares for b in squares}  # fmt: skip
    for middle in squares:
        for a, b in itertools.product(squares, squares):
            if middle != goal:
                distance[a, b] = min(distance[a, b], distance[a, middle] + distance[middle, b])
    return distance


def power_distances(rows):
    """D_nr by powers of the matrix of moves; no path goes on from the goal."""
    squares = [(x, y) for y, row in enumerate(rows) for x in range(len(row)) if row[x] != "#"]
    apart = np.array([[abs(a[0] - b[0]) + abs(a[1] - b[1]) for b in squares] for a in squares])
    moves = (apart <= 1).astype(float)
    moves[squares.index(find(rows, "G"))] = 0
    reached, distance = np.eye(len(squares)), np.zeros_like(apart)
    for _ in squares:
        distance += reached == 0
        reached = np.minimum(reached + reached @ moves, 1)
    return {(a, b): distance[i, j] for i, a in enumerate(squares) for j, b in enumerate(squares)}


def walk(states, weight, forbidden, lag, horizon, squares, goal):
    """The four counts, every admissible trajectory walked on its own; no (s_{t-lag}, s_t) is `forbidden`."""
    if states[-1] == goal or len(states) == horizon + 1:
        ended = np.array([weight * 4 ** (horizon + 1 - len(states)), 1])
        return np.array([*ended, *(ended if states[-1] == goal else (0, 0))])
    x, y = states[-1]
    total = np.zeros(4, np.int64)
    reached = [(x, y - 1), (x, y + 1), (x - 1, y), (x + 1, y)]
    reached = [square if square in squares else (x, y) for square in reached]
    for square in set(reached):
        if len(states) < lag or (states[-lag], square) not in forbidden:
            weighted = weight * reached.count(square)
            total += walk((*states, square), weighted, forbidden, lag, horizon, squares, goal)
    return total


def maps_without_outer_wall():
    """{map: (doors)} of the 7x7 with rooms of 3x3: four doors, counted from the start's side, two diagonals."""
    maps = {}
    for upper, lower, left, right in itertools.product(range(3), repeat=4):
        walls = {(3, i) for i in range(7) if i not in (upper, 4 + lower)}
        walls |= {(i, 3) for i in range(7) if i not in (left, 4 + right)}
        marks = dict.fromkeys(walls, "#") | {(0, 0): "S", (6, 6): "G"}
        rows = ["".join(marks.get((x, y), ".") for x in range(7)) for y in range(7)]
        for mirrored in (rows, [row[::-1] for row in rows]):
            maps["/".join(mirrored)] = upper, lower, left, right
    return maps


def satisfies(states, rewards, distance, k, tolerance):
    """Eq. 18 letter by letter: c_t is 0 at every t."""
    for t in range(len(states)):
        if t >= k + tolerance:
            old = t - k - tolerance
            if distance[states[old], states[t]] < k and all(rewards[j] == 0 for j in range(old, t)):
                return False
    return True


# TESTS ###############################################################################################################
@pytest.mark.parametrize("rows, horizon", [(RING, 7), (NEAR, 6), (LAYOUTS["walled"], 6), (LAYOUTS["open"], 6)])
def test_equals_every_sequence_played_out(rows, horizon):
    played = Counter(play(rows, horizon))
    assert played.total() == 4**horizon
    distance, goal = relaxed_distances(rows), find(rows, "G")
    rewards = {states: [int(state == goal) for state in states] for states in played}  # r_t: on arriving at s_t
    for k, tolerance in itertools.product(range(1, 5), range(5)):  # comparisons 1 to 8 steps back
        left = [states for states in played if satisfies(states, rewards[states], distance, k, tolerance)]
        at_goal = [states for states in left if states[-1] == goal]
        expected = sum(played[states] for states in left), len(left)
        expected += sum(played[states] for states in at_goal), len(at_goal)
        assert counted(rows, k, tolerance, horizon) == expected, (k, tolerance)


def test_full_horizon_equals_a_walk_over_single_histories():
    """The published numbers: no merging here, every admissible trajectory of 14 steps is walked on its own."""
    rows = LAYOUTS["walled"]
    distance, goal = relaxed_distances(rows), find(rows, "G")
    squares = {a for a, _ in distance}
    for k, tolerance, expected in [
        (2, 0, (33_334, 214, 33_152, 32)), (3, 0, (32_780, 20, 32_768, 8)), (3, 2, (552_436, 16_100, 481_024, 2_784)),
        (5, 3, (674_560, 4_584, 674_560, 4_584)), (7, 4, (888_576, 6_600, 883_456, 6_560)),
    ]:  # fmt: skip
        forbidden = {pair for pair, steps in distance.items() if steps < k}
        assert tuple(walk((find(rows, "S"),), 1, forbidden, k + tolerance, 14, squares, goal)) == expected
        assert counted(rows, k, tolerance, 14) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_1_removes_standing_still_and_a_long_window_nothing(layout):
    """Both by powers of the adjacency matrix, over the full horizon."""
    squares = sorted({a for a, _ in relaxed_distances(LAYOUTS[layout])})
    apart = np.array([[abs(a[0] - b[0]) + abs(a[1] - b[1]) for b in squares] for a in squares])
    goal, start = (squares.index(find(LAYOUTS[layout], mark)) for mark in "GS")

    def walks(adjacency):
        """The four counts of walks of 14 steps that end at the goal when they reach it."""
        at, sequences, trajectories = np.eye(len(squares), dtype=np.int64)[[start, start]], 0, 0
        distinct = (adjacency > 0).astype(np.int64)
        for t in range(1, 15):
            at = np.stack([at[0] @ adjacency, at[1] @ distinct])
            sequences, trajectories = sequences + int(at[0, goal]) * 4 ** (14 - t), trajectories + int(at[1, goal])
            at[:, goal] = 0
        return sequences + int(at[0].sum()), trajectories + int(at[1].sum()), sequences, trajectories

    moving = (apart == 1).astype(np.int64)
    assert counted(LAYOUTS[layout], 1, 0, 14) == walks(moving)
    everything = walks(moving + np.diag(4 - moving.sum(1)))  # actions into a wall stay
    assert everything[0] == 4**14
    assert counted(LAYOUTS[layout], 7, 8, 14) == everything  # 15 steps back: before the first state


@pytest.mark.parametrize(
    "k, tolerance, horizon, expected",
    [
        (1, 0, 2, (2, 2, 1, 1)),  # right right, right left
        (1, 0, 3, (5, 2, 4, 1)),  # right right and a free action; right left right
        (2, 0, 3, (4, 1, 4, 1)),  # right right and a free action
        (1, 1, 2, (6, 3, 1, 1)),  # not back at S after two steps: stay (3 ways) right; right stay (2 ways); right right
        (3, 0, 2, (16, 5, 1, 1)),  # nothing to compare with: SSS, SSm, SmS, Smm, SmG
    ],
)
def test_corridor_by_hand(k, tolerance, horizon, expected):
    assert counted(("S.G",), k, tolerance, horizon) == expected


def test_distances():
    start, goal, moves = read_layout(RING)
    distances = square_distances(moves, goal)
    assert (start, goal) == ((0, 0), (1, 1)) and moves[0, 0] == {(0, 0): 2, (1, 0): 1, (0, 1): 1}
    assert distances[1, 0][1, 2] == 4 and distances[1, 0][1, 1] == 1 and distances[0, 0][2, 2] == 4
    for rows, steps in ((LAYOUTS["walled"], 8), (LAYOUTS["open"], 12)):
        start, goal, moves = read_layout(rows)
        distances = square_distances(moves, goal)
        assert distances[start][goal] == steps
        assert {(a, b): d for a, found in distances.items() if a != goal for b, d in found.items()} == {
            pair: d for pair, d in relaxed_distances(rows).items() if pair[0] != goal
        }


def test_a_larger_k_never_adds_without_tolerance():
    """Every (k+1)-SP trajectory is k-SP, as in the paper's lemma; what remains are the 8 shortest paths to the goal."""
    counts = [counted(LAYOUTS["walled"], k, 0, 14) for k in range(1, 8)]
    assert all(large >= small for more, less in itertools.pairwise(counts) for large, small in zip(more, less))
    assert counts[-1] == (8 * 4**6, 8, 8 * 4**6, 8)


def test_the_reading_that_gives_24():
    """k = 3, Dt = 0: no D <= k to the state k + Dt + 1 steps back. Every trajectory of every map is walked on its own.
    What reaches the goal are the shortest ways, counted by binomials: above and below, one route has 6, one has 18."""
    readings, found = count_readings()
    assert [row["maps"] for row in readings] == 7 * [32] + 7 * [162]
    hits = [(row["outer_wall"], row["least_distance"], row["lag"], name, row[f"maps_{name}"])
            for row in readings for name in COUNTS if row[f"maps_{name}"]]  # fmt: skip
    assert hits == [(False, 4, 4, "goal_trajectories", 36)]
    maps, maps_with_24 = maps_without_outer_wall(), set()
    assert len(maps) == 162
    for name, (upper, lower, left, right) in maps.items():
        rows = name.split("/")
        distance, goal = power_distances(rows), find(rows, "G")
        squares = {a for a, _ in distance}
        forbidden = {pair for pair, steps in distance.items() if steps <= 3}
        walked = walk((find(rows, "S"),), 1, forbidden, 4, 14, squares, goal)
        above = comb(2 + upper, 2) * comb(2 - upper + right, right) * comb(4 - right, 2)
        below = comb(2 + left, 2) * comb(2 - left + lower, lower) * comb(4 - lower, 2)
        assert walked[3] == above + below and walked[1] > 24, name
        if walked[3] == 24:
            assert {above, below} == {6, 18}
            maps_with_24.add(name)
            assert all(counted(rows, k + 1, 0, 14)[3] == 24 for k in range(3, 8))
    assert len(found) == 36 and {row["map"] for row in found} == maps_with_24


def run(folder, *flags):
    command = [sys.executable, str(ROOT / "analysis" / "trajectory_space.py"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def test_command_line(tmp_path):
    done = run(tmp_path, "--horizon", "5", "--max-k", "2", "--max-tolerance", "1", "--out", "new/folder")
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr  # the goal is out of reach
    assert "#S.#..#" in done.stdout and "start (1, 1), goal (5, 5)" in done.stdout
    with open(tmp_path / "new" / "folder" / "trajectory_space.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["k"]), int(row["tolerance"])) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for row in rows:
        expected = counted(LAYOUTS["walled"], int(row["k"]), int(row["tolerance"]), 5)
        assert tuple(int(row[name]) for name in COUNTS) == expected
        assert float(row["share"]) == pytest.approx(expected[0] / 4**5, rel=1e-5)
        assert f"{expected[0]:,}" in done.stdout
    assert "36 of 162 maps: D > 3 to the state 4 steps back, without outer wall" in done.stdout
    with open(tmp_path / "new" / "folder" / "maps.csv") as file:
        assert len(list(csv.DictReader(file))) == 36
    assert (tmp_path / "new" / "folder" / "trajectory_space.png").stat().st_size > 10_000


def test_star_is_not_mistaken_for_agreement(tmp_path, monkeypatch):
    """Both charts of trajectories have a hollow star at the paper's 24, an arrow from it to what we count for the same
    k and Dt, and both numbers in words."""
    figures, settings = [], trajectory_space.Args(max_k=3, max_tolerance=2)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    counts = {(k, dt): counted(LAYOUTS["walled"], k, dt, 14) for k, dt in itertools.product((1, 2, 3), range(3))}
    trajectory_space.draw(settings, counts, [], tmp_path / "unused.png")
    charts = {axis.get_title(): axis for axis in figures[0].axes}
    for title, here in (("distinct trajectories", 16_100), ("distinct trajectories that reach the goal", 2_784)):
        (star,) = [line for line in charts[title].lines if line.get_marker() == "*"]
        assert star.get_xydata().tolist() == [[3, 24 * 100 / 4**14]] and star.get_markerfacecolor() == "none"
        (arrow,) = [text for text in charts[title].texts if isinstance(text, Annotation)]
        assert arrow.xyann == (3, 24 * 100 / 4**14) and arrow.xy == (3, pytest.approx(here * 100 / 4**14))
        words = " ".join(text.get_text() for text in charts[title].texts)
        assert "paper: 24 for k = 3" in words and f"here: {here:,} (arrow)" in words
    assert not any(line.get_marker() == "*" for name in ("sequences", "goal_sequences")
                   for line in charts[COUNTS[name]].lines)  # fmt: skip


def test_published_files():
    """results/trajectory_space/ is what the program counts today."""
    with open(ROOT / "results" / "trajectory_space" / "trajectory_space.csv") as file:
        rows = {(int(row["k"]), int(row["tolerance"])): row for row in csv.DictReader(file)}
    assert list(rows) == list(itertools.product(range(1, 8), range(6)))
    for k, tolerance in [(1, 5), (3, 0), (3, 2), (7, 5)]:
        expected = counted(LAYOUTS["walled"], k, tolerance, 14)
        assert tuple(int(rows[k, tolerance][name]) for name in COUNTS) == expected


@pytest.mark.parametrize("flag, value", [("horizon", 0), ("horizon", 17), ("max_k", 0), ("max_tolerance", -1)])
def test_bad_values_end_in_one_line(flag, value, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        trajectory_space.main(trajectory_space.Args(**{flag: value}, out=str(tmp_path / "unmade")))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and f"{value} is out of range" in error
    assert not (tmp_path / "unmade").exists()


def test_a_file_where_the_folder_should_be(capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit) as stop:
        trajectory_space.main(trajectory_space.Args(out=str(tmp_path / "taken")))
    assert stop.value.code == 2 and "taken" in capsys.readouterr().err
