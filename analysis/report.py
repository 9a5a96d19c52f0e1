"""One page about a folder of runs: curves to look into, scores with intervals, and the command of every run.

    python analysis/report.py results/minigrid                  # report.html, scores.md, scores.csv, scores.png
    python analysis/report.py results/minigrid --threshold 0.8 --baseline ppo

report.html needs no network and no other file. The CSV files are those of `analysis/curves.py export`.
"""

import csv
import html
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from curves import (
    COLOURS,
    method_name,
    method_styles,
    points,
    read_claim,
    read_folder,
    seed_curves,
    short_name,
    with_error,
)
from evaluate import fail, first_line, parse_args
from scores import ALL, MIN_SEEDS, make_scores

METRICS = {
    "return": "episode return", "success": "success rate", "length": "episode length", "cost_rate": "cost rate",
    "rnet_accuracy": "RNet held-out accuracy",
}  # fmt: skip
DASH = {"-": "", "--": "7 3", ":": "2 3", "-.": "9 3 2 3"}  # matplotlib's name of a line: SVG's
POINTS = 100  # of every curve in the page: 200 runs are then about 400 kB


@dataclass
class Args:
    folder: tyro.conf.Positional[str]
    """folder of the CSV files; the report is written there too"""
    threshold: float | None = None
    """return whose first crossing is timed (default: per task, 80 % of the best method's final return if positive)"""
    baseline: str | None = None
    """label of the method that the others are compared with (default: ppo, if there are runs of it)"""
    claim: str | None = None
    """what the paper says of these runs, a line above the tables (default: the claim that table.md has, if any)"""


# TABLES ##############################################################################################################
def number(value, digits=3):
    return "–" if value is None else f"{value:.{digits if abs(value) < 10 else 1}f}"


def bounds(row, name):
    """value [low, high]; a dash for what a single seed cannot tell."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return "–"
    return f"{number(value)} [{'–' if low is None else f'{number(low)}, {number(high)}'}]"


def timing(row):
    """Median steps to the threshold, and how many seeds got there if not all."""
    if row["threshold"] is None:
        return "–"
    part = "" if row["reached"] == row["seeds"] else f" ({row['reached']} of {row['seeds']})"
    return (f"> {row['steps']:,}" if row["steps_to"] is None else f"{row['steps_to']:,.0f}") + part


def make_columns(pooled, baseline):
    """{heading: (text of a row, name of its interval or None)}; without a baseline nothing is compared."""
    columns = {"runs" if pooled else "seeds": (lambda row: str(row["seeds"]), None)}
    if not pooled:
        for heading, name in (("final return", "final_return"), ("area", "auc")):
            columns[heading] = lambda row, name=name: with_error(row[name], row[f"{name}_se"]), None
        columns["steps to threshold"] = timing, None
    for score, name in (("final return", "final"), ("area", "auc")):
        columns[f"IQM of {score}"] = lambda row, full=f"{name}_iqm": bounds(row, full), f"{name}_iqm"
        if baseline:
            heading, full = f"P(better than {baseline}), {score}", f"{name}_improvement"
            columns[heading] = lambda row, full=full: bounds(row, full), full
    return columns


def make_notes(rows, scaled, baseline):
    notes = [
        "Final return: mean over the last 10 % of steps. Area: mean return over all steps, the area under the learning "
        "curve divided by its length. ± is the standard error over seeds. Steps to threshold: median over seeds of the "
        "first step at which the mean return over the 5 % of training before it is at the threshold.",
        "IQM: interquartile mean, without a quarter of the runs, rounded down, at either end. In brackets 95 % "
        f"stratified bootstrap intervals over seeds (Agarwal et al. 2021), – for fewer than {MIN_SEEDS} seeds. Few "
        "seeds make them too narrow: of normally distributed seeds, 3 hold the true mean in about 75 % of the cases, 6 "
        "in about 90 %.",
    ]
    if baseline:
        notes[1] += (
            f" P(better): the probability that a run of the method beats a run of {baseline}; ties count half. "
            "1 [1, 1] says that every run was better, not that every future one must be."
        )
    pooled = [row for row in rows if row["env"] == ALL]
    if pooled:
        tasks = pooled[0]["tasks"]
        notes.append(
            f"All tasks: seeds 1 to {pooled[0]['seeds'] // tasks} of the methods that have them on all {tasks} tasks, "
            "pooled for the IQM" + ", averaged over tasks for P(better)" * bool(baseline) + "."
        )
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


def write_csv(rows, path):
    names = dict.fromkeys(name for row in rows for name in row)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({n: round(float(v), 4) if isinstance(v, float) else v for n, v in row.items()})


def write_markdown(rows, scaled, baseline, claim, path):
    def clean(text):
        return html.escape(text, quote=False).replace("|", "\\|").replace("`", "\\`")

    notes = [f"The paper's claim: {claim}"] * bool(claim) + make_notes(rows, scaled, baseline)
    lines = ["\n\n".join(clean(note) for note in notes)]
    for env_id, members in by_env(rows).items():
        columns = make_columns(env_id == ALL, baseline)
        title, shared = make_heading(members)
        lines += ["", f"### {clean(title)}", "", *([f"{shared}.", ""] if shared else [])]
        lines += [f"| method | {' | '.join(map(clean, columns))} |", "|-" * (len(columns) + 1) + "|"]
        for row in members:
            cells = [clean(method_name(row["method"])), *(text(row) for text, _ in columns.values())]
            lines.append(f"| {' | '.join(cells)} |")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_scores(rows, styles, baseline, path):
    """Points with their intervals, one row of panels per group of the table."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, NullLocator

    groups = by_env(rows)
    columns = {heading: name for heading, (_, name) in make_columns(True, baseline).items() if name}
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
            if name.endswith("improvement"):
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
    note = f"bars: 95 % bootstrap intervals; hollow: fewer than {MIN_SEEDS} seeds, no interval; axes differ in range"
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
    metrics = [
        name
        for name in METRICS
        if any(len(points(run, name)[0]) for tasks in runs.values() for seeds in tasks.values() for run in seeds)
    ]
    return {
        "points": POINTS,
        "metrics": [{"id": name, "label": METRICS[name]} for name in metrics],
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
    middle = '<u style="left:50%"></u>' if name.endswith("improvement") else ""
    return (
        f'<span class="bar" aria-hidden="true">{middle}'
        f'<b style="left:{left:.1f}%;width:{right - left:.1f}%;background:{colour}"></b>'
        f'<s style="left:{value:.1f}%;background:{colour}"></s></span>'
    )


def score_tables(rows, styles, envs, baseline):
    parts, order = [], list(styles)
    for env_id, members in by_env(rows).items():
        title, shared = make_heading(members)
        task = "" if env_id == ALL else f' data-task="{envs.index(env_id)}"'
        columns = make_columns(env_id == ALL, baseline)
        head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in columns)
        lines = []
        for row in members:
            cells = ""
            for text, name in columns.values():
                cells += f"<td>{html.escape(text(row))}"
                if name:
                    ends = [r[f"{name}{end}"] for r in members for end in ("", "_low", "_high")]
                    ends = [end for end in ends if end is not None and not name.endswith("improvement")] or [0, 1]
                    cells += bar(row, name, min(ends), max(ends), styles[row["method"]][0])
                cells += "</td>"
            name = swatch(styles[row["method"]]) + html.escape(method_name(row["method"]))
            lines.append(f'<tr data-method="{order.index(row["method"])}"><th scope="row">{name}</th>{cells}</tr>')
        parts.append(
            f'<section{task}><h3>{html.escape(title)}<small>{html.escape(shared)}</small></h3><div class="scroll" '
            f'tabindex="0" role="region" aria-label="Scores, {html.escape(title)}"><table><thead><tr>'
            f'<th scope="col">method</th>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div></section>'
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


def make_page(runs, rows, scaled, baseline, title, claim=""):
    styles = method_styles({method for by_method in runs.values() for method in by_method})
    count = sum(len(seeds) for by_method in runs.values() for seeds in by_method.values())
    words = ((len(runs), "task"), (len(styles), "method"), (count, "run"))
    text = json.dumps(page_data(runs, styles), separators=(",", ":"))
    for character in "<>&":  # so that no text in it can end the script element
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {
        "TITLE": html.escape(title),
        "SUMMARY": ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in words),
        "CLAIM": f"<p>The paper's claim: {html.escape(claim)}</p>" if claim else "",
        "TABLES": score_tables(rows, styles, list(runs), baseline),
        "NOTES": "".join(f"<p>{html.escape(note)}</p>" for note in make_notes(rows, scaled, baseline)),
        "RUNS": run_list(runs, styles),
        "DATA": text,
        "POINTS": str(POINTS),
    }
    page = PAGE.split("@@")  # text, name, text, name, ...: what comes from files is never searched for names
    return "".join(parts[part] if i % 2 else part for i, part in enumerate(page))


PAGE = r"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>@@TITLE@@</title>
<style>
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --ink: #1c1f23; --soft: #5d6570; --line: #e2e4e8;
  --grid: #ebedf0; --focus: #0072b2; --chip: #f1f2f4; --shade: 0 1px 2px #0000000f, 0 2px 8px #0000000a; }
@media (prefers-color-scheme: dark) { :root { --back: #121417; --card: #1a1d21; --ink: #e8eaed; --soft: #9aa3ad;
  --line: #30353b; --grid: #282c32; --focus: #56b4e9; --chip: #262a30; --shade: none; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main, header { max-width: 1320px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 32px; }
h1 { font-size: 26px; line-height: 1.2; letter-spacing: -.015em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -.01em; margin: 40px 0 10px; } main > h2:first-child { margin-top: 24px; }
h3 { font-size: 15px; margin: 22px 0 8px; overflow-wrap: anywhere; }
h3 small { color: var(--soft); font-weight: 400; font-size: 13px; margin-left: 10px; }
header p, .notes { color: var(--soft); margin: 4px 0 0; }
.notes { font-size: 13px; max-width: 100ch; margin-top: 12px; }
.notes p { margin: 8px 0; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
[hidden] { display: none !important; }
.controls { background: var(--back); padding: 12px 0; display: grid; gap: 10px; border-bottom: 1px solid var(--line);
  margin-bottom: 18px; }
@media (min-width: 800px) and (min-height: 700px) { .controls { position: sticky; top: 0; z-index: 3; } }
.line { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center; }
.line > span:first-child { color: var(--soft); font-size: 13px; width: 66px; flex: none; }
button, select { font: inherit; color: inherit; }
.chip { border: 1px solid var(--line); background: var(--card); border-radius: 7px; padding: 3px 11px; cursor: pointer;
  font-size: 13.5px; min-height: 30px; display: inline-flex; align-items: center; gap: 8px; }
.chip:hover { border-color: var(--soft); }
.chip[aria-pressed="false"] { color: var(--soft); background: none; border-style: dashed; }
.chip[aria-pressed="false"] .swatch { opacity: .35; }
.pick .chip[aria-pressed="true"] { background: var(--ink); color: var(--back); border-color: var(--ink); }
.pick .chip[aria-pressed="false"] { border-style: solid; }
.swatch { vertical-align: middle; flex: none; }
.options { gap: 8px 22px; font-size: 13.5px; } .options > span:first-child { margin-right: -14px; }
.options label { display: inline-flex; align-items: center; gap: 8px; }
input[type="range"] { width: 130px; accent-color: var(--focus); }
input[type="checkbox"] { width: 16px; height: 16px; accent-color: var(--focus); margin: 0; }
output { color: var(--soft); font-variant-numeric: tabular-nums; min-width: 7.5em; }
.panels { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 290px), 1fr)); }
.wide { overflow-x: auto; padding: 2px; }
.panel { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 0; min-width: 0;
  padding: 12px 12px 6px; box-shadow: var(--shade); }
figcaption { font-weight: 600; font-size: 14px; display: flex; align-items: center; gap: 8px; flex-wrap: wrap; }
figcaption span { overflow-wrap: anywhere; } .wide figcaption { gap: 0 8px; }
figcaption small { font-weight: 400; color: var(--soft); font-size: 12px; margin-left: auto; }
.plot { position: relative; border-radius: 6px; touch-action: pan-y; }
.plot svg { display: block; width: 100%; overflow: visible; }
svg text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.gridline { stroke: var(--grid); } .cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
.tip { position: absolute; top: 6px; pointer-events: none; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 6px 10px; font-size: 12.5px; line-height: 1.45; box-shadow: 0 4px 16px #00000026;
  white-space: nowrap; font-variant-numeric: tabular-nums; z-index: 2; }
.tip td { padding: 0 0 0 8px; border: 0; vertical-align: middle; } .tip td:first-child { padding: 0; line-height: 1; }
.tip td:nth-child(2) { text-align: left; }
.tip table { border-collapse: collapse; width: auto; } .tip em { font-style: normal; color: var(--soft); }
.empty { color: var(--soft); text-align: center; padding: 60px 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; background: var(--card);
  box-shadow: var(--shade); }
/* collapsed borders would stay behind when the first column sticks */
.scroll table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 8px 11px; text-align: right; vertical-align: top; border-top: 1px solid var(--line);
  white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; font-size: 12.5px; border-top: 0; vertical-align: bottom;
  min-width: 84px; white-space: normal; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--card); z-index: 1; }
tbody th { font-weight: 600; } tbody th .swatch { margin-right: 9px; }
.bar { display: block; position: relative; height: 8px; margin-top: 3px; min-width: 116px; }
.bar::before { content: ""; position: absolute; inset: 3.5px 0; background: var(--line); }
.bar b { position: absolute; top: 1px; height: 6px; opacity: .45; border-radius: 2px; }
.bar s { position: absolute; top: 0; width: 3px; margin-left: -1.5px; height: 8px; border-radius: 1px; }
.bar u { position: absolute; top: 0; width: 1px; height: 8px; background: var(--soft); }
.runs { list-style: none; margin: 0; padding: 0; display: grid; gap: 8px; }
.runs li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 8px 12px; min-width: 0;
  content-visibility: auto; contain-intrinsic-size: auto 76px; }
.runs p { margin: 0 0 6px; font-size: 13px; display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: center; }
.runs p span { color: var(--soft); font-variant-numeric: tabular-nums; } .runs p .swatch { margin-right: -4px; }
code { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; display: block;
  overflow-wrap: anywhere; background: var(--chip); border-radius: 6px; padding: 4px 9px; }
code span { display: inline-block; max-width: 100%; }
.copy { border: 1px solid var(--line); background: none; border-radius: 6px; font-size: 12.5px; padding: 2px 10px;
  cursor: pointer; min-width: 66px; margin-left: auto; }
.copy:hover { border-color: var(--soft); }
footer { height: 56px; }
@media (max-width: 560px) { main, header { padding: 0 14px; } header { padding-top: 20px; } h1 { font-size: 22px; }
  .line > span:first-child { width: 100%; margin-bottom: -4px; } .panel { padding: 10px 8px 4px; }
  th, td { padding: 7px 10px; }
  h3 small { display: block; margin: 0; } .runs p b { flex: 1 1 50%; order: -2; } .copy { order: -1; }
  .runs p .swatch { order: -3; } }
@media print { .controls, .copy { display: none; } }
</style>
</head>
<body>
<header><h1>@@TITLE@@</h1><p>@@SUMMARY@@</p>@@CLAIM@@</header>
<main>
<h2 id="curves-title">Learning curves</h2>
<noscript><p class="empty">The curves need JavaScript; the tables below do not.</p></noscript>
<div class="controls" role="group" aria-label="What the page shows">
  <div class="line" id="methods" role="group" aria-label="Methods"><span>Methods</span></div>
  <div class="line" id="tasks" role="group" aria-label="Tasks"><span>Tasks</span></div>
  <div class="line pick" id="metrics" role="group" aria-label="Metric"><span>Metric</span></div>
  <div class="line options"><span>Display</span>
    <label>Smoothing <input type="range" id="window" min="1" max="31" step="2" value="3"
      aria-label="Points of the running mean, of @@POINTS@@"><output for="window" id="window-text"></output></label>
    <label><input type="checkbox" id="seeds"> Individual seeds</label>
    <label><input type="checkbox" id="matrix"> Grid of methods × tasks</label>
  </div>
</div>
<div id="panels" role="group" aria-labelledby="curves-title"></div>
<p class="notes">Line: mean over seeds, thin: one seed alone; band: ± one standard error. Hover over a panel, or focus
  it and press the arrow keys, to read values. A double click on a method or a task shows it alone. The filters hold for
  scores and runs too.</p>
<h2>Scores</h2>
@@TABLES@@
<div class="notes">@@NOTES@@</div>
<h2>Runs</h2>
<ul class="runs">
@@RUNS@@
</ul>
</main>
<footer></footer>
<script type="application/json" id="data">@@DATA@@</script>
<script>
"use strict";
const D = JSON.parse(document.getElementById("data").textContent), $ = id => document.getElementById(id);
const state = { methods: new Set(D.methods.keys()), tasks: new Set(D.tasks.keys()), metric: D.metrics[0].id, window: 3,
  seeds: false, matrix: false };

// STATISTICS, the same as in analysis/curves.py
function runningMean(values, window) {
  const half = (window - 1) / 2;
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - half), i + half + 1);
    return part.reduce((a, b) => a + b, 0) / part.length;
  });
}
function curve(task, method) {
  const raw = D.tasks[task][state.metric][method];
  if (!raw) return null;
  const seeds = raw.v.map(values => runningMean(values.map(v => v / 10 ** raw.d), state.window)), n = seeds.length;
  const mean = seeds[0].map((_, i) => seeds.reduce((sum, seed) => sum + seed[i], 0) / n);
  const error = mean.map((m, i) => n < 2 ? null
    : Math.sqrt(seeds.reduce((sum, seed) => sum + (seed[i] - m) ** 2, 0) / (n - 1) / n));
  return { method, task, x: raw.x, names: raw.s, seeds, mean, error };
}
function at(values, [first, last], x) { // linear between the points of the grid, null outside
  const place = last > first ? (x - first) / (last - first) * (D.points - 1) : 0;
  const i = Math.floor(place), part = place - i;
  if (place < 0 || place > D.points - 1 || values[i] === null) return null;
  return part ? values[i] * (1 - part) + values[i + 1] * part : values[i];
}

// PANELS
function short(x) {
  const [unit, sign] = Math.abs(x) >= 1e6 ? [1e6, "M"] : Math.abs(x) >= 1e3 ? [1e3, "K"] : [1, ""];
  return +(x / unit).toPrecision(4) + sign;
}
const digits = v => v.toFixed(Math.abs(v) < 10 ? 3 : 1);
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(s => s * power >= rough * 0.999) * power, found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}
function range(curves) { // of the y-axis: 0 to 1 where it fits
  let low = Infinity, high = -Infinity;
  for (const c of curves) {
    const lines = state.seeds ? c.seeds : [c.mean.map((m, i) => m - c.error[i]), c.mean.map((m, i) => m + c.error[i])];
    for (const line of lines) { low = Math.min(low, ...line); high = Math.max(high, ...line); }
  }
  if (state.metric === "rnet_accuracy") return [Math.min(0.5, low), 1];
  if (["return", "success"].includes(state.metric) && low > -0.1 && high < 1.1)
    return [Math.min(0, low), Math.max(1, high)];
  if (state.metric === "length" || state.metric === "cost_rate") low = 0;
  const space = (high - low || 1) * 0.05;
  return [low < 0 || low > space ? low - space : low, high + space];
}
function panel(title, label, curves, yRange, height, detail) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  figure.className = "panel";
  const name = document.createElement("span"), small = document.createElement("small");
  name.textContent = title;
  small.textContent = detail;
  caption.append(name, small);
  figure.append(caption);
  if (!curves.length) {
    const empty = document.createElement("p");
    empty.className = "empty";
    empty.textContent = "no " + D.metrics.find(m => m.id === state.metric).label + " in these runs";
    figure.append(empty);
    return figure;
  }
  const plot = document.createElement("div");
  plot.className = "plot";
  figure.append(plot);
  figure.paint = () => paint(plot, label, curves, yRange, height);
  return figure;
}
function paint(plot, label, curves, [low, high], height) {
  const width = Math.max(plot.clientWidth, 160), box = { left: 42, right: 12, top: 10, bottom: 36 };
  const last = Math.max(...curves.map(c => c.x[1]), 1), first = Math.min(...curves.map(c => c.x[0]));
  const right = width - box.right, bottom = height - box.bottom;
  const end = last * 1.02; // a run of 500K steps ends with its last whole rollout: its tick shall be seen
  const X = x => box.left + x / end * (right - box.left);
  const Y = y => box.top + (high - y) / (high - low) * (bottom - box.top);
  const place = (c, i) => X(c.x[0] + (c.x[1] - c.x[0]) * i / (D.points - 1)).toFixed(1);
  const path = (c, values) => values.map((v, i) => (i ? "L" : "M") + place(c, i) + " " + Y(v).toFixed(1)).join("");
  let svg = `<svg viewBox="0 0 ${width} ${height}" height="${height}" aria-hidden="true">`;
  for (const y of ticks(low, high, height < 200 ? 4 : 6))
    svg += `<line class="gridline" x1="${box.left}" x2="${right}" y1="${Y(y)}" y2="${Y(y)}"/>
      <text x="${box.left - 7}" y="${Y(y) + 4}" text-anchor="end">${short(y)}</text>`;
  for (const x of ticks(0, end, Math.max(2, Math.min(8, Math.floor(width / 70)))))
    svg += `<line class="gridline" x1="${X(x)}" x2="${X(x)}" y1="${box.top}" y2="${bottom}"/>
      <text x="${X(x)}" y="${bottom + 16}" text-anchor="middle">${short(x)}</text>`;
  svg += `<text x="${(box.left + right) / 2}" y="${height - 4}" text-anchor="middle">environment steps</text>`;
  for (const c of curves) {
    const { colour } = D.methods[c.method];
    if (c.error[0] !== null) {
      const upper = path(c, c.mean.map((m, i) => m + c.error[i]));
      const lower = c.mean.map((m, i) => "L" + place(c, i) + " " + Y(m - c.error[i]).toFixed(1)).reverse().join("");
      svg += `<path d="${upper}${lower}Z" fill="${colour}" opacity=".2"/>`;
    }
    if (state.seeds) for (const seed of c.seeds)
      svg += `<path class="seed" d="${path(c, seed)}" fill="none" stroke="${colour}" stroke-width="1" opacity=".45"/>`;
  }
  for (const c of [...curves].reverse()) { // the first of the legend on top
    const { colour, dash } = D.methods[c.method], thick = c.seeds.length > 1 ? 2.2 : 1.2;
    svg += `<path class="mean" d="${path(c, c.mean)}" fill="none" stroke="${colour}" stroke-width="${thick}"
      stroke-linejoin="round" stroke-dasharray="${dash}"/>`;
  }
  plot.innerHTML = svg + `<g></g></svg><div class="tip" hidden></div>`; // numbers and colours only, no text from files
  const mark = plot.querySelector("g"), tip = plot.querySelector(".tip");
  let index = -1;

  function show(i) {
    index = Math.max(0, Math.min(D.points - 1, i));
    const x = Math.round(first + (last - first) * index / (D.points - 1)), step = x.toLocaleString("en");
    const found = curves.map(c => ({ method: D.methods[c.method], count: c.seeds.length, mean: at(c.mean, c.x, x),
      error: at(c.error, c.x, x) })).filter(f => f.mean !== null).sort((a, b) => b.mean - a.mean);
    mark.innerHTML = `<line class="cursor" x1="${X(x)}" x2="${X(x)}" y1="${box.top}" y2="${bottom}"/>` +
      found.map(f => `<circle cx="${X(x)}" cy="${Y(f.mean)}" r="3.5" fill="${f.method.colour}"/>`).join("");
    const table = document.createElement("table"), words = [];
    for (const f of found) {
      const row = table.insertRow(), note = document.createElement("em");
      const value = digits(f.mean) + " ± " + (f.error === null ? "–" : digits(f.error));
      row.insertCell().append(swatch(f.method));
      row.insertCell().textContent = f.method.label;
      row.insertCell().textContent = value;
      note.textContent = f.count === 1 ? "1 seed" : f.count + " seeds";
      row.insertCell().append(note);
      words.push(f.method.label + " " + value);
    }
    tip.replaceChildren("step " + step, table);
    tip.hidden = false;
    const size = tip.offsetWidth, side = X(x) > width / 2 ? X(x) - size - 12 : X(x) + 12;
    tip.style.left = Math.max(0, Math.min(width - size, side)) + "px";
    tip.style.top = curves.length > (width < 480 ? 2 : 8) ? "100%" : ""; // below the panel if it would hide the curves
    plot.setAttribute("aria-valuenow", x);
    plot.setAttribute("aria-valuetext", "step " + step + ": " + words.join(", "));
  }
  function hide() { mark.innerHTML = ""; tip.hidden = true; index = -1; }
  const attributes = { tabindex: 0, role: "slider", "aria-label": label, "aria-valuemin": first, "aria-valuemax": last,
    "aria-valuenow": first, "aria-valuetext": "arrow keys read the curves" };
  for (const [key, value] of Object.entries(attributes)) plot.setAttribute(key, value);
  plot.onpointermove = plot.onpointerdown = event => {
    const x = (event.clientX - plot.getBoundingClientRect().left - box.left) / (right - box.left) * last;
    show(Math.round((x - first) / (last - first || 1) * (D.points - 1)));
  };
  plot.onpointerleave = plot.onblur = hide;
  plot.onkeydown = event => {
    const moves = { ArrowLeft: index - 1, ArrowDown: index - 1, ArrowRight: index + 1, ArrowUp: index + 1, Home: 0,
      End: D.points - 1, PageUp: index + 10, PageDown: index - 10 };
    if (event.key === "Escape") return hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  };
}
function swatch(method) {
  const holder = document.createElement("template");
  holder.innerHTML = `<svg class="swatch" width="26" height="4" aria-hidden="true"><path d="M0 2H26" stroke-width="3"
    stroke="${method.colour}" stroke-dasharray="${method.dash}"/></svg>`;
  return holder.content.firstChild;
}

function render() {
  const metric = D.metrics.find(m => m.id === state.metric).label, panels = $("panels"), figures = [];
  const tasks = [...state.tasks].sort((a, b) => a - b), methods = [...state.methods].sort((a, b) => a - b);
  const found = tasks.map(t => methods.map(m => curve(t, m)).filter(c => c));
  $("curves-title").textContent = "Learning curves, " + metric;
  panels.className = state.matrix ? "panels wide" : "panels";
  panels.style.gridTemplateColumns = state.matrix ? `repeat(${tasks.length}, minmax(210px, 1fr))` : "";
  if (state.matrix) {
    for (const method of methods) tasks.forEach((task, i) => {
      const curves = found[i].filter(c => c.method === method), { label } = D.methods[method];
      const figure = panel(label, `${label}, ${D.tasks[task].label}, ${metric}`, curves,
        curves.length ? range(found[i]) : null, 170, D.tasks[task].label);
      figure.querySelector("figcaption").prepend(swatch(D.methods[method]));
      figures.push(figure);
    });
  } else if (methods.length) tasks.forEach((task, i) => {
    const height = tasks.length === 1 ? 360 : tasks.length < 4 ? 280 : 240, title = D.tasks[task].label;
    const scale = found[i].length ? range(found[i]) : null;
    const counts = [...new Set(found[i].map(c => c.seeds.length))].sort((a, b) => b - a).join(" or ");
    const seeds = counts && counts + (counts === "1" ? " seed" : " seeds");
    figures.push(panel(title, `${title}, ${metric}`, found[i], scale, height, seeds));
  });
  if (!figures.length) {
    const empty = document.createElement("p");
    empty.className = "empty";
    empty.textContent = "Every " + (tasks.length ? "method" : "task") + " is switched off.";
    figures.push(empty);
  }
  panels.replaceChildren(...figures);
  for (const figure of figures) figure.paint?.();
  $("window-text").textContent = state.window === 1 ? "off" : `${state.window} of ${D.points} points`;
  for (const element of document.querySelectorAll("[data-task], [data-method]")) {
    const { task, method } = element.dataset;
    element.hidden = task && !state.tasks.has(+task) || method && !state.methods.has(+method);
  }
}

// CONTROLS
function chips(group, items, pressed, click) {
  items.forEach((item, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "chip";
    if (item.colour) button.append(swatch(item));
    button.append(item.label);
    button.onclick = event => {
      click(i, event);
      group.querySelectorAll("button").forEach((b, j) => b.setAttribute("aria-pressed", pressed(j)));
      render();
    };
    button.setAttribute("aria-pressed", pressed(i));
    group.append(button);
  });
}
function toggle(set, all) {
  return (i, event) => {
    if (event.detail === 2) { // the second of a double click: this one alone, or all if the first switched off the last
      const wanted = set.size ? [i] : [...all.keys()];
      set.clear();
      for (const j of wanted) set.add(j);
    } else if (!set.delete(i)) set.add(i);
  };
}
chips($("methods"), D.methods, i => state.methods.has(i), toggle(state.methods, D.methods));
chips($("tasks"), D.tasks, i => state.tasks.has(i), toggle(state.tasks, D.tasks));
chips($("metrics"), D.metrics, i => state.metric === D.metrics[i].id, i => { state.metric = D.metrics[i].id; });
$("tasks").hidden = D.tasks.length < 2;
$("window").oninput = event => { state.window = +event.target.value; render(); };
for (const name of ["seeds", "matrix"]) $(name).onchange = event => { state[name] = event.target.checked; render(); };
document.querySelector(".runs").onclick = async event => {
  const button = event.target.closest(".copy");
  if (!button) return;
  const code = button.closest("li").querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch { // no permission, as on some file: pages: leave it selected for Ctrl+C
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand("copy") ? "Copied" : "Ctrl+C";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
};
for (const code of document.querySelectorAll("code")) { // lines break at spaces, not inside --a-flag
  const words = code.textContent.split(" ");
  code.replaceChildren(...words.flatMap((text, i) => {
    const word = document.createElement("span");
    word.textContent = text;
    return i ? [" ", word] : [word];
  }));
}
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; render(); } });
render();
</script>
</body>
</html>
"""


def main(args):
    if args.threshold is not None and not np.isfinite(args.threshold):
        fail(f"--threshold {args.threshold} is no threshold, accepted: a finite number")
    try:
        runs = read_folder(args.folder)
        styles = method_styles({method for by_method in runs.values() for method in by_method})
        if args.baseline not in (None, *styles):
            fail(f"--baseline {args.baseline} has no run in {args.folder}, accepted: {', '.join(styles)}")
        label = args.baseline or "ppo"
        rows, scaled = make_scores(runs, label, args.threshold)
        baseline = method_name(label) if label in styles else None
        if not baseline:
            print(f"no run of {label} to compare with, see --baseline", file=sys.stderr)
        claim = read_claim(args.folder) if args.claim is None else args.claim
        files = [os.path.join(args.folder, name) for name in ("scores.csv", "scores.md", "scores.png", "report.html")]
        write_csv(rows, files[0])
        write_markdown(rows, scaled, baseline, claim, files[1])
        draw_scores(rows, styles, baseline, files[2])
        title = f"SPRL: {Path(args.folder).resolve().name}"
        Path(files[3]).write_text(make_page(runs, rows, scaled, baseline, title, claim), encoding="utf-8")
    except OSError as error:  # no permission, full disk
        fail(first_line(error))
    except KeyboardInterrupt:
        sys.exit(print("stopped", file=sys.stderr) or 130)
    for path in files:
        print(f"{path}: {os.path.getsize(path) / 1e3:.0f} kB")


if __name__ == "__main__":
    main(parse_args(Args))
