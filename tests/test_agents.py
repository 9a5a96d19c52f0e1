"""analysis/export_agent.py and side_by_side.py: small agents act like their originals, trails show the cost."""

import copy
import os
import runpy
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import CANONICAL, KEY_DOORS, PPO, ROOT, SPRL, main_of, random_frames, steps
from PIL import Image
from test_analysis import gif_milliseconds, refused, save
from test_trajectories import checkpoint_of, slow_costs

sys.path.insert(0, str(ROOT / "analysis"))

import common
import evaluate
import export_agent
import side_by_side


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The agent.pt of PPO and of SPRL after a few iterations."""
    paths = {}
    for method, flags in (("ppo", PPO), ("sprl", SPRL)):
        folder = tmp_path_factory.mktemp(method)
        with main_of(CANONICAL, f"{flags} --env-id {KEY_DOORS}{steps(4)}", folder):
            runpy.run_path(str(ROOT / CANONICAL), run_name="__main__")["lock"].lock.release()
        paths[method] = str(folder / "runs" / "small" / "agent.pt")
    return paths


# EXPORT ##############################################################################################################
def export(source, folder, capsys):
    export_agent.main(export_agent.Args(str(source), str(folder)))
    path, size = capsys.readouterr().out.rsplit(": ", 1)
    assert size == f"{os.path.getsize(path) / 1e3:.0f} kB\n"
    return path


@pytest.mark.parametrize("bits", [16, 8])
def test_small_agent_acts_like_its_original(trained, bits, tmp_path, capsys, monkeypatch):
    """Weights are off by at most half a step of their format, and so are logits and value by very little."""
    if bits == 8:
        monkeypatch.setattr(export_agent, "MOST_IN_HALF", 10_000)
    path = export(trained["sprl"], tmp_path, capsys)
    whole, small = torch.load(trained["sprl"], weights_only=True), torch.load(path, weights_only=True)
    first, second = (common.load_run(name, 4, 1).agent for name in (trained["sprl"], path))
    large = {"network.1.weight"} if bits == 8 else set()
    assert set(small["scales"]) == large
    for name, weight in second.state_dict().items():
        exact, kept = whole["agent"][name].double(), small["agent"][name]
        assert kept.dtype == (torch.int8 if name in large else torch.float16) and weight.dtype == torch.float32
        step = exact.abs().amax(1, keepdim=True) / 127 if name in large else exact.abs() * 2**-10 + 2**-24
        assert ((weight - exact).abs() <= step * 0.501).all(), name
    obs = random_frames(200, 1)
    with torch.no_grad():
        (hidden, value), (small_hidden, small_value) = (
            (agent.network(obs), agent.get_action_and_value(obs)[3]) for agent in (first, second)
        )
        probs, small_probs = first.actor(hidden).softmax(1), second.actor(small_hidden).softmax(1)
    assert (probs - small_probs).abs().max() < 0.002 and (value - small_value).abs().max() < 0.1 * value.std()
    assert probs.std(0).max() > 0.005, "too dull for a test"


def test_what_a_small_agent_keeps(trained, tmp_path, capsys):
    path = export(trained["sprl"], tmp_path, capsys)
    whole, small = torch.load(trained["sprl"], weights_only=True), torch.load(path, weights_only=True)
    assert os.path.basename(path) == f"{KEY_DOORS}__sprl__s1.pt" and os.listdir(tmp_path) == [os.path.basename(path)]
    assert set(small) == {"script", "command", "commit", "args", "global_step", "history", "agent", "scales"}
    assert small["history"] == [] and len(whole["history"]) == 4
    assert all(small[name] == whole[name] for name in ("script", "command", "commit", "args", "global_step"))
    again = export(trained["sprl"], tmp_path / "again", capsys)
    assert open(path, "rb").read() == open(again, "rb").read()
    assert os.path.basename(export(trained["ppo"], tmp_path, capsys)) == f"{KEY_DOORS}__ppo__s1.pt"


@pytest.mark.parametrize("size, scaled", [(7, 0), (11, 1)])
def test_small_agents_are_below_1_mb(size, scaled, script, tmp_path, capsys):
    path = checkpoint_of(script, tmp_path / "agent.pt", env_id=f"MiniGrid-KeyDoors-{size}x{size}-v0", cost_scale=0.0)
    whole = torch.load(path, weights_only=True) | {"optimizer": {}, "command": "python x.py", "commit": "abc"}
    small = export(save(tmp_path, whole), tmp_path, capsys)
    assert 5e5 < os.path.getsize(small) < 1e6 and len(torch.load(small, weights_only=True)["scales"]) == scaled


def test_small_agent_is_played(trained, tmp_path, capsys):
    path = export(trained["ppo"], tmp_path, capsys)
    evaluate.main(evaluate.Args(path, episodes=3, video=str(tmp_path / "play.gif")))
    line, video = capsys.readouterr().out.splitlines()
    assert line.startswith("return ") and line.endswith(" over 3 episodes (seed 1)") and "frames" in video


@pytest.mark.parametrize("renamed", [False, True])
def test_small_agent_is_not_resumed(trained, renamed, run, tmp_path, capsys):
    path = export(trained["ppo"], tmp_path, capsys)
    if renamed:
        path = shutil.move(path, tmp_path / "agent.pt")
    with pytest.raises(SystemExit) as stop:
        run(f"--resume {path}{steps(8)}")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and f"--resume {path}, accepted: a whole agent.pt" in error
    assert not (tmp_path / "runs").exists()


def test_what_is_not_exported(trained, tmp_path, capsys):
    path = export(trained["ppo"], tmp_path / "out", capsys)
    whole = torch.load(trained["ppo"], weights_only=True)
    nowhere = str(tmp_path / "nowhere.pt")
    for source, word in ((path, "'optimizer'"), (nowhere, "no such file"), (__file__, "not a readable checkpoint")):
        assert word in refused(export_agent.main, export_agent.Args(source, str(tmp_path)), capsys)
    for change in ({"args": {}}, {"agent": {"x": 1}}):
        source = save(tmp_path, whole | change)
        assert "not a checkpoint" in refused(export_agent.main, export_agent.Args(source, str(tmp_path)), capsys)
    assert "--out" in refused(export_agent.main, export_agent.Args(trained["ppo"], path), capsys)
    assert sorted(os.listdir(tmp_path)) == ["agent.pt", "out"]


def test_bad_scales_end_in_one_line(trained, tmp_path, capsys):
    small = torch.load(export(trained["ppo"], tmp_path, capsys), weights_only=True)
    for scales in ({"nothing": torch.ones(1)}, {"network.1.weight": torch.ones(7, 7)}, {"network.1.weight": 2}):
        path = save(tmp_path, small | {"scales": scales})
        assert "does not fit" in refused(evaluate.main, evaluate.Args(path, episodes=1), capsys)


# SIDE BY SIDE ########################################################################################################
def test_most_typical_by_hand():
    """Medians 3 and 0.5, mean distances (2+1+0+1+7) / 5 and (0.3+0+0.3+0+0.4) / 5: row 1 is 0.45 away, row 2 1.5."""
    numbers = np.array([[1, 0.2], [2, 0.5], [3, 0.8], [4, 0.5], [10, 0.9]])
    assert side_by_side.most_typical(numbers) == 1  # as near as row 3: the first
    assert side_by_side.most_typical(np.array([[5.0, 100], [1, 100], [2, 100]])) == 2  # one that never varies


def play_one_action(world, action):
    """What the grid is after the action, with what the agent carries."""
    world = copy.deepcopy(world)
    if action is not None:
        world.step(action)
    return world.gen_obs()["image"].tobytes(), world.carrying and world.carrying.encode()


def test_trails_have_the_colour_of_the_cost(trained, tmp_path, capsys, monkeypatch):
    """k = 2: a state is reachable if it is the same or one action, played in a copy of the world, leads to it."""
    copies, drawn = {}, []

    def noted(world):
        state = side_by_side_get_state(world)
        copies.setdefault(state, copy.deepcopy(world))
        return state

    def draw(worlds, films, *rest):
        drawn.append((films, side_by_side_draw(worlds, films, *rest)))
        return drawn[0][1]

    side_by_side_get_state, side_by_side_draw = side_by_side.get_state, side_by_side.draw
    monkeypatch.setattr(side_by_side, "get_state", noted)
    monkeypatch.setattr(side_by_side, "draw", draw)
    side_by_side.main(side_by_side.Args(trained["ppo"], trained["sprl"], layouts=3, out=str(tmp_path)))
    lines, ((films, frames),) = capsys.readouterr().out.splitlines(), drawn
    assert [line.split(":")[0] for line in lines[:4]] == ["PPO", "SPRL", "drawn of PPO", "drawn of SPRL"]
    first, second = (copies[states[0]] for states, *_ in films)
    assert play_one_action(first, None) == play_one_action(second, None), "not the same layout"

    gif = Image.open(tmp_path / "side_by_side.gif")
    longest, checked = max(len(costs) for *_, costs in films), []
    assert len(frames) == longest + 1 and lines[4].endswith(
        f": {longest + 1} frames, {os.path.getsize(gif.filename) / 1e3:.0f} kB"
    )
    assert gif_milliseconds(gif.filename) == (100 * longest + 2_000, 0)
    shown = []
    for number in range(gif.n_frames):
        gif.seek(number)
        shown.append(np.array(gif.convert("RGB"), int))
    assert len(shown) == longest + 1  # the marker moves at every step, so no two frames are one
    for i, (states, rewards, costs) in enumerate(films):
        after = [{play_one_action(copies[s], action) for action in (None, *range(7))} for s in states]
        judged = [play_one_action(copies[state], None) for state in states]
        slow = slow_costs(lambda old, t: judged[t] in after[old], rewards, 2, 1, 5, 97)  # noqa: B023
        assert slow == costs.tolist() and set(slow) == {0.0, 1.0}
        points = side_by_side.trail(states, np.random.default_rng(0)) * 48 + [8 + i * (7 * 48 + 8), 34]
        for t, cost in enumerate(slow):
            if np.abs(points[t + 1] - points[t]).max() > 14:  # elsewhere the marker hides the newest piece
                x, y = ((points[t] + points[t + 1]) / 2).astype(int)
                assert np.abs(shown[t + 1][y, x] - side_by_side.COLOURS[int(cost)]).max() < 25, (i, t)
                checked.append(cost)
    assert checked.count(0) > 3 and checked.count(1) > 3


def test_learned_judge_and_small_agents(trained, tmp_path, capsys):
    """The right agent's RNet tells another cost than the truth; small agents have none and play the same."""
    texts = {}
    for name, right, judge in (("truth", "sprl", "oracle"), ("rnet", "sprl", "learned")):
        args = side_by_side.Args(trained["ppo"], trained[right], 4, judge=judge, out=str(tmp_path / name))
        side_by_side.main(args)
        texts[name] = capsys.readouterr().out
        assert (tmp_path / name / "side_by_side.gif").exists()
    assert texts["truth"].split("\n")[0].split(", cost")[0] == texts["rnet"].split("\n")[0].split(", cost")[0]
    assert texts["truth"].split("\n")[0] != texts["rnet"].split("\n")[0]
    small = export(trained["sprl"], tmp_path, capsys)
    error = refused(side_by_side.main, side_by_side.Args(trained["ppo"], small, judge="learned"), capsys)
    assert "no RNet for --judge learned" in error


def test_what_is_not_drawn(trained, script, tmp_path, capsys):
    other = checkpoint_of(script, tmp_path / "other.pt", env_id="MiniGrid-Empty-5x5-v0")
    error = refused(side_by_side.main, side_by_side.Args(trained["ppo"], other), capsys)
    assert KEY_DOORS in error and "MiniGrid-Empty-5x5-v0" in error and "play the same" in error
    for flag in ({"layouts": 0}, {"seed": -1}):
        assert "--" + next(iter(flag)) in refused(
            side_by_side.main, side_by_side.Args(trained["ppo"], trained["sprl"], **flag), capsys
        )
