"""What the five scripts with a learned RNet have each in a copy of its own: gate, held-out accuracy, penalty of the
weights, and what is said where there are no triplets. Each script is run."""

import sys

import pytest
import torch
from conftest import CANONICAL
from test_baselines import traced
from tqdm import tqdm

BATCH = 4 * 16
SMALL = (
    "--num-envs 4 --num-steps 16 --num-minibatches 1 --update-epochs 1 --k 2 --negative-bias 1 --ring-size 600 "
    f"--rnet-start {BATCH} --rnet-intervals {BATCH} {BATCH} {BATCH} --rnet-triplets 16 --rnet-batch-size 16 "
    "--heldout-pairs 64 --rnet-reliable-accuracy 0.75"
)
COST = "--cost-scale 0.1 --cost-bias 0.25 --num-tolerance-samples 3"
FLAGS = {
    CANONICAL: f"{COST} --max-episode-steps 20",
    "ppo_sprl_fetch.py": f"{COST} --max-episode-steps 12",
    "ppo_sprl_atari.py": f"{COST} --max-episode-steps 25 --env-id Asteroids-v5 --rnet-width 4",
    "ppo_sprl_dmlab.py": f"{COST} --engine labmaze --rnet-width 4",
    "ppo_eco.py": "--bonus-scale 0.1 --memory-size 3 --max-episode-steps 20",
}


@pytest.fixture(params=FLAGS)
def name(request):
    return request.param


def flags_of(name, run_name, iterations):
    return f"{SMALL} {FLAGS[name]} --run-name {run_name} --total-timesteps {iterations * BATCH}"


def test_gate_is_latched(run, name, monkeypatch, capfd):
    """Held-out accuracies of 0.7, 0.8 and then 0.1: there is a cost, or a bonus, from the third iteration on. Training
    accuracies of 0.99 open nothing. Seven trainings with triplets are no reason to say that there are none."""
    is_charged, triplets = [], []

    def look(*_):
        shot = sys._getframe(1).f_globals
        row, totals = shot["history"][-1], shot["total_rewards"].numpy()
        is_charged.append(bool((totals[shot["rewards"] == 0] != 0).any()))  # by the bias at least
        triplets.append(row["rnet/triplets"])
        row |= {"rnet/heldout_accuracy": [0.7, 0.8, *5 * [0.1]][len(is_charged) - 1], "rnet/train_accuracy": 0.99}

    monkeypatch.setattr(tqdm, "set_postfix", look)
    run(flags_of(name, "gate", 7), name)
    assert is_charged == [False, False, True, True, True, True, True]
    assert min(triplets) > 0 and "no triplets" not in capfd.readouterr().err


def test_training_without_triplets_is_told(run, name, capfd):
    """Once, after five of seven."""
    result = run(f"{flags_of(name, 'none', 7)} --negative-bias 1000", name)
    assert [row["rnet/triplets"] for row in result["history"]] == 7 * [0]
    assert capfd.readouterr().err.count("no triplets in 5 RNet trainings: too dense rewards or too short episodes") == 1


def test_penalty_is_added_to_the_gradient(run, name):
    """The first training, of one minibatch. Against 1e6 w the gradient of the loss is nothing, and Adam's first step
    has the learning rate's size: by that much each weight moves towards 0. Decoupled, w would be multiplied."""
    flags = f"--rnet-start {2 * BATCH} --rnet-learning-rate 0.25 --rnet-weight-decay 1e6"
    (before, after), _ = traced(run, f"{flags_of(name, 'penalty', 2)} {flags}", name, "rnet")
    for old, new in zip(before.rnet.parameters(), after.rnet.parameters(), strict=True):
        large = old.abs() > 1e-3
        torch.testing.assert_close(new[large], (old - 0.25 * old.sign())[large], rtol=1e-3, atol=1e-3)


def test_heldout_pairs_are_judged_before_the_training(run, name):
    """Two runs whose second training has another learning rate: the accuracy that it begins with is the same. The RNet
    is made to say what any change of its weights changes."""
    accuracies, rnets = [], []
    for rate in (0.001, 0.1):

        def change(shot, rate=rate):
            shot["args"].rnet_learning_rate = rate
            shot["rnet"].compare = lambda early, late: (1e3 * (early + late).sum(-1)).sin()

        trace, _ = traced(run, flags_of(name, f"rate{rate}", 2), name, "rnet", change)
        accuracies.append(trace[1].charts["rnet/heldout_accuracy"])
        rnets.append(trace[1].rnet)
    assert accuracies[0] == accuracies[1] not in (0, 0.5, 1)
    assert not torch.equal(rnets[0].early.weight, rnets[1].early.weight)
