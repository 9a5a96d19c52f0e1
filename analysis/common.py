"""What the programs of analysis/ share: command lines, checkpoints and their scripts, CSV files, distances."""

import contextlib
import csv
import dataclasses
import functools
import importlib.util
import io
import math
import os
import re
import sys
import types
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (  # what a checkpoint by itself may choose
    "ppo_sprl_minigrid.py", "ppo_sprl_atari.py", "ppo_sprl_dmlab.py", "ppo_sprl_fetch.py",
    "ppo_eco.py", "ppo_icm.py", "ppo_gtgrid.py",
)  # fmt: skip


# COMMAND LINE ########################################################################################################
def fail(message):
    """Ends the program as a wrong command line should: one line on stderr, exit code 2."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args(kind):
    """The command line as a `kind`; tyro's boxed errors, and what they say of the option meant, become one line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            return tyro.cli(kind)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = [line.strip("│ ") for line in errors.getvalue().splitlines()[1:-1]]
        sections = re.split(" *(?:─{5,}|-{5,}) *", " ".join(lines))  # minus signs where stderr is not UTF-8
        fail("; ".join(section.rstrip(".") for section in sections[:-1] if section))  # the last one names --help


def check_ranges(args, **ranges):
    """Refuses a setting that is not in its range, by name."""
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if not low <= value <= high:
            accepted = f"{low} or more" if high == math.inf else f"{low} to {high}"
            fail(f"--{name.replace('_', '-')} {value} is out of range, accepted: {accepted}")


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


# FILES ###############################################################################################################
@contextlib.contextmanager
def written_whole(folder, *names):
    """Lends a temporary path for each file of the folder, made if missing. They get their names together when the block
    is through; if it fails or is stopped, what was there before stays."""
    paths = [os.path.join(folder, name) for name in names]
    try:
        os.makedirs(folder, exist_ok=True)
        yield [f"{path}.tmp" for path in paths]
        for path in paths:
            os.replace(f"{path}.tmp", path)
    except OSError as error:  # no permission, full disk, a file where a folder should be
        fail(f"--out {folder} cannot be written ({first_line(error)})")
    except KeyboardInterrupt:
        print("stopped, nothing was written", file=sys.stderr)
        sys.exit(130)
    finally:
        for path in paths:
            if os.path.exists(f"{path}.tmp"):
                os.remove(f"{path}.tmp")


def write_csv(path, rows, comments=None, names=()):
    """One line per row, {column: value}; `names` come first. Floats have four decimals; None, NaN and what a row has
    not are blank."""
    names = dict.fromkeys([*names, *(name for row in rows for name in row)])
    with open(path, "w", newline="", encoding="utf-8") as file:
        for name, value in (comments or {}).items():
            file.write(f"# {name}: {' '.join(str(value).split())}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name) for name in names]
            cells = [round(float(cell), 4) if isinstance(cell, float) else cell for cell in cells]
            writer.writerow(["" if cell is None or cell != cell else cell for cell in cells])


# CHECKPOINTS #########################################################################################################
def load_checkpoint(path, needs):
    """Reads a checkpoint without running any code in it; `needs` names the entries it must have, and their types."""
    if not os.path.isfile(path):
        fail(f"{path}: no such file, accepted: an agent.pt that a training wrote")
    try:
        if zipfile.ZipFile(path).testzip():  # torch compares no checksums
            raise ValueError("damaged")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        fail(f"{path} is not a readable checkpoint: damaged, not one, or not plain values ({type(error).__name__})")
    for name, kind in needs.items():
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(name), kind):
            fail(f"{path} is not a checkpoint of a training: no {name!r} in it, accepted: an agent.pt")
    return checkpoint


def script_path(checkpoint, source, script=None):
    """The script to take: the one that the user names, or the one of ours that the checkpoint names."""
    if script is not None:
        if not os.path.isfile(script):
            fail(f"--script {script}: no such file, accepted: the script that wrote {source}")
        return Path(script)
    if checkpoint["script"] not in SCRIPTS:
        name = checkpoint["script"][:80]
        fail(f"{source} is of {name!r}, accepted: {', '.join(SCRIPTS)}, or your own with --script PATH")
    return ROOT / checkpoint["script"]


@functools.cache
def load_script(path):
    """A training script as a module; its main block is not run."""
    path = Path(path).resolve()
    for folder in (str(ROOT), str(path.parent)):  # a baseline imports the script beside it
        if folder not in sys.path:
            sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)  # a name that hides no other module
    try:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        with warnings.catch_warnings(action="ignore"):  # two scripts register the same worlds
            spec.loader.exec_module(module)
    except Exception as error:
        fail(f"{path.name} cannot be imported ({first_line(error)}), see its requirements")
    return module


@dataclass
class Run:
    checkpoint: dict
    script: types.ModuleType
    args: object
    envs: gym.vector.VectorEnv
    agent: torch.nn.Module
    quotas: np.ndarray  # episodes of each environment
    world_seed: int


def load_run(path, episodes, seed, script=None, device="cpu", video=False):
    """A checkpoint's worlds, on layouts of their own, and its agent; seeds torch for the actions."""
    checkpoint = load_checkpoint(path, {"script": str, "args": dict, "agent": dict})
    module, _, _ = str(checkpoint["args"].get("env_id")).rpartition(":")  # gymnasium imports it
    if module not in ("", "analysis.worlds", "gymnasium_robotics") and script is None:
        accepted = "analysis.worlds, gymnasium_robotics, or any with --script PATH"
        fail(f"{path} asks for the module {module[:80]!r}, accepted: {accepted}")
    script = load_script(script_path(checkpoint, path, script))
    # Training begins with layouts seed, seed + 1, ...: a small seed would replay them, a hashed one lies far away.
    world_seed, action_seed = (int(word) >> 2 for word in np.random.SeedSequence(seed).generate_state(2))
    try:
        known = {field.name for field in dataclasses.fields(script.Args)}  # an older checkpoint may have other settings
        args = script.Args(**{name: value for name, value in checkpoint["args"].items() if name in known})
        args.num_envs, args.seed, args.capture_video = min(episodes, args.num_envs), world_seed, video
        domain = script.load_domain(args.env_id)[2] if hasattr(script, "load_domain") else script  # of a baseline
        envs = domain.make_envs(args)
        agent = domain.make_agent(envs, args).to(device)
        agent.load_state_dict(checkpoint["agent"])
        for name, scale in checkpoint.get("scales", {}).items():  # of export_agent.py: 8 bits and a scale per row
            agent.get_parameter(name).data *= scale.to(device)
    except Exception as error:
        fail(f"{path} does not fit today's {os.path.basename(script.__file__)} ({first_line(error)})")
    quotas = np.full(envs.num_envs, episodes // envs.num_envs)
    quotas[: episodes % envs.num_envs] += 1
    torch.manual_seed(action_seed)
    return Run(checkpoint, script, args, envs, agent, quotas, world_seed)


def load_rnet(run, path, envs=None):
    """The checkpoint's reachability network, for its own worlds or for others of the same domain."""
    try:
        domain, size = run.script, {}
        if hasattr(domain, "load_domain"):  # a baseline, that is ECO
            name, _, domain = run.script.load_domain(run.args.env_id)
            size = run.script.RNET_SIZES.get(name, {})
        rnet = domain.make_rnet(envs or run.envs, run.args, **size).eval()
        rnet.load_state_dict(run.checkpoint["rnet"])
        return rnet
    except Exception as error:
        fail(f"{path} does not fit today's {os.path.basename(run.script.__file__)} ({first_line(error)})")


# DISTANCES ###########################################################################################################
def shortest_distances(nexts, ends):
    """Steps (S, S) from state to state by breadth-first search, where an action leads to nexts (S, A). No path goes on
    where ends (S, A) says that the episode is over (D_nr). Without a path it is S, more than any path has."""
    distances = np.full((len(nexts), len(nexts)), len(nexts))
    edges = [sorted(set(zip(*row))) for row in zip(nexts.tolist(), ends.tolist())]
    for source in range(len(nexts)):
        found, frontier, distance = {source: 0}, [source], 0
        while frontier:
            distance += 1
            reached = [(to, end) for state in frontier for to, end in edges[state] if to not in found]
            found |= {to: distance for to, _ in reached}
            frontier = list({to for to, end in reached if not end})
        distances[source, list(found)] = list(found.values())
    return distances
