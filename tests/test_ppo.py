"""GAE, network and rollout storage against slow readings; lambda = 0 against an independent plain PPO."""

import numpy as np
import pytest
import reference_ppo
import torch
import torch.nn.functional as F
from conftest import CANONICAL, PPO, SPRL, assert_same_parameters, fake_envs, load, random_frames, steps
from hypothesis import given, settings
from hypothesis import strategies as st


def test_gae_by_hand(script):
    """gamma = lambda = 1/2, rewards 1, values 1, 2, 4, 8; step 1 ends the episode in one of three ways."""
    rewards, values = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    nothing, middle = torch.zeros(3, 1, dtype=torch.bool), torch.tensor([[False], [True], [False]])
    # all three deltas are 1 + v' / 2 - v = 1, but a termination's is 1 - 2 = -1
    for terminations, dones, expected in (
        (nothing, nothing, [1 + (1 + 1 / 4) / 4, 1 + 1 / 4, 1]),
        (nothing, middle, [1 + 1 / 4, 1, 1]),
        (middle, middle, [1 - 1 / 4, -1, 1]),
    ):
        assert script.gae(rewards, values, terminations, dones, 0.5, 0.5).flatten().tolist() == expected


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1), num_steps=st.integers(1, 40),
       num_envs=st.integers(1, 4), cut=st.sampled_from([0.0, 0.07, 0.5, 1.0]),
       size=st.sampled_from([0.0, 1.0, 1e6]))  # fmt: skip
def test_gae_is_the_sum_of_discounted_deltas(seed, gamma, gae_lambda, num_steps, num_envs, cut, size):
    """Explicit sums to each episode's end; a row that autoreset inserts belongs to no episode."""
    rng = np.random.default_rng(seed)
    rewards, values = size * rng.normal(size=(num_steps, num_envs)), rng.normal(size=(num_steps + 1, num_envs))
    terminations, truncations, valid = (np.zeros((num_steps, num_envs), bool) for _ in range(3))
    done = rng.random(num_envs) < 0.2  # an episode may have ended with the rollout before
    for t in range(num_steps):
        valid[t] = ~done
        terminations[t] = valid[t] & (rng.random(num_envs) < cut)
        truncations[t] = valid[t] & (rng.random(num_envs) < cut)
        done = terminations[t] | truncations[t]
    rewards *= valid
    tensors = map(torch.from_numpy, (rewards, values, terminations, terminations | truncations))
    advantages = load(CANONICAL).gae(*tensors, gamma, gae_lambda).numpy()
    for t, n in np.argwhere(valid):
        total = 0.0
        for u in range(t, num_steps):
            bootstrap = 0.0 if terminations[u, n] else values[u + 1, n]  # a truncation's is its final observation's
            total += (gamma * gae_lambda) ** (u - t) * (rewards[u, n] + gamma * bootstrap - values[u, n])
            if terminations[u, n] or truncations[u, n]:
                break
        assert advantages[t, n] == pytest.approx(total, abs=1e-5 * max(1, size))


def test_network_by_hand(script):
    """The trunk with F.one_hot and zeros behind the last row and column, up to the order of its features; the heads."""
    torch.manual_seed(0)
    agent, frames = script.make_agent(fake_envs((2, 7, 7, 3)), script.Args(stack_observations=1)), random_frames(5, 2)
    trunk, dense, _ = agent.network
    codes = [F.one_hot(frames[..., c].long(), n) for c, n in enumerate((11, 6, 4))]
    x = torch.cat(codes, -1).float()  # (B, 2, W, H, 21)
    x = torch.cat([x[:, 0], x[:, 1]], -1).permute(0, 3, 1, 2)
    for conv in trunk.convs:
        padded = torch.zeros(*x.shape[:2], 8, 8)
        padded[..., :7, :7] = x
        x = F.conv2d(padded, conv.weight, conv.bias)
        x = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], 1)
    features = trunk(frames)
    torch.testing.assert_close(features.sort().values, x.flatten(1).sort().values)
    hidden = dense(features).relu()
    log_probabilities = agent.actor(hidden).log_softmax(-1)
    actions = torch.arange(5)
    _, logprob, entropy, value = agent.get_action_and_value(frames, actions)
    torch.testing.assert_close(logprob, log_probabilities[actions, actions])
    torch.testing.assert_close(entropy, -(log_probabilities.exp() * log_probabilities).sum(-1))
    torch.testing.assert_close(value, agent.critic(hidden)[:, 0])


@pytest.mark.parametrize("flags", [PPO, PPO + " --stack-observations 2", SPRL])
def test_rollout_storage_is_what_happened(script, run, flags):
    """A second set of worlds plays the stored actions of a run of one iteration: observations, rewards, ends, autoreset
    rows and segment steps must be those that follow."""
    result = run(f"{flags} --num-steps 128 --total-timesteps 512")
    args, worlds = result["args"], script.make_envs(result["args"])
    obs, done, segment = worlds.reset(seed=args.seed)[0], np.zeros(args.num_envs, bool), np.zeros(args.num_envs, int)
    for t in range(args.num_steps):
        np.testing.assert_array_equal(result["obs"][t].numpy(), obs)
        np.testing.assert_array_equal(result["segment_steps"][t], segment)
        np.testing.assert_array_equal(result["valid"][t], ~done)
        obs, reward, termination, truncation, _ = worlds.step(result["actions"][t].numpy())
        segment = np.where(done | (reward != 0), 0, segment + 1)
        done = termination | truncation
        np.testing.assert_array_equal(result["rewards"][t], reward.astype(np.float32))
        np.testing.assert_array_equal(result["terminations"][t], termination)
        np.testing.assert_array_equal(result["truncations"][t], truncation)
    np.testing.assert_array_equal(result["obs"][-1].numpy(), obs)
    assert (~result["valid"]).sum() >= 8


def test_lambda_0_is_plain_ppo(script, run):
    """Three iterations, all parameters bit by bit; and no shortest-path part is built."""
    result = run(PPO + steps(3))
    reference = reference_ppo.train(script, result["args"], 3)
    assert_same_parameters(result["agent"].state_dict(), reference.state_dict())
    assert result["rnet"] is None and result["ring"] is None
    saved = torch.load("runs/small/agent.pt", weights_only=True)
    assert not {"rnet", "rnet_optimizer"} & saved.keys()
    assert all("sprl/cost_rate" not in row for row in result["history"])
