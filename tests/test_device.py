"""Device hygiene without a GPU: on torch.device("meta") a CPU tensor in the mix or a value read back raises."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CANONICAL, fake_envs, load, random_frames, random_segments
from torch._subclasses.fake_tensor import FakeTensorMode

META = torch.device("meta")
IMAGES = torch.zeros((20, 4, 4, 84, 84), dtype=torch.uint8)
# script, what its worlds show (T, N, ...), flags of Args that keep the networks small
DOMAINS = [
    (CANONICAL, random_frames(20, 4, 2), {}),
    ("ppo_sprl_atari.py", IMAGES, {"rnet_width": 4, "rnet_input": "pixel-difference"}),
    ("ppo_sprl_atari.py", IMAGES, {"rnet_width": 4, "rnet_input": "embedding-difference"}),
    ("ppo_sprl_fetch.py", torch.zeros(20, 4, 16), {}),
]


def test_reading_back_raises_on_meta():
    """What the other tests rely on."""
    x = torch.zeros(3, device=META)
    for read_back in (
        lambda: x.sum().item(),
        lambda: int(x.sum()),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: x.numpy(),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: bool(x.any()),
        lambda: x + torch.zeros(3),
    ):
        with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
            read_back()


@pytest.mark.parametrize("name, obs, flags", DOMAINS, ids=[name for name, *_ in DOMAINS])
def test_training_step(name, obs, flags):
    """Policy, advantages, ring, RNet training and k-SP cost: all on the device, nothing read back."""
    script, envs = load(name), fake_envs(obs.shape[2:])
    args, is_state = script.Args(**flags), obs.is_floating_point()
    envs.single_action_space = gym.spaces.Box(-1, 1, (4,)) if is_state else envs.single_action_space
    agent, rnet, obs = script.make_agent(envs, args).to(META), script.make_rnet(envs, args).to(META), obs.to(META)
    action = None
    for _ in range(2):  # an action is drawn, then looked at again
        action, logprob, entropy, value = agent.get_action_and_value(obs[0], action)
        (logprob + entropy + value).sum().backward()
    assert {tensor.device for tensor in (action, value, *(p.grad for p in agent.parameters()))} == {META}
    rewards, values, ends = (torch.zeros(n, 4, device=META) for n in (20, 21, 20))
    assert script.gae(rewards, values, ends.bool(), ends.bool(), 0.99, 0.95).device == META

    segment_steps = random_segments(np.random.default_rng(0), 20, 4, 0.05)
    keeps_frames = hasattr(script, "FrameRing")
    ring = script.FrameRing(30, obs) if keeps_frames else script.Ring(30, obs)
    for _ in range(2):
        ring.add(obs, segment_steps, *keeps_frames * [segment_steps])
    rows = ring.rows(ring.size)
    triplets = script.sample_triplets(ring.segment_steps[rows], 2, 5, 5)
    triplets[:3] = rows[triplets[:3]]
    triplets = torch.from_numpy(triplets).to(META)
    read = ring.read if keeps_frames else lambda rows, envs: ring.obs[rows, envs]
    optimizer = torch.optim.Adam(rnet.parameters(), weight_decay=1e-4)
    loss, accuracy = script.rnet_loss(rnet, *read(triplets[:3], triplets[3]), 0.1)
    loss.backward()
    optimizer.step()
    embeddings = script.embed_all(rnet.eval(), read(rows[:, None], np.arange(4)))
    cost = script.ksp_cost(rnet, embeddings, segment_steps[:15], 2 + np.arange(1, 11), 90.0)
    assert {loss.device, accuracy.device, embeddings.device, cost.device} == {META}


@pytest.mark.parametrize("name, obs, flags", DOMAINS, ids=[name for name, *_ in DOMAINS])
def test_bf16_reads_nothing_back(name, obs, flags):
    """Autocast has no meta device. Fake tensors have no values either, so reading one back raises in bf16 as well."""
    script, envs, bf16 = load(name), fake_envs(obs.shape[2:]), torch.autocast("cpu", torch.bfloat16)
    args, is_state = script.Args(**flags), obs.is_floating_point()
    envs.single_action_space = gym.spaces.Box(-1, 1, (4,)) if is_state else envs.single_action_space
    agent, rnet = script.make_agent(envs, args), script.make_rnet(envs, args)
    agent.precision = bf16
    segment_steps = random_segments(np.random.default_rng(0), 20, 4, 0.05)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        obs = fake.from_tensor(obs)
        with pytest.raises(RuntimeError):
            obs.sum().item()
        action, logprob, entropy, value = agent.get_action_and_value(obs[0])
        (logprob + entropy + value).sum().backward()
        loss, accuracy = bf16(script.rnet_loss)(rnet, *obs[:3], 0.1)
        loss.backward()
        embeddings = bf16(script.embed_all)(rnet.eval(), obs)
        gaps = 2 + np.arange(1, 11)
        cost = bf16(script.ksp_cost)(rnet, embeddings, segment_steps[5:], gaps, 90.0)
    assert {x.dtype for x in (logprob, entropy, value, loss, accuracy, cost)} == {torch.float32}
    assert embeddings.dtype == (torch.uint8 if "pixel-difference" in flags.values() else torch.bfloat16)
