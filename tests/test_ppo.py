"""GAE, frame stacks, network and rollout storage against slow readings; lambda = 0 against an independent plain PPO."""

import copy

import numpy as np
import pytest
import reference_ppo
import torch
import torch.nn.functional as F
from conftest import CANONICAL, PPO, SPRL, assert_same_parameters, fake_envs, load, random_frames, snapshot, steps
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


def test_stack_frames_by_hand(script):
    """Frames 0..5 of one world; an episode begins at frame 3. Two frames of history, none from before it. In a ring
    the rows before the first are the last."""
    frames, depths = torch.arange(6).view(6, 1, 1, 1, 1), torch.tensor([[7], [8], [9], [0], [1], [2]])
    for rows, expected in (
        ([2, 3, 4, 5], [[0, 1, 2], [3, 3, 3], [3, 3, 4], [3, 4, 5]]),
        ([0, 1], [[4, 5, 0], [5, 0, 1]]),
    ):
        rows = torch.tensor(rows)
        assert script.stack_frames(frames, depths, rows, torch.zeros_like(rows), 2).flatten(1).tolist() == expected
        assert script.stack_frames(frames, depths, rows, torch.zeros_like(rows), 0).flatten().tolist() == rows.tolist()


def test_network_by_hand(script):
    """The trunk with F.one_hot and zeros behind the last row and column, up to the order of its features; the heads."""
    torch.manual_seed(0)
    agent, frames = script.make_agent(fake_envs(), script.Args(stack_observations=1)), random_frames(5, 2)
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


@pytest.mark.parametrize("flags, m", [(PPO, 0), (PPO + " --stack-observations 2", 2), (SPRL, 0)])
def test_rollout_storage_is_what_happened(script, run, flags, m):
    """A second set of worlds plays the stored actions; observations, rewards, ends, autoreset rows, depths, ages,
    values and log-probabilities of three rollouts must be those that follow."""
    probe = snapshot("obs rewards terminations truncations valid depths ages actions values logprobs agent past")
    result = run(flags + steps(3), probes={"UPDATE POLICY": probe})
    args, trace = result["args"], result["trace"]
    worlds = script.GridWorlds(args.env_id, args.num_envs, args.max_episode_steps)
    stream, starts = [worlds.reset(seed=args.seed)[0]], [np.ones(args.num_envs, bool)]
    cuts = starts.copy()
    done, seen_ends = np.zeros(args.num_envs, bool), 0
    for shot in trace:
        past = shot["past"]
        for t in range(args.num_steps):
            frame, reward, termination, truncation, _ = worlds.step(shot["actions"][t].numpy())
            np.testing.assert_array_equal(shot["valid"][t], ~done)
            np.testing.assert_array_equal(shot["rewards"][t], reward.astype(np.float32))
            np.testing.assert_array_equal(shot["terminations"][t], termination)
            np.testing.assert_array_equal(shot["truncations"][t], truncation)
            stream.append(frame)
            starts.append(done)
            cuts.append(done | (reward != 0))
            done = termination | truncation
            seen_ends += done.sum()
        first = len(stream) - args.num_steps - 1  # the stream's row of the rollout's first frame
        stored = min(past, first)
        np.testing.assert_array_equal(shot["obs"][past - stored :].numpy(), np.stack(stream[first - stored :]))
        for t, n in np.ndindex(args.num_steps + 1, args.num_envs):
            age, depth = (
                next(back for back in range(first + t + 1) if marks[first + t - back][n]) for marks in (cuts, starts)
            )
            assert (shot["ages"][past + t, n], shot["depths"][past + t, n]) == (age, depth)
            frames = torch.from_numpy(np.stack([stream[first + t - min(back, depth)][n] for back in range(m, -1, -1)]))
            action = shot["actions"][t, n] if t < args.num_steps else torch.tensor(0)
            with torch.no_grad():
                _, logprob, _, value = shot["agent"].get_action_and_value(frames[None], action[None])
            torch.testing.assert_close(value[0], shot["values"][t, n], atol=1e-5, rtol=1e-5)
            if t < args.num_steps:
                torch.testing.assert_close(logprob[0], shot["logprobs"][t, n], atol=1e-5, rtol=1e-5)
    assert seen_ends >= 8


def test_lambda_0_is_plain_ppo(script, run):
    """Three iterations, all parameters bit by bit; and no shortest-path part is built."""
    result = run(PPO + steps(3))
    reference = reference_ppo.train(script, result["args"], 3)
    assert_same_parameters(result["agent"].state_dict(), reference.state_dict())
    assert result["rnet"] is None and result["ring"] is None and result["oracle"] is None
    saved = torch.load("runs/small/agent.pt", weights_only=True)
    assert not {"rnet", "rnet_optimizer", "ring"} & saved.keys()
    assert all("cost_rate" not in row for row in result["history"])


def test_compiled_policy_is_the_eager_one(script):
    """--compile: values and gradients of two batch sizes, as in rollout and update."""
    torch.manual_seed(0)
    eager = script.make_agent(fake_envs(), script.Args())
    compiled = copy.deepcopy(eager)
    compiled.network.compile()
    for size in (4, 24):
        frames, actions = random_frames(size, 1), torch.arange(size) % 7
        for agent in (eager, compiled):
            agent.zero_grad()
            _, logprob, entropy, value = agent.get_action_and_value(frames, actions)
            (logprob + entropy + value).sum().backward()
        for mine, expected in zip(compiled.parameters(), eager.parameters()):
            torch.testing.assert_close(mine.grad, expected.grad)
