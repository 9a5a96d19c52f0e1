"""The README's "SPRL in your own PPO script", built from its own text: blocks of ppo_sprl_minigrid.py and lines of glue
go into a plain PPO loop in the style of CleanRL, on gymnasium's CliffWalking."""

import ast
import re

import numpy as np
import pytest
import torch
from conftest import CANONICAL, ROOT

PLAIN_PPO = """
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions.categorical import Categorical


class OneHot(gym.vector.VectorWrapper):
    def __init__(self, envs):
        super().__init__(envs)
        self.num_squares = int(envs.single_observation_space.n)

    def one_hot(self, squares):
        return np.eye(self.num_squares, dtype=np.float32)[squares]

    def reset(self, **kwargs):
        squares, infos = self.env.reset(**kwargs)
        return self.one_hot(squares), infos

    def step(self, actions):
        squares, *rest = self.env.step(actions)
        return self.one_hot(squares), *rest


args = SimpleNamespace(num_envs=4, num_steps=64, num_iterations=NUM_ITERATIONS, gamma=0.99, gae_lambda=0.95)
np.random.seed(1)
torch.manual_seed(1)
device, generator = torch.device("cpu"), torch.Generator().manual_seed(1)
same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}  # as CleanRL's scripts expect
envs = OneHot(gym.make_vec(ENV_ID, num_envs=args.num_envs, vectorization_mode="sync", vector_kwargs=same_step))
trunk = nn.Sequential(nn.Linear(envs.num_squares, 64), nn.Tanh())
actor, critic = nn.Linear(64, envs.single_action_space.n), nn.Linear(64, 1)
parameters = [*trunk.parameters(), *actor.parameters(), *critic.parameters()]
optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)
obs = torch.zeros((args.num_steps, args.num_envs, envs.num_squares))
actions, logprobs, rewards, dones, values = torch.zeros((5, args.num_steps, args.num_envs))
history = []
next_obs, _ = envs.reset(seed=1)
next_obs, next_done = torch.Tensor(next_obs).to(device), torch.zeros(args.num_envs)
# AFTER THE RESET
for iteration in range(1, args.num_iterations + 1):
    # BEFORE A ROLLOUT
    for step in range(args.num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            probs = Categorical(logits=actor(trunk(next_obs)))
            action = torch.multinomial(probs.probs, 1, generator=generator)[:, 0]  # numbers of its own
            action = action if BACK_AND_FORTH is None else torch.full((args.num_envs,), BACK_AND_FORTH[step % 2])
            values[step] = critic(trunk(next_obs)).flatten()
        actions[step], logprobs[step] = action, probs.log_prob(action)
        next_obs, reward, terminations, truncations, infos = envs.step(action.numpy())
        reward = np.float32(reward > 0) if SPARSE else reward
        # AFTER ENVS.STEP
        next_done = np.logical_or(terminations, truncations)
        rewards[step] = torch.tensor(reward).to(device).view(-1)
        next_obs, next_done = torch.Tensor(next_obs).to(device), torch.Tensor(next_done).to(device)
    extrinsic = rewards.clone()
    # AFTER A ROLLOUT
    history.append(extrinsic - rewards)
    with torch.no_grad():
        next_value, advantages, last = critic(trunk(next_obs)).flatten(), torch.zeros_like(rewards), 0
        for t in reversed(range(args.num_steps)):
            nonterminal = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
            following = next_value if t == args.num_steps - 1 else values[t + 1]
            delta = rewards[t] + args.gamma * following * nonterminal - values[t]
            advantages[t] = last = delta + args.gamma * args.gae_lambda * nonterminal * last
        returns = advantages + values
    b_inds = np.arange(args.num_envs * args.num_steps)
    for epoch in range(4):
        np.random.RandomState(epoch).shuffle(b_inds)
        for mb_inds in np.array_split(b_inds, 4):
            hidden = trunk(obs.flatten(0, 1)[mb_inds])
            probs = Categorical(logits=actor(hidden))
            ratio = (probs.log_prob(actions.flatten()[mb_inds]) - logprobs.flatten()[mb_inds]).exp()
            mb_advantages = advantages.flatten()[mb_inds]
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
            pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * ratio.clamp(0.8, 1.2)).mean()
            v_loss = 0.5 * (critic(hidden).flatten() - returns.flatten()[mb_inds]).square().mean()
            optimizer.zero_grad()
            (pg_loss + 0.5 * v_loss - 0.01 * probs.entropy().mean()).backward()
            optimizer.step()
"""
PLACES = ("AFTER THE RESET", "BEFORE A ROLLOUT", "AFTER ENVS.STEP", "AFTER A ROLLOUT")


def readme_section():
    text = (ROOT / "README.md").read_text()
    return re.search(r"^## SPRL in your own PPO script\n.*?(?=^## )", text, re.M | re.S)[0]


def pasted(cost_scale, num_iterations=1, env_id="CliffWalking-v1", back_and_forth=None, sparse=True):
    """The plain script with the README's blocks and glue in it."""
    section = readme_section()
    names = re.findall(r"`(\w+)`", section.split("```")[0])
    source = (ROOT / CANONICAL).read_text()
    nodes = {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}
    blocks = [nodes[name] for name in names if name in nodes]
    lines = source.splitlines()
    starts = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in blocks]
    text = "\n\n".join("\n".join(lines[start - 1 : node.end_lineno]) for start, node in zip(starts, blocks))
    glue, current = {}, None
    for line in re.search(r"```python\n(.*?)```", section, re.S)[1].splitlines():
        place = line.rpartition("  # ")[2].upper()
        current = place if place in PLACES else current
        glue.setdefault(current, []).append(line)
    glue["AFTER A ROLLOUT"] = [
        line.replace("0.01 * ksp_cost", "cost_scale * ksp_cost") for line in glue["AFTER A ROLLOUT"]
    ]
    assert any("cost_scale" in line for line in glue["AFTER A ROLLOUT"])
    assert tuple(glue) == PLACES and len(blocks) == 8 and sum(map(len, glue.values())) == 15
    script = PLAIN_PPO.replace("\n\nclass OneHot", f"\n\n{text}\n\n\nclass OneHot", 1)
    for place, part in glue.items():
        (indent,) = re.findall(rf"^( *)# {place}$", script, re.M)
        script = script.replace(f"{indent}# {place}\n", "".join(f"{indent}{line}\n" for line in part))
    return execute(script, cost_scale, num_iterations, env_id, back_and_forth, sparse)


def execute(script, cost_scale, num_iterations, env_id, back_and_forth=None, sparse=True):
    values = {"NUM_ITERATIONS": num_iterations, "ENV_ID": env_id, "BACK_AND_FORTH": back_and_forth, "SPARSE": sparse}
    namespace = {"__name__": "pasted", "cost_scale": cost_scale, **values}
    exec(compile(script, "pasted", "exec"), namespace)
    return namespace


def test_section_is_short():
    assert len(readme_section().rstrip().splitlines()) <= 20


def test_back_and_forth_costs():
    """Up and down at the cliff's edge: after some training of the RNet nearly every step has been seen before."""
    seen = pasted(cost_scale=0.5, num_iterations=25, back_and_forth=(0, 2))["history"]
    costs = torch.stack(seen[-5:]) / 0.5
    assert set(costs.unique().tolist()) <= {0.0, 1.0} and costs.mean() > 0.8
    mixed = pasted(cost_scale=0.5, num_iterations=25)["history"]
    assert torch.stack(mixed[-5:]).mean() / 0.5 < costs.mean()


def test_lambda_0_changes_nothing():
    """The policy is bit by bit that of the plain loop."""
    pasted_, plain = pasted(cost_scale=0.0, num_iterations=4), execute(PLAIN_PPO, 0.0, 4, "CliffWalking-v1")
    for name in ("trunk", "actor", "critic"):
        for ours, theirs in zip(pasted_[name].parameters(), plain[name].parameters()):
            assert torch.equal(ours, theirs)
    other = pasted(cost_scale=0.1, num_iterations=4)
    assert not torch.equal(other["actor"].weight, plain["actor"].weight)


@pytest.mark.parametrize(
    "env_id, sparse", [("CliffWalking-v1", True), ("CliffWalking-v1", False), ("FrozenLake-v1", True)]
)
def test_segments_and_window(env_id, sparse):
    """`segment_steps` by walking through the dones and rewards of the last rollout, one by one. With its own rewards
    CliffWalking cuts at every step."""
    result = pasted(cost_scale=0.1, num_iterations=3, env_id=env_id, sparse=sparse)
    counted = result["segment_steps"]
    starts = torch.cat([result["dones"][1:], result["next_done"][None]]).bool().numpy()
    for t, n in np.ndindex(64, 4):
        expected = 0 if starts[t, n] or result["extrinsic"][t, n] else counted[t, n] + 1
        assert counted[t + 1, n] == expected
    assert result["ring"].size == 3 * 64 + 1 and (counted[1:].max() > 0) == sparse
    assert result["gaps"].tolist() == [2 + n for n in range(1, 61)]
