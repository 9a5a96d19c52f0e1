"""The baselines ECO, ICM and GT-Grid: bonuses against slow readings and numbers found by hand, then whole runs."""

import copy
import math
import sys
from textwrap import dedent
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    BATCH,
    CANONICAL,
    FOUR_ROOMS,
    PPO,
    ROOT,
    SMALL,
    assert_same_parameters,
    fake_envs,
    load,
    sections,
    snapshot,
    steps,
)
from matplotlib.figure import Figure
from minigrid.core.constants import OBJECT_TO_IDX

sys.path.insert(0, str(ROOT / "analysis"))

import evaluate

ECO, ICM, GT_GRID = "ppo_eco.py", "ppo_icm.py", "ppo_gtgrid.py"
FLAGS = {
    ECO: f"{SMALL} --bonus-scale 0.1 --memory-size 6 --ring-size 1200 --negative-bias 3 --rnet-ready-accuracy 0 "
    f"--rnet-start {2 * BATCH} --rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16",
    ICM: f"{SMALL} --bonus-scale 0.5",
    GT_GRID: f"{SMALL} --bonus-scale 0.1",
}
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    """It takes two thirds of a small run's time, and other tests look at the curves."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)


@pytest.fixture(params=FLAGS)
def name(request):
    return request.param


def section(name, marker):
    return dedent(sections((ROOT / name).read_text())[marker])


def rollouts(trace):
    """Of each snapshot: itself, the rollout's frames (T + 1, N, ...) and what was added to the rewards (T, N)."""
    for shot in trace:
        yield shot, shot["obs"][shot["past"] :], shot["total_rewards"] - torch.from_numpy(shot["rewards"])


# ECO #################################################################################################################
class SlowMemory:
    """The memory in the paper's words: per environment a list of frames, judged anew whenever they are asked."""

    def __init__(self, num_envs, size):
        self.lists, self.size, self.ties, self.replaced = [[] for _ in range(num_envs)], size, 0, 0

    def clear(self):
        self.lists = [[] for _ in self.lists]

    def similarities(self, rnet, frames, starts, slots, q):
        result = np.zeros(starts.shape)
        for t, n in np.ndindex(*starts.shape):
            if starts[t, n]:
                self.lists[n] = []
            held = self.lists[n]
            if held:
                embeddings = rnet.embed(torch.stack([*held, frames[t, n]]))
                late = embeddings[-1:, 1].expand(len(held), -1)
                result[t, n] = np.percentile(rnet.compare(embeddings[:-1, 0], late).sigmoid().tolist(), q)
            self.ties += result[t, n] == 0.5
            if result[t, n] <= 0.5 and len(held) < self.size:
                held.append(frames[t, n])
            elif result[t, n] <= 0.5:
                held[slots[t, n]] = frames[t, n]
                self.replaced += 1
        return result


class TableRNet:
    """Looks the logits up by the frames' first byte; a pair of other than an early and a late embedding gives nan."""

    def __init__(self, num_states):
        self.logits, self.num_states = torch.full((2 * num_states, 2 * num_states), torch.nan), num_states
        choice = torch.randint(5, (num_states, num_states))
        self.logits[:num_states, num_states:] = torch.tensor([-3.0, -1.3, 0.0, 0.4, 2.0])[choice]

    def embed(self, frames):  # (B, ...) -> (B, 2, 1)
        states = frames.flatten(1)[:, 0].long()
        return torch.stack([states, states + self.num_states], 1).unsqueeze(-1)

    def compare(self, early, late):
        return self.logits[early[..., 0], late[..., 0]]


@pytest.mark.parametrize("q", [0.0, 37.5, 50.0, 90.0, 100.0])
def test_masked_percentile_is_numpys(q):
    """Of every number of values from none to all of them; what lies behind them is not looked at."""
    scores, counts = torch.rand(13, 12, generator=torch.Generator().manual_seed(0)), torch.arange(13)
    scores[:, 4] = scores[:, 1]
    expected = [0.0, *(np.percentile(scores[count, :count].numpy(), q) for count in counts[1:])]
    for behind in (-1.0, 2.0, torch.nan):
        masked = torch.where(torch.arange(12) < counts[:, None], scores, behind)
        np.testing.assert_allclose(load(ECO).masked_percentile(masked, counts, q), expected, rtol=1e-6)


def test_memory_against_lists():
    """Eight rollouts of five environments: the memory is carried over, overflows and is emptied by starts. The RNet
    changes twice; once the memory is cleared."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    fast, slow, rnet = load(ECO).EpisodicMemory(5, 4, (1, 1, 3), torch.uint8, CPU), SlowMemory(5, 4), TableRNet(30)
    for rollout in range(8):
        frames = torch.randint(30, (25, 5, 1, 1, 3), dtype=torch.uint8)
        starts = (rng.random((25, 5)) < 0.03) & (rollout > 0)
        if rollout in (2, 5):
            rnet, fast.embeddings = TableRNet(30), None
        if rollout == 6:
            fast.clear()
            slow.clear()
        torch.manual_seed(rollout)
        slots = torch.randint(4, (25, 5))
        torch.manual_seed(rollout)
        embeddings = rnet.embed(frames.flatten(0, 1)).unflatten(0, (25, 5))
        result = fast.similarities(rnet, frames, embeddings, starts, 90.0)
        expected = slow.similarities(rnet, frames, starts, slots, 90.0)
        np.testing.assert_allclose(result, expected, rtol=1e-6, err_msg=f"rollout {rollout}")
        assert (expected[starts] == 0).all(), "an empty memory resembles nothing"
        assert fast.counts.tolist() == [len(held) for held in slow.lists]
        for n, held in enumerate(slow.lists):
            assert fast.frames[n, : len(held)].tolist() == torch.stack(held).tolist()
    assert slow.ties > 10 and slow.replaced > 10, "too dull for a test"


def test_memory_state_goes_on():
    """A memory that was saved and loaded says what the other one says."""
    torch.manual_seed(0)
    frames, rnet = torch.randint(30, (50, 3, 1, 1, 3), dtype=torch.uint8), TableRNet(30)
    embeddings, starts = rnet.embed(frames.flatten(0, 1)).unflatten(0, (50, 3)), np.zeros((25, 3), bool)
    first, second = (load(ECO).EpisodicMemory(3, 9, (1, 1, 3), torch.uint8, CPU) for _ in range(2))
    first.similarities(rnet, frames[:25], embeddings[:25], starts, 90.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    results = []
    for memory in (first, second):
        torch.manual_seed(1)
        results.append(memory.similarities(rnet, frames[25:], embeddings[25:], starts, 90.0).tolist())
    assert results[0] == results[1]


def test_eco_rewards_are_those_of_the_lists(run):
    """Seven rollouts: r + scale * (bias - similarity), with the RNet of that moment. The RNet counts as not ready in
    the fourth, so that the memory misses frames and must be forgotten."""
    probes = {
        "INTRINSIC REWARD": "rng = torch.get_rng_state()\nschedule.ready = schedule.ready and iteration != 4",
        "ADVANTAGE": snapshot("obs past rewards total_rewards valid rng rnet schedule charts"),
    }
    flags = f"{FLAGS[ECO]} --bonus-bias 0.3 --memory-percentile 70 --stack-observations 2{steps(7)}"
    result = run(flags, ECO, probes)
    memory, ready = SlowMemory(4, 6), []
    for shot, frames, added in rollouts(result["trace"]):
        ready.append(shot["schedule"].ready)
        if not ready[-1]:
            memory.clear()
            assert not added.any() and "eco/bonus" not in shot["charts"]
            continue
        torch.set_rng_state(shot["rng"])
        with torch.no_grad():
            slots = torch.randint(6, added.shape)
            similarity = memory.similarities(shot["rnet"], frames[1:].unsqueeze(2), ~shot["valid"], slots, 70)
        np.testing.assert_allclose(added, 0.1 * (0.3 - similarity), atol=1e-6)
        assert shot["charts"]["eco/bonus"].item() == pytest.approx((0.3 - similarity)[shot["valid"]].mean(), rel=1e-5)
    assert ready == [False, False, True, False, True, True, True] and memory.replaced > 10


# ICM #################################################################################################################
# two transitions (phi, phi') and the weights of a model with two features, two hidden units and two actions
PHI, NEXT_PHI = torch.tensor([[1.0, 2.0], [1.0, 1.0]]), torch.tensor([[6.0, 3.0], [0.0, 0.0]])
PREDICT = [[[1.0, 0, 2, 0], [0, 1, 0, -3]], [0.0, 1], [[1.0, 1], [0, 2]], [0.5, -1]]
INVERSE = [[[1.0, 0, -1, 0], [0, 0.5, 0, 1]], [2.0, 0], [[1.0, 1], [-1, 0.5]], [0.0, 1]]


def tiny_icm(action_space):
    module = load(ICM)
    envs = SimpleNamespace(**vars(fake_envs()) | {"single_action_space": action_space})
    icm = module.ICM(envs, module.Args(), dim=2, hidden=2)
    for network, weights in ((icm.predict, PREDICT), (icm.inverse, INVERSE)):
        for parameter, values in zip(network.parameters(), weights, strict=True):
            parameter.data = torch.tensor(values)
    return icm


@pytest.mark.parametrize(
    "space, actions, errors, losses",
    [
        # hidden (3, 3), output (6.5, 5); hidden (1, -1), output (1.5, -1). logits (4, 3); (3.5, -1.75)
        (gym.spaces.Discrete(2), [0, 1], [2.125, 1.625], [math.log1p(math.exp(-1)), math.log1p(math.exp(5.25))]),
        # hidden (1, 0), output (1.5, -1); hidden (3, 2), output (5.5, 3)
        (gym.spaces.Discrete(2), [1, 0], [18.125, 19.625], [math.log1p(math.exp(1)), math.log1p(math.exp(-5.25))]),
        # hidden (2, 6), output (8.5, 11); hidden (-1, -1), output (0.5, -1). guesses (4, 3); (3.5, -1.75)
        (gym.spaces.Box(-1, 1, (2,)), [[0.5, -1.0], [-1.0, 1.0]], [35.125, 0.625], [14.125, 13.90625]),
    ],
    ids=["discrete", "other actions", "continuous"],
)
def test_icm_errors_by_hand(space, actions, errors, losses):
    icm, actions = tiny_icm(space), torch.tensor(actions)
    assert icm.forward_error(PHI, NEXT_PHI, actions).tolist() == errors
    assert icm.inverse_loss(PHI, NEXT_PHI, actions).tolist() == pytest.approx(losses, rel=1e-4)


def test_icm_rewards_are_the_clipped_errors(run):
    """Three rollouts, transition by transition, with the model as it was before the update."""
    probe = snapshot("obs past actions rewards total_rewards valid icm charts")
    flags = f"{FLAGS[ICM]} --bonus-clip 0.69 --stack-observations 2{steps(3)}"
    clipped = []
    for shot, frames, added in rollouts(run(flags, ICM, {"ADVANTAGE": probe})["trace"]):
        errors = np.zeros(added.shape)
        for t, n in np.ndindex(*errors.shape):
            with torch.no_grad():
                phi, next_phi = shot["icm"].features(frames[t : t + 2, n, None])
                errors[t, n] = shot["icm"].forward_error(phi, next_phi, shot["actions"][t, n])
        bonus = np.minimum(errors, 0.69)
        np.testing.assert_allclose(added, 0.5 * bonus, atol=1e-6)
        assert shot["charts"]["icm/bonus"].item() == pytest.approx(bonus[shot["valid"]].mean(), rel=1e-5)
        clipped += (errors > 0.69).flatten().tolist()
    assert 20 < sum(clipped) < 200, "too dull for a test"


@pytest.fixture
def icm_names(run):
    """The globals of a run whose update is one minibatch."""
    one_minibatch = "--update-epochs 1 --num-minibatches 1 --max-grad-norm 1e9 --stack-observations 2"
    return run(f"{FLAGS[ICM]} {one_minibatch}{steps(2)}", ICM)


def test_icm_loss_is_weighted_as_written(icm_names):
    """PPO's loss + scale * (weight * forward + (1 - weight) * inverse), and the same gradient. The means are over the
    valid rows: the frames of one that autoreset inserted are of two episodes."""
    agent, icm, valid = icm_names["agent"], icm_names["icm"], torch.from_numpy(icm_names["valid"])
    frames = icm_names["obs"][icm_names["past"] :]
    before = copy.deepcopy([agent.state_dict(), icm.state_dict()])
    ppo_loss = None
    for scale, weight in ((0.0, 0.8), (0.3, 0.8), (2.0, 0.25)):
        agent.load_state_dict(before[0])
        icm.load_state_dict(before[1])
        phi, next_phi = (icm.features(ends[valid].unsqueeze(1)) for ends in (frames[:-1], frames[1:]))
        transitions = phi, next_phi, icm_names["actions"][valid]
        forward, inverse = icm.forward_error(*transitions).mean(), icm.inverse_loss(*transitions).mean()
        expected = scale * (weight * forward + (1 - weight) * inverse)
        gradients = torch.autograd.grad(expected, icm.parameters())

        icm_names["args"].icm_loss_scale, icm_names["args"].forward_loss_weight = scale, weight
        exec(section(ICM, "UPDATE POLICY"), icm_names)
        loss, charts = icm_names["loss"].item(), icm_names["charts"]
        ppo_loss = loss if ppo_loss is None else ppo_loss
        assert loss - ppo_loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
        assert charts["icm/forward_loss"].item() == pytest.approx(forward.item(), rel=1e-5)
        assert charts["icm/inverse_loss"].item() == pytest.approx(inverse.item(), rel=1e-5)
        for parameter, gradient in zip(icm.parameters(), gradients):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    assert (~valid).sum() >= 4 and ppo_loss != loss


def test_bonus_of_a_repeated_transition_falls(icm_names):
    """One transition is trained on a hundred times: its bonus goes, that of most others stays."""
    row, env = np.argwhere(icm_names["valid"])[50]
    icm_names["valid"] = np.zeros_like(icm_names["valid"])
    icm_names["valid"][row, env] = True
    icm_names["args"].update_epochs, icm_names["optimizer"].param_groups[0]["lr"] = 100, 1e-3
    bonuses = []
    for marker in ("INTRINSIC REWARD", "UPDATE POLICY", "INTRINSIC REWARD"):
        exec(section(ICM, marker), icm_names)
        bonuses.append(icm_names["bonus"])
    ratio = bonuses[-1] / bonuses[0]
    assert ratio[row, env] < 0.01 and ratio.median() > 0.1


# GT-GRID #############################################################################################################
class SlowVisits:
    """A set of cells per environment."""

    def __init__(self, cell_size):
        self.cell_size, self.seen = cell_size, {}

    def first_visits(self, positions, starts):  # (T, N, 2), (T, N)
        result = np.zeros(starts.shape)
        for t, n in np.ndindex(*starts.shape):
            cell = tuple(int(side) // self.cell_size for side in positions[t, n])
            if starts[t, n]:
                self.seen[n] = set()
            else:
                result[t, n] = cell not in self.seen[n]
            self.seen[n].add(cell)
        return result


@pytest.mark.parametrize("cell_size", [1, 2])
def test_first_visits_of_walks_are_those_of_sets(cell_size):
    """Three worlds, rollouts of 16 steps whose borders lie inside episodes; there a saved and loaded map takes over."""
    module, rng = load(GT_GRID), np.random.default_rng(cell_size)
    envs = module.GridWorlds(FOUR_ROOMS, 3, 25)
    envs.reset(seed=cell_size)
    fast, slow = module.VisitedCells(envs, cell_size, CPU), SlowVisits(cell_size)
    assert fast.visited.shape == (3, {1: 49, 2: 16}[cell_size])
    starts, positions, cells = [np.ones(3, bool)], [[world.agent_pos for world in envs.worlds]], [fast.observe()]
    for _ in range(16 * 12 - 1):
        starts.append(envs.done)
        envs.step(rng.choice(3, 3, p=[0.2, 0.2, 0.6]))
        positions.append([world.agent_pos for world in envs.worlds])
        cells.append(fast.observe())
    starts, positions, cells = np.array(starts), np.array(positions), torch.from_numpy(np.array(cells))
    for rollout in np.split(np.arange(16 * 12), 12):
        result = fast.first_visits(cells[rollout], torch.from_numpy(starts[rollout]))
        np.testing.assert_array_equal(result, slow.first_visits(positions[rollout], starts[rollout]))
        assert not result[torch.from_numpy(starts[rollout])].any(), "a start earns nothing"
        state, fast = copy.deepcopy(fast.state_dict()), module.VisitedCells(envs, cell_size, CPU)
        fast.load_state_dict(state)
    assert starts.sum() > 15


def test_cells_of_an_oblong_map_are_told_apart():
    """3 x 8 squares in cells of 2: the cells' numbers are 0..7, one for each pair (x // 2, y // 2)."""
    positions = np.stack(np.meshgrid(np.arange(3), np.arange(8), indexing="ij"), -1).reshape(-1, 2)
    envs = SimpleNamespace(map_size=(3, 8), num_envs=24, positions=lambda: positions)
    visits = load(GT_GRID).VisitedCells(envs, 2, CPU)
    assert visits.observe().tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2 + [4, 4, 5, 5, 6, 6, 7, 7]
    assert visits.visited.shape == (24, 8)


def test_gtgrid_rewards_are_first_visits(run):
    """Four rollouts, with the agents' squares read off the frames."""
    probe = snapshot("obs past rewards total_rewards valid charts")
    flags = f"{FLAGS[GT_GRID]} --cell-size 2 --stack-observations 2{steps(4)}"
    visits, earned = SlowVisits(2), 0
    for shot, frames, added in rollouts(run(flags, GT_GRID, {"ADVANTAGE": probe})["trace"]):
        positions = np.argwhere(frames[..., 0].numpy() == OBJECT_TO_IDX["agent"])[:, 2:].reshape(33, 4, 2)
        if not visits.seen:
            visits.first_visits(positions[:1], np.ones((1, 4), bool))
        bonus = visits.first_visits(positions[1:], ~shot["valid"])
        np.testing.assert_allclose(added, 0.1 * bonus, atol=1e-6)
        assert shot["charts"]["gt-grid/bonus"].item() == pytest.approx(bonus[shot["valid"]].mean())
        earned += bonus.sum()
    assert earned > 20


# ALL THREE ###########################################################################################################
def unequal(first, second, path=""):
    """Paths of what differs between two checkpoints, bit by bit."""
    if isinstance(first, dict):
        keys = {path + f"/{key}" for key in first.keys() ^ second.keys()}
        return keys.union(*(unequal(first[key], second[key], f"{path}/{key}") for key in first.keys() & second.keys()))
    if isinstance(first, list) and len(first) == len(second):
        return set().union(*(unequal(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(first, second))))
    same = torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second
    return set() if same else {path}


def assert_same_checkpoints(*run_names):
    told = {"args", "command", "elapsed", "versions"}  # differ between any two runs
    saved = [torch.load(f"runs/{name}/agent.pt", weights_only=True) for name in run_names]
    assert unequal(*({key: part for key, part in one.items() if key not in told} for one in saved)) == set()
    return saved[0]


def test_without_bonus_every_baseline_is_plain_ppo(run):
    """Bit by bit, and nothing of the method is built."""
    plain = run(PPO + steps(3))
    for name, part in ((ECO, "rnet"), (ICM, "icm"), (GT_GRID, "visits")):
        result = run(f"{FLAGS[name]} --bonus-scale 0 --run-name {part}{steps(3)}", name)
        assert_same_parameters(result["agent"].state_dict(), plain["agent"].state_dict())
        assert result["history"] == plain["history"] and result[part] is None


# Ctrl-C in the fourth rollout; ECO's RNet was trained after the second, so its memory is in use
INTERRUPT = "if iteration == 4:\n    signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(
    "name, flags",
    [(ECO, "--save-ring"), (ICM, "--save-ring --stack-observations 2"), (GT_GRID, "")],
    ids=["eco", "icm", "gt-grid"],
)
def test_resumed_run_equals_uninterrupted_one(run, name, flags):
    flags = f"{FLAGS[name]} {flags}{steps(6)}"
    run(f"{flags} --run-name whole", name)
    assert len(run(flags, name, {"ROLLOUT": INTERRUPT})["history"]) == 3
    run("--resume runs/small/agent.pt", name)
    saved = assert_same_checkpoints("small", "whole")
    assert len(saved["history"]) == 6 and all(np.isfinite(row["bonus"]) for row in saved["history"][2:])


# what the policy did, and was paid, on the rows that autoreset inserts
SPOIL = """
inserted = torch.from_numpy(~valid)
trace.append(inserted.sum().item())
actions[inserted], logprobs[inserted], rewards[~valid] = (actions[inserted] + 1) % 7, -9.0, 1000.0
"""


def test_rows_that_autoreset_inserts_teach_nothing(run, name):
    """Their actions, rewards and bonuses are spoiled; the run stays the same bit by bit."""
    flags = FLAGS[name] + steps(4)
    run(f"{flags} --run-name clean", name)
    spoil_bonus = "total_rewards = total_rewards + 1000.0 * torch.from_numpy(~valid)"
    result = run(flags, name, {"INTRINSIC REWARD": SPOIL, "ADVANTAGE": spoil_bonus})
    assert sum(result["trace"]) > 20
    assert_same_checkpoints("small", "clean")


def test_learning_stays_on_the_device(run, name, monkeypatch):
    """As in test_device: three real iterations, then a fourth one's learning with every tensor on meta."""
    names = run(FLAGS[name] + steps(3), name)
    read_backs = []
    host_tolist = torch.Tensor.tolist

    def meta_int(value):
        return read_backs.append("int") or 40 if getattr(value, "is_meta", False) else int(value)

    def meta_tolist(tensor):
        return read_backs.append("tolist") or [0.9] * len(tensor) if tensor.is_meta else host_tolist(tensor)

    def to_meta(value):
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            return value.to(META)
        if type(value).__name__ in ("Ring", "EpisodicMemory", "VisitedCells"):
            vars(value).update({key: to_meta(part) for key, part in vars(value).items()})
        return value

    monkeypatch.setattr(torch.Tensor, "tolist", meta_tolist)
    names = {key: to_meta(value) for key, value in names.items()} | {"device": META, "int": meta_int}
    names["global_step"] += names["batch_size"]
    networks = [names[key] for key in ("agent", "icm") if key in names]
    names["optimizer"] = torch.optim.Adam(
        [p for network in networks for p in network.parameters()]
    )  # fused: not on meta
    for marker in ("INTRINSIC REWARD", "INTRINSIC REWARD", "ADVANTAGE", "UPDATE POLICY"):
        exec(section(name, marker), names)
    assert read_backs == []
    assert names["bonus"].device == names["returns"].device == names["loss"].device == META
    if name == ECO:
        assert names["memory"].embeddings.device == META  # made anew the first time, kept the second
        names["rnet_optimizer"] = torch.optim.Adam(names["rnet"].parameters())
        exec(section(name, "UPDATE RNET"), names)
        assert read_backs == ["int", "int", "tolist"] and names["memory"].embeddings is None


def test_continuous_icm_stays_on_the_device():
    icm, actions = tiny_icm(gym.spaces.Box(-1, 1, (2,))).to(META), torch.zeros(2, 2, device=META)
    transitions = PHI.to(META), NEXT_PHI.to(META), actions
    (icm.forward_error(*transitions) + icm.inverse_loss(*transitions)).sum().backward()
    assert {parameter.grad.device for parameter in (*icm.predict.parameters(), *icm.inverse.parameters())} == {META}


@pytest.mark.parametrize(
    "name, flag",
    [
        *((name, "--bonus-scale -1") for name in FLAGS),
        (ECO, "--memory-size 0"),
        (ECO, "--memory-percentile 101"),
        (ECO, "--bonus-bias nan"),
        (ECO, "--ring-size 100"),
        (ICM, "--forward-loss-weight 2"),
        (ICM, "--icm-loss-scale -1"),
        (ICM, "--bonus-clip -1"),
        (GT_GRID, "--cell-size 0"),
    ],
)
def test_bad_settings_are_refused(run, capsys, tmp_path, name, flag):
    """One line that names the setting, exit code 2, no file written."""
    with pytest.raises(SystemExit) as exit_:
        run(flag, name)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and name in error and flag in error, error
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_can_be_played(run, name, capsys):
    """evaluate.py plays the policy as it plays the same policy in a checkpoint of the canonical script."""
    run(f"{FLAGS[name]} --env-id MiniGrid-Empty-Random-5x5-v0{steps(3)}", name)
    torch.save(torch.load("runs/small/agent.pt", weights_only=True) | {"script": CANONICAL}, "twin.pt")
    lines = []
    for path in ("runs/small/agent.pt", "twin.pt"):
        capsys.readouterr()
        evaluate.main(evaluate.Args(path, episodes=30))
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1] and "over 30 episodes" in lines[0] and "success 0.00" not in lines[0]
