"""Wrong command lines and broken files: one line that names what is wrong and what is right, exit code 2, no trace."""

import os
import pickle
import sys
import types

import pytest
import torch
from conftest import SCRIPTS, steps

SMALL = "--num-envs 2 --num-steps 8 --num-minibatches 2"
MINIGRID, ATARI, FETCH = "ppo_sprl_minigrid.py", "ppo_sprl_atari.py", "ppo_sprl_fetch.py"
DMLAB, ECO, ICM, GTGRID = "ppo_sprl_dmlab.py", "ppo_eco.py", "ppo_icm.py", "ppo_gtgrid.py"
SPRL, LEARNS = (MINIGRID, ATARI, FETCH, DMLAB), (MINIGRID, ATARI, FETCH, DMLAB, ECO)
ALL, LAB = (*SPRL, ECO, ICM, GTGRID), (DMLAB, ECO, ICM, GTGRID)
MAZE, MAZES = "explore_goal_locations_small", ("explore_goal_locations_large", "explore_object_rewards_many")

# scripts, flags, what the line must name
TABLE = [
    # types
    (ALL, "--seed 1.5", ("--seed", "1.5", "INT")),
    (ALL, "--learning-rate fast", ("--learning-rate", "fast", "FLOAT")),
    (ALL, "--num-envs twelve", ("--num-envs", "twelve", "INT")),
    (ALL, "--gamma", ("--gamma",)),
    (ALL, "--cuda maybe", ("maybe",)),
    (ALL, "--no-such-flag 3", ("--no-such-flag", "--help")),
    (ALL, "stray", ("stray", "--help")),
    ((MINIGRID, ECO, ICM, GTGRID), "--encoding rgb", ("--encoding", "rgb", "onehot", "raw")),
    ((MINIGRID,), "--rnet psychic", ("--rnet", "psychic", "learned", "oracle")),
    ((ATARI,), "--rnet-input sound", ("--rnet-input", "sound", "pixel-difference")),
    (LEARNS, "--rnet-intervals 1 2", ("--rnet-intervals", "3 values")),
    (LAB, f"--env-id {MAZE} --engine doom", ("--engine", "doom", "auto", "deepmind_lab", "labmaze")),
    (LAB, f"--env-id {MAZE} --renderer vulkan", ("--renderer", "vulkan", "software", "hardware")),
    (LAB, f"--env-id {MAZE} --level-cache", ("--level-cache",)),
    # ranges
    (ALL, "--seed -1", ("--seed", "-1", "0 to 1073741824")),
    (ALL, "--total-timesteps 0", ("--total-timesteps", "0", "1 to 2147483647")),
    (ALL, "--num-envs 0", ("--num-envs", "0", "1 to 65536")),
    (ALL, "--num-steps -5", ("--num-steps", "-5")),
    (ALL, "--gamma 1.01", ("--gamma", "1.01", "0 to 1")),
    (ALL, "--gae-lambda -0.1", ("--gae-lambda", "-0.1", "0 to 1")),
    (ALL, "--learning-rate nan", ("--learning-rate", "nan")),
    (ALL, "--learning-rate inf", ("--learning-rate", "inf")),
    (ALL, "--max-grad-norm -1", ("--max-grad-norm", "-1")),
    (ALL, "--clip-coef -0.1", ("--clip-coef", "-0.1")),
    (ALL, "--stack-observations -1", ("--stack-observations", "-1")),
    ((MINIGRID, ATARI, FETCH, GTGRID), "--max-episode-steps 0", ("--max-episode-steps", "0")),
    (ALL, "--checkpoint-interval -1", ("--checkpoint-interval", "-1")),
    (SPRL, "--cost-scale -0.02", ("--cost-scale", "-0.02")),
    (SPRL, "--cost-percentile 101", ("--cost-percentile", "101", "0 to 100")),
    (SPRL, "--tolerance -1", ("--tolerance", "-1")),
    (SPRL, "--num-tolerance-samples 0", ("--num-tolerance-samples", "0")),
    (SPRL, "--cost-bias nan", ("--cost-bias", "nan")),
    (LEARNS, "--k -2", ("--k", "-2", "1 to 2147483647")),
    (LEARNS, "--label-smoothing 2", ("--label-smoothing", "2.0", "0 to 1")),
    (LEARNS, "--rnet-intervals 0 1 1", ("--rnet-intervals", "(0, 1, 1)")),
    (LEARNS, "--rnet-batch-size 0", ("--rnet-batch-size", "0")),
    (LEARNS, "--rnet-ready-accuracy 1.5", ("--rnet-ready-accuracy", "1.5")),
    (LEARNS, "--heldout-pairs 0", ("--heldout-pairs", "0")),
    ((ECO, ICM, GTGRID), "--bonus-scale -1", ("--bonus-scale", "-1")),
    ((ECO,), "--memory-size 0", ("--memory-size", "0")),
    ((ECO,), "--memory-percentile -3", ("--memory-percentile", "-3")),
    ((ICM,), "--forward-loss-weight 1.2", ("--forward-loss-weight", "1.2", "0 to 1")),
    ((GTGRID,), "--cell-size 0", ("--cell-size", "0")),
    ((FETCH, ECO, ICM), "--n-substeps 0", ("--n-substeps", "0")),
    ((FETCH, ECO, ICM), "--action-noise -1", ("--action-noise", "-1")),
    ((ATARI, DMLAB, ECO), "--rnet-width 0", ("--rnet-width", "0")),
    # combinations
    (ALL, "--num-envs 5 --num-steps 7 --num-minibatches 4", ("--num-minibatches", "4", "35")),
    (SPRL, "--ring-size 30", ("--ring-size", "30", "or more")),
    (LEARNS, "--ring-size 3000 --rnet-start 3001", ("--rnet-start", "3001", "3000")),
    ((ECO,), "--ring-size 20", ("--ring-size", "20", "or more")),
    # ids
    ((MINIGRID,), "--env-id MiniGrid-FourRoom-7x7-v0", ("--env-id", "FourRoom-7x7", "MiniGrid-FourRooms-7x7-v0")),
    ((ATARI,), "--env-id Freway-v5", ("--env-id", "Freway-v5", "Freeway-v5")),
    ((FETCH,), "--env-id FetchPull-v4", ("--env-id", "FetchPull-v4", "FetchPush-v4")),
    ((ECO, ICM), "--env-id Doom", ("--env-id", "Doom", "MontezumaRevenge-v5", "FetchReach-v4")),
    ((ECO, ICM), "--env-id FetchPull-v4", ("--env-id", "FetchPull-v4", "FetchPush-v4")),
    ((GTGRID,), "--env-id Freeway-v5", ("--env-id", "Freeway-v5", "MontezumaRevenge-v5")),
    ((GTGRID,), "--env-id FetchReach-v4", ("--env-id", "FetchReach-v4", "MontezumaRevenge-v5")),
    (LAB, "--env-id explore_goal_locations_tiny", ("--env-id", "explore_goal_locations_tiny", MAZE, *MAZES)),
    (LAB, "--env-id Lab", ("--env-id", "Lab", MAZE)),
    (LAB, f"--env-id {MAZE} --engine deepmind_lab", ("--engine", "deepmind_lab", "labmaze")),
    ((ECO, ICM, GTGRID), "--engine labmaze", ("--engine labmaze", "MiniGrid-FourRooms-7x7-v0", "dmlab")),
    ((ECO, ICM), "--env-id FetchReach-v4 --encoding raw", ("--encoding raw", "FetchReach-v4", "minigrid")),
    ((ECO, ICM), "--env-id Freeway-v5 --n-substeps 4", ("--n-substeps 4", "Freeway-v5", "fetch")),
    ((ECO,), "--rnet-width 16", ("--rnet-width 16", "atari, dmlab")),
    ((ECO, ICM, GTGRID), f"--env-id {MAZE} --max-episode-steps 9", ("--max-episode-steps 9", MAZE, "minigrid, atari")),
    (LAB, f"--env-id {MAZE} --renderer hardware", ("--renderer hardware", "labmaze", "deepmind_lab")),
    (LAB, f"--env-id {MAZE} --level-cache maps", ("--level-cache maps", "labmaze", "deepmind_lab")),
    # too large
    (ALL, "--seed 4294967296", ("--seed 4294967296", "0 to 1073741824")),
    (ALL, f"--total-timesteps {10**30}", (f"--total-timesteps {10**30}", "1 to 2147483647")),
    (ALL, f"--num-steps {10**12}", (f"--num-steps {10**12}", "1 to 2147483647")),
    (ALL, "--num-steps 2000000000", ("--num-steps", "(2000000", "GB")),
    (ALL, "--num-envs 1000000", ("--num-envs 1000000", "1 to 65536")),
    (ALL, "--stack-observations 1001", ("--stack-observations 1001", "0 to 1000")),
    (ALL, "--seed 1e400", ("--seed", "1e400")),
    (ALL, "--learning-rate 1e400", ("--learning-rate inf",)),
    (LEARNS, f"--ring-size {10**12}", (f"--ring-size {10**12}", "1 to 2147483647")),
    (LEARNS, "--ring-size 2000000000", ("--ring-size", "(1000000000, 2, ", "GB")),
    ((ATARI, DMLAB, ECO), "--rnet-width 1000000", ("--rnet-width 1000000", "1 to 1024")),
    ((ECO,), "--memory-size 2000000000", ("--memory-size", "(2, 2000000000, ", "GB")),
    ((GTGRID,), f"--cell-size {10**24}", (f"--cell-size {10**24}", "1 to 65536")),
    ((MINIGRID, ATARI, FETCH), f"--max-episode-steps {10**12}", (f"--max-episode-steps {10**12}", "1 to 10000000")),
    ((FETCH, ECO, ICM), f"--n-substeps {10**12}", (f"--n-substeps {10**12}", "1 to 65536")),
    # combinations that cannot be
    ((MINIGRID,), "--rnet oracle --env-id MiniGrid-Dynamic-Obstacles-6x6-v0", ("--rnet oracle", "--rnet learned")),
    ((ECO, ICM, GTGRID), "--env-id", ("--env-id",)),
    # files
    (ALL, "--resume ''", ("--resume ", "no such file")),
    (ALL, "--resume .", ("--resume .", "no such file")),
    (ALL, "--resume nameless.pt", ("--resume nameless.pt", "command")),
    (ALL, "--run-name ''", ("--run-name ", "below runs/")),
    (ALL, "--run-name ..", ("--run-name ..", "below runs/")),
    (ALL, "--run-name a/../../b", ("--run-name a/../../b", "below runs/")),
    (ALL, "--resume nowhere/agent.pt", ("--resume", "nowhere/agent.pt")),
    (ALL, "--resume empty.pt", ("--resume", "empty.pt")),
    (ALL, "--resume truncated.pt", ("--resume", "truncated.pt")),
    (ALL, "--resume hostile.pt", ("--resume", "hostile.pt")),
    (ALL, "--resume list.pt", ("--resume", "list.pt")),
    (ALL, "--resume other.pt", ("--resume", "other.pt", "ppo_other.py")),
    (ALL, "--resume bare.pt", ("--resume", "bare.pt")),
    (ALL, "--run-name file/x", ("--run-name", "file/x")),
    (ALL, "--run-name /proc/x", ("--run-name", "/proc/x")),  # nobody may write there, root included
]
# of the rows for all scripts each is tried on two, in turn: they share the code that judges them
CASES = [
    (name, flags, words)
    for row, (names, flags, words) in enumerate(TABLE)
    for i, name in enumerate(names)
    if name in SCRIPTS and (len(names) < len(ALL) or (i - row) % 3 == 0)
]


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("owned",)


@pytest.fixture
def broken_files(tmp_path, monkeypatch):
    """Beside the run: files that are no checkpoints, one of another script, and a file where a folder should be. There
    is no DeepMind Lab."""
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    (tmp_path / "empty.pt").touch()
    whole = {"script": "ppo_other.py", "args": {"env_id": "World-v0"}, "command": "", "iteration": 1, "global_step": 1}
    torch.save(whole, tmp_path / "other.pt")
    torch.save({"script": "ppo_other.py", "args": whole["args"]}, tmp_path / "nameless.pt")
    torch.save({"script": "ppo_sprl_minigrid.py"}, tmp_path / "bare.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "truncated.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:-200])
    (tmp_path / "hostile.pt").write_bytes(pickle.dumps(Hostile()))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").touch()


def test_the_table_is_long_enough():
    assert len(CASES) >= 100


@pytest.mark.parametrize("name, flags, words", CASES)
def test_wrong_invocation(name, flags, words, run, broken_files, tmp_path, capfd):
    before = sorted(tmp_path.rglob("*"))
    first = [flag for flag in SMALL.split("--") if flag.split()[:1] != flags.replace("--", "").split()[:1]]
    with pytest.raises(SystemExit) as end:
        run(f"{'--'.join(first)} {'' if 'timesteps' in flags else '--total-timesteps 16'} {flags}", name)
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and said.count("\n") == 0, said
    assert said.startswith(f"{name}: error: ") and all(word in said for word in words), said
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


@pytest.mark.parametrize("missing", ["agent", "optimizer", "worlds", "next_obs", "numpy_rng", "elapsed", "history"])
def test_checkpoint_that_lacks_something(run, tmp_path, capfd, missing):
    run(f"{SMALL} --cost-scale 0 --run-name one{steps(1)}")
    path = tmp_path / "runs" / "one" / "agent.pt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint[missing]
    torch.save(checkpoint, path)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        run(f"--resume {path}{steps(2)}")
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and said.count("\n") == 0 and f"--resume {path} does not fit" in said, said


@pytest.mark.parametrize("other", ["MiniGrid-KeyDoors-7x7-v0", "MiniGrid-FourRooms-11x11-v0"])
def test_checkpoint_of_another_world(run, capfd, other):
    run(f"{SMALL} --cost-scale 0 --run-name one{steps(1)}")
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        run(f"--resume runs/one/agent.pt --env-id {other}")
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and "\n" not in said and other in said and "FourRooms-7x7" in said


@pytest.mark.parametrize("name", LAB)
@pytest.mark.parametrize(
    "flags, words",
    [
        (
            "--resume maze.pt --engine deepmind_lab",
            ("--engine deepmind_lab with --resume maze.pt", "accepted: labmaze"),
        ),
        (f"--env-id {MAZE} --engine deepmind_lab --level-cache maze.pt", ("--level-cache maze.pt", "a folder")),
        (f"--env-id {MAZE} --engine deepmind_lab --level-cache maze.pt/a", ("--level-cache maze.pt/a", "a folder")),
    ],
)
def test_with_the_real_engine(name, flags, words, run, tmp_path, monkeypatch, capfd):
    """A checkpoint of the stand-in, and a level cache that is no folder; nothing of the engine is started."""
    monkeypatch.setitem(sys.modules, "deepmind_lab", types.ModuleType("deepmind_lab"))
    settings = {"env_id": MAZE, "engine": "labmaze", "num_envs": 2, "num_steps": 8}
    whole = {"script": name, "args": settings, "command": "", "iteration": 1, "global_step": 16}
    torch.save(whole, tmp_path / "maze.pt")
    with pytest.raises(SystemExit) as end:
        run(flags if "--resume" in flags else f"{SMALL} {flags}", name)
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and "\n" not in said and said.startswith(f"{name}: error: "), said
    assert all(word in said for word in words) and [path.name for path in tmp_path.iterdir()] == ["maze.pt"], said


@pytest.mark.parametrize("name", [ECO, ICM, GTGRID])
def test_baseline_without_its_sibling(name, run, monkeypatch, capfd):
    """Copied alone into a folder, a baseline has no DeepMind Lab, and says what it lacks."""
    monkeypatch.setitem(sys.modules, "ppo_sprl_dmlab", None)
    with pytest.raises(SystemExit) as end:
        run(f"{SMALL} --env-id {MAZE}", name)
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and said == f"{name}: error: DeepMind Lab needs ppo_sprl_dmlab.py beside this file", said
