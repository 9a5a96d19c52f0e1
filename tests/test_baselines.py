"""The baselines ECO, ICM and GT-Grid: bonuses against slow readings and numbers found by hand, then whole runs."""

import copy
import math
import shutil
import subprocess
import sys
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
    random_frames,
    steps,
)
from minigrid.core.constants import OBJECT_TO_IDX
from tqdm import tqdm

sys.path.insert(0, str(ROOT / "analysis"))

import evaluate

ECO, ICM, GT_GRID = "ppo_eco.py", "ppo_icm.py", "ppo_gtgrid.py"
FLAGS = {
    ECO: f"{SMALL} --bonus-scale 0.1 --memory-size 6 --ring-size 1200 --negative-bias 3 --rnet-reliable-accuracy 0 "
    f"--rnet-start {2 * BATCH} --rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16",
    ICM: f"{SMALL} --bonus-scale 0.5",
    GT_GRID: f"{SMALL} --bonus-scale 0.1",
}
CHARTS = {ECO: "eco/bonus", ICM: "icm/bonus", GT_GRID: "gt-grid/bonus"}
META = torch.device("meta")


@pytest.fixture(params=FLAGS)
def name(request):
    return request.param


def traced(run, flags, script_name, names, then=lambda shot: None):
    """Runs a script. Returns copies of the named globals as each iteration's end finds them, and all random slots."""
    trace, slots, draw = [], [], torch.randint

    def look(*_):
        shot = sys._getframe(1).f_globals
        kept = ["obs", "rewards", "total_rewards", "valid", "charts", *names.split()]
        trace.append(SimpleNamespace(**{key: copy.deepcopy(shot[key]) for key in kept}))
        then(shot)

    def randint(*args, **kwargs):
        slots.append(draw(*args, **kwargs))
        return slots[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tqdm, "set_postfix", look)  # the main block calls it once an iteration
        patched.setattr(torch, "randint", randint)
        run(flags, script_name)
    return trace, slots


# ECO #################################################################################################################
class SlowMemory:
    """The memory in the paper's words: per environment a list of states, judged anew whenever they are asked."""

    def __init__(self, num_envs, size):
        self.lists, self.size, self.ties, self.replaced = [[] for _ in range(num_envs)], size, 0, 0

    def similarities(self, rnet, obs, starts, slots, q):
        result = np.zeros(starts.shape)
        for t, n in np.ndindex(*starts.shape):
            if starts[t, n]:
                self.lists[n] = []
            held = self.lists[n]
            if held:
                embeddings = rnet.embed(torch.stack([*held, obs[t, n]]))
                late = embeddings[-1:, 1].expand(len(held), -1)
                result[t, n] = np.percentile(rnet.compare(embeddings[:-1, 0], late).sigmoid().tolist(), q)
            self.ties += result[t, n] == 0.5
            if result[t, n] <= 0.5 and len(held) < self.size:
                held.append(obs[t, n])
            elif result[t, n] <= 0.5:
                held[slots[t, n]] = obs[t, n]
                self.replaced += 1
        return result


class TableRNet:
    """Looks the logits up by a state's first byte; a pair of other than an early and a late embedding gives nan."""

    def __init__(self, num_states):
        self.logits, self.num_states = torch.full((2 * num_states, 2 * num_states), torch.nan), num_states
        choice = torch.randint(5, (num_states, num_states))
        self.logits[:num_states, num_states:] = torch.tensor([-3.0, -1.3, 0.0, 0.4, 2.0])[choice]

    def embed(self, obs):  # (B, ...) -> (B, 2, 1)
        states = obs.flatten(1)[:, 0].long()
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
    rng, shown = np.random.default_rng(0), torch.zeros((1, 5, 1, 1, 3), dtype=torch.uint8)
    fast, slow, rnet = load(ECO).EpisodicMemory(4, shown), SlowMemory(5, 4), TableRNet(30)
    for rollout in range(8):
        obs = torch.randint(30, (25, 5, 1, 1, 3), dtype=torch.uint8)
        starts = (rng.random((25, 5)) < 0.03) & (rollout > 0)
        if rollout in (2, 5):
            rnet, fast.embeddings = TableRNet(30), None
        torch.manual_seed(rollout)
        slots = torch.randint(4, (25, 5))
        torch.manual_seed(rollout)
        embeddings = rnet.embed(obs.flatten(0, 1)).unflatten(0, (25, 5))
        result = fast.similarities(rnet, obs, embeddings, starts, 90.0)
        expected = slow.similarities(rnet, obs, starts, slots, 90.0)
        np.testing.assert_allclose(result, expected, rtol=1e-6, err_msg=f"rollout {rollout}")
        assert (expected[starts] == 0).all(), "an empty memory resembles nothing"
        assert fast.counts.tolist() == [len(held) for held in slow.lists]
        assert (fast.most >= fast.counts.numpy()).all()
        for n, held in enumerate(slow.lists):
            assert fast.obs[n, : len(held)].tolist() == torch.stack(held).tolist()
    assert slow.ties > 10 and slow.replaced > 10, "too dull for a test"


@pytest.mark.parametrize("whole_bias", [False, True])
def test_eco_rewards_are_those_of_the_lists(run, whole_bias):
    """Seven rollouts: r + scale * (bias - similarity), with the RNet of that moment. The RNet counts as unreliable in
    the fourth: the memory goes on, but its bonus is not paid. By the authors' rule a state that enters the memory, with
    0.5 or less, earns the whole bias."""

    def doubt(shot):
        shot["args"].rnet_reliable_accuracy = float(shot["iteration"] == 3)

    flags = f"{FLAGS[ECO]} --memory-size 2 --bonus-bias 0.3 --memory-percentile 70 --stack-observations 2{steps(7)}"
    flags += " --whole-bias" * whole_bias
    trace, slots = traced(run, flags, ECO, "rnet rnet_is_reliable", doubt)
    assert [shot.rnet_is_reliable for shot in trace] == [False, False, True, False, True, True, True]
    memory = SlowMemory(4, 2)
    for before, shot in zip([trace[0], *trace], trace):  # nothing is trained in the first
        added = shot.total_rewards - torch.from_numpy(shot.rewards)
        with torch.no_grad():
            similarity = memory.similarities(before.rnet, shot.obs[1:], ~shot.valid, slots.pop(0), 70)
        if whole_bias:
            similarity[similarity <= 0.5] = 0
        np.testing.assert_allclose(added, shot.rnet_is_reliable * 0.1 * (0.3 - similarity), atol=1e-6)
        assert shot.charts["eco/bonus"] == pytest.approx((0.3 - similarity)[shot.valid].mean(), rel=1e-5)
    assert slots == [] and memory.replaced > 10


def test_eco_stays_on_the_device():
    """On meta a value that is read back raises: two rollouts, the embeddings made anew in the first."""
    module = load(ECO)
    rnet, obs = module.make_rnet(fake_envs(), module.Args()).to(META), random_frames(5, 4, 1).to(META)
    memory, embeddings = module.EpisodicMemory(3, obs), module.embed_all(rnet, obs)
    for _ in range(2):
        similarity = memory.similarities(rnet, obs, embeddings, np.zeros((5, 4), bool), 90.0)
    assert {part.device for part in (similarity, memory.counts, memory.obs, memory.embeddings)} == {META}


# ICM #################################################################################################################
# two transitions (phi, phi') and the weights of a model with two features, two hidden units and two actions
PHI, NEXT_PHI = torch.tensor([[1.0, 2.0], [1.0, 1.0]]), torch.tensor([[6.0, 3.0], [0.0, 0.0]])
PREDICT = [[[1.0, 0, 2, 0], [0, 1, 0, -3]], [0.0, 1], [[1.0, 1], [0, 2]], [0.5, -1]]
INVERSE = [[[1.0, 0, -1, 0], [0, 0.5, 0, 1]], [2.0, 0], [[1.0, 1], [-1, 0.5]], [0.0, 1]]


def tiny_icm(action_space):
    module = load(ICM)
    icm = module.ICM(fake_envs(num_actions=2), module.Args(), dim=2, hidden=2)
    icm.num_actions = 2 if isinstance(action_space, gym.spaces.Discrete) else None
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
    assert icm.inverse_error(PHI, NEXT_PHI, actions).tolist() == pytest.approx(losses, rel=1e-4)


def test_icm_rewards_are_the_divided_and_clipped_errors(run):
    """Two rollouts, transition by transition, with the model as it was before the update."""
    flags = f"{FLAGS[ICM]} --bonus-clip 1.02 --learning-rate 1e-5 --stack-observations 2{steps(3)}"
    trace, _ = traced(run, flags, ICM, "icm actions")
    clipped = []
    for before, shot in zip(trace, trace[1:]):
        errors = np.zeros((32, 4))
        for t, n in np.ndindex(32, 4):
            with torch.no_grad():
                phi, next_phi = before.icm.embed(shot.obs[t : t + 2, n])
                errors[t, n] = before.icm.forward_error(phi, next_phi, shot.actions[t, n])
        bonus = np.minimum(errors * shot.valid / errors[shot.valid].mean(), 1.02)
        np.testing.assert_allclose(shot.total_rewards.numpy(), shot.rewards + 0.5 * bonus, atol=1e-5)
        assert shot.charts["icm/bonus"] == pytest.approx(bonus[shot.valid].mean(), rel=1e-5)
        assert shot.charts["icm/forward_error"] == pytest.approx(errors[shot.valid].mean(), rel=1e-4)
        clipped += (bonus == 1.02).flatten().tolist()
    assert 20 < sum(clipped) < 200, "too dull for a test"


def test_icm_loss_by_hand(run):
    """PPO's loss + forward + inverse loss, and the same gradient, in the features of the inverse loss alone. The means
    are over the valid rows: a row that autoreset inserted has states of two episodes. At a rate of 0 no run changes
    anything, so that PPO's part is that of a run without a bonus but for the rewards, which weigh next to nothing."""
    flags = "--update-epochs 1 --num-minibatches 1 --max-grad-norm 1e9 --learning-rate 0 --bonus-scale 1e-12"
    results = []
    (shot,), _ = traced(run, f"{FLAGS[ICM]} {flags} --run-name with{steps(1)}", ICM, "icm actions", results.append)
    icm, valid = shot.icm, torch.from_numpy(shot.valid)
    phi, next_phi = (icm.embed(ends[valid]) for ends in (shot.obs[:-1], shot.obs[1:]))
    forward = icm.forward_error(phi.detach(), next_phi.detach(), shot.actions[valid]).mean()
    inverse = icm.inverse_error(phi, next_phi, shot.actions[valid]).mean()
    gradients = torch.autograd.grad(forward + inverse, icm.parameters())
    charts = results[0]["history"][-1]
    args = results[0]["args"]
    ppo_loss = charts["losses/policy_loss"] - args.ent_coef * charts["losses/entropy"]
    ppo_loss += args.vf_coef * charts["losses/value_loss"]
    assert results[0]["loss"].item() - ppo_loss == pytest.approx((forward + inverse).item(), rel=1e-4)
    assert shot.charts["icm/forward_loss"] == pytest.approx(forward.item(), rel=1e-5)
    assert shot.charts["icm/inverse_loss"] == pytest.approx(inverse.item(), rel=1e-5)
    for parameter, gradient in zip(results[0]["icm"].parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    assert (~valid).sum() >= 4


def test_icm_is_alive(run):
    """After some thousand steps the bonus is not 0, nor constant, and the features tell the actions apart."""
    flags = "--env-id MiniGrid-Empty-Random-6x6-v0 --num-envs 8 --num-steps 64 --max-episode-steps 40 --run-name alive"
    history = run(f"{flags} --total-timesteps 8192", ICM)["history"]
    assert all(row["icm/bonus"] > 0.5 and row["icm/forward_error"] > 1e-3 for row in history)
    assert history[0]["icm/inverse_loss"] == pytest.approx(math.log(7), abs=0.1)  # chance
    assert history[-1]["icm/inverse_loss"] < 1.5


def test_bonus_of_a_repeated_transition_falls():
    """One transition is trained on a hundred times: its bonus goes, that of most others stays."""
    torch.manual_seed(0)
    module, actions = load(ICM), torch.arange(20) % 7
    icm, obs, next_obs = module.ICM(fake_envs(), module.Args()), random_frames(20, 1), random_frames(20, 1)
    optimizer, bonuses = torch.optim.Adam(icm.parameters(), 1e-3), []
    for _ in range(101):
        transitions = icm.embed(obs), icm.embed(next_obs), actions
        errors = icm.forward_error(*(part.detach() for part in transitions))
        bonuses.append(errors.detach())
        optimizer.zero_grad()
        (0.8 * errors[3] + 0.2 * icm.inverse_error(*transitions)[3]).backward()
        optimizer.step()
    ratio = bonuses[-1] / bonuses[0]
    assert ratio[3] < 0.01 and ratio.median() > 0.1


@pytest.mark.parametrize("space", [gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (2,))], ids=["discrete", "continuous"])
def test_icm_stays_on_the_device(space):
    icm, obs = tiny_icm(space).to(META), random_frames(2, 1).to(META)
    actions = torch.zeros((2, *space.shape), dtype=torch.float32 if space.shape else torch.int64, device=META)
    transitions = icm.embed(obs), icm.embed(obs), actions
    (icm.forward_error(*transitions) + icm.inverse_error(*transitions)).sum().backward()
    assert {parameter.grad.device for parameter in icm.parameters()} == {META}


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
    """Three worlds, rollouts of 16 steps whose borders lie inside episodes."""
    module, rng = load(GT_GRID), np.random.default_rng(cell_size)
    envs = module.GridWorlds(FOUR_ROOMS, 3, 1, 25)
    envs.reset(seed=cell_size)
    visited, slow = np.zeros((3, *(1 + side // cell_size for side in envs.map_size)), bool), SlowVisits(cell_size)
    starts, positions = [np.ones(3, bool)], [[world.agent_pos for world in envs.worlds]]
    for _ in range(16 * 12 - 1):
        starts.append(envs.done)
        info = envs.step(rng.choice(3, 3, p=[0.2, 0.2, 0.6]))[-1]
        positions.append([world.agent_pos for world in envs.worlds])
        np.testing.assert_array_equal(info["position"], positions[-1])
    starts, positions = np.array(starts), np.array(positions)
    for rollout in np.split(np.arange(16 * 12), 12):
        result = module.first_visits(visited, positions[rollout], starts[rollout], cell_size)
        np.testing.assert_array_equal(result, slow.first_visits(positions[rollout], starts[rollout]))
        assert not result[starts[rollout]].any(), "a start earns nothing"
        assert visited.sum((1, 2)).tolist() == [len(slow.seen[n]) for n in range(3)]
    assert starts.sum() > 15


def test_cells_of_an_oblong_map_are_told_apart():
    """One walker over 3 x 8 squares in cells of 2: a bonus for the first square of each of the 2 x 4 cells."""
    positions = np.stack(np.meshgrid(np.arange(3), np.arange(8), indexing="ij"), -1).reshape(-1, 1, 2)
    bonus = load(GT_GRID).first_visits(np.zeros((1, 2, 5), bool), positions, np.zeros((24, 1), bool), 2)
    assert bonus[:, 0].tolist() == [1, 0] * 4 + [0] * 8 + [1, 0] * 4


def test_gtgrid_rewards_are_first_visits(run):
    """Four rollouts, with the agents' squares read off the observations."""
    flags = f"{FLAGS[GT_GRID]} --cell-size 2 --stack-observations 2{steps(4)}"
    visits, earned = SlowVisits(2), 0
    for shot in traced(run, flags, GT_GRID, "")[0]:
        positions = np.argwhere(shot.obs[:, :, -1, ..., 0].numpy() == OBJECT_TO_IDX["agent"])[:, 2:].reshape(33, 4, 2)
        if not visits.seen:
            visits.first_visits(positions[:1], np.ones((1, 4), bool))
        bonus = visits.first_visits(positions[1:], ~shot.valid)
        np.testing.assert_allclose(shot.total_rewards.numpy(), shot.rewards + 0.1 * bonus, atol=1e-6)
        assert shot.charts["gt-grid/bonus"] == pytest.approx(bonus[shot.valid].mean())
        earned += bonus.sum()
    assert earned > 20


# ALL THREE ###########################################################################################################
def history_without(result, *names):
    return [{key: row[key] for key in row if key not in ("charts/SPS", *names)} for row in result["history"]]


def test_without_bonus_every_baseline_is_plain_ppo(run):
    """Bit by bit, and no network of the method is built. GT-Grid's bonus is still shown."""
    plain = run(PPO + steps(3))
    for name, part in ((ECO, "rnet"), (ICM, "icm"), (GT_GRID, "gt-grid")):
        result = run(f"{FLAGS[name]} --bonus-scale 0 --run-name {part}{steps(3)}", name)
        assert_same_parameters(result["agent"].state_dict(), plain["agent"].state_dict())
        assert history_without(result, "gt-grid/bonus") == history_without(plain)
        assert result.get(part) is None and result["method"] == "ppo"


def test_rows_that_autoreset_inserts_teach_nothing(run, name, tmp_path):
    """A copy whose worlds pay 1000 in them: the run stays the same bit by bit."""
    clean = run(f"{FLAGS[name]} --run-name clean{steps(4)}", name)
    source, spoiled = (ROOT / name).read_text(), tmp_path / name
    paid = source.replace(
        "            if self.done[i]:\n", "            if self.done[i]:\n                rewards[i] = 1000\n"
    )
    assert paid != source
    spoiled.write_text(paid)
    result = run(FLAGS[name] + steps(4), spoiled)
    assert (result["rewards"][~result["valid"]] == 1000).all() and (~result["valid"]).sum() >= 4
    assert history_without(result) == history_without(clean)
    for part in {"agent", "rnet", "icm"} & result.keys():
        assert_same_parameters(result[part].state_dict(), clean[part].state_dict())


def test_resumed_run_goes_on(run, name):
    """Networks, counters and history go on; nothing of an old episode is remembered."""
    before = run(FLAGS[name] + steps(4), name)
    after = run(f"--resume runs/small/agent.pt{steps(7)}", name)
    assert after["global_step"] == 7 * BATCH and after["history"][:4] == before["history"]
    assert [row["step"] for row in after["history"]] == [BATCH * i for i in range(1, 8)]
    assert all(CHARTS[name] in row for row in after["history"][4:])
    unchanged = run("--resume runs/small/agent.pt", name)  # nothing is left to do
    for part in {"agent", "rnet", "icm"} & after.keys():
        assert_same_parameters(unchanged[part].state_dict(), after[part].state_dict())
    if name == GT_GRID:
        assert unchanged["visited"].sum() == 4  # where the new episodes start
    if name == ECO:
        assert not unchanged["memory"].counts.any()


TWICE = """
import runpy, sys
script, refused, accepted = sys.argv[1:]
for flags in (refused, accepted):
    sys.argv = [script, *flags.split()]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print("ENDS with", end.code, file=sys.stderr)
"""


def test_a_copy_alone(name, tmp_path):
    """In an empty folder it runs on MiniGrid; on other domains one line names the file that is missing. Both in one
    process, whose start takes longest."""
    shutil.copy(ROOT / name, tmp_path)
    env_id, domain = ("MontezumaRevenge-v5", "atari") if name == GT_GRID else ("FetchReach-v4", "fetch")
    tiny = "--num-envs 2 --num-steps 8 --num-minibatches 1 --total-timesteps 16 --run-name small"
    command = [sys.executable, "-c", TWICE, name, f"--env-id {env_id}", tiny]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    refused, accepted = result.stderr.split("ENDS with 2\n")
    assert refused.startswith(f"{name}: error: --env-id {env_id} needs ppo_sprl_{domain}.py"), refused
    assert refused.count("\n") == 1 and "ENDS" not in accepted, result.stderr
    assert (tmp_path / "runs/small/agent.pt").exists() and "done at step 16," in accepted


def test_checkpoints_of_another_domain_can_be_played(run, capsys):
    run(f"{SMALL} --env-id FetchReach-v4 --bonus-scale 0.5{steps(1)}", ICM)
    evaluate.main(evaluate.Args("runs/small/agent.pt", episodes=2))
    assert "over 2 episodes" in capsys.readouterr().out


def test_checkpoints_can_be_played(run, name, capsys):
    """evaluate.py plays the policy as it plays the same policy in a checkpoint of the canonical script."""
    run(f"{FLAGS[name]} --env-id MiniGrid-Empty-Random-5x5-v0{steps(3)}", name)
    saved = torch.load("runs/small/agent.pt", weights_only=True)
    known = vars(load(CANONICAL).Args()).keys()
    settings = {key: value for key, value in saved["args"].items() if key in known}
    torch.save(saved | {"script": CANONICAL, "args": settings}, "twin.pt")
    lines = []
    for path in ("runs/small/agent.pt", "twin.pt"):
        capsys.readouterr()
        evaluate.main(evaluate.Args(path, episodes=30))
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1] and "over 30 episodes" in lines[0] and "success 0.00" not in lines[0]
