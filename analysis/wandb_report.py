"""A report in Weights & Biases about a block of benchmark.sh: its claim, and for each task charts with a line a method.

    ./benchmark.sh minigrid --track                                              # fills the project sprl-minigrid
    python analysis/wandb_report.py --entity ENTITY --project sprl-minigrid      # saves a report and prints its URL
    python analysis/wandb_report.py --entity ENTITY --project sprl-minigrid --dry-run      # needs no network, no login

Every call saves a new report and leaves the earlier ones as they are.
"""

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import wandb
import wandb_workspaces.reports.v2 as wr
from common import ROOT, fail, first_line, parse_args
from curves import COLOURS, method_name, short_name

PANELS = {  # a run's chart: the panel's title
    "charts/episodic_return": "episode return, no cost or bonus", "rnet/heldout_accuracy": "RNet held-out accuracy",
    "charts/success_rate": "success rate", "sprl/cost_rate": "share of steps that cost",
}  # fmt: skip


@dataclass
class Args:
    entity: str  # the user or team whose project it is
    project: str  # the project, sprl-BLOCK if benchmark.sh made it
    block: str | None = None  # benchmark.sh's name of the tasks and the claim (default: by the project's name)
    dry_run: bool = False  # print the report's specification and save nothing


# BLOCKS ##############################################################################################################
def to_config(flags):
    """The config's entries that flags set: --n-substeps 2 is n_substeps: 2, and --whole-bias alone is True."""
    pairs = re.findall(r"--(\S+)(?: (?!--)(\S+))?", " ".join(flags))
    return {name.replace("-", "_"): value or "True" for name, value in pairs}


def read_blocks():
    """{name: block}, with the claim, and the settings of each task and method. benchmark.sh ends with exec of the
    launcher, which reads the list of runs; with cat in its place benchmark.sh prints the list."""
    command = ["bash", "-c", "exec() { cat; }; . ./benchmark.sh"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    blocks = {}
    for engine in ("deepmind_lab", "labmaze"):
        for line in text.replace("{engine}", engine).splitlines():
            match line.partition("#")[0].split():
                case "block", name, _, *claim:
                    block = SimpleNamespace(name=name, claim=" ".join(claim), tasks={}, methods={}, bonuses=[])
                    blocks[name] = block
                case "env", task, _, *flags:
                    block.tasks[task] = to_config(flags)
                case "run", method, script, *flags:
                    block.methods[method] = to_config(flags)
                    if not script.startswith("ppo_sprl_"):
                        block.bonuses.append(method)
    return blocks


# REPORT ##############################################################################################################
def task_filter(task, flags):
    """The expression for the runs of a task: a run's group is its environment, a condition is in its config."""
    env_id, _, condition = task.partition(":")
    settings = [f"Config('{name}') == {value}" for name, value in flags.items() if condition]
    return " and ".join([f"Metric('Group') == '{env_id}'", *settings])


def grouping(methods):
    """A run's job type is its method. What an ablation calls methods is one method, with different settings."""
    if set(methods) <= set(COLOURS):
        return ["JobType"]
    first, *others = methods.values()
    return [f"config.{name}" for name, value in first.items() if any(other[name] != value for other in others)]


def make_report(args, block):
    titles = PANELS | {f"{method}/bonus": f"{method_name(method)}'s bonus" for method in block.bonuses}
    style = {"groupby_aggfunc": "mean", "groupby_rangefunc": "stderr", "max_runs_to_show": 100}
    blocks = [wr.P(f"The paper's claim: {block.claim}"), wr.P("Lines are means over seeds, bands standard errors.")]
    for task, flags in block.tasks.items():
        filters, groupby = task_filter(task, flags), grouping(block.methods)
        runs = wr.Runset(args.entity, args.project, task, filters=filters, groupby=groupby)
        panels = [  # W&B calls the steps of TensorBoard's charts global_step; its own Step counts the rows
            wr.LinePlot(title=title, x="global_step", title_x="environment steps", y=[chart], **style)
            for chart, title in titles.items()
        ]
        blocks += [wr.H2(short_name(task)), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(args.project, args.entity, f"SPRL {block.name}", blocks=blocks, width="fluid")


def without_blanks(items):
    blanks = (None, "", [], {}, (None, None))
    return {name: value for name, value in items if value not in blanks and not name.startswith("_")}


def main(args):
    blocks = read_blocks()
    name = args.block or re.sub(r"-\d+$", "", args.project.removeprefix("sprl-"))  # with --steps N it is sprl-BLOCK-N
    if name not in blocks:
        wrong = f"--block {name}" if args.block else f"--project {args.project}"
        fail(f"{wrong}, accepted: --project sprl-BLOCK, or --block BLOCK, where BLOCK is one of {', '.join(blocks)}")
    report = make_report(args, blocks[name])
    if args.dry_run:
        print(json.dumps(asdict(report, dict_factory=without_blanks), indent=2))
        return
    try:
        if not wandb.login(prompt=False):
            raise wandb.errors.UsageError("not logged in, see `wandb login`, or WANDB_MODE is offline")
        print(report.save().url)
    except Exception as error:  # no network, no such project: W&B has no common class for them
        print(f"wandb_report.py: error: the report is not saved ({first_line(error)})", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(parse_args(Args))
