"""Full disks, removed folders, lost connections, wrong rewards, broken losses, odd shapes: a run survives each or ends
with one line, and nothing that was written is lost."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import BATCH, CANONICAL, FOUR_ROOMS, PPO, ROOT, SCRIPTS, SPRL, load, read_charts, steps

CHECKPOINT, OFTEN = "runs/small/agent.pt", f" --checkpoint-interval {2 * BATCH}"


def charted(folder="runs/small"):
    """The iterations that TensorBoard has."""
    paths = sorted(Path(folder).glob("events*"), key=lambda path: path.stat().st_mtime_ns)
    return [step // BATCH for step in read_charts(paths)]


def said(captured):
    """The lines of stderr that are not the progress bar's."""
    lines = captured.readouterr().err.replace("\r", "\n").split("\n")
    return [line for line in lines if line.strip() and "step/s" not in line and "s/step" not in line]


def at(iteration, *lines):
    return "\n".join([f"if iteration == {iteration}:", *(f"    {line}" for line in lines)]) + "\n"


# DISK ################################################################################################################
DISK = SimpleNamespace()  # where probes find fill() and clear()


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request, run, tmp_path, monkeypatch):
    """The run's folder is a disk of 24 MB; or, where nothing may be mounted, no file may become larger than 5 KB once
    DISK.fill() was called: for a writer it is the same."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "limit":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        DISK.fill = lambda size=5_000: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        DISK.clear = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    else:
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("may not mount; the other disk is tried everywhere")

        def fill(size=0):
            with pytest.raises(OSError), open(folder / "ballast", "wb", buffering=0) as file:
                while True:
                    assert file.write(bytes(4096))

        DISK.fill, DISK.clear = fill, lambda: (folder / "ballast").unlink(missing_ok=True)
    monkeypatch.chdir(folder)
    yield
    DISK.clear()
    monkeypatch.chdir(tmp_path)
    if request.param == "tmpfs":
        subprocess.run(["umount", str(folder)], check=True)


QUIET = at(1, "bar.mininterval = bar.maxinterval = 1e9")  # on a slow machine the bar alone would write more than 5 KB
FULL = f"import test_faults\n{QUIET}" + at(4, "test_faults.DISK.fill()")
LOOK = at(16, f"trace.append(torch.load('{CHECKPOINT}', weights_only=True)['iteration'])")


def test_disk_full_for_a_while(disk, run, capfd):
    """Full during iterations 4 to 15: checkpoint 2 stays, charts are missed, and from iteration 18 on all is well."""
    result = run(PPO + OFTEN + steps(20), probes={"ROLLOUT": FULL + LOOK + at(16, "test_faults.DISK.clear()")})
    lines = said(capfd)
    assert result["trace"] == [2] and torch.load(CHECKPOINT, weights_only=True)["iteration"] == 20
    assert len(result["history"]) == 20
    assert sum("TensorBoard fails" in line for line in lines) == 1
    assert sum("could not save runs/small/agent.pt, an older one stays: OSError" in line for line in lines) == 6
    assert len(lines) == 7 and all(line.startswith(f"{CANONICAL}: warning: ") for line in lines), lines
    iterations = charted()
    assert iterations[:3] == [1, 2, 3] and iterations[-4:] == [17, 18, 19, 20]
    assert len(iterations) < 20 and os.listdir("runs/small").count("agent.pt.tmp") == 0


def test_disk_full_to_the_end(disk, run, capfd):
    """Exit code 1, for the last checkpoint is not what was learned last; the older one is whole."""
    with pytest.raises(SystemExit) as end:
        run(PPO + OFTEN + steps(6), probes={"ROLLOUT": FULL})
    assert end.value.code == 1 and "could not save" in said(capfd)[-1]
    DISK.clear()
    assert len(run(f"--resume {CHECKPOINT}")["history"]) == 6
    assert charted()[:3] == [1, 2, 3] and charted()[-1] == 6


def test_disk_full_at_the_start(disk, run, capfd):
    """There is nothing to lose yet, and the user is there to be told."""
    DISK.fill(1_000)  # less than the table of settings
    with pytest.raises(SystemExit) as end:
        run(PPO + steps(1))
    DISK.clear()
    (line,) = said(capfd)
    assert end.value.code == 2 and "runs/small cannot be" in line


def test_log_on_a_full_disk(run, tmp_path, monkeypatch):
    """`2> log`: progress bar and warnings have nowhere to go, the run goes on."""
    with open(tmp_path / "log", "w", buffering=1) as log, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", log)
        full = at(2, "os.dup2(os.open('/dev/full', os.O_WRONLY), sys.stderr.fileno())", "bar.mininterval = 0")
        result = run(PPO + steps(4), probes={"ROLLOUT": full + at(3, "warn('nobody reads this')")})
        os.dup2(os.open(os.devnull, os.O_WRONLY), log.fileno())
    assert len(result["history"]) == 4 and os.path.exists(CHECKPOINT)


def test_output_on_a_full_disk(tmp_path):
    """`> log`: nothing is said, all is saved, and SIGTERM's exit code stays 0."""
    command = [sys.executable, str(ROOT / CANONICAL), *f"{PPO}{steps(2)}".split()]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 0 and "Error" not in ran.stderr, ran.stderr
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["iteration"] == 2


def test_folder_removed(run, capfd):
    """With the next checkpoint all is there again but the charts in between, and those are in its history."""
    remove = at(4, "import shutil; shutil.rmtree(run_dir)")
    run(PPO + OFTEN + steps(8), probes={"ROLLOUT": remove})
    (line,) = said(capfd)
    assert "warning: TensorBoard fails at step 512, going on without it: FileNotFoundError" in line
    assert charted() == [5, 6, 7, 8]
    assert len(torch.load(CHECKPOINT, weights_only=True)["history"]) == 8


# WEIGHTS & BIASES ####################################################################################################
def test_wandb_lost_in_the_middle(run, capfd, monkeypatch):
    logged = []

    def log(charts, step):
        if step > 2 * BATCH:
            raise ConnectionError("the network is gone")
        logged.append(step)

    inits = []

    def init(id=None, **_):
        inits.append(id)
        return SimpleNamespace(log=log, finish=lambda: log({}, np.inf), id=id or "abc")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run(f"{PPO} --track{steps(4)}")
    (line,) = said(capfd)
    assert line.startswith(f"{CANONICAL}: warning: W&B fails at step 384, going on without it: ConnectionError")
    assert logged == [BATCH, 2 * BATCH] and charted() == [1, 2, 3, 4]
    run(f"--resume {CHECKPOINT}{steps(5)}")
    assert inits == [None, "abc"], "a resumed run goes on with its own charts, also where W&B was lost"


def test_wandb_unreachable_at_the_start(tmp_path):
    """The real one; nobody listens at its server's address. Lines of its own begin with `wandb:`."""
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "3"}
    result = subprocess.run(
        [sys.executable, str(ROOT / CANONICAL), *f"{PPO} --track{steps(1)}".split()],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **unreachable, "WANDB_SILENT": "true"},
    )  # fmt: skip
    assert result.returncode == 0 and (tmp_path / CHECKPOINT).exists(), result.stderr
    lines = [line for line in result.stderr.replace("\r", "\n").split("\n") if line.startswith(CANONICAL)]
    assert len(lines) == 1 and "warning: W&B cannot be reached, going on without it" in lines[0], result.stderr
    assert "Traceback" not in result.stderr and charted(str(tmp_path / "runs/small")) == [1]


# WORLDS AND LOSSES ###################################################################################################
def assert_ends(run, capfd, flags, probes, *words, kept):
    """Exit code 1, one line with these words, and the checkpoint of this iteration, finite throughout."""
    with pytest.raises(SystemExit) as end:
        run(flags, probes=probes)
    (line,) = said(capfd)
    assert end.value.code == 1 and line.startswith(f"{CANONICAL}: error: "), line
    assert all(word in line for word in (*words, f"{CHECKPOINT} is the last good" if kept else "no checkpoint")), line
    assert os.path.exists(CHECKPOINT) == bool(kept)
    if kept:
        checkpoint = torch.load(CHECKPOINT, weights_only=True)
        assert checkpoint["iteration"] == len(checkpoint["history"]) == kept
        networks = [checkpoint[name].values() for name in ("agent", "rnet") if name in checkpoint]
        assert all(tensor.isfinite().all() for network in networks for tensor in network)


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf, 1e39, 1.5])
def test_wrong_reward(run, capfd, reward):
    """In environment 2 at the fifth step of the third rollout: 2 * 128 + 5 * 4 steps. What was learned before is
    saved, though no checkpoint was due."""
    lines = (
        "step_worlds, calls = envs.step, []",
        "def step_wrongly(actions):",
        "    calls.append(0)",
        "    outcome = step_worlds(actions)",
        f"    outcome[1][2] = float('{reward}') if len(calls) == 5 else outcome[1][2]",
        "    return outcome",
        "envs.step = step_wrongly",
    )
    words = (FOUR_ROOMS, "step 276", "environment 2", f"reward {reward}", "-1 to 1")
    assert_ends(run, capfd, PPO + steps(4), {"ROLLOUT": at(3, *lines)}, *words, kept=2)
    assert len(run(f"--resume {CHECKPOINT}")["history"]) == 4


def test_world_that_raises(run, capfd):
    """Its traceback, then one line; what was learned before it is saved."""
    raises = at(4, "envs.step = lambda actions: 1 // 0")
    with pytest.raises(SystemExit) as end:
        run(PPO + steps(6), probes={"ROLLOUT": raises})
    lines = said(capfd)
    assert end.value.code == 1 and "ZeroDivisionError: integer division or modulo by zero" in lines
    assert f"{FOUR_ROOMS} at step {3 * BATCH + 4}: ZeroDivisionError, see above" in lines[-1]
    assert torch.load(CHECKPOINT, weights_only=True)["iteration"] == 3


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_world_has_a_range_of_rewards(name):
    """And a float32 can hold it; a state that is not finite is found too."""
    script = load(name)
    worlds = [
        part for part in vars(script).values() if isinstance(part, type) and issubclass(part, gym.vector.VectorEnv)
    ]
    assert worlds
    for world in worlds:
        low, high = world.reward_range
        assert -3e38 < low < high < 3e38
        rewards, states = np.array([low, 0, high], np.float32), np.zeros((3, 5), np.float32)
        assert script.find_fault(world, states, np.array([low, 0, high])) is None
        assert "environment 1 returned the reward nan" in script.find_fault(world, states, rewards * [1, np.nan, 1])
        states[2, 4] = np.nan
        assert "environment 2 returned a state with nan" in script.find_fault(world, states, 0 * rewards)
        assert script.find_fault(world, np.zeros((3, 5), np.uint8), 0 * rewards) is None


LAST_GRADIENT = (  # of four
    "agent.critic.bias.register_hook(lambda grad: grad * (torch.inf if calls.append(0) or len(calls) == 4 else 1))"
)
LAST_STEP = (  # of four, all of whose losses and gradients are finite
    "optimizer.register_step_post_hook(lambda *_: calls.append(0) or len(calls) == 4 "
    "and agent.critic.bias.data.fill_(torch.nan))"
)
BROKEN = {  # the chart that is named, the probe that breaks it in the third iteration, the last checkpoint
    "losses/policy_loss": ({"UPDATE POLICY": at(3, "advantages[:] = torch.nan")}, 2),
    "losses/value_loss": ({"UPDATE POLICY": at(3, "returns[:] = torch.inf")}, 2),
    "losses/grad_norm": ({"UPDATE POLICY": at(3, "calls = []", LAST_GRADIENT)}, 2),
    "error: losses/weight_norm": ({"UPDATE POLICY": at(3, "calls = []", LAST_STEP)}, 2),
    "rnet/loss": ({"UPDATE RNET": at(4, "rnet.head[-1].bias.data.fill_(torch.nan)")}, 3),
    "rnet/grad_norm": ({"UPDATE RNET": at(4, "rnet.head[-1].bias.register_hook(lambda grad: grad * torch.inf)")}, 3),
}


@pytest.mark.parametrize("chart", BROKEN)
def test_broken_loss(run, capfd, chart):
    probes, kept = BROKEN[chart]
    flags = f"{SPRL} --checkpoint-interval {BATCH}{steps(6)}"
    assert_ends(run, capfd, flags, probes, chart, f"at step {(kept + 1) * BATCH};", kept=kept)


def test_broken_loss_before_the_first_checkpoint(run, capfd):
    probes, _ = BROKEN["losses/policy_loss"]
    assert_ends(run, capfd, PPO + steps(4), probes, "losses/policy_loss is nan", "at step 384", kept=0)


# ODD SHAPES ##########################################################################################################
NONE_TO_LEARN = {  # no pair of states is far enough apart, so the RNet never learns and the cost stays away
    "episodes shorter than k": "--k 4 --max-episode-steps 3",
    "no valid negative": "--negative-bias 30 --max-episode-steps 20",
}
SOME_TO_LEARN = {
    "one environment": "--num-envs 1",
    "one step per rollout": "--num-steps 1",
    "fewer valid rows than minibatches": "--num-envs 2 --num-steps 2 --num-minibatches 4",
    "episodes longer than the ring": "--max-episode-steps 200 --ring-size 40",
}


def run_oddly(run, flags, iterations=16):
    """A run whose RNet trains after every rollout, and its charts, all finite."""
    flags = f"{SPRL} --rnet-start 0 --rnet-intervals 1 1 1 {flags}"
    words = dict(zip(flags.split(), flags.split()[1:]))
    total = iterations * int(words["--num-envs"]) * int(words["--num-steps"])
    result = run(f"{flags} --total-timesteps {total}", probes={"CHECKPOINT": "trace.append(charts)"})
    assert (
        len(result["trace"]) == iterations
        and np.isfinite([value for charts in result["trace"] for value in charts.values()]).all()
    )
    assert all(p.isfinite().all() for name in ("agent", "rnet") for p in result[name].parameters())
    return result


@pytest.mark.parametrize("flags", NONE_TO_LEARN.values(), ids=NONE_TO_LEARN)
def test_nothing_for_the_rnet_to_learn(run, flags):
    charts = run_oddly(run, flags, 8)["trace"]
    assert [row["rnet/triplets"] for row in charts] == 8 * [0] and not any("sprl/cost_rate" in row for row in charts)


@pytest.mark.parametrize("flags", SOME_TO_LEARN.values(), ids=SOME_TO_LEARN)
def test_odd_shapes_learn(run, flags):
    result = run_oddly(run, flags)
    charts, ring = result["trace"], result["ring"]
    assert all("losses/value_loss" in row for row in charts)
    assert charts[-1]["rnet/triplets"] > 0 and 0 <= charts[-1]["sprl/cost_rate"] <= 1
    if "--ring-size" in flags:
        assert ring.size == 10 < ring.ages.max()


def test_every_other_rollout_has_no_valid_row(run):
    """One environment, one step, episodes of one step: what only begins an episode teaches nothing."""
    charts = run_oddly(run, "--num-envs 1 --num-steps 1 --num-minibatches 1 --max-episode-steps 1", 6)["trace"]
    assert ["losses/value_loss" in row for row in charts] == [True, False, True, False, True, False]


def test_saturated_rnet(script):
    """Logits of 10,000: losses by hand, gradients of at most 1, costs as sure as the network."""
    for sign, smoothing, expected in ((1, 0.0, 0.0), (1, 0.1, 1_000.0), (-1, 0.0, 20_000.0), (-1, 0.1, 19_000.0)):
        positive, negative = (torch.full((4,), s * sign * 1e4, requires_grad=True) for s in (1.0, -1.0))
        loss = script.rnet_loss(positive, negative, smoothing)
        loss.backward()
        assert loss.item() == pytest.approx(expected)
        assert positive.grad.abs().max() <= 1 and negative.grad.abs().max() <= 1
        assert script.rnet_accuracy(positive, negative).item() == (sign > 0)
    embeddings, ages = torch.zeros(20, 2, 2, 1), np.arange(20)[:, None].repeat(2, 1)[8:]
    for logit, cost in ((1e4, 1.0), (-1e4, 0.0), (np.inf, 1.0), (-np.inf, 0.0)):
        rnet = SimpleNamespace(chunk=7, compare=lambda early, late, logit=logit: torch.full((len(early),), logit))
        assert script.ksp_cost(rnet, embeddings, ages, 2, 1, 5, 90.0).unique().tolist() == [cost]


def test_run_with_a_saturated_rnet(run):
    saturate = "rnet.head[-1].bias.data.fill_(1e4)"
    result = run(SPRL + steps(4), probes={"UPDATE RNET": saturate, "LOG": "trace.append(charts)"})
    assert len(result["history"]) == 4 and result["history"][-1]["cost_rate"] > 0


# CHECKPOINTS RUN NO CODE #############################################################################################
class Hostile:
    def __reduce__(self):
        return os.mkdir, ("owned",)


@pytest.mark.parametrize("name", SCRIPTS)
def test_hostile_checkpoint(name, tmp_path, monkeypatch, capfd):
    """Of the form that a script writes, with something to run in it."""
    monkeypatch.chdir(tmp_path)
    torch.save({"script": name, "args": {}, "agent": Hostile()}, "agent.pt")
    with pytest.raises(SystemExit) as end:
        load(name).load_checkpoint("agent.pt", name)
    assert end.value.code == 2 and len(said(capfd)) == 1 and not os.path.exists("owned")


def test_nothing_is_loaded_otherwise():
    """No torch.load without weights_only, no pickle, anywhere but in tests."""
    for path in [*ROOT.glob("*.py"), *ROOT.glob("analysis/*.py")]:
        source = path.read_text()
        loads = [line for line in source.splitlines() if "torch.load(" in line]
        assert all("weights_only=True" in line for line in loads), path
        assert "import pickle" not in source and "allow_pickle=True" not in source, path
