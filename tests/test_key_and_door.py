"""analysis/key_and_door.py: ways against Farama's own step(), shares against episodes played by hand."""

import copy
import csv
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, load

sys.path.insert(0, str(ROOT / "analysis"))

import key_and_door
from key_and_door import Args, Watched, judge_pairs, shortest_moves, shortest_way
from minigrid.core.world_object import Key

KEY_DOORS = "MiniGrid-KeyDoors-7x7-v0"
sprl = load("ppo_sprl_minigrid.py")


def place_of(world, kind):
    return next((x, y) for x, y in np.ndindex(world.width, world.height) if isinstance(world.grid.get(x, y), kind))


@pytest.mark.parametrize("seed", range(4))
def test_moves_are_the_fewest(seed):
    """Breadth-first over copies of the world, moved by its own step(), until the key is in front."""
    world = sprl.make_world(KEY_DOORS)
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
    world = sprl.make_world(KEY_DOORS)
    world.reset(seed=0)
    assert shortest_moves(world, (0, 0), facing=False) is None  # a wall


def test_way_ends_at_the_goal():
    world = sprl.make_world(KEY_DOORS)
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
        embed_frames=lambda embed, frames, depths, rows, m: frames.float()[..., None, None].expand(-1, -1, 2, -1),
        compare_pairs=lambda rnet, embeddings, early, late: (
            4.5 - (embeddings[late, 1] - embeddings[early, 0]).squeeze(1)
        ),
    )
    frames, parts = np.arange(12, dtype=np.uint8), np.array([0] * 6 + [1] * 2 + [2] * 4)
    found = judge_pairs(script, SimpleNamespace(embed=None, m=0), frames, parts)
    # part 0 has 6 frames: 3 pairs with a gap of 3, 2 of 4, 1 of 5; part 1 none; part 2 one of 3
    assert sorted(found) == [(0, 3, True)] * 3 + [(0, 4, True)] * 2 + [(0, 5, False)] + [(2, 3, True)]
    assert judge_pairs(script, SimpleNamespace(embed=None, m=0), frames[:2], parts[:2]) == []


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
    """{name: agent.pt} of SPRL and PPO after two rollouts; SPRL's RNet has been trained once."""
    folder, found = tmp_path_factory.mktemp("trained"), {}
    flags = f"--env-id {KEY_DOORS} --total-timesteps 1024 --num-envs 4 --num-steps 128 --rnet-start 512"
    flags += " --rnet-ready-accuracy 0 --num-tolerance-samples 20 --ring-size 2000"
    for name, more in (("sprl", ""), ("ppo", "--cost-scale 0"), ("rooms", "--env-id MiniGrid-FourRooms-7x7-v0")):
        command = [
            sys.executable,
            str(ROOT / "ppo_sprl_minigrid.py"),
            *flags.split(),
            *more.split(),
            "--run-name",
            name,
        ]
        ran = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
        assert ran.returncode == 0, ran.stderr
        found[name] = str(folder / "runs" / name / "agent.pt")
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
    """The RNet of a checkpoint is the one that its training had: same logits for the same two frames."""
    run = key_and_door.load_run(trained["sprl"], 1, 1)
    rnet = key_and_door.load_rnet(run, trained["sprl"])
    assert all(torch.equal(value, run.checkpoint["rnet"][name]) for name, value in rnet.state_dict().items())
