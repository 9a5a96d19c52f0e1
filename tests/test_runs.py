"""Whole runs: repeatable, resumable, unbreakable by signals, full disks and bad input, and able to learn."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import BATCH, CANONICAL, FOUR_ROOMS, ORACLE, PPO, ROOT, SPRL, assert_same_parameters, parameters, steps

CHECKPOINT = "runs/small/agent.pt"


def interrupt(iteration):
    """A probe: Ctrl-C during the first step of this iteration's rollout."""
    lines = (
        f"if iteration == {iteration}:",
        "    step_worlds = envs.step",
        "    envs.step = lambda actions: (signal.raise_signal(signal.SIGINT), step_worlds(actions))[1]",
    )
    return {"ROLLOUT": "\n".join(lines)}


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# REPEATING AND RESUMING ##############################################################################################
def test_seed_decides_everything(run):
    first, again, other = (run(f"{SPRL} --seed {seed} --run-name {i}{steps(4)}") for i, seed in enumerate((1, 1, 2)))
    assert first["history"] == again["history"] and first["history"] != other["history"]
    assert_same_parameters(parameters(first), parameters(again))


@pytest.mark.parametrize(
    "flags",
    [
        PPO,
        SPRL + " --save-ring",
        ORACLE + " --save-ring",
        PPO + " --save-ring --stack-observations 2",
        PPO + " --env-id MiniGrid-Dynamic-Obstacles-6x6-v0",
    ],
    ids=["ppo", "sprl", "oracle", "stacked", "moving"],
)
def test_resumed_run_equals_uninterrupted_one(run, flags):
    whole = run(f"{flags} --run-name whole{steps(6)}")
    stopped = run(flags + steps(6), probes=interrupt(4))
    assert [row["step"] for row in stopped["history"]] == [row["step"] for row in whole["history"][:3]]
    resumed = run(f"--resume {CHECKPOINT}")
    assert resumed["history"] == whole["history"] and len(whole["history"]) == 6
    assert_same_parameters(parameters(resumed), parameters(whole))
    saved, expected = (torch.load(f"runs/{name}/agent.pt", weights_only=True) for name in ("small", "whole"))
    assert saved["worlds"] == expected["worlds"] and torch.equal(saved["torch_rng"], expected["torch_rng"])


def test_resumed_without_ring_goes_on(run, capsys):
    """Ring and window start empty, which is said, the networks do not."""
    before = run(SPRL + steps(4))
    capsys.readouterr()
    after = run(f"--resume {CHECKPOINT}{steps(8)}")
    assert "without the replay ring and the frames before it\n" in capsys.readouterr().out
    assert after["global_step"] == 2 * before["global_step"] and len(after["history"]) == 8
    assert after["history"][:4] == before["history"]
    unchanged = run(f"--resume {CHECKPOINT}{steps(8)}")  # nothing is left to do
    assert_same_parameters(parameters(unchanged), parameters(after))


def test_saved_ring_is_loaded_whatever_is_saved_next(run, capsys):
    run(f"{SPRL} --save-ring{steps(4)}")
    ring = torch.load(CHECKPOINT, weights_only=True)["ring"]
    capsys.readouterr()
    seen = run(f"--resume {CHECKPOINT} --no-save-ring{steps(5)}", probes={"ROLLOUT": "trace.append(ring.size)"})
    assert seen["trace"] == [ring["size"]] and "without" not in capsys.readouterr().out


def test_stacked_frames_that_are_lost_are_told(run, capsys):
    run(f"{PPO} --stack-observations 2{steps(1)}")
    run(f"--resume {CHECKPOINT}{steps(2)}")
    assert f"resumed at step {BATCH}, without the frames before it\n" in capsys.readouterr().out


def test_rates_of_the_command_line_hold(run):
    """And not those that the optimisers were saved with."""
    run(SPRL + steps(4))
    flags = "--no-anneal-lr --learning-rate 0.5 --rnet-learning-rate 0.25 --rnet-weight-decay 0.125"
    look = (
        "trace += [[o.param_groups[0][rate] for rate in ('lr', 'weight_decay')] for o in (optimizer, rnet_optimizer)]"
    )
    seen = run(f"--resume {CHECKPOINT} {flags}{steps(5)}", probes={"ROLLOUT": look})
    assert seen["trace"] == [[0.5, 0], [0.25, 0.125]]


def test_checkpoints_are_never_further_apart_than_asked(run):
    """At most two and a half iterations apart: every second one is saved, and the end."""
    look = (
        f"trace.append(os.path.exists('{CHECKPOINT}') and torch.load('{CHECKPOINT}', weights_only=True)['iteration'])"
    )
    seen = run(f"{PPO} --checkpoint-interval {5 * BATCH // 2}{steps(6)}", probes={"ROLLOUT": look})
    assert seen["trace"] == [False, False, 2, 2, 4, 4]


def test_without_git(run, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    run(PPO + steps(1))
    assert torch.load(CHECKPOINT, weights_only=True)["versions"]["commit"] == "unknown"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_run_well(run, tmp_path, number):
    """Exit code 0 and a checkpoint from which the run goes on."""
    command = [sys.executable, str(ROOT / CANONICAL), *f"{SPRL} --checkpoint-interval 1{steps(10**6)}".split()]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        deadline = time.time() + 300
        while not (tmp_path / CHECKPOINT).exists() and time.time() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0 and f"stopped by {number.name}" in output
    assert (tmp_path / "runs/small/curve.png").stat().st_size > 1000
    iterations = torch.load(CHECKPOINT, weights_only=True)["iteration"]
    result = run(f"--resume {CHECKPOINT}{steps(iterations + 1)}")
    assert len(result["history"]) == iterations + 1


def test_stopped_before_anything_was_learned(run, capsys):
    """There is nothing to save, and nothing is said to have been saved."""
    run(PPO + steps(2), probes=interrupt(1))
    assert not os.path.exists(CHECKPOINT) and "agent.pt" not in capsys.readouterr().out


def test_run_too_short_for_an_episode(run):
    result = run("--num-envs 1 --num-steps 8 --total-timesteps 8 --cost-scale 0 --run-name small")
    assert result["history"] == [{"step": 8}] and os.path.exists(CHECKPOINT)


def test_failed_write_keeps_the_older_checkpoint(script, tmp_path, monkeypatch, capsys):
    """The disk fills up in the middle of a write."""
    path, network = tmp_path / "agent.pt", torch.nn.Linear(2, 2)
    progress = {"script": "me", "args": {"env_id": "World-v0"}, "iteration": 1, "global_step": 9, "command": ""}
    script.save_checkpoint(progress, {"agent": network}, str(path))
    before = path.read_bytes()

    def write_half(_, file):
        file.write(before[: len(before) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", write_half)
    script.save_checkpoint(progress | {"iteration": 2}, {"agent": network}, str(path))
    assert path.read_bytes() == before and script.load_checkpoint(str(path), "me")["iteration"] == 1
    assert "No space left on device" in capsys.readouterr().err


# BAD INPUT ###########################################################################################################
def assert_refused(run, capsys, tmp_path, flags, *said):
    """One line on stderr, exit code 2, no file written or changed."""
    before = files(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run(flags + steps(1))
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and all(word in error for word in said), error
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "flags",
    [
        "--env-id MiniGrid-FourRoms-7x7-v0",
        "--k 0",
        "--tolerance -1",
        "--num-tolerance-samples 0",
        "--ring-size 100",
        "--num-minibatches 7",
        "--gamma 2",
        "--gamma nan",
        "--num-envs 0",
        "--cost-percentile 101",
        "--rnet-intervals 0 1 1",
        "--label-smoothing -0.1",
        "--learning-rate inf",
    ],
)
def test_bad_settings_are_refused(run, capsys, tmp_path, flags):
    assert_refused(run, capsys, tmp_path, flags, *flags.split()[:1])


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--resume foreign.pt", "ppo_other.py"),
        (f"--resume {CHECKPOINT} --env-id MiniGrid-FourRooms-11x11-v0", FOUR_ROOMS),
        (f"--resume {CHECKPOINT} --num-envs 3 --num-minibatches 1", CHECKPOINT),
        (f"--resume {CHECKPOINT} --num-envs 8", CHECKPOINT),
        (f"--resume {CHECKPOINT} --encoding raw", CHECKPOINT),
        (f"--resume {CHECKPOINT} --seed 77", "--seed 77"),
        (f"--resume {CHECKPOINT} --run-name other", "--run-name other"),
        (f"--resume {CHECKPOINT} --cost-scale 0.1", "KeyError('rnet')"),
        ("--resume runs/small/older.pt", "overwrite the agent.pt beside it"),
        ("--resume typed.pt", "--k x"),
        ("--resume wide.pt", "a window of 3 frames, not 0"),
        ("--resume truncated.pt", "truncated.pt"),
        ("--resume empty.pt", "empty.pt"),
        ("--resume text.pt", "text.pt"),
        ("--resume list.pt", "list.pt"),
        ("--resume missing.pt", "missing.pt: no such file"),
        (PPO, "--run-name small"),
    ],
)
def test_bad_checkpoints_are_refused(run, capsys, tmp_path, flags, said):
    """Of another script, world or shape, unreadable or missing; nor is a run's folder used a second time."""
    run(PPO + steps(1))
    whole = (tmp_path / CHECKPOINT).read_bytes()
    torch.save(torch.load(CHECKPOINT, weights_only=True) | {"script": "ppo_other.py"}, "foreign.pt")
    torch.save([1, 2], "list.pt")
    checkpoint = torch.load(CHECKPOINT, weights_only=True)
    torch.save(checkpoint, "runs/small/older.pt")
    torch.save(checkpoint | {"past_obs": torch.zeros(4, 4, 7, 7, 3)}, "wide.pt")
    torch.save(checkpoint | {"args": checkpoint["args"] | {"k": "x"}}, "typed.pt")
    (tmp_path / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("hello")
    assert_refused(run, capsys, tmp_path, flags, said)


def test_rnet_is_not_dropped(run, capsys, tmp_path):
    """Going on as plain PPO would write a checkpoint without it."""
    run(SPRL + steps(1))
    assert_refused(run, capsys, tmp_path, f"--resume {CHECKPOINT} --cost-scale 0", CHECKPOINT, "rnet would be lost")


def test_setting_of_another_version(run, capsys):
    """A checkpoint that knows more goes on, and says what is left out; what it does not know has its default."""
    run(PPO + steps(1))
    checkpoint = torch.load(CHECKPOINT, weights_only=True)
    del checkpoint["args"]["gamma"]
    torch.save(checkpoint | {"args": checkpoint["args"] | {"warp": 9}}, CHECKPOINT)
    capsys.readouterr()
    assert run(f"--resume {CHECKPOINT}{steps(2)}")["args"].gamma == 0.99
    assert "not known here, left out: warp\n" in capsys.readouterr().err


def test_bad_input_ends_the_program(tmp_path):
    """The same, as the shell sees it."""
    command = [sys.executable, str(ROOT / CANONICAL), "--env-id", "MiniGrid-NineRoom-v0"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": ""}
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "MiniGrid-NineRooms-v0" in result.stderr
    assert files(tmp_path) == {}


# LEARNING ############################################################################################################
LEARN = "--num-envs 8 --num-steps 64 --clip-coef 0.3 --no-anneal-clip --gamma 0.9 --run-name learn"


def test_ppo_finds_the_goal(run):
    """From chance (0.05) to most of what can be had (0.9)."""
    result = run(
        f"{LEARN} --env-id MiniGrid-Empty-Random-5x5-v0 --cost-scale 0 --max-episode-steps 30 --total-timesteps 7168"
    )
    returns = [row["return"] for row in result["history"]]
    assert np.mean(returns[:2]) < 0.2 and np.mean(returns[-3:]) > 0.6


def test_cost_teaches_to_move_on(run):
    """No goal lies within the 10 steps of an episode: under the cost alone, more and more steps lead somewhere new."""
    result = run(
        f"{LEARN} --env-id MiniGrid-Empty-8x8-v0 --max-episode-steps 10 --rnet oracle --cost-scale 1 "
        "--num-tolerance-samples 1 --total-timesteps 5120"
    )
    assert all(row.get("return", 0) == 0 for row in result["history"])
    rates = [row["cost_rate"] for row in result["history"]]
    assert rates[0] > 0.5 and np.mean(rates[-2:]) < 0.3
