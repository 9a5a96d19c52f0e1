"""What the tests share: loading and running the scripts, and slow readings of the same rules to hold them to."""

import contextlib
import importlib.util
import runpy
import shlex
import signal
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import settings
from matplotlib.figure import Figure
from minigrid.core.actions import Actions
from minigrid.wrappers import FullyObsWrapper, ImgObsWrapper

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
    f"{SMALL} --cost-scale 0.1 --num-tolerance-samples 5 --ring-size 1200 --negative-bias 3 --rnet-reliable-accuracy 0 "
    f"--rnet-start {2 * BATCH} --rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16"
)
ORACLE = f"{SPRL} --rnet oracle"

HAS_STAND_IN = importlib.util.find_spec("labmaze") is not None  # it has no wheel for Python 3.13
collect_ignore = [] if HAS_STAND_IN else ["test_dmlab.py"]

torch.set_num_threads(1)
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; its command is in tests/README.md")
    config.addinivalue_line("filterwarnings", "ignore:.*Overriding environment")  # each run of a script registers anew


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_STAND_IN and ("dmlab" in item.nodeid or "explore_" in item.nodeid):
            item.add_marker(pytest.mark.skip(reason="DeepMind Lab's stand-in needs labmaze"))


def steps(iterations):
    return f" --total-timesteps {iterations * BATCH}"


@cache
def load(script_name):
    """A script as a module, its main block left alone."""
    spec = importlib.util.spec_from_file_location(script_name.removesuffix(".py"), ROOT / script_name)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fp32(monkeypatch):
    """--precision auto is fp32 in the runs of the tests, whose numbers are compared with fp32's."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


@pytest.fixture(scope="session")
def script():
    return load(CANONICAL)


@contextlib.contextmanager
def main_of(script_name, flags, folder):
    """In the folder, with the command line and without drawing, which takes two thirds of a small run's time."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(Figure, "savefig", lambda *_, **__: None)
        patched.setattr(sys, "argv", [str(script_name), *shlex.split(flags)])
        patched.setattr(sys, "tracebacklimit", 1000, raising=False)  # which a run's end sets to 0
        yield
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(flags, script_name) runs a script's main block in this process and in tmp_path and returns its globals."""
    monkeypatch.chdir(tmp_path)

    def run(flags, script_name=CANONICAL):
        with main_of(script_name, flags, tmp_path):
            result = runpy.run_path(str(ROOT / script_name), run_name="__main__")
        result["lock"].lock.release()  # as the end of a process does
        return result

    return run


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """As `run`, for runs that several tests look at: each is made once per module, in a folder of its own."""
    kept = {}

    def shared_run(flags, script_name=CANONICAL):
        if (flags, script_name) not in kept:
            with main_of(script_name, flags, tmp_path_factory.mktemp("run")):
                kept[flags, script_name] = runpy.run_path(str(ROOT / script_name), run_name="__main__")
        return kept[flags, script_name]

    return shared_run


def parameters(result):
    """All that a run learned, by name."""
    networks = {name: result[name] for name in ("agent", "rnet") if hasattr(result.get(name), "state_dict")}
    return {f"{name}.{key}": value for name, part in networks.items() for key, value in part.state_dict().items()}


def assert_same_parameters(first, second):
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"not bitwise equal: {different}"


def farama(env_id):
    """The same world as minigrid itself shows it."""
    return ImgObsWrapper(FullyObsWrapper(gym.make(env_id, max_steps=MAX_STEPS)))


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


def fake_envs(shape=(1, 7, 7, 3), num_actions=7):
    """What the networks want to know of the environments."""
    return SimpleNamespace(
        single_observation_space=gym.spaces.Box(0, 255, shape, np.uint8),
        single_action_space=gym.spaces.Discrete(num_actions),
    )


def random_frames(*shape, size=7):
    """Frames of random but possible cell codes (..., size, size, 3) uint8."""
    return torch.stack([torch.randint(0, n, (*shape, size, size), dtype=torch.uint8) for n in (11, 6, 4)], -1)


def random_segments(rng, num_rows, num_envs, cut_probability):
    """Segment steps (T, N) of states whose segments are cut at random; the oldest may lie inside a segment."""
    segment_steps = np.zeros((num_rows, num_envs), np.int64)
    segment_steps[0] = rng.integers(0, 4, num_envs)
    for t in range(1, num_rows):
        segment_steps[t] = np.where(rng.random(num_envs) < cut_probability, 0, segment_steps[t - 1] + 1)
    return segment_steps


def slow_ends(segment_steps):
    """segment_ends by walking forward from every frame."""
    ends = np.zeros_like(segment_steps)
    for t, n in np.ndindex(*segment_steps.shape):
        last = t
        while last + 1 < len(segment_steps) and segment_steps[last + 1, n] > 0:
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
