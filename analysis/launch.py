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
from itertools import groupby, product
from types import SimpleNamespace

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMITS = {"seeds": 1000, "workers": 1000, "steps": 2**31 - 1, "task": 10**6}
HEARD = "stopped at step"  # a script says so when a signal has stopped it; it has saved and ends with 0
CLEAR = "\r\033[K" if sys.stdout.isatty() else ""  # on a terminal the progress is in place


def fail(message):
    print(f"benchmark.sh: error: {message}", file=sys.stderr)
    sys.exit(2)


class Run(SimpleNamespace):
    """Its state is left, running, finished, failed (or made with other flags), or elsewhere (someone else is at it)."""

    def find_state(self):
        """left, finished, or failed with a line that tells why. Without a checkpoint no flags can be mixed."""
        if not os.path.exists(self.checkpoint) or not os.path.exists(self.json):  # the latter if started by hand
            return "left"
        try:
            record = json.load(open(self.json))
            was, finished = set(re.split(" (?=--)", " ".join(record["command"]))), record["finished"]
        except (ValueError, KeyError, TypeError, OSError):
            was, finished = {"damaged"}, False
        now = set(re.split(" (?=--)", " ".join(self.command)))
        if was != now:  # in whatever order
            flags = " ".join(sorted(was - now)) or "fewer"
            print(f"{self.folder} was made with other flags ({flags}), move it away to run it anew", file=sys.stderr)
            return "failed"
        return "finished" if finished else "left"

    def write_json(self, finished):
        with open(f"{self.json}.tmp", "w") as file:
            json.dump({"command": self.command, "finished": finished}, file)
        os.replace(f"{self.json}.tmp", self.json)

    def get_command(self, options):
        track = ["--track", "--wandb-project-name", f"sprl-{self.block}"] if options.track else []
        resume = ["--resume", self.checkpoint] if os.path.exists(self.checkpoint) else []
        return [options.python, *self.command, *track, *resume]

    def said(self):
        """What the last command in the log has said; nothing if the log is missing."""
        text = open(self.log, errors="replace").read() if os.path.isfile(self.log) else ""  # a bar's \r becomes \n
        return text.rpartition("\n$ ")[2]

    def count_steps(self):
        """By the progress bar in the log, whatever else it says."""
        if self.state == "finished":
            return self.steps
        steps = re.findall(r"(\d+)/\d+ \[", self.said()[-4000:])
        return min(int(steps[-1]), self.steps) if steps else 0

    def report_failure(self):
        last_line = self.said().strip().rpartition("\n")[2]
        print(f"failed: {self.log}: {last_line[:200]}", file=sys.stderr)

    def lock(self):
        """The open log, locked, or None; finds the state. A script inherits the lock with its output."""
        try:
            log = open(self.log, "ab", buffering=0)
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(self.folder):
                fcntl.flock(open(f"{self.folder}/lock", "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)  # if started by hand
            self.state = self.find_state()
            return log
        except BlockingIOError:
            self.state = "elsewhere"
        except OSError as error:
            self.state = "failed"
            print(f"{CLEAR}failed: {self.log}: {error}", file=sys.stderr)

    def start(self, options):
        """Starts or resumes the run, unless someone else is at it or was meanwhile."""
        log = self.lock()
        if log and self.state == "left":
            if not os.path.exists(self.checkpoint):  # it died before it had anything to go on from
                shutil.rmtree(self.folder, ignore_errors=True)
            self.write_json(finished=False)
            command = self.get_command(options)
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            print(CLEAR + shlex.join(command), flush=True)
            # apart from the terminal, whose Ctrl-C would be a second signal and end it; Slurm keeps a job together
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=not options.task)
            self.state, self.held = "running", log


def draw(runs, python):
    """Figure, tables and report of what is finished; 1 if something failed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    file = open("runs/results.lock", "a")
    fcntl.flock(file, fcntl.LOCK_EX)  # two at a time would write the same files
    done, failed = ([run for run in runs if run.state == state] for state in ("finished", "failed"))
    for run in failed:  # nor may an earlier figure's copy of it be shown
        for path in glob.glob(f"runs/results/{run.block}/{run.env}*__{run.label}__s{run.seed}.csv"):
            os.remove(path)
    for block, claim in dict.fromkeys((run.block, run.claim) for run in done):
        folder, commands = f"runs/results/{block}", []
        for label, script in dict.fromkeys((run.label, run.command[0]) for run in done if run.block == block):
            paths = [run.checkpoint for run in done if (run.block, run.label) == (block, label)]
            commands.append(["curves.py", "export", *paths, "--out", folder, "--label", label, "--script", script])
        commands.append(["curves.py", "figure", folder, "--rnet-accuracy", "--claim", claim])
        commands.append(["report.py", folder, "--claim", claim])
        for program, *words in commands:
            output = None if words[0] == "figure" else subprocess.DEVNULL  # the table is shown
            if subprocess.run([python, f"analysis/{program}", *words], stdout=output).returncode:
                return 1
        print(f"figure, tables and report: {folder}", flush=True)
    return 0


def submit(runs, options):
    """Submits what is left as Slurm's job arrays, whose tasks are the same command with --task; the exit code."""
    if not shutil.which("sbatch"):
        fail("--slurm needs sbatch on the PATH")
    limit = re.search(r"MaxArraySize\s*= (\d+)", subprocess.getoutput("scontrol show config"))
    size = int(limit[1]) - 1 if limit else 1000  # an array's numbers are below the limit
    if size < 1:
        fail(f"--slurm needs job arrays, but Slurm's MaxArraySize is {size + 1}, accepted: 2 or more")
    code = int(any(run.state == "failed" for run in runs))
    for run in runs:  # what an earlier array did not finish, so that a run that always fails is seen
        if run.state == "left" and os.path.exists(run.log) and run.lock():
            if HEARD in run.said():
                print(f"stopped: {run.log}", file=sys.stderr)
            else:
                run.report_failure()
                code = 1
    left = [number for number, run in enumerate(runs, start=1) if run.state == "left"]
    flags = [f"--job-name=sprl-{options.block}", "--requeue", "--open-mode=append", f"--chdir={ROOT}"]
    flags += ["--output=runs/slurm-%A-%a.txt", "--signal=B:USR1@120"]  # B: to the launcher alone
    again = [*sys.argv[1:], f"--engine={options.engine}", f"--python={options.python}", f"--with={options.scripts}"]
    for first in range(0, len(runs), size):
        tasks = ",".join(str(number - first) for number in left if first < number <= first + size)
        # exec: a shell before the launcher would die of scancel and take it along before it has saved
        wrap = f"exec ./benchmark.sh {shlex.join(again)} --task $((SLURM_ARRAY_TASK_ID + {first}))"
        command = ["sbatch", f"--array={tasks}", *flags, *options.sbatch.split(), "--wrap", wrap]
        if tasks and subprocess.run(command).returncode:
            return 1
    print("later, the same command draws the figure or submits again" if left else "all that is left is running")
    return draw(runs, options.python) or code


if __name__ == "__main__":
    # OPTIONS #########################################################################################################
    lines = [line for line in (line.partition("#")[0] for line in sys.stdin) if line.strip()]
    blocks = [line.split()[1].removesuffix("-{engine}") for line in lines if line.startswith("block ")]
    head = re.match(r"#!.*\n((?:#.*\n)*)", open(f"{ROOT}/benchmark.sh").read())[1]
    parser = argparse.ArgumentParser("benchmark.sh", allow_abbrev=False)
    parser.format_help = lambda: re.sub("^# ?", "", head, flags=re.M)
    parser.error = fail
    parser.add_argument("block", choices=[*blocks, "all"])
    parser.add_argument("--engine", choices=["auto", "deepmind_lab", "labmaze"], default="auto")
    for name in ("only", "with", "python", "sbatch", *LIMITS):
        parser.add_argument(f"--{name}", **({"type": int} if name in LIMITS else {"default": ""}))
    for name in ("--track", "--dry-run", "--slurm"):
        parser.add_argument(name, action="store_true")
    parser.set_defaults(workers=len(os.sched_getaffinity(0)), python=sys.executable)
    options = parser.parse_args(shlex.split(shlex.join(sys.argv[1:]).replace("--sbatch ", "--sbatch=")))  # FLAGS have -
    for name, most in LIMITS.items():
        if (value := getattr(options, name)) is not None and not 1 <= value <= most:
            fail(f"--{name} {value}, accepted: a whole number from 1 to {most}")
    if not shutil.which(options.python):
        fail(f"--python {options.python}: no such program")
    options.python = os.path.abspath(shutil.which(options.python))  # it is named from where the user is, as --with is
    methods, added = {line.split()[1] for line in lines if line.startswith("run ")}, []
    for path in filter(None, getattr(options, "with").split(",")):
        name = re.fullmatch(r"((?!-)[A-Za-z0-9.-]+(_[A-Za-z0-9.-]+)*)\.py", os.path.basename(path))
        if not name or name[1].lower() in methods or not os.path.isfile(path):
            fail(f"--with {path}, accepted: a file NAME.py, NAME of letters, digits, . - and single _, no method's yet")
        methods.add(name[1].lower())
        added.append(["run", name[1], os.path.abspath(path).removeprefix(f"{ROOT}/")])
    options.scripts = ",".join(script for _, _, script in added)
    os.chdir(ROOT)
    if options.engine == "auto":
        found = subprocess.run([options.python, "-c", "import deepmind_lab"], capture_output=True).returncode == 0
        options.engine = "deepmind_lab" if found else "labmaze"

    # RUNS ############################################################################################################
    runs = {}  # by environment, then by method, then by seed
    for kind, group in groupby(lines, key=lambda line: line.split()[0]):
        group = [line.replace("{engine}", options.engine).split() for line in group]
        if kind == "block":
            _, block, num_seeds, *claim = group[0]
            name = block.removesuffix(f"-{options.engine}")
            is_asked = name == options.block or options.block == "all" and name not in ("quick", "minigrid-paper")
            seeds = range(1, (options.seeds or int(num_seeds)) + 1)
            block += f"-{options.steps}" if options.steps else ""  # of another schedule: no part of the block's own
        elif kind == "env":
            envs = group
        elif is_asked:
            for (_, env, steps, *env_flags), (_, label, script, *flags), seed in product(envs, group + added, seeds):
                run = Run(block=block, claim=" ".join(claim), env=env.replace(":", "-"), label=label, seed=seed)
                run.name = f"{block}__{run.env}__{label}__s{seed}"
                run.folder, run.log, run.json = (f"runs/{run.name}{ending}" for ending in ("", ".log", ".json"))
                run.checkpoint, run.process = f"{run.folder}/agent.pt", None
                run.steps = options.steps or int(steps)
                run.command = [script, "--env-id", env.split(":")[0], "--seed", f"{seed}", "--total-timesteps"]
                run.command += [f"{run.steps}", *flags, *env_flags, "--run-name", run.name]
                runs[run.name] = run  # once, also in an environment's second list
    words = options.only.split(",")  # methods, or parts of environments' names; by default "", a part of all
    labels, envs = dict.fromkeys(run.label for run in runs.values()), dict.fromkeys(run.env for run in runs.values())
    for word in words:
        if word not in labels and not any(word in env for env in envs):
            fail(f"--only '{word}', accepted: {' '.join([*labels, *envs])}")
    methods = [word for word in words if word in labels] or labels
    worlds = [word for word in words if word not in labels] or envs
    runs = [run for run in runs.values() if run.label in methods and any(word in run.env for word in worlds)]
    if not runs:
        fail(f"--only {options.only} leaves no run of {options.block}")
    if (options.task or 1) > len(runs):
        fail(f"--task {options.task}, accepted: 1 to {len(runs)}")
    runs = [runs[options.task - 1]] if options.task else runs
    for run in runs:
        run.state = run.find_state()
        if options.dry_run and run.state != "failed":
            print(f"# finished: {run.name}" if run.state == "finished" else shlex.join(run.get_command(options)))
    if options.dry_run:
        sys.exit(int(any(run.state == "failed" for run in runs)))
    os.makedirs("runs", exist_ok=True)
    if options.slurm and not options.task and any(run.state == "left" for run in runs):
        sys.exit(submit(runs, options))

    # LAUNCH ##########################################################################################################
    if options.task or options.workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    signals, shown, shown_at = [], "", 0.0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    queue = [run for run in runs if run.state == "left"]
    workers = min(options.workers, len(queue))
    first_steps, began = sum(run.count_steps() for run in runs), time.time()
    while True:
        running = [run for run in runs if run.state == "running"]
        for run in running:
            if run.process.poll() is not None:
                if run.process.returncode == 0 and run.said() and HEARD not in run.said():
                    run.write_json(finished=True)
                    run.state = "finished"
                else:
                    run.state = "left" if signals else "failed"
                run.held.close()
        if signals and workers:
            workers, shown = 0, ""
            time.sleep(3)  # Slurm may have sent the signal to all processes: a second one would end them at once
            for run in running:
                if HEARD not in run.said():
                    run.process.terminate()
        done, live, failed = ([run.state for run in runs].count(state) for state in ("finished", "running", "failed"))
        line = f"{options.block}: {done} done, {live} running, {failed} failed of {len(runs)}"
        is_due = line != shown or time.time() - shown_at > (5 if CLEAR else 600)
        if is_due and (running or not queue):
            shown, shown_at = line, time.time()
            worked = sum(run.count_steps() for run in runs) - first_steps  # below 0 until a resumed run shows its bar
            left = [run.steps - run.count_steps() for run in runs if run.state in ("left", "running")]
            if signals:
                line += ", saving"
            elif worked > 0 and left:
                most = max(sum(left), max(left) * workers)  # in the end workers idle while the last run goes on
                hours, minutes = divmod(int((time.time() - began) * most / worked / 60) + 1, 60)
                line += f", about {hours} h {minutes} min left" if hours else f", about {minutes} min left"
            print(CLEAR + line, end="" if CLEAR else "\n", flush=True)
        if queue and live < workers:
            queue.pop(0).start(options)
        elif live:
            time.sleep(0.2)
        else:
            break
    print()  # on a terminal the progress has no end of line
    for run in runs:
        if run.state == "failed" and run.process:  # of the others it was said before
            run.report_failure()
        if run.state == "elsewhere":
            run.state = run.find_state()
            if run.state == "left":
                print(f"another benchmark.sh is at it: {run.log}", file=sys.stderr)
    if options.task:
        if signal.SIGUSR1 in signals and HEARD in run.said():  # it has saved near its time limit
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
        sys.exit(run.process.returncode if run.process else int(run.state != "finished"))
    if signals:
        print("stopped; the same command again goes on")
        sys.exit(130)
    sys.exit(draw(runs, options.python) or int(any(run.state != "finished" for run in runs)))
