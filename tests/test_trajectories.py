"""analysis/trajectories.py against slow loops over single worlds and pairs, and numbers found by hand."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "analysis"))

import trajectories  # noqa: E402
from common import load_script  # noqa: E402
from oracle import Oracle  # noqa: E402
from trajectories import Args, Episode, Recorder, count_segment_steps, first_episodes, quarters, spread  # noqa: E402


@pytest.fixture(scope="module")
def script():
    return load_script(trajectories.SPRL)


def checkpoint_of(script, path, name=trajectories.SPRL.name, with_rnet=True, **settings):
    """What a training would save, of networks that have learned nothing."""
    args = script.Args(**{"num_envs": 4, "max_episode_steps": 40, "num_tolerance_samples": 10} | settings)
    envs = script.make_envs(args)
    torch.manual_seed(0)
    content = {"script": name, "args": vars(args) | {"seed": 1}, "agent": script.make_agent(envs, args).state_dict()}
    content["global_step"] = 256
    if with_rnet:
        content |= {"rnet": script.make_rnet(envs, args).state_dict(), "history": [{"rnet/heldout_accuracy": 0.5}]}
    torch.save(content, path)
    return str(path)


# SPLIT ###############################################################################################################
def test_quarters_by_hand():
    low, high = quarters(np.array([0.5, 0.0, 0.9, 0.1, 0.0, 0.7, 0.3, 0.2]))
    assert low.tolist() == [1, 4] and high.tolist() == [5, 2]  # ties in order of play
    low, high = quarters(np.array([3.0, 1.0, 2.0, 0.0, 9.0, 5.0, 4.0]))  # a quarter of 7 is 1
    assert low.tolist() == [3] and high.tolist() == [4]
    assert [part.tolist() for part in quarters(np.array([2.0, 1.0]))] == [[1], [0]]


def test_spread_by_hand():
    assert spread(np.arange(10, 20), 4).tolist() == [10, 13, 16, 19]
    assert spread(np.array([7, 5]), 12).tolist() == [7, 5] and spread(np.array([3]), 2).tolist() == [3]


def test_count_segment_steps_by_hand():
    assert count_segment_steps([0, 0, 1, 0, 0, -0.5]).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_first_episodes_by_hand():
    finished = [Episode(i, None) for i in (1, 0, 1, 1, 0, 1)]
    kept = first_episodes(finished, [2, 3])
    assert [episode is finished[i] for episode, i in zip(kept, (0, 1, 2, 3, 4))] == [True] * 5 and len(kept) == 5


def test_cut_by_hand():
    frames, places = list(np.arange(8.0).reshape(8, 1, 1, 1)), list(range(8))  # one frame of one pixel
    episode = Episode(3, None, frames, places, [0] * 8, [0, 0, 1, 0, 0, 2, 0])
    (first, early), (second, late) = trajectories.cut(episode, np.arange(7) / 10, 3)  # a rest of one step is left
    assert first.places == [0, 1, 2, 3] and second.places == [3, 4, 5, 6] and first.env == second.env == 3
    assert first.rewards == [0, 0, 1] and second.rewards == [0, 0, 2] and second.background.ravel().tolist() == [3] * 3
    assert early.tolist() == [0, 0.1, 0.2] and late.tolist() == [0.3, 0.4, 0.5]
    assert (first.start, second.start) == (0, 3)
    assert not list(trajectories.cut(episode, np.zeros(7), 8))


def gaps_of(k, tolerance, num_samples):
    return np.array([k + n * tolerance for n in range(1, num_samples + 1)])


def test_steps_that_cannot_cost_do_not_count():
    """Of k = 2 and N = 1 the first step that can cost is the third of a segment; a reward begins another."""
    episode = Episode(0, None, rewards=[0, 0, 0, 0, 1, 0, 0, 0])
    first = trajectories.first_cost(gaps_of(2, 1, 1), 90.0)
    found = trajectories.possible_costs(episode, np.array([0, 0, 1, 0, 0, 0, 0, 1.0]), first)
    assert first == 3 and np.isnan(found).tolist() == [True, True, False, False, True, True, True, False]
    assert np.nanmean(found) == pytest.approx(2 / 3)  # and not 2 / 8


# COST ################################################################################################################
def slow_costs(judged, rewards, k, tolerance, num_samples, q):
    """The cost of every step pair by pair; judged(i, j): can state j be reached from state i in k - 1 steps?"""
    costs = []
    for t in range(1, len(rewards) + 1):
        scores = []
        for n in range(1, num_samples + 1):
            old = t - k - n * tolerance
            scores.append(float(old >= 0 and all(r == 0 for r in rewards[old:t]) and judged(old, t)))
        costs.append(float(np.percentile(scores, q) > 0.5))
    return costs


def record(script, seed, observe=False, steps=60, k=3):
    """Episodes of random actions, and (place, direction) of every frame kept beside them."""
    envs = script.GridWorlds("MiniGrid-FourRooms-7x7-v0", 3, 2, 25)  # two frames
    oracle = Oracle(envs, k - 1) if observe else None
    recorder = Recorder(envs, *trajectories.VIEWS["MiniGrid"][:2], oracle and oracle.observe)
    rng = np.random.default_rng(seed)
    obs, info = recorder.reset(seed=seed)
    seen = [(obs, np.zeros(3), np.ones(3, bool), info["position"])]
    for _ in range(steps):
        begins = envs.done.copy()
        obs, rewards, _, _, info = recorder.step(rng.integers(0, 3, 3))
        seen.append((obs, rewards, begins, np.array([world.agent_pos for world in envs.worlds])))
    return recorder, oracle, seen


def test_recorder_equals_a_cut_of_the_stream(script):
    recorder, _, seen = record(script, 5)
    for i in range(3):
        starts = [t for t, (_, _, begins, _) in enumerate(seen) if begins[i]]
        own = [episode for episode in recorder.finished if episode.env == i]
        assert len(own) in (len(starts) - 1, len(starts)) and len(own) >= 2
        for episode, start in zip(own, starts):
            rows = seen[start : start + len(episode.frames)]
            assert all(np.array_equal(frame, row[0][i]) for frame, row in zip(episode.frames, rows))
            assert episode.rewards == [row[1][i] for row in rows[1:]]
            pixels = [16 * row[3][i] + 7.5 for row in rows]  # the middle of a square of 16 pixels
            assert np.array_equal(episode.places, pixels)
            assert episode.background.shape == (7 * 16, 7 * 16, 3)
        assert len({len(episode.frames) for episode in own} | {26}) <= len(own) + 1
        assert all(len(e.rewards) == 25 or e.rewards[-1] > 0 for e in own)  # to the time limit or to the goal


@pytest.mark.parametrize("k, tolerance, num_samples, q", [(3, 1, 1, 90), (3, 1, 5, 90), (3, 2, 4, 50)])
def test_oracle_cost_equals_a_double_loop(script, k, tolerance, num_samples, q):
    """Reachability by hand: MiniGrid frames are states, so all that two more actions can lead to is played out."""
    recorder, oracle, _ = record(script, 7, observe=True, k=k)
    costs = []
    for episode in recorder.finished:
        found = trajectories.step_costs(episode, script, oracle, gaps_of(k, tolerance, num_samples), q)
        squares = np.array([(np.array(place) - 7.5) / 16 for place in episode.places]).round().astype(int)
        directions = [int(frame[-1, x, y, 2]) for frame, (x, y) in zip(episode.frames, squares)]
        walls = {tuple(xy) for xy in np.argwhere(episode.frames[0][-1, ..., 0] == 2)}
        goal = [tuple(xy) for xy in np.argwhere(episode.frames[0][-1, ..., 0] == 8)]

        def near(state, walls=walls, goal=goal):
            reached = frontier = {state}
            for _ in range(k - 1):
                step = set()
                for x, y, d in frontier:
                    if (x, y) not in goal:
                        dx, dy = ((1, 0), (0, 1), (-1, 0), (0, -1))[d]
                        ahead = (x, y, d) if (x + dx, y + dy) in walls else (x + dx, y + dy, d)
                        step |= {(x, y, (d + 1) % 4), (x, y, (d - 1) % 4), ahead}
                frontier = step - reached
                reached = reached | step
            return reached

        states = [(int(x), int(y), d) for (x, y), d in zip(squares, directions)]

        def judged(i, j, states=states, near=near):
            return states[j] in near(states[i])

        assert found.tolist() == slow_costs(judged, episode.rewards, k, tolerance, num_samples, q)
        costs += found.tolist()
    assert 0.1 < np.mean(costs) < 0.95  # both kinds of steps were compared


def test_an_episode_too_short_to_compare_costs_nothing(script):
    """Of N = 60 outputs 7 must pass for the 90th percentile to do so: the step at age 2 + 7 is the first that can."""

    class Everything:  # says that all can be reached
        def compare(self, early, late):
            return torch.full((len(early),), torch.inf)

    for steps, first in ((3, None), (8, None), (9, 9), (12, 9)):
        episode = Episode(0, None, states=[1] * (steps + 1), rewards=[0.0] * steps)
        found = trajectories.step_costs(episode, script, Everything(), gaps_of(2, 1, 60), 90.0)
        assert found.tolist() == [float(first is not None and t >= first) for t in range(1, steps + 1)]
    assert trajectories.first_cost(gaps_of(2, 1, 60), 90.0) == 9
    assert trajectories.first_cost(gaps_of(2, 1, 20), 90.0) == 5  # 3 of 20


def test_rnet_cost_equals_a_double_loop(script):
    recorder, _, _ = record(script, 9)
    torch.manual_seed(1)
    rnet = script.make_rnet(recorder.envs, script.Args()).eval()
    episode = max(recorder.finished, key=lambda episode: len(episode.rewards))
    with torch.inference_mode():
        rnet.head[-1].bias += 0.1  # untrained, its outputs lie close to 0.5: so that some pass and some do not
        embeddings = [rnet.embed(torch.from_numpy(frame)[None])[0] for frame in episode.frames]
        logits = torch.tensor([[rnet.compare(a[None, 0], b[None, 1]) for b in embeddings] for a in embeddings])
        rnet.head[-1].bias -= logits.median()
        logits -= logits.median()
        found = trajectories.step_costs(episode, script, rnet, gaps_of(2, 1, 6), 90.0)
    scores = logits.sigmoid().double().numpy()
    slow = []
    for t in range(1, len(episode.rewards) + 1):
        row = [scores[t - 2 - n, t] * (t - 2 - n >= 0 and not any(episode.rewards[t - 2 - n : t])) for n in range(1, 7)]
        slow.append(float(np.percentile(row, 90) > 0.5))
    assert found.tolist() == slow and 0 < np.mean(slow) < 1


# COMMAND LINE ########################################################################################################
def read(folder):
    names = sorted(path.name for path in folder.iterdir() if path.name != "agent.pt")
    assert names == ["trajectories.csv", "trajectories.png"]
    assert (folder / "trajectories.png").stat().st_size > 30_000
    with open(folder / "trajectories.csv") as file:
        return list(csv.DictReader(file))


def test_files(script, tmp_path, capsys):
    path = checkpoint_of(script, tmp_path / "agent.pt")
    trajectories.main(Args(path, episodes=9, out=str(tmp_path / "a" / "b")))
    output = capsys.readouterr().out
    rows = read(tmp_path / "a" / "b")
    assert "RNet, which its training did not trust yet, k = 2, Dt = 1, N = 10, percentile 97" in output
    assert "9 episodes" in output
    assert [row["quarter"] for row in rows].count("lowest") == [row["quarter"] for row in rows].count("highest") == 2
    means = {name: np.mean([float(row["cost_per_step"]) for row in rows if row["quarter"] == name])
             for name in ("lowest", "highest")}  # fmt: skip
    assert means["lowest"] <= means["highest"] and f"highest quarter: cost {means['highest']:.3f}" in output
    assert len(rows) == 9 and all(0 < int(row["steps"]) <= 40 for row in rows)


@pytest.mark.parametrize(
    "name, said",
    [
        ("ppo_gtgrid.py", "true reachability (the checkpoint has no RNet), k = 2, Dt = 1, N = 60, percentile 97"),
        ("ppo_eco.py", "the checkpoint's RNet, k = 3, Dt = 1, N = 60, percentile 97"),
    ],
)
def test_baselines(name, said, tmp_path, capsys, monkeypatch):
    """Where a checkpoint has no RNet the truth is asked; settings of the cost that it has not are SPRL's defaults."""
    other = load_script(ROOT / name)
    args = other.Args(num_envs=2, max_episode_steps=30)
    envs = other.make_envs(args)
    content = {"script": name, "args": vars(args), "agent": other.make_agent(envs, args).state_dict()}
    content["history"] = [{"rnet/heldout_accuracy": 0.8}]
    content |= {"rnet": other.make_rnet(envs, args).state_dict()} if name == "ppo_eco.py" else {}
    torch.save(content, tmp_path / "agent.pt")
    monkeypatch.setattr(trajectories, "draw", lambda *arguments: Path(arguments[-1]).write_bytes(b"0" * 40_000))
    trajectories.main(Args(str(tmp_path / "agent.pt"), episodes=4))
    assert said in capsys.readouterr().out and len(read(tmp_path)) == 4  # beside the checkpoint


def test_your_own_script(tmp_path, capsys, monkeypatch):
    """A copy whose cost is 0 everywhere: it is the copy's that is drawn, and only --script lets it run."""
    text = trajectories.SPRL.read_text(encoding="utf-8")
    own = tmp_path / "my_sprl.py"
    own.write_text(text.replace("> 0.5).float()", "> 2).float()"), encoding="utf-8")
    path = checkpoint_of(load_script(own), tmp_path / "agent.pt", own.name)
    monkeypatch.setattr(trajectories, "draw", lambda *arguments: Path(arguments[-1]).write_bytes(b"0"))
    with pytest.raises(SystemExit) as stop:
        trajectories.main(Args(path, episodes=4))
    assert stop.value.code == 2 and "'my_sprl.py', accepted: " in capsys.readouterr().err
    trajectories.main(Args(path, script=str(own), episodes=4))
    assert "percentile 97: 0.000" in capsys.readouterr().out
    other = checkpoint_of(load_script(trajectories.SPRL), tmp_path / "other.pt")
    trajectories.main(Args(other, episodes=4, judge=path, judge_script=str(own)))
    assert "another checkpoint's RNet" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["play", "draw"])
def test_interrupted_leaves_nothing(where, script, monkeypatch, capsys, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    path = checkpoint_of(script, tmp_path / "agent.pt")
    monkeypatch.setattr(trajectories, where, interrupt)
    with pytest.raises(SystemExit) as stop:
        trajectories.main(Args(path, episodes=4, out=str(tmp_path / "out")))
    assert stop.value.code == 130 and "stopped, nothing was written" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("flag, value", [("episodes", 3), ("episodes", 100_001), ("seed", -1)])
def test_bad_values_end_in_one_line(flag, value, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        trajectories.main(Args("agent.pt", **{flag: value}, out=str(tmp_path / "unmade")))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and not (tmp_path / "unmade").exists()
    assert f"--{flag} {value} is out of range, accepted: " in error


def test_bad_files_end_in_one_line(script, capsys, tmp_path, monkeypatch):
    def refused(**settings):
        with pytest.raises(SystemExit) as stop:
            trajectories.main(Args(**settings))
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.splitlines()[-1].count("error: ") == 1, error
        return error

    assert "no such file" in refused(checkpoint=str(tmp_path / "none.pt"))
    path = checkpoint_of(script, tmp_path / "agent.pt")
    (tmp_path / "taken").write_text("")
    assert "--out" in refused(checkpoint=path, episodes=4, out=str(tmp_path / "taken"))
    content = torch.load(path, weights_only=True)
    content["rnet"].popitem()
    torch.save(content, path)
    assert "does not fit today's" in refused(checkpoint=path, out=str(tmp_path / "unmade"))
    monkeypatch.setattr(trajectories, "VIEWS", {"Nowhere": (None, None, None)})
    message = "plays MiniGrid-FourRooms-7x7-v0, accepted: agents of Nowhere"
    assert message in refused(checkpoint=path, out=str(tmp_path / "unmade"))
    assert not (tmp_path / "unmade").exists()


# MONTEZUMA'S REVENGE #################################################################################################
def test_positions_on_the_screen():
    """What moves on the screen while the RAM's position changes is the figure that we would draw over."""
    atari = load_script(ROOT / "ppo_sprl_atari.py")
    envs = atari.make_envs(atari.Args(num_envs=1))
    before, info = envs.reset(seed=3)
    rng, misses = np.random.default_rng(0), []
    place = info["position"]
    for step in range(150):
        after, _, _, _, info = envs.step(rng.integers(0, 18, 1))
        rows, columns = np.nonzero(abs(after[0, -1].astype(int) - before[0, -1]) > 30)
        x, y = trajectories.screen_places(info["position"])[0]
        near = (abs(columns - x) < 8) & (abs(rows - y) < 12)  # a skull moves too
        if step > 3 and (info["position"] != place).any() and near.sum() > 3:
            misses.append((columns[near].mean() - x, rows[near].mean() - y))
        before, place = after.copy(), info["position"]
    assert len(misses) > 40 and (abs(np.median(misses, 0)) < 1.5).all()


def test_montezuma_is_cut_into_pieces(tmp_path, capsys, monkeypatch):
    atari = load_script(ROOT / "ppo_sprl_atari.py")
    settings = {"rnet_width": 2, "rnet_input": "embedding-difference", "max_episode_steps": 130}
    path = checkpoint_of(atari, tmp_path / "agent.pt", "ppo_sprl_atari.py", **settings)
    trajectories.main(Args(path, episodes=4, out=str(tmp_path / "out")))
    rows = list(csv.DictReader(open(tmp_path / "out" / "trajectories.csv")))
    assert len(rows) == 8 and {row["steps"] for row in rows} == {"60"}  # twice 60 steps of every 130
    assert (
        tmp_path / "out" / "trajectories.png"
    ).stat().st_size > 20_000 and "lowest quarter" in capsys.readouterr().out
    assert {(row["episode"], row["start"]) for row in rows} == {
        (str(i), start) for i in range(4) for start in ("0", "60")
    }
    plain = checkpoint_of(atari, tmp_path / "plain.pt", "ppo_sprl_atari.py", with_rnet=False, **settings)
    grid = checkpoint_of(load_script(trajectories.SPRL), tmp_path / "grid.pt")
    for judge, message in (
        (None, "has no RNet to tell the cost"),
        (plain, "has no RNet"),
        (grid, "plays MiniGrid-FourR"),
    ):
        with pytest.raises(SystemExit) as stop:
            trajectories.main(Args(plain, episodes=4, out=str(tmp_path / "out"), judge=judge))
        error = capsys.readouterr().err.splitlines()[-1]
        assert stop.value.code == 2 and message in error and "Montezuma's Revenge" in error
    monkeypatch.setattr(trajectories, "draw", lambda *arguments: Path(arguments[-1]).write_bytes(b"0"))
    trajectories.main(Args(plain, episodes=4, out=str(tmp_path / "judged"), judge=path))
    assert "another checkpoint's RNet" in capsys.readouterr().out
    assert (tmp_path / "judged" / "trajectories.csv").read_text() == (tmp_path / "out" / "trajectories.csv").read_text()
