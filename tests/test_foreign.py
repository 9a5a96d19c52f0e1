"""Worlds that this project did not write: in a changed copy, by a registered id, and of a user's own package."""

import ast
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CANONICAL, ROOT, SPRL, load, steps

FETCH = "ppo_sprl_fetch.py"
NO_LIMIT = SPRL.replace("--max-episode-steps 20", "")  # the time limit is the world's own


def replace_definition(source, new):
    """The source with one top-level function or class replaced by the one of the same name."""
    name = ast.parse(new).body[0].name
    (old,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    lines = source.splitlines()
    return "\n".join([*lines[: old.lineno - 1], new.strip(), *lines[old.end_lineno :], ""])


def test_sprl_on_a_world_that_is_not_ours(run, tmp_path):
    """A user's copy of the script, in which only make_envs and the networks are others: the README's frozen lake."""
    source, copy = (ROOT / CANONICAL).read_text(), tmp_path / "my_sprl.py"
    section = (ROOT / "README.md").read_text().split("## Change twenty lines\n")[1]
    replaced = re.search(r"```python\n(.*?)```", section, re.S)[1].split("\n\n\n")
    for new in replaced:
        source = replace_definition(source, new)
    copy.write_text(source)
    (env_id,) = re.findall(r"--env-id (\S+)`", section)
    result = run(f"{SPRL} --env-id {env_id}{steps(6)}", copy)
    assert len(replaced) == 3 and result["envs"].num_envs == 4
    assert result["method"] == "sprl" and result["global_step"] == 6 * 128
    rates = [row["sprl/cost_rate"] for row in result["history"] if "sprl/cost_rate" in row]
    assert rates and all(0 <= rate <= 1 for rate in rates)
    assert any("rnet/loss" in row for row in result["history"])
    assert np.isfinite(result["history"][-1]["losses/value_loss"]) and (tmp_path / "runs/small/agent.pt").exists()


@pytest.mark.parametrize(
    "env_id, size", [("MountainCarContinuous-v0", 2), ("CartPole-v1", 4), ("gymnasium_robotics:PointMaze_UMaze-v3", 8)]
)
def test_worlds_of_flat_states(run, env_id, size):
    """A Box with continuous actions, one with discrete ones, and a dict. Only the last one's rewards are rare, so that
    SPRL trains its RNet."""
    result = run(f"{NO_LIMIT} --env-id {env_id}{steps(4)}", FETCH)
    assert result["obs"].shape[2:] == (size,) and result["obs"].dtype == torch.float32
    is_discrete = env_id == "CartPole-v1"
    assert result["actions"].dtype == (torch.int64 if is_discrete else torch.float32)
    assert all("sprl/cost_rate" in row for row in result["history"]) and result["agent"].is_discrete == is_discrete
    assert any("rnet/loss" in row for row in result["history"]) == ("PointMaze" in env_id)


def test_observations_are_standardized_by_the_rollouts_before(run):
    """The first rollout as it is; the second by the mean and variance of the first, which a run of one has kept."""
    flags = f"{NO_LIMIT} --env-id Pendulum-v1 --cost-scale 0"
    first, second = run(flags + steps(1), FETCH), run(f"{flags} --run-name longer{steps(2)}", FETCH)
    seen = first["obs"][1:].flatten(0, 1).double().numpy()
    layer = second["agent"].network[0]
    np.testing.assert_allclose(layer.running_mean, seen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.running_var, seen.var(0, ddof=1), rtol=1e-4)
    states = second["obs"][5]
    expected = (states - layer.running_mean) / (layer.running_var + 1e-5).sqrt()
    torch.testing.assert_close(layer(states), expected)
    assert second["agent"].network[1](torch.tensor([[-99.0, 3.0]])).tolist() == [[-10, 3]]
    assert first["agent"].network[0].num_batches_tracked == 0 and not isinstance(
        load(FETCH).make_agent(first["envs"], load(FETCH).Args()).network[0], torch.nn.BatchNorm1d
    )


class Undrawn(gym.Env):
    """A world whose constructor takes no argument, as many of users' own."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.zeros(1, np.float32)
        return self.place.copy(), {}

    def step(self, action):
        self.place += action
        return self.place.copy(), float(self.place[0] == 9), bool(self.place[0] == 9), False, {}


def test_world_that_cannot_be_drawn(run):
    gym.register("Undrawn-v0", Undrawn)
    result = run(f"{NO_LIMIT} --env-id Undrawn-v0{steps(2)}", FETCH)
    assert result["obs"].max() >= 8 and result["rewards"].sum() > 0


def test_rewards_are_the_worlds_own(run):
    """Pendulum pays at every step: SPRL has nothing to compare, and says so."""
    result = run(f"{NO_LIMIT} --env-id Pendulum-v1{steps(4)}", FETCH)
    assert (result["rewards"] < -0.01).mean() > 0.9
    assert all(row["sprl/cost_rate"] == 0 for row in result["history"])


OWN_WORLD = """
import gymnasium as gym
from minigrid.core.grid import Grid
from minigrid.core.mission import MissionSpace
from minigrid.core.world_object import Goal
from minigrid.minigrid_env import MiniGridEnv


class Corridor(MiniGridEnv):
    def __init__(self, render_mode=None):
        super().__init__(MissionSpace(lambda: "walk"), width=9, height=5, max_steps=30, render_mode=render_mode)

    def _gen_grid(self, width, height):
        self.grid, self.mission = Grid(width, height), "walk"
        self.grid.wall_rect(0, 0, width, height)
        self.put_obj(Goal(), 7, 1)
        self.place_agent()


gym.register("Corridor-v0", Corridor)
"""


@pytest.mark.parametrize("script_name", [CANONICAL, "ppo_eco.py", "ppo_icm.py", "ppo_gtgrid.py"])
def test_a_grid_world_of_the_users_own(run, script_name, tmp_path, monkeypatch):
    """By gymnasium's syntax, PACKAGE:ID, on a grid that is not square. The time limit is the flag's."""
    (tmp_path / "my_mazes.py").write_text(OWN_WORLD)
    monkeypatch.syspath_prepend(tmp_path)
    flags = "--num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 1 --total-timesteps 256 --run-name small"
    result = run(f"{flags} --env-id my_mazes:Corridor-v0 --max-episode-steps 7", script_name)
    assert result["obs"].shape[2:] == (1, 9, 5, 3) and len(result["history"]) == 2
    assert max(row["charts/episodic_length"] for row in result["history"]) <= 7


@pytest.mark.parametrize("env_id", ["Nowhere-v0", "FetchPull-v4"])
def test_unknown_world_is_one_line(run, capfd, env_id):
    with pytest.raises(SystemExit) as end:
        run(f"--env-id {env_id}", FETCH)
    error = capfd.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and env_id in error and "FetchReach-v4" in error


@pytest.mark.parametrize("space", [gym.spaces.Box(-1, 1, (2, 2)), gym.spaces.Discrete(4, start=-2)])
def test_actions_that_do_not_fit_are_one_line(run, capfd, space):
    class World(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), space

    gym.register("Fits-v0", World)
    with pytest.raises(SystemExit) as end:
        run("--env-id Fits-v0", FETCH)
    error = capfd.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and "neither a flat Box nor Discrete from 0" in error
