"""The baselines on Fetch, Atari and in mazes: settings by domain, bonuses against slow readings, and whole runs."""

import math
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from conftest import BATCH, CANONICAL, FOUR_ROOMS, KEY_DOORS, ROOT, load, steps
from test_baselines import CHARTS, ECO, GT_GRID, ICM, SlowMemory, SlowVisits, traced

ATARI, DMLAB, FETCH = "ppo_sprl_atari.py", "ppo_sprl_dmlab.py", "ppo_sprl_fetch.py"
ASTEROIDS, MONTEZUMA, REACH = "Asteroids-v5", "MontezumaRevenge-v5", "FetchReach-v4"
GOAL_SMALL, LARGE = "explore_goal_locations_small", "explore_goal_locations_large"
MANY = "explore_object_rewards_many"
MAZES = (GOAL_SMALL, LARGE, MANY)
slow = pytest.mark.slow

EVERYWHERE = dict(
    num_envs=12, num_steps=256, num_minibatches=4, update_epochs=4, gamma=0.99, gae_lambda=0.95, clip_coef=0.1,
    anneal_clip=True, anneal_lr=True, vf_coef=0.5, max_grad_norm=0.5,
)  # fmt: skip
RNET = dict(positive_bias=5, rnet_start=15_000, rnet_batch_size=64, label_smoothing=0.1)
MEMORY = RNET | dict(memory_size=200, memory_percentile=90.0)
ON_MINIGRID = dict(learning_rate=0.003, ent_coef=0.01, max_episode_steps=100, stack_observations=0)
ON_ATARI = dict(learning_rate=5e-4, ent_coef=0.01, max_episode_steps=10_000, stack_observations=3)
ON_FETCH = dict(learning_rate=5e-4, max_episode_steps=50, action_noise=0.003, n_substeps=20)
ON_DMLAB = dict(learning_rate=2.5e-4, stack_observations=0, total_timesteps=20_000_000)
RARELY = dict(ring_size=30_000, heldout_pairs=7_500, rnet_intervals=(6_000, 150_000, 150_000))
# the paper's tables, written down again
TABLE = {
    (ECO, FOUR_ROOMS): MEMORY | ON_MINIGRID | dict(
        k=3, bonus_scale=0.001, ring_size=60_000, heldout_pairs=15_000, rnet_intervals=(6_000, 12_000, 36_000),
        rnet_batch_size=128, rnet_learning_rate=1.5e-3,
    ),
    (ECO, MONTEZUMA): MEMORY | ON_ATARI | RARELY | dict(
        k=12, negative_bias=80, bonus_scale=0.001, rnet_weight_decay=0.03, rnet_learning_rate=3e-4,
        rnet_triplets=2_500, clip_rewards=True,
    ),
    (ECO, REACH): MEMORY | ON_FETCH | RARELY | dict(
        ent_coef=0.001, k=10, negative_bias=12, bonus_scale=0.0001, bonus_bias=1.0, rnet_learning_rate=1e-3,
    ),
    (ICM, FOUR_ROOMS): ON_MINIGRID | dict(bonus_clip=5.0),
    (ICM, "Hero-v5"): ON_ATARI | dict(clip_rewards=True),
    (ICM, "FetchSlide-v4"): ON_FETCH | dict(ent_coef=0.001),
    (GT_GRID, FOUR_ROOMS): ON_MINIGRID | dict(bonus_scale=0.01, cell_size=1),
    (GT_GRID, MONTEZUMA): ON_ATARI | dict(cell_size=16, clip_rewards=True),
    (ECO, LARGE): MEMORY | ON_DMLAB | dict(
        ent_coef=0.0021, k=5, negative_bias=20, bonus_scale=0.03, bonus_bias=0.5, ring_size=60_000,
        heldout_pairs=15_000, rnet_intervals=(6_000, 12_000, 36_000), rnet_weight_decay=1e-4, rnet_learning_rate=3e-4,
        rnet_triplets=2_500, rnet_width=64,
    ),
    (ICM, GOAL_SMALL): ON_DMLAB | dict(ent_coef=0.0042),
    (GT_GRID, MANY): ON_DMLAB | dict(ent_coef=0.0066, bonus_scale=0.0525, cell_size=30),
    (ATARI, None): RNET | ON_ATARI | RARELY | dict(
        k=12, tolerance=1, num_tolerance_samples=200, cost_percentile=90.0, negative_bias=80, cost_scale=0.05,
        cost_bias=0.0, rnet_weight_decay=0.03, rnet_learning_rate=3e-4, rnet_triplets=2_500,
        rnet_input="auto",
    ),
    (FETCH, None): RNET | ON_FETCH | RARELY | dict(
        ent_coef=0.001, k=10, tolerance=1, num_tolerance_samples=20, cost_percentile=90.0, negative_bias=12,
        cost_scale=0.0005, cost_bias=1.0,  # the paper's 0.05 lies outside its own sweep
    ),
}  # fmt: skip


# SETTINGS ############################################################################################################
def parse(name, flags):
    """The settings as the main block finds them."""
    module, env_id = load(name), re.findall(r"--env[-_]id[= ](\S+)", flags)
    settings = module.load_domain(env_id[0])[1] if env_id and hasattr(module, "load_domain") else {}
    return tyro.cli(module.Args, default=module.Args(**settings), args=flags.split())


def test_defaults_are_the_tables():
    for (name, env_id), settings in TABLE.items():
        args, expected = vars(parse(name, f"--env-id {env_id}" if env_id else "")), EVERYWHERE | settings
        assert {key: args[key] for key in expected} == expected, (name, env_id)
        assert env_id in (None, args["env_id"])


@pytest.mark.parametrize("name", [ECO, ICM])
def test_flags_go_before_the_domain(name):
    """In either spelling and place; what no flag names stays the domain's."""
    for flags in (
        f"--env-id {REACH} --learning-rate 0.2 --bonus-scale 3",
        f"--learning-rate 0.2 --bonus-scale=3 --env-id={REACH}",
        f"--bonus_scale 3 --env_id {REACH} --learning-rate 0.2",
    ):
        args = parse(name, flags)
        assert (args.env_id, args.learning_rate, args.bonus_scale) == (REACH, 0.2, 3.0)
        assert (args.max_episode_steps, args.ent_coef) == (50, 0.001)
    assert parse(name, "").env_id == FOUR_ROOMS and parse(name, "--num-envs 3").max_episode_steps == 100
    assert parse(name, "--env-id=Hero-v5 --stack-observations 0").stack_observations == 0


@pytest.mark.parametrize(
    "name, env_id, shown",
    [
        (ECO, REACH, {"bonus-scale": "0.0001", "bonus-bias": "1.0", "k": "10", "max-episode-steps": "50"}),
        (ICM, LARGE, {"ent-coef": "0.0042", "learning-rate": "0.00025"}),
        (GT_GRID, MONTEZUMA, {"learning-rate": "0.0005", "max-episode-steps": "10000"}),
        (GT_GRID, FOUR_ROOMS, {"learning-rate": "0.003", "max-episode-steps": "100"}),
    ],
)
def test_help_shows_the_domain(run, capsys, name, env_id, shown):
    with pytest.raises(SystemExit) as exit_:
        run(f"--env-id {env_id} --help", name)
    text = re.sub(r"[│\s]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out))
    assert exit_.value.code == 0
    for flag, value in shown.items():
        assert re.search(rf"--{flag} (INT|FLOAT) ((?!--[a-z]).)*\(default: {re.escape(value)}\)", text), flag


# NETWORKS ############################################################################################################
IDS = {CANONICAL: ("BabyAI-GoToObj-v0", KEY_DOORS), FETCH: (REACH,), ATARI: (MONTEZUMA, ASTEROIDS), DMLAB: MAZES}


@pytest.mark.parametrize("name", [ECO, ICM, GT_GRID])
def test_ids_lead_to_their_scripts(name):
    """MiniGrid is the baseline's own; the others are the SPRL scripts themselves, not copies."""
    module = load(name)
    for script_name, env_ids in IDS.items():
        if name == GT_GRID and script_name == FETCH:
            continue
        for env_id in env_ids:
            if (name, env_id) == (GT_GRID, ASTEROIDS):  # no positions
                continue
            expected = name if script_name == CANONICAL else script_name
            assert module.load_domain(env_id)[2].__file__ == str(ROOT / expected)


@pytest.mark.parametrize("name", [ECO, ICM, GT_GRID])
@pytest.mark.parametrize("env_id", ["my_package:MyMaze-v5", "BabyAI-GoToLocal-v5", "FetchReachDense-v4"])
def test_other_ids_are_taken_for_grids(name, env_id):
    """Neither another domain's endings nor its beginnings are enough."""
    assert load(name).load_domain(env_id)[0] == "minigrid"


def layers(network, kind):
    return [part for part in network.modules() if isinstance(part, kind)]


@pytest.mark.parametrize("env_id", [REACH, MONTEZUMA, MANY])
def test_networks_follow_the_domain(env_id):
    """Policy, ICM's features and ECO's RNet: inputs, outputs and depths as the paper has them."""
    flags = f"--env-id {env_id} --num-envs 2" + " --engine labmaze" * (env_id == MANY)
    args, module = parse(ICM, flags), load(ICM)
    domain = module.load_domain(env_id)[2]
    envs = domain.make_envs(args)
    agent, icm = domain.make_agent(envs, args), module.ICM(envs, args)
    outputs, channels = {REACH: (4, None), MONTEZUMA: (18, 4), MANY: (9, 3)}[env_id]
    assert agent.actor.out_features == icm.inverse[-1].out_features == outputs
    assert icm.predict[0].in_features == 128 + outputs and icm.predict[-1].out_features == 128
    if env_id == REACH:
        assert agent.actor_logstd.shape == (4,) and icm.num_actions is None
        assert [layer.in_features for layer in layers(agent.network, nn.Linear)] == [16, 256, 256, 256]
        assert domain.make_rnet(envs, args).embed(torch.zeros(2, 16)).shape[:2] == (2, 2)
        return
    for network in (agent.network, icm.embed):
        assert [conv.in_channels for conv in layers(network, nn.Conv2d)] == [channels, 32, 64]
    # ECO's own: a stem, 2-2-2-2 blocks of two convolutions, three of them with a shortcut's; four layers behind
    eco_args = parse(ECO, f"{flags} --rnet-width 4")
    rnet = domain.make_rnet(envs, eco_args, blocks=(2, 2, 2, 2), num_layers=4)
    convs = [conv for conv in layers(rnet.branch, nn.Conv2d) if conv.kernel_size == (3, 3)]
    assert [conv.out_channels for conv in convs] == [4] * 4 + [8] * 4 + [16] * 4 + [32] * 4
    assert layers(rnet.branch, nn.Conv2d)[0].in_channels == channels
    assert [layer.out_features for layer in layers(rnet.head, nn.Linear)] == [32, 32, 32, 1]
    envs.close()


def test_gaussian_inverse_error_by_hand():
    """-log p(a | s, s') of a unit Gaussian around the guess, less 4/2 log(2 pi)."""
    torch.manual_seed(0)
    module, args = load(ICM), parse(ICM, f"--env-id {REACH} --num-envs 1")
    icm = module.ICM(load(FETCH).make_envs(args), args)
    phi, next_phi, actions = torch.randn(3, 128), torch.randn(3, 128), 2 * torch.randn(3, 4)
    first, _, second = icm.inverse
    with torch.no_grad():
        losses, errors = icm.inverse_error(phi, next_phi, actions), icm.forward_error(phi, next_phi, actions)
        hidden = F.linear(torch.cat([phi, next_phi], 1), first.weight, first.bias).clamp(min=0)
        guesses = F.linear(hidden, second.weight, second.bias)
        first, _, second = icm.predict
        hidden = F.linear(torch.cat([phi, actions], 1), first.weight, first.bias).clamp(min=0)
        predicted = F.linear(hidden, second.weight, second.bias)
    for b in range(3):
        likelihood = 1.0
        for guess, action in zip(guesses[b].tolist(), actions[b].tolist()):
            likelihood *= math.exp(-((action - guess) ** 2) / 2) / math.sqrt(2 * math.pi)
        assert losses[b].item() == pytest.approx(-math.log(likelihood) - 2 * math.log(2 * math.pi), rel=1e-4)
        error = sum((p - q) ** 2 for p, q in zip(predicted[b].tolist(), next_phi[b].tolist())) / 2
        assert errors[b].item() == pytest.approx(error, rel=1e-4)


# BONUSES #############################################################################################################
SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 1 --run-name small"
SHORT, LAB = "--max-episode-steps 15", "--engine labmaze"  # a maze has a time of its own
ECO_FLAGS = (
    f"{SMALL} --bonus-scale 0.1 --bonus-bias 0.3 --memory-percentile 70 --memory-size 3 --ring-size 600 --k 2 "
    f"--negative-bias 3 --rnet-reliable-accuracy 0 --rnet-start {2 * BATCH} --rnet-batch-size 16 "
    f"--rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-triplets 32 --heldout-pairs 64"
)
RUNS = {  # flags, iterations
    (ECO, REACH): (f"{ECO_FLAGS} {SHORT}", 6),
    (ECO, ASTEROIDS): (f"{ECO_FLAGS} {SHORT} --rnet-width 4", 4),
    (ICM, REACH): (f"{SMALL} {SHORT} --bonus-scale 0.5", 3),
    (ICM, ASTEROIDS): (f"{SMALL} {SHORT} --bonus-scale 0.5", 2),
    (GT_GRID, MONTEZUMA): (f"{SMALL} --bonus-scale 0.1 --cell-size 8 --max-episode-steps 13", 2),
    (ECO, MANY): (f"{ECO_FLAGS} {LAB} --rnet-width 4", 4),
    (ICM, MANY): (f"{SMALL} {LAB} --bonus-scale 0.5", 2),
    (GT_GRID, GOAL_SMALL): (f"{SMALL} {LAB} --bonus-scale 0.1", 2),
}
SLOW_RUNS = [(ECO, ASTEROIDS), (ICM, ASTEROIDS), (ECO, MANY), (ICM, MANY)]
NAMES = {ECO: "rnet rnet_is_reliable segment_steps", ICM: "icm actions", GT_GRID: ""}


@pytest.mark.parametrize(
    "name, flags, is_end",
    [
        (ECO, f"{ECO_FLAGS} --bonus-bias 0", False),
        (ECO, f"{ECO_FLAGS} --bonus-bias 1", True),
        (ICM, f"{SMALL} --bonus-scale 0", False),
        (ICM, SMALL, True),  # its bonus is never negative
    ],
)
def test_nobody_is_paid_for_not_arriving(run, name, flags, is_end):
    """With a bonus for being somewhere Fetch's time limit is an end, without one it bootstraps."""
    result = run(f"--env-id {REACH} {SHORT} {flags}{steps(2)}", name)
    at_limit = result["truncations"]
    assert at_limit.sum() > 3 and (result["terminations"][at_limit] == is_end).all()


class Generous(gym.vector.VectorWrapper):
    """Pays a random reward now and then, also in rows that autoreset inserts; takes down all positions."""

    def __init__(self, envs):
        super().__init__(envs)
        self.map_size = getattr(envs, "map_size", None)
        self.rng, self.positions = np.random.default_rng(0), []

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.positions.append(info.get("position"))
        return obs, info

    def step(self, actions):
        obs, rewards, terminations, truncations, info = self.env.step(actions)
        self.positions.append(info.get("position"))
        gifts = 3 * self.rng.random(self.num_envs) * (self.rng.random(self.num_envs) < 0.2)
        return obs, rewards + gifts, terminations, truncations, info


def learned_rewards(env_id, trace):
    """What is learned from before the bonus: on Atari clipped, elsewhere as it is."""
    for shot in trace:
        yield shot.rewards.clip(-1, 1) if env_id in (ASTEROIDS, MONTEZUMA) else shot.rewards


class Deviation:
    """Of all discounted sums of rewards and bonuses so far, on Fetch; elsewhere nothing is divided."""

    def __init__(self):
        self.sums, self.seen = np.zeros(4), []

    def __call__(self, totals, valid):
        for t, n in np.argwhere(valid):
            self.sums[n] = 0.99 * self.sums[n] + totals[t, n]
            self.seen.append(self.sums[n])
        return np.std(self.seen)


def eco_bonuses(trace, slots):
    """bias - similarity to a memory of lists, with the RNet as the iteration before has left it."""
    memory = SlowMemory(4, 3)
    for before, shot in zip([trace[0], *trace], trace):  # nothing is trained in the first iteration
        with torch.no_grad():
            similarity = memory.similarities(before.rnet, shot.obs[1:], ~shot.valid, slots.pop(0), 70)
        yield 0.3 - similarity


def icm_bonuses(trace, slots):
    """The forward model's errors over their mean, with the model as the iteration before has left it."""
    yield None
    for before, shot in zip(trace, trace[1:]):
        icm = before.icm
        with torch.no_grad():
            phi = torch.stack([icm.embed(row) for row in shot.obs])
            actions = F.one_hot(shot.actions, icm.num_actions).float() if icm.num_actions else shot.actions
            errors = ((icm.predict(torch.cat([phi[:-1], actions], -1)) - phi[1:]) ** 2).sum(-1).numpy()
            yield (errors * shot.valid / errors[shot.valid].mean()).clip(max=5)


def grid_bonuses(cell_size, trace, positions):
    """First visits by sets."""
    visits, positions = SlowVisits(cell_size), np.array(positions)
    visits.first_visits(positions[:1], np.ones((1, 4), bool))
    for i, shot in enumerate(trace):
        yield visits.first_visits(positions[32 * i + 1 : 32 * i + 33], ~shot.valid)


@pytest.mark.parametrize(
    "name, env_id", [pytest.param(*case, marks=[slow] * (case in SLOW_RUNS)) for case in RUNS], ids=str
)
def test_bonuses_are_those_of_the_slow_readings(run, monkeypatch, name, env_id):
    """Of every rollout: the rewards that are learned from, and the weighted bonus."""
    flags, iterations = RUNS[name, env_id]
    domain = load(name).load_domain(env_id)[2]
    if env_id in MAZES:  # episodes of 13 steps, where no flag says so
        monkeypatch.setitem(domain.TASKS, env_id, (13, *domain.TASKS[env_id][1:]))
    made, make_envs = [], domain.make_envs
    monkeypatch.setattr(domain, "make_envs", lambda args: made.append(Generous(make_envs(args))) or made[0])
    names = NAMES[name] + " scaler" * (env_id == REACH)
    trace, slots = traced(run, f"--env-id {env_id} {flags}{steps(iterations)}", name, names)
    assert sum((~shot.valid).sum() for shot in trace) > 8 and all((shot.rewards > 1).any() for shot in trace)
    if name == GT_GRID:
        bonuses = grid_bonuses(8 if env_id == MONTEZUMA else 30, trace, made[0].positions)
    else:
        bonuses = {ECO: eco_bonuses, ICM: icm_bonuses}[name](trace, slots)
    scale, earned, deviation = {ECO: 0.1, ICM: 0.5, GT_GRID: 0.1}[name], [], Deviation()
    for shot, rewards, bonus in zip(trace, learned_rewards(env_id, trace), bonuses, strict=True):
        if bonus is None:  # and so the first totals are not known, but for what the script made of them
            continue
        is_paid = name != ECO or shot.rnet_is_reliable
        if name == ECO and env_id not in MAZES:  # where a reward cuts twice
            segment_steps = np.where(shot.valid & (shot.rewards == 0), shot.segment_steps[:-1] + 1, 0)
            np.testing.assert_array_equal(shot.segment_steps[1:], segment_steps)
        totals, divisor = rewards + scale * bonus * is_paid, 1.0
        if env_id == REACH and name == ICM:
            count, total, square = shot.scaler.moments.tolist()
            divisor = (square / count - (total / count) ** 2) ** 0.5
        elif env_id == REACH:
            divisor = deviation(totals, shot.valid)
        np.testing.assert_allclose(shot.total_rewards.numpy(), totals / divisor, atol=2e-4, rtol=1e-3)
        if CHARTS[name] in shot.charts:
            assert shot.charts[CHARTS[name]] == pytest.approx(bonus[shot.valid].mean(), rel=1e-3, abs=1e-4)
            earned.append(bonus)
    assert np.std(earned) > 0 and len(earned) == len(trace) - (name == ICM) and slots == []


@pytest.mark.parametrize("name", [ECO, ICM])
def test_resumed_run_goes_on(run, name):
    """Steps, history and the scale of the rewards go on; the settings are the first run's and not the domain's."""
    flags, _ = RUNS[name, REACH]
    before = run(f"--env-id {REACH} {flags}{steps(2)}", name)
    counted = before["scaler"].moments[0].item()
    after = run(f"--resume runs/small/agent.pt{steps(3)}", name)
    assert after["global_step"] == 3 * BATCH and after["history"][:2] == before["history"]
    changed = {key for key, value in vars(after["args"]).items() if value != getattr(before["args"], key)}
    assert changed == {"resume", "total_timesteps"}
    assert after["scaler"].moments[0].item() == counted + after["valid"].sum() > counted


# EVERY TASK OF THE PAPER #############################################################################################
GRIDS = [f"MiniGrid-{world}-{size}x{size}-v0" for world in ("FourRooms", "KeyDoors") for size in (7, 11)]
ROBOTS = [f"Fetch{task}-v4" for task in ("Reach", "Push", "Slide", "PickAndPlace")]
GAMES = [f"{game}-v5" for game in ("MontezumaRevenge", "Freeway", "MsPacman", "Gravitar", "Seaquest", "Hero")]
METHODS = {  # of each script
    "minigrid": (GRIDS, [CANONICAL, ECO, ICM, GT_GRID]),
    "fetch": (ROBOTS, [FETCH, ECO, ICM]),
    "atari": (GAMES, [ATARI, ECO, ICM]),
    "dmlab": (MAZES, [DMLAB, ECO, ICM, GT_GRID]),
}
CASES = [(name, tuple(env_ids), domain) for domain, (env_ids, names) in METHODS.items() for name in names]
QUICK = [(GT_GRID, (MONTEZUMA,), "atari"), (ICM, (LARGE,), "dmlab")]  # one game, one maze
TINY = "--num-envs 2 --num-steps 8 --num-minibatches 1 --update-epochs 1 --total-timesteps 32"
TINY_RNET = "--rnet-start 16 --negative-bias 1 --k 2 --rnet-triplets 16 --heldout-pairs 16"


@pytest.mark.parametrize(
    "name, env_ids, domain",
    [*QUICK, *(pytest.param(*case, marks=[slow] * (case[2] in ("atari", "dmlab"))) for case in CASES)],
    ids=lambda part: str(part).removesuffix(".py") if isinstance(part, str) else str(len(part)),
)
def test_every_task_starts(run, name, env_ids, domain):
    """Two iterations, an RNet training included; the method's own name is in all that is shown."""
    has_rnet = name not in (ICM, GT_GRID)
    method = {ECO: "eco", ICM: "icm", GT_GRID: "gt-grid"}.get(name, "sprl") + "-labmaze" * (domain == "dmlab")
    for env_id in env_ids:
        flags = f"--env-id {env_id} {TINY} --run-name {env_id}" + f" {LAB}" * (domain == "dmlab")
        if has_rnet:
            flags += f" {TINY_RNET}" + " --rnet-width 4" * (domain in ("atari", "dmlab"))
        result = run(flags, name)
        assert result["method"] == method
        assert [row["step"] for row in result["history"]] == [16, 32]
        assert any("rnet/loss" in row for row in result["history"]) == has_rnet
        saved = torch.load(f"runs/{env_id}/agent.pt", weights_only=True)
        assert saved["script"] == name and saved["args"]["env_id"] == env_id
