"""analysis/: evaluation against a slow loop over single worlds, curves and tables against numbers found by hand."""

import csv
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import main_of
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "ppo_sprl_minigrid.py"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(ROOT / "analysis"))

import common  # noqa: E402
import curves  # noqa: E402
import evaluate  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The agent.pt of two iterations with a stack of three frames."""
    folder = tmp_path_factory.mktemp("trained")
    flags = "--env-id MiniGrid-Empty-Random-5x5-v0 --cost-scale 0 --total-timesteps 1024 --num-envs 4 --num-steps 128"
    flags += " --max-episode-steps 80 --stack-observations 2 --run-name tiny"
    with main_of(SCRIPT, flags, folder):
        runpy.run_path(str(ROOT / SCRIPT), run_name="__main__")
    return folder / "runs" / "tiny" / "agent.pt"


@pytest.fixture
def checkpoint(trained):
    return torch.load(trained, weights_only=True)


def save(tmp_path, content):
    torch.save(content, tmp_path / "agent.pt")
    return str(tmp_path / "agent.pt")


def refused(main, args, capsys):
    """The one line on stderr with which main(args) ends in exit code 2."""
    with pytest.raises(SystemExit) as stop:
        main(args)
    output = capsys.readouterr()
    assert stop.value.code == 2 and not output.out and output.err.count("\n") == 1, output
    return output.err


# EVALUATE ############################################################################################################
def slow_episodes(checkpoint, seed, count):
    """[(return, steps), ...] of one world and one agent, with the stack kept as a plain list."""
    script = common.load_script(ROOT / SCRIPT)
    args = script.Args(**checkpoint["args"])
    agent = script.make_agent(script.make_envs(args), args)
    agent.load_state_dict(checkpoint["agent"])
    world_seed, action_seed = np.random.SeedSequence(seed).generate_state(2) >> 2
    torch.manual_seed(int(action_seed))
    world = script.make_world(args.env_id, args.max_episode_steps)
    gym.Env.reset(world, seed=int(world_seed))
    episodes = []
    for _ in range(count):
        stack, total, steps, done = [world.reset()[0]["image"]] * 3, 0.0, 0, False
        while True:
            with torch.no_grad():
                logits = agent.actor(agent.network(torch.from_numpy(np.stack(stack))[None]))
            action = torch.multinomial(logits.softmax(1), 1).item()
            if done:  # the action that autoreset ignores
                break
            obs, reward, terminated, truncated, _ = world.step(action)
            stack, done = [*stack[1:], obs["image"]], terminated or truncated
            total, steps = total + reward, steps + 1
        episodes.append((total, steps))
    return episodes


def gif_milliseconds(path):
    with Image.open(path) as image:
        durations = []
        for frame in range(image.n_frames):
            image.seek(frame)
            image.load()
            durations.append(image.info["duration"])
        return sum(durations), image.info["loop"]


def test_command_agrees_with_a_single_world(checkpoint, tmp_path):
    """One environment and sampled actions: the slow loop draws the same random numbers."""
    checkpoint["args"]["num_envs"] = 1
    returns, steps = (np.array(column) for column in zip(*slow_episodes(checkpoint, 3, 20)))
    assert len(set(steps.tolist())) > 2, "too dull for a test"
    command = [sys.executable, str(ROOT / "analysis" / "evaluate.py"), save(tmp_path, checkpoint), "--episodes", "20"]
    command += ["--seed", "3", "--video", "play.gif"]
    ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, encoding="utf-8", env=ONE_THREAD)
    error = np.sqrt(((returns - returns.mean()) ** 2).sum() / 19 / 20)
    assert ran.stdout.splitlines()[0] == (
        f"return {returns.mean():.3f} ± {error:.3f}, success {(returns > 0).mean():.2f}, steps {steps.mean():.1f} "
        "over 20 episodes (seed 3)"
    )
    assert "20/20" in ran.stderr  # the bar
    frames = sum(steps[:3]) + 3  # an episode of n steps has n + 1 frames
    assert gif_milliseconds(tmp_path / "play.gif") == (160 * frames, 0)
    assert (tmp_path / "play.gif").stat().st_size < 1e6


class Walker(torch.nn.Linear):
    """Goes to the corner (3, 3): forward when that leads right or down, else a turn to the right."""

    def get_action_and_value(self, obs, action):
        agents = (obs[:, -1, ..., 0] == 10).nonzero()  # (B, 3): row, x, y
        directions = obs[agents[:, 0], -1, agents[:, 1], agents[:, 2], 2]
        best = [self.rule(*pose) for pose in zip(*agents[:, 1:].T.tolist(), directions.tolist())]
        return None, (action == torch.tensor(best)).float().log(), None, None

    @staticmethod
    def rule(x, y, direction):
        return 2 if (direction == 0 and x < 3) or (direction == 1 and y < 3) else 1


def test_greedy_walk_agrees_with_arithmetic(checkpoint):
    """Three worlds of 4, 4 and 3 episodes; the walks are counted without the worlds."""
    script = common.load_script(ROOT / SCRIPT)
    args = script.Args(**checkpoint["args"])
    args.num_envs = 3
    rows = evaluate.play(script.make_envs(args), Walker(1, 1), np.array([4, 4, 3]), 50, greedy=True)
    expected = []
    for i, quota in enumerate((4, 4, 3)):
        world = script.make_world(args.env_id, 80)
        gym.Env.reset(world, seed=50 + i)
        for _ in range(quota):
            world.reset()
            (x, y), direction, steps = map(int, world.agent_pos), world.agent_dir, 0
            while (x, y) != (3, 3):
                if Walker.rule(x, y, direction) == 2:
                    x, y = (x + 1, y) if direction == 0 else (x, y + 1)
                else:
                    direction = (direction + 1) % 4
                steps += 1
            expected.append((i, pytest.approx(1 - 0.9 * steps / 80), steps))
    assert sorted(rows, key=lambda row: row[0]) == expected  # a stable sort: each environment's in order


def test_same_seed_same_numbers(trained, capsys):
    lines = []
    for seed in (1, 1, 2):
        evaluate.main(evaluate.Args(str(trained), episodes=9, seed=seed))
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1] and lines[0].split("(")[0] != lines[2].split("(")[0]


def test_layouts_are_not_those_of_the_training(trained, checkpoint, capsys, monkeypatch):
    seeds = []
    monkeypatch.setattr(evaluate, "play", lambda *args: seeds.append(args[3]) or [(0, 1.0, 7)])
    for seed in (0, 1, 2):
        evaluate.main(evaluate.Args(str(trained), seed=seed))
    assert capsys.readouterr().out.startswith("return 1.000, success 1.00, steps 7.0 over 1 episode (seed 0)\n")
    assert min(seeds) > 1e6 and np.diff(sorted(seeds)).min() > 1000  # trainings use their seed + 0, 1, ...


class Script:
    """Environments whose episode e has LENGTHS[i] steps and shows (i, e, t); rewards by REWARDS[i][t]."""

    LENGTHS, REWARDS = (1, 6), ({1: 1.0}, {2: 0.25, 6: 0.5})
    num_envs, single_action_space = 2, gym.spaces.Discrete(3)

    def reset(self, seed):
        self.episode, self.t = np.zeros(2, np.int64), np.zeros(2, np.int64)
        return self.observe(), {}

    def observe(self):
        return np.stack([np.arange(2), self.episode, self.t], 1)

    def step(self, actions):
        ended = self.t == self.LENGTHS
        self.episode, self.t = self.episode + ended, np.where(ended, 0, self.t + 1)
        rewards = np.array([self.REWARDS[i].get(int(t), 0.0) for i, t in enumerate(self.t)])
        return self.observe(), rewards, self.t == self.LENGTHS, np.zeros(2, bool), {}


class Recorder(torch.nn.Linear):
    """Prefers action 1; notes what it is shown."""

    def get_action_and_value(self, obs, action=None):
        self.seen = [*getattr(self, "seen", []), obs.clone()]
        return torch.zeros(len(obs)), None if action is None else -((action - 1.0) ** 2), None, None


def test_quota_keeps_short_episodes_from_being_over_counted():
    """Of the first 4 episodes to finish, all are environment 0's: return 1, 1 step. By quota, two of each count."""
    agent = Recorder(1, 1)
    rows = evaluate.play(Script(), agent, np.array([2, 2]), 0)
    assert sorted(rows) == [(0, 1.0, 1), (0, 1.0, 1), (1, 0.75, 6), (1, 0.75, 6)]
    line = evaluate.summary([row[1] for row in rows], [row[2] for row in rows], 5)
    assert line == "return 0.875 ± 0.072, success 1.00, steps 3.5 over 4 episodes (seed 5)"  # 0.125 * 2 / sqrt(3) / 2
    # the agent is shown every observation once, also that of the row which autoreset inserts
    assert [seen[1].tolist() for seen in agent.seen] == [[1, 0, t] for t in range(7)] + [[1, 1, t] for t in range(6)]
    assert evaluate.most_likely(agent, torch.zeros(5, 3), gym.spaces.Discrete(3)).tolist() == [1] * 5


def test_gif(tmp_path):
    flat = [np.full((8, 8, 3), shade, np.uint8) for shade in (0, 100, 100, 200)]
    assert evaluate.write_gif(flat, tmp_path / "flat.gif") == 4
    assert gif_milliseconds(tmp_path / "flat.gif") == (4 * 160, 0)
    with Image.open(tmp_path / "flat.gif") as image:
        assert image.n_frames == 3  # the two equal frames are one, shown twice as long
        assert image.convert("RGB").getpixel((3, 3)) == (0, 0, 0)
        image.seek(2)
        assert image.convert("RGB").getpixel((3, 3)) == (200, 200, 200)
    noise = list(np.random.default_rng(0).integers(0, 255, (16, 64, 64, 3), np.uint8))
    assert evaluate.write_gif(noise, tmp_path / "noise.gif", 20_000) == 4  # about 4 kB each
    assert (tmp_path / "noise.gif").stat().st_size < 20_000


def test_older_checkpoint_with_other_settings(checkpoint, tmp_path, capsys):
    del checkpoint["args"]["rnet_batch_size"]
    checkpoint["args"]["a_setting_of_old"] = 1
    evaluate.main(evaluate.Args(save(tmp_path, checkpoint), episodes=1))
    assert "over 1 episode (seed 1)" in capsys.readouterr().out


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile",)


def test_unreadable_files_are_refused(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.pt").write_bytes(b"")
    Path("truncated.pt").write_bytes(trained.read_bytes()[:5000])
    Path("text.pt").write_text("return 1.0\n")
    Path("pickle.pt").write_bytes(pickle.dumps({"script": SCRIPT, "args": {}, "agent": Hostile()}))
    torch.save({"script": SCRIPT, "args": {}, "agent": Hostile()}, "hostile.pt")
    torch.save(torch.zeros(3), "tensor.pt")
    torch.save({"script": SCRIPT, "args": [], "agent": {}}, "list.pt")
    for name in ("empty", "truncated", "text", "pickle", "hostile", "tensor", "list", "missing"):
        assert f"{name}.pt" in refused(evaluate.main, evaluate.Args(f"{name}.pt"), capsys)
        assert f"{name}.pt" in refused(curves.main, curves.Export((f"{name}.pt",), "out"), capsys)
    refused(evaluate.main, evaluate.Args("."), capsys)
    assert not Path("hostile").exists()


def test_unknown_scripts_are_refused(checkpoint, tmp_path, capsys):
    for name in ("../ppo_sprl_minigrid.py", "/ppo_evil.py", "ppo_nope.py", "analysis/evaluate.py", "os", "", "a\nb"):
        other = save(tmp_path, checkpoint | {"script": name})
        error = refused(evaluate.main, evaluate.Args(other), capsys)
        assert repr(name) in error and SCRIPT in error and "--script PATH" in error
        assert repr(name) in refused(curves.main, curves.Export((other,), str(tmp_path / "out")), capsys)


def test_a_checkpoint_chooses_no_module(checkpoint, tmp_path, capsys, monkeypatch):
    """gymnasium would import what stands before the colon of an id."""
    (tmp_path / "evil_world.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    args = checkpoint["args"] | {"env_id": "evil_world:MiniGrid-Empty-Random-5x5-v0"}
    path = save(tmp_path, checkpoint | {"args": args})
    assert "'evil_world'" in refused(evaluate.main, evaluate.Args(path), capsys)
    assert not Path("imported").exists()
    evaluate.main(evaluate.Args(path, script=str(ROOT / SCRIPT), episodes=1))  # the user's word lets it in
    assert Path("imported").exists()


def test_your_own_script(checkpoint, tmp_path, capsys):
    """A copy beside nothing of ours, whose agent was trained by it; a changed line of it is what runs."""
    own = tmp_path / "my_sprl.py"
    shutil.copy(ROOT / SCRIPT, own)
    path = save(tmp_path, checkpoint | {"script": own.name})
    evaluate.main(evaluate.Args(path, script=str(own), episodes=9))
    evaluate.main(evaluate.Args(save(tmp_path, checkpoint), episodes=9))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[1]
    path = save(tmp_path, checkpoint | {"script": own.name})
    curves.main(curves.Export((path,), str(tmp_path / "out"), script=str(own)))
    curves.main(curves.Export((path,), str(tmp_path / "out"), script=str(own), label="k3"))
    env_id = checkpoint["args"]["env_id"]
    assert sorted(os.listdir(tmp_path / "out")) == [f"{env_id}__k3__s1.csv", f"{env_id}__my_sprl__s1.csv"]
    changed = own.with_name("my_other.py")
    changed.write_text(
        own.read_text().replace("def make_envs(args):", "def make_envs(args):\n    raise KeyError('mine')")
    )
    with pytest.raises(SystemExit):
        evaluate.main(evaluate.Args(path, script=str(changed)))
    assert "does not fit today's my_other.py (KeyError: 'mine')" in capsys.readouterr().err
    assert "--script nope.py" in refused(evaluate.main, evaluate.Args(path, script="nope.py"), capsys)


def test_nine_rooms(script_checkpoint):
    """--env-id analysis.worlds:MiniGrid-NineRooms-v0: nine rooms of 3x3 and twelve gaps, one square is the goal."""
    run = common.load_run(script_checkpoint("analysis.worlds:MiniGrid-NineRooms-v0"), 1, 1)
    run.envs.reset(seed=0)
    cells = run.envs.worlds[0].grid.grid
    assert len(cells) == 13 * 13 and sum(cell is None for cell in cells) == 9 * 9 + 12 - 1
    assert curves.task_name({"env_id": "analysis.worlds:MiniGrid-NineRooms-v0"}) == "MiniGrid-NineRooms-v0"


@pytest.fixture
def script_checkpoint(tmp_path):
    """script_checkpoint(env_id): the path of what PPO would save there before it has learned anything."""

    def make(env_id):
        script = common.load_script(ROOT / SCRIPT)
        args = script.Args(env_id=env_id, cost_scale=0.0, num_envs=1)
        agent = script.make_agent(script.make_envs(args), args)
        return save(tmp_path, {"script": SCRIPT, "args": vars(args), "agent": agent.state_dict()})

    return make


def test_a_flipped_bit_is_refused(trained, tmp_path, capsys):
    content = bytearray(trained.read_bytes())
    rng = np.random.default_rng(0)
    for place in rng.integers(len(content) // 10, len(content) // 2, 10):  # in the tensors
        flipped = content.copy()
        flipped[place] ^= 1
        (tmp_path / "agent.pt").write_bytes(flipped)
        assert "not a readable checkpoint" in refused(evaluate.main, evaluate.Args(str(tmp_path / "agent.pt")), capsys)


# HELPERS #############################################################################################################
def test_write_csv_by_hand(tmp_path):
    rows = [{"a": 1, "b": 0.123456}, {"a": None, "b": np.nan, "c": "x,y"}, {"b": np.float32(2)}]
    common.write_csv(tmp_path / "x.csv", rows, {"note": "two\nlines"}, ("c",))
    assert (tmp_path / "x.csv").read_text() == '# note: two lines\nc,a,b\n,1,0.1235\n"x,y",,\n,,2.0\n'


def test_shortest_distances_by_hand():
    """0 -> 1 -> 2 -> 0, where the step onto 2 ends the episode; 3 stands alone."""
    nexts, ends = np.array([[1], [2], [0], [3]]), np.array([[False], [True], [False], [False]])
    found = common.shortest_distances(nexts, ends).tolist()
    assert found == [[0, 1, 2, 4], [4, 0, 1, 4], [1, 2, 0, 4], [4, 4, 4, 0]]


def test_bad_values_are_refused(trained, checkpoint, tmp_path, capsys):
    path = str(trained)
    assert "--episodes 0" in refused(evaluate.main, evaluate.Args(path, episodes=0), capsys)
    assert "--seed -1" in refused(evaluate.main, evaluate.Args(path, seed=-1), capsys)
    for video in ("play.mp4", str(tmp_path / "nowhere" / "play.gif")):
        assert f"--video {video}" in refused(evaluate.main, evaluate.Args(path, video=video), capsys)
    for change in (
        {"agent": {}},
        {"args": checkpoint["args"] | {"num_envs": "many"}},
        {"args": {"stack_observations": 9}},
    ):
        assert "does not fit" in refused(
            evaluate.main, evaluate.Args(save(tmp_path, checkpoint | change), episodes=1), capsys
        )
    unknown = checkpoint | {"args": checkpoint["args"] | {"env_id": "MiniGrid-Nope-v0"}}
    assert "MiniGrid-Nope-v0" in refused(evaluate.main, evaluate.Args(save(tmp_path, unknown)), capsys)


# CURVES ##############################################################################################################
def test_csv_round_trip(trained, checkpoint, tmp_path):
    """What export writes is the history to 4 digits; the second run's history has blanks."""
    row = {"charts/episodic_return": 0.123456, "charts/success_rate": 1.0, "charts/episodic_length": 3.0}
    row |= {"sprl/cost_rate": 0.5, "losses/entropy": 1.9, "rnet/loss": 0.6, "icm/bonus": 0.25, "icm/inverse_loss": 2.0}
    blanks = [{"step": 10, "charts/SPS": 7.0}, {"step": 20, **row, "charts/SPS": 8.0}]
    other = {"history": blanks, "args": checkpoint["args"] | {"seed": 7, "env_id": "ALE/Pong-v5"}, "global_step": 100}
    paths = (str(trained), save(tmp_path, checkpoint | other | {"command": "python x.py\n--y"}))
    curves.main(curves.Export(paths, str(tmp_path / "out")))
    env_id = checkpoint["args"]["env_id"]
    assert sorted(os.listdir(tmp_path / "out")) == ["ALE-Pong-v5__ppo__s7.csv", f"{env_id}__ppo__s1.csv"]
    assert (tmp_path / "out" / "ALE-Pong-v5__ppo__s7.csv").read_text() == (
        f"# command: python x.py --y\n# commit: {checkpoint['commit']}\n# elapsed_s: 12\n"  # 100 steps, 8 a second
        "step,return,success,length,cost_rate,rnet_accuracy,icm/bonus,icm/inverse_loss\n"
        "10,,,,,,,\n20,0.1235,1.0,3.0,0.5,,0.25,2.0\n"
    )
    assert curves.read_run(tmp_path / "out" / "ALE-Pong-v5__ppo__s7.csv")["icm/bonus"][1] == 0.25
    run = curves.read_run(tmp_path / "out" / f"{env_id}__ppo__s1.csv")
    assert run["comments"]["command"] == checkpoint["command"] and len(checkpoint["history"]) == 2
    for chart, name in curves.CHARTS.items():
        written = [row.get(chart, np.nan) for row in checkpoint["history"]]
        np.testing.assert_allclose(run[name], written, atol=5e-5, rtol=0)
    assert run["step"].tolist() == [512, 1024] and len(curves.points(run, "icm/bonus")[0]) == 0


def test_committed_results_are_read():
    """Every CSV file of results/ that export wrote, by the columns' old names."""
    folders = {path.parent for path in ROOT.glob("results/**/*__*__s*.csv")}
    assert folders
    for folder in folders:
        for by_method in curves.read_folder(folder).values():
            assert all(len(curves.points(run, "return")[0]) for seeds in by_method.values() for run in seeds)


def test_curves_name_the_engine(checkpoint, tmp_path):
    """The stand-in's scores and DeepMind Lab's are never rows of one task."""
    for engine in ("labmaze", "deepmind_lab"):
        args = checkpoint["args"] | {"env_id": "explore_object_rewards_many", "engine": engine}
        curves.main(curves.Export((save(tmp_path, checkpoint | {"args": args}),), str(tmp_path / "out")))
    names = sorted(os.listdir(tmp_path / "out"))
    assert names == [f"explore_object_rewards_many-{engine}__ppo__s1.csv" for engine in ("deepmind_lab", "labmaze")]


def test_a_condition_is_another_task():
    """The runs of the sparsity and noise studies never meet in one mean."""
    usual = {"env_id": "FetchReach-v4", "n_substeps": 20, "action_noise": 0.003}
    assert curves.task_name(usual) == "FetchReach-v4"
    assert curves.task_name(usual | {"n_substeps": 2}) == "FetchReach-v4-substeps2"
    assert curves.task_name(usual | {"n_substeps": 3, "action_noise": 0.1}) == "FetchReach-v4-substeps3-noise0.1"
    assert curves.task_name(usual | {"env_id": "Maze", "n_substeps": 2}) == "Maze"  # a baseline's setting for Fetch
    names = [f"FetchReach-v4-noise{noise}" for noise in (0.1, 0.3, 0.03)]
    assert sorted(names, key=curves.natural) == [names[i] for i in (2, 0, 1)]


def test_thinning():
    history = [{"step": 10 * t, "return": float(t)} for t in range(1, 6)]
    history[1]["rnet_accuracy"], history[2] = 0.5, {"step": 30}
    assert curves.thin(history, most=2) == [
        {"step": 30, "return": 1.5, "rnet_accuracy": 0.5},  # of rows 1, 2, 3
        {"step": 50, "return": 4.5},
    ]
    assert curves.thin(history, most=5) == history
    assert len(curves.thin([{"step": t} for t in range(1001)])) == 334  # 3 rows each


def test_labels():
    for settings, label in (
        ({"cost_scale": 0.0, "rnet": "learned"}, "ppo"), ({"cost_scale": 0.02, "rnet": "learned"}, "sprl"),
        ({"cost_scale": 0.02, "rnet": "oracle"}, "gt-sprl"), ({"cost_scale": 0.0, "rnet": "oracle"}, "ppo"),
    ):  # fmt: skip
        assert curves.method_label(SCRIPT, settings) == label
    assert curves.method_label("ppo_eco.py", {"bonus_scale": 0.3}) == "eco"
    assert curves.method_label("ppo_eco.py", {"bonus_scale": 0.0}) == "ppo"
    assert curves.method_label("ppo_gtgrid.py", {"bonus_scale": 0.01}) == "gt-grid"  # as benchmark.sh calls it
    assert curves.method_label("_my__sprl 2.py", {}) == "my_sprl_2"  # two _ would end the name of the environment
    assert [curves.method_name(name) for name in ("gt-grid", "gt-sprl", "k5")] == ["GT-Grid", "GT-SPRL", "k5"]


def test_order_and_styles(tmp_path):
    """Known methods come first, others by name and in other colours; 7 sorts before 11; other files are no runs."""
    for name in ("Maze-11__k10__s1", "Maze-7__k5__s2", "Maze-7__k5__s10", "Maze-7__k10__s1", "Maze-7__gt-grid__s1"):
        write_csv(tmp_path / f"{name}.csv", [(50, 0.5)])
    (tmp_path / "Maze-7__k5__summary.csv").write_text("of another kind\n")
    runs = curves.read_folder(tmp_path)
    assert {env_id: list(by_method) for env_id, by_method in runs.items()} == {
        "Maze-7": ["gt-grid", "k5", "k10"], "Maze-11": ["k10"],
    }  # fmt: skip
    assert list(runs) == ["Maze-7", "Maze-11"] and [run["seed"] for run in runs["Maze-7"]["k5"]] == [2, 10]
    styles = curves.method_styles({f"m{i}" for i in range(18)} | set(curves.COLOURS))
    assert len(set(styles.values())) == 24 and styles["gt-grid"] == ("#56B4E9", "-")
    assert not {colour for colour, _ in styles.values()} - {*curves.COLOURS.values(), *curves.OTHERS}
    assert not {styles[f"m{i}"][0] for i in range(18)} & set(curves.COLOURS.values()), "a method's colour is its own"


def test_statistics_by_hand():
    mean, error = curves.mean_and_error([1, 2, 3, 6])
    assert mean == 3 and error == pytest.approx(1.0801234)  # sqrt((4 + 1 + 0 + 9) / 3) / sqrt(4)
    assert np.isnan(curves.mean_and_error([4.0])[1])
    steps, values = np.array([10.0, 20.0, 40.0]), np.array([0.0, 1.0, 1.0])
    assert curves.mean_between(steps, values, 0, 40) == 0.625  # (10 * 0 + 10 * 0.5 + 20 * 1) / 40
    assert curves.mean_between(steps, values, 15, 20) == 0.75
    assert curves.mean_between(steps, values, 36, 50) == 1
    assert curves.running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 3).tolist() == [1.5, 3, 6, 7.5]
    assert curves.running_mean(np.array([0.0, 3.0, 6.0]), 1).tolist() == [0, 3, 6]
    runs = [
        {"step": np.array([0.0, 10.0, 40.0]), "return": np.array([0.0, 1.0, 4.0])},
        {"step": np.array([10.0, 20.0, 30.0]), "return": np.array([5.0, np.nan, 7.0])},
    ]
    grid, lines = curves.seed_curves(runs, "return", 1, 3)  # both runs cover 10 to 30
    assert grid.tolist() == [10, 20, 30] and np.array(lines).tolist() == [[1, 2, 3], [5, 6, 7]]
    runs[0]["step"] += 31
    assert curves.seed_curves(runs, "return", 1, 3) == (None, [])  # one ends before the other begins


def write_csv(path, rows):
    """A run whose curve goes through (step, return)."""
    history = [{"step": step, "return": value, "rnet_accuracy": 0.75} for step, value in rows]
    curves.write_run(path, history, {"command": "python x.py", "commit": path.stem[-2:], "elapsed_s": 1})


def test_tables_and_figure(tmp_path, capsys):
    """Final return of seed 1: the line from 0.8 at step 90 to 1.0 at 100, so 0.9; of seed 2 0.3, its rows after 100 cut
    off. Area of seed 1: (0.8 * 90 / 2 + 0.9 * 10) / 100 = 0.45; of seed 2 0.3."""
    write_csv(tmp_path / "Maze-11-v0__sprl__s1.csv", [(0, 0.0), (90, 0.8), (100, 1.0)])
    write_csv(tmp_path / "Maze-11-v0__sprl__s2.csv", [(50, 0.3), (100, 0.3), (120, 9.0)])
    write_csv(tmp_path / "Maze-11-v0__ablation__s1.csv", [(50, 0.25), (2000, 0.25)])
    write_csv(tmp_path / "Maze-7-v0__ppo__s1.csv", [(50, 25.0), (100, 25.0)])
    curves.main(curves.Figure(str(tmp_path), rnet_accuracy=True))
    output = capsys.readouterr()
    assert output.err == "Maze-11-v0: runs of 100 to 2000 steps, cut to 100\n"
    assert output.out == (tmp_path / "table.md").read_text(encoding="utf-8")
    lines = [line for line in output.out.splitlines() if line.startswith(("| ", "###"))]
    header = "| method | final return | area | seeds | steps | commit |"
    assert lines == [
        "### Maze-7-v0", header, "| ppo | 25.0 | 25.0 | 1 | 100 | s1 |",
        "### Maze-11-v0", header, "| sprl | 0.600 ± 0.300 | 0.375 ± 0.075 | 2 | 100 | s1, s2 |",
        "| ablation | 0.250 | 0.250 | 1 | 100 | s1 |",
    ]  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert rows[1] == {
        "env": "Maze-11-v0", "method": "sprl", "seeds": "2", "steps": "100", "final_return": "0.6",
        "final_return_se": "0.3", "auc": "0.375", "auc_se": "0.075", "commit": "s1, s2",
    }  # fmt: skip
    assert rows[2]["final_return_se"] == rows[2]["auc_se"] == ""
    with Image.open(tmp_path / "curves.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(image.width * image.height)}
    assert {(0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2)} <= colours  # SPRL's and PPO's, always


def test_bad_curves_are_refused(trained, tmp_path, capsys):
    assert str(tmp_path) in refused(curves.main, curves.Figure(str(tmp_path)), capsys)
    assert "--smooth 0" in refused(curves.main, curves.Figure(str(tmp_path), smooth=0), capsys)
    for label in ("a/b", "a__b", "_a", "a_"):
        assert f"--label {label} is" in refused(
            curves.main, curves.Export((str(trained),), str(tmp_path), label), capsys
        )
    refused(curves.main, curves.Export((), str(tmp_path)), capsys)
    refused(curves.main, curves.Export((str(trained),), str(trained)), capsys)  # a file where the folder should be
    header = ",".join(curves.COLUMNS) + "\n"
    for text in ("", "hello\n", header, header + "1,x,,,,\n", header + "1,\n", header + "1,,,,,\n",
                 header + "2,1,,,,\n1,1,,,,\n"):  # fmt: skip
        (tmp_path / "Maze__ppo__s1.csv").write_text(text)
        assert "Maze__ppo__s1.csv" in refused(curves.main, curves.Figure(str(tmp_path)), capsys)
    (tmp_path / "Maze__ppo__s1.csv").write_text(header + "9,1,,,,\n")
    (tmp_path / "Maze__ppo__s2.csv").write_text(header + "9,,,,,\n20,1,,,,\n")
    with pytest.raises(SystemExit):
        curves.main(curves.Figure(str(tmp_path)))
    assert "Maze ppo seed 2 has no return up to step 9" in capsys.readouterr().err
    (tmp_path / "Maze__ppo__s1.csv").write_text(header + "9,1,,,,\n30,,,,,\n")
    curves.main(curves.Figure(str(tmp_path)))  # one's returns end before the other's begin: a figure without a curve
    assert "| ppo | 1.000 ± 0.000 |" in capsys.readouterr().out


def test_two_runs_do_not_become_one_file(trained, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        curves.main(curves.Export((str(trained), str(trained)), str(tmp_path)))
    assert stop.value.code == 2 and "--label" in capsys.readouterr().err


def test_most_likely_of_a_gaussian_is_its_mean():
    agent = SimpleNamespace(network=lambda obs: obs + 1, actor=lambda hidden: 2 * hidden)
    space = gym.spaces.Box(-1, 1, (2,))
    assert evaluate.most_likely(agent, torch.tensor([[0.0, 3.0]]), space).tolist() == [[2.0, 8.0]]


def test_small_errors_are_not_rounded_away():
    assert curves.with_error(0.937, 0.0123) == "0.937 ± 0.012" and curves.with_error(0.937, 0.00034) == "0.937 ± 0.0003"
    assert curves.with_error(12.34, 0.04) == "12.3 ± 0.04" and curves.with_error(0.5, 0.0) == "0.500 ± 0.000"
    assert curves.with_error(0.5, np.nan) == curves.with_error(0.5, None) == "0.500"  # a single seed has none


def test_seeds_in_words():
    assert curves.seed_counts({"sprl": [1] * 6, "ppo": [1] * 6}) == "6 seeds"
    found = curves.seed_counts({"sprl": [1] * 3, "ppo": [1] * 3, "eco": [1], "icm": [1], "gt-grid": [1]})
    assert found == "1 seed, SPRL and PPO 3"
    assert curves.seed_counts({"sprl": [1] * 3, "eco": [1], "k5": [1] * 3, "icm": [1] * 3}) == "3 seeds, ECO 1"


def test_one_seed_among_means_is_thin(tmp_path, monkeypatch):
    """A panel with two seeds of SPRL and one of PPO, which is drawn first and dashed; alone it would not be thin."""
    for name in ("sprl__s1", "sprl__s2", "ppo__s1"):
        write_csv(tmp_path / f"Maze__{name}.csv", [(50, 0.5), (100, 0.6)])
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    runs = curves.read_folder(tmp_path)
    curves.draw(runs, "", 1, False)
    curves.draw({"Maze": {"ppo": runs["Maze"]["ppo"]}}, "", 1, False)
    both, alone = ([(line.get_linewidth(), line.get_linestyle()) for line in f.axes[0].lines] for f in drawn)
    assert both == [(0.9, "--"), (1.8, "-")] and alone == [(1.8, "--")]
    assert drawn[0].legends[0].get_title().get_text() == "mean and standard error over seeds; thin: one seed"


def test_the_axis_says_success(tmp_path, monkeypatch):
    """Only where the return is the success rate in every row of every run, as on Fetch; all 0 is any task's start."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    for returns, successes, label in (
        ((0.25, 0.5), (0.25, 0.5), "success rate"),
        ((0.25, 0.5), (0.25, 0.625), "episode return"),
        ((0.0, 0.0), (0.0, 0.0), "episode return"),
    ):
        rows = [{"step": 50 * i + 50, "return": returns[i], "success": successes[i]} for i in range(2)]
        curves.write_run(tmp_path / "Reach__ppo__s1.csv", rows, {"command": "python x.py", "commit": "c0"})
        curves.main(curves.Figure(str(tmp_path)))
        assert drawn.pop().axes[0].get_ylabel() == label
        assert f"| final {'success' if 'succ' in label else 'return'} | area |" in (tmp_path / "table.md").read_text()


def test_the_claim_stays(tmp_path):
    """A figure that is drawn anew keeps the claim that benchmark.sh wrote above the table, unless told another."""
    write_csv(tmp_path / "Maze__ppo__s1.csv", [(50, 0.5)])
    for claim, first in (("A < B.", "A < B."), (None, "A < B."), ("C.", "C."), ("", ""), (None, "")):
        curves.main(curves.Figure(str(tmp_path), claim=claim))
        text = (tmp_path / "table.md").read_text()
        assert curves.read_claim(tmp_path) == first and text.startswith(f"The paper's claim: {first}") == bool(first)


def test_wrong_command_lines_are_one_line(monkeypatch, capsys):
    for kind, flags, words in (
        (curves.Figure, "x --smooth abc", ["--smooth", "'abc'", "INT"]),
        (curves.Figure, "", ["folder of the CSV files"]),
        (curves.Export | curves.Figure, "", ["export, figure"]),
        (curves.Export | curves.Figure, "draw", ["draw", "export, figure"]),
        (evaluate.Args, "agent.pt --episode 3", ["--episode", "--episodes INT"]),
        (evaluate.Args, "agent.pt --seed", ["--seed"]),
    ):
        monkeypatch.setattr(sys, "argv", ["analysis/x.py", *flags.split()])
        error = refused(common.parse_args, kind, capsys)
        assert error.startswith("x.py: error: ") and all(word in error for word in words) and "──" not in error
