"""The loop needs gymnasium's VectorEnv and nothing else: SPRL on a world of gymnasium's own."""

import ast

import numpy as np
from conftest import CANONICAL, ROOT, SPRL, load, steps

MAKE_ENVS = """
def make_envs(args):
    return gym.make_vec("FrozenLake8x8-v1", num_envs=args.num_envs, max_episode_steps=20)
"""
NETWORK = '''
class GridCNN(nn.Module):
    """One-hot cells of the lake."""

    def __init__(self, *_):
        super().__init__()
        self.out_features = 64

    def forward(self, obs):
        return F.one_hot(obs.reshape(len(obs)), 64).float()
'''
MAKE_RNET = """
def make_rnet(envs, args):
    return GridRNet(nn.Sequential(GridCNN(), nn.Linear(64, 128), nn.ReLU()), 128)
"""


def replace_definition(source, new):
    """The source with one top-level function or class replaced by the one of the same name."""
    name = ast.parse(new).body[0].name
    (old,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    lines = source.splitlines()
    return "\n".join([*lines[: old.lineno - 1], new.strip(), *lines[old.end_lineno :], ""])


def test_sprl_on_a_world_that_is_not_ours(run, tmp_path):
    """A user's copy of the script, in which only make_envs and the networks are others."""
    source, copy = (ROOT / CANONICAL).read_text(), tmp_path / "my_sprl.py"
    for new in (MAKE_ENVS, NETWORK, MAKE_RNET):
        source = replace_definition(source, new)
    copy.write_text(source)
    result = run(SPRL + steps(6), copy)
    assert result["method"] == "sprl" and result["global_step"] == 6 * 128
    rates = [row["sprl/cost_rate"] for row in result["history"] if "sprl/cost_rate" in row]
    assert rates and all(0 <= rate <= 1 for rate in rates)
    assert any("rnet/loss" in row for row in result["history"])
    assert np.isfinite(result["history"][-1]["losses/value_loss"]) and (tmp_path / "runs/small/agent.pt").exists()
    assert not hasattr(load(CANONICAL).GridWorlds, "learning_rewards")
