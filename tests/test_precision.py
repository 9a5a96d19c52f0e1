"""--precision: bf16 in the large layers; fp32 in the heads, the losses and the weights."""

import numpy as np
import pytest
import torch
from conftest import CANONICAL, ORACLE, PPO, SPRL, fake_envs, load, random_frames, steps
from test_baselines import FLAGS

RUNS = [(CANONICAL, PPO), (CANONICAL, SPRL), (CANONICAL, ORACLE), *FLAGS.items()]


def bf16(function):
    return torch.autocast("cpu", torch.bfloat16)(function)


def test_a_new_policy_has_ratio_1(script):
    """What the update computes of a state is what the rollout computed, though the batches differ. With a rollout in
    fp32 the ratio would be noise before the first update, and this test fails."""
    torch.manual_seed(1)
    agent = script.make_agent(fake_envs(), script.Args())
    agent.actor.weight.data *= 100  # as decided as a trained one
    obs, full = random_frames(64, 4, 1), agent.precision
    agent.precision = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad():
        actions, rollout, *_, values = (torch.cat(p) for p in zip(*(agent.get_action_and_value(part) for part in obs)))
        _, update, _, newvalue = agent.get_action_and_value(obs.flatten(0, 1), actions)
        agent.precision = full
        fp32 = agent.get_action_and_value(obs.flatten(0, 1), actions)[1]
    assert {rollout.dtype, values.dtype, newvalue.dtype} == {torch.float32}
    assert (update - rollout).abs().mean() < 0.1 * (update - fp32).abs().mean()
    assert (update - fp32).abs().mean() > 1e-4


def test_cost_of_bf16_is_that_of_fp32_where_the_rnet_is_sure(script):
    torch.manual_seed(1)
    rnet, obs = script.make_rnet(fake_envs(), script.Args()).eval(), random_frames(40, 4, 1)
    rnet.head[1].weight.data *= 100
    embeddings = script.embed_all(rnet, obs)
    halved = bf16(script.embed_all)(rnet, obs)
    assert halved.dtype == torch.bfloat16 and embeddings.dtype == torch.float32
    early, late = torch.randint(0, 160, (2, 2_000))
    logits = script.compare_all(rnet, embeddings, early, late)
    judged = bf16(script.compare_all)(rnet, halved, early, late)
    assert judged.dtype == torch.float32
    sure = logits.abs() > 0.2 * logits.std()
    assert sure.float().mean() > 0.5 and torch.equal(judged[sure] > 0, logits[sure] > 0)


@pytest.mark.parametrize("name, flags", RUNS)
def test_runs_in_bf16(run, name, flags):
    """The weights stay fp32, and what is added to the reward is alive."""
    result = run(f"{flags} --precision bf16{steps(6)}", name)
    assert not torch.is_autocast_enabled("cpu")
    parts = [result[part] for part in ("agent", "rnet", "icm") if isinstance(result.get(part), torch.nn.Module)]
    assert {weight.dtype for part in parts for weight in part.parameters()} == {torch.float32}
    assert all(np.isfinite(value) for row in result["history"] for value in row.values())
    added = [row[key] for row in result["history"] for key in row if key.endswith(("/bonus", "/cost_rate"))]
    assert any(added) or "--cost-scale 0 " in f"{flags} "


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_sprl_fetch.py", "ppo_sprl_atari.py", "ppo_sprl_dmlab.py"])
def test_other_domains_run_in_bf16(run, name):
    flags = SPRL.replace("--max-episode-steps 20", "")
    if name != "ppo_sprl_fetch.py":
        flags += " --rnet-width 4 --heldout-pairs 50 --rnet-triplets 32"
    flags += " --engine labmaze" if name == "ppo_sprl_dmlab.py" else ""
    flags += " --env-id Freeway-v5" if name == "ppo_sprl_atari.py" else ""
    history = run(f"{flags} --precision bf16{steps(6)}", name)["history"]
    assert any("sprl/cost_rate" in row for row in history)


@pytest.mark.parametrize("is_fast, precision", [(True, "bf16"), (False, "fp32")])
def test_auto_asks_the_device(run, monkeypatch, capfd, is_fast, precision):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: is_fast)
    result = run(f"{PPO} --precision auto{steps(1)}")
    assert result["args"].precision == result["origin"]["args"]["precision"] == precision
    assert f"(cpu, {precision})" in capfd.readouterr().err


def test_default_is_auto():
    assert {load(name).Args().precision for name, _ in RUNS} == {"auto"}
