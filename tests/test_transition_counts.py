"""analysis/transition_counts.py against Floyd-Warshall, every action sequence played out and numbers found by hand."""

import csv
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "analysis"))

import transition_counts  # noqa: E402
from transition_counts import (  # noqa: E402
    Args,
    CountBonus,
    Random,
    ShortestPaths,
    StateGraph,
    count_transitions,
    distinct_transitions,
    enumerate_windows,
    evenness,
    least_cost,
    measure,
    shortest_distances,
    walk,
    walk_cost,
)


@pytest.fixture(scope="module")
def graphs():
    """The default layout without and with its reward."""
    world, found = gym.make("MiniGrid-NineRooms-v0").unwrapped, {}
    for rewarded in (False, True):
        world.reset(seed=Args().layout)
        found[rewarded] = StateGraph(world, rewarded)
    return found


def chain(length, ring=False, end=False):
    """A corridor of states 0, 1, ..: left, right, stay. On a ring the ends meet; `end`: the last state ends it."""
    states = np.arange(length)
    left, right = (states - 1, states + 1) if not ring else ((states - 1) % length, (states + 1) % length)
    nexts = np.stack([np.maximum(left, 0), np.minimum(right, length - 1), states], 1)
    ends = (nexts == length - 1) & (states[:, None] != length - 1) & end
    return SimpleNamespace(nexts=nexts, ends=ends, distances=shortest_distances(nexts, ends), first=0)


def floyd_warshall(nexts, ends):
    """D_nr by relaxing over every middle state; an edge that ends the episode is only ever the last of a path."""
    size = len(nexts)
    inner, last = np.full((size, size), size), np.full((size, size), size)
    for i, a in np.ndindex(*nexts.shape):
        (last if ends[i, a] else inner)[i, nexts[i, a]] = 1
    inner[np.arange(size), np.arange(size)] = 0
    for middle in range(size):
        inner = np.minimum(inner, inner[:, [middle]] + inner[[middle]])
    ended = np.stack([(row[:, None] + last).min(0) for row in inner])
    return np.minimum(np.minimum(inner, ended), size)


# WORLD ###############################################################################################################
@pytest.mark.parametrize("rewarded", [False, True])
def test_distances_equal_floyd_warshall(graphs, rewarded):
    graph = graphs[rewarded]
    assert np.array_equal(graph.distances, floyd_warshall(graph.nexts, graph.ends))
    at_goal = [i for i, state in enumerate(graph.states) if state[:2] == graph.goal]
    if rewarded:  # only the step onto the goal ends the episode
        assert {graph.nexts[i, a] for i, a in np.argwhere(graph.ends)} <= set(at_goal) and graph.ends.any()
    else:
        assert not graph.ends.any() and graph.distances.max() < 30  # every state can be reached from every other


def test_graph_is_minigrid(graphs):
    """93 squares: nine rooms of 9 and 12 gaps. Turning left from east (0) is north (3); forward east is x + 1."""
    graph = graphs[False]
    assert len(graph.squares) == 9 * 9 + 12 and len(graph.states) == 4 * 93
    x, y, _ = graph.start
    state = graph.states.index((x, y, 0))
    assert [graph.states[j] for j in graph.nexts[state]] == [(x, y, 3), (x, y, 1), (x + 1, y, 0)] + [(x, y, 0)] * 4
    forward = sum((x + 1, y) in graph.squares for x, y in graph.squares)
    forward += sum((x, y + 1) in graph.squares for x, y in graph.squares)
    assert len(graph.moves) == 2 * len(graph.states) + 2 * forward


def test_cost_equals_a_double_loop(graphs):
    graph, rng = graphs[False], np.random.default_rng(3)
    states = walk(Random(graph, None), graph, 1, 200, rng)[0]
    for k in (1, 2, 5, 15, 200, 300):
        slow = [t >= k and graph.distances[states[t - k], states[t]] < k for t in range(1, 201)]
        assert walk_cost(graph.distances, states, k).tolist() == slow


# AGENTS ##############################################################################################################
def test_count_bonus_goes_to_the_least_visited_end():
    graph = chain(5)
    agent = CountBonus(graph, None)
    for counts, action in (([9, 9, 9, 9, 0], 1), ([0, 9, 9, 9, 9], 0), ([9, 9, 0, 9, 9], 2)):
        agent.counts, agent.values = np.array(counts, float), np.zeros(5)
        for _ in range(3000):
            agent.sweep()
        assert agent.best(2).tolist() == [action], counts


def test_count_bonus_by_hand():
    """Two states that lead to each other, visited 0 and 3 times: the bonuses are 1 and 1/2."""
    graph = chain(2)
    agent = CountBonus(graph, None)
    agent.counts[1] = 3
    agent.sweep()
    assert np.allclose(agent.q, [[1, 0.5, 1], [1, 0.5, 0.5]]) and np.allclose(agent.values, [1, 1])
    agent.moved(0, 0)
    agent.begin()  # to be put at the start is a visit
    assert agent.counts.tolist() == [2, 3]


def test_count_bonus_visits_a_ring_evenly():
    states = walk(CountBonus(chain(8, ring=True), None), chain(8, ring=True), 1, 799, np.random.default_rng(0))[0]
    visits = np.bincount(states)
    assert len(states) == 800 and visits.min() >= 95 and visits.max() <= 105


def cheapest(graph, k, length, gamma):
    """The least discounted k-SP cost (Eq. 13) among all action sequences of this length, each played out on its own."""
    best = np.inf
    for actions in itertools.product(range(3), repeat=length):
        states = [graph.first]
        for action in actions:
            ended = graph.ends[states[-1], action]
            states.append(int(graph.nexts[states[-1], action]))
            if ended:
                break
        cost = [t >= k and graph.distances[states[t - k], states[t]] < k for t in range(1, len(states))]
        best = min(best, sum(gamma**t * c for t, c in enumerate(cost)))
    return best


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("ring, end", [(False, False), (False, True), (True, False)])
def test_plan_is_the_best_of_all_sequences(monkeypatch, k, ring, end):
    """With a discount of 0.2 what comes after 8 steps is worth less than 0.2^8 / 0.8 = 3.2e-6."""
    monkeypatch.setattr(transition_counts, "GAMMA", 0.2)
    graph = chain(4, ring, end)
    q = least_cost(*enumerate_windows(graph, np.arange(3), k), block=3)
    assert q[0].min() == pytest.approx(cheapest(graph, k, 8, 0.2), abs=1e-5)


def test_windows_charge_the_cost(graphs, monkeypatch):
    """On random walks and without a discount, what the windows charge is the cost so far and what has become certain:
    of the last states those that the walk is nearer to than the steps since."""
    monkeypatch.setattr(transition_counts, "GAMMA", 1.0)
    graph, rng, k = graphs[False], np.random.default_rng(0), 6
    windows, costs = enumerate_windows(graph, np.arange(3), k)  # left, right, forward
    for _ in range(20):
        states, window, charged = [graph.first], 0, 0.0
        for action in rng.choice(3, 100, p=[0.1, 0.1, 0.8]):
            charged += costs[window, action]
            window = windows[window, action]
            states.append(int(graph.nexts[states[-1], action]))
        certain = sum(graph.distances[states[-1 - i], states[-1]] < i for i in range(1, k))
        assert charged == walk_cost(graph.distances, np.array(states), k).sum() + certain > 0


def test_plan_by_hand():
    """A corridor of 4 from its end, k = 2: three steps, then the agent must turn, and 2 3 2 costs 1. To stand still
    would cost two, 2 3 3 and 3 3 2. So every third step costs, the first of them the fourth. With a goal at the end, or
    on a ring, nothing does; on a ring of 6 with k = 4 the other way is shorter: every step from the fourth costs."""
    gamma = transition_counts.GAMMA
    q = least_cost(*enumerate_windows(chain(4), np.arange(3), 2))
    assert q[0].min() == pytest.approx(gamma**3 / (1 - gamma**3))
    assert least_cost(*enumerate_windows(chain(4, end=True), np.arange(3), 2))[0].min() == 0
    assert least_cost(*enumerate_windows(chain(6, ring=True), np.arange(3), 3))[0].min() == 0
    assert least_cost(*enumerate_windows(chain(6, ring=True), np.arange(3), 4))[0].min() == pytest.approx(
        gamma**3 / (1 - gamma)
    )


def test_shortest_paths_on_nine_rooms(graphs):
    """k = 5. With the reward no walk has a cost; without it, still far fewer than chance's."""
    args, rng = Args(k=5), np.random.default_rng(0)
    walks = walk(ShortestPaths(graphs[True], args), graphs[True], 20, 500, rng)
    assert all(graphs[True].states[states[-1]][:2] == graphs[True].goal for states in walks)
    assert not any(walk_cost(graphs[True].distances, states, 5).any() for states in walks)
    free = walk(ShortestPaths(graphs[False], args), graphs[False], 2, 500, rng)
    chance = walk(Random(graphs[False], args), graphs[False], 2, 500, rng)
    costs = [np.mean([walk_cost(graphs[False].distances, s, 5).mean() for s in walks]) for walks in (free, chance)]
    assert costs[0] < 0.1 < 0.9 < costs[1] and [len(states) for states in free] == [501, 501]


# TABLE ###############################################################################################################
def test_counts_and_measures_by_hand():
    walks = [np.array([0, 1, 1, 2]), np.array([0, 1, 0])]
    counts = count_transitions(walks, 4)
    assert counts.sum() == 3 + 2 and counts[0, 1] == 2 and counts[1].tolist() == [1, 1, 1, 0]
    assert distinct_transitions(walks) == 3 and distinct_transitions(walks[1:]) == 2  # 01 12 10, 01 10
    graph = chain(4)
    graph.states, graph.goal = [(i, 0, 0) for i in range(4)], (2, 0)
    row = measure(walks, graph, 2)
    assert row["steps per episode"] == 2.5 and row["the same in one episode"] == 2
    assert row["share of states visited"] == 3 / 4 and row["episodes at the goal"] == 1 / 2
    assert row["k-SP cost per step"] == 3 / 5  # 0 1 1, 1 1 2 and 0 1 0 are shorter than 2
    visits = np.array([3, 3, 1, 0]) / 7
    assert row["evenness of the visits"] == pytest.approx(-sum(p * np.log(p) for p in visits if p) / np.log(4))
    assert evenness(np.array([5, 5, 5])) == pytest.approx(1) and evenness(np.array([0, 7, 0])) == 0


# COMMAND LINE ########################################################################################################
SMALL = {"seeds": 2, "episodes": 2, "steps": 60, "k": 3}


def test_files(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    transition_counts.main(Args(**SMALL, out=str(folder)))
    assert "start (1, 3, 2), goal (11, 11), 23 steps apart; 372 states" in capsys.readouterr().out
    names = ["table.csv", "transition_counts.csv", "transition_counts.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    with open(folder / "transition_counts.csv") as file:
        rows = list(csv.DictReader(file))
    for agent in ("Random", "GT-UCB", "SPRL"):
        for seed in ("seed_1", "seed_2"):
            assert sum(int(row[seed]) for row in rows if row["agent"] == agent) == 2 * 60
    with open(folder / "table.csv") as file:
        table = {row["measure"]: row for row in csv.DictReader(file)}
    random = [row for row in rows if row["agent"] == "Random"]
    moved = [row for row in random if any(row[name] != row[f"to_{name}"] for name in ("x", "y", "direction"))]
    distinct = [sum(int(row[seed]) > 0 for row in moved) for seed in ("seed_1", "seed_2")]
    assert float(table["distinct transitions"]["Random"]) == np.mean(distinct)
    assert float(table["k-SP cost per step"]["SPRL+Reward"]) == 0
    assert (folder / "transition_counts.png").stat().st_size > 30_000


@pytest.mark.parametrize("where", ["walk", "draw"])
def test_interrupted_leaves_nothing(where, monkeypatch, capsys, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(transition_counts, where, interrupt)  # while it works, and with the tables just written
    with pytest.raises(SystemExit) as stop:
        transition_counts.main(Args(**SMALL, out=str(tmp_path)))
    assert stop.value.code == 130 and "stopped, nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag, value", [("seeds", 0), ("episodes", 10_001), ("steps", 0), ("k", 21), ("layout", -1)])
def test_bad_values_end_in_one_line(flag, value, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        transition_counts.main(Args(**{flag: value}, out=str(tmp_path / "unmade")))
    error = capsys.readouterr().err
    low, high = transition_counts.RANGES[flag]
    assert stop.value.code == 2 and error.count("\n") == 1 and not (tmp_path / "unmade").exists()
    assert f"--{flag} {value} is out of range, accepted: {low} to {high}" in error


def test_a_file_where_the_folder_should_be(capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit) as stop:
        transition_counts.main(Args(out=str(tmp_path / "taken")))
    assert stop.value.code == 2 and "taken" in capsys.readouterr().err
