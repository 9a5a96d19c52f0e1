"""The fast worlds against minigrid's own FullyObsWrapper, and the layouts against what the paper says of them."""

import gymnasium as gym
import numpy as np
import pytest
from conftest import FOUR_ROOMS, HANDLING, KEY_DOORS, MAX_STEPS, farama, handle_objects
from minigrid.core.actions import Actions
from minigrid.core.world_object import Door, Goal, Key

import analysis.worlds  # noqa: F401 registers NineRooms

MOVING = "MiniGrid-Dynamic-Obstacles-6x6-v0"


@pytest.mark.parametrize(
    "env_id, must_change",
    [
        (FOUR_ROOMS, set()),
        ("MiniGrid-FourRooms-11x11-v0", set()),
        (KEY_DOORS, HANDLING),
        ("MiniGrid-KeyDoors-11x11-v0", HANDLING),
        ("MiniGrid-NineRooms-v0", set()),
        ("MiniGrid-DoorKey-8x8-v0", HANDLING),
        ("MiniGrid-MultiRoom-N4-S5-v0", {Actions.toggle}),
        ("MiniGrid-BlockedUnlockPickup-v0", {Actions.pickup, Actions.drop}),  # a ball lies before the door
        ("MiniGrid-ObstructedMaze-1Dlhb-v0", HANDLING),  # the key is hidden in a box
        (MOVING, set()),
    ],
)
def test_equal_to_farama_step_for_step(script, env_id, must_change):
    """Observation, reward, termination, truncation and autoreset over 3,000 steps of random play."""
    rng, changed = np.random.default_rng(0), set()
    ours = script.GridWorlds(env_id, 3, 1, MAX_STEPS)
    theirs = gym.vector.SyncVectorEnv([lambda: farama(env_id)] * 3)
    assert theirs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    np.testing.assert_array_equal(ours.reset(seed=7)[0][:, 0], theirs.reset(seed=7)[0])
    for _ in range(1000):
        worlds = [env.unwrapped for env in theirs.envs]
        actions = np.array([handle_objects(world, rng) for world in worlds])
        handling = [
            (world, world.step_count, action, world.grid.encode())
            for world, action in zip(worlds, actions)
            if action in HANDLING
        ]
        (obs, *outcome), (frames, *expected) = ours.step(actions)[:4], theirs.step(actions)[:4]
        for mine, theirs_ in zip([obs[:, 0], *outcome], [frames, *expected]):
            np.testing.assert_array_equal(mine, theirs_)
        for world, step_count, action, grid in handling:
            if world.step_count > step_count and (world.grid.encode() != grid).any():
                changed.add(int(action))
    assert must_change <= changed


def reachable(world, blocked):
    """Cells that a walk from the agent enters when cells of the blocked types are walls."""
    found, frontier = set(), [tuple(map(int, world.agent_pos))]
    while frontier:
        x, y = frontier.pop()
        cell = world.grid.get(x, y)
        if (x, y) not in found and (cell is None or cell.type not in blocked):
            found.add((x, y))
            frontier += [(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)]
    return found


def find(world, kind):
    (index,) = [i for i, cell in enumerate(world.grid.grid) if isinstance(cell, kind)]
    return index % world.width, index // world.width


@pytest.mark.parametrize(
    "env_id, size, num_free",
    [
        (FOUR_ROOMS, 7, 4 * 2 * 2 + 4),
        ("MiniGrid-FourRooms-11x11-v0", 11, 4 * 4 * 4 + 4),
        ("MiniGrid-NineRooms-v0", 13, 9 * 3 * 3 + 12),
    ],
)
def test_rooms_are_connected(script, env_id, size, num_free):
    """Every free cell (rooms and one gap per wall) can be walked to, so the goal can; agent and goal start anywhere."""
    world, starts, goals = script.make_world(env_id, max_episode_steps=100), set(), set()
    for seed in range(300):
        image = world.reset(seed=seed)[0]["image"]
        assert image.shape == (size, size, 3)
        found = reachable(world, {"wall"})
        assert len(found) == num_free and find(world, Goal) in found
        starts.add(tuple(map(int, world.agent_pos)))
        goals.add(find(world, Goal))
    assert len(starts) > num_free / 2 and len(goals) > num_free / 2


@pytest.mark.parametrize("env_id", [KEY_DOORS, "MiniGrid-KeyDoors-11x11-v0"])
def test_key_doors_needs_its_key(script, env_id):
    """The goal lies behind a locked door that only the key opens; key and agent lie before it; the goal varies."""
    world, goals = script.make_world(env_id, max_episode_steps=100), set()
    for seed in range(100):
        world.reset(seed=seed)
        door, goal, key = (find(world, kind) for kind in (Door, Goal, Key))
        assert world.grid.get(*door).is_locked and goal[0] > door[0]
        assert goal not in reachable(world, {"wall", "door"}) and key in reachable(world, {"wall", "door"})
        assert goal in reachable(world, {"wall"})
        world.agent_pos, world.agent_dir = (door[0] - 1, door[1]), 0
        world.step(Actions.toggle)
        assert world.grid.get(*door).is_locked
        world.carrying = world.grid.get(*key)
        world.step(Actions.toggle)
        assert world.grid.get(*door).is_open
        goals.add(goal)
    assert len(goals) >= 6


def test_next_step_autoreset(script):
    """With 5 steps an episode and nothing found, rows 4, 10, 16 truncate and rows 5, 11, 17 begin the next episode."""
    envs, twin = script.GridWorlds(FOUR_ROOMS, 1, 1, 5), script.make_world(FOUR_ROOMS, max_episode_steps=5)
    first = twin.reset(seed=3)[0]["image"]
    np.testing.assert_array_equal(envs.reset(seed=3)[0][0, 0], first)
    left, forward = Actions.left, Actions.forward
    for row in range(18):
        begins = row % 6 == 5
        obs, reward, termination, truncation, _ = envs.step(np.array([forward if begins else left]))
        expected = twin.reset()[0]["image"] if begins else twin.step(left)[0]["image"]
        np.testing.assert_array_equal(obs[0, 0], expected)
        assert (reward[0], termination[0], truncation[0]) == (0, False, row % 6 == 4)
        assert envs.worlds[0].step_count == (0 if begins else row % 6 + 1)


def test_stacks_by_hand(script):
    """Three frames of one world with 4 steps an episode: an episode's first is repeated, none crosses its start."""
    envs, twin = script.GridWorlds(FOUR_ROOMS, 1, 3, 4), script.GridWorlds(FOUR_ROOMS, 1, 1, 4)
    rng, obs = np.random.default_rng(0), envs.reset(seed=1)[0]
    shown = 3 * [twin.reset(seed=1)[0][0, 0]]
    for _ in range(30):
        np.testing.assert_array_equal(obs[0], np.stack(shown[-3:]))
        action = rng.integers(0, 3, 1)
        begins = twin.done[0]
        obs, frame = envs.step(action)[0], twin.step(action)[0][0, 0]
        shown = 3 * [frame] if begins else [*shown, frame]


def test_positions_are_the_agents(script):
    envs = script.GridWorlds(FOUR_ROOMS, 3, 1, 10)
    infos = [envs.reset(seed=0)[1]] + [envs.step(np.full(3, 2))[-1] for _ in range(15)]
    assert all(info["position"].shape == (3, 2) for info in infos) and envs.map_size == (7, 7)
    assert infos[-1]["position"].tolist() == [list(map(int, world.agent_pos)) for world in envs.worlds]


def test_unknown_world_is_refused(script, capsys):
    with pytest.raises(SystemExit) as exit_:
        script.GridWorlds("MiniGrid-FourRoom-7x7-v0", 1, 1, 100)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and "--env-id MiniGrid-FourRoom-7x7-v0" in error and error.count("\n") == 1
