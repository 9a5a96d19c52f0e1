"""Launches the runs that benchmark.sh lists on its input; `./benchmark.sh --help` tells how to use it."""

import argparse
import fcntl
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

LIMITS = {"seeds": 1000, "workers": 1000, "steps": 2**31 - 1, "task": 10**6}
IGNORED = ("--resume", "--track", "--wandb-project-name")  # flags that do not change what a run learns
HEARD = "stopping at step"  # a script says so when a signal stops it; it saves and ends with 0
CLEAR = "\r\033[K" if sys.stdout.isatty() else ""  # on a terminal the progress is in place


def fail(message):
    print(f"benchmark.sh: error: {message}", file=sys.stderr)
    sys.exit(2)


# THE RUNS ############################################################################################################
def parse_options(words, lines, here):
    blocks = [line.split()[1].removesuffix("-{engine}") for line in lines if line.startswith("block ")]
    parser = argparse.ArgumentParser("benchmark.sh", allow_abbrev=False)
    head = re.match(r"#!.*\n((?:#.*\n)*)", open("benchmark.sh").read())[1]
    parser.error, parser.format_help = fail, lambda: re.sub("^# ?", "", head, flags=re.M)
    parser.add_argument("block", choices=[*blocks, "all"])
    parser.add_argument("--engine", choices=["auto", "deepmind_lab", "labmaze"], default="auto")
    for name in LIMITS:
        parser.add_argument(f"--{name}", type=int)
    for name in ("--only", "--python", "--sbatch"):
        parser.add_argument(name, default="")
    for name in ("--track", "--dry-run", "--slurm"):
        parser.add_argument(name, action="store_true")
    parser.set_defaults(workers=len(os.sched_getaffinity(0)), python=sys.executable)
    words = "\0".join(words).replace("--sbatch\0", "--sbatch=").split("\0") if words else []  # its value begins with --
    options = parser.parse_args(words)
    for name, most in LIMITS.items():
        if (value := getattr(options, name)) is not None and not 1 <= value <= most:
            fail(f"--{name} {value}, accepted: a whole number from 1 to {most}")
    if "/" in options.python:
        options.python = os.path.join(here, options.python)  # it is named from where the user is
    if not shutil.which(options.python):
        fail(f"--python {options.python}: no such program")
    if options.engine == "auto" and (options.block == "all" or options.block.startswith("dmlab")):
        found = subprocess.run([options.python, "-c", "import deepmind_lab"], capture_output=True).returncode == 0
        options.engine = "deepmind_lab" if found else "labmaze"
    return options


def make_runs(lines, options):
    """All runs of the block: by environment, then by method, then by seed. A run's state is left, running, finished,
    failed, elsewhere (someone else is at it) or other (it was made with other flags)."""
    runs, envs, above = [], [], None
    for number, line in enumerate(lines):
        kind, *words = line.replace("{engine}", options.engine).split()
        if kind == "block":
            name, block, claim = line.split()[1].removesuffix("-{engine}"), words[0], " ".join(words[2:])
            is_asked = name == options.block or options.block == "all" and name not in ("quick", "minigrid-paper")
            seeds = range(1, (options.seeds or int(words[1])) + 1)
            if options.steps:  # another schedule: not to be resumed from, nor shown beside the block's own
                block += f"-{options.steps}"
            track = ["--track", "--wandb-project-name", f"sprl-{block}"] if options.track else []
        elif kind == "env":
            envs = [*(envs if above == "env" else []), (number, *words)]
        elif is_asked:
            label, script, *flags = words
            for (order, env, steps, *env_flags), seed in ((env, seed) for env in envs for seed in seeds):
                run = SimpleNamespace(block=block, claim=claim, env=env.replace(":", "-"), label=label, seed=seed)
                run.name, run.order = f"{block}__{run.env}__{label}__s{seed}", order
                run.folder, run.log, run.json = (f"runs/{run.name}{ending}" for ending in ("", ".log", ".json"))
                run.checkpoint, run.state, run.process = f"{run.folder}/agent.pt", "left", None
                run.steps, run.step, run.first_step = options.steps or int(steps), 0, 0  # first: when we began
                run.command = [script, "--env-id", env.split(":")[0], "--seed", f"{seed}", "--total-timesteps"]
                run.command += [f"{run.steps}", *flags, *env_flags, "--run-name", run.name, *track]
                runs.append(run)
        above = kind
    return sorted(runs, key=lambda run: run.order)


def choose(runs, only):
    """The runs that --only leaves: its words are methods, or parts of environments' names."""
    words = only.split(",") if only else []
    labels, envs = list(dict.fromkeys(run.label for run in runs)), list(dict.fromkeys(run.env for run in runs))
    for word in words:
        if word not in labels and (not word or all(word not in env for env in envs)):
            fail(f"--only '{word}', accepted: {' '.join(labels + envs)}")
    labels = [word for word in words if word in labels] or labels
    worlds = [word for word in words if word not in labels] or envs
    return [run for run in runs if run.label in labels and any(word in run.env for word in worlds)]


# ONE RUN #############################################################################################################
def find_state(run):
    """left, finished, or other with a line that tells why. Without a checkpoint there is nothing to mix or to skip."""
    if not os.path.exists(run.checkpoint) or not os.path.exists(run.json):  # the latter if it was started by hand
        return "left"
    try:
        record = json.load(open(run.json))
    except ValueError:
        record = {"command": ["damaged"]}
    parts = (re.split(" (?=--)", " ".join(command)) for command in (record["command"], run.command))
    was, now = ({part for part in flags if part.split()[0] not in IGNORED} for flags in parts)  # in any order
    if was != now:
        was = " ".join(sorted(was - now)) or "fewer"
        print(f"{run.folder} was made with other flags ({was}), move it away to run it anew", file=sys.stderr)
        return "other"
    return "finished" if record["finished"] else "left"


def write_json(run, finished):
    with open(f"{run.json}.tmp", "w") as file:
        json.dump({"command": run.command, "finished": finished}, file)
    os.replace(f"{run.json}.tmp", run.json)


def get_line(run, python):
    resume = ["--resume", run.checkpoint] if os.path.exists(run.checkpoint) else []
    return shlex.join([python, *run.command, *resume])


def said(run):
    """What the last command in the log has said; nothing if the log is missing or cut off."""
    text = open(run.log, errors="replace").read() if os.path.isfile(run.log) else ""  # a bar's \r becomes \n
    return text.rpartition("\n$ ")[2] if "\n$ " in text else ""


def reached_step(run):
    """By the progress bar in the log, whatever else it says."""
    steps = re.findall(r"(\d+)/\d+ \[", said(run)[-4000:])
    return min(int(steps[-1]), run.steps) if steps else run.step


def report_failure(run):
    lines = ["".join(filter(str.isprintable, line)).strip() for line in said(run)[-4000:].splitlines()]
    print(f"failed: {run.log}: {([''] + [line for line in lines if line])[-1][:200]}", file=sys.stderr)
    return 1


def lock(run):
    """The open log, locked; None if someone else is at the run. A script inherits the lock with its output."""
    log = open(run.log, "ab", buffering=0)
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(run.folder):
            with open(f"{run.folder}/lock", "a") as file:  # of a script that was started by hand
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return log
    except BlockingIOError:
        log.close()


def start(run, options):
    """Starts or resumes a run, unless someone else is at it or was meanwhile."""
    try:
        log = lock(run)
        run.state = find_state(run) if log else "elsewhere"
        if run.state == "left":
            if os.path.exists(run.folder) and not os.path.exists(run.checkpoint):
                shutil.rmtree(run.folder)  # it died before it had anything to go on from
            write_json(run, finished=False)
            line = get_line(run, options.python)
            log.write(f"\n$ {line}\n".encode())
            print(CLEAR + line, flush=True)
            # apart from the terminal, whose Ctrl-C would be a second signal and end it; Slurm keeps a job together
            own = {"stdin": subprocess.DEVNULL, "start_new_session": not options.task}
            run.process = subprocess.Popen(shlex.split(line), stdout=log, stderr=log, **own)
            run.state, run.began, run.ended, run.held = "running", time.time(), None, log
    except OSError as error:
        run.state = "failed"
        print(error, file=sys.stderr)


# ALL RUNS ############################################################################################################
def time_left(runs, workers):
    """Work is counted in steps, so that a run that was resumed near its end counts little."""
    for run in runs:
        run.step = reached_step(run) if run.state == "running" else run.step
    worked = sum(run.step - run.first_step for run in runs)
    left = [run.steps - run.step for run in runs if run.state in ("left", "running")]
    if worked <= 0 or sum(left) == 0:  # below 0: a checkpoint was older than its log
        return ""
    busy = sum((run.ended or time.time()) - run.began for run in runs if run.process)
    most = max(sum(left), max(left) * workers)  # in the end workers idle while the last run goes on
    hours, minutes = divmod(int(busy * most / worked / workers / 60) + 1, 60)
    return f", about {hours} h {minutes} min left" if hours else f", about {minutes} min left"


def launch(runs, options):
    """Keeps the workers busy until every run has ended or was stopped by a signal; returns the signals."""
    signals, queue, is_stopping, shown, shown_at = [], [run for run in runs if run.state == "left"], False, "", 0.0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    while True:
        running = [run for run in runs if run.state == "running"]
        for run in running:
            if run.process.poll() is not None:
                run.ended, run.state = time.time(), "left" if signals else "failed"
                if run.process.returncode == 0 and said(run) and HEARD not in said(run):
                    write_json(run, finished=True)
                    run.state, run.step = "finished", run.steps
                run.held.close()
        if signals and not is_stopping:
            is_stopping, shown = True, ""
            time.sleep(1)  # Slurm may have sent the signal to all processes: a second one would end them at once
            for run in running:
                if run.process.poll() is None and HEARD not in said(run):
                    run.process.terminate()
        states = [run.state.replace("other", "failed") for run in runs]
        done, live, failed = (states.count(state) for state in ("finished", "running", "failed"))
        line = f"{options.block}: {done} done, {live} running, {failed} failed of {len(runs)}"
        is_due = line != shown or time.time() - shown_at > (5 if CLEAR else 600)
        if is_due and (running or not queue):
            shown, shown_at = line, time.time()
            line += ", saving" if signals else time_left(runs, options.workers)
            print(CLEAR + line, end="" if CLEAR else "\n", flush=True)
        if queue and not signals and live < options.workers:
            start(queue.pop(0), options)
        elif live:
            time.sleep(0.2)
        else:
            break
    if CLEAR:
        print()
    return signals


def draw(runs, python):
    """Figure, tables and report of what is finished; 1 if something failed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    os.makedirs("runs/results", exist_ok=True)
    file = open("runs/results/lock", "a")
    fcntl.flock(file, fcntl.LOCK_EX)  # two at a time would write the same files
    for run in runs:
        if run.state == "other":  # nor may an earlier figure's copy of it be shown
            for path in glob.glob(f"runs/results/{run.block}/{run.env}*__{run.label}__s{run.seed}.csv"):
                os.remove(path)
    done, codes = [run for run in runs if run.state == "finished"], []
    for block, claim in dict.fromkeys((run.block, run.claim) for run in done):
        folder, commands = f"runs/results/{block}", []
        for label in dict.fromkeys(run.label for run in done if run.block == block):
            paths = [run.checkpoint for run in done if (run.block, run.label) == (block, label)]
            commands.append(["curves.py", "export", *paths, "--out", folder, "--label", label])
        commands.append(["curves.py", "figure", folder, "--rnet-accuracy", "--claim", claim])
        commands.append(["report.py", folder, "--claim", claim])
        for program, *words in commands:
            output = None if words[0] == "figure" else subprocess.DEVNULL  # the table is shown
            codes.append(subprocess.run([python, f"analysis/{program}", *words], stdout=output).returncode)
        if not any(codes):
            print(f"figure, tables and report: {folder}", flush=True)
    return int(any(codes))


# SLURM ###############################################################################################################
def submit(runs, all_runs, options):
    """Submits what is left as job arrays, whose tasks count all runs of the block; the exit code."""
    if not shutil.which("sbatch"):
        fail("--slurm needs sbatch on the PATH")
    code = 0
    for run in runs:  # what an earlier array did not finish, so that a run that always fails is seen
        if run.state == "left" and os.path.exists(run.log):
            if not lock(run):
                run.state = "running"
            elif HEARD in said(run):
                print(f"stopped: {run.log}", file=sys.stderr)
            else:
                code = report_failure(run)
    code = draw(runs, options.python) or code
    left = [i for i, run in enumerate(all_runs) if run in runs and run.state == "left"]
    config = subprocess.getoutput("scontrol show config")
    size = int((re.findall(r"MaxArraySize\s*= (\d+)", config) or [1001])[0]) - 1  # an array's numbers are below it
    if size < 1:
        fail(f"--slurm needs job arrays, but Slurm's MaxArraySize is {size + 1}, accepted: 2 or more")
    flags = [f"--job-name=sprl-{options.block}", "--requeue", "--open-mode=append", f"--chdir={os.getcwd()}"]
    flags += ["--output=runs/slurm-%A-%a.txt", "--signal=B:USR1@120"]  # B: to the launcher alone
    again = [f"--{name}={value}" for name in ("engine", "python", "seeds", "steps") if (value := vars(options)[name])]
    again += ["--track"] if options.track else []
    for first in range(0, len(all_runs), size):
        tasks = ",".join(str(i - first + 1) for i in left if first <= i < first + size)
        # exec: a shell before the launcher would die of scancel and take it along before it has saved
        wrap = f"exec ./benchmark.sh {options.block} {shlex.join(again)} --task $((SLURM_ARRAY_TASK_ID + {first}))"
        command = ["sbatch", f"--array={tasks}", *flags, *options.sbatch.split(), "--wrap", wrap]
        if tasks and subprocess.run(command).returncode:
            return 1
    ending = "makes the figure and the tables, or submits again what was not finished"
    print(f"once it has ended, the same command {ending}" if left else "all that is left is running")
    return code


def main():
    here = os.getcwd()
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    lines = [line for line in (line.partition("#")[0] for line in sys.stdin) if line.strip()]
    options = parse_options(sys.argv[1:], lines, here)
    all_runs = make_runs(lines, options)
    runs = choose(all_runs, options.only)
    if not runs:
        fail(f"--only {options.only} leaves no run of {options.block}")
    if options.task and not options.dry_run:
        if options.task > len(all_runs):
            fail(f"--task {options.task}, accepted: 1 to {len(all_runs)}")
        runs = [all_runs[options.task - 1]]
    for run in runs:
        run.state = find_state(run)
        run.step = run.first_step = reached_step(run) if os.path.exists(run.checkpoint) else 0
        if options.dry_run and run.state != "other":
            print(f"# finished: {run.name}" if run.state == "finished" else get_line(run, options.python))
    code = int(any(run.state == "other" for run in runs))
    if options.dry_run:
        return code
    os.makedirs("runs", exist_ok=True)
    os.environ["PYTHONUNBUFFERED"] = "1"  # a log's last line must be the last that was said
    if options.task or options.workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    if options.slurm and any(run.state == "left" for run in runs):
        return submit(runs, all_runs, options) or code
    signals = launch(runs, options)
    for run in runs:
        if run.state == "elsewhere" and find_state(run) == "finished":
            run.state = "finished"
        elif run.state == "elsewhere":
            print(f"another benchmark.sh is at it: {run.log}", file=sys.stderr)
        elif run.state == "failed":
            report_failure(run)
    if options.task:
        has_saved = os.path.exists(run.checkpoint) and os.path.getmtime(run.checkpoint) > os.path.getmtime(run.json)
        if signal.SIGUSR1 in signals and has_saved:  # it is near its time limit and got on, so it may go on
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        return run.process.returncode if run.process else int(run.state != "finished")
    if signals:
        print("stopped; the same command again goes on")
        return 130
    return draw(runs, options.python) or int(any(run.state != "finished" for run in runs))


if __name__ == "__main__":
    sys.exit(main())
