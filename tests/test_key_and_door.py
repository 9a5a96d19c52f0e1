"""analysis/key_and_door.py: ways against Farama's own step(), shares against episodes played by hand."""

import copy
import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from minigrid.core.world_object import Key

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "analysis"))

import common  # noqa: E402
import key_and_door  # noqa: E402
from key_and_door import Args, Watched, judge_pairs, shortest_moves, shortest_way  # noqa: E402

KEY_DOORS, SCRIPT = "MiniGrid-KeyDoors-7x7-v0", "ppo_sprl_minigrid.py"
sprl = common.load_script(ROOT / SCRIPT)


def place_of(world, kind):
    return next((x, y) for x, y in np.ndindex(world.width, world.height) if isinstance(world.grid.get(x, y), kind))


@pytest.mark.parametrize("seed", range(4))
def test_moves_are_the_fewest(seed):
    """Breadth-first over copies of the world, moved by its own step(), until the key is in front."""
    world = sprl.make_world(KEY_DOORS, 100)
    world.reset(seed=seed)
    target, found, layer, depth = place_of(world, Key), set(), [world], 0
    while not any(tuple(map(int, w.front_pos)) == target for w in layer):
        following = []
        for parent in layer:
            for action in range(3):
                child = copy.deepcopy(parent)
                child.step(action)
                state = (*map(int, child.agent_pos), int(child.agent_dir))
                if state not in found:
                    found.add(state)
                    following.append(child)
        layer, depth = following, depth + 1
    assert len(shortest_moves(world, target, facing=True)) == depth


def test_what_cannot_be_reached_has_no_moves():
    world = sprl.make_world(KEY_DOORS, 100)
    world.reset(seed=0)
    assert shortest_moves(world, (0, 0), facing=False) is None  # a wall


def test_way_ends_at_the_goal():
    world = sprl.make_world(KEY_DOORS, 100)
    for seed in range(20):
        frames, parts, reward = shortest_way(world, seed)
        assert reward == pytest.approx(1 - 0.9 * (len(frames) - 1) / world.max_steps) and len(parts) == len(frames)
        assert parts[0] == 0 and parts[-1] == 2 and set(np.diff(parts)) <= {0, 1}
        has_key = (frames[..., 0] == 5).any((1, 2))  # Farama's number of a key that lies somewhere
        assert (has_key == (parts == 0)).all()
        doors = (frames[..., 0] == 4) & (frames[..., 2] > 0)  # closed or locked; the agent may stand in an open one
        assert (doors.any((1, 2)) == (parts < 2)).all()


def test_pairs_stay_in_their_part():
    """A judge that calls two frames near if they lie at most four steps apart; frames are their own numbers."""
    script = SimpleNamespace(
        embed_all=lambda rnet, obs: obs.float().unsqueeze(2).expand(-1, -1, 2, -1),  # (T, 1, 2, 1)
        compare_all=lambda rnet, embeddings, early, late: (
            4.5 - (embeddings[late, 0, 1, 0] - embeddings[early, 0, 0, 0])
        ),
    )
    frames, parts = np.arange(12, dtype=np.uint8), np.array([0] * 6 + [1] * 2 + [2] * 4)
    found = judge_pairs(script, None, frames, parts)
    # part 0 has 6 frames: 3 pairs with a gap of 3, 2 of 4, 1 of 5; part 1 none; part 2 one of 3
    assert sorted(found) == [(0, 3, True)] * 3 + [(0, 4, True)] * 2 + [(0, 5, False)] + [(2, 3, True)]
    assert judge_pairs(script, None, frames[:2], parts[:2]) == []


def test_watching_an_episode():
    """World 0 goes the shortest way, world 1 stands still until the time limit: key, door and goal, and nothing."""
    envs = Watched(sprl.make_envs(sprl.Args(env_id=KEY_DOORS, num_envs=2)))
    envs.reset(seed=3)
    world, moves = copy.deepcopy(envs.worlds[0]), []
    for kind, last in ((Key, 3), (key_and_door.Door, 5), (key_and_door.Goal, None)):
        part = shortest_moves(world, place_of(world, kind), last is not None) + [last] * (last is not None)
        for move in part:
            world.step(move)
        moves += part
    for step in range(100):
        envs.step(np.array([moves[step] if step < len(moves) else 6, 6]))
    # the goal ends world 0's first episode; its next one begins on the row after, which no action counts for
    assert envs.finished == [(0, True, True, True), (1, False, False, False)]
    assert envs.actions.sum() == 199 and envs.actions[5] == 1
    assert not envs.seen[0].any()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{name: agent.pt} as SPRL and PPO would save them, of networks that have learned nothing."""
    folder, found = tmp_path_factory.mktemp("trained"), {}
    for name, settings in (
        ("sprl", {}),
        ("ppo", {"cost_scale": 0.0}),
        ("rooms", {"env_id": "MiniGrid-FourRooms-7x7-v0"}),
    ):
        args = sprl.Args(**{"env_id": KEY_DOORS, "num_envs": 4} | settings)
        envs = sprl.make_envs(args)
        torch.manual_seed(0)
        content = {"script": SCRIPT, "args": vars(args), "agent": sprl.make_agent(envs, args).state_dict()}
        content |= {"rnet": sprl.make_rnet(envs, args).state_dict()} if args.cost_scale else {}
        found[name] = str(folder / f"{name}.pt")
        torch.save(content, found[name])
    return found


def test_files(trained, tmp_path, capsys):
    key_and_door.main(Args((trained["sprl"], trained["ppo"]), episodes=6, out=str(tmp_path / "new")))
    assert "PPO, KeyDoors-7x7, seed 1: key 0." in capsys.readouterr().out
    with open(tmp_path / "new" / "key_and_door.csv") as file:
        agents = list(csv.DictReader(file))
    assert [row["run"] for row in agents] == ["SPRL, KeyDoors-7x7, seed 1", "PPO, KeyDoors-7x7, seed 1"]
    assert all(0 <= float(row[name]) <= 1 for row in agents for name in ("key", "door", "goal", "toggles"))
    with open(tmp_path / "new" / "pairs.csv") as file:
        pairs = list(csv.DictReader(file))
    assert {row["run"] for row in pairs} == {"SPRL, KeyDoors-7x7, seed 1"}  # PPO has no RNet
    assert {row["part"] for row in pairs} <= set(key_and_door.PARTS) and all(int(row["pairs"]) > 0 for row in pairs)
    assert (tmp_path / "new" / "key_and_door.png").stat().st_size > 10_000
    key_and_door.main(Args((trained["ppo"],), episodes=6, out=str(tmp_path / "one")))  # none has an RNet
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["key_and_door.csv"]
    with open(tmp_path / "one" / "key_and_door.csv") as file:
        assert list(csv.DictReader(file)) == agents[1:], "alone as beside another"


def test_refusals(trained, tmp_path, capsys):
    for args, words in (
        (Args((trained["rooms"],)), "plays MiniGrid-FourRooms-7x7-v0, accepted: agents on MiniGrid-KeyDoors"),
        (Args(()), "no checkpoint given, accepted"),
        (Args((trained["ppo"],), episodes=0), "--episodes 0 is out of range, accepted: 1 to 100000"),
        (Args((trained["ppo"],), seed=-1), "--seed -1 is out of range, accepted: 0 or more"),
    ):
        args.out = str(tmp_path)
        with pytest.raises(SystemExit) as stop:
            key_and_door.main(args)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and words in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_judge_is_the_checkpoints(trained):
    """The RNet of a checkpoint is the one that its training had."""
    run = common.load_run(trained["sprl"], 1, 1)
    rnet = common.load_rnet(run, trained["sprl"])
    assert all(torch.equal(value, run.checkpoint["rnet"][name]) for name, value in rnet.state_dict().items())
