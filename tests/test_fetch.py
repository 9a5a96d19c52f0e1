"""The Fetch robots against gymnasium-robotics and by their own states; their policy, RNet and reward normalizer against
slow readings and numbers found by hand; then whole runs."""

import math
from types import SimpleNamespace

import envpool
import gymnasium as gym
import gymnasium_robotics
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import BATCH, load, steps
from test_sprl import assert_costs

FETCH = "ppo_sprl_fetch.py"
REACH, PUSH, SLIDE, PICK = "FetchReach-v4", "FetchPush-v4", "FetchSlide-v4", "FetchPickAndPlace-v4"
gym.register_envs(gymnasium_robotics)


@pytest.fixture(scope="module")
def fetch():
    return load(FETCH)


def robots(env_id, num_envs, max_episode_steps=50, n_substeps=20, action_noise=0.0):
    return load(FETCH).FetchRobots(env_id, num_envs, max_episode_steps, n_substeps, action_noise)


def towards_goal(states, gain=20.0):
    """Actions (N, 4) that steer the gripper to the goal; an action of 1 asks for 5 cm."""
    actions = np.zeros((len(states), 4), np.float32)
    actions[:, :3] = (gain * (states[:, -3:] - states[:, :3])).clip(-1, 1)
    return actions


def distances(states):
    """Of the achieved from the desired goal, the last six numbers of a state."""
    return np.linalg.norm(states[:, -6:-3].astype(np.float64) - states[:, -3:], axis=1)


def fake_robots(dim=16):
    """What the networks want to know of the robots."""
    return SimpleNamespace(
        single_observation_space=gym.spaces.Box(-np.inf, np.inf, (dim,), np.float32),
        single_action_space=gym.spaces.Box(-1, 1, (4,), np.float32),
    )


# ROBOTS ##############################################################################################################
@pytest.mark.parametrize(
    "env_id, start_apart",
    # where the gripper starts: EnvPool's Push and Slide stand up to 21 mm beside gymnasium-robotics' in x
    [(REACH, 0.001), (PUSH, 0.021), (SLIDE, 0.021), (PICK, 0.001)],
)
def test_starts_and_goals_are_those_of_gymnasium_robotics(env_id, start_apart):
    """64 first states: start, object and goal ranges, heights, the table under all of them, and the states' layout."""
    reference = gym.make(env_id).unwrapped
    envs = robots(env_id, 8, max_episode_steps=1)
    first_states = [envs.reset(seed=1)[0]]
    while len(first_states) < 8:
        states, _, terminations, truncations, _ = envs.step(np.zeros((8, 4), np.float32))
        assert (terminations | truncations).all()  # the only step of the episode
        first_states.append(envs.step(np.zeros((8, 4), np.float32))[0])
    states = np.concatenate(first_states)
    assert states.dtype == np.float32 and states.shape == (64, 16 if env_id == REACH else 31)
    start, achieved, goals = states[:, :3], states[:, -6:-3], states[:, -3:]
    assert len(np.unique(goals, axis=0)) == 64
    np.testing.assert_allclose(start, np.broadcast_to(start[0], start.shape), atol=1e-3)
    np.testing.assert_allclose(start[0], reference.initial_gripper_xpos, atol=start_apart)

    start = start[0].astype(np.float64)
    reach, offset = reference.target_range, np.broadcast_to(reference.target_offset, 3)
    axes = slice(0, 3 if env_id == REACH else 2)
    away = (goals - start - offset)[:, axes]
    assert (np.abs(away) <= reach + 1e-3).all()
    assert (away.min(0) < -0.8 * reach).all() and (away.max(0) > 0.8 * reach).all(), "most of the range is used"
    layout, _ = reference.reset(seed=0)
    assert states.shape[1] == sum(layout[key].size for key in ("observation", "achieved_goal", "desired_goal"))
    assert reference.distance_threshold == 0.05
    if env_id == REACH:
        assert not reference.has_object
        np.testing.assert_array_equal(achieved, states[:, :3])
        return
    for one in (layout["observation"][None], states[:, :25]):  # gripper, object, object seen from the gripper
        np.testing.assert_allclose(one[:, 6:9], one[:, 3:6] - one[:, :3], atol=1e-5)
    np.testing.assert_array_equal(achieved, states[:, 3:6])
    np.testing.assert_allclose(layout["achieved_goal"], layout["observation"][3:6], atol=1e-9)
    from_start = (achieved - start)[:, :2]
    assert (np.abs(from_start) <= reference.obj_range + 1e-3).all()
    assert (np.linalg.norm(from_start, axis=1) > 0.1 - 1e-3).all(), "no object starts below the gripper"
    above = goals[:, 2] - achieved[:, 2]
    if env_id == PICK:  # half of the goals lie on the table, the others up to 45 cm above it
        assert (-1e-3 <= above.min()) and (0.3 < above.max() <= 0.45) and 16 < (above < 1e-3).sum() < 48
    else:
        np.testing.assert_allclose(above, 0, atol=1e-3)
    np.testing.assert_allclose(achieved[:, 2], reference.height_offset, atol=0.007)

    model = reference.model
    table = model.body("table0")
    (half,) = model.geom_size[model.geom_bodyid == table.id]
    for places in (achieved, goals):
        assert (np.abs(places - table.pos)[:, :2] < half[:2]).all(), "beside the table"


def test_arm_moves_as_in_gymnasium_robotics():
    """The same ten random actions: half a centimetre apart at most, on a way of twenty."""
    envs, reference, rng = robots(REACH, 1), gym.make(REACH), np.random.default_rng(0)
    first, _ = envs.reset(seed=1)
    reference.reset(seed=0)
    way = 0.0
    for _ in range(10):
        action, before = rng.uniform(-1, 1, 4).astype(np.float32), first[0, :3]
        first, *_ = envs.step(action[None])
        expected = reference.step(action)[0]["observation"]
        np.testing.assert_allclose(first[0, :3], expected[:3], atol=0.005)
        way += np.linalg.norm(first[0, :3] - before)
    assert way > 0.15
    np.testing.assert_allclose(first[0, 5:10], expected[5:], atol=0.05)  # velocities


@pytest.mark.parametrize("env_id", [PUSH, PICK])
def test_objects_state_is_laid_out_as_in_gymnasium_robotics(env_id):
    """Fingers, the object's rotation, its velocities seen from the gripper, the gripper's and the fingers' velocities,
    after the same six actions; objects and goals lie where chance has put them."""
    envs, reference = robots(env_id, 1), gym.make(env_id)
    states, _ = envs.reset(seed=1)
    reference.reset(seed=0)
    for action in np.random.default_rng(0).uniform(-1, 1, (6, 4)).astype(np.float32):
        states, *_ = envs.step(action[None])
        expected = reference.step(action)[0]["observation"]
    np.testing.assert_allclose(states[0, 9:11], expected[9:11], atol=0.005)
    np.testing.assert_allclose(states[0, 12:25], expected[12:25], atol=0.03)  # the object turns freely about its own z
    assert np.abs(expected[20:23]).max() > 0.01, "the arm moves"


def test_pushed_object_decides_the_end():
    """Twelve grippers that wander on the table: an episode ends where the object, not the gripper, is at the goal."""
    envs, rng, done, ends = robots(PUSH, 12, 20), np.random.default_rng(0), np.zeros(12, bool), 0
    envs.reset(seed=2)
    for _ in range(120):
        states, rewards, terminations, truncations, _ = envs.step(rng.uniform(-1, 1, (12, 4)).astype(np.float32))
        clear = (np.abs(distances(states) - 0.05) > 1e-6) & ~done
        np.testing.assert_array_equal(terminations[clear], (distances(states) < 0.05)[clear])
        np.testing.assert_array_equal(rewards, terminations.astype(float))
        done, ends = terminations | truncations, ends + terminations.sum()
    assert ends > 0, "choose another seed"


def test_reward_and_end_at_the_goal_alone():
    """Six robots, three of them steered to their goals, and a time limit of 4: by the distance in the returned state,
    step by step. What is asked of a robot in the row after an end changes nothing, nor does one robot's end another."""
    envs, other, limit, rng = robots(REACH, 6, 4), robots(REACH, 6, 4), 4, np.random.default_rng(0)
    undisturbed = envpool.make_gymnasium(REACH, num_envs=6, seed=4, max_episode_steps=limit)
    states, _ = envs.reset(seed=4)
    np.testing.assert_array_equal(other.reset(seed=4)[0], states)
    undisturbed.reset()
    start = states[:, :3].copy()
    done, elapsed, ever_reached = np.zeros(6, bool), np.zeros(6, int), np.zeros(6, bool)
    at_limit = timed_out = near = 0
    for _ in range(70):
        actions = towards_goal(states)
        actions[3:] = rng.uniform(-1, 1, (3, 4))
        actions[4] = [-1, 0, 1, 0]
        before = states
        states, rewards, terminations, truncations, info = envs.step(actions)
        twin = other.step(np.where(done[:, None], -actions, actions))
        for mine, expected in zip((states, rewards, terminations, truncations), twin):
            np.testing.assert_array_equal(mine, expected)
        obs, *_ = undisturbed.step(actions)
        plain = np.concatenate([obs[key] for key in ("observation", "achieved_goal", "desired_goal")], 1)

        elapsed = np.where(done, 0, elapsed + 1)
        gap = distances(states)
        clear = np.abs(gap - 0.05) > 1e-6
        np.testing.assert_array_equal(terminations[clear], ((gap < 0.05) & ~done)[clear])
        np.testing.assert_array_equal(rewards, terminations.astype(float))
        np.testing.assert_array_equal(truncations, (elapsed == limit) & ~terminations)
        np.testing.assert_allclose(states[done, :3], start[done], atol=1e-5)
        assert (states[done, -3:] != before[done, -3:]).any(1).all(), "a new goal"
        np.testing.assert_allclose(states[done, 5:10], 0, atol=1e-2)  # at rest
        at_limit += (terminations & (elapsed == limit)).sum()
        timed_out += truncations.sum()
        near += (done & (gap < 0.05)).sum()  # a new episode that begins at its goal
        ever_reached |= terminations
        np.testing.assert_array_equal(states[~ever_reached], plain[~ever_reached].astype(np.float32))
        done = terminations | truncations
    assert at_limit and timed_out > 30 and near and ever_reached[:3].all() and not ever_reached.all()


@pytest.mark.parametrize(
    "limit, n_substeps, expected", [(50, 20, 50), (50, 2, 500), (50, 3, 333), (50, 6, 167), (50, 8, 125), (1, 60, 1)]
)
def test_time_limit_grows_as_steps_shrink(limit, n_substeps, expected):
    envs = robots(REACH, 1, limit, n_substeps)
    envs.reset(seed=0)
    config = envs.pool.config
    assert config["max_episode_steps"] == expected and config["frame_skip"] == n_substeps


def test_short_steps_move_less_and_last_longer():
    """5 substeps and not 20: four times the steps in an episode of 3, each about a quarter as far."""
    ways = {}
    for n_substeps in (20, 5):
        envs = robots(REACH, 2, 3, n_substeps)
        states, _ = envs.reset(seed=3)
        lengths, first = 0, states[:, :3]
        while True:
            action = np.tile(np.float32([0, 1, 0, 0]), (2, 1))
            states, _, terminations, truncations, _ = envs.step(action)
            lengths += 1
            assert not terminations.any(), "choose another seed"
            if truncations.any():
                break
        assert lengths == 60 // n_substeps
        ways[n_substeps] = (states[:, 1] - first[:, 1]).mean() / lengths
    assert ways[20] / ways[5] == pytest.approx(4, rel=0.3)


class StillPool:
    """Takes actions down and lets nothing happen."""

    def __init__(self, env_id, seed, **options):
        self.actions = []

    def reset(self, env_ids=None):
        return {
            "observation": np.zeros((4, 10)),
            "achieved_goal": np.zeros((4, 3)),
            "desired_goal": np.ones((4, 3)),
        }, {}

    def step(self, actions, env_ids):
        self.actions.append(actions)
        info = {"is_success": np.zeros(4), "elapsed_step": np.ones(4, int)}
        return self.reset()[0], np.zeros(4), np.zeros(4, bool), np.zeros(4, bool), info


def test_a_start_at_the_goal_is_no_success(monkeypatch):
    """Robots 0 and 1 are at their goals; 1 was put there by EnvPool's own reset, after a time limit."""
    monkeypatch.setattr(envpool, "make_gymnasium", StillPool)
    envs = robots(REACH, 4)
    envs.reset(seed=0)
    obs, info = envs.pool.reset()[0], {"is_success": np.array([1, 1, 0, 0]), "elapsed_step": np.array([3, 0, 0, 7])}
    envs.pool.step = lambda actions, env_ids: (obs, np.zeros(4), np.zeros(4, bool), np.zeros(4, bool), info)
    _, rewards, terminations, truncations, _ = envs.step(np.zeros((4, 4), np.float32))
    assert rewards.tolist() == terminations.tolist() == [1, 0, 0, 0] and not truncations.any()


def executed(action_noise, action, seed=5, num_steps=2000):
    """The actions (T, 4) that reach the simulator."""
    envs = robots(REACH, 4, action_noise=action_noise)
    envs.reset(seed=seed)
    asked = np.full((4, 4), action, np.float32)
    for _ in range(num_steps):
        envs.step(asked)
    assert (asked == np.float32(action)).all(), "the caller's actions are its own"
    return np.concatenate(envs.pool.actions)


def test_action_noise_is_measured_and_clipped(monkeypatch):
    """sigma 0.3 around 0; around 0.7, Phi(-1) = 15.9 % reach the bound; each number has its own noise. An action beyond
    the bound is the bound before the noise: half of what is left of it, of deviation sigma sqrt(1/2 - 1/2pi), stays."""
    monkeypatch.setattr(envpool, "make_gymnasium", StillPool)
    noise = executed(0.3, 0.0)
    assert noise.dtype == np.float32 and noise.std() == pytest.approx(0.3, rel=0.02) and abs(noise.mean()) < 0.01
    np.testing.assert_allclose(np.corrcoef(noise.T), np.eye(4), atol=0.05)
    clipped = executed(0.3, 0.7)
    assert clipped.max() == 1 and (clipped == 1).mean() == pytest.approx(0.1587, abs=0.01)
    beyond = executed(0.3, -9.0)
    assert (beyond == -1).mean() == pytest.approx(0.5, abs=0.01) and beyond.std() == pytest.approx(0.1752, rel=0.02)
    assert (executed(0.0, 0.4, num_steps=9) == np.float32(0.4)).all()
    again, other = executed(0.3, 0.0, num_steps=9), executed(0.3, 0.0, seed=6, num_steps=9)
    np.testing.assert_array_equal(again, noise[: len(again)])
    assert (other != again).all()


def test_seed_decides_everything():
    """Noise, starts and goals of two pools, through ends of both kinds."""
    numbers = []
    for seed in (7, 7, 8):
        envs = robots(REACH, 3, 5, action_noise=0.1)
        trace = [envs.reset(seed=seed)[0]]
        for _ in range(30):
            states, *flags, _ = envs.step(towards_goal(trace[-1]))
            trace.append(np.concatenate([states, *(np.asarray(flag, float)[:, None] for flag in flags)], 1)[:, :16])
        numbers.append(np.stack(trace))
    assert (numbers[0] == numbers[1]).all() and (numbers[0] != numbers[2]).any(-1).all()


def test_unknown_id_is_refused(run, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        run("--env-id FetchRech-v4", FETCH)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and "FetchReach-v4" in error and "--env-id" in error
    assert list(tmp_path.iterdir()) == []


# REWARDS #############################################################################################################
class SlowNormalizer:
    """Burda et al.'s: a discounted sum per robot, and the standard deviation of all the sums that ever were."""

    def __init__(self, num_envs, gamma):
        self.sums, self.gamma, self.all_sums = [0.0] * num_envs, gamma, []

    def __call__(self, rewards, valid):
        for t, n in np.ndindex(*rewards.shape):
            if valid[t, n]:
                self.sums[n] = self.gamma * self.sums[n] + rewards[t, n]
                self.all_sums.append(self.sums[n])
        deviation = np.std(self.all_sums) if self.all_sums else 0.0
        return rewards / deviation if deviation > 0 else rewards


def test_return_scaler_by_hand(fetch):
    """gamma 1/2, rewards 1, (a row that autoreset inserted), 0: the sums are 1 and 1/2, their deviation 1/4."""
    scaler = fetch.ReturnScaler(1)
    rewards, valid = torch.tensor([[1.0], [0], [0]]), torch.tensor([[True], [False], [True]])
    assert scaler(rewards, valid, 0.5).tolist() == [[4], [0], [0]]
    assert scaler.sums.tolist() == [0.5] and scaler.moments.tolist() == [2.0, 1.5, 1.25]


def test_return_scaler_over_several_rollouts(fetch):
    """Six rollouts of three robots; the first has no reward. A saved and loaded one takes over at each border."""
    rng, scaler, slow = np.random.default_rng(0), fetch.ReturnScaler(3), SlowNormalizer(3, 0.9)
    for rollout in range(6):
        valid = rng.random((40, 3)) < 0.8
        rewards = ((rng.random((40, 3)) < 0.1) & valid & (rollout > 0)).astype(np.float32)
        result = scaler(torch.from_numpy(rewards), torch.from_numpy(valid), 0.9)
        assert result.dtype == torch.float32 and (rollout == 0) == (not result.any())
        np.testing.assert_allclose(result, slow(rewards, valid), rtol=1e-5)
        state, scaler = scaler.state_dict(), fetch.ReturnScaler(3)
        scaler.load_state_dict(state)


# NETWORKS ############################################################################################################
def test_gaussian_policy_by_hand(fetch):
    """Two actions' log-probabilities and the entropy, from the density of a normal distribution."""
    torch.manual_seed(0)
    agent = fetch.make_agent(fake_robots(), fetch.Args())
    agent.actor_logstd.data = torch.tensor([-1.0, 0.0, 0.5, 0.2])
    x = states = torch.randn(5, 16)
    layers = [layer for layer in agent.network.modules() if hasattr(layer, "weight")]
    for layer in layers:
        x = F.linear(x, layer.weight, layer.bias).clamp(min=0)
    assert [layer.weight.shape for layer in layers] == [(256, 16)] + 3 * [(256, 256)]
    means, actions = agent.actor(x), torch.randn(5, 4) * 3
    action, logprob, entropy, value = agent.get_action_and_value(states, actions)
    assert action is actions
    for b in range(5):
        density, chaos = 0.0, 0.0
        for d, sigma in enumerate(math.exp(s) for s in (-1.0, 0.0, 0.5, 0.2)):
            z = (actions[b, d].item() - means[b, d].item()) / sigma
            density += -0.5 * z * z - math.log(sigma * math.sqrt(2 * math.pi))
            chaos += 0.5 * math.log(2 * math.pi * math.e * sigma**2)
        assert logprob[b].item() == pytest.approx(density, rel=1e-4)
        assert entropy[b].item() == pytest.approx(chaos, rel=1e-5)
    torch.testing.assert_close(value, agent.critic(x)[:, 0])
    with torch.no_grad():
        sampled = agent.get_action_and_value(states[:1].expand(4000, -1))[0]
    deviations = torch.tensor([-1.0, 0.0, 0.5, 0.2]).exp()
    torch.testing.assert_close(sampled.std(0), deviations, rtol=0.05, atol=0)
    torch.testing.assert_close((sampled.mean(0) - means[0]) / deviations, torch.zeros(4), rtol=0, atol=0.08)


def trained_rnet(fetch, num_steps=5):
    """An RNet whose normalization has seen something."""
    torch.manual_seed(1)
    rnet = fetch.make_rnet(fake_robots(), fetch.Args()).train()
    optimizer = torch.optim.Adam(rnet.parameters(), lr=1e-3)
    for _ in range(num_steps):
        anchors = torch.randn(16, 16)
        loss, _ = fetch.rnet_loss(rnet, anchors, anchors + 0.1 * torch.randn(16, 16), 2 * torch.randn(16, 16), 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rnet.eval()


@torch.no_grad()
def judge(rnet, early, late, batch_statistics=False):
    """Logits (B,) of pairs of states (B, dim): a layer on the concatenation, then the normalization written out."""
    if not batch_statistics:  # else the states are standardized already
        mean, variance = rnet.standardize.running_mean, rnet.standardize.running_var
        early, late = ((states - mean) / (variance + 1e-5).sqrt() for states in (early, late))
    x = torch.cat([early, late], -1) @ torch.cat([rnet.early.weight, rnet.late.weight], 1).T + rnet.early.bias
    linears = [module for module in rnet.head.modules() if isinstance(module, nn.Linear)]
    norms = [module for module in rnet.head.modules() if isinstance(module, nn.BatchNorm1d)]
    assert [layer.weight.shape for layer in linears] == 3 * [(512, 512)] + [(1, 512)] and len(norms) == 4
    for norm, layer in zip(norms, linears):
        mean, variance = norm.running_mean, norm.running_var
        if batch_statistics:
            mean, variance = x.mean(0), x.var(0, unbiased=False)
        x = ((x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias).clamp(min=0)
        x = F.linear(x, layer.weight, layer.bias)
    return x[:, 0]


def test_split_layer_is_the_concatenated_one(fetch):
    rnet, states = trained_rnet(fetch), torch.randn(9, 16)
    assert rnet.early.weight.shape == rnet.late.weight.shape == (512, 16) and rnet.late.bias is None
    pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9)).T
    expected = judge(rnet, *states[pairs])
    embeddings = fetch.embed_all(rnet, states.view(3, 3, 16), chunk=4)
    mine = fetch.compare_all(rnet, embeddings, *pairs, chunk=5)
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
    assert expected.std() > 0.01


def test_input_is_standardized_and_begins_with_a_difference(fetch):
    """States in other units are judged alike once the statistics know them; equal states leave the bias alone."""
    torch.manual_seed(0)
    states, scale = torch.randn(512, 16), torch.logspace(-1, 2, 16)
    rnet = fetch.make_rnet(fake_robots(), fetch.Args()).train()
    for _ in range(100):
        rnet.embed(scale * states + 3)
    early, late = rnet.eval().embed(scale * states + 3).unbind(1)
    torch.testing.assert_close(early + late, rnet.early.bias.expand(512, -1), rtol=0, atol=1e-4)
    plain = fetch.make_rnet(fake_robots(), fetch.Args()).train()
    plain.early.load_state_dict(rnet.early.state_dict())
    for _ in range(100):
        plain.embed(states)
    torch.testing.assert_close(plain.eval().embed(states)[:, 0], early, rtol=1e-2, atol=1e-2)


def test_both_kinds_of_pairs_are_normalized_as_one_batch(fetch):
    """Mean and variance over positives and negatives together; apart, another loss would come out."""
    rnet, (anchors, positives, negatives) = trained_rnet(fetch).train(), torch.randn(3, 8, 16)
    positives = anchors + 0.1 * positives
    states = torch.cat([anchors, positives, negatives])
    standardized = (states - states.mean(0)) / (states.var(0, unbiased=False) + 1e-5).sqrt()
    plain, (anchors, positives, negatives) = (anchors, positives, negatives), standardized.chunk(3)
    together = judge(rnet, anchors.repeat(2, 1), torch.cat([positives, negatives]), batch_statistics=True)
    apart = torch.cat([judge(rnet, anchors, late, batch_statistics=True) for late in (positives, negatives)])
    signs = torch.tensor(8 * [-1] + 8 * [1])
    expected, other = (2 * F.softplus(signs * logits).mean() for logits in (together, apart))
    loss, accuracy = fetch.rnet_loss(rnet, *plain, 0.0)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(accuracy, ((together > 0) == (signs < 0)).float().mean())
    assert abs(other - expected) > 0.05


# RUNS ################################################################################################################
SMALL = (
    "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --max-episode-steps 12 --run-name small "
    "--cost-scale 0.1 --cost-bias 1 --num-tolerance-samples 5 --k 2 --ring-size 1200 --negative-bias 3 "
    f"--rnet-start {2 * BATCH} --rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16 "
    "--heldout-pairs 64 --rnet-triplets 32 --rnet-reliable-accuracy 0"
)


def read_episodes(states, limit):
    """Rewards and valid rows (T, N) of the steps between states (T + 1, N, dim), by the task's rules alone."""
    rewards, valid = np.zeros((2, len(states) - 1, states.shape[1]))
    done, elapsed = np.zeros((2, states.shape[1]))
    for t, state in enumerate(states[1:]):
        valid[t] = done == 0
        elapsed = np.where(valid[t], elapsed + 1, 0)
        rewards[t] = valid[t] * (distances(state) < 0.05)
        done = (rewards[t] > 0) | (elapsed == limit)
    return rewards, valid.astype(bool)


def test_reward_of_a_run(shared_run):
    """(r + lambda (1 - c)) / sigma in the last of seven rollouts. Rewards come from the states in the ring, sigma from
    the moments of all discounted sums, c by Eq. 14 from the network, which was trained right before."""
    result = shared_run(SMALL + steps(7), FETCH)
    ring, history = result["ring"], result["history"]
    rows = ring.rows(ring.size)
    states = ring.obs[rows]
    assert len(states) == 7 * 32 + 1 and torch.equal(states[-32:], result["obs"][1:])
    anew = load(FETCH).embed_all(result["rnet"], states[-32 - 7 :])  # the window before was embedded after the training
    torch.testing.assert_close(result["embeddings"], anew, rtol=1e-3, atol=1e-4)
    rewards, valid = read_episodes(states.numpy(), 12)
    np.testing.assert_array_equal(result["rewards"], rewards[-32:])
    np.testing.assert_array_equal(result["valid"], valid[-32:])
    np.testing.assert_array_equal(ring.segment_steps[rows][1:] == 0, (rewards > 0) | ~valid)
    assert rewards.sum() > 3 and (~valid).sum() > 40, "choose another seed"

    count, total, square = result["scaler"].moments.tolist()
    deviation = (square / count - (total / count) ** 2) ** 0.5
    costs = 1 - (result["total_rewards"] * deviation - torch.from_numpy(rewards[-32:])).float() / 0.1
    torch.testing.assert_close(costs, costs.round(), rtol=0, atol=1e-3)
    pairs = torch.cartesian_prod(*2 * [torch.arange(40)]).T
    scores = [judge(result["rnet"], *states[-40:, n][pairs]).sigmoid().view(40, 40) for n in range(4)]
    assert_costs(costs.round(), torch.stack(scores, -1), rewards[-39:], ~valid[-39:], 2, 1, 5, 90.0, first=7)
    assert 0.02 < costs.mean() < 0.98
    assert history[-1]["sprl/cost_rate"] == pytest.approx(costs[torch.from_numpy(valid[-32:])].mean().item(), abs=1e-3)
    assert ["rnet/loss" in row for row in history] == [False, True, False, True, False, True, False]
    assert count == valid.sum()

    for i, row in enumerate(history):  # charts are of the plain rewards, a success is a termination
        ends = (~valid[32 * i + 1 : 32 * i + 33]).sum()
        if i < 6 and ends:
            successes = rewards[32 * i : 32 * i + 32].sum()
            assert row["charts/episodic_return"] == row["charts/success_rate"] == pytest.approx(successes / ends)


@pytest.mark.parametrize("bias", [0, 1])
def test_reaching_the_goal_never_costs(fetch, run, bias):
    """A bias is paid for every step. Were the time limit bootstrapped, an agent that never arrives would be paid for
    ever, and one that arrives would not: so with a bias the time limit is an end. Without one it bootstraps."""
    result = run(f"{SMALL} --cost-bias {bias}{steps(3)}", FETCH)
    at_limit = result["truncations"]
    assert at_limit.sum() > 3 and (result["terminations"][at_limit] == bias).all()
    totals, values = result["total_rewards"], result["values"]
    for t, n in np.argwhere(at_limit):
        expected = totals[t, n] + (0 if bias else 0.99 * values[t + 1, n]) - values[t, n]
        assert result["advantages"][t, n].item() == pytest.approx(expected.item(), abs=1e-5)


def test_plain_ppo_bootstraps_whatever_the_bias(run):
    """With lambda 0 nobody is paid a bias."""
    result = run(f"{SMALL} --cost-scale 0 --cost-bias 1{steps(3)}", FETCH)
    at_limit = result["truncations"]
    assert at_limit.sum() > 3 and not result["terminations"][at_limit].any()


def test_normalization_learns_in_training_alone(run, monkeypatch):
    """The mode of every normalization in a run, and the size of its batch."""
    modes, plain_forward = [], nn.BatchNorm1d.forward

    def forward(norm, x):
        modes.append((norm.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), len(x)))
        return plain_forward(norm, x)

    monkeypatch.setattr(nn.BatchNorm1d, "forward", forward)
    run(SMALL + steps(5), FETCH)
    assert {mode[:3] for mode in modes} == {(False, False, True), (True, True, False)}
    sizes = [size for is_training, *_, size in modes if is_training]
    assert len(sizes) >= 4 * 3 and all(size % 2 == 0 for size in sizes), "positives and negatives are one batch"
    assert sum(size == 128 for *_, size in modes) >= 2 * 4, "two kinds of held-out pairs before two trainings"


def test_resumed_run_goes_on(run, capsys):
    """Steps, networks and the reward's scaler go on; the episodes are new. Another number of robots is refused."""
    before = run(SMALL + steps(2), FETCH)
    after = run(f"--resume runs/small/agent.pt{steps(3)}", FETCH)
    assert after["global_step"] == 3 * BATCH and after["history"][:2] == before["history"]
    (count, *_), (old_count, *_) = after["scaler"].moments.tolist(), before["scaler"].moments.tolist()
    assert 0 < old_count < 2 * BATCH and count == old_count + after["valid"].sum()
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        run(f"--resume runs/small/agent.pt --num-envs 8{steps(20)}", FETCH)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and "--resume" in error


def test_training_without_triplets_changes_nothing(run):
    """Episodes too short for a negative, as when all goals are soon reached: the RNet waits as it is."""
    result = run(f"{SMALL} --negative-bias 30 --max-episode-steps 8{steps(3)}", FETCH)
    assert [row.get("rnet/triplets") for row in result["history"]] == [None, 0, None]
    assert not result["rnet_optimizer"].state
    assert not any(module.num_batches_tracked for module in result["rnet"].modules() if hasattr(module, "running_mean"))
