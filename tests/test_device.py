"""Device hygiene without a GPU: on torch.device("meta") a CPU tensor in the mix or a value read back raises."""

from textwrap import dedent

import numpy as np
import pytest
import torch
from conftest import CANONICAL, ROOT, SPRL, fake_envs, random_ages, random_frames, sections, steps

META = torch.device("meta")


@pytest.fixture
def meta_rnet(script):
    return script.make_rnet(fake_envs(), script.Args()).to(META)


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


def test_policy_parts(script):
    agent, frames = (
        script.make_agent(fake_envs(), script.Args(stack_observations=1)).to(META),
        random_frames(20, 4).to(META),
    )
    rows = torch.arange(8, device=META)
    obs = script.stack_frames(frames, torch.ones((20, 4), dtype=torch.int64, device=META), rows, rows % 4, 1)
    for action in (None, torch.zeros(8, dtype=torch.int64, device=META)):
        action, logprob, entropy, value = agent.get_action_and_value(obs, action)
        (logprob + entropy + value).sum().backward()
    assert {tensor.device for tensor in (action, value, *(p.grad for p in agent.parameters()))} == {META}
    rewards, values, ends = (torch.zeros(n, 4, device=META) for n in (20, 21, 20))
    assert script.gae(rewards, values, ends.bool(), ends.bool(), 0.99, 0.95).device == META


def test_reachability_parts(script, meta_rnet):
    ring, ages = (
        script.Ring(50, 4, (7, 7, 3), torch.uint8, META),
        torch.from_numpy(random_ages(np.random.default_rng(0), 50, 4, 0.05)),
    )
    for _ in range(2):
        ring.add(random_frames(30, 4).to(META), ages[:30].to(META), ages[:30].to(META))
    rows = ring.rows(ring.size)
    samples = [
        *script.sample_triplets(ring.ages[rows], 2, 5, 5, True, 64),
        *script.sample_heldout(ages.to(META), 2, 1, 5, 64),
    ]
    assert {tensor.device for tensor in samples} == {META}
    optimizer = torch.optim.Adam(meta_rnet.parameters(), weight_decay=1e-4)
    logits = script.rnet_logits(
        meta_rnet, *(script.stack_frames(ring.frames, ring.depths, rows[r], samples[3], 0) for r in samples[:3])
    )
    script.rnet_loss(*logits, 0.1).backward()
    optimizer.step()
    assert script.rnet_accuracy(*logits).device == META
    with torch.inference_mode():
        embeddings = script.embed_frames(meta_rnet.embed, ring.frames, ring.depths, rows, 0)
        assert script.ksp_cost(meta_rnet, embeddings, ages[30:].numpy(), 2, 1, 10, 90.0).device == META


def test_main_block(run, monkeypatch):
    """Three real iterations, then a fourth one's learning with every tensor on meta. Read back are only the number of
    held-out pairs, the number of triplets and, once per RNet training, the minibatches' accuracies."""
    names = run(SPRL + steps(3))
    read_backs = []
    host_int, host_tolist = int, torch.Tensor.tolist

    def meta_int(value):
        if not getattr(value, "is_meta", False):
            return host_int(value)
        read_backs.append("int")
        return 40

    def meta_tolist(tensor):
        if not tensor.is_meta:
            return host_tolist(tensor)
        read_backs.append("tolist")
        return np.full(tensor.shape, 0.9).tolist()

    def to_meta(value):
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            return value.to(META)
        if isinstance(value, names["Ring"]):
            vars(value).update({name: to_meta(attribute) for name, attribute in vars(value).items()})
        return value

    monkeypatch.setattr(torch.Tensor, "tolist", meta_tolist)
    names = {name: to_meta(value) for name, value in names.items()} | {"device": META, "int": meta_int}
    names["global_step"] += names["batch_size"]
    names["optimizer"] = torch.optim.Adam(names["agent"].parameters())  # fused Adam does not know meta
    names["rnet_optimizer"] = torch.optim.Adam(names["rnet"].parameters())
    code = {marker: dedent(text) for marker, text in sections((ROOT / CANONICAL).read_text()).items()}
    for embeddings in ("made anew", "kept"):
        names |= {"embeddings": None} if embeddings == "made anew" else {}
        exec(code["INTRINSIC REWARD"], names)
        assert names["cost"].device == META
    exec(code["ADVANTAGE"], names)
    exec(code["UPDATE POLICY"], names)
    assert read_backs == [] and names["returns"].device == names["loss"].device == META
    exec(code["UPDATE RNET"], names)
    assert read_backs == ["int", "int", "tolist"] and names["embeddings"] is None
    for marker, read_back in (("ADVANTAGE", "returns.mean().item()"), ("UPDATE POLICY", "clipfracs[0].cpu()")):
        with pytest.raises((RuntimeError, NotImplementedError)):
            exec(code[marker] + read_back, names)
