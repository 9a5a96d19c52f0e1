"""Runs a script many times from one warm process: everything is imported once, then every run is a fork of it.

In comes a line of JSON for each run, {"argv", "cwd", "death"}; when it has ended one comes out, {"status", "seconds"}:
seconds from the fork to the first rollout, and from there to the end. `death` is null, or says where SIGKILL comes:
["start", seconds] so long after the fork; ["iterations", n, seconds] so long after the n-th iteration;
["write", n], ["before rename", n] or ["after rename", n] in the n-th checkpoint.
"""

import io
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "ppo_sprl_minigrid.py"


def die(seconds=0.0):
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(death, tell):
    """Puts SIGKILL where it is wanted, by wrapping what the script calls; the script knows nothing of it."""
    import torch
    import tqdm

    kind, *when = death or ["never"]
    save, replace, calls = torch.save, os.replace, {"write": 0, "rename": 0, "iterations": 0}

    def half_save(content, file):
        calls["write"] += 1
        if [kind, calls["write"]] == ["write", *when]:
            whole = io.BytesIO()
            save(content, whole)
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
            file.flush()
            die()
        save(content, file)

    def last_replace(old, new):
        calls["rename"] += 1
        if [kind, calls["rename"]] == ["before rename", *when]:
            die()
        replace(old, new)
        if [kind, calls["rename"]] == ["after rename", *when]:
            die()

    class Bar(tqdm.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            os.write(tell, b"rollout")
            self.watch()

        def watch(self):
            if [kind, calls["iterations"]] == ["iterations", *when[:1]]:
                threading.Thread(target=die, args=when[1:], daemon=True).start()

        def update(self, n=1):
            super().update(n)
            calls["iterations"] += 1
            self.watch()

    torch.save, os.replace, tqdm.tqdm = half_save, last_replace, Bar
    if kind == "start":
        threading.Thread(target=die, args=when, daemon=True).start()


def live(job, tell):
    """The child: a run like any other, its output in files."""
    os.chdir(job["cwd"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv, status = [SCRIPT.name, *job["argv"]], 0
    arrange(job["death"], tell)
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 99
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    import matplotlib.pyplot  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer would import it, in every life anew

    torch.set_num_threads(1)
    runpy.run_path(str(SCRIPT))  # its imports; the main block is left alone
    for line in sys.stdin:
        begin, (hear, tell) = time.time(), os.pipe()
        pid = os.fork()
        if pid == 0:
            live(json.loads(line), tell)
        os.close(tell)
        os.read(hear, 10)  # until the first rollout, or the end
        first = time.time()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(hear)
        print(json.dumps({"status": status, "seconds": [first - begin, time.time() - first]}), flush=True)
