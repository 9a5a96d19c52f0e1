"""DeepMind Lab. The stand-in: mazes, movement and rewards against the engine's measured numbers, frames against a ray
marched in small steps and against objects placed by hand. The real engine: a double that raises where it raises."""

import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, deque
from types import SimpleNamespace

import labmaze.assets
import numpy as np
import pytest
import torch
from conftest import ROOT, fake_envs, load, random_segments
from PIL import Image

DMLAB, ECO, ICM, GT_GRID = "ppo_sprl_dmlab.py", "ppo_eco.py", "ppo_icm.py", "ppo_gtgrid.py"
SMALL, LARGE, MANY = "explore_goal_locations_small", "explore_goal_locations_large", "explore_object_rewards_many"
FORWARD, BACKWARD, LEFT, RIGHT, LOOK_LEFT, LOOK_RIGHT, FORWARD_LEFT, FORWARD_RIGHT, FIRE = range(9)
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def dmlab():
    return load(DMLAB)


@pytest.fixture
def mazes(dmlab):
    def mazes(env_id, num_envs=1, seed=0, drawn=False):
        envs = dmlab.LabMazes(env_id, num_envs, 1, CPU)
        if not drawn:
            envs.draw = lambda: np.zeros((num_envs, 84, 84, 3), np.uint8)
        envs.reset(seed=seed)
        return envs

    return mazes


def stand(envs, x, y, heading=0.0):
    envs.places[:], envs.headings[:], envs.velocities[:] = (x, y), heading, 0


def act(envs, action):
    return envs.step(np.full(envs.num_envs, action))


def alone(envs):
    """Nothing to pick up."""
    envs.objects[:] = -1e4
    return envs


def walk(envs, action, steps):
    """Distances (steps,) that the first agent moved in each step."""
    moved = []
    for _ in range(steps):
        before = envs.places[0].copy()
        act(envs, action)
        moved.append(np.hypot(*(envs.places[0] - before)))
    return moved


def distances(solid, *cells):
    """Steps from open cells to the nearest of these, {(x, y): steps}, by breadth-first search."""
    found = {tuple(cell): 0 for cell in cells}
    queue = deque(found)
    while queue:
        x, y = queue.popleft()
        for place in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
            if not solid[place[1], place[0]] and place not in found:
                found[place] = found[x, y] + 1
                queue.append(place)
    return found


# MAZES ###############################################################################################################
@pytest.mark.parametrize(
    "env_id, size, open_cells, spawns, objects, mean_path, max_path",
    [
        (SMALL, 11, 59, 19.2, {8, 12, 16}, 6.5, 24),
        (LARGE, 17, 146, 45, {36}, 11.9, 41),
        (MANY, 13, 121, 5, {16}, 7.3, 20),
    ],
)
def test_mazes_are_those_of_the_table(mazes, env_id, size, open_cells, spawns, objects, mean_path, max_path):
    envs = mazes(env_id, 60)
    opened, counts, paths = [], Counter(), []
    assert np.mean([len(cells) for cells in envs.spawn_cells]) == pytest.approx(spawns, rel=0.05)
    for n in range(60):
        solid, cells = envs.solid[n], envs.object_cells[n]
        assert solid.shape == (size, size) and solid[[0, -1]].all() and solid[:, [0, -1]].all()
        rooms = set(envs.mazes[n].variations_layer.ravel()) - {"."}
        assert len(envs.spawn_cells[n]) == 5 * len(rooms)
        found = distances(solid, envs.spawn_cells[n][0])
        assert len(found) == (~solid).sum(), "everything is connected"
        neighbours = [sum(not solid[y + b, x + a] for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))) for x, y in found]
        assert min(neighbours) >= 2, "no dead ends"
        opened.append(len(found))
        counts[len(cells)] += 1
        for spawn in envs.spawn_cells[n]:
            found = distances(solid, spawn)
            paths += [found[tuple(cell)] for cell in cells]
    assert np.mean(opened) == pytest.approx(open_cells, rel=0.04) and set(counts) <= objects
    assert counts.most_common(1)[0][0] == max(objects)
    assert np.mean(paths) == pytest.approx(mean_path, rel=0.07) and 0.6 * max_path <= max(paths) <= 1.25 * max_path


def test_map_is_as_the_engine_counts(mazes):
    """col = x // 100 and row = H - 1 - y // 100 of the maze's text."""
    envs = mazes(SMALL, 4)
    for n, maze in enumerate(envs.mazes):
        rows = str(maze.entity_layer).strip().split("\n")
        for x, y in (envs.places[n], *envs.objects[n]):
            col, row = int(x // 100), int(11 - 1 - y // 100)
            assert rows[row][col] == ("P" if (x, y) == tuple(envs.places[n]) else "G")
        for row, col in np.ndindex(11, 11):
            assert envs.solid[n, 10 - row, col] == (rows[row][col] == "*")


def test_positions(mazes):
    """In whole units of a map of 100 a cell: 37 x 37 cells of 30 units on the small one."""
    envs = alone(mazes(SMALL, 2))
    envs.move = lambda actions: None
    envs.places[:] = [[1083.99, 16.0], [29.9, 30.0]]
    positions = act(envs, FIRE)[4]["position"]
    assert positions.tolist() == [[1083, 16], [29, 30]] and positions.dtype == np.int64
    assert envs.map_size == (1100, 1100) and (positions // 30).tolist() == [[36, 0], [0, 1]]
    assert mazes(LARGE).map_size == (1700, 1700) and mazes(MANY).map_size == (1300, 1300)


# MOVEMENT ############################################################################################################
@pytest.mark.parametrize("action, direction", [(FORWARD, 0), (BACKWARD, 180), (LEFT, 90), (RIGHT, -90)])
def test_speeds_are_the_measured_ones(mazes, action, direction):
    """Units per step from rest and after release, as measured on the engine, in every direction."""
    envs = alone(mazes(MANY))
    for heading in (0, 37, 45, 200):
        stand(envs, 650, 650, np.deg2rad(heading))
        moved = walk(envs, action, 12)
        np.testing.assert_allclose(moved[:4], [7.5, 16.5, 19.8, 20.3], atol=0.12)
        np.testing.assert_allclose(moved[4:], 20.4, atol=0.1)
        way = np.deg2rad(heading + direction)
        np.testing.assert_allclose((envs.places[0] - 650) / sum(moved), [np.cos(way), np.sin(way)], atol=1e-9)
        assert 4.8 < 100 / moved[-1] < 5, "steps a cell"
        np.testing.assert_allclose(walk(envs, FIRE, 7), [15.6, 11.0, 7.3, 4.5, 2.2, 0.1, 0], atol=0.5)
        assert abs(envs.velocities[0]) == 0


def test_turns_have_no_inertia(mazes):
    """8.45 degrees a step, to the right if positive."""
    envs = alone(mazes(MANY))
    stand(envs, 650, 650, 1.0)
    for action, degrees in ((LOOK_RIGHT, -8.448), (LOOK_LEFT, 8.448), (FORWARD, 0), (FORWARD_RIGHT, -8.448), (FIRE, 0)):
        before = envs.headings[0]
        act(envs, action)
        assert np.rad2deg(envs.headings[0] - before) == pytest.approx(degrees, abs=1e-9), action
    stand(envs, 650, 650)
    assert walk(envs, LOOK_LEFT, 3) == [0, 0, 0]
    stand(envs, 650, 650)
    for _ in range(10):  # a curve to the left
        act(envs, FORWARD_LEFT)
    assert envs.places[0, 0] > 700 and envs.places[0, 1] > 700


@pytest.mark.parametrize("heading, place", [(0, (1184, 650)), (90, (650, 1184)), (180, (116, 650)), (270, (650, 116))])
def test_agent_stops_16_units_from_a_wall(mazes, heading, place):
    envs = alone(mazes(MANY))
    stand(envs, 650, 650, np.deg2rad(heading))
    walk(envs, FORWARD, 60)
    np.testing.assert_allclose(envs.places[0], place, atol=1e-6)
    slid = walk(envs, RIGHT, 10)  # along the wall, as fast as in the open
    np.testing.assert_allclose(slid[:4], [7.5, 16.5, 19.8, 20.3], atol=0.12)
    assert np.abs(envs.places[0] - place).min() < 1e-6


def test_no_agent_comes_closer_to_a_wall(mazes):
    """Whatever it does: its square of 32 units touches no solid cell."""
    envs, rng, closest = alone(mazes(SMALL, 20)), np.random.default_rng(0), np.inf
    actions = np.zeros(20, int)
    for _ in range(300):
        change = rng.random(20) < 0.3
        actions = np.where(change, rng.choice(8, 20), actions)
        envs.step(actions)
        for n in range(20):
            (x, y), solid = envs.places[n], envs.solid[n]
            for b, a in np.argwhere(
                solid[int(y) // 100 - 1 : int(y) // 100 + 2, int(x) // 100 - 1 : int(x) // 100 + 2]
            ):
                left, low = (int(x) // 100 - 1 + a) * 100, (int(y) // 100 - 1 + b) * 100
                gap = max(left - x, x - left - 100, low - y, y - low - 100)
                closest = min(closest, gap)
    assert closest == pytest.approx(16, abs=1e-5)


# TASKS ###############################################################################################################
def test_pickup_box(mazes):
    """x from -50 to +44 and y from -36 to +36 around the object. It is tested every frame: a step that only cuts the
    box's corner takes the object, too."""
    envs = mazes(MANY)
    envs.objects[0] = -1e4
    inside = [(-49.9, 0), (43.9, 0), (0, -35.9), (0, 35.9), (-49.9, 35.9), (43.9, -35.9)]
    outside = [(-50.1, 0), (44.1, 0), (0, -36.1), (0, 36.1), (-49.9, 36.1), (44.1, -35.9)]
    for places, reward in ((inside, 2.0), (outside, 0.0)):
        for place in places:
            envs.objects[0, 2], envs.present[0] = (650, 650), True
            stand(envs, *np.add(650, place))
            assert act(envs, FIRE)[1].tolist() == [reward], place
    envs.present[0] = True
    stand(envs, 650 + 47, 650 + 27, np.deg2rad(135))
    envs.velocities[0] = 5.1 * np.exp(1j * np.deg2rad(135))  # 3.6 units a frame and axis, from outside to outside
    assert act(envs, FORWARD)[1].tolist() == [2.0]
    np.testing.assert_allclose(envs.places[0] - 650, (47 - 4 * 3.6, 27 + 4 * 3.6), atol=0.1)


def test_respawn_two_frames_after_the_goal(mazes):
    """An agent at top speed, 5.1 units a frame, touches the goal's box in the first, second, third or fourth frame of a
    step. Two frames later it is moved: in the same step, or in the next one, before which the old place is seen."""
    envs = mazes(SMALL)
    envs.solid[0, 1:-1, 1:-1] = False
    envs.objects[0], envs.spawn_cells[0] = (550, 850), np.array([[2, 2]])
    for frame in range(4):
        stand(envs, 500 - 5.1 * (frame + 0.5), 850)
        envs.velocities[0] = 5.1
        assert act(envs, FORWARD)[1].tolist() == [10.0]
        if frame >= 2:
            assert envs.places[0].tolist() == pytest.approx([500 + 5.1 * (3.5 - frame), 850], abs=0.2)
            assert act(envs, FORWARD)[1].tolist() == [0.0], "no second reward"
        assert abs(envs.places[0] - 250).max() < 7.5 and envs.present.all(), frame


def test_goal_respawns_the_agent_and_the_clock_runs_on(mazes):
    envs, spawns, headings = mazes(SMALL), set(), set()
    goal = envs.objects[0].copy()
    assert tuple((goal[0] - 50) / 100) in set(map(tuple, envs.object_cells[0]))
    rewards, ends = [], []
    for step in range(1, 1351):
        touches = step % 5 == 0
        if touches:
            envs.places[0], envs.velocities[0] = goal[0] + [3, -4], 5
        else:
            stand(envs, *(np.array(envs.spawn_cells[0][0]) * 100 + 50))
        _, reward, terminations, truncations, _ = act(envs, FIRE)
        rewards.append(reward[0])
        ends.append(truncations[0])
        assert not terminations.any() and np.array_equal(envs.objects[0], goal)
        if touches:
            spawns.add(tuple(((envs.places[0] - 50) / 100).astype(int)))
            headings.add(round(float(envs.headings[0]), 3))
            assert abs(envs.velocities[0]) == 0
    assert rewards == ([0] * 4 + [10]) * 270 and ends == 1349 * [False] + [True]
    assert spawns == set(map(tuple, envs.spawn_cells[0])) and len(headings) > 200
    solid = envs.solid.copy()
    _, reward, _, truncations, _ = act(envs, FORWARD)
    assert reward[0] == 0 and not truncations[0] and envs.clocks[0] == 0 and not np.array_equal(solid, envs.solid)


@pytest.mark.parametrize("env_id, steps", [(SMALL, 1350), (LARGE, 1800), (MANY, 1800)])
def test_episode_lengths(mazes, env_id, steps):
    envs = alone(mazes(env_id, 2))
    ends = [t for t in range(1, steps + 3) if act(envs, LOOK_LEFT)[3].all()]
    assert ends == [steps] and envs.clocks.tolist() == [1, 1]


def test_goals_are_drawn_from_the_object_cells(mazes):
    envs = mazes(LARGE, 40)
    places = [envs.object_cells[n].tolist().index(((envs.objects[n, 0] - 50) / 100).tolist()) for n in range(40)]
    assert len(set(places)) > 15


def test_all_good_objects_restart_the_map(mazes):
    """8 of 16 cells; +2 four times, -1 for a bad one; what is taken is gone until all good ones are."""
    envs = mazes(MANY, 3, seed=4)
    looks, meanings = envs.looks.copy(), set()
    for n in range(3):
        cells = {tuple(cell) for cell in envs.object_cells[n].tolist()}
        assert len(cells) == 16 and {tuple(c) for c in ((envs.objects[n] - 50) / 100).tolist()} <= cells
        assert len({tuple(place) for place in envs.objects[n].tolist()}) == 8
        assert sorted(looks[n]) == [0, 1, 2, 3, 4, 5, 6, 7], "each has a look of its own"
        meanings.add(tuple(sorted(looks[n, :4])))
    assert len(meanings) > 1, "it is another one in another episode"
    before, rewards, solid = envs.objects.copy(), [], envs.solid.copy()
    for number in (0, 5, 2, 5, 1, 3):
        envs.places[:] = before[:, number]
        rewards.append(act(envs, FIRE)[1].tolist())
        if number != 3:
            assert np.array_equal(envs.objects, before) and not envs.present[:, number].any()
    assert rewards == [[2] * 3, [-1] * 3, [2] * 3, [0] * 3, [2] * 3, [2] * 3]
    assert envs.present.all() and not np.array_equal(envs.objects, before)
    assert np.array_equal(envs.looks, looks) and np.array_equal(envs.solid, solid) and envs.clocks.tolist() == [6] * 3
    for n in range(3):
        assert ((envs.places[n] - 50) / 100).tolist() in envs.spawn_cells[n].tolist()


def navigate(envs, n, known):
    """The action that leads along a shortest path to the nearest thing worth having, around what is not; `known` keeps
    the distances."""
    here = tuple((envs.places[n] // 100).astype(int))
    key = n, envs.solid[n].tobytes(), envs.objects[n].tobytes(), envs.present[n].tobytes()
    if key not in known:
        solid, cells = envs.solid[n].copy(), (envs.objects[n] // 100).astype(int)
        wanted, unwanted = (cells[envs.present[n] & (np.sign(envs.object_rewards) == sign)] for sign in (1, -1))
        solid[unwanted[:, 1], unwanted[:, 0]] = True
        known[key] = distances(solid, *wanted)
    field, (x, y) = known[key], envs.places[n]
    if here not in field:
        return FORWARD_LEFT
    target = here
    for _ in range(2):  # two cells ahead where they lie in a line
        options = [(target[0] + a, target[1] + b) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        best = min(options, key=lambda cell: field.get(cell, 1e9))
        if field.get(best, 1e9) >= field[target] or (target != here and 0 not in np.subtract(best, here)):
            break
        target = best
    aim = np.arctan2(target[1] * 100 + 50 - y, target[0] * 100 + 50 - x)
    error = np.rad2deg((aim - envs.headings[n] + np.pi) % (2 * np.pi) - np.pi)
    if abs(error) > 30:
        return LOOK_LEFT if error > 0 else LOOK_RIGHT
    return FORWARD if abs(error) < 5 else FORWARD_LEFT if error > 0 else FORWARD_RIGHT


@pytest.mark.parametrize("env_id, low, high", [(SMALL, 120, 500), (LARGE, 120, 350), (MANY, 60, 400)])
def test_navigator_with_a_map_beats_chance(mazes, env_id, low, high):
    """One episode in each of two mazes. On the engine one that knows the map scored 170-440 on the small, 220-290 on
    the large maze, and random actions 0-30."""
    envs, chance, rng = mazes(env_id, 2, seed=7), mazes(env_id, 8, seed=7), np.random.default_rng(0)
    score, random_score, known = 0, 0, {}
    for _ in range(envs.episode_steps):
        score = score + envs.step(np.array([navigate(envs, n, known) for n in range(2)]))[1]
        random_score = random_score + chance.step(rng.integers(9, size=8))[1]
    assert low < score.mean() < high and score.min() > 3 * max(random_score.mean(), 10), (score, random_score)
    assert random_score.mean() <= 30


def test_seeds(mazes):
    """A seed repeats its frames and rewards; an environment does not depend on how many others there are."""
    films = []
    for seed, num_envs in ((3, 2), (3, 2), (3, 4), (4, 2)):
        envs, rng = mazes(MANY, num_envs, seed, drawn=True), np.random.default_rng(0)
        actions = rng.integers(9, size=(30, 4))
        films.append(np.stack([envs.step(row[:num_envs])[0][:2] for row in actions]))
    assert np.array_equal(films[0], films[1]) and np.array_equal(films[0], films[2])
    assert not np.array_equal(films[0][:, 0], films[3][:, 0]) and not np.array_equal(films[0][:, 0], films[0][:, 1])


# FRAMES ##############################################################################################################
def numbered(envs):
    """Lets every texel show its own number, so that frames tell which texel is where; returns a reader of them."""
    count = len(envs.caster.texels)
    envs.caster.texels = torch.arange(count, dtype=torch.int32).view(torch.uint8).view(-1, 4)[:, :3].contiguous()

    def draw():
        return type(envs).draw(envs).astype(np.int64) @ np.array([1, 1 << 8, 1 << 16])

    return draw


def march(envs, n, row, col, step=2e-4):
    """(kind, cell, face, depth, place) of what a pixel shows: a point goes from the eye until it is in a wall or below
    the floor; a field of view of 90 degrees, eyes at 0.5 of a wall's height."""
    heading, (x, y) = envs.headings[n], envs.places[n] / 100
    aside, down = (col + 0.5) / 42 - 1, (row + 0.5) / 42 - 1
    dx, dy = np.cos(heading) + aside * np.sin(heading), np.sin(heading) - aside * np.cos(heading)
    depths = np.arange(1, 130_000) * step
    xs, ys, heights = x + depths * dx, y + depths * dy, 0.5 - depths * down
    inside = (xs > 0) & (xs < envs.size) & (ys > 0) & (ys < envs.size)
    cells = np.where(inside, ys, 0).astype(int), np.where(inside, xs, 0).astype(int)
    hit = np.argmax(envs.solid[n][cells] | ~inside)
    low = np.argmax(heights < 0) if heights[-1] < 0 else len(depths)
    if low < hit:
        return "floor", (int(xs[low]), int(ys[low])), None, depths[low], (xs[low], ys[low])
    if heights[hit] > 1:
        return "sky", None, None, None, None
    before, after = (int(xs[hit - 1]), int(ys[hit - 1])), (int(xs[hit]), int(ys[hit]))
    face = {(1, 0): 0, (-1, 0): 1, (0, 1): 2, (0, -1): 3}.get(tuple(np.subtract(after, before)))
    return "wall", before, face, depths[hit], (xs[hit], ys[hit], heights[hit])


@pytest.mark.parametrize("env_id", [SMALL, LARGE, MANY])
def test_pixels_against_a_marched_ray(dmlab, mazes, env_id):
    """Random agents and pixels: what they show, of which texture, in which light, and where on it."""
    envs = alone(mazes(env_id, 12, seed=5, drawn=True))
    draw, starts, rng, texture = numbered(envs), envs.caster.starts, np.random.default_rng(0), 64 * 64
    seen, looks = Counter(), set()
    for n in range(12):
        cells = np.argwhere(~envs.solid[n])[:, ::-1]
        envs.places[n] = cells[rng.integers(len(cells))] * 100 + rng.uniform(16, 84, 2)
        envs.headings[n] = rng.uniform(-7, 7) if n else np.pi / 2
    frames = draw()
    for _ in range(260):
        n, row, col = rng.integers(12), *rng.integers(84, size=2)
        kind, cell, face, depth, place = march(envs, n, row, col)
        number = frames[n, row, col]
        if number == starts["hud"]:
            continue
        part = max((name for name in starts if starts[name] <= number), key=starts.get)
        if kind == "wall" and (face is None or min(place[2], 1 - place[2]) * 42 / depth < 0.3):
            continue  # a corner or an edge
        fraction = np.subtract(place[:2], np.floor(place[:2])) if kind != "sky" else [0.5, 0.5]
        across = np.array([fraction[1 - face // 2]]) if kind == "wall" else np.array(fraction)
        if (np.minimum(across, 1 - across) < 0.02).any():
            continue  # the next cell's
        seen[kind] += 1
        assert {"walls": "wall", "floors": "floor", "sky": "sky"}[part] == kind, (n, row, col)
        number -= starts[part]
        level, (column, line) = number // texture % 4, divmod(number % texture, 64)
        if kind == "sky":
            assert number // 64 == int(
                ((np.arctan((col + 0.5) / 42 - 1) - envs.headings[n]) / (2 * np.pi) * 512) // 1 % 512
            )
        else:
            variation = np.flipud(envs.mazes[n].variations_layer)[cell[1], cell[0]]
            seen["room" if variation != "." else "corridor"] += 1
        if kind == "floor":
            looks.add((n, kind, variation, number // texture // 4))
            assert abs(column - fraction[0] * 64) < 1.5 and abs(line - fraction[1] * 64) < 1.5
        if kind == "wall":
            image, light = number // texture // 4 // 2, number // texture // 4 % 2
            looks.add((n, kind, variation, image // (1 + dmlab.NUM_DECALS)))
            assert light == face // 2
            assert abs(column - across[0] * 64) < 1.5 and abs(line - (1 - place[2]) * 64) < 1.5
            assert abs(level - np.clip(np.log2(depth) + 1, 0, 3.999)) < 1.01
            seen["decal"] += image % (1 + dmlab.NUM_DECALS) > 0
    assert min(seen[kind] for kind in ("wall", "floor", "sky", "room")) > 15, seen
    assert {look for _, _, variation, look in looks if variation == "."} <= {0}, "corridors always look the same"
    rooms = [(n, kind) for n, kind, variation, _ in looks if variation != "."]
    assert len({(n, kind, look) for n, kind, variation, look in looks if variation != "."}) == len(set(rooms))


def test_depths_against_a_marched_ray(mazes):
    """All 84 rays of agents anywhere, on grid lines and looking along them, too."""
    envs, rng = mazes(LARGE, 6, seed=2, drawn=True), np.random.default_rng(1)
    for n in range(6):
        cells = np.argwhere(~envs.solid[n])[:, ::-1]
        envs.places[n] = cells[rng.integers(len(cells))] * 100 + rng.uniform(16, 84, 2)
        envs.headings[n] = rng.uniform(0, 7)
    x, y = next((x, y) for y, x in np.argwhere(~envs.solid[0]) if not envs.solid[0, y, x + 1])
    envs.places[0], envs.headings[0] = (100 * (x + 1), 100 * y + 50), 0.0
    pose = torch.from_numpy(np.concatenate([envs.places / 100, envs.headings[:, None]], 1)).float()
    px, py, heading = pose[..., None].unbind(1)
    slopes = envs.caster.slopes
    rays = heading.cos() + heading.sin() * slopes, heading.sin() - heading.cos() * slopes
    depths, _ = envs.caster.walls(px, py, *rays)
    assert depths.shape == (6, 84) and torch.isfinite(depths).all()
    wrong = 0
    for n, col in np.ndindex(6, 84):
        if col % 4 == 0:
            expected = march(envs, n, 41, col)[3] if march(envs, n, 41, col)[0] == "wall" else None
            wrong += expected is None or abs(depths[n, col] - expected) > 2e-3
    assert wrong == 0


@pytest.fixture
def room(mazes):
    """One agent in the middle of an open room, looking east, and a reader of which object's texels are where."""
    envs = alone(mazes(MANY, 1, drawn=True))
    stand(envs, 250, 650)
    envs.looks[:] = [[3, 5, 0, 0, 0, 0, 0, 0]]
    draw, start = numbered(envs), envs.caster.starts["looks"]

    def looks():
        frame = draw()[0]
        return np.where(frame >= start, (frame - start) // (32 * 64), -1)

    return envs, looks


def test_object_by_hand(room):
    """Two cells away, 0.5 wide and high on the floor. Columns within 0.125 of the middle's slope: 36.75 to 47.25, so
    centres 37.5 to 46.5. Rows from the horizon to the floor's slope 0.25: 42 to 52.5, so centres 42.5 to 51.5. The
    diamond (look 3) is widest in the middle."""
    envs, looks = room
    envs.objects[0, 0] = 450, 650
    rows, cols = np.nonzero(looks() == 3)
    assert (cols.min(), cols.max()) == (37, 46) and 42 <= rows.min() <= 43 and 50 <= rows.max() <= 51
    widths = [(rows == row).sum() for row in range(42, 52)]
    assert np.argmax(widths) in (4, 5) and max(widths) == 10 and widths[0] <= 2 and widths[-1] <= 2
    assert set(np.unique(looks())) == {-1, 3}
    envs.present[0, 0] = False
    assert (looks() == -1).all()


def test_object_on_the_right_is_seen_on_the_right(room):
    """At 3 ahead and 1 to the right: slope 1/3, column 42 + 14."""
    envs, looks = room
    envs.objects[0, 0] = 550, 550
    cols = np.nonzero(looks() == 3)[1]
    assert cols.mean() + 0.5 == pytest.approx(56, abs=0.6)
    envs.headings[0] -= np.deg2rad(8.448)  # turning right brings it nearer to the middle
    assert np.nonzero(looks() == 3)[1].mean() < 52
    envs.headings[0] = np.pi
    assert (looks() == -1).all(), "behind the agent"


def test_near_objects_hide_far_ones(room):
    """The ring (look 5) lets what is behind it be seen through its hole, whichever comes first in the list."""
    envs, looks = room
    for near, far in ((0, 1), (1, 0)):
        envs.looks[0, near], envs.looks[0, far] = 5, 1
        envs.objects[0, near], envs.objects[0, far] = (400, 650), (650, 650)
        both = looks()
        envs.present[0, far] = False
        ring = looks() == 5
        envs.present[0, far], envs.present[0, near] = True, False
        square = looks() == 1
        envs.present[0, near] = True
        assert ((both == 5) == ring).all() and ((both == 1) == (square & ~ring)).all()
        assert (square & ring).sum() > 3 and (square & ~ring).sum() > 3


def test_walls_hide_objects(mazes):
    envs = alone(mazes(SMALL, 1, drawn=True))
    y, x = next((y, x) for y, x in np.argwhere(envs.solid[0][1:-1, 1:-2]) + 1 if not envs.solid[0, y, x + 1])
    stand(envs, 100 * x + 150, 100 * y + 50, np.pi)
    draw, start = numbered(envs), envs.caster.starts["looks"]
    for ahead, seen in ((30, True), (70, False)):
        envs.objects[0, 0] = 100 * x + 150 - ahead, 100 * y + 50
        assert (draw() >= start).any() == seen


def test_looks_of_episodes(dmlab, mazes):
    """Corridors always look the same; the rooms of a maze share one wall and one floor of 20; decals on 10 %."""
    envs = mazes(SMALL, 200)
    tables = envs.caster.tables.view(200, 5, 32, 32)[:, :, :11, :11].numpy()
    walls, floors, decals = set(), set(), []
    for n in range(200):
        is_room = np.flipud(envs.mazes[n].variations_layer) != "."
        floor, wall = tables[n, 0] // (4 * 64 * 64), tables[n, 1:] // (8 * 64 * 64)
        assert (floor[~is_room] == 0).all() and (wall[:, ~is_room] // (1 + dmlab.NUM_DECALS) == 0).all()
        (one_floor,), (one_wall,) = set(floor[is_room]), set((wall[:, is_room] // (1 + dmlab.NUM_DECALS)).ravel())
        floors.add(int(one_floor))
        walls.add(int(one_wall))
        decals.append((wall % (1 + dmlab.NUM_DECALS) > 0).mean())
    assert walls == floors == set(range(20)) and np.mean(decals) == pytest.approx(0.1, abs=0.005)
    texels, starts, mask = dmlab.make_textures()
    assert starts["floors"] == 20 * (1 + dmlab.NUM_DECALS) * 8 * 64 * 64 and texels.dtype == np.uint8
    assert starts["sky"] - starts["floors"] == 20 * 4 * 64 * 64 and starts["hud"] - starts["sky"] == 512 * 64
    assert starts["looks"] == starts["hud"] + 1 and len(texels) == starts["looks"] + len(mask)
    nearest = {"wall": texels[: starts["floors"]].reshape(20, -1, 2, 4, 64, 64, 3)[:, 0, 0, 0]}
    nearest["floor"] = texels[starts["floors"] : starts["sky"]].reshape(20, 4, 64, 64, 3)[:, 0]
    green = labmaze.assets.get_wall_texture_paths("style_01")["green"]
    orange = labmaze.assets.get_floor_texture_paths("style_01")["orange"]
    for (kind, images), path, light in zip(nearest.items(), (green, orange), (1, 0.9)):
        picture = np.asarray(Image.open(path).convert("RGB").resize((64, 64), Image.Resampling.BOX)).swapaxes(0, 1)
        assert abs(images[0] - light * picture.astype(float)).max() < 2, f"the corridors' {kind}"
        differences = abs(images[:, None].astype(int) - images[None]).mean((2, 3, 4))
        assert differences[~np.eye(20, dtype=bool)].min() > 3, f"20 {kind}s that can be told apart"


def test_hud(mazes):
    """An orange 100 at the bottom of every frame: a bar of 7 pixels, and two rings of 4 x 7 pixels, 18 each."""
    envs = mazes(SMALL, 5, drawn=True)
    starts, draw = envs.caster.starts, numbered(envs)
    for frame, picture in zip(draw(), envs.frames[:, -1]):
        rows, cols = np.nonzero(frame == starts["hud"])
        assert len(rows) == 7 + 2 * 18 and rows.min() == 76 and rows.max() == 82
        assert set(cols) == {26, *range(29, 33), *range(35, 39)} and (picture[rows, cols] == [255, 175, 0]).all()


def test_one_frame_does_not_depend_on_the_others(mazes):
    envs = mazes(MANY, 5, seed=3, drawn=True)
    frames, alone_ = envs.frames[:, -1].copy(), mazes(MANY, 1, seed=0, drawn=True)
    assert frames.shape == (5, 84, 84, 3) and frames.dtype == np.uint8 and np.array_equal(envs.render(), frames[0])
    for n in range(5):
        alone_.caster.tables[0], alone_.caster.solid[0] = envs.caster.tables[n], envs.caster.solid[n]
        for name in ("places", "headings", "objects", "looks", "present"):
            getattr(alone_, name)[0] = getattr(envs, name)[n]
        assert np.array_equal(alone_.draw()[0], frames[n])
    assert all(frame.std() > 10 for frame in frames)


def test_parts_stay_on_the_device(dmlab):
    """As in test_device: on meta, what reads back or mixes devices raises."""
    caster = dmlab.RayCaster(4, 13, META)
    frames = caster.draw(torch.zeros((4, 3 + 3 * 8), device=META))
    assert frames.device == META and frames.shape == (4, 84, 84, 3) and frames.dtype == torch.uint8
    args = dmlab.Args(rnet_width=4)
    envs = fake_envs((1, 84, 84, 3), 9)
    agent, rnet = dmlab.make_agent(envs, args).to(META), dmlab.make_rnet(envs, args).to(META).eval()
    action, _, _, value = agent.get_action_and_value(frames[:, None])
    assert action.device == value.device == META
    obs = torch.zeros(50, 4, 1, 84, 84, 3, dtype=torch.uint8, device=META)
    segment_steps, gaps = random_segments(np.random.default_rng(0), 50, 4, 0.05), np.arange(3, 13)
    ring = dmlab.Ring(50, obs)
    ring.add(obs, segment_steps)
    embeddings = dmlab.embed_all(rnet, ring.obs[ring.rows(ring.size)])
    cost = dmlab.ksp_cost(rnet, embeddings, segment_steps[30:], gaps, 90.0)
    assert embeddings.shape == (50, 4, 2, 32) and cost.device == META and cost.shape == (20, 4)


# NETWORKS AND SETTINGS ###############################################################################################
def test_defaults(dmlab):
    """The paper's DMLab row; 60,000 frames are 1.27 GB."""
    args = dmlab.Args()
    wanted = dict(
        learning_rate=3e-4, ent_coef=0.004, k=10, tolerance=1, num_tolerance_samples=200, negative_bias=20,
        positive_bias=5, cost_scale=0.06, cost_bias=0.5, max_grad_norm=10, rnet_triplets=2_500,
        rnet_learning_rate=3e-4, rnet_weight_decay=1e-4, ring_size=60_000, rnet_intervals=(6_000, 12_000, 36_000),
        heldout_pairs=15_000, rnet_batch_size=64, label_smoothing=0.1, rnet_reliable_accuracy=0.75, rnet_width=64,
        stack_observations=0, num_envs=12, num_steps=256, env_id=SMALL, engine="auto", total_timesteps=20_000_000,
    )  # fmt: skip
    assert wanted.items() <= vars(args).items()
    obs = torch.zeros((1, args.num_envs, 1, 84, 84, 3), dtype=torch.uint8, device=META)
    assert dmlab.Ring(args.ring_size // args.num_envs, obs).obs.nbytes == 60_000 * 84 * 84 * 3 == 1_270_080_000


def test_networks(dmlab):
    """2-2-1 blocks, 512-d embedding, three FC(512); ECO's larger one; the policy sees all frames, the RNet one."""
    args, envs = dmlab.Args(), fake_envs((3, 84, 84, 3), 9)
    for settings, widths, layers in (
        ({}, [64, 64, 128, 128, 256], 3),
        ({"blocks": (2, 2, 2, 2), "num_layers": 4}, [64, 64, 128, 128, 256, 256, 512, 512], 4),
    ):
        rnet = dmlab.make_rnet(envs, args, **settings)
        blocks = [part for part in rnet.modules() if isinstance(part, dmlab.ResidualBlock)]
        assert [part.conv2.out_channels for part in blocks] == widths
        dense = next(part for part in rnet.branch if isinstance(part, torch.nn.Linear))
        linears = [part for part in rnet.head if isinstance(part, torch.nn.Linear)]
        sizes = [part.out_features for part in (dense, rnet.early, *linears)]
        assert sizes == [512] * (1 + layers) + [1]
    agent = dmlab.make_agent(envs, args)
    convs = [part for part in agent.network if isinstance(part, torch.nn.Conv2d)]
    assert [(part.in_channels, part.out_channels) for part in convs] == [(9, 32), (32, 64), (64, 64)]
    assert agent.actor.out_features == 9


def test_networks_by_hand(dmlab):
    """Frames become channels, the newest last; an output is that of the concatenated embeddings."""
    obs = torch.randint(0, 256, (3, 2, 84, 84, 3), dtype=torch.uint8)
    image = dmlab.ToImage()(obs)
    for n, frame, row, col, colour in ((0, 0, 5, 7, 1), (2, 1, 83, 0, 2), (1, 1, 40, 41, 0)):
        assert image[n, 3 * frame + colour, row, col].item() == pytest.approx(obs[n, frame, row, col, colour] / 255)
    torch.manual_seed(0)
    rnet = dmlab.make_rnet(fake_envs((1, 84, 84, 3), 9), dmlab.Args(rnet_width=4)).eval()
    with torch.no_grad():
        rnet.late.weight.normal_(0, 0.2)
        embeddings = rnet.branch(obs[:, 1:])
        both = torch.cat([embeddings[:2], embeddings[1:]], 1)
        weight = torch.cat([rnet.early.weight, rnet.late.weight], 1)
        expected = rnet.head(both @ weight.T + rnet.early.bias).squeeze(-1)
        embedded = rnet.embed(obs[:, 1:])
        torch.testing.assert_close(rnet.compare(embedded[:2, 0], embedded[1:, 1]), expected)


# THE REAL ENGINE #####################################################################################################
class Lab:
    """A strict double of deepmind_lab.Lab, by the facts of its API: it raises where the real one raises. Episodes last
    6 steps; a frame's first pixels are the seed's low byte and the steps so far; `plan` of the module makes it fail.
    Like the real one it keeps a folder of maps until it is freed, and prints every maze unless told not to."""

    folder = ""

    def __init__(self, level, observations, config=None, renderer="software", level_cache=None):
        if level not in [f"contributed/dmlab30/{env_id}" for env_id in (SMALL, LARGE, MANY)]:
            raise RuntimeError(f"no level {level}")
        if any(not isinstance(text, str) for text in (*config, *config.values())):
            raise TypeError("all config values are strings")
        if not config.keys() <= {"width", "height", "fps", "logLevel"}:
            raise RuntimeError("unknown key")
        if not set(observations) <= {"RGB_INTERLEAVED", "DEBUG.POS.TRANS", "DEBUG.MAZE.LAYOUT", "MAP_FRAME_NUMBER"}:
            raise RuntimeError("unknown observation")
        if renderer not in ("software", "hardware"):
            raise RuntimeError("unknown renderer")
        self.plan = sys.modules["deepmind_lab"].plan
        if self.plan.get("breaks") == "start":
            raise RuntimeError("no display")
        self.is_loud = config.get("logLevel") != "WARN"
        self.folder = tempfile.mkdtemp(prefix="dmlab_temp_folder_", dir=os.environ.get("TMPDIR", "/tmp"))
        self.shape = int(config["height"]), int(config["width"]), 3
        self.names, self.renderer, self.cache, self.left, self.resets = observations, renderer, level_cache, 0, 0

    def __del__(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def reset(self, seed=None):
        if self.is_loud:
            os.write(1, b"Maze Generated")
        if type(seed) is not int or not 0 <= seed < 2**31:
            raise TypeError("seed is an int")
        if self.cache is not None:
            compiled = f"{self.plan['folder']}/{os.getpid()}.pk3"
            if not self.cache.fetch(f"map{seed % 2}", compiled):
                open(compiled, "w").write(f"compiled {seed % 2}")
                self.cache.write(f"map{seed % 2}", compiled)
            assert open(compiled).read() == f"compiled {seed % 2}"
        self.seed, self.left, self.resets = seed, 6, self.resets + 1
        self.buffer = np.zeros(self.shape, np.uint8)  # one for all observations of an episode
        return True

    def is_running(self):
        return self.left > 0

    def observations(self):
        if not self.is_running():
            raise RuntimeError("the episode has ended, there is no observation")
        self.buffer[0, 0] = self.seed % 256, 6 - self.left, self.renderer == "hardware"
        found = {"RGB_INTERLEAVED": self.buffer, "DEBUG.POS.TRANS": np.array([250.7, 100.0 + self.left, 25.1])}
        return {name: found[name] for name in self.names}

    def step(self, action, num_steps=1):
        if not isinstance(action, np.ndarray):
            raise TypeError("the action is an array")
        if action.dtype != np.intc or action.shape != (7,):
            raise ValueError("seven of np.intc")
        if not self.is_running():
            raise RuntimeError("the episode has ended")
        if abs(action[0]) > 512 or (abs(action[2:]) > 1).any():
            raise ValueError("out of range")
        self.left -= 1
        self.buffer[:] = 99  # drawn anew: what is to be kept must have been copied
        if self.resets == self.plan.get("resets") and self.left == 3:
            if self.plan["breaks"] == "hard":
                os._exit(3)
            raise ValueError("the map fell over")
        if self.plan.get("sparse"):
            return float(self.left == 4)  # in the second step of an episode
        return float(num_steps * 100 + action[3] * 10 + action[0])


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """The double where the script imports it, here and in the forked processes; its plan."""
    module = types.ModuleType("deepmind_lab")
    module.Lab, module.plan = Lab, {"folder": str(tmp_path)}
    monkeypatch.setitem(sys.modules, "deepmind_lab", module)
    return module.plan


def lab_args(**settings):
    return SimpleNamespace(
        **{
            "env_id": SMALL,
            "num_envs": 2,
            "engine": "deepmind_lab",
            "renderer": "software",
            "level_cache": None,
            "stack_observations": 0,
            "cuda": False,
        }
        | settings
    )


def test_real_engine(dmlab, engine, capfd):
    """Two episodes: rewards of action repeat 4, positions, the last frame kept where there is none, NEXT_STEP
    autoreset, one process per environment, and no maze is printed."""
    envs = dmlab.make_envs(lab_args(env_id=MANY, renderer="hardware"))
    frames, _ = envs.reset(seed=5)
    assert frames.shape == (2, 1, 84, 84, 3) and frames.dtype == np.uint8
    assert frames[:, 0, 0, 0, 1:].tolist() == [[0, 1]] * 2
    assert len({process.pid for process in envs.processes} | {os.getpid()}) == 3
    first, rows = frames[:, 0, 0, 0, 0].tolist(), []
    for action in (FORWARD, BACKWARD, LOOK_LEFT, LOOK_RIGHT, FORWARD_RIGHT, FIRE, FORWARD, FORWARD):
        frames, rewards, terminations, truncations, info = act(envs, action)
        assert not terminations.any()
        rows.append(
            (frames[0, 0, 0, 0, 1].item(), rewards[0].item(), truncations[0].item(), info["position"][0].tolist())
        )
    assert rows == [
        (1, 410, False, [250, 105]), (2, 390, False, [250, 104]), (3, 380, False, [250, 103]),
        (4, 420, False, [250, 102]), (5, 430, False, [250, 101]), (5, 400, True, [250, 101]),
        (0, 0, False, [250, 106]), (1, 410, False, [250, 105]),
    ]  # fmt: skip
    assert first[0] != first[1] and frames[:, 0, 0, 0, 0].tolist() != first, "another episode"
    processes = envs.processes
    assert envs.reset(seed=5)[0][:, 0, 0, 0, 0].tolist() == first, "fresh environments repeat a seed's episodes"
    envs.close()
    assert not any(process.is_alive() for process in [*processes, *envs.processes])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("engine_name", ["deepmind_lab", "labmaze"])
def test_what_was_returned_stays(dmlab, engine, engine_name):
    """Frames and pictures are copies: the next step does not overwrite them."""
    envs = dmlab.make_envs(lab_args(engine=engine_name))
    frames, picture = envs.reset(seed=1)[0], envs.render()
    assert np.array_equal(picture, frames[0, -1])
    before = frames.copy()
    after = act(envs, LOOK_LEFT)[0]
    assert np.array_equal(frames, before) and np.array_equal(picture, before[0, -1])
    assert not np.array_equal(after, before) and np.array_equal(envs.render(), after[0, -1])
    envs.close()


REAL = {SMALL: (9.2, 4.8), LARGE: (2.5, 1.3), MANY: (0.6, 0.4)}  # a real build's mean and standard error


@pytest.mark.slow
@pytest.mark.parametrize("env_id", REAL)
def test_random_agent_earns_what_it_does_in_the_real_engine(dmlab, env_id):
    """144 episodes lie within the 95 % interval of the real build's 12 (Student's t, 11 degrees of freedom: 2.20)."""
    envs = dmlab.make_envs(lab_args(env_id=env_id, engine="labmaze", num_envs=12))
    rng, returns, finished = np.random.default_rng(0), np.zeros(12), []
    envs.reset(seed=0)
    while len(finished) < 144:
        _, rewards, terminations, truncations, _ = envs.step(rng.integers(9, size=12))
        returns += rewards
        done = terminations | truncations
        finished += returns[done].tolist()
        returns[done] = 0
    mean, error = REAL[env_id]
    assert abs(np.mean(finished) - mean) < 2.20 * error


@pytest.mark.parametrize("engine_name", ["deepmind_lab", "labmaze"])
def test_stacked_frames(dmlab, engine, monkeypatch, engine_name):
    """The last three frames, the newest last; an episode's first is repeated."""
    monkeypatch.setitem(dmlab.TASKS, SMALL, (6, *dmlab.TASKS[SMALL][1:]))
    stacked, plain = (dmlab.make_envs(lab_args(engine=engine_name, stack_observations=m)) for m in (2, 0))
    film, first = [plain.reset(seed=1)[0]], 0
    assert np.array_equal(stacked.reset(seed=1)[0], np.repeat(film[0], 3, 1))
    for step in range(1, 10):
        film.append(act(plain, FORWARD_LEFT)[0])
        frames, _, _, truncations, _ = act(stacked, FORWARD_LEFT)
        assert truncations.all() == (step == 6)
        first = 7 if step == 7 else first
        expected = [film[max(first, step - back)] for back in (2, 1, 0)]
        assert np.array_equal(frames, np.concatenate(expected, 1)), step
    plain.close()
    stacked.close()


def test_nine_actions(dmlab):
    """By the names of the seven entries: look left-right, look down-up, strafe, move, fire, jump, crouch."""
    look, down, strafe, move, fire, jump, crouch = dmlab.ACTIONS.T.tolist()
    assert move == [1, -1, 0, 0, 0, 0, 1, 1, 0] and strafe == [0, 0, -1, 1, 0, 0, 0, 0, 0]
    assert look == [0, 0, 0, 0, -20, 20, -20, 20, 0] and fire == [0] * 8 + [1]
    assert down == jump == crouch == [0] * 9 and dmlab.ACTIONS.dtype == np.intc


def test_double_is_strict(engine):
    """Of the mistakes that the real engine would not forgive, neither does the double."""
    level, seen = f"contributed/dmlab30/{SMALL}", ["RGB_INTERLEAVED"]
    for error, config in ((TypeError, {"width": 84, "height": "84"}), (RuntimeError, {"width": "84", "hight": "84"})):
        with pytest.raises(error):
            Lab(level, seen, config)
    lab = Lab(level, seen, {"width": "84", "height": "84"})
    lab.reset(seed=1)
    for error, action in ((TypeError, [0] * 7), (ValueError, np.zeros(7, np.int64))):
        with pytest.raises(error):
            lab.step(action)
    while lab.is_running():
        lab.step(np.zeros(7, np.intc), num_steps=4)
    for call in (lab.observations, lambda: lab.step(np.zeros(7, np.intc))):
        with pytest.raises(RuntimeError):
            call()


def test_level_cache(dmlab, engine, tmp_path):
    """Maps are compiled once for all processes; a folder that is not there is made."""
    cache = dmlab.LevelCache(str(tmp_path / "a" / "b"))
    (tmp_path / "one.pk3").write_text("map")
    assert not cache.fetch("key", str(tmp_path / "two.pk3"))
    cache.write("key", str(tmp_path / "one.pk3"))
    assert cache.fetch("key", str(tmp_path / "two.pk3")) and (tmp_path / "two.pk3").read_text() == "map"
    assert os.listdir(tmp_path / "a" / "b") == ["key"]
    envs = dmlab.make_envs(lab_args(level_cache=str(tmp_path / "maps"), num_envs=3))
    envs.reset(seed=0)
    for _ in range(30):
        act(envs, FORWARD)
    envs.close()
    assert sorted(os.listdir(tmp_path / "maps")) == ["map0", "map1"]


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"breaks": "raise", "resets": 1}, "ValueError('the map fell over')"),
        ({"breaks": "hard", "resets": 1}, "it was killed"),
        ({"breaks": "start"}, "RuntimeError('no display')"),
        ({"breaks": "before"}, "it was killed"),
    ],
)
def test_dead_engine_ends_the_run(dmlab, engine, plan, said):
    engine |= plan
    envs = dmlab.make_envs(lab_args())
    if plan["breaks"] == "before":  # its seed has been sent
        envs.processes[0].kill()
        envs.processes[0].join()
    with pytest.raises(SystemExit) as end:
        envs.reset(seed=0)
        for _ in range(6):
            act(envs, FORWARD)
    assert end.value.code == f"error: environment 0 of deepmind_lab died: {said}"
    envs.close()


def test_workers_end_with_the_trainer(dmlab, engine, tmp_path, monkeypatch):
    """Ctrl-C and SIGTERM are not for them, a closed pipe is their end. No folder stays behind: neither if one of them
    was killed, nor, once all are gone, if the trainer was."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    envs = dmlab.make_envs(lab_args(num_envs=3))
    envs.reset(seed=0)
    for process in envs.processes:
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
    assert act(envs, FORWARD)[1].tolist() == [410] * 3
    assert len([*tmp_path.glob("sprl_dmlab_*/dmlab_temp_folder_*")]) == 3
    processes = envs.processes
    processes[1].kill()
    envs.close()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0] and not [*tmp_path.iterdir()]
    envs = dmlab.make_envs(lab_args(num_envs=3))
    envs.reset(seed=0)
    for pipe in envs.pipes:
        pipe.close()  # as the death of a trainer does
    for process in envs.processes:
        process.join(10)
    assert [process.exitcode for process in envs.processes] == [0, 0, 0] and not [*tmp_path.iterdir()]


def test_choice_of_the_engine(dmlab, engine, monkeypatch, capsys, tmp_path):
    def choose(name):
        args = lab_args(engine=name)
        envs = dmlab.make_envs(args)
        envs.close()
        assert type(envs) is {"deepmind_lab": dmlab.DeepMindLab, "labmaze": dmlab.LabMazes}[args.engine]
        return args.engine

    assert [choose(name) for name in ("auto", "labmaze", "deepmind_lab")] == ["deepmind_lab", "labmaze", "deepmind_lab"]
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)  # importing it raises
    assert choose("auto") == "labmaze"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "labmaze" in said and "not DeepMind Lab's" in said
    monkeypatch.delitem(sys.modules, "deepmind_lab")
    monkeypatch.syspath_prepend(tmp_path)
    for line, error in (  # it is installed
        ("import old_resources", "ModuleNotFoundError(\"No module named 'old_resources'\")"),
        ("raise ImportError('no libOSMesa', name='deepmind_lab')", "ImportError('no libOSMesa')"),
    ):
        (tmp_path / "deepmind_lab.py").write_text(line)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        assert choose("auto") == "labmaze"
        printed = capsys.readouterr().err.splitlines()
        assert len(printed) == 2 and printed[1][:40] == said[:40]
        assert printed[0] == f"deepmind_lab is installed but does not import: {error}"
    with pytest.raises(SystemExit) as end:
        choose("deepmind_lab")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and "--engine deepmind_lab" in error


# RUNS ################################################################################################################
BATCH = 2 * 16
PPO = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 --run-name small"
RNET = (
    f"--k 2 --ring-size 100 --negative-bias 1 --rnet-reliable-accuracy 0 --rnet-start {BATCH} --rnet-width 4 "
    f"--heldout-pairs 16 --rnet-intervals {BATCH} {BATCH} {BATCH} --rnet-batch-size 8 --rnet-triplets 16"
)
FLAGS = f"{PPO} {RNET} --cost-scale 0.1 --num-tolerance-samples 3"
RUNS = {DMLAB: FLAGS, ECO: f"{PPO} {RNET} --memory-size 3", ICM: PPO, GT_GRID: PPO}
CHECKPOINT = "runs/small/agent.pt"


def steps(iterations):
    return f" --total-timesteps {iterations * BATCH}"


def test_run_on_the_stand_in(run, capfd, monkeypatch):
    """The engine's name is in the settings and in what is printed. It goes on, but not on the other engine."""
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    before = run(f"{FLAGS} --env-id {MANY}{steps(3)}", DMLAB)
    assert before["args"].engine == "labmaze" and before["method"] == "sprl-labmaze"
    printed = capfd.readouterr().err
    assert f"sprl-labmaze on {MANY} (" in printed and f"\ndone at step {3 * BATCH}," in printed
    assert torch.load(CHECKPOINT, weights_only=True)["args"]["engine"] == "labmaze"
    assert all({"rnet/loss", "rnet/heldout_accuracy", "sprl/cost_rate"} <= row.keys() for row in before["history"][1:])
    after = run(f"--resume {CHECKPOINT}{steps(4)}", DMLAB)
    assert after["args"].engine == "labmaze" and after["history"][:3] == before["history"]
    assert len(after["history"]) == 4


def test_engines_are_not_mixed(run, engine, capfd):
    run(f"{PPO} --cost-scale 0 --env-id {SMALL} --engine labmaze{steps(1)}", DMLAB)
    with pytest.raises(SystemExit) as end:
        run(f"--resume {CHECKPOINT} --engine deepmind_lab{steps(2)}", DMLAB)
    said = capfd.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and f"--engine deepmind_lab with --resume {CHECKPOINT}, accepted: labmaze" in said


@pytest.mark.parametrize("name, flags", RUNS.items())
def test_run_on_the_real_engine(name, flags, run, engine):
    """Episodes of six steps. An engine that dies in the sixth episode, in the third rollout, ends the run, and the
    checkpoint after the second stays."""
    engine |= {"breaks": "raise", "resets": 6}
    with pytest.raises(SystemExit) as end:
        run(f"{flags} --env-id {SMALL} --checkpoint-interval {BATCH}{steps(6)}", name)
    assert end.value.code == "error: environment 0 of deepmind_lab died: ValueError('the map fell over')"
    checkpoint = torch.load(CHECKPOINT, weights_only=True)
    assert checkpoint["global_step"] == 2 * BATCH and checkpoint["args"]["engine"] == "deepmind_lab"
    assert [row["charts/episodic_length"] for row in checkpoint["history"]] == [6, 6]


def test_sigterm_to_the_whole_job(run, engine, monkeypatch, capfd):
    """A cluster sends it to all processes, and the trainer may be the last to hear it: nothing has died, the run stops
    and saves its two whole iterations."""
    count, recv = [0], multiprocessing.connection.Connection.recv

    def recv_or_stop(pipe):
        count[0] += 1
        if count[0] == 2 * (1 + 2 * 16) + 5:
            for process in multiprocessing.active_children():
                process.terminate()
            time.sleep(0.5)  # time enough to die
        if count[0] == 2 * (1 + 2 * 16) + 9:  # two steps later
            signal.raise_signal(signal.SIGTERM)
        return recv(pipe)

    parent = os.getpid()
    monkeypatch.setattr(
        multiprocessing.connection.Connection,
        "recv",
        lambda pipe: recv_or_stop(pipe) if os.getpid() == parent else recv(pipe),
    )
    run(f"{FLAGS} --env-id {SMALL}{steps(6)}", DMLAB)
    assert f"stopped at step {2 * BATCH}," in capfd.readouterr().err
    assert torch.load(CHECKPOINT, weights_only=True)["global_step"] == 2 * BATCH


@pytest.mark.parametrize("script_name", [DMLAB, ECO])
def test_rnet_sees_the_newest_frame_alone(run, script_name):
    """Also where the policy sees three."""
    flags = f"{RUNS[script_name]} --env-id {MANY} --engine labmaze --stack-observations 2"
    result = run(f"{flags}{steps(3)}", script_name)
    assert result["obs"].shape[2] == 3 and any("rnet/loss" in row for row in result["history"])
    with torch.no_grad():
        seen = [result["rnet"].embed(result["obs"][5][:, frames]) for frames in (slice(0, 3), slice(2, 3))]
    assert torch.equal(*seen)


@pytest.mark.parametrize("name", [DMLAB, ECO])
def test_segments_are_cut_twice(name, run, engine):
    """Episodes of six steps and a reset's row, +1 in the second step. Its frame may still show the old place: it is a
    segment of its own, also where a rollout ends, as the first does after 16 steps."""
    engine |= {"sparse": True}
    result = run(f"{RUNS[name]} --env-id {SMALL}{steps(2)}", name)
    expected = 5 * [0, 1, 0, 0, 1, 2, 3]  # of the reset's state and the next six, over and over
    assert expected[16] == expected[17] == 0 and result["rewards"].sum() == 2 * 2
    assert result["segment_steps"].T.tolist() == 2 * [expected[16 : 16 + 17]]


def test_evaluating_with_a_killed_worker(run, engine, tmp_path):
    """One line, no traceback, no folder of maps."""
    run(f"{PPO} --cost-scale 0 --env-id {SMALL}{steps(1)}", DMLAB)
    (tmp_path / "deepmind_lab.py").write_text(
        f"from test_dmlab import Lab\nplan = {dict(breaks='hard', resets=1, folder=str(tmp_path))}"
    )
    (tmp_path / "maps").mkdir()
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}", "TMPDIR": str(tmp_path / "maps")}
    command = [sys.executable, str(ROOT / "analysis" / "evaluate.py"), CHECKPOINT]
    end = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    bar, line = end.stderr.rsplit("\n", 2)[:2]
    assert end.returncode == 1 and line == "error: environment 0 of deepmind_lab died: it was killed", end.stderr
    assert "Traceback" not in bar and end.stdout == "" and not [*(tmp_path / "maps").iterdir()]
