"""The baselines on Fetch, Atari and in mazes: settings by domain, bonuses against slow readings, and resumed runs."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tyro
from conftest import BATCH, load, random_ages, snapshot, steps
from test_atari import ASTEROIDS, ATARI, MONTEZUMA
from test_baselines import ECO, GT_GRID, ICM, SlowMemory, SlowVisits
from test_dmlab import DMLAB, LARGE, MANY
from test_dmlab import SMALL as GOAL_SMALL
from test_fetch import FETCH, REACH, SlowNormalizer

FOUR_ROOMS, META = "MiniGrid-FourRooms-7x7-v0", torch.device("meta")
EVERYWHERE = dict(
    num_envs=12, num_steps=256, num_minibatches=4, update_epochs=4, gamma=0.99, gae_lambda=0.95, clip_coef=0.1,
    anneal_clip=True, anneal_lr=True, vf_coef=0.5, max_grad_norm=0.5,
)  # fmt: skip
RNET = dict(positive_bias=5, negative_cap=False, rnet_start=15_000, rnet_batch_size=64, label_smoothing=0.1)
MEMORY = RNET | dict(memory_size=200, memory_percentile=90.0)
ON_MINIGRID = dict(learning_rate=0.003, ent_coef=0.01, max_episode_steps=100, stack_observations=0)
ON_ATARI = dict(learning_rate=5e-4, ent_coef=0.01, max_episode_steps=10_000, stack_observations=3)
ON_FETCH = dict(learning_rate=5e-4, max_episode_steps=50, stack_observations=0, action_noise=0.003, n_substeps=20)
ON_DMLAB = dict(learning_rate=2.5e-4, stack_observations=0, total_timesteps=20_000_000)
RARELY = dict(ring_size=30_000, heldout_pairs=7_500, rnet_intervals=(6_000, 150_000, 150_000))
# METHOD.md's tables, written down again
TABLE = {
    (ECO, FOUR_ROOMS): MEMORY | ON_MINIGRID | dict(
        k=3, bonus_scale=0.001, ring_size=60_000, heldout_pairs=15_000, rnet_intervals=(6_000, 12_000, 36_000),
    ),
    (ECO, MONTEZUMA): MEMORY | ON_ATARI | RARELY | dict(
        k=12, negative_bias=80, bonus_scale=0.001, rnet_weight_decay=0.03, rnet_learning_rate=3e-4,
        rnet_triplets=2_500,
    ),
    (ECO, REACH): MEMORY | ON_FETCH | RARELY | dict(
        ent_coef=0.001, k=10, negative_bias=12, bonus_scale=0.0001, bonus_bias=1.0,
    ),
    (ICM, FOUR_ROOMS): ON_MINIGRID | dict(bonus_scale=0.1, forward_loss_weight=0.8, icm_loss_scale=0.3),
    (ICM, "Hero-v5"): ON_ATARI | dict(bonus_scale=0.01, forward_loss_weight=1.0, icm_loss_scale=1.0),
    (ICM, "FetchSlide-v4"): ON_FETCH | dict(
        ent_coef=0.001, bonus_scale=0.001, forward_loss_weight=1.0, icm_loss_scale=1.0,
    ),
    (GT_GRID, FOUR_ROOMS): ON_MINIGRID | dict(bonus_scale=0.01, cell_size=1),
    (GT_GRID, MONTEZUMA): ON_ATARI,
    (ECO, LARGE): MEMORY | ON_DMLAB | dict(
        ent_coef=0.0021, k=5, negative_bias=20, bonus_scale=0.03, bonus_bias=0.5, ring_size=60_000,
        heldout_pairs=15_000, rnet_intervals=(6_000, 12_000, 36_000), rnet_weight_decay=1e-4, rnet_learning_rate=3e-4,
        rnet_triplets=2_500, rnet_width=64,
    ),
    (ICM, GOAL_SMALL): ON_DMLAB | dict(
        ent_coef=0.0042, bonus_scale=0.55, bonus_clip=1.0, forward_loss_weight=0.96, icm_loss_scale=64.0,
    ),
    (GT_GRID, MANY): ON_DMLAB | dict(ent_coef=0.0066, bonus_scale=0.0525, cell_size=30),
    (ATARI, None): RNET | ON_ATARI | RARELY | dict(
        k=12, tolerance=1, num_tolerance_samples=200, cost_percentile=90.0, negative_bias=80, cost_scale=0.05,
        cost_bias=0.0, rnet_weight_decay=0.03, rnet_learning_rate=3e-4, rnet_triplets=2_500,
        rnet_input="pixel-difference",
    ),
    (FETCH, None): RNET | ON_FETCH | RARELY | dict(
        ent_coef=0.001, k=10, tolerance=1, num_tolerance_samples=20, cost_percentile=90.0, negative_bias=12,
        cost_scale=0.0005, cost_bias=1.0,  # the paper's 0.05 lies outside its own sweep
    ),
}  # fmt: skip


# SETTINGS ############################################################################################################
def parse(name, flags):
    """The settings as the main block finds them."""
    module = load(name)
    default = module.domain_defaults(flags.split()) if hasattr(module, "domain_defaults") else module.Args()
    return tyro.cli(module.Args, default=default, args=flags.split())


@pytest.mark.parametrize("name, env_id", TABLE, ids=lambda part: str(part).removesuffix(".py"))
def test_defaults_are_the_tables(name, env_id):
    args = vars(parse(name, f"--env-id {env_id}" if env_id else ""))
    expected = EVERYWHERE | TABLE[name, env_id]
    assert {key: args[key] for key in expected} == expected
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
        (ICM, MONTEZUMA, {"bonus-scale": "0.01", "forward-loss-weight": "1.0", "stack-observations": "3"}),
        (GT_GRID, MONTEZUMA, {"learning-rate": "0.0005", "max-episode-steps": "10000"}),
        (GT_GRID, FOUR_ROOMS, {"learning-rate": "0.003", "max-episode-steps": "100"}),
        (ECO, MANY, {"bonus-scale": "0.03", "k": "5", "total-timesteps": "20000000"}),
        (ICM, LARGE, {"bonus-scale": "0.55", "bonus-clip": "1.0", "icm-loss-scale": "64.0"}),
        (GT_GRID, GOAL_SMALL, {"bonus-scale": "0.0525", "cell-size": "30", "ent-coef": "0.0066"}),
    ],
)
def test_help_shows_the_domain(run, capsys, name, env_id, shown):
    with pytest.raises(SystemExit) as exit_:
        run(f"--env-id {env_id} --help", name)
    text = re.sub(r"[│\s]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out))
    assert exit_.value.code == 0
    for flag, value in shown.items():
        assert re.search(rf"--{flag} (INT|FLOAT) ((?!--[a-z]).)*\(default: {re.escape(value)}\)", text), flag


@pytest.mark.parametrize(
    "name, env_id, said",
    [
        (ECO, "Hero-v4", "FetchReach-v4"),
        (ECO, "Montezuma-v5", MONTEZUMA),
        (ECO, "FetchRech-v4", REACH),
        (ICM, "Nothing", FOUR_ROOMS),
        (ICM, "MiniGrid-FourRoms-7x7-v0", FOUR_ROOMS),
        (GT_GRID, REACH, MONTEZUMA),
        (GT_GRID, "Freeway-v5", MONTEZUMA),
        (ICM, "explore_goal_location_small", GOAL_SMALL),
        (GT_GRID, "dmlab", GOAL_SMALL),
    ],
)
def test_unknown_ids_are_refused(run, capsys, tmp_path, name, env_id, said):
    """One line that names what would do, exit code 2, no file written."""
    with pytest.raises(SystemExit) as exit_:
        run(f"--num-envs 1 --env-id={env_id}", name)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and f"--env-id {env_id}" in error and said in error, error
    assert list(tmp_path.iterdir()) == []


# NETWORKS ############################################################################################################
def worlds(module, env_id, num_envs=4):
    """The worlds, made but not started."""
    flags = f"--env-id {env_id} --num-envs {num_envs} --engine labmaze"
    return module.make_envs(parse(f"{module.__name__}.py", flags))


@pytest.mark.parametrize("name", [ECO, ICM])
def test_networks_follow_the_domain(name):
    module = load(name)
    robots, games = worlds(module, REACH), worlds(module, MONTEZUMA)
    policy, player = (
        module.make_agent(envs, parse(name, f"--env-id {env_id}"))
        for envs, env_id in ((robots, REACH), (games, MONTEZUMA))
    )
    assert policy.actor.out_features == 4 and policy.actor_logstd.shape == (4,)
    assert [layer.in_features for layer in policy.network.layers] == [16, 256, 256, 256]
    assert player.actor.out_features == 18 and player.network.convs[0].in_channels == 4
    mazes = worlds(module, MANY)
    walker = module.make_agent(mazes, parse(name, f"--env-id {MANY}"))
    assert walker.actor.out_features == 9 and walker.network.convs[0].in_channels == 3
    if name == ICM:
        icm = module.ICM(mazes, parse(name, f"--env-id {MANY}"))
        assert icm.m == 0 and icm.features[0].convs[0].in_channels == 3 and icm.action_dim == 9
    if name == ECO:  # ECO's own on images: 2-2-2-2 blocks and four FC layers, the first of them split
        for envs, env_id, m, channels in ((games, MONTEZUMA, 3, 4), (mazes, MANY, 0, 3)):
            rnet = module.make_rnet(envs, parse(name, f"--env-id {env_id} --rnet-width 4"))
            widths = [block.conv2.out_channels for block in rnet.branch.blocks if hasattr(block, "conv2")]
            assert widths == [4, 4, 8, 8, 16, 16, 32, 32] and rnet.m == m
            assert rnet.branch.blocks[0].in_channels == channels
            assert [part.out_features for part in rnet.head if hasattr(part, "weight")] == [32, 32, 32, 1]
        assert module.make_rnet(robots, parse(name, f"--env-id {REACH}")).early.in_features == 16


def test_gaussian_inverse_loss_by_hand():
    """-log p(a | s, s') of a unit Gaussian around the guess, less 4/2 log(2 pi)."""
    torch.manual_seed(0)
    module = load(ICM)
    icm = module.ICM(worlds(module, REACH), parse(ICM, f"--env-id {REACH}"))
    phi, next_phi, actions = torch.randn(3, 128), torch.randn(3, 128), 2 * torch.randn(3, 4)
    assert icm.m == 0 and not icm.discrete
    first, _, second = icm.inverse
    with torch.no_grad():
        losses, errors = icm.inverse_loss(phi, next_phi, actions), icm.forward_error(phi, next_phi, actions)
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


# RUNS ################################################################################################################
SMALL = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 1 --run-name small"
SHORT, LAB = "--max-episode-steps 15", "--engine labmaze"  # a maze has a time of its own
ECO_FLAGS = (
    f"{SMALL} --bonus-scale 0.1 --bonus-bias 0.3 --memory-percentile 70 --memory-size 3 --ring-size 600 --k 2 "
    f"--negative-bias 3 --rnet-ready-accuracy 0 --rnet-start {BATCH} --rnet-batch-size 16 "
    f"--rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-triplets 32 --heldout-pairs 64"
)
RUNS = {  # flags, iterations
    (ECO, REACH): (f"{ECO_FLAGS} {SHORT}", 5),
    (ECO, ASTEROIDS): (f"{ECO_FLAGS} {SHORT} --rnet-width 4", 3),
    (ICM, REACH): (f"{SMALL} {SHORT} --bonus-scale 0.5", 3),
    (ICM, ASTEROIDS): (f"{SMALL} {SHORT} --bonus-scale 0.5", 2),
    (GT_GRID, MONTEZUMA): (f"{SMALL} --bonus-scale 0.1 --cell-size 8 --max-episode-steps 13", 2),
    (ECO, MANY): (f"{ECO_FLAGS} {LAB} --rnet-width 4", 3),
    (ICM, MANY): (f"{SMALL} {LAB} --bonus-scale 0.5", 2),
    (GT_GRID, MANY): (f"{SMALL} {LAB} --bonus-scale 0.1", 2),
    (ECO, GOAL_SMALL): (f"{ECO_FLAGS} {LAB} --rnet-width 4", 3),
    (ICM, LARGE): (f"{SMALL} {LAB} --bonus-scale 0.5", 2),
    (GT_GRID, GOAL_SMALL): (f"{SMALL} {LAB} --bonus-scale 0.1", 2),
}
MAZES = (GOAL_SMALL, LARGE, MANY)
METHOD_PART = {ECO: "rnet schedule", ICM: "icm", GT_GRID: ""}
# robot 0 is steered to its goal and walker 0 put on objects, so that there are rewards; where the agents are is taken
# down
FOLLOW = """
if iteration == first_iteration:
    step_worlds, places = envs.step, []
    def look():
        if hasattr(envs, "ram"):
            places.append(envs.ram[:, [3, 42, 43]].astype(int))
        if hasattr(envs, "places"):
            places.append(envs.places.copy())
    look()
    def followed(actions):
        if actions.ndim > 1:
            state = obs[row, 0].numpy()
            actions[0] = [*(20 * (state[-3:] - state[:3])).clip(-1, 1), 0]
        if hasattr(envs, "objects") and step % 5 == 0:
            envs.places[0] = envs.objects[0, step % len(envs.worths)]
        result = step_worlds(actions)
        look()
        return result
    envs.step = followed
"""


# an RNet that has hardly learned says the same of all pairs; now it says yes of half of them
BALANCE = """
if schedule.ready:
    with torch.no_grad():
        pairs = embed_frames(rnet.embed, obs, depths, torch.arange(past + 1, len(obs)), rnet.m).flatten(0, 1)
        rnet.head[-1].bias -= rnet.compare(pairs[:-4, 0], pairs[4:, 1]).median()
"""


def probes(name):
    kept = f"obs past rewards total_rewards valid actions charts rng places memory_counts {METHOD_PART[name]}"
    return {
        "ROLLOUT": FOLLOW,
        "INTRINSIC REWARD": BALANCE * (name == ECO) + "rng = torch.get_rng_state()\n"
        "memory_counts = memory.counts.tolist() if globals().get('memory') else None",
        "ADVANTAGE": snapshot(kept),
    }


@pytest.fixture(params=RUNS, ids=lambda key: f"{key[0][4:-3]}-{key[1]}")
def case(request):
    return request.param


@pytest.fixture
def short_episodes(monkeypatch):
    """Of 13 steps in the mazes, where no flag says so."""
    tasks = load(DMLAB).TASKS
    for env_id in MAZES:
        monkeypatch.setitem(tasks, env_id, (13, *tasks[env_id][1:]))


def run_folder(case, folder):
    """The engine is in the run's name."""
    return folder / "runs" / ("small-labmaze" if case[1] in MAZES else "small")


@pytest.fixture
def first_run(case, shared_run, short_episodes):
    name, env_id = case
    flags, iterations = RUNS[case]
    return shared_run(f"--env-id {env_id} {flags}{steps(iterations)}", name, probes(name))


@pytest.fixture
def resumed_run(case, first_run, shared_run):
    """One more iteration."""
    path, iterations = run_folder(case, first_run[2]) / "agent.pt", RUNS[case][1]
    backup = path.with_name("before.pt")
    if not backup.exists():
        backup.write_bytes(path.read_bytes())
    return shared_run(f"--resume {path}{steps(iterations + 1)}", case[0], probes(case[0]))


def learned_rewards(case, trace, normalize=None):
    """What is learned from before the bonus: on Fetch by the running deviation, on Atari clipped, in mazes as it is."""
    normalize = normalize or SlowNormalizer(4, 0.99)
    if case[1] == REACH:
        return [normalize(shot["rewards"], shot["valid"]) for shot in trace]
    return [shot["rewards"] if case[1] in MAZES else shot["rewards"].clip(-1, 1) for shot in trace]


def all_stacks(trace, m):
    """(T + 1, N, m + 1, ...) of all rollouts, cut out of lists of each episode's frames."""
    stream = torch.cat([*(shot["obs"][shot["past"] : -1] for shot in trace), trace[-1]["obs"][-1:]])
    valid = np.concatenate([shot["valid"] for shot in trace])
    stacks = torch.zeros((*stream.shape[:2], m + 1, *stream.shape[2:]), dtype=stream.dtype)
    for n in range(stream.shape[1]):
        episode = []
        for t in range(len(stream)):
            if t and not valid[t - 1, n]:
                episode = []
            episode.append(stream[t, n])
            stacks[t, n] = torch.stack([episode[max(0, len(episode) - 1 - back)] for back in range(m, -1, -1)])
    return stacks


def eco_bonuses(case, trace):
    """bias - similarity to a memory of lists; frames are asked for by number."""
    stacks, memory = all_stacks(trace, 3 if case[1] == ASTEROIDS else 0), SlowMemory(4, 3)
    numbers = torch.arange(stacks.shape[0] * 4).view(-1, 4, 1)
    for i, shot in enumerate(trace):
        if not shot["schedule"].ready:
            memory.clear()
            yield np.zeros((32, 4))
            continue
        torch.set_rng_state(shot["rng"])
        with torch.no_grad():
            table = shot["rnet"].embed(stacks.flatten(0, 1)[: 4 * 32 * (i + 1) + 4])
            rnet = SimpleNamespace(embed=lambda ids, table=table: table[ids[:, 0]], compare=shot["rnet"].compare)
            rows = numbers[32 * i + 1 : 32 * i + 33]
            slots = torch.randint(3, (32, 4))
            yield 0.3 - memory.similarities(rnet, rows, ~shot["valid"], slots, 70)
    assert memory.replaced > 10


def icm_bonuses(case, trace):
    """The forward model's errors, with the model as it was before the update; in mazes at most 1."""
    stacks = all_stacks(trace, 3 if case[1] == ASTEROIDS else 0)
    for i, shot in enumerate(trace):
        with torch.no_grad():
            phi = shot["icm"].features(stacks[32 * i : 32 * i + 33].flatten(0, 1)).unflatten(0, (33, 4))
            num_actions = 9 if case[1] in MAZES else 18
            action = shot["actions"] if case[1] == REACH else F.one_hot(shot["actions"], num_actions).float()
            predicted = shot["icm"].predict(torch.cat([phi[:-1], action], -1))
            errors = ((predicted - phi[1:]) ** 2).sum(-1).numpy() / 2
            yield errors.clip(max=1) if case[1] in MAZES else errors


def grid_bonuses(case, trace):
    """First visits of cells of 8 x 8 pixels of a room, or of 30 x 30 units of a maze, by sets."""
    places = np.array(trace[-1]["places"])  # (T + 1, N, 3): room, x, y; in a maze x, y
    visits = SlowVisits(1)
    if case[1] in MAZES:
        cells = places // 30
    else:
        cells = np.stack([places[..., 0] * 32 + places[..., 1] // 8, places[..., 2] // 8], -1)
    visits.first_visits(cells[:1], np.ones((1, 4), bool))
    for i, shot in enumerate(trace):
        yield visits.first_visits(cells[32 * i + 1 : 32 * i + 33], ~shot["valid"])


BONUSES = {ECO: eco_bonuses, ICM: icm_bonuses, GT_GRID: grid_bonuses}


def assert_bonuses(case, trace, normalize=None):
    name, charts = case[0], {ECO: "eco/bonus", ICM: "icm/bonus", GT_GRID: "gt-grid/bonus"}
    scale, earned = {ECO: 0.1, ICM: 0.5, GT_GRID: 0.1}[name], []
    learned = learned_rewards(case, trace, normalize)
    for shot, rewards, bonus in zip(trace, learned, BONUSES[name](case, trace), strict=True):
        np.testing.assert_allclose(shot["total_rewards"].numpy(), rewards + scale * bonus, atol=2e-4)
        if charts[name] in shot["charts"]:
            mean = shot["charts"][charts[name]].item()
            assert mean == pytest.approx(bonus[shot["valid"]].mean(), rel=1e-3, abs=1e-4)
            earned.append(bonus)
    assert np.std(earned) > 0 and len(earned) == len(trace) - (name == ECO and not trace[0]["schedule"].ready)


def test_bonuses_are_those_of_the_slow_readings(case, first_run):
    """Of every rollout: the learning rewards and the weighted bonus."""
    trace = first_run[0]["trace"]
    assert sum((~shot["valid"]).sum() for shot in trace) > 8
    if case[1] != MONTEZUMA:
        assert any(shot["rewards"].any() for shot in trace), "choose another seed"
    assert_bonuses(case, trace)


def test_resumed_run_goes_on(case, first_run, resumed_run):
    """Steps, settings, history and, on Fetch, the normalizer of the rewards go on; the settings are the first run's and
    not the domain's."""
    before, (after, _, _), iterations = first_run[0], resumed_run, RUNS[case][1]
    assert after["global_step"] == (iterations + 1) * BATCH and len(after["trace"]) == 1
    assert [row["step"] for row in after["history"]] == [BATCH * i for i in range(1, iterations + 2)]
    assert after["history"][:iterations] == before["history"]
    changed = {key for key, value in vars(after["args"]).items() if value != getattr(before["args"], key)}
    assert changed == {"resume", "total_timesteps"}
    assert all(np.isfinite(list(row.values())).all() for row in after["history"])
    if case[1] == REACH:
        counts = [sum(shot["valid"].sum() for shot in result["trace"]) for result in (before, after)]
        assert before["envs"].moments[0] == counts[0] and after["envs"].moments[0] == sum(counts)


def test_resumed_run_says_that_episodes_are_new(resumed_run, case):
    assert f"resumed at step {RUNS[case][1] * BATCH:,} with new episodes" in resumed_run[1]


def test_nothing_of_an_old_episode_is_remembered(case, first_run, resumed_run):
    """A resumed run begins new episodes: ECO's memory and GT-Grid's map must be empty, as after any other start."""
    saved = torch.load(run_folder(case, first_run[2]) / "before.pt", weights_only=True)
    trace = resumed_run[0]["trace"]
    if case[0] == ECO:
        assert all(saved["memory"]["counts"]) and saved["schedule"]["ready"]
        assert trace[0]["memory_counts"] == [0, 0, 0, 0]
    if case[0] == GT_GRID:
        assert (saved["visits"]["visited"].sum(1) > 2).any()
    if case[0] == ICM and case[1] == REACH:
        normalize = SlowNormalizer(4, 0.99)
        learned_rewards(case, first_run[0]["trace"], normalize)
        assert_bonuses(case, trace, normalize)
    elif case[0] != ECO:
        assert_bonuses(case, trace)


def test_engine_is_in_all_that_is_shown(case, first_run, resumed_run):
    """In the run's name, its settings, what it prints and so the titles of its charts; nowhere in other domains."""
    result, printed, folder = first_run
    saved = torch.load(run_folder(case, folder) / "before.pt", weights_only=True)
    label = {ECO: "eco", ICM: "icm", GT_GRID: "gt-grid"}[case[0]]
    if case[1] in MAZES:
        assert result["method"] == resumed_run[0]["method"] == f"{label} (labmaze)"
        assert saved["args"]["engine"] == "labmaze" and "labmaze" in saved["versions"]
        assert f"{label} (labmaze) on {case[1]} (" in printed and f"{label} (labmaze) {case[1]} seed 1: " in printed
        assert {row["length"] for row in result["history"] if "length" in row} == {13}
    else:
        assert result["method"] == label and saved["args"]["engine"] == "auto" and "labmaze" not in printed


# DEVICE ##############################################################################################################
@pytest.mark.parametrize("env_id", [REACH, ASTEROIDS, MANY])
def test_eco_parts_stay_on_the_device(env_id):
    """As in test_device: policy, RNet, samplers and memory on meta."""
    module, args = load(ECO), parse(ECO, f"--env-id {env_id} --rnet-width 4")
    envs = worlds(module, env_id)
    space = envs.single_observation_space
    with META:
        agent, rnet = module.make_agent(envs, args), module.make_rnet(envs, args)
    ring = module.Ring(40, 4, space.shape, getattr(torch, str(space.dtype)), META)
    ages = torch.from_numpy(random_ages(np.random.default_rng(0), 40, 4, 0.05)).to(META)
    ring.add(ring.frames, ages, ages)
    rows = ring.rows(ring.size - rnet.m)
    obs = module.stack_frames(ring.frames, ring.depths, rows, rows % 4, args.stack_observations)
    action, logprob, entropy, value = agent.get_action_and_value(obs)
    (logprob + entropy + value).sum().backward()
    *triplets, count = module.sample_triplets(ring.ages[rows], 2, 5, 5, False, 64)
    frames = (module.stack_frames(ring.frames, ring.depths, rows[r], triplets[3], rnet.m) for r in triplets[:3])
    module.rnet_loss(*module.rnet_logits(rnet, *frames), 0.1).backward()
    memory = module.EpisodicMemory(4, 5, (rnet.m + 1, *space.shape), ring.frames.dtype, META)
    with torch.inference_mode():
        embeddings = module.embed_frames(rnet.embed, ring.frames, ring.depths, rows[:5], rnet.m)
        stacks = module.embed_frames(lambda frames: frames, ring.frames, ring.depths, rows[:5], rnet.m)
        starts = np.zeros((5, 4), bool)
        for _ in range(2):
            similarity = memory.similarities(rnet, stacks, embeddings, starts, 90.0)
    assert {part.device for part in (action, count, similarity, memory.counts, memory.embeddings)} == {META}


@pytest.mark.parametrize("env_id", [REACH, ASTEROIDS, MANY])
def test_icm_stays_on_the_device(env_id):
    module, args = load(ICM), parse(ICM, f"--env-id {env_id}")
    envs = worlds(module, env_id)
    with META:
        icm = module.ICM(envs, args)
    space = envs.single_observation_space
    frames = torch.zeros((12, 4, *space.shape), dtype=getattr(torch, str(space.dtype)), device=META)
    depths = torch.zeros((12, 4), dtype=torch.int64, device=META)
    actions = torch.zeros(8, 4, 4, device=META) if env_id == REACH else depths[:8]
    phi = module.embed_frames(icm.features, frames, depths, torch.arange(3, 12, device=META), icm.m)
    (icm.forward_error(phi[:-1], phi[1:], actions)).sum().backward()
    phi = phi.detach().flatten(0, 1)
    icm.inverse_loss(phi[:-4], phi[4:], actions.flatten(0, 1)).sum().backward()
    assert {parameter.grad.device for parameter in icm.parameters()} == {META} and icm.m == 3 * (env_id == ASTEROIDS)


@pytest.mark.parametrize("env_id, cells", [(MONTEZUMA, 24 * 16 * 16), (GOAL_SMALL, 37 * 37), (LARGE, 57 * 57)])
def test_cells_stay_on_the_device(env_id, cells):
    """24 rooms of 16 x 16 cells of 16 pixels; mazes of 1,100 and 1,700 units in cells of 30."""
    module = load(GT_GRID)
    visits = module.VisitedCells(worlds(module, env_id), parse(GT_GRID, f"--env-id {env_id}").cell_size, META)
    assert visits.visited.shape == (4, cells)
    cells, starts = torch.zeros(9, 4, dtype=torch.int64, device=META), torch.zeros(9, 4, dtype=torch.bool, device=META)
    assert visits.first_visits(cells, starts).device == visits.visited.device == META
