"""The Fetch robots against gymnasium-robotics and by their own states; their policy, RNet and reward normalizer against
slow readings and numbers found by hand; then whole runs."""

import math
import sys
from types import SimpleNamespace

import envpool
import gymnasium as gym
import gymnasium_robotics
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import BATCH, ROOT, load, random_ages, steps
from test_sprl import slow_cost

sys.path.insert(0, str(ROOT / "analysis"))

import evaluate

FETCH = "ppo_sprl_fetch.py"
REACH, PUSH, SLIDE, PICK = "FetchReach-v4", "FetchPush-v4", "FetchSlide-v4", "FetchPickAndPlace-v4"
META = torch.device("meta")
gym.register_envs(gymnasium_robotics)


@pytest.fixture(scope="module")
def fetch():
    return load(FETCH)


def robots(env_id, num_envs, max_episode_steps=50, n_substeps=20, action_noise=0.0, gamma=0.99):
    return load(FETCH).FetchRobots(env_id, num_envs, max_episode_steps, n_substeps, action_noise, gamma)


def towards_goal(states, gain=20.0):
    """Actions (N, 4) that steer the gripper to the goal; an action of 1 asks for 5 cm."""
    actions = np.zeros((len(states), 4), np.float32)
    actions[:, :3] = (gain * (states[:, -3:] - states[:, :3])).clip(-1, 1)
    return actions


def distances(states):
    """Of the achieved from the desired goal, the last six numbers of a state."""
    return np.linalg.norm(states[:, -6:-3].astype(np.float64) - states[:, -3:], axis=1)


def fake_robots(dim=16, num_envs=4):
    """What the networks want to know of the robots."""
    return SimpleNamespace(
        num_envs=num_envs,
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
    assert envs.max_episode_steps == envs.make.keywords["max_episode_steps"] == expected
    assert envs.make.keywords["frame_skip"] == n_substeps


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

    def __init__(self, num_envs, seed):
        self.actions, self.num_envs = [], num_envs

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


def test_a_start_at_the_goal_is_no_success():
    """Robots 0 and 1 are at their goals; 1 was put there by EnvPool's own reset, after a time limit."""
    envs = robots(REACH, 4)
    envs.make = lambda seed: StillPool(4, seed)
    envs.reset(seed=0)
    obs, info = envs.pool.reset()[0], {"is_success": np.array([1, 1, 0, 0]), "elapsed_step": np.array([3, 0, 0, 7])}
    envs.pool.step = lambda actions, env_ids: (obs, np.zeros(4), np.zeros(4, bool), np.zeros(4, bool), info)
    _, rewards, terminations, truncations, _ = envs.step(np.zeros((4, 4), np.float32))
    assert rewards.tolist() == terminations.tolist() == [1, 0, 0, 0] and not truncations.any()


def executed(action_noise, action, seed=5, num_steps=2000):
    """The actions (T, 4) that reach the simulator."""
    envs = robots(REACH, 4, action_noise=action_noise)
    envs.make = lambda seed: StillPool(4, seed)
    envs.reset(seed=seed)
    asked = np.full((4, 4), action, np.float32)
    for _ in range(num_steps):
        envs.step(asked)
    assert (asked == np.float32(action)).all(), "the caller's actions are its own"
    return np.concatenate(envs.pool.actions)


def test_action_noise_is_measured_and_clipped():
    """sigma 0.3 around 0; around 0.7, Phi(-1) = 15.9 % reach the bound; each number has its own noise. An action beyond
    the bound is the bound before the noise: half of what is left of it, of deviation sigma sqrt(1/2 - 1/2pi), stays."""
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


def test_learning_rewards_by_hand():
    """gamma 1/2, rewards 1, (a row that autoreset inserted), 0: the sums are 1 and 1/2, their deviation 1/4."""
    envs = robots(REACH, 1, gamma=0.5)
    rewards, valid = np.float32([[1], [0], [0]]), np.array([[True], [False], [True]])
    assert envs.learning_rewards(rewards, valid).tolist() == [[4], [0], [0]]
    assert envs.state_dict() == {"returns": [0.5], "moments": [2.0, 1.5, 1.25]}


def test_evaluation_leaves_the_normalizer_alone(fetch):
    """Returns are counted as they come, successes, and the deviation that the training has measured stays."""
    envs = robots(REACH, 2, 5)
    envs.load_state_dict({"returns": [0.5, 0.25], "moments": [2.0, 1.5, 1.25]})
    agent = fetch.make_agent(envs, fetch.Args(env_id=REACH, num_envs=2))
    played = evaluate.play(envs, agent, fetch.stack_frames, 0, np.array([4, 4]), seed=1)
    assert len(played) == 8 and {episode_return for _, episode_return, _ in played} <= {0.0, 1.0}
    assert envs.state_dict() == {"returns": [0.5, 0.25], "moments": [2.0, 1.5, 1.25]}


def test_learning_rewards_over_several_rollouts():
    """Six rollouts of three robots; the first has no reward. A saved and loaded one takes over at each border."""
    rng, envs, slow = np.random.default_rng(0), robots(REACH, 3, gamma=0.9), SlowNormalizer(3, 0.9)
    for rollout in range(6):
        valid = rng.random((40, 3)) < 0.8
        rewards = ((rng.random((40, 3)) < 0.1) & valid & (rollout > 0)).astype(np.float32)
        result = envs.learning_rewards(rewards, valid)
        assert result.dtype == np.float32 and (rollout == 0) == (not result.any())
        np.testing.assert_allclose(result, slow(rewards, valid), rtol=1e-5)
        state, envs = envs.state_dict(), robots(REACH, 3, gamma=0.9)
        envs.load_state_dict(state)
        assert envs.state_dict() == state


# NETWORKS ############################################################################################################
def test_gaussian_policy_by_hand(fetch):
    """Two actions' log-probabilities and the entropy, from the density of a normal distribution."""
    torch.manual_seed(0)
    agent = fetch.make_agent(fake_robots(), fetch.Args(stack_observations=1))
    agent.actor_logstd.data = torch.tensor([-1.0, 0.0, 0.5, 0.2])
    states = torch.randn(5, 2, 16)
    x = torch.cat([states[:, 0], states[:, 1]], 1)
    for layer in agent.network.layers:
        x = F.linear(x, layer.weight, layer.bias).clamp(min=0)
    assert [layer.weight.shape for layer in agent.network.layers] == [(256, 32)] + 3 * [(256, 256)]
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
        sampled = agent.get_action_and_value(states[:1].expand(4000, -1, -1))[0]
    deviations = torch.tensor([-1.0, 0.0, 0.5, 0.2]).exp()
    torch.testing.assert_close(sampled.std(0), deviations, rtol=0.05, atol=0)
    torch.testing.assert_close((sampled.mean(0) - means[0]) / deviations, torch.zeros(4), rtol=0, atol=0.08)


def trained_rnet(fetch, num_steps=5):
    """An RNet whose normalization has seen something."""
    torch.manual_seed(1)
    rnet = fetch.make_rnet(fake_robots(), fetch.Args()).train()
    optimizer = torch.optim.Adam(rnet.parameters(), lr=1e-3)
    for _ in range(num_steps):
        anchors = torch.randn(16, 1, 16)
        logits = fetch.rnet_logits(rnet, anchors, anchors + 0.1 * torch.randn(16, 1, 16), 2 * torch.randn(16, 1, 16))
        optimizer.zero_grad()
        fetch.rnet_loss(*logits, 0.1).backward()
        optimizer.step()
    return rnet.eval()


def judge(rnet, early, late, batch_statistics=False):
    """Logits (B,) of pairs of states (B, dim): a layer on the concatenation, then the normalization written out."""
    x = torch.cat([early, late], -1) @ torch.cat([rnet.early.weight, rnet.late.weight], 1).T + rnet.early.bias
    for module in rnet.head:
        if isinstance(module, nn.BatchNorm1d):
            mean, variance = module.running_mean, module.running_var
            if batch_statistics:
                mean, variance = x.mean(0), x.var(0, unbiased=False)
            x = (x - mean) / (variance + 1e-5).sqrt() * module.weight + module.bias
        else:
            x = x.clamp(min=0) if isinstance(module, nn.ReLU) else F.linear(x, module.weight, module.bias)
    return x[:, 0]


def test_split_layer_is_the_concatenated_one(fetch):
    rnet, states = trained_rnet(fetch), torch.randn(9, 16)
    kinds = [type(module) for module in rnet.head]
    assert kinds == [nn.BatchNorm1d, nn.ReLU, *(3 * [nn.Linear, nn.BatchNorm1d, nn.ReLU]), nn.Linear]
    assert rnet.early.weight.shape == rnet.late.weight.shape == (512, 16) and rnet.late.bias is None
    with torch.no_grad():
        early, late = rnet.embed(states.unsqueeze(1)).unbind(1)
        pairs = torch.cartesian_prod(torch.arange(9), torch.arange(9)).T
        expected = judge(rnet, *states[pairs]).view(9, 9)
        torch.testing.assert_close(rnet.compare(early[:, None], late[None]), expected, rtol=1e-3, atol=1e-4)
        rnet.chunk = 5
        mine = fetch.compare_pairs(rnet, torch.stack([early, late], 1), *pairs)
        torch.testing.assert_close(mine.view(9, 9), expected, rtol=1e-3, atol=1e-4)
    assert expected.std() > 0.01


def test_both_kinds_of_pairs_are_normalized_as_one_batch(fetch):
    """Mean and variance over positives and negatives together; apart, other numbers would come out."""
    rnet, frames = trained_rnet(fetch).train(), torch.randn(3, 8, 16)
    frames[1] = frames[0] + 0.1 * frames[1]
    with torch.no_grad():
        positives, negatives = fetch.rnet_logits(rnet, *frames.unsqueeze(2))
        together = judge(rnet, frames[0].repeat(2, 1), torch.cat([frames[1], frames[2]]), batch_statistics=True)
        apart = judge(rnet, frames[0], frames[1], batch_statistics=True)
    torch.testing.assert_close(torch.cat([positives, negatives]), together, rtol=1e-3, atol=1e-3)
    assert (apart - positives).abs().max() > 0.05


# RUNS ################################################################################################################
SMALL = (
    "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 2 --max-episode-steps 12 --run-name small "
    "--cost-scale 0.1 --num-tolerance-samples 5 --k 2 --ring-size 1200 --negative-bias 3 --rnet-ready-accuracy 0 "
    f"--rnet-start {2 * BATCH} --rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16 "
    "--heldout-pairs 64 --rnet-triplets 32"
)
# robot 0 is steered to its goal, so that there are rewards; every comparison tells the mode it is made in
WATCH = """
if iteration == 1:
    compare, step_robots, modes = rnet.compare, envs.step, []
    def watched(early, late):
        norms = {module.training for module in rnet.modules() if isinstance(module, nn.BatchNorm1d)}
        modes.append((norms, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), len(early)))
        return compare(early, late)
    def steered(actions):
        state = obs[row, 0].numpy()
        actions[0] = [*(20 * (state[-3:] - state[:3])).clip(-1, 1), 0]
        return step_robots(actions)
    rnet.compare, envs.step = watched, steered
"""
SNAP = """
import copy
names = "obs ages rewards valid total_rewards terminations truncations actions rnet charts past modes"
trace.append(copy.deepcopy({name: globals()[name] for name in names.split() if name != "rnet"}))
trace[-1]["rnet"] = make_rnet(envs, args).eval()
trace[-1]["rnet"].load_state_dict(rnet.state_dict())
modes.clear()
"""


@pytest.fixture(scope="module")
def sprl_run(shared_run):
    """Seven rollouts with a snapshot of each at its advantages and one before its RNet's training."""
    probes = {
        "ROLLOUT": WATCH,
        "INTRINSIC REWARD": "modes.clear()\nbefore_cost = [part.clone() for part in rnet.state_dict().values()]",
        "ADVANTAGE": SNAP + "trace[-1]['unchanged'] = all(map(torch.equal, before_cost, rnet.state_dict().values()))\n",
        "LOG": "trace[-1]['training'] = list(modes)",
    }
    return shared_run(SMALL + steps(7), FETCH, probes)


def test_normalization_learns_in_training_alone(sprl_run):
    """The mode of every comparison of a run, and running statistics that no cost touches."""
    costs, trainings, measurements = [], [], []
    for shot in sprl_run[0]["trace"]:
        assert shot["unchanged"]
        costs += shot["modes"]
        trainings += [mode for mode in shot["training"] if mode[0] == {True}]
        measurements += [mode for mode in shot["training"] if mode[0] == {False}]
    assert len(costs) >= 5 and len(trainings) >= 3 and len(measurements) == 2 * 3
    assert {mode[:3] for mode in map(tuple_of_sets, costs + measurements)} == {((False,), False, True)}
    assert {mode[:3] for mode in map(tuple_of_sets, trainings)} == {((True,), True, False)}
    assert all(size % 2 == 0 for *_, size in trainings), "positives and negatives are one batch"


def tuple_of_sets(mode):
    return tuple(mode[0]), *mode[1:]


def test_reward_of_a_run(sprl_run):
    """r / sigma + lambda (1 - c): sigma of all discounted sums so far, c by Eq. 14 from the network as it was then."""
    result = sprl_run[0]
    args, trace, normalize = result["args"], result["trace"], SlowNormalizer(4, 0.99)
    frames = torch.cat([*(shot["obs"][-33:-1] for shot in trace), trace[-1]["obs"][-1:]])
    rewards, valid = (np.concatenate([shot[name] for shot in trace]) for name in ("rewards", "valid"))
    assert set(np.unique(rewards)) == {0, 1} and (~valid).sum() > 40 and args.cost_bias == 1
    costs = []
    for i, shot in enumerate(trace):
        expected = normalize(shot["rewards"], shot["valid"])
        added = shot["total_rewards"].numpy() - expected
        if i < 2:  # the first training is behind the second rollout
            np.testing.assert_allclose(added, 0, atol=1e-4)
            continue
        cost = 1 - added / 0.1
        np.testing.assert_allclose(cost, cost.round(), atol=1e-3)
        oldest = max(0, 32 * i + 1 - 7)
        here = frames[oldest : 32 * i + 33]
        pairs = torch.cartesian_prod(*2 * [torch.arange(len(here))]).T
        with torch.no_grad():
            scores = [judge(shot["rnet"], *here[pairs, n]).sigmoid().view(2 * [len(here)]) for n in range(4)]
        scores = torch.stack(scores, -1)
        for t, n in np.ndindex(32, 4):
            window = rewards[oldest:], ~valid[oldest:], 32 * i - oldest + t + 1, n
            expected = slow_cost(scores, *window, 2, 1, 5, 90.0)
            assert expected is None or cost[t, n].round() == expected, (i, t, n)
        costs.append(cost)
        rate = shot["charts"]["sprl/cost_rate"].item()
        assert rate == pytest.approx(cost[shot["valid"]].mean(), abs=1e-3)
    assert 0.02 < np.mean(costs) < 0.98
    assert result["envs"].state_dict()["moments"][0] == valid.sum() == len(normalize.all_sums)


def test_charts_are_of_the_plain_rewards(sprl_run):
    """Returns of 0 and 1, whatever the learning rewards are; a success is a termination."""
    done = successes = 0
    for shot, row in zip(sprl_run[0]["trace"], sprl_run[0]["history"]):
        ended = (shot["terminations"] | shot["truncations"]).sum()
        done, successes = done + ended, successes + shot["terminations"].sum()
        if ended:
            assert row["return"] == row["success"] == pytest.approx(shot["terminations"].sum() / ended)
    assert 3 < successes < done


def test_resumed_run_goes_on_with_new_episodes(sprl_run, shared_run):
    """Steps, networks and the reward's normalizer go on; the worlds are new ones."""
    before, _, folder = sprl_run
    saved = torch.load(folder / "runs/small/agent.pt", weights_only=True)
    after, printed, _ = shared_run(f"--resume {folder}/runs/small/agent.pt{steps(9)}", FETCH)
    assert f"resumed at step {7 * BATCH:,} with new episodes" in printed and "without the replay ring" in printed
    assert after["global_step"] == 9 * BATCH and [row["step"] for row in after["history"]] == [
        BATCH * i for i in range(1, 10)
    ]
    assert after["history"][:7] == before["history"]
    count, total, squares = saved["worlds"]["moments"]
    assert count > 0 and after["envs"].moments[0] > count and after["envs"].moments[0] <= count + 2 * BATCH
    assert after["envs"].moments[1] >= total and after["envs"].moments[2] >= squares
    assert torch.load(folder / "runs/small/agent.pt", weights_only=True)["iteration"] == 9


def test_resuming_with_other_robots_is_refused(sprl_run, run, tmp_path, capsys):
    """The normalizer's sums are one per robot: another number of robots is a wrong setting, not a broken program."""
    path = tmp_path / "agent.pt"
    path.write_bytes((sprl_run[2] / "runs/small/agent.pt").read_bytes())
    with pytest.raises(SystemExit) as exit_:
        run(f"--resume {path} --num-envs 8{steps(20)}", FETCH)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and "--resume" in error


def test_training_without_triplets_changes_nothing(run):
    """Episodes too short for a negative, as when all goals are soon reached: the RNet waits as it is."""
    probes = {
        "UPDATE RNET": "before = [part.clone() for part in rnet.state_dict().values()]",
        "LOG": "same = all(map(torch.equal, before, rnet.state_dict().values()))\n"
        "trace += [(int(charts['rnet/triplets']), same, schedule.accuracies)] if 'rnet/triplets' in charts else []",
    }
    result = run(f"{SMALL} --negative-bias 30 --max-episode-steps 8{steps(3)}", FETCH, probes)
    assert result["trace"] == [(0, True, [])] and not result["schedule"].ready


# DEVICE ##############################################################################################################
def test_parts_stay_on_the_device(fetch):
    """As in test_device: on meta, what reads back or mixes devices raises."""
    with META:
        agent, rnet = (make(fake_robots(), fetch.Args()) for make in (fetch.make_agent, fetch.make_rnet))
    ring = fetch.Ring(50, 4, (16,), torch.float32, META)
    ages = torch.from_numpy(random_ages(np.random.default_rng(0), 50, 4, 0.05))
    ring.add(torch.zeros(50, 4, 16, device=META), ages.to(META), ages.to(META))
    rows = ring.rows(ring.size)
    obs = fetch.stack_frames(ring.frames, ring.depths, rows, rows % 4, 0)
    for action in (None, torch.zeros(50, 4, device=META)):
        action, logprob, entropy, value = agent.get_action_and_value(obs, action)
        (logprob + entropy + value).sum().backward()
    assert {part.device for part in (action, *(p.grad for p in agent.parameters()))} == {META}
    *triplets, count = fetch.sample_triplets(ring.ages[rows], 2, 5, 5, False, 64)
    *heldout, _ = fetch.sample_heldout(ring.ages[rows], 2, 1, 5, 64)
    logits = fetch.rnet_logits(
        rnet.train(), *(fetch.stack_frames(ring.frames, ring.depths, rows[r], triplets[3], 0) for r in triplets[:3])
    )
    fetch.rnet_loss(*logits, 0.1).backward()
    assert {part.device for part in (count, *heldout, *(p.grad for p in rnet.parameters()))} == {META}
    rnet.eval()
    with torch.inference_mode():
        embeddings = fetch.embed_frames(rnet.embed, ring.frames, ring.depths, rows, 0)
        logits = fetch.compare_pairs(rnet, embeddings.flatten(0, 1), heldout[0], heldout[1])
        cost = fetch.ksp_cost(rnet, embeddings, ages[30:].numpy(), 2, 1, 10, 90.0)
    assert logits.device == cost.device == META and cost.shape == (20, 4)


def test_resumed_ring_has_no_held_out_rows(run):
    """With --save-ring the ring comes back, but the window before the new episodes is empty: held-out pairs come from
    new rows alone, whose embeddings are those of their frames."""
    run(f"{SMALL} --save-ring{steps(3)}", FETCH)  # the RNet trains in iterations 2 and 4
    probes = {
        "ROLLOUT": "trace.append((ring.unseen, ring.size))",
        "UPDATE RNET": "trace.append((embeddings, embed_frames(rnet.embed, obs, depths, torch.arange(len(obs)), 0)))",
    }
    result = run(f"--resume runs/small/agent.pt{steps(4)}", FETCH, probes=probes)
    (unseen, size), (kept, anew) = result["trace"]
    assert unseen == 0 and size == 3 * 32 and "rnet_accuracy" in result["history"][-1]
    newest = 32  # rows of the one new rollout, without the frame after it
    assert torch.allclose(kept[-newest - 1 :], anew[-newest - 1 :], atol=1e-5)
