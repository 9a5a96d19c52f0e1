"""Learning curves over seeds: small CSV files from checkpoints, then a figure and a table from the CSV files.

    python analysis/curves.py export runs/*/agent.pt --out runs/results/mine    # one CSV per run
    python analysis/curves.py export runs/*/agent.pt --script my_sprl.py --out runs/results/mine   # of your own script
    python analysis/curves.py figure runs/results/mine --rnet-accuracy          # curves.png, table.md, table.csv

A CSV file keeps one run's charts with its command, commit and time, so figure and table can be rebuilt without the run.
"""

import csv
import math
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from common import (
    SCRIPTS,
    check_ranges,
    fail,
    first_line,
    load_checkpoint,
    parse_args,
    script_path,
    write_csv,
    written_whole,
)

CHARTS = {  # a run's chart: the column of the CSV files
    "charts/episodic_return": "return", "charts/success_rate": "success", "charts/episodic_length": "length",
    "sprl/cost_rate": "cost_rate", "rnet/heldout_accuracy": "rnet_accuracy",
}  # fmt: skip
COLUMNS = ("step", *CHARTS.values())  # every file has them; bonuses and auxiliary losses follow by their charts' names
COLOURS = {  # Okabe and Ito's, which the colour-blind tell apart; the order is the order of legends and tables
    "sprl": "#D55E00", "gt-sprl": "#009E73", "ppo": "#0072B2", "eco": "#CC79A7", "icm": "#E69F00",
    "gt-grid": "#56B4E9",
}  # fmt: skip
# of labels that are no method: Paul Tol's
OTHERS, DASHES = ("#332288", "#117733", "#AA4499", "#999933", "#882255", "#44AA99"), ("-", ":", "-.")


@dataclass
class Export:
    """Write one CSV per checkpoint: <env>__<label>__s<seed>.csv"""

    checkpoints: tyro.conf.Positional[tuple[str, ...]]  # paths of the agent.pt files
    out: str  # folder of the CSV files, made if missing, e.g. runs/results/mine
    label: str | None = None  # the method: letters, digits, . - and single _ (default: by the script and its settings)
    script: str | None = None  # path of your own script, if the checkpoints are not of ours; it is not run


@dataclass
class Figure:
    """Draw curves.png and write table.md and table.csv beside the CSV files"""

    folder: tyro.conf.Positional[str]  # folder of the CSV files
    smooth: int = 5  # points of the running mean in the figure, of 200; 1 is none; the tables are never smoothed
    rnet_accuracy: bool = False  # a second row shows the RNet's held-out accuracy, where a run has one
    claim: str | None = None  # what the paper says, a line above the tables (default: the claim that table.md has)


# EXPORT ##############################################################################################################
def method_label(script, args):
    if script not in SCRIPTS:  # a user's own method, called as benchmark.sh calls it
        return "_".join(re.findall("[A-Za-z0-9.-]+", script.removesuffix(".py"))) or "-"
    method = script.removesuffix(".py").split("_")[1]  # ppo_sprl_minigrid.py: sprl, ppo_eco.py: eco
    if not args["cost_scale" if method == "sprl" else "bonus_scale"]:  # then the scripts call themselves ppo too
        return "ppo"
    if method != "sprl":
        return {"gtgrid": "gt-grid"}.get(method, method)
    return "gt-sprl" if args.get("rnet") == "oracle" else "sprl"


def task_name(args):
    """The environment with DMLab's engine or Fetch's conditions, which make it another task: no mean mixes them."""
    env_id = args["env_id"].rpartition(":")[2]  # without the module that registers it
    if env_id.startswith("explore_"):  # scores of DeepMind Lab's stand-in are not its own
        return f"{env_id}-{args.get('engine', '')}"
    if env_id.startswith("Fetch"):  # the paper's sparsity and noise studies
        for setting, name, usual in (("n_substeps", "substeps", 20), ("action_noise", "noise", 0.003)):
            if args.get(setting, usual) != usual:
                env_id += f"-{name}{args[setting]:g}"
    return env_id


def to_columns(history):
    """A checkpoint's history in the names of the CSV files, without PPO's losses and the rest of the charts."""
    kept = [{n: v for n, v in row.items() if n in CHARTS or not n.startswith(("charts/", "losses/", "rnet/"))}
            for row in history]  # fmt: skip
    return [{CHARTS.get(name, name): value for name, value in row.items()} for row in kept]


def thin(rows, most=400):
    """Averages runs of consecutive rows so that at most `most` are left; like a single row, a group describes what led
    up to its last step."""
    size = math.ceil(len(rows) / most) or 1
    thinned = []
    for start in range(0, len(rows), size):
        group, columns = rows[start : start + size], defaultdict(list)
        for row in group:
            for name, value in row.items():
                columns[name].append(value)
        thinned.append({name: float(np.mean(values)) for name, values in columns.items()} | {"step": group[-1]["step"]})
    return thinned


def write_run(path, rows, comments):
    with written_whole(*os.path.split(path)) as (part,):
        write_csv(part, thin(rows), comments, COLUMNS)


def export(args):
    if args.label and not re.fullmatch(r"[A-Za-z0-9.-]+(_[A-Za-z0-9.-]+)*", args.label):
        fail(f"--label {args.label} is not a label, accepted: letters, digits, . - and single _ between them")
    if not args.checkpoints:
        fail("no checkpoint given, accepted: one or more agent.pt files")
    os.makedirs(args.out, exist_ok=True)
    written = {}
    for source in args.checkpoints:
        checkpoint = load_checkpoint(source, {"script": str, "args": dict, "history": list})
        try:
            script = script_path(checkpoint, source, args.script).name
            label = args.label or method_label(script, checkpoint["args"])
            name = f"{task_name(checkpoint['args'])}__{label}__s{checkpoint['args']['seed']}.csv"
            path = os.path.join(args.out, re.sub(r"[^\w.-]", "-", name))  # ids like ALE/Pong-v5 have a slash
            if path in written:
                fail(f"{source} and {written[path]} would both become {path}; export them with different --label")
            seconds = checkpoint["global_step"] / checkpoint["history"][-1]["charts/SPS"]  # a resumed run's: about
            comments = {"command": checkpoint["command"], "commit": checkpoint["commit"], "elapsed_s": round(seconds)}
            write_run(path, to_columns(checkpoint["history"]), comments)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            fail(f"{source} is not a checkpoint of a training ({first_line(error)})")
        written[path] = source
        print(f"{path}: {len(checkpoint['history'])} rows")


# FIGURE AND TABLES ###################################################################################################
def read_run(path):
    """The columns of one CSV file as arrays, NaN where blank, and its comments."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        comments = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
        header, *rows = csv.reader(line for line in lines if not line.startswith("#"))
        table = np.array([[float(cell or "nan") for cell in row] for row in rows])
        run = {name: table[:, header.index(name)] for name in dict.fromkeys([*COLUMNS, *header])}
    except (OSError, ValueError, IndexError) as error:
        fail(f"{path} is not a file that export wrote ({first_line(error)})")
    if not (np.diff(run["step"]) > 0).all() or np.isnan(run["step"]).any() or np.isnan(run["return"]).all():
        fail(f"{path} is no learning curve, accepted: increasing steps, and a return in at least one row")
    if np.isinf(table).any():
        fail(f"{path} has an infinite number in it, accepted: finite ones and blanks")
    return run | {"comments": comments}


def read_folder(folder):
    """{env: {method: [run, ...]}}, methods in the order of COLOURS and then by name."""
    runs = defaultdict(lambda: defaultdict(list))
    for path in sorted(Path(folder).glob("*__*__s*.csv"), key=lambda path: natural(path.name)):
        env_id, method, seed = path.stem.rsplit("__", 2)
        if re.fullmatch(r"s\d+", seed):
            runs[env_id][method].append(read_run(path) | {"seed": int(seed[1:])})
    if not runs:
        fail(f"{folder} has no <env>__<label>__s<seed>.csv in it, accepted: a folder that export wrote to")
    order = list(method_styles({method for by_method in runs.values() for method in by_method}))
    return {
        env_id: {method: runs[env_id][method] for method in order if method in runs[env_id]}
        for env_id in sorted(runs, key=natural)
    }


def natural(name):
    """A key that sorts 7x7 before 11x11 and 0.03 before 0.1."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def short_name(env_id):
    return env_id.removeprefix("MiniGrid-").removesuffix("-v0")


def method_name(method):
    return {"gt-grid": "GT-Grid"}.get(method, method.upper() if method in COLOURS else method)


def method_styles(methods):
    """{method: (colour, dashes)}, in the order of legends; PPO is dashed: what it covers stays visible."""
    others = [(method, i) for i, method in enumerate(sorted(set(methods) - set(COLOURS), key=natural))]
    return {m: (colour, "--" if m == "ppo" else "-") for m, colour in COLOURS.items() if m in methods} | {
        method: (OTHERS[i % len(OTHERS)], DASHES[i // len(OTHERS) % len(DASHES)]) for method, i in others
    }


def score_name(runs):
    """What tables and axes call the return: success where it is 0 or 1, that is, the success rate in every row."""
    every_run = [run for by_method in runs.values() for seeds in by_method.values() for run in seeds]
    same = all(np.array_equal(run["return"], run["success"], equal_nan=True) for run in every_run)
    return "success" if same and any((run["return"] > 0).any() for run in every_run) else "return"  # all 0: unknown


def points(run, name):
    """Steps and values of the rows in which the column is not blank; none if the run has no such column."""
    values = run.get(name, np.full(len(run["step"]), np.nan))
    found = ~np.isnan(values)
    return run["step"][found], values[found]


def mean_and_error(values):
    """Mean and standard error over the first axis, the seeds; no error (NaN) for a single seed."""
    values = np.asarray(values, float)
    return values.mean(0), values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan * values[0]


def mean_between(steps, values, low, high):
    """Exact mean over [low, high] of the straight lines through the points; the first and last value go on outside."""
    grid = np.unique([low, *steps[(steps > low) & (steps < high)], high])
    heights = np.interp(grid, steps, values)
    return np.trapezoid(heights, grid) / (high - low) if high > low else heights[-1]


def running_mean(values, window):
    """Mean over `window` points around each, over fewer at both ends."""
    ones, kernel = np.ones(len(values)), np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(ones, kernel, "same")


def seed_curves(runs, name, smooth, num_points=200):
    """A step grid that all runs cover and one smoothed curve (seeds, points) per run; None and [] if there is none."""
    curves = [points(run, name) for run in runs]
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return None, []
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    if first > last:  # one run ends before another begins: there is no step to take a mean at
        return None, []
    grid = np.linspace(first, last, num_points)
    return grid, [running_mean(np.interp(grid, *curve), smooth) for curve in curves]


def common_steps(env_id, by_method):
    """The steps of a task's shortest run: all are cut to them, so that methods are compared at equal steps."""
    every_run = [(method, run) for method, seeds in by_method.items() for run in seeds]
    lengths = [int(run["step"][-1]) for _, run in every_run]
    steps = min(lengths)
    if max(lengths) > steps:
        print(f"{env_id}: runs of {steps} to {max(lengths)} steps, cut to {steps}", file=sys.stderr)
    for method, run in every_run:
        if points(run, "return")[0][0] > steps:
            fail(f"{env_id} {method} seed {run['seed']} has no return up to step {steps}, where another run ends")
    return steps


def make_table(runs):
    """One row per env and method: final return (the last 10 % of steps), area under the curve (all steps), +- SE."""
    rows = []
    for env_id, by_method in runs.items():
        steps = common_steps(env_id, by_method)
        for method, seeds in by_method.items():
            curves = [points(run, "return") for run in seeds]
            final = mean_and_error([mean_between(*curve, 0.9 * steps, steps) for curve in curves])
            area = mean_and_error([mean_between(*curve, 0, steps) for curve in curves])
            commits = ", ".join(sorted({run["comments"].get("commit", "unknown") for run in seeds}))
            rows.append({
                "env": env_id, "method": method, "seeds": len(seeds), "steps": steps, "final_return": final[0],
                "final_return_se": final[1], "auc": area[0], "auc_se": area[1], "commit": commits,
            })  # fmt: skip
    return rows


def with_error(mean, error):
    """mean ± error; the mean alone where a single seed has no error."""
    digits = 3 if abs(mean) < 10 else 1
    if error is None or np.isnan(error):
        return f"{mean:.{digits}f}"
    small = 1e-9 < error < 0.5 * 10**-digits  # would be rounded to none at all
    return f"{mean:.{digits}f} ± " + (f"{error:.1g}" if small else f"{error:.{digits}f}")


def read_claim(folder):
    """The claim that the folder's table.md was written with, or none."""
    path, start = Path(folder, "table.md"), "The paper's claim: "
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.splitlines()[0].removeprefix(start) if text.startswith(start) else ""


def write_table(rows, folder, claim="", score="return"):
    write_csv(os.path.join(folder, "table.csv"), rows)
    lines = [
        f"Final {score}: mean over the last 10 % of steps. Area: mean {score} over all steps, the area under the "
        "learning curve divided by its length. ± is the standard error over seeds."
    ]
    if claim:
        lines = [f"The paper's claim: {claim}", "", *lines]
    for env_id in dict.fromkeys(row["env"] for row in rows):
        head = f"| method | final {score} | area | seeds | steps | commit |"
        lines += ["", f"### {env_id}", "", head, "|-|-|-|-|-|-|"]
        for row in (row for row in rows if row["env"] == env_id):
            final, area = (with_error(row[name], row[f"{name}_se"]) for name in ("final_return", "auc"))
            cells = (row["method"], final, area, str(row["seeds"]), f"{row['steps']:,}", row["commit"])
            lines.append(f"| {' | '.join(cells)} |")
    Path(folder, "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def seed_counts(by_method):
    """How many seeds a panel shows, in words: 6 seeds, or 3 seeds, ECO and ICM 1."""
    methods = defaultdict(list)
    for method, seeds in by_method.items():
        methods[len(seeds)].append(method_name(method))
    (count, _), *others = sorted(methods.items(), key=lambda item: (-len(item[1]), -item[0]))
    parts = [f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {n}" for n, names in others]
    return ", ".join([f"{count} seed{'s' * (count > 1)}", *parts])


def draw(runs, path, smooth, rnet_accuracy):
    """One panel per environment, mean and standard error over seeds per method; accuracy panels below if asked for."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, MaxNLocator

    styles = method_styles({method for by_method in runs.values() for method in by_method})
    label = "success rate" if score_name(runs) == "success" else "episode return"
    names = {"return": label} | ({"rnet_accuracy": "RNet held-out accuracy"} if rnet_accuracy else {})
    columns = min(len(runs), 4)
    height = math.ceil(len(runs) / columns) * len(names)
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    size = (max(3.3 * columns, 4.6), 2.5 * height + 0.5)
    figure, axes = plt.subplots(height, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    shown, most, thin_lines = set(), 0, False
    for panel, (env_id, by_method) in enumerate(runs.items()):
        for row, (name, label) in enumerate(names.items()):
            axis = axes[panel // columns * len(names) + row, panel % columns]
            axis.axis("on")
            most_here = max(map(len, by_method.values()))
            most = max(most, most_here)
            for method, seeds in reversed(by_method.items()):  # the first of the legend on top
                grid, curves = seed_curves(seeds, name, smooth)
                if curves:  # a method without an RNet has no accuracy
                    mean, error = mean_and_error(curves)
                    colour, dashes = styles[method]
                    thin_line = len(seeds) == 1 < most_here  # luck must not look like a mean
                    axis.plot(grid, mean, linewidth=0.9 if thin_line else 1.8, color=colour, linestyle=dashes)
                    shown, thin_lines = shown | {method}, thin_lines or thin_line
                    axis.fill_between(grid, mean - error, mean + error, color=colour, alpha=0.2, lw=0)
            if name == "rnet_accuracy":
                axis.set_ylim(min(0.45, axis.get_ylim()[0]), 1.02)
            elif axis.get_ylim()[0] > -0.1 and axis.get_ylim()[1] < 1.1:  # returns in [0, 1]: one scale for all panels
                axis.set_ylim(-0.02, 1.02)
            if not axis.lines:
                text = "no RNet" if name == "rnet_accuracy" else "no step in common"
                axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", color="gray")
            axis.set_xlim(0, 1.02 * max(run["step"][-1] for seeds in by_method.values() for run in seeds))
            axis.xaxis.set_major_locator(MaxNLocator(5))
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.grid(alpha=0.25, linewidth=0.6)
            if panel % columns == 0:
                axis.set_ylabel(label)
            if row == 0:
                axis.set_title(short_name(env_id), fontsize=10, pad=16)
                text = axis.text(0.5, 1.02, seed_counts(by_method), transform=axis.transAxes, fontsize=7.5, ha="center")
                text.set_in_layout(False)
            if row == len(names) - 1:
                note = f"\n(running mean of {smooth} of 200 points)" if smooth > 1 else ""
                axis.set_xlabel("environment steps" + note)
    methods = sorted(shown, key=list(styles).index)
    texts = [method_name(method) for method in methods]
    ncols = int(size[0] / (0.6 + 0.075 * max(map(len, texts), default=0)))  # that fit, in inches
    lines = [plt.Line2D([], [], linewidth=1.8, color=c, linestyle=d) for c, d in map(styles.get, methods)]
    title = "mean and standard error over seeds" + "; thin: one seed" * thin_lines if most > 1 else None
    figure.legend(
        lines,
        texts,
        loc="outside lower center",
        ncols=max(1, min(len(texts), ncols)),
        frameon=False,
        title=title,
        title_fontsize=8,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def figure(args):
    check_ranges(args, smooth=(1, math.inf))
    runs = read_folder(args.folder)
    claim = read_claim(args.folder) if args.claim is None else args.claim
    write_table(make_table(runs), args.folder, claim, score_name(runs))
    every_run = [run for by_method in runs.values() for seeds in by_method.values() for run in seeds]
    accuracies = args.rnet_accuracy and any(len(points(run, "rnet_accuracy")[0]) for run in every_run)
    draw(runs, os.path.join(args.folder, "curves.png"), args.smooth, accuracies)
    print(Path(args.folder, "table.md").read_text(encoding="utf-8"), end="")


def main(args):
    try:
        export(args) if isinstance(args, Export) else figure(args)
    except OSError as error:  # no permission, full disk, a file where a folder should be
        fail(first_line(error))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(parse_args(Export | Figure))
