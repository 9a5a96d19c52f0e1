"""A run that is killed 20 times, at random moments and inside its checkpoints, ends as if nothing had happened."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import BATCH, SPRL, read_charts

ITERATIONS, INTERVAL = 36, 2 * BATCH
CHEAP = f"{SPRL} --update-epochs 1 --heldout-pairs 200"
FLAGS = f"{CHEAP} --save-ring --total-timesteps {ITERATIONS * BATCH} --checkpoint-interval {INTERVAL}"
IN_A_CHECKPOINT = [(kind, n) for kind in ("write", "before rename", "after rename") for n in (1, 2)]


@pytest.fixture
def lives(tmp_path):
    """lives(argv, death=None) runs the script once, to its end or its death; see forker.py."""
    command = [sys.executable, str(Path(__file__).with_name("forker.py"))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def live(argv, death=None):
        process.stdin.write(json.dumps({"argv": argv.split(), "cwd": str(tmp_path), "death": death}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        return answer["status"], *answer["seconds"]

    yield live
    process.stdin.close()
    process.wait(60)


def read_checkpoint(folder):
    """None if there is none; a corrupt one raises."""
    path = folder / "agent.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def test_killed_twenty_times(lives, tmp_path):
    """No checkpoint is ever corrupt; a life goes on from the last one and never repeats more than one interval; charts,
    history, networks, optimisers, ring, worlds and random states end bit by bit as an unbroken run's."""
    status, start_up, rest = lives(f"{FLAGS} --run-name whole")
    assert status == 0, (tmp_path / "stderr").read_text()
    rng, iteration = random.Random(8), rest / ITERATIONS
    deaths = [*IN_A_CHECKPOINT, *(("start", rng.uniform(0, start_up)) for _ in range(4))]
    deaths += [("iterations", rng.randrange(3), rng.uniform(0, 1.5 * iteration)) for _ in range(20 - len(deaths))]
    rng.shuffle(deaths)

    kills, attempt, ends = 0, 0, []
    for death in [*deaths, None]:
        while True:
            folder = tmp_path / f"runs/{attempt}"
            before, known = read_checkpoint(folder), sorted(folder.glob("events*"))
            start = before["global_step"] if before else 0
            flags = f"--resume {folder}/agent.pt" if before else f"{FLAGS} --run-name {attempt}"
            status, *_ = lives(flags, death)
            assert status in (0, -signal.SIGKILL), (tmp_path / "stderr").read_text()[-2000:]
            written = [path for path in sorted(folder.glob("events*")) if path not in known]
            ends += [(attempt, written)]
            after = read_checkpoint(folder)
            saved, steps = after["global_step"] if after else 0, sorted(read_charts(written))
            assert steps == list(range(start + BATCH, start + BATCH * (len(steps) + 1), BATCH))
            assert start <= saved and (steps or [0])[-1] - saved <= INTERVAL
            if status == 0:
                attempt += 1  # the end of all deaths, or a machine that was faster than death
            if death is None or status != 0:
                break
        if death and death[0] in ("write", "before rename", "after rename"):
            assert saved == start + INTERVAL * (death[1] - (death[0] != "after rename"))
            assert (folder / "agent.pt.tmp").exists() == (death[0] != "after rename")
        kills += status != 0
    assert kills == 20

    whole, charts = read_checkpoint(tmp_path / "runs/whole"), read_charts(sorted((tmp_path / "runs/whole").glob("ev*")))
    assert len(whole["history"]) == len(charts) == ITERATIONS
    for number in range(attempt):
        mine = read_checkpoint(tmp_path / f"runs/{number}")
        different = [key for key in whole if not same(mine[key], whole[key])]
        assert set(different) <= {"args", "command", "elapsed"}, different
        assert read_charts([path for run, paths in ends if run == number for path in paths]) == charts
