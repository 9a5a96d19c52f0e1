"""Whole runs: repeatable, resumable, crash-only, and able to learn."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BATCH, CANONICAL, ORACLE, PPO, ROOT, SPRL, assert_same_parameters, load, parameters, steps
from PIL import Image

CHECKPOINT = "runs/small/agent.pt"
ENDLESS = steps(10**6)


@pytest.fixture
def start(tmp_path):
    """start(flags) starts a run in tmp_path as a process of its own and waits for its first checkpoint."""
    processes = []

    def start(flags, wait_for=CHECKPOINT, **kwargs):
        command = [sys.executable, str(ROOT / CANONICAL), *flags.split()]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kwargs
        processes.append(subprocess.Popen(command, cwd=tmp_path, text=True, **pipes))
        deadline = time.time() + 120
        while wait_for and not (tmp_path / wait_for).exists() and processes[-1].poll() is None:
            assert time.time() < deadline
            time.sleep(0.05)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def history_without_time(result):
    return [{name: value for name, value in row.items() if name != "charts/SPS"} for row in result["history"]]


# REPEATING AND RESUMING ##############################################################################################
def test_seed_decides_everything(run):
    first, again, other = (run(f"{SPRL} --seed {seed} --run-name {i}{steps(4)}") for i, seed in enumerate((1, 1, 2)))
    assert history_without_time(first) == history_without_time(again) != history_without_time(other)
    assert_same_parameters(parameters(first), parameters(again))


@pytest.mark.parametrize("flags", [PPO, SPRL, ORACLE], ids=["ppo", "sprl", "oracle"])
def test_resumed_run_goes_on(run, flags):
    """Networks, optimisers, schedule, counters and history go on; episodes and ring begin anew."""
    before = run(flags + steps(4))
    after = run(f"--resume {CHECKPOINT}{steps(8)}")
    assert after["global_step"] == 2 * before["global_step"] and after["args"].k == before["args"].k
    assert after["history"][:4] == before["history"] and len(after["history"]) == 8
    assert after["history"][4]["charts/learning_rate"] == pytest.approx(before["args"].learning_rate / 2)
    moments = after["optimizer"].state_dict()["state"][0]
    assert moments["step"].item() == 8 * 4  # two epochs of two minibatches in each of eight iterations
    unchanged = run(f"--resume {CHECKPOINT}")  # nothing is left to do
    assert_same_parameters(parameters(unchanged), parameters(after))


def test_resumed_run_does_not_repeat_its_first_episodes(run):
    first = run(f"{PPO}{steps(1)}")
    resumed = run(f"--resume {CHECKPOINT}{steps(2)}")
    assert not torch.equal(first["obs"][1:], resumed["obs"][1:])


def test_rates_of_the_command_line_hold(run):
    """And not those that the optimisers were saved with."""
    run(SPRL + steps(4))
    flags = "--no-anneal-lr --learning-rate 0.5 --rnet-learning-rate 0.25 --rnet-weight-decay 0.125"
    seen = run(f"--resume {CHECKPOINT} {flags}{steps(8)}")
    assert seen["optimizer"].param_groups[0]["lr"] == 0.5
    assert [seen["rnet_optimizer"].param_groups[0][name] for name in ("lr", "weight_decay")] == [0.25, 0.125]


def test_what_a_checkpoint_says_of_track_starts_nothing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises
    run(PPO + steps(1))
    checkpoint = torch.load(CHECKPOINT, weights_only=True)
    checkpoint["args"]["track"] = True
    torch.save(checkpoint, CHECKPOINT)
    assert run(f"--resume {CHECKPOINT}{steps(2)}")["args"].track is False


def test_interval_of_checkpoints(run, monkeypatch):
    """Every second iteration, the last one, and the end."""
    saved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (saved.append(b), replace(a, b)))
    run(f"{PPO} --checkpoint-interval {2 * BATCH}{steps(5)}")
    assert saved == 4 * [CHECKPOINT]


def test_without_git(run, monkeypatch, tmp_path):
    """A copy outside of any repository: git's own words stand where the commit would."""
    copy = tmp_path / CANONICAL
    copy.write_text((ROOT / CANONICAL).read_text())
    run(PPO + steps(1), copy)
    assert torch.load(CHECKPOINT, weights_only=True)["commit"].startswith("fatal: not a git repo")


def test_video_at_every_checkpoint(run, monkeypatch, tmp_path):
    """A GIF of one episode in the run's folder, and in W&B."""
    logged, wandb = (
        [],
        SimpleNamespace(init=lambda **_: None, Video=lambda path: path, log=lambda row: logged.append(row)),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run(f"{PPO} --capture-video --track --checkpoint-interval {BATCH}{steps(1)}")
    video = f"runs/small/{BATCH}.gif"
    assert logged == [{"video": video}]
    with Image.open(tmp_path / video) as frames:
        assert 2 <= frames.n_frames <= 21  # the first observation and at most 20 steps


def test_run_too_short_for_an_episode(run, capfd, tmp_path):
    """The last line says so and names no file that is not there."""
    run("--num-envs 1 --num-steps 8 --num-minibatches 2 --total-timesteps 8 --cost-scale 0 --run-name small")
    last = capfd.readouterr().err.splitlines()[-1]
    assert "no episode has ended" in last and "curve.png" not in last and os.path.exists(CHECKPOINT)


def test_last_line_knows_episodes_of_long_ago(run, capfd):
    """One episode in 200 steps, whose end is more than ten rollouts ago."""
    flags = "--num-envs 1 --num-steps 8 --num-minibatches 1 --total-timesteps 200 --cost-scale 0 --run-name small"
    run(f"{flags} --env-id MiniGrid-KeyDoors-11x11-v0")
    assert "done at step 200, return 0.000, see runs/small" in capfd.readouterr().err


# CRASH-ONLY ##########################################################################################################
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_run_well(start, run, tmp_path, number):
    """Answered at once, exit code 0, and a checkpoint from which the run goes on."""
    process = start(f"{SPRL} --checkpoint-interval 1{ENDLESS}")
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped at step" in error.splitlines()[-1]
    assert "Traceback" not in error and error.rstrip().endswith("see runs/small")
    iterations = torch.load(tmp_path / CHECKPOINT, weights_only=True)["global_step"] // BATCH
    assert run(f"--resume {CHECKPOINT}{steps(iterations + 1)}")["history"][-1]["step"] == (iterations + 1) * BATCH


def test_ruined_networks_are_not_saved(run, monkeypatch):
    """A Ctrl-C in the update that made the weights NaN: the checkpoint before it stays."""
    run(PPO + steps(1))
    before = Path(CHECKPOINT).read_bytes()

    def ruin(parameters, _):
        for part in parameters:
            part.data.fill_(torch.nan)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", ruin)
    run(f"--resume {CHECKPOINT}{steps(2)}")
    assert Path(CHECKPOINT).read_bytes() == before


@pytest.mark.slow
def test_long_cost_is_interrupted(start):
    """A cost of minutes: Ctrl-C ends the run within seconds."""
    flags = "--num-envs 64 --num-steps 2048 --num-tolerance-samples 900 --max-episode-steps 5000 --rnet oracle --k 2"
    process = start(f"{flags} --run-name small", wait_for="runs/small/lock")
    time.sleep(20)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=15)
    assert process.returncode == 0 and "stopped at step 0," in error


def test_ctrl_c_that_also_ends_tee(start, tmp_path):
    """In the middle of a rollout, when the program that reads the run's lines has died of the same Ctrl-C."""
    process = start(f"{PPO} --num-steps 50000{ENDLESS}", wait_for="runs/small/lock")
    while "writing to" not in process.stderr.readline():
        pass
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 1
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["global_step"] == 0


def test_killed_run_leaves_a_whole_checkpoint(start, run, tmp_path):
    process = start(f"{SPRL} --checkpoint-interval 1{ENDLESS}")
    time.sleep(1)
    process.kill()
    process.communicate()
    iterations = torch.load(tmp_path / CHECKPOINT, weights_only=True)["global_step"] // BATCH
    assert run(f"--resume {CHECKPOINT}{steps(iterations + 1)}")["history"][-1]["step"] == (iterations + 1) * BATCH


def test_two_runs_never_share_a_folder(start, tmp_path):
    """Neither two new ones, nor two resumed ones, nor a new one beside a resumed one."""
    start(f"{PPO} --checkpoint-interval 1{ENDLESS}")
    before = torch.load(tmp_path / CHECKPOINT, weights_only=True)["command"]
    for flags in (f"--resume {CHECKPOINT}{ENDLESS}", PPO + ENDLESS):
        second = start(flags, wait_for=None)
        _, error = second.communicate(timeout=60)
        assert second.returncode == 2 and error.count("\n") == 1 and "runs/small" in error
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["command"] == before


def test_every_flipped_bit_is_refused(script, run, tmp_path, capsys):
    """100 places in the file."""
    run(PPO + steps(1))
    path, rng = tmp_path / CHECKPOINT, np.random.default_rng(0)
    whole = path.read_bytes()
    data_begins = whole.index(b"PK\x03\x04") + 100
    refused, expected = 0, torch.load(path, weights_only=True)["agent"]
    for place in rng.integers(data_begins, len(whole) - 100, 100):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            script.load_checkpoint(str(path), {})
        except SystemExit as end:
            refused += end.code == 2
        else:  # a bit that nobody reads, as of a time stamp or of padding
            assert_same_parameters(torch.load(path, weights_only=True)["agent"], expected)
    assert refused > 90 and CHECKPOINT in capsys.readouterr().err


def test_loss_that_is_not_finite_is_never_saved(run):
    with pytest.raises(SystemExit) as exit_:
        run(f"{PPO} --learning-rate 1e9 --max-grad-norm 1e9 --checkpoint-interval 1{steps(5)}")
    assert "is nan" in exit_.value.code or "is inf" in exit_.value.code
    if os.path.exists(CHECKPOINT):
        saved = torch.load(CHECKPOINT, weights_only=True)
        assert all(np.isfinite(value) for row in saved["history"] for value in row.values())


def test_failed_write_keeps_the_older_checkpoint(script, tmp_path, monkeypatch):
    """The disk fills up in the middle of a write: the older file stays."""
    path = tmp_path / "agent.pt"
    script.save_checkpoint(str(path), {}, global_step=1)
    before = path.read_bytes()

    def write_half(_, file):
        file.write(before[: len(before) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(OSError, match="No space left on device"):
        script.save_checkpoint(str(path), {}, global_step=2)
    assert path.read_bytes() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_ends_a_run_with_one_line(start, tmp_path):
    """What is to be renamed to agent.pt is written to a full disk."""
    process = start(f"{PPO} --checkpoint-interval 1{ENDLESS}")
    (tmp_path / f"{CHECKPOINT}.tmp").symlink_to("/dev/full")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in error
    assert error.splitlines()[-1] == "OSError: [Errno 28] No space left on device"
    load(CANONICAL).load_checkpoint(str(tmp_path / CHECKPOINT), {})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("ending", ["2>/dev/full", "2>&-", "| head -n 1", "2>&1 | head -c 80"])
def test_closed_and_full_terminals(tmp_path, ending):
    """The run ends, with its steps so far in a checkpoint and without a traceback."""
    command = f"{sys.executable} {ROOT / CANONICAL} {PPO} {steps(8)} {ending}"
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    time.sleep(0.5)  # head ends before the run
    assert "Traceback" not in result.stdout + result.stderr
    deadline = time.time() + 60
    while not (tmp_path / CHECKPOINT).exists() and time.time() < deadline:
        time.sleep(0.1)
    load(CANONICAL).load_checkpoint(str(tmp_path / CHECKPOINT), {})


# LEARNING ############################################################################################################
LEARN = "--num-envs 8 --num-steps 64 --clip-coef 0.3 --no-anneal-clip --gamma 0.9 --run-name learn"


def test_ppo_finds_the_goal(run):
    """From chance (0.05) to most of what can be had (0.9)."""
    result = run(
        f"{LEARN} --env-id MiniGrid-Empty-Random-5x5-v0 --cost-scale 0 --max-episode-steps 30 --total-timesteps 7168"
    )
    returns = [row["charts/episodic_return"] for row in result["history"]]
    assert np.mean(returns[:2]) < 0.2 and np.mean(returns[-3:]) > 0.6


def test_cost_teaches_to_move_on(run):
    """No goal lies within the 10 steps of an episode: under the cost alone, more and more steps lead somewhere new."""
    result = run(
        f"{LEARN} --env-id MiniGrid-Empty-8x8-v0 --max-episode-steps 10 --rnet oracle --cost-scale 1 "
        "--num-tolerance-samples 1 --total-timesteps 5120"
    )
    assert all(row.get("charts/episodic_return", 0) == 0 for row in result["history"])
    rates = [row["sprl/cost_rate"] for row in result["history"]]
    assert rates[0] > 0.5 and np.mean(rates[-2:]) < 0.3
