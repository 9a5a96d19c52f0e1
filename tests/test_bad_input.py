"""Wrong command lines and broken files: one line that names what is wrong and what is right, exit code 2, no trace."""

import gc
import os
import pickle
import sys
import types

import pytest
import torch
from conftest import BATCH, CANONICAL, PPO, SCRIPTS, steps

MINIGRID, ATARI, FETCH, DMLAB = "ppo_sprl_minigrid.py", "ppo_sprl_atari.py", "ppo_sprl_fetch.py", "ppo_sprl_dmlab.py"
ECO, ICM, GTGRID = "ppo_eco.py", "ppo_icm.py", "ppo_gtgrid.py"
SPRL, BASELINES = (MINIGRID, ATARI, FETCH, DMLAB), (ECO, ICM, GTGRID)
LEARNS, ALL, LAB = (*SPRL, ECO), (*SPRL, *BASELINES), (DMLAB, *BASELINES)
GRID = (MINIGRID, *BASELINES)
MAZE, MAZES = "explore_goal_locations_small", ("explore_goal_locations_large", "explore_object_rewards_many")
SMALL = {"num-envs": 2, "num-steps": 8, "num-minibatches": 2, "total-timesteps": 16}
REFUSED = "accepted: a whole agent.pt of"

# scripts, flags, what the line must name
TABLE = [
    # types
    (ALL, "--seed 1.5", ("--seed", "1.5", "INT")),
    (ALL, "--learning-rate fast", ("--learning-rate", "fast", "FLOAT")),
    (ALL, "--num-envs twelve", ("--num-envs", "twelve", "INT")),
    (ALL, "--gamma", ("--gamma",)),
    (ALL, "--cuda maybe", ("maybe",)),
    (ALL, "--no-such-flag 3", ("--no-such-flag",)),
    (ALL, "stray", ("stray",)),
    (ALL, "--seed 1e400", ("--seed", "1e400")),
    (GRID, "--encoding rgb", ("--encoding", "rgb", "onehot", "raw")),
    ((MINIGRID,), "--rnet psychic", ("--rnet", "psychic", "learned", "oracle")),
    ((ATARI,), "--rnet-input sound", ("--rnet-input", "sound", "pixel-difference")),
    (LEARNS, "--rnet-intervals 1 2", ("--rnet-intervals", "3 values")),
    (LAB, f"--env-id {MAZE} --engine doom", ("--engine", "doom", "auto", "deepmind_lab", "labmaze")),
    (LAB, f"--env-id {MAZE} --renderer vulkan", ("--renderer", "vulkan", "software", "hardware")),
    (LAB, f"--env-id {MAZE} --level-cache", ("--level-cache",)),
    (BASELINES, "--env-id", ("--env-id",)),
    # ranges
    (ALL, "--seed -1", ("--seed -1", "0 to 2147483647")),
    (ALL, "--total-timesteps 0", ("--total-timesteps 0", "1 to 2147483647")),
    (ALL, "--num-envs 0", ("--num-envs 0", "1 to ")),
    (ALL, "--num-steps -5", ("--num-steps -5", "1 to ")),
    (ALL, "--num-minibatches 0", ("--num-minibatches 0", "1 to ")),
    (ALL, "--gamma 1.01", ("--gamma 1.01", "0 to 1")),
    (ALL, "--gae-lambda -0.1", ("--gae-lambda -0.1", "0 to 1")),
    (ALL, "--learning-rate nan", ("--learning-rate nan",)),
    (ALL, "--learning-rate 1e400", ("--learning-rate inf",)),
    (ALL, "--max-grad-norm -1", ("--max-grad-norm -1",)),
    (ALL, "--clip-coef -0.1", ("--clip-coef -0.1",)),
    (ALL, "--checkpoint-interval -1", ("--checkpoint-interval -1",)),
    (ALL, "--seed 4294967296", ("--seed 4294967296", "0 to 2147483647")),
    (ALL, f"--total-timesteps {10**30}", (f"--total-timesteps {10**30}", "1 to 2147483647")),
    ((MINIGRID, ATARI, DMLAB, *BASELINES), "--stack-observations -1", ("--stack-observations -1", "0 to ")),
    ((MINIGRID, ATARI, FETCH, GTGRID), "--max-episode-steps 0", ("--max-episode-steps 0", "1 to ")),
    (SPRL, "--cost-scale -0.02", ("--cost-scale -0.02",)),
    (SPRL, "--cost-percentile 101", ("--cost-percentile 101", "0 to 100")),
    (SPRL, "--tolerance -1", ("--tolerance -1", "0 to ")),
    (SPRL, "--num-tolerance-samples 0", ("--num-tolerance-samples 0", "1 to ")),
    (SPRL, "--cost-bias nan", ("--cost-bias nan",)),
    (LEARNS, "--k -2", ("--k -2", "1 to 2147483647")),
    (LEARNS, "--label-smoothing 2", ("--label-smoothing 2.0", "0 to 1")),
    (LEARNS, "--rnet-batch-size 0", ("--rnet-batch-size 0",)),
    (LEARNS, "--rnet-reliable-accuracy 1.5", ("--rnet-reliable-accuracy 1.5", "0 to 1")),
    (LEARNS, "--ring-size 0", ("--ring-size 0",)),
    (BASELINES, "--bonus-scale -1", ("--bonus-scale -1",)),
    ((ECO,), "--memory-size 0", ("--memory-size 0",)),
    ((ECO,), "--memory-percentile -3", ("--memory-percentile -3", "0 to 100")),
    ((GTGRID,), "--cell-size 0", ("--cell-size 0",)),
    ((FETCH, ECO, ICM), "--n-substeps 0", ("--n-substeps 0",)),
    ((FETCH, ECO, ICM), "--action-noise -1", ("--action-noise -1",)),
    ((ATARI, DMLAB, ECO), "--rnet-width 0", ("--rnet-width 0",)),
    # ids
    ((MINIGRID,), "--env-id MiniGrid-FourRoom-7x7-v0", ("--env-id MiniGrid-FourRoom-7x7-v0", "any MiniGrid world")),
    ((MINIGRID,), "--env-id CartPole-v1", ("--env-id CartPole-v1", "any MiniGrid world")),
    ((ATARI,), "--env-id Freway-v5", ("--env-id Freway-v5", "Freeway-v5")),
    ((FETCH,), "--env-id FetchPull-v4", ("--env-id FetchPull-v4", "FetchPush-v4")),
    ((DMLAB,), "--env-id Lab", ("--env-id Lab", MAZE, *MAZES)),
    (BASELINES, "--env-id Doom", ("--env-id Doom", "any MiniGrid world")),
    (BASELINES, "--env-id MiniGrid-Nowhere-v0", ("--env-id MiniGrid-Nowhere-v0", "any MiniGrid world")),
    ((ECO, ICM), "--env-id FetchPull-v4", ("--env-id FetchPull-v4", "any MiniGrid world")),
    ((GTGRID,), "--env-id Freeway-v5", ("--env-id Freeway-v5", "any MiniGrid world")),
    (LAB, "--env-id explore_goal_locations_tiny", ("--env-id explore_goal_locations_tiny", MAZE, *MAZES)),
    (LAB, f"--env-id {MAZE} --engine deepmind_lab", ("--engine deepmind_lab", "labmaze")),
    # files
    (ALL, "--resume ''", ("--resume ", REFUSED)),
    (ALL, "--resume .", ("--resume .", REFUSED)),
    (ALL, "--resume nowhere/agent.pt", ("--resume nowhere/agent.pt", REFUSED)),
    (ALL, "--resume folder/agent.pt", ("--resume folder/agent.pt", REFUSED)),
    (ALL, "--resume empty/agent.pt", ("--resume empty/agent.pt", REFUSED)),
    (ALL, "--resume truncated/agent.pt", ("--resume truncated/agent.pt", REFUSED)),
    (ALL, "--resume pickled/agent.pt", ("--resume pickled/agent.pt", REFUSED)),
    (ALL, "--resume hostile/agent.pt", ("--resume hostile/agent.pt", REFUSED)),
    (ALL, "--resume list/agent.pt", ("--resume list/agent.pt", REFUSED)),
    (ALL, "--resume bare/agent.pt", ("--resume bare/agent.pt", REFUSED)),
    (ALL, "--resume other/agent.pt", ("--resume other/agent.pt", REFUSED)),
    (ALL, "--resume other/agent.pt.tmp", ("--resume other/agent.pt.tmp", REFUSED)),
    ((MINIGRID, FETCH, *BASELINES), "--run-name taken", ("runs/taken", "a new one")),
    ((MINIGRID, FETCH, *BASELINES), "--run-name taken/file", ("runs/taken-file", "a new one")),
]


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("owned",)


@pytest.fixture
def broken_files(tmp_path, monkeypatch):
    """Beside the run: what is no checkpoint, or of another script, and the folder of an older run. There is no DeepMind
    Lab."""
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    for name in ("empty", "truncated", "pickled", "hostile", "list", "bare", "other", "folder/agent.pt", "runs/taken"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "empty/agent.pt").touch()
    torch.save({"args": {"no_such_setting": 1}, "command": "", "global_step": 16}, tmp_path / "other/agent.pt")
    whole = (tmp_path / "other/agent.pt").read_bytes()
    (tmp_path / "other/agent.pt.tmp").write_bytes(whole)
    (tmp_path / "truncated/agent.pt").write_bytes(whole[:-200])
    (tmp_path / "pickled/agent.pt").write_bytes(pickle.dumps(Hostile()))
    torch.save(Hostile(), tmp_path / "hostile/agent.pt")
    torch.save([1, 2], tmp_path / "list/agent.pt")
    torch.save({"global_step": 16}, tmp_path / "bare/agent.pt")
    (tmp_path / "runs/taken-file").touch()  # what a name with a slash becomes


def read_all(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refuse(run, name, flags, words, folder, capfd):
    """The script refuses the flags with exit code 2 and one line that has the words, and leaves all files alone."""
    before = read_all(folder)
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        run(flags, name)
    said = capfd.readouterr().err.strip()
    assert end.value.code == 2 and "\n" not in said, f"{flags}: {said}"
    assert said.startswith(f"{name}: error: ") and all(word in said for word in words), f"{flags}: {said}"
    assert read_all(folder) == before, f"{flags}: something was written"


@pytest.mark.parametrize("name", SCRIPTS)
def test_wrong_invocations(name, run, broken_files, tmp_path, capfd):
    """Every row that is about this script; of those about all scripts a third, in turn, for they share that code."""
    rows = [
        row for i, row in enumerate(TABLE) if name in row[0] and (len(row[0]) < 7 or (i + ALL.index(name)) % 3 == 0)
    ]
    assert len(rows) > 15
    for _, flags, words in rows:
        small = " ".join(f"--{flag} {value}" for flag, value in SMALL.items() if f"--{flag}" not in flags)
        refuse(run, name, f"{small} {flags}", words, tmp_path, capfd)


@pytest.mark.parametrize("missing", ["agent", "optimizer", "history", "global_step"])
def test_checkpoint_that_lacks_something(run, tmp_path, capfd, missing):
    run(PPO + steps(1))
    gc.collect()  # its bar writes once more as it goes
    path = tmp_path / "runs/small/agent.pt"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint[missing]
    torch.save(checkpoint, path)
    refuse(run, CANONICAL, f"--resume {path}{steps(2)}", (f"--resume {path}", missing), tmp_path, capfd)


def test_checkpoint_of_a_smaller_world(run, tmp_path, capfd):
    run(PPO + steps(1))
    gc.collect()  # its bar writes once more as it goes
    flags = f"--resume runs/small/agent.pt --env-id MiniGrid-FourRooms-11x11-v0 --total-timesteps {2 * BATCH}"
    refuse(run, CANONICAL, flags, ("--resume runs/small/agent.pt", "these settings", "size mismatch"), tmp_path, capfd)


@pytest.mark.parametrize("name", LAB)
@pytest.mark.parametrize("cache", ["file", "file/a"])
def test_level_cache_that_is_no_folder(name, cache, run, tmp_path, monkeypatch, capfd):
    """Nothing of the engine is started."""
    monkeypatch.setitem(sys.modules, "deepmind_lab", types.ModuleType("deepmind_lab"))
    (tmp_path / "file").touch()
    flags = f"--num-envs 2 --env-id {MAZE} --engine deepmind_lab --level-cache {cache}"
    refuse(run, name, flags, (f"--level-cache {cache}", "a folder"), tmp_path, capfd)


@pytest.mark.parametrize("name", BASELINES)
def test_baseline_without_its_sibling(name, run, tmp_path, monkeypatch, capfd):
    """Copied alone into a folder, a baseline has no DeepMind Lab, and says what it lacks."""
    monkeypatch.setitem(sys.modules, "ppo_sprl_dmlab", None)
    refuse(run, name, f"--env-id {MAZE}", ("needs ppo_sprl_dmlab.py beside this file",), tmp_path, capfd)
