"""Prints how long the scripts and the README are, beside the bars of "Half the length": python tests/count_lines.py

A script's diff is `diff ppo_sprl_minigrid.py SCRIPT | grep -c '^[<>]'`, of DMLab without its ENVIRONMENT section.
Plumbing, a share of the non-blank lines, is
- in ARGS fail, parse_args and their constants,
- the whole section CHECKPOINTS,
- in SETUP every statement that uses one of the NAMES below: resuming, locking, the folder, git, W&B, the writer,
- the sections LOG and CHECKPOINT of the main block, and everything behind them. A missed bar: exit code 1.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BARS = {  # lines, diff
    "ppo_sprl_minigrid": (700, 0), "ppo_sprl_atari": (640, 320), "ppo_sprl_fetch": (640, 320),
    "ppo_sprl_dmlab": (1_100, 320), "ppo_eco": (780, 320), "ppo_icm": (700, 320), "ppo_gtgrid": (620, 280),
}  # fmt: skip
PLUMBING_BAR, README_BAR = 17.99, 200
ARGS_PARTS = {"fail", "parse_args", "SHOWN", "MAY_BE_0", "HIGHEST"}
NAMES = set("checkpoint old_args run_name run_dir lock git commit command origin wandb writer".split())


def section(lines, name):
    """The line numbers, from 0, of a section: from its marker to the next one or to the main block."""
    start = next(i for i, line in enumerate(lines) if re.match(rf" *# {name} #{{20,}}$", line))
    ends = (i for i, line in enumerate(lines) if i > start and re.match(r" *# [A-Z ]+ #{20,}$|if __name__", line))
    return range(start, next(ends, len(lines)))


def plumbing(lines):
    """The share of the non-blank lines, in percent."""
    body, found = ast.parse("\n".join(lines)).body, []
    for part in body:
        named = part.targets[0] if isinstance(part, ast.Assign) else part
        found += [part] if getattr(named, "id", getattr(named, "name", None)) in ARGS_PARTS else []
    for part in body[-1].body:  # of the main block
        words = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(part)}
        found += [part] if words & NAMES and part.lineno - 1 in section(lines, "SETUP") else []
    found = [part for part in found if part.end_lineno <= section(lines, "ROLLOUT")[0]]  # not the loop
    numbers = {i for part in found for i in range(part.lineno - 1, part.end_lineno)}
    numbers |= {*section(lines, "CHECKPOINTS"), *range(section(lines, "LOG")[0], len(lines))}
    return 100 * sum(bool(lines[i].strip()) for i in numbers) / sum(bool(line.strip()) for line in lines)


rows = [("README.md", "lines", len((ROOT / "README.md").read_text().splitlines()), README_BAR)]
for script, (length_bar, diff_bar) in BARS.items():
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    world = section(lines, "ENVIRONMENT") if script == "ppo_sprl_dmlab" else ()
    rest = "".join(f"{line}\n" for i, line in enumerate(lines) if i not in world)
    command = ["diff", ROOT / "ppo_sprl_minigrid.py", "-"]
    diff = subprocess.run(command, input=rest, capture_output=True, text=True).stdout
    rows.append((script, "lines", len(lines), length_bar))
    rows.append((script, "diff", len(re.findall("^[<>]", diff, re.M)), diff_bar))
    rows.append((script, "plumbing %", plumbing(lines), PLUMBING_BAR))
for name, what, value, bar in rows:
    print(f"{name:18} {what:10} {value:>6.4g} of {bar:>5}{'  MISSED' if value > bar else ''}")
sys.exit(any(value > bar for *_, value, bar in rows))
