"""analysis/wandb_report.py: the report as it is sent to W&B, against the paper's tasks and benchmark.sh's commands."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from wandb_workspaces.reports.v2 import interface

sys.path.insert(0, str(ROOT / "analysis"))

import wandb_report


@pytest.fixture
def send(monkeypatch):
    """send(project) saves a report, to a server made up here: the texts and the panel grids that it gets."""
    sent, projects = {}, []

    def answer(api, query, variables):
        if "upsertView" not in query:
            return {"project": {"internalId": "number"}}
        sent.update(variables)
        project = {"name": variables["projectName"], "entityName": variables["entityName"]}
        return {"upsertView": {"view": {"id": "12=", "project": project, "spec": variables["spec"]}}}

    def send(project, **options):
        projects[:] = [SimpleNamespace(name=project)]
        wandb_report.main(wandb_report.Args("us", project, **options))
        blocks = json.loads(sent["spec"])["blocks"]
        texts = [child["text"] for block in blocks for child in block["children"]]
        return texts, [block["metadata"] for block in blocks if block["type"] == "panel-grid"]

    api = SimpleNamespace(projects=lambda entity: projects, client=SimpleNamespace(app_url="https://x.test"))
    monkeypatch.setattr(interface, "_get_api", lambda: api)
    monkeypatch.setattr(interface, "execute_graphql", answer)
    monkeypatch.setattr(wandb_report.wandb, "login", lambda **_: True)
    return send


def run_set(grid):
    """Task filter as {key: value} and grouping of a panel grid that has one run set."""
    (runs,) = grid["runSets"]
    assert all(item["op"] == "=" and item.get("connector", "AND") == "AND" for item in runs["filters"]["filters"])
    return {item["key"]["name"]: item["value"] for item in runs["filters"]["filters"]}, runs["grouping"]


def test_a_grid_of_every_task_with_a_panel_of_every_chart(send, capsys):
    texts, grids = send("sprl-minigrid")
    tasks = [f"MiniGrid-{name}-v0" for name in ("FourRooms-7x7", "FourRooms-11x11", "KeyDoors-7x7", "KeyDoors-11x11")]
    job_type = [{"section": "run", "name": "jobType"}]
    assert [run_set(grid) for grid in grids] == [({"group": task}, job_type) for task in tasks]
    charts = "charts/episodic_return rnet/heldout_accuracy charts/success_rate sprl/cost_rate".split()
    charts += "eco/bonus icm/bonus gt-grid/bonus".split()
    for grid in grids:
        assert grid["runSets"][0]["project"] == {"id": "number", "entityName": "us", "name": "sprl-minigrid"}
        panels = [panel["config"] for panel in grid["panelBankSectionConfig"]["panels"]]
        assert [panel["metrics"] for panel in panels] == [[chart] for chart in charts]
        assert {(p["xAxis"], p["groupAgg"], p["groupArea"]) for p in panels} == {("global_step", "mean", "stderr")}
    claim = "SPRL beats PPO, ECO, ICM and GT-Grid on all four tasks; the last three are near PPO at 7x7 (figure 3)."
    assert f"The paper's claim: {claim}" in texts
    assert capsys.readouterr().out == "https://x.test/us/sprl-minigrid/reports/SPRL-minigrid--12=\n"


def test_conditions_and_ablations_are_told_apart_by_the_config(send):
    """There a run's group and job type are the same for all runs of the block, or of a task."""
    _, grids = send("sprl-fetch-sparsity")
    reach = {"group": "FetchReach-v4", "action_noise": 0.003}
    assert [run_set(grid)[0] for grid in grids] == [reach | {"n_substeps": n} for n in (2, 3, 4, 6)]
    texts, grids = send("sprl-ablation-k-1000")  # with --steps 1000
    assert [run_set(grid)[1] for grid in grids] == [[{"section": "config", "name": "k.value"}]] * 4
    assert "The paper's claim: k = 5 is best of 3, 5 and 7 (figure 10)." in texts
    assert len(send("mine", block="gt-rnet")[1]) == 4


def test_every_run_of_a_block_is_in_one_grid_and_no_two_methods_are_one_line():
    """By the commands that benchmark.sh would start."""
    for name, block in wandb_report.read_blocks().items():
        name, engine = re.fullmatch(r"(.*?)(?:-(deepmind_lab|labmaze))?", name).groups("labmaze")
        command = f"./benchmark.sh {name} --engine {engine} --seeds 1 --steps 7 --dry-run"
        output = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=True).stdout
        filters = [wandb_report.task_filter(*task) for task in block.tasks.items()]
        lines = {text: [] for text in filters}
        for words in map(shlex.split, output.splitlines()):
            config = {}
            for word, following in zip(words, [*words[1:], "--"]):
                if word.startswith("--"):
                    config[word[2:].replace("-", "_")] = "True" if following.startswith("--") else following
            facts = {f"Metric('Group') == '{config['env_id']}'", *(f"Config('{k}') == {v}" for k, v in config.items())}
            (task,) = [text for text in filters if set(text.split(" and ")) <= facts]
            config["JobType"] = config["run_name"].split("__")[2]
            lines[task].append([config[key.removeprefix("config.")] for key in wandb_report.grouping(block.methods)])
        assert all(len(lines[task]) == len(set(map(tuple, lines[task]))) > 1 for task in filters), name


def test_dry_run_asks_nobody_and_what_goes_wrong_is_one_line(monkeypatch, capsys):
    def nobody(*_, **__):
        raise RuntimeError("W&B was asked")

    for owner, name in ((interface, "_get_api"), (interface, "execute_graphql"), (wandb_report.wandb, "login")):
        monkeypatch.setattr(owner, name, nobody)
    wandb_report.main(wandb_report.Args("us", "sprl-quick", dry_run=True))
    blocks = json.loads(capsys.readouterr().out)["blocks"]
    assert [block["runsets"][0]["groupby"] for block in blocks if "runsets" in block] == [["JobType"]]
    for args, words in (
        (("us", "sprl-mingrid"), ["--project sprl-mingrid", "sprl-BLOCK", "minigrid", "fetch-noise"]),
        (("us", "sprl-quick", "quik"), ["--block quik", "--block BLOCK", "dmlab-deepmind_lab", "dmlab-labmaze"]),
    ):
        with pytest.raises(SystemExit) as end:
            wandb_report.main(wandb_report.Args(*args))
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1 and all(word in error for word in words)
    with pytest.raises(SystemExit) as end:
        wandb_report.main(wandb_report.Args("us", "sprl-quick"))
    error = capsys.readouterr().err
    assert end.value.code == 1 and error.count("\n") == 1 and "not saved (RuntimeError: W&B was asked)" in error
