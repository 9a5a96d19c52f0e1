"""The study of the RNet alone: pairs against a slow reading, and a whole run."""

import csv
import sys

import numpy as np
import torch
from conftest import CANONICAL, ROOT, load, random_segments, slow_ends

sys.path.insert(0, str(ROOT / "analysis"))

import rnet_study


def test_lone_positives_are_all_that_have_no_negative():
    """k = 2, Delta- = 4: a state 1 to 5 steps before its segment's end, and a state at most 2 steps behind it."""
    np.random.seed(0)
    segment_steps = random_segments(np.random.default_rng(0), 60, 3, 0.1)
    ends = slow_ends(segment_steps)
    expected = {(t, n) for t, n in np.ndindex(60, 3) if 1 <= ends[t, n] - t < 6}
    anchors, positives, envs = rnet_study.lone_positives(load(CANONICAL), segment_steps, 2, 4)
    assert set(zip(anchors.tolist(), envs.tolist())) == expected and len(anchors) == len(expected)
    assert ((positives > anchors) & (positives <= np.minimum(anchors + 2, ends[anchors, envs]))).all()


def test_loss_without_lone_positives_is_the_scripts():
    script = load("ppo_sprl_fetch.py")
    torch.manual_seed(0)
    rnet, triplets = script.StateRNet(16), torch.randn(3, 8, 16)
    expected, accuracy = script.rnet_loss(rnet, *triplets, 0.1)
    loss, same = rnet_study.loss_with_lone_positives(rnet, triplets, torch.zeros(2, 0, 16), 0.1)
    torch.testing.assert_close(loss, expected)
    assert same == accuracy


def test_rows_of_a_study(tmp_path, capsys):
    """Both settings on the same steps: as many triplets in both, another accuracy; rows are added to the file."""
    flags = "--num-envs 4 --num-steps 32 --rnet-start 256 --rnet-intervals 256 256 256 --negative-bias 3 --k 2 "
    flags += "--max-episode-steps 12 --heldout-pairs 64 --rnet-batch-size 16"
    for label, keep in (("dropped", False), ("kept", True)):
        out = str(tmp_path / "study.csv")
        rnet_study.main(rnet_study.Args("ppo_sprl_fetch.py", flags, 1024, label, keep, out))
    lines = open(out).read().splitlines()
    assert sum(line.startswith("# command: python analysis/rnet_study.py") for line in lines) == 2
    assert sum(line.startswith("# commit: ") for line in lines) == 2
    rows = list(csv.DictReader(line for line in lines if line[0] != "#"))
    assert [row["label"] for row in rows] == 4 * ["dropped"] + 4 * ["kept"]
    assert [row["triplets"] for row in rows[:4]] == [row["triplets"] for row in rows[4:]]
    assert all(0 <= float(row["heldout_accuracy"]) <= 1 and float(row["weight_norm"]) > 1 for row in rows)
    assert [row["train_accuracy"] for row in rows[:4]] != [row["train_accuracy"] for row in rows[4:]]
