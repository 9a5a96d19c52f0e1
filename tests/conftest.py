"""What the tests share: loading and running the scripts, and slow readings of the same rules to hold them to."""

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import signal
import sys
import textwrap
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure
from minigrid.core.actions import Actions
from minigrid.wrappers import FullyObsWrapper, ImgObsWrapper
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("ppo_*.py"))
CANONICAL = "ppo_sprl_minigrid.py"
sys.path.append(str(ROOT))  # as if the scripts were run from where they are: one imports another
FOUR_ROOMS, KEY_DOORS, MAX_STEPS = "MiniGrid-FourRooms-7x7-v0", "MiniGrid-KeyDoors-7x7-v0", 100
HANDLING = {Actions.pickup, Actions.drop, Actions.toggle}

# flags of runs that take a second; episodes end and RNets are trained several times even so
BATCH = 4 * 32
SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --max-episode-steps 20 --run-name small"
PPO = f"{SMALL} --cost-scale 0"
SPRL = (
    f"{SMALL} --cost-scale 0.1 --num-tolerance-samples 5 --ring-size 1200 --negative-bias 3 --rnet-ready-accuracy 0 "
    f"--rnet-start {2 * BATCH} --rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16"
)
ORACLE = f"{SPRL} --rnet oracle"

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")


def steps(iterations):
    return f" --total-timesteps {iterations * BATCH}"


@cache
def load(script_name):
    """A script as a module, its main block left alone."""
    spec = importlib.util.spec_from_file_location(script_name.removesuffix(".py"), ROOT / script_name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script():
    return load(CANONICAL)


def sections(source):
    """{marker: text below it} of a script's main block, in order."""
    _, main = source.split('\nif __name__ == "__main__":\n')
    parts = re.split(r"^ +# ([A-Z ]+) #{9,}\n", main, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def probed(source, probes):
    """The source with the code probes[marker] put right below that marker of the main block."""
    for marker, code in probes.items():
        pattern = rf"^( +)# {marker} #{{9,}}\n"
        source, count = re.subn(
            pattern, lambda m, code=code: m[0] + textwrap.indent(code, m[1]) + "\n", source, flags=re.M
        )
        assert count == 1, f"{count} markers {marker}"
    return source


def snapshot(names):
    """A probe that leaves copies of the named globals in the trace."""
    return f"import copy; trace.append(copy.deepcopy({{name: globals()[name] for name in {names.split()}}}))"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(flags) runs a script's main block in this process and in tmp_path, and returns its globals. Probes are run
    in it below their markers, with `trace`, an empty list, to leave things in. Figures are made but not drawn: that
    takes two thirds of a small run's time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)

    def run(flags, script_name=CANONICAL, probes=None):
        path = ROOT / script_name
        if probes:
            path = tmp_path / script_name
            path.write_text(probed((ROOT / script_name).read_text(), probes))
        monkeypatch.setattr(sys, "argv", [script_name, *shlex.split(flags)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        thread_hook = threading.excepthook
        try:
            return runpy.run_path(str(path), {"trace": []}, run_name="__main__")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            threading.excepthook = thread_hook

    return run


def parameters(result):
    """All that a run learned, by name."""
    networks = {name: result[name] for name in ("agent", "rnet") if result.get(name) is not None}
    return {f"{name}.{key}": value for name, part in networks.items() for key, value in part.state_dict().items()}


def assert_same_parameters(first, second):
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"not bitwise equal: {different}"


def read_charts(paths):
    """{step: {chart: value}} of event files in the order they were written; a restart hides what it repeats."""
    curve = {}
    for path in paths:
        for event in EventFileLoader(str(path)).Load():
            if event.session_log.status:
                curve = {step: row for step, row in curve.items() if step < event.step}
            for value in event.summary.value:
                if "SPS" not in value.tag and "text" not in value.tag:
                    curve.setdefault(event.step, {})[value.tag] = tuple(value.tensor.float_val)
    return curve


def farama(script, env_id):
    """The same world as minigrid itself shows it."""
    if env_id in gym.registry:
        return ImgObsWrapper(FullyObsWrapper(gym.make(env_id, max_steps=MAX_STEPS)))
    with patch.object(script, "FullyObservable", type("NotMixedIn", (), {})):
        return ImgObsWrapper(FullyObsWrapper(script.make_world(env_id, max_steps=MAX_STEPS)))


def handle_objects(world, rng):
    """A random action; mostly one that changes the grid where there is something to handle."""
    if world.action_space.n < 7:
        return rng.integers(world.action_space.n)
    front = world.grid.get(*world.front_pos)
    if front is not None and front.type not in ("wall", "goal") and rng.random() < 0.7:
        return rng.choice([Actions.pickup, Actions.toggle])
    if front is None and world.carrying and rng.random() < 0.05:
        return Actions.drop
    return rng.choice(7, p=[0.15, 0.15, 0.55, 0.03, 0.03, 0.06, 0.03])


def fake_envs(shape=(7, 7, 3), num_actions=7):
    """What the networks want to know of the environments."""
    return SimpleNamespace(
        single_observation_space=gym.spaces.Box(0, 255, shape, np.uint8),
        single_action_space=gym.spaces.Discrete(num_actions),
    )


def random_frames(*shape, size=7):
    """Frames of random but possible cell codes (..., size, size, 3) uint8."""
    return torch.stack([torch.randint(0, n, (*shape, size, size), dtype=torch.uint8) for n in (11, 6, 4)], -1)


def random_ages(rng, num_rows, num_envs, cut_probability):
    """Ages (T, N) of frames whose segments are cut at random; the oldest frames may lie inside a segment."""
    ages = np.zeros((num_rows, num_envs), np.int64)
    ages[0] = rng.integers(0, 4, num_envs)
    for t in range(1, num_rows):
        ages[t] = np.where(rng.random(num_envs) < cut_probability, 0, ages[t - 1] + 1)
    return ages


def slow_ends(ages):
    """segment_ends by walking forward from every frame."""
    ends = np.zeros_like(ages)
    for t, n in np.ndindex(*ages.shape):
        last = t
        while last + 1 < len(ages) and ages[last + 1, n] > 0:
            last += 1
        ends[t, n] = last
    return ends


def assert_uniform(draws, low, high):
    """The integers fill low..high evenly: chi-square within 5 of its standard deviations."""
    assert low <= min(draws) and max(draws) <= high
    counts = np.bincount(np.asarray(draws) - low, minlength=high - low + 1)
    expected = counts.sum() / len(counts)
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    assert expected > 20 and chi_square <= freedom + 5 * np.sqrt(2 * freedom), counts


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """As `run`, for runs that several tests look at: shared_run(flags, script_name, probes) runs a script in a folder
    of its own, once per module, and returns its globals, what it printed and the folder."""
    kept = {}

    def shared_run(flags, script_name, probes=None):
        key = flags, script_name, repr(probes)
        if key not in kept:
            folder, printed = tmp_path_factory.mktemp("run"), io.StringIO()
            handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            thread_hook = threading.excepthook
            with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(printed):
                patched.chdir(folder)
                patched.setattr(Figure, "savefig", lambda *_, **__: None)
                patched.setattr(sys, "argv", [script_name, *shlex.split(flags)])
                path = folder / script_name
                path.write_text(probed((ROOT / script_name).read_text(), probes or {}))
                try:
                    result = runpy.run_path(str(path), {"trace": []}, run_name="__main__")
                finally:
                    for number, handler in handlers.items():
                        signal.signal(number, handler)
                    threading.excepthook = thread_hook
            kept[key] = result, printed.getvalue(), folder
        return kept[key]

    return shared_run
