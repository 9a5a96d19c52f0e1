"""benchmark.sh: what it runs, skips, resumes and reports; mostly with a program in python's place that pretends."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, SCRIPTS, load

FOUR_ROOMS = "MiniGrid-FourRooms-7x7-v0"
# with --steps 400, which most tests have
QUICK = [f"quick-400__{FOUR_ROOMS}__{label}__s{s}" for label in ("ppo", "sprl") for s in (1, 2)]
PPO_1, PPO_2, SPRL_1, SPRL_2 = QUICK

# trains 100 steps in 0.05 s and behaves as the scripts do: it makes and locks its folder, shows a bar, saves at a
# signal and at the end, ends with 0, and dies of a second signal. A file `fail` names runs that fail. A file `slow`
# names those that train slowly while it is there, all if it is empty
PRETEND = """
    import fcntl, os, signal, sys, time
    if sys.argv[1].startswith("analysis/"):
        print(*sys.argv[1:], file=open("analysed", "a"))
        time.sleep(100 if os.path.exists("slow-analysis") else 0)
        sys.exit()
    if sys.argv[1] == "-c":
        sys.exit(1)  # no deepmind_lab
    flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    name, total = flags["--run-name"], int(flags["--total-timesteps"])
    print(*sys.argv[1:], file=open("started", "a"))
    os.makedirs(f"runs/{name}", exist_ok="--resume" in flags)
    lock = open(f"runs/{name}/lock", "a")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    step = int(open(flags["--resume"]).read()) if "--resume" in flags else 0
    if os.path.exists("fail") and name in open("fail").read():
        print("a bar\\r\\nRuntimeError: out of luck", file=sys.stderr)
        sys.exit(3)
    def is_slow():
        try:
            names = open("slow").read()
        except OSError:
            return False
        return not names or name in names
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while step < total:
            time.sleep(0.05)
            step += 1 if is_slow() else 100
            print(f"\\r  5%|# | {step}/{total} [00:01<00:09, 9step/s]", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(0.7)  # a large checkpoint
        print(f"\\nstopped at step {step:,}", file=sys.stderr, flush=True)
    open(f"runs/{name}/agent.pt", "w").write(str(step))
    print(f"ppo: {step:,} steps, return 0.5")
"""


class Tree:
    """A copy of what benchmark.sh needs, in a folder with a space in its name."""

    def __init__(self, folder):
        self.folder = folder / "my copy"
        shutil.copytree(ROOT / "analysis", self.folder / "analysis", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ["benchmark.sh", *SCRIPTS]:
            shutil.copy(ROOT / name, self.folder)
        self.python = folder / "my python"
        self.python.write_text(f"#!{sys.executable}\n" + textwrap.dedent(PRETEND))
        self.python.chmod(0o755)
        self.started_processes, self.jobs = [], []

    def command(self, flags, python=None):
        return [str(self.folder / "benchmark.sh"), *shlex.split(flags), "--python", str(python or self.python)]

    def __call__(self, flags, **kwargs):
        options = {"capture_output": True, "text": True, "timeout": 200, "cwd": "/"} | kwargs
        return subprocess.run(self.command(flags, options.pop("python", None)), **options)

    def start(self, flags, **kwargs):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        signals = (signal.SIGHUP, signal.SIGINT)  # the tests may run under nohup, or in the background
        options["preexec_fn"] = lambda: [signal.signal(number, signal.SIG_DFL) for number in signals]
        process = subprocess.Popen(self.command(flags), **options | kwargs)
        self.started_processes.append(process)
        return process

    def write(self, path, text=""):
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def lines(self, path):
        path = self.folder / path
        return path.read_text().splitlines() if path.exists() else []

    def started(self):
        """Names of the runs in the order in which they were started."""
        return [re.search(r"--run-name (\S+)", line)[1] for line in self.lines("started")]

    def forget(self):
        for name in ("started", "analysed"):
            (self.folder / name).unlink(missing_ok=True)

    def checkpoint(self, name):
        return int((self.folder / "runs" / name / "agent.pt").read_text())

    def is_finished(self, name):
        path = self.folder / "runs" / f"{name}.json"
        return path.exists() and json.loads(path.read_text())["finished"]

    def trainings(self, name=""):
        """Process ids of the runs that live, or of one of them."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_text()
            except (ProcessLookupError, FileNotFoundError):  # it has ended
                continue
            if str(self.python) in command and f"--run-name\0{name}" in command:
                found.append(int(folder.name))
        return found

    def wait_for(self, condition, seconds=60):
        deadline = time.time() + seconds
        while not condition():
            assert time.time() < deadline, "waited in vain"
            time.sleep(0.05)

    def wait_for_steps(self, *names):
        """Until each of these runs has trained a little."""
        logs = [self.folder / "runs" / f"{name}.log" for name in names]
        self.wait_for(lambda: all(log.exists() and re.search(r"\d+/\d+ \[", log.read_text()) for log in logs))


@pytest.fixture
def tree(tmp_path):
    tree = Tree(tmp_path)
    yield tree
    for job in tree.jobs:
        subprocess.run(["scancel", "--quiet", job])
    for process in tree.started_processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()
    for pid in tree.trainings():
        os.kill(pid, signal.SIGKILL)


# THE COMMANDS ########################################################################################################
REFUSED = [
    ("", "required: block"),
    ("quik", "'quik' (choose from"),
    ("quick minigrid", "minigrid"),
    ("quick --seed 2", "--seed"),
    ("quick --seeds x", "--seeds: invalid int value: 'x'"),
    ("quick --seeds", "--seeds"),
    ("quick --seeds 1001", "--seeds 1001, accepted: a whole number from 1 to 1000"),
    ("quick --steps 99999999999", "--steps 99999999999, accepted: a whole number from 1 to 2147483647"),
    ("quick --workers 0", "--workers 0, accepted"),
    ("quick --steps 1e6", "--steps: invalid int value: '1e6'"),
    ("quick --only", "--only"),
    ("quick --only sprk", "'sprk', accepted: ppo sprl MiniGrid-FourRooms-7x7-v0"),
    ("quick --only ppo,KeyDoors", "'KeyDoors', accepted"),
    ("atari --only gt-grid,Freeway", "--only gt-grid,Freeway leaves no run of atari"),
    ("quick --task 5", "1 to 4"),
    ("quick --python nowhere/python", "nowhere/python"),
    ("dmlab --engine doom", "--engine: invalid choice: 'doom' (choose from"),
    ("dmlab --engine", "--engine"),
    ("quick --with", "--with"),
    ("quick --with nowhere/my_sprl.py", "--with nowhere/my_sprl.py, accepted: a file NAME.py"),
]


def test_bad_options_are_refused(tree):
    for flags, said in REFUSED:
        command = [str(tree.folder / "benchmark.sh"), *flags.split()]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 2 and result.stderr.count("\n") == 1 and said in result.stderr, result.stderr
        assert not (tree.folder / "runs").exists(), flags


def test_every_line_is_a_whole_command(tree):
    """The scripts take the flags as they stand, and no two runs share a folder."""
    names, lines = [], []
    for block in ("all", "quick", "minigrid-paper"):  # all leaves the other two out
        lines += tree(f"{block} --dry-run --seeds 1").stdout.splitlines()
    for line in lines:
        python, script, *flags = shlex.split(line)
        assert python == str(tree.python)
        module = load(script)
        args = tyro.cli(module.Args, args=flags)
        names.append(args.run_name)
        assert args.seed == 1 and args.total_timesteps >= 250_000 and args.env_id in args.run_name
        if args.env_id.startswith("explore_"):
            assert args.engine == "labmaze" and "-labmaze__explore_" in args.run_name
    assert len(set(names)) == len(lines) == 20 + 25 + 15 + 16 + 16 + 48 + 12 + 16 + 12 + 8 + 2 + 20 + 36
    blocks = Counter(name.split("__")[0] for name in names)
    assert (blocks["dmlab-labmaze"], blocks["dmlab-k-labmaze"], blocks["dmlab-stack-labmaze"]) == (15, 12, 12)
    assert tree.started() == []


PPO_SETTINGS = {  # PPO is SPRL's script with a weight of 0, and where the paper gives it others these settings
    "minigrid": {"cost_scale": 0}, "atari": {"cost_scale": 0}, "fetch": {"cost_scale": 0, "ent_coef": 0.01},
    "dmlab": {"cost_scale": 0, "learning_rate": 1.9e-4, "ent_coef": 0.0011, "max_grad_norm": 0.5},
}  # fmt: skip
MEASURED = {("minigrid", "eco"): {"bonus_scale": 0.1}}  # results/minigrid
MEASURED |= {("atari", "sprl"): {"rnet_input": "pixel-difference"}}  # the paper's, on a CPU too


@pytest.mark.parametrize("block", PPO_SETTINGS)
def test_lines_are_the_scripts_own_settings(tree, block):
    """What stands in the lines, for everyone to read, is what the scripts do without: but for PPO and the weights that
    were measured to be better, a line changes nothing but the steps, the seed and the name."""
    lines = tree(f"{block} --dry-run --seeds 1 --engine deepmind_lab").stdout.splitlines()
    for line in lines:
        _, script, *flags = shlex.split(line)
        module = load(script)
        settings = module.load_domain(flags[1])[1] if hasattr(module, "DOMAINS") else {}
        default = module.Args(env_id=flags[1], **settings)
        given, known = (vars(tyro.cli(module.Args, default=default, args=args)) for args in (flags, []))
        changed = {key: value for key, value in given.items() if value != known[key]}
        name = changed.pop("run_name").split("__")
        assert name[0] == (block if block != "dmlab" else "dmlab-deepmind_lab")
        changed.pop("engine", None), changed.pop("total_timesteps", None)
        assert changed == (PPO_SETTINGS[block] if name[2] == "ppo" else MEASURED.get((block, name[2]), {})), line
        assert (
            "--learning-rate" in flags
            and "--ent-coef" in flags
            and ("--cost-scale" in flags or "--bonus-scale" in flags)
        )
    assert len(lines) == {"minigrid": 20, "atari": 25, "fetch": 16, "dmlab": 15}[block]


def test_auto_takes_the_real_engine_if_it_imports(tree):
    """With a program in python's place that can import it; without, test_every_line_is_a_whole_command."""
    tree.python.write_text("#!/bin/bash\n[[ $2 == 'import deepmind_lab' ]]\n")
    lines = tree("dmlab --dry-run --seeds 2 --only icm").stdout.splitlines()
    assert len(lines) == 6 and all("--engine deepmind_lab " in line for line in lines)
    assert all("--engine labmaze " in line for line in tree("dmlab --dry-run --engine labmaze").stdout.splitlines())


def test_only_and_seeds(tree):
    def chosen(flags):
        lines = tree(f"minigrid --dry-run --seeds 3 {flags}").stdout.splitlines()
        return Counter(tuple(re.search(r"minigrid__MiniGrid-(\S+)-v0__(\S+)__s", line).groups()) for line in lines)

    assert chosen("--only sprl,KeyDoors-7x7") == {("KeyDoors-7x7", "sprl"): 3}
    assert chosen("--only eco,icm,KeyDoors-11x11,FourRooms-11x11") == {
        (f"{world}-11x11", method): 3 for world in ("FourRooms", "KeyDoors") for method in ("eco", "icm")
    }
    assert len(chosen("--only KeyDoors")) == 10 and len(chosen("--only gt-grid")) == 4


def test_the_papers_own_settings(tree):
    """The paper's table, for whoever wants to see what becomes of it."""
    (line,) = tree("minigrid-paper --dry-run --seeds 1 --only sprl,FourRooms-7x7").stdout.splitlines()
    args = tyro.cli(load("ppo_sprl_minigrid.py").Args, args=shlex.split(line)[2:])
    assert (args.cost_scale, args.learning_rate, args.num_tolerance_samples, args.encoding) == (0.002, 0.01, 60, "raw")
    assert (args.k, args.tolerance, args.negative_bias, args.ent_coef) == (2, 1, 20, 0.01)
    lines = tree("minigrid-paper --dry-run --seeds 1 --only eco,icm,gt-grid,FourRooms-7x7").stdout.splitlines()
    weights = [re.search(r"--bonus-scale (\S+)", line)[1] for line in lines]
    assert weights == ["0.001", "0.001", "0.01"]  # ICM's is ours, of a divided bonus


@pytest.fixture
def mine(tmp_path):
    """A folder of the user's with a script in it."""
    folder = tmp_path / "of mine"
    folder.mkdir()
    shutil.copy(ROOT / "ppo_sprl_minigrid.py", folder / "my_sprl.py")
    return folder


def test_your_script_is_a_method(tree, mine):
    """On every environment once, with its flags and no method's; it is named from where the user is."""

    def chosen(flags):
        lines = tree(f"{flags} --dry-run --seeds 1 --with my_sprl.py", cwd=mine).stdout.splitlines()
        return [shlex.split(line)[1:] for line in lines]

    *ours, command = chosen("quick")
    flags = f"--env-id {FOUR_ROOMS} --seed 1 --total-timesteps 250000 --run-name quick__{FOUR_ROOMS}__my_sprl__s1"
    assert command == [str(mine / "my_sprl.py"), *flags.split()] and len(ours) == 2
    assert len(chosen("minigrid")) == 24 and len(chosen("minigrid --only my_sprl")) == 4
    assert len(chosen("minigrid --only ppo,my_sprl,KeyDoors-7x7")) == 2
    worlds = [words[2] for words in chosen("atari --only my_sprl")]
    assert len(worlds) == 6 == len(set(worlds))  # Montezuma's Revenge has two lists of methods
    assert all(words[7:9] == ["--engine", "labmaze"] for words in chosen("dmlab --only my_sprl"))
    assert ["--action-noise", "0.003", "--n-substeps", "2"] == chosen("fetch-sparsity --only my_sprl")[0][7:11]
    shutil.copy(mine / "my_sprl.py", tree.folder / "other.py")
    (command,) = tree("quick --dry-run --seeds 1 --only other --with other.py", cwd=tree.folder).stdout.splitlines()
    assert shlex.split(command)[1] == "other.py"  # a path that moves with the folder


def test_your_script_needs_a_name_of_its_own(tree, mine):
    for name in ("sprl.py", "PPO.py", "k3.py", "my__sprl.py", "_my.py", "my_.py", "my sprl.py", "-my.py", "my_sprl"):
        shutil.copy(mine / "my_sprl.py", mine / name)
        result = tree(f"quick --dry-run '--with=my_sprl.py,{name}'", cwd=mine)
        assert result.returncode == 2 and result.stderr.startswith(f"benchmark.sh: error: --with {name}, accepted: ")
        assert result.stderr.count("\n") == 1 and not result.stdout


def test_ablations_are_the_papers(tree):
    """Stacks of 0, 1 and 5 = k at the best settings of the other ablations; the true RNet on all four tasks."""
    lines = tree("ablation-stack --dry-run --seeds 1").stdout.splitlines()
    assert len(lines) == 12 and all("--k 5 --tolerance 25 --num-tolerance-samples 1 " in line for line in lines)
    assert [re.search(r"--stack-observations (\d)", line)[1] for line in lines[:3]] == ["0", "1", "5"]
    worlds = re.findall(r"--env-id (\S+)", tree("gt-rnet --dry-run --seeds 1 --only gt-sprl").stdout)
    assert len(set(worlds)) == 4


def test_a_condition_is_in_the_name_of_the_task(tree):
    """As in the names that export gives: then one panel compares the methods under one condition."""
    sys.path.append(str(ROOT / "analysis"))
    from curves import task_name

    for block, count in (("fetch", 4), ("fetch-sparsity", 4), ("fetch-noise", 12)):
        names = set()
        for line in tree(f"{block} --dry-run --seeds 1").stdout.splitlines():
            words = shlex.split(line)
            flags = dict(zip(words[2::2], words[3::2]))
            args = {"env_id": flags["--env-id"], "n_substeps": int(flags.get("--n-substeps", 20))}
            name = task_name(args | {"action_noise": float(flags["--action-noise"])})
            _, env, label, _ = flags["--run-name"].split("__")
            assert name == env and label in ("ppo", "sprl", "eco", "icm")
            names.add(name)
        assert len(names) == count


def test_tracked_blocks_are_projects_of_their_own(tree):
    lines = tree("ablation-k --dry-run --track --seeds 1 --steps 99").stdout.splitlines()
    assert len(lines) == 12 and all(line.endswith(" --track --wandb-project-name sprl-ablation-k-99") for line in lines)
    assert "wandb" not in tree("ablation-k --dry-run").stdout


# RUNNING #############################################################################################################
def test_runs_everything_once_and_draws(tree):
    result, folder = tree("quick --workers 2 --steps 400"), "runs/results/quick-400"
    assert result.returncode == 0, result.stderr
    assert sorted(tree.started()) == QUICK and "4 done, 0 running, 0 failed of 4" in result.stdout
    assert Counter(tree.lines("analysed")) == Counter(
        [f"analysis/curves.py export runs/{one}/agent.pt runs/{two}/agent.pt --out {folder} --label {label} "
         "--script ppo_sprl_minigrid.py" for one, two, label in ((PPO_1, PPO_2, "ppo"), (SPRL_1, SPRL_2, "sprl"))]
        + [f"analysis/curves.py figure {folder} --rnet-accuracy --claim SPRL learns faster than PPO.",
           f"analysis/report.py {folder} --claim SPRL learns faster than PPO."]
    )  # fmt: skip
    tree.forget()
    again = tree("quick --workers 2 --steps 400")
    assert again.returncode == 0 and tree.started() == [] and len(tree.lines("analysed")) == 4
    assert tree("quick --steps 400 --dry-run").stdout.splitlines() == [f"# finished: {name}" for name in QUICK]


def test_workers_bound_the_runs_at_a_time(tree):
    output = tree("quick --workers 3 --seeds 2 --steps 400").stdout
    assert {int(n) for n in re.findall(r"(\d+) running", output)} == {0, 1, 2, 3}


def test_failed_run_is_listed_and_tried_again(tree):
    tree.write("fail", SPRL_1)
    result = tree("quick --workers 2 --steps 400")
    assert result.returncode == 1 and "3 done, 0 running, 1 failed of 4" in result.stdout
    assert result.stderr == f"failed: runs/{SPRL_1}.log: RuntimeError: out of luck\n"
    assert sum("figure" in line for line in tree.lines("analysed")) == 1
    tree.forget()
    tree.write("fail")
    assert tree("quick --workers 2 --steps 400").returncode == 0 and tree.started() == [SPRL_1]


def test_other_steps_are_other_runs(tree):
    """Learning rates fall to 0 over a run's steps, so one of fewer steps is no beginning of it, nor belongs in the same
    figure."""
    assert tree("quick --only ppo --seeds 1 --steps 400").returncode == 0
    assert tree("quick --only ppo --seeds 1 --steps 500").returncode == 0
    first, second = tree.lines("started")
    assert "--resume" not in second and second.endswith(f"--run-name {PPO_1.replace('400', '500')}")
    assert "--total-timesteps 500" in second and tree.checkpoint(PPO_1) == 400
    assert [line.split()[2] for line in tree.lines("analysed") if "figure" in line] == [
        "runs/results/quick-400",
        "runs/results/quick-500",
    ]
    assert "quick__" in tree("quick --dry-run").stdout


def test_a_run_with_other_flags_is_refused(tree):
    """A run whose flags have changed since is neither skipped nor resumed nor shown among the others."""
    assert tree("quick --seeds 1 --steps 400").returncode == 0
    script = (tree.folder / "benchmark.sh").read_text()
    tree.write("benchmark.sh", script.replace("--cost-scale 0.01 ", "--cost-scale 0.5 "))
    tree.forget()
    refused = f"runs/{SPRL_1} was made with other flags (--cost-scale 0.01), move it away to run it anew\n"
    copy = f"runs/results/quick-400/{FOUR_ROOMS}__sprl__s1.csv"  # as an earlier figure left it
    tree.write(copy)
    for flags in ("--dry-run", "--task 2", "", "--track"):
        result = tree(f"quick --seeds 1 --steps 400 {flags}")
        assert result.returncode == 1 and result.stderr == refused and tree.started() == []
    assert not (tree.folder / copy).exists()
    assert [line for line in tree.lines("analysed") if SPRL_1 in line] == []
    assert [line for line in tree.lines("analysed") if PPO_1 in line] != [], "what is as it was is shown"
    (tree.folder / "runs" / SPRL_1).rename(tree.folder / "runs" / "old")
    assert tree("quick --seeds 1 --steps 400").returncode == 0 and tree.started() == [SPRL_1]
    tree.forget()
    other_order = script.replace("--cost-scale 0.01 $grid", "$grid --cost-scale 0.5")
    tree.write("benchmark.sh", other_order)
    assert tree("quick --seeds 1 --steps 400").returncode == 0 and tree.started() == []


def test_a_run_that_failed_at_once_may_have_other_flags(tree):
    """Without a checkpoint there is nothing of the old flags that could be mixed with the new ones."""
    tree.write("fail", SPRL_1)
    assert tree("quick --seeds 1 --steps 400").returncode == 1
    tree.write("fail")
    script = (tree.folder / "benchmark.sh").read_text()
    tree.write("benchmark.sh", script.replace("--cost-scale 0.01 ", "--cost-scale 0.5 "))
    assert tree("quick --seeds 1 --steps 400").returncode == 0 and tree.checkpoint(SPRL_1) == 400


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM", "SIGHUP"])
def test_stopped_by_a_signal_and_started_again(tree, by):
    """All runs save before it ends. Ctrl-C and a closed terminal reach the whole process group."""
    tree.write("slow")
    process = tree.start("quick --workers 2 --steps 400")
    tree.wait_for_steps(PPO_1, PPO_2)
    if by == "SIGTERM":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT if by == "Ctrl-C" else signal.SIGHUP)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command again goes on" in output
    assert errors == ""
    assert 0 < tree.checkpoint(PPO_1) < 400 and 0 < tree.checkpoint(PPO_2) < 400
    assert sorted(tree.started()) == [PPO_1, PPO_2] and tree.lines("analysed") == []
    tree.forget()
    (tree.folder / "slow").unlink()
    assert tree("quick --workers 2 --steps 400").returncode == 0
    resumed = {line.split()[-1] for line in tree.lines("started") if "--resume" in line}
    assert resumed == {f"runs/{name}/agent.pt" for name in (PPO_1, PPO_2)}
    assert sorted(tree.started()) == QUICK and all(tree.checkpoint(name) >= 400 for name in QUICK)


def test_one_stopped_run_is_not_taken_for_finished(tree):
    """Somebody ends a training by hand: its exit code is 0."""
    tree.write("slow")
    process = tree.start("quick --seeds 1 --workers 2 --steps 400")
    tree.wait_for_steps(PPO_1, SPRL_1)
    (training,) = tree.trainings(SPRL_1)
    os.kill(training, signal.SIGTERM)
    tree.wait_for(lambda: (tree.folder / "runs" / SPRL_1 / "agent.pt").exists())
    (tree.folder / "slow").unlink()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.startswith(f"failed: runs/{SPRL_1}.log: ")
    assert tree("quick --seeds 1 --steps 400").returncode == 0 and tree.checkpoint(SPRL_1) >= 400


DAMAGED = ["99999999999999999999999/5 [", "50%|##| 999999/5 [00:01\rstopped at step 3\n\0\0\x1b[\r", "\xff/5 [", "$ "]


@pytest.mark.parametrize("damage", DAMAGED)
def test_killed_before_the_first_checkpoint_starts_anew(tree, damage):
    """The run's folder is there without an agent.pt, and a damaged log and JSON file beside it."""
    tree.write(f"runs/{PPO_1}/events.out")
    tree.write(f"runs/{PPO_1}.log", f"\n$ python\n{damage}\n")
    tree.write(f"runs/{PPO_1}.json", "{")
    result = tree("quick --only ppo --seeds 1 --steps 400")
    assert result.returncode == 0 and result.stderr == "" and "--resume" not in tree.lines("started")[0]
    assert tree.checkpoint(PPO_1) == 400 and not (tree.folder / f"runs/{PPO_1}/events.out").exists()


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_log_ends_nothing(tree, damage):
    """The log of a run that is resumed, and of one that runs."""
    tree.write(f"runs/{PPO_1}/agent.pt", "100")
    tree.write(f"runs/{PPO_1}.log", f"\n$ python\n{damage}\n")
    tree.write("slow", PPO_2)
    process = tree.start("quick --only ppo --steps 400 --workers 2")
    tree.wait_for_steps(PPO_2)
    with open(tree.folder / f"runs/{PPO_2}.log", "a") as file:
        file.write(f"\n{damage.replace('stopped', 'x')}\n")
    (tree.folder / "slow").unlink()
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "") and "2 done, 0 running, 0 failed of 2" in output


@pytest.mark.parametrize("damage", ["{", "{}", "[]", '{"command": null}', '{"command": ["x"]}', "[[]]"])
def test_a_damaged_record_is_refused_by_name(tree, damage):
    tree.write(f"runs/{PPO_1}/agent.pt", "100")
    tree.write(f"runs/{PPO_1}.json", damage)
    result = tree("quick --seeds 1 --steps 400")
    assert result.returncode == 1 and tree.started() == [SPRL_1]
    assert result.stderr == f"runs/{PPO_1} was made with other flags (damaged), move it away to run it anew\n"


def test_log_that_cannot_be_written(tree):
    (tree.folder / f"runs/{PPO_1}.log").mkdir(parents=True)
    result = tree("quick --seeds 1 --steps 400")
    assert result.returncode == 1 and f"failed: runs/{PPO_1}.log" in result.stderr
    assert tree.started() == [SPRL_1]


def test_a_run_that_was_started_by_hand_is_left_alone(tree):
    """By a line that --dry-run printed."""
    line = tree("quick --only ppo --seeds 1 --steps 400 --dry-run").stdout
    tree.write("slow")
    by_hand = subprocess.Popen(shlex.split(line), cwd=tree.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tree.started_processes.append(by_hand)
    tree.wait_for((tree.folder / f"runs/{PPO_1}/lock").exists)
    result = tree("quick --only ppo --seeds 1 --steps 400")
    assert result.returncode == 1 and result.stderr == f"another benchmark.sh is at it: runs/{PPO_1}.log\n"
    by_hand.kill()
    by_hand.wait()
    (tree.folder / "slow").unlink()
    assert tree("quick --only ppo --seeds 1 --steps 400").returncode == 0 and tree.checkpoint(PPO_1) == 400


def test_two_at_the_same_time_start_nothing_twice(tree):
    tree.write("slow")
    first = tree.start("quick --workers 2 --steps 400")
    tree.wait_for_steps(PPO_1, PPO_2)
    second = tree.start("quick --workers 2 --steps 400")
    tree.wait_for_steps(SPRL_1, SPRL_2)
    tree.write("slow-analysis")
    tree.write("slow", f"{PPO_1} {PPO_2}")
    tree.wait_for(lambda: tree.lines("analysed"))
    time.sleep(0.5)
    os.killpg(second.pid, signal.SIGINT)
    _, errors = second.communicate(timeout=60)
    for name in ("slow-analysis", "slow"):
        (tree.folder / name).unlink()
    errors = "\n".join(line for line in errors.splitlines() if line.startswith("another"))
    assert [line.split("/")[1].removesuffix(".log") for line in errors.splitlines()] == [PPO_1, PPO_2]
    assert all(line.startswith("another benchmark.sh is at it: ") for line in errors.splitlines())
    assert second.returncode == 130 and len(tree.lines("analysed")) == 1, "Ctrl-C ends the drawing too"
    first.communicate(timeout=60)
    assert sorted(tree.started()) == QUICK
    assert tree("quick --steps 400").returncode == 0 and sorted(tree.started()) == QUICK


def test_what_another_finished_meanwhile_is_no_failure(tree):
    tree.write("slow")
    first = tree.start("quick --only ppo --seeds 1 --steps 400", stdout=subprocess.DEVNULL)
    tree.wait_for_steps(PPO_1)
    second = tree.start("quick --workers 2 --steps 400")
    tree.wait_for_steps(PPO_2, SPRL_1)
    tree.write("slow", f"{PPO_2} {SPRL_1}")
    tree.wait_for(lambda: tree.is_finished(PPO_1))
    (tree.folder / "slow").unlink()
    assert second.communicate(timeout=60)[1] == "" and second.returncode == 0
    assert first.wait(timeout=60) == 0
    assert sorted(tree.started()) == QUICK


def test_all_cores_work_whatever_their_threads(tree):
    """nproc alone would say 1 here, and the README recommends the variable."""
    cores = len(os.sched_getaffinity(0))
    output = tree("quick --seeds 9 --steps 400 --only ppo", env=os.environ | {"OMP_NUM_THREADS": "1"}).stdout
    assert max(int(n) for n in re.findall(r"(\d+) running", output)) == min(cores, 9)


def test_stopped_run_without_its_log_is_not_finished(tree):
    """Only the log tells that a run which ended well was stopped; the folder may lose it while it runs."""
    tree.write("slow")
    process = tree.start("quick --only ppo --seeds 1 --steps 400")
    tree.wait_for_steps(PPO_1)
    (tree.folder / "runs" / f"{PPO_1}.log").unlink()
    os.kill(*tree.trainings(PPO_1), signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 1 and tree.checkpoint(PPO_1) < 400 and not tree.is_finished(PPO_1)


def test_orphaned_training_is_left_alone(tree):
    """The launcher itself was killed, its training goes on."""
    tree.write("slow")
    process = tree.start("quick --only ppo --seeds 1 --steps 400", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tree.wait_for_steps(PPO_1)
    process.kill()
    process.wait()
    for log in (f"runs/{PPO_1}.log", "elsewhere"):  # its lock is on the log, and on the folder
        result = tree("quick --only ppo --seeds 1 --steps 400")
        assert result.returncode == 1 and "another benchmark.sh is at it" in result.stderr and tree.started() == [PPO_1]
        if log != "elsewhere":
            (tree.folder / log).unlink()


# PROGRESS ############################################################################################################
def test_progress_in_a_log_is_a_line_per_change(tree):
    output = tree("quick --seeds 1 --workers 1 --steps 1500").stdout.splitlines()
    shown = [line.split(",", 3)[:3] for line in output if line.startswith("quick: ")]
    assert shown == [
        [f"quick: {done} done", f" {running} running", " 0 failed of 2"]
        for done, running in ((0, 1), (1, 0), (1, 1), (2, 0))
    ]
    assert len(output) < 10 and "\r" not in "".join(output)


def test_progress_on_a_terminal_is_in_place(tree):
    ours, theirs = pty.openpty()
    process = tree.start("quick --seeds 1 --workers 2 --steps 400", stdout=theirs)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 10_000):
            seen += chunk
    except OSError:  # the terminal's other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    lines = [line.rpartition("\r")[2] for line in seen.decode().split("\r\n")]
    assert seen.count(b"\r\x1b[Kquick: ") >= 3 and sum("running" in line for line in lines) <= 1
    assert any("2 done, 0 running, 0 failed of 2" in line for line in lines)


def test_time_left_counts_steps_not_runs(tree):
    """A run resumed near its end is soon over, which says nothing of the others: 1000 steps take a second, so the
    other run of 1,000,000 steps takes about 17 minutes, more where the machine is busy."""
    long_1, long_2 = (name.replace("400", "1000000") for name in (PPO_1, PPO_2))
    tree.write(f"runs/{long_1}/agent.pt", "998000")
    tree.write(f"runs/{long_1}.log", "\n$ python a --resume b\n 99%|# | 998000/1000000 [00:01<00:00\n")
    process = tree.start("quick --workers 1 --steps 1000000 --only ppo")
    tree.wait_for_steps(long_2)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    (minutes,) = {int(n) for n in re.findall(r"1 done, 1 running.*about (\d+) min left", output)}
    assert 5 <= minutes <= 200


# FOR REAL ############################################################################################################
def test_real_run_ends_with_figure_and_table(tree, mine):
    """A user's copy of SPRL's script, whose checkpoints say sprl, stands as my_sprl beside an earlier run of PPO."""
    folder = tree.folder / "runs/results/quick-3072"
    tree.write(
        folder / f"{FOUR_ROOMS}__ppo__s1.csv", "step,return,success,length,cost_rate,rnet_accuracy\n3072,0.5,,,,\n"
    )
    flags = "quick --with my_sprl.py --only my_sprl --seeds 1 --steps 3072"
    result = tree(flags, python=sys.executable, cwd=mine)
    assert result.returncode == 0, result.stderr
    table = (folder / "table.md").read_text()
    assert table.startswith("The paper's claim: SPRL learns faster than PPO.\n") and table in result.stdout
    assert re.findall(r"\| (\w+) \| 0\.\d+ \| 0\.\d+ \| 1 \| 3,072 \|", table) == ["ppo", "my_sprl"]
    scores = (folder / "scores.md").read_text()
    assert "| my_sprl | 1 |" in scores and "P(better than PPO), area" in scores
    assert '"label":"my_sprl"' in (folder / "report.html").read_text()
    assert {path.name for path in folder.iterdir()} >= {"curves.png", "scores.md", "report.html"}
    assert (folder / "curves.png").stat().st_size > 10_000


# SLURM ###############################################################################################################
def test_slurm_submits_what_is_left(tree, tmp_path):
    """With a program in sbatch's place that writes down its flags and runs the array's tasks one after the other."""
    tree.write("../bin/sbatch", '#!/bin/bash\nprintf "%s\\n" "$@" > sbatch-flags\necho Submitted batch job 7\n')
    (tmp_path / "bin/sbatch").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert tree("quick --only ppo --seeds 1 --steps 400").returncode == 0
    result = tree('quick --steps 400 --slurm --sbatch "--time=4:00:00 --mem=8G"', env=env)
    assert result.returncode == 0 and "Submitted batch job 7" in result.stdout and "figure" in result.stdout
    assert any("figure runs/results/quick-400" in line for line in tree.lines("analysed")), "of what is finished"
    flags = tree.lines("sbatch-flags")
    assert {"--array=2,3,4", "--requeue", "--open-mode=append", "--time=4:00:00", "--mem=8G"} <= set(flags)
    tree.forget()
    tree.write("fail", SPRL_2)
    failed = subprocess.run(["bash", "-c", flags[-1]], cwd=tree.folder, env=env | {"SLURM_ARRAY_TASK_ID": "4"})
    assert failed.returncode == 3
    result = tree("quick --steps 400 --slurm", env=env)
    assert result.stderr == f"failed: runs/{SPRL_2}.log: RuntimeError: out of luck\n" and result.returncode == 1
    assert "--array=2,3,4" in tree.lines("sbatch-flags")  # it gets another chance
    tree.write("slow")
    task = subprocess.Popen(
        ["bash", "-c", flags[-1]], cwd=tree.folder, env=env | {"SLURM_ARRAY_TASK_ID": "2"}, start_new_session=True
    )
    tree.started_processes.append(task)
    tree.wait_for_steps(PPO_2)
    (tree.folder / "sbatch-flags").unlink()
    result = tree("quick --steps 400 --slurm --only ppo", env=env)
    assert result.returncode == 0 and result.stderr == "" and "all that is left is running" in result.stdout
    assert not (tree.folder / "sbatch-flags").exists(), "what runs is not submitted again"
    task.terminate()
    task.wait()
    (tree.folder / "slow").unlink()
    result = tree("quick --steps 400 --slurm --only ppo", env=env)
    assert result.returncode == 0 and result.stderr == f"stopped: runs/{PPO_2}.log\n"
    tree.write("fail")
    tree.forget()
    for task in "234":
        wrapped = subprocess.run(["bash", "-c", flags[-1]], cwd=tree.folder, env=env | {"SLURM_ARRAY_TASK_ID": task})
        assert wrapped.returncode == 0
    assert tree.started() == QUICK[1:]
    tree.forget()
    (tree.folder / "sbatch-flags").unlink()
    again = tree("quick --steps 400 --slurm", env=env)
    assert again.returncode == 0 and "figure, tables and report: runs/results/quick-400" in again.stdout
    assert tree.started() == [] and not (tree.folder / "sbatch-flags").exists()


def test_slurm_runs_your_script(tree, mine, tmp_path):
    """The array's tasks start elsewhere than where the user named it, and count it with the others."""
    tree.write("../bin/sbatch", '#!/bin/bash\nprintf "%s\\n" "$@" > sbatch-flags\n')
    (tmp_path / "bin/sbatch").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert tree("quick --seeds 1 --steps 400 --slurm --with my_sprl.py", env=env, cwd=mine).returncode == 0
    flags = tree.lines("sbatch-flags")
    assert "--array=1,2,3" in flags
    task = subprocess.run(["bash", "-c", flags[-1]], cwd=tree.folder, env=env | {"SLURM_ARRAY_TASK_ID": "3"})
    assert task.returncode == 0 and tree.started() == [SPRL_1.replace("sprl", "my_sprl")]
    assert tree.lines("started")[0].startswith(f"{mine}/my_sprl.py ")


def test_slurm_splits_what_is_too_long_for_one_array(tree, tmp_path):
    """MaxArraySize 3 allows the numbers 1 and 2: four runs are two arrays, whose tasks are all of them."""
    tree.write("../bin/sbatch", '#!/bin/bash\nprintf "%s\\n" "$@" >> sbatch-flags\n')
    tree.write("../bin/scontrol", '#!/bin/bash\necho "MaxArraySize            = 3"\n')
    for name in ("sbatch", "scontrol"):
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert tree("quick --steps 400 --slurm", env=env).returncode == 0
    flags = tree.lines("sbatch-flags")
    assert [flag for flag in flags if flag.startswith("--array")] == ["--array=1,2", "--array=1,2"]
    for wrap in [flag for flag in flags if flag.startswith("exec")]:
        for task in "12":
            run = subprocess.run(["bash", "-c", wrap], cwd=tree.folder, env=env | {"SLURM_ARRAY_TASK_ID": task})
            assert run.returncode == 0
    assert tree.started() == QUICK
    tree.forget()
    for size, code in (("0", 2), ("1", 2), ("(null)", 0)):
        shutil.rmtree(tree.folder / "runs")
        tree.write("../bin/scontrol", f'#!/bin/bash\necho "MaxArraySize            = {size}"\n')
        result = tree("quick --steps 400 --slurm", env=env, timeout=30)
        assert result.returncode == code and (f"MaxArraySize is {size}" in result.stderr) == bool(code)
    assert tree("quick --steps 400 --task 1 --dry-run").returncode == 0 and tree.started() == []


def slurm_missing():
    if not shutil.which("sbatch"):
        return "no sbatch on the PATH"
    ping = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
    return "" if ping.returncode == 0 and " UP" in ping.stdout else "sbatch is here, but no slurmctld answers"


def test_slurm_for_real(tree):
    """An array runs; a requeued task saves and resumes, so does one near its time limit, and a cancelled one after
    it is submitted again."""
    if reason := slurm_missing():
        pytest.skip(reason)

    def submit():
        result = tree("quick --steps 400 --slurm")
        assert result.returncode == 0, result.stderr
        tree.jobs.append(re.search(r"Submitted batch job (\d+)", result.stdout)[1])
        return tree.jobs[-1]

    def starts(name):
        return [line.split()[-2:] for line in tree.lines("started") if name in line]

    def slurm(*command):
        subprocess.run(command, check=True)

    tree.write("slow")
    job = submit()
    tree.wait_for_steps(*QUICK)
    slurm("scontrol", "requeue", f"{job}_1")
    slurm("scancel", "--batch", "--signal=USR1", f"{job}_2")  # what --signal=B:USR1@120 sends
    slurm("scancel", f"{job}_3")
    tree.wait_for(lambda: (tree.folder / "runs" / SPRL_1 / "agent.pt").exists())
    tree.wait_for(lambda: len(starts(PPO_1)) == len(starts(PPO_2)) == 2, seconds=200)
    (tree.folder / "slow").unlink()
    tree.wait_for(lambda: all(tree.is_finished(name) for name in (PPO_1, PPO_2, SPRL_2)))
    assert starts(PPO_1)[1] == ["--resume", f"runs/{PPO_1}/agent.pt"]
    assert starts(PPO_2)[1] == ["--resume", f"runs/{PPO_2}/agent.pt"]
    assert len(starts(SPRL_2)) == 1 and not tree.is_finished(SPRL_1) and tree.checkpoint(SPRL_1) < 400
    submit()
    tree.wait_for(lambda: tree.is_finished(SPRL_1), seconds=200)
    assert starts(SPRL_1)[1] == ["--resume", f"runs/{SPRL_1}/agent.pt"]
    tree.wait_for(lambda: "figure, tables and report" in tree("quick --steps 400 --slurm").stdout)
    assert len(tree.lines("started")) == 4 + 3
