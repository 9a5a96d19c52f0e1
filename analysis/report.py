"""One page about a folder of runs: curves to look into, scores with intervals, and the command of every run.

    python analysis/report.py results/minigrid                  # report.html, scores.md, scores.csv, scores.png
    python analysis/report.py results/minigrid --threshold 0.8 --baseline ppo,eco

report.html needs no network and no other file. scores.png is drawn only if a method has an interval. The CSV files are
those of `analysis/curves.py export`.
"""

import html
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from common import fail, first_line, parse_args, write_csv
from curves import (
    COLOURS,
    COLUMNS,
    method_name,
    method_styles,
    points,
    read_claim,
    read_folder,
    score_name,
    seed_curves,
    short_name,
    with_error,
)
from scores import ALL, MIN_SEEDS, make_scores

METRICS = {
    "return": "episode return", "success": "success rate", "length": "episode length", "cost_rate": "cost rate",
    "rnet_accuracy": "RNet held-out accuracy",
}  # fmt: skip
DASH = {"-": "", "--": "7 3", ":": "2 3", "-.": "9 3 2 3"}  # matplotlib's name of a line: SVG's
TEMPLATE = Path(__file__).with_name("report_template.html")
HINT = '<p class="hint" hidden>Scroll sideways for the other columns →</p>'  # shown where the next element is too wide
POINTS = 100  # of every curve in the page: 200 runs are then about 400 kB


@dataclass
class Args:
    folder: tyro.conf.Positional[str]  # folder of the CSV files; the report is written there too
    threshold: float | None = None  # return whose first crossing is timed (default: per task, 80 % of the best's)
    baseline: str | None = None  # labels of the methods to compare with, as A,B (default: ppo and sprl, if there)
    claim: str | None = None  # what the paper says, a line above the tables (default: the claim that table.md has)


# TABLES ##############################################################################################################
def number(value, digits=3):
    return "–" if value is None else f"{value:.{digits if abs(value) < 10 else 1}f}"


def bounds(row, name):
    """value [low, high]; a dash for what a single seed cannot tell."""
    value, low, high = (number(row[f"{name}{end}"], 2 if "improvement" in name else 3) for end in ("", "_low", "_high"))
    if value == "–":
        return value
    return f"{value} [{'–' if low == '–' else f'{low}, {high}'}]"


def timing(row):
    """Median steps to the threshold, and how many seeds got there if not all."""
    if row["threshold"] is None:
        return "–"
    part = "" if row["reached"] == row["seeds"] else f" ({row['reached']} of {row['seeds']})"
    return (f"> {row['steps']:,}" if row["steps_to"] is None else f"{row['steps_to']:,.0f}") + part


def make_columns(pooled, baselines, score):
    """{heading: (text of a row, name of its interval or None)}; without a baseline nothing is compared."""
    columns = {"runs" if pooled else "seeds": (lambda row: str(row["seeds"]), None)}
    if not pooled:
        for heading, name in ((f"final {score}", "final_return"), ("area", "auc")):
            columns[heading] = lambda row, name=name: with_error(row[name], row[f"{name}_se"]), None
        columns["steps to threshold"] = timing, None
    for value, name in ((f"final {score}", "final"), ("area", "auc")):
        columns[f"IQM of {value}"] = lambda row, full=f"{name}_iqm": bounds(row, full), f"{name}_iqm"
        for label in baselines:
            heading, full = f"P(better than {method_name(label)}), {value}", f"{name}_improvement_{label}"
            columns[heading] = lambda row, full=full: bounds(row, full), full
    return columns


def make_notes(rows, scaled, baselines, score="return"):
    notes = [
        f"Final {score}: mean over the last 10 % of steps. Area: mean {score} over all steps, the area under the "
        "learning curve divided by its length. ± is the standard error over seeds. Steps to threshold: median over "
        f"seeds of the first step at which the mean {score} over the 5 % of training before it is at the threshold.",
        "IQM: interquartile mean, without a quarter of the runs, rounded down, at either end. In brackets 95 % "
        f"stratified bootstrap intervals over seeds (Agarwal et al. 2021), – for fewer than {MIN_SEEDS} seeds. Few "
        "seeds make them too narrow: of normally distributed seeds, 3 hold the true mean in about 75 % of the cases, 6 "
        "in about 90 %.",
    ]
    if baselines:
        names = " or of ".join(map(method_name, baselines))
        notes[1] += f" P(better): the probability that a run of the method beats a run of {names}; ties count half."
    pooled = [row for row in rows if row["env"] == ALL]
    if pooled:
        tasks = pooled[0]["tasks"]
        notes.append(
            f"All tasks: seeds 1 to {pooled[0]['seeds'] // tasks} of the methods that have them on all {tasks} tasks. "
            "They are pooled for the IQM."
        )
        if baselines:
            notes[-1] += " P(better) is averaged over tasks."
        if scaled:
            notes[-1] += " Returns are scaled in each task from 0, its worst run, to 1, its best."
    return notes


def make_heading(rows):
    """Name of the task, and what all its rows share."""
    row = rows[0]
    if row["env"] == ALL:
        return f"All tasks ({row['tasks']})", ""
    threshold = "no threshold" if row["threshold"] is None else f"threshold {number(row['threshold'])}"
    return short_name(row["env"]), f"{row['steps']:,} steps, {threshold}"


def by_env(rows):
    envs = sorted({row["env"]: None for row in rows}, key=lambda env_id: env_id != ALL)  # all tasks first; sorts stably
    return {env_id: [row for row in rows if row["env"] == env_id] for env_id in envs}


def write_markdown(rows, scaled, baselines, score, claim, path):
    def clean(text):
        return html.escape(text, quote=False).replace("|", "\\|").replace("`", "\\`")

    notes = make_notes(rows, scaled, baselines, score)
    if claim:
        notes.insert(0, f"The paper's claim: {claim}")
    lines = ["\n\n".join(clean(note) for note in notes)]
    for env_id, members in by_env(rows).items():
        columns = make_columns(env_id == ALL, baselines, score)
        title, shared = make_heading(members)
        lines += ["", f"### {clean(title)}", "", *([f"{shared}.", ""] if shared else [])]
        lines += [f"| method | {' | '.join(map(clean, columns))} |", "|-" * (len(columns) + 1) + "|"]
        for row in members:
            cells = [clean(method_name(row["method"])), *(text(row) for text, _ in columns.values())]
            lines.append(f"| {' | '.join(cells)} |")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_scores(rows, styles, baselines, score, path):
    """Points with their intervals, one row of panels per group of the table."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, NullLocator

    groups = by_env(rows)
    columns = {heading: name for heading, (_, name) in make_columns(True, baselines, score).items() if name}
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    heights = [0.9 + 0.22 * len(members) for members in groups.values()]
    figure, axes = plt.subplots(
        len(groups), len(columns), figsize=(1 + 2.6 * len(columns), sum(heights) + 0.4), squeeze=False, sharey="row",
        height_ratios=heights, layout="constrained",
    )  # fmt: skip
    for n, (line, members) in enumerate(zip(axes, groups.values())):
        for axis, (heading, name) in zip(line, columns.items()):
            for i, row in enumerate(members):
                value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
                colour, _ = styles[row["method"]]
                if low is not None:
                    axis.plot([low, high], [i, i], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
                if value is not None:  # hollow without an interval
                    marker, fill = "o" if row["method"] in COLOURS else "D", "full" if low is not None else "none"
                    axis.plot(value, i, color=colour, marker=marker, fillstyle=fill, markersize=5)
            if "improvement" in name:
                axis.set_xlim(-0.04, 1.04)
                axis.axvline(0.5, color="gray", linewidth=0.8, linestyle=":")
                axis.set_xticks([0, 0.5, 1])
            else:
                axis.xaxis.set_major_locator(MaxNLocator(4) if axis.lines else NullLocator())
                left, right = axis.get_xlim()
                if right - left < 0.1 and -1 < left < right < 2:  # or a difference of 0.003 would fill the panel
                    axis.set_xlim((left + right) / 2 - 0.05, (left + right) / 2 + 0.05)
            axis.set_ylim(len(members) - 0.5, -0.5)
            axis.set_yticks(range(len(members)), [method_name(row["method"]).replace("$", r"\$") for row in members])
            axis.grid(axis="x", alpha=0.25, linewidth=0.6)
            # below the first row an empty title keeps room for the task's name
            axis.set_title(" " if n else heading.replace("$", r"\$"), fontsize=9, pad=6 if n else 20)
        task = make_heading(members)[0].replace("$", r"\$")
        text = line[0].text(0, 1.02, task, transform=line[0].transAxes, va="bottom", fontweight="bold")
        text.set_in_layout(False)  # or a long name would squeeze the first column
    note = f"bars: 95 % bootstrap intervals; methods of fewer than {MIN_SEEDS} seeds are left out; axes differ in range"
    figure.supxlabel(note, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# PAGE ################################################################################################################
def encode(runs, name):
    """One method's curves as {x: first and last step of an even grid, d: decimals, s: seeds, v: values times 10^d}."""
    runs = [run for run in runs if len(points(run, name)[0])]  # a method without an RNet has no accuracy
    grid, curves = seed_curves(runs, name, 1, POINTS)
    if not curves:
        return None
    decimals = 3 if np.abs(curves).max() < 10 else 1
    values = np.rint(np.array(curves) * 10**decimals).astype(int).tolist()
    return {"x": [round(grid[0]), round(grid[-1])], "d": decimals, "s": [run["seed"] for run in runs], "v": values}


def page_data(runs, styles):
    every_run = [run for by_method in runs.values() for seeds in by_method.values() for run in seeds]
    others = sorted({name for run in every_run for name in run} - {*COLUMNS, "comments", "seed"})  # icm/bonus, ...
    labels = METRICS | {name: name for name in others}
    if score_name(runs) == "success":  # or one curve would have two names
        del labels["return"]
    metrics = [name for name in labels if any(len(points(run, name)[0]) for run in every_run)]
    return {
        "points": POINTS,
        "metrics": [{"id": name, "label": labels[name]} for name in metrics],
        "methods": [
            {"label": method_name(method), "colour": colour, "dash": DASH[dashes]}
            for method, (colour, dashes) in styles.items()
        ],
        "tasks": [
            {"label": short_name(env_id)}
            | {name: [encode(tasks.get(method, []), name) for method in styles] for name in metrics}
            for env_id, tasks in runs.items()
        ],
    }


def swatch(style):
    colour, dashes = style
    line = f'<path d="M0 2H26" stroke="{colour}" stroke-width="3" stroke-dasharray="{DASH[dashes]}"/>'
    return f'<svg class="swatch" width="26" height="4" aria-hidden="true">{line}</svg>'


def bar(row, name, low, high, colour):
    """The interval of a cell as a bar under its text, from low to high."""
    ends = [row[f"{name}{end}"] for end in ("", "_low", "_high")]
    if ends[0] is None:
        return ""
    value, left, right = (100 * ((ends[0] if end is None else end) - low) / ((high - low) or 1) for end in ends)
    middle = '<u style="left:50%"></u>' if "improvement" in name else ""
    return (
        f'<span class="bar" aria-hidden="true">{middle}'
        f'<b style="left:{left:.1f}%;width:{right - left:.1f}%;background:{colour}"></b>'
        f'<s style="left:{value:.1f}%;background:{colour}"></s></span>'
    )


def score_tables(rows, styles, envs, baselines, score):
    parts, order = [], list(styles)
    for env_id, members in by_env(rows).items():
        title, shared = make_heading(members)
        task = "" if env_id == ALL else f' data-task="{envs.index(env_id)}"'
        columns = make_columns(env_id == ALL, baselines, score)
        head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in columns)
        lines = []
        for row in members:
            cells = ""
            for text, name in columns.values():
                cells += f"<td>{html.escape(text(row)).replace(' [', '<br>[')}"  # or ten columns need a wide screen
                if name:
                    ends = [r[f"{name}{end}"] for r in members for end in ("", "_low", "_high")]
                    ends = [end for end in ends if end is not None and "improvement" not in name] or [0, 1]
                    cells += bar(row, name, min(ends), max(ends), styles[row["method"]][0])
                cells += "</td>"
            name = swatch(styles[row["method"]]) + html.escape(method_name(row["method"]))
            lines.append(f'<tr data-method="{order.index(row["method"])}"><th scope="row">{name}</th>{cells}</tr>')
        parts.append(
            f"<section{task}><h3>{html.escape(title)}<small>{html.escape(shared)}</small></h3>{HINT}"
            f'<div class="scroll" tabindex="0" role="region" aria-label="Scores, {html.escape(title)}"><table><thead>'
            f'<tr><th scope="col">method</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div></section>'
        )
    return "\n".join(parts)


def run_list(runs, styles):
    lines, order = [], list(styles)
    for task, (env_id, by_method) in enumerate(runs.items()):
        for method, seeds in by_method.items():
            for run in seeds:
                comments = {name: html.escape(run["comments"].get(name, "–")) for name in ("command", "commit")}
                seconds = run["comments"].get("elapsed_s", "–")
                name = f"{html.escape(method_name(method))}, {html.escape(short_name(env_id))}, seed {run['seed']}"
                lines.append(
                    f'<li data-task="{task}" data-method="{order.index(method)}"><p>{swatch(styles[method])}'
                    f"<b>{name}</b><span>{int(run['step'][-1]):,} steps</span><span>{html.escape(seconds)} s</span>"
                    f"<span>commit {comments['commit']}</span>"
                    f'<button type="button" class="copy" aria-label="Copy the command of {name}">Copy</button></p>'
                    f"<code>{comments['command']}</code></li>"
                )
    return "\n".join(lines)


def make_page(runs, rows, scaled, baselines, title, claim=""):
    styles = method_styles({method for by_method in runs.values() for method in by_method})
    score = score_name(runs)
    count = sum(len(seeds) for by_method in runs.values() for seeds in by_method.values())
    words = ((len(runs), "task"), (len(styles), "method"), (count, "run"))
    text = json.dumps(page_data(runs, styles), separators=(",", ":"))
    for character in "<>&":  # so that no text in it can end the script element
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {
        "TITLE": html.escape(title),
        "SUMMARY": ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in words),
        "CLAIM": f"<p>The paper's claim: {html.escape(claim)}</p>" if claim else "",
        "TABLES": score_tables(rows, styles, list(runs), baselines, score),
        "NOTES": "".join(f"<p>{html.escape(note)}</p>" for note in make_notes(rows, scaled, baselines, score)),
        "HINT": HINT,
        "RUNS": run_list(runs, styles),
        "DATA": text,
        "POINTS": str(POINTS),
    }
    page = TEMPLATE.read_text(encoding="utf-8").split(
        "@@"
    )  # text, name, text, name, ...: what comes from files is never searched for names
    return "".join(parts[part] if i % 2 else part for i, part in enumerate(page))


def main(args):
    if args.threshold is not None and not np.isfinite(args.threshold):
        fail(f"--threshold {args.threshold} is no threshold, accepted: a finite number")
    try:
        runs = read_folder(args.folder)
        styles = method_styles({method for by_method in runs.values() for method in by_method})
        baselines = [label for label in ("ppo", "sprl") if label in styles][: len(styles) - 1]  # of two methods one
        if args.baseline is not None:
            baselines = args.baseline.split(",")
        for label in baselines:
            if label not in styles:
                fail(f"--baseline {label} has no run in {args.folder}, accepted: {', '.join(styles)}")
        if not baselines and len(styles) > 1:
            print("no run of ppo or sprl to compare with, see --baseline", file=sys.stderr)
        rows, scaled = make_scores(runs, baselines, args.threshold)
        claim = read_claim(args.folder) if args.claim is None else args.claim
        score = score_name(runs)
        names = ("scores.csv", "scores.md", "report.html", "scores.png")
        files = [os.path.join(args.folder, name) for name in names]
        write_csv(files[0], rows)
        write_markdown(rows, scaled, baselines, score, claim, files[1])
        title = f"SPRL: {Path(args.folder).resolve().name}"
        Path(files[2]).write_text(make_page(runs, rows, scaled, baselines, title, claim), encoding="utf-8")
        with_interval = [row for row in rows if row["final_iqm_low"] is not None]
        if with_interval:  # single points say less than the table
            draw_scores(with_interval, styles, baselines, score, files[3])
        else:  # nor may an older picture stay
            Path(files.pop()).unlink(missing_ok=True)
    except OSError as error:  # no permission, full disk
        fail(first_line(error))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    for path in files:
        print(f"{path}: {os.path.getsize(path) / 1e3:.0f} kB")


if __name__ == "__main__":
    main(parse_args(Args))
