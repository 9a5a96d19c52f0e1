"""Steps per second of every method, where the time goes, and what the machine could do: ratios inside one run.

    python tests/bench_speed.py                        # all methods on FourRooms-7x7, about ten minutes on two cores
    python tests/bench_speed.py --repetitions 1 --json speed.json
    python tests/bench_speed.py --domain dmlab         # PPO and SPRL on DeepMind Lab's stand-in; also atari, fetch
    python tests/bench_speed.py --curves results/minigrid    # also the seconds to a return of 0.75, by these curves
    python tests/bench_speed.py --pixel-cost           # Atari's cost per state against N, by images and by embeddings
    python tests/bench_speed.py --scaling results/speed   # steps/s against k, N, environments, grid: figure and CSV

Every measurement is a process of its own that runs a script as it stands, with a clock at each section marker of its
main block. Repetitions are interleaved (A B C, A B C, ...); medians are printed with the smallest and largest value.
"""

import contextlib
import csv
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
READY = "--rnet-start 3072 --rnet-reliable-accuracy 0"  # in the schedule's densest phase from the start
METHODS = {
    "ppo": "ppo_sprl_minigrid.py --cost-scale 0",
    "sprl": f"ppo_sprl_minigrid.py {READY}",
    "gt-sprl": "ppo_sprl_minigrid.py --rnet oracle",
    "eco": f"ppo_eco.py {READY}",
    "icm": "ppo_icm.py",
    "gt-grid": "ppo_gtgrid.py",
    "cleanrl": "cleanrl",
}
METHODS |= {f"{name}-bf16": f"{METHODS[name]} --precision bf16" for name in ("ppo", "sprl", "eco", "icm")}
METHODS |= {name: f"{METHODS[name]} --precision fp32" for name in ("ppo", "sprl", "gt-sprl", "eco", "icm", "gt-grid")}
DOMAINS = {  # the world, and a command line per method
    "minigrid": ("MiniGrid-FourRooms-7x7-v0", METHODS),
    "dmlab": (
        "explore_goal_locations_small",
        {
            "ppo": "ppo_sprl_dmlab.py --engine labmaze --cost-scale 0",
            "sprl": f"ppo_sprl_dmlab.py --engine labmaze --rnet-width 16 {READY}",
        },
    ),
    "atari": (
        "MontezumaRevenge-v5",
        {
            "ppo": "ppo_sprl_atari.py --cost-scale 0",
            "sprl": f"ppo_sprl_atari.py --rnet-width 16 --rnet-input embedding-difference {READY}",
        },
    ),
    "fetch": (
        "FetchReach-v4",
        {
            "ppo": "ppo_sprl_fetch.py --cost-scale 0 --precision fp32",
            "sprl": f"ppo_sprl_fetch.py {READY} --precision fp32",
            "ppo-bf16": "ppo_sprl_fetch.py --cost-scale 0 --precision bf16",
            "sprl-bf16": f"ppo_sprl_fetch.py {READY} --precision bf16",
        },
    ),
}
PARTS = ("environment", "policy forward", "intrinsic reward", "advantage", "policy update", "rnet update", "rest")
SECTIONS = {"INTRINSIC REWARD": PARTS[2], "ADVANTAGE": PARTS[3], "UPDATE POLICY": PARTS[4], "UPDATE RNET": PARTS[5]}


@dataclass
class Args:
    domain: Literal["minigrid", "dmlab", "atari", "fetch"] = "minigrid"
    """where; dmlab is its stand-in"""
    methods: tuple[str, ...] = ()
    """ppo, sprl; on minigrid also gt-sprl, eco, icm, gt-grid and cleanrl, the reference arrangement; on minigrid and
    fetch ppo-bf16, sprl-bf16 (default: all)"""
    env_id: str | None = None
    """the world (default: FourRooms-7x7, explore_goal_locations_small, MontezumaRevenge-v5, FetchReach-v4)"""
    iterations: int = 8
    """iterations that are measured"""
    burn_in: int = 2
    """iterations before them that are not, besides those that fill the ring"""
    repetitions: int = 3
    """how often every method is measured"""
    threads: int = 2
    """torch's threads"""
    json: str | None = None
    """also write the numbers to this file"""
    curves: str | None = None
    """also print the seconds to a return of 0.75, by the steps of the runs in this folder; CleanRL's are PPO's"""
    pixel_cost: bool = False
    """instead, measure what the k-SP cost of a state takes on Atari, by images as in the paper and by embeddings"""
    scaling: str | None = None
    """instead, measure PPO and SPRL against k, N, environments and grid size, into this folder"""
    child: str | None = None
    """(internal) measure one command line and print JSON"""


# ONE MEASUREMENT #####################################################################################################
def run_script(command, fill, burn_in, iterations):
    """Runs a script's main block with a clock at each section; returns seconds per part, steps/s and the namespace. The
    first `fill` iterations have one epoch and no RNet training: a ring costs what it costs when it is full."""
    script, *argv = command.split()
    source = (ROOT / script).read_text()
    source = re.sub(r"^( +)# ([A-Z ]+) #{9,}\n", r"\g<0>\g<1>tick('\2', globals())\n", source, flags=re.M)
    seconds, state = defaultdict(float), {"part": None, "since": 0.0, "iteration": 0, "start": 0.0}

    def timed(function, part):
        def wrapper(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            if state["part"] == "rest":  # the rollout and what is around it
                took = time.perf_counter() - begin
                seconds[part] += took
                seconds["rest"] -= took
            return result

        return wrapper

    def tick(section, namespace):
        now = time.perf_counter()
        seconds[state["part"]] += now - state["since"]
        if section == "ROLLOUT":
            state["iteration"] += 1
            if state["iteration"] == 1:
                namespace["envs"].step = timed(namespace["envs"].step, "environment")
                namespace["agent"].get_action_and_value = timed(
                    namespace["agent"].get_action_and_value, "policy forward"
                )
            if fill and state["iteration"] == 1:
                state["epochs"], state["next_step"] = namespace["args"].update_epochs, namespace["next_rnet_step"]
                namespace["args"].update_epochs, namespace["next_rnet_step"] = 1, float("inf")
            if fill and state["iteration"] == 1 + fill:
                namespace["args"].update_epochs, namespace["next_rnet_step"] = state["epochs"], state["next_step"]
            if state["iteration"] == 1 + fill + burn_in:
                seconds.clear()
                state["start"] = now
            if state["iteration"] == 1 + fill + burn_in + iterations:
                state["end"], state["seconds"] = now, dict(seconds)
        state["part"], state["since"] = SECTIONS.get(section, "rest"), time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [script, *argv, "--run-name", "bench"]
        module = types.ModuleType("__main__")
        module.__dict__.update(__file__=str(ROOT / script), tick=tick)
        sys.modules["__main__"] = module
        os.chdir(folder)
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(source, str(ROOT / script), "exec"), module.__dict__)
        os.chdir(ROOT)
    namespace = module.__dict__
    steps = iterations * namespace["batch_size"]
    return {part: state["seconds"].get(part, 0.0) for part in PARTS}, steps / (state["end"] - state["start"]), namespace


def plain_trunk(trunk, obs):
    """The same network as one would write it: the reference does not become faster with our convolutions."""
    import torch

    x = trunk.codes(obs).permute(0, 3, 1, 2)
    for conv in trunk.convs:
        x = conv(torch.nn.functional.pad(x, (0, 1, 0, 1)))
        x = torch.cat([x.relu(), (-x).relu()], 1)
    return x.permute(0, 2, 3, 1).flatten(1)


def run_cleanrl(env_id, iterations):
    """CleanRL's ppo.py arrangement at equal settings: float32 storage, SyncVectorEnv over FullyObsWrapper, and separate
    forward passes for the action and for the value."""
    import gymnasium as gym
    import numpy as np
    import torch
    from minigrid.wrappers import FullyObsWrapper

    sys.path.insert(0, str(ROOT))
    import ppo_sprl_minigrid as script

    args = script.Args(env_id=env_id)
    worlds = [lambda: FullyObsWrapper(gym.make(env_id, max_steps=100)) for _ in range(args.num_envs)]
    envs = gym.vector.SyncVectorEnv(worlds)
    shape = (args.num_steps, args.num_envs)
    image = envs.single_observation_space["image"]
    stack = gym.spaces.Box(0, 255, (1, *image.shape), np.uint8)
    space = types.SimpleNamespace(single_observation_space=stack, single_action_space=envs.single_action_space)
    agent = script.make_agent(space, args)
    agent.network[0].forward = types.MethodType(plain_trunk, agent.network[0])
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    obs = torch.zeros((*shape, *image.shape))
    actions, logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(5))
    next_obs = torch.Tensor(envs.reset(seed=1)[0]["image"])
    next_done = torch.zeros(args.num_envs)

    def network(batch):  # stored as floats, fed as the cell codes that the network expects
        return agent.network(batch.to(torch.uint8).unsqueeze(1))

    for iteration in range(2 + iterations):
        if iteration == 2:
            start = time.perf_counter()
        for step in range(args.num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                probs = torch.distributions.Categorical(logits=agent.actor(network(next_obs)))
                action = probs.sample()
                values[step] = agent.critic(network(next_obs)).flatten()
            actions[step], logprobs[step] = action, probs.log_prob(action)
            observed, reward, terminations, truncations, _ = envs.step(action.numpy())
            rewards[step] = torch.tensor(reward).view(-1)
            next_obs = torch.Tensor(observed["image"])
            next_done = torch.Tensor(np.logical_or(terminations, truncations))
        with torch.no_grad():
            next_value = agent.critic(network(next_obs)).flatten()
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(args.num_steps)):
                nonterminal = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                following = next_value if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * following * nonterminal - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * nonterminal * last
            returns = advantages + values
        b_obs, b_inds = obs.flatten(0, 1), np.arange(args.num_envs * args.num_steps)
        flat = [part.flatten() for part in (actions, logprobs, advantages, returns, values)]
        for _ in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for mb_inds in np.array_split(b_inds, args.num_minibatches):
                mb_actions, mb_logprobs, mb_advantages, mb_returns, mb_values = (part[mb_inds] for part in flat)
                hidden = network(b_obs[mb_inds])
                probs = torch.distributions.Categorical(logits=agent.actor(hidden))
                ratio = (probs.log_prob(mb_actions) - mb_logprobs).exp()
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * clipped).mean()
                newvalue = agent.critic(hidden).view(-1)
                v_clipped = mb_values + (newvalue - mb_values).clamp(-args.clip_coef, args.clip_coef)
                v_loss = 0.5 * torch.max((newvalue - mb_returns) ** 2, (v_clipped - mb_returns) ** 2).mean()
                loss = pg_loss - args.ent_coef * probs.entropy().mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
    return iterations * args.num_envs * args.num_steps / (time.perf_counter() - start)


def machine_gflops():
    """This machine's float32 matrix product, in the shape of the policy's fully connected layer."""
    import torch

    a, b = torch.randn(768, 784), torch.randn(784, 512)
    times = []
    for _ in range(40):
        begin = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - begin)
    return 2 * 768 * 784 * 512 / statistics.median(times) / 1e9


def update_gflop(namespace):
    """GFLOP of one policy update, forward and backward, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    agent, args, obs = namespace["agent"], namespace["args"], namespace["obs"]
    rows = namespace["batch_size"] // args.num_minibatches
    batch = obs[-1, :1].expand(rows, *obs.shape[2:])
    with FlopCounterMode(display=False) as counter:
        _, _, entropy, value = agent.get_action_and_value(batch)
        (entropy.mean() + value.mean()).backward()
    return counter.get_total_flops() * args.num_minibatches * args.update_epochs / 1e9


def trainings(args):
    """How often the RNet is trained in a run of these settings."""
    count, due, batch_size = 0, args.rnet_start, args.num_envs * args.num_steps
    for step in range(batch_size, args.total_timesteps + 1, batch_size):
        if step >= due:
            count, due = count + 1, step + args.rnet_intervals[min(step // 1_000_000, 2)]
    return count


def whole_run_sps(namespace, parts, rows, num_steps):
    """steps/s of a run of the script's own length, by calculation: what was measured, but the RNet's trainings, which
    are in their densest phase, as often as in the whole run."""
    whole, measured = namespace["Args"](), sum("rnet/triplets" in row for row in rows)
    seconds = (sum(parts.values()) - parts["rnet update"]) / num_steps * whole.total_timesteps
    if measured:
        seconds += parts["rnet update"] / measured * trainings(whole)
    return whole.total_timesteps / seconds


def child(args):
    import torch

    torch.set_num_threads(args.threads)
    sys.path.insert(0, str(ROOT))  # as if the scripts were run from where they are
    if args.child == "cleanrl":
        result = {"sps": run_cleanrl(args.env_id, args.iterations), "parts": {}}
    else:
        command = args.child if "--env-id" in args.child else f"{args.child} --env-id {args.env_id}"
        source = (ROOT / command.split()[0]).read_text()

        def setting(name):  # as the command says, else as the script does
            given = re.search(rf"--{name.replace('_', '-')} (\d+)", command) or re.search(
                rf"{name}: int = ([\d_]+)", source
            )
            return int(given[1]) if given else 0

        batch_size = setting("num_envs") * setting("num_steps")
        has_ring = "--cost-scale 0" not in command and "--rnet oracle" not in command
        fill = -(-setting("ring_size") // batch_size) if has_ring else 0
        iterations = fill + args.burn_in + args.iterations + 1  # one more, whose start ends the last that is measured
        command += f" --total-timesteps {iterations * batch_size}"
        parts, sps, namespace = run_script(command, fill, args.burn_in, args.iterations)
        gflops = update_gflop(namespace) * args.iterations / parts["policy update"]
        result = {"sps": sps, "parts": parts, "gflops": gflops, "steps": args.iterations * batch_size}
        rows = namespace["history"][fill + args.burn_in :][: args.iterations]
        result["whole_run_sps"] = whole_run_sps(namespace, parts, rows, result["steps"])
    result["machine_gflops"] = machine_gflops()
    result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


# ALL MEASUREMENTS ####################################################################################################
def measure(command, args):
    line = [sys.executable, __file__, "--child", command, "--env-id", args.env_id, "--burn-in", str(args.burn_in)]
    line += ["--iterations", str(args.iterations), "--threads", str(args.threads)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(args):
    results = defaultdict(list)
    for repetition in range(args.repetitions):
        for method in args.methods:
            results[method].append(measure(DOMAINS[args.domain][1][method], args))
            print(f"repetition {repetition + 1}, {method}: {results[method][-1]['sps']:.0f} steps/s", file=sys.stderr)
    median = {method: statistics.median(run["sps"] for run in runs) for method, runs in results.items()}
    whole = {m: statistics.median(run.get("whole_run_sps", run["sps"]) for run in runs) for m, runs in results.items()}
    print(f"{args.env_id}, {args.threads} threads, medians of {args.repetitions} interleaved repetitions\n")
    columns = "| method | steps/s (min to max) | of PPO in this precision | over a whole run (calculated) | "
    print(columns + " | ".join(PARTS) + " | peak MB | update GFLOP/s (matmul) |")
    print("|---" * (len(PARTS) + 6) + "|")
    for method, runs in results.items():
        sps = [run["sps"] for run in runs]
        base = "ppo-bf16" if method.endswith("-bf16") else "ppo"
        row = f"| {method} | {median[method]:.0f} ({min(sps):.0f} to {max(sps):.0f}) | "
        for measured in (median, whole):
            row += f"{measured[method] / measured[base]:.2f} | " if base in measured else "| "
        shares = [statistics.median(run["parts"].get(part, 0) for run in runs) for part in PARTS]
        total = sum(shares)
        row += " | ".join(f"{100 * share / total:.0f} %" if total else "" for share in shares)
        peak = max(run["peak_mb"] for run in runs)
        matmul = statistics.median(run["machine_gflops"] for run in runs)
        gflops = statistics.median(run["gflops"] for run in runs) if "gflops" in runs[0] else None
        print(row + f" | {peak:.0f} | " + (f"{gflops:.0f} ({matmul:.0f})" if gflops else f"({matmul:.0f})") + " |")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    if args.curves:
        print_seconds(args, median)


def print_seconds(args, sps, threshold=0.75):
    """The steps to the threshold, in the curves of a folder, over the measured steps/s."""
    sys.path.insert(0, str(ROOT / "analysis"))
    from curves import points, read_folder
    from scores import steps_to

    runs = read_folder(args.curves)[args.env_id]
    print(f"\n| method | seeds | median steps to a return of {threshold} | seconds | of PPO |\n|---|---|---|---|---|")
    base = None
    for method in args.methods:
        curves = [points(run, "return") for run in runs.get("ppo" if method == "cleanrl" else method.split("-")[0], [])]
        if curves:
            steps = statistics.median(steps_to(*curve, threshold, curve[0][-1]) for curve in curves)
            seconds = steps / sps[method]
            base = base or seconds
            print(f"| {method} | {len(curves)} | {steps:.0f} | {seconds:.1f} | {seconds / base:.2f} |")


def pixel_cost(args):
    """ms that the cost of a new state takes: embedding it and comparing it with N older ones. An RNet on differences of
    images has nothing to embed, every pair is a pass of the network."""
    import numpy as np
    import torch

    sys.path.insert(0, str(ROOT))
    import ppo_sprl_atari as script

    torch.set_num_threads(args.threads)
    results = defaultdict(dict)
    print(f"ms per state, width 16, {args.threads} threads, medians of {args.repetitions} repetitions\n")
    print("| N | pixel-difference | embedding-difference |\n|---|---|---|")
    for n in (1, 10, 50, 200):
        for rnet_input, states in (("pixel-difference", max(1, 200 // n)), ("embedding-difference", 256)):
            settings = script.Args(rnet_input=rnet_input, rnet_width=16)
            rnet, gaps = script.make_rnet(None, settings).eval(), settings.k + np.arange(1, n + 1)
            obs = torch.randint(256, (gaps[-1] + states, 1, 4, 84, 84), dtype=torch.uint8)
            segment_steps, times = np.full((states, 1), gaps[-1]), []
            old = script.embed_all(rnet, obs[: gaps[-1]])
            for _ in range(1 + args.repetitions):
                begin = time.perf_counter()
                embeddings = torch.cat([old, script.embed_all(rnet, obs[gaps[-1] :])])
                script.ksp_cost(rnet, embeddings, segment_steps, gaps, 90.0)
                times.append(1000 * (time.perf_counter() - begin) / states)
            results[n][rnet_input] = statistics.median(times[1:])  # the first is for warming up
        print(f"| {n} | {results[n]['pixel-difference']:.2f} | {results[n]['embedding-difference']:.2f} |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


def draw_scaling(rows, path):
    """Draws rows of (against what, value, precision, PPO's steps/s, SPRL's, the constraint's ms), these with ranges."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sweeps = list(dict.fromkeys(row[0] for row in rows))
    figure, axes = plt.subplots(2, len(sweeps), figsize=(3 * len(sweeps) + 2, 5), layout="constrained", sharey="row")
    lines = (0, "PPO", "#0072B2"), (0, "SPRL", "#D55E00"), (1, "cost and RNet training", "#D55E00")
    for column, name in enumerate(sweeps):
        for precision, style in (("fp32", "o--"), ("bf16", "o-")):
            _, values, _, *series = zip(*(row for row in rows if row[0] == name and row[2] == precision))
            for (row, label, color), measured in zip(lines, series):
                middle, low, high = zip(*measured)
                axes[row, column].plot(values, middle, style, color=color, label=f"{label}, {precision}")
                axes[row, column].fill_between(values, low, high, color=color, alpha=0.2, linewidth=0)
        for axis in axes[:, column]:
            axis.set_xscale("log" if name == "environments" else "linear")
            axis.set_xticks(values, [f"{value // 1000}K" if value >= 1000 else value for value in values])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel(name)
    axes[0, 0].set_ylabel("steps/s")
    axes[1, 0].set_ylabel("ms per 1000 steps")
    for axis in axes[:, 0]:
        axis.set_ylim(0, None)
    for axis in axes[:, -1]:
        axis.legend(loc="lower left", bbox_to_anchor=(1, 0))
    figure.savefig(path, dpi=110)


def scaling(args):
    """steps/s and the constraint's own time of SPRL against what they depend on, beside PPO at the same setting."""
    base = "--k 2 --num-tolerance-samples 60 --num-envs 12 --num-steps 256 --env-id MiniGrid-FourRooms-7x7-v0"
    sweeps = {  # the flags that change, and whether PPO has them too
        "k": (False, {k: f"--k {k}" for k in (2, 10, 20)}),
        "N": (False, {n: f"--num-tolerance-samples {n}" for n in (1, 60, 120, 240)}),
        "environments": (True, {n: f"--num-envs {n} --num-steps {max(16, 3072 // n)}" for n in (1, 12, 64, 256)}),
        "grid side": (True, {side: f"--env-id MiniGrid-FourRooms-{side}x{side}-v0" for side in (7, 11)}),
        "ring size": (False, {n: f"--ring-size {n}" for n in (15_000, 60_000)}),
    }
    folder = Path(args.scaling)
    folder.mkdir(parents=True, exist_ok=True)
    points, runs = {}, defaultdict(list)
    for name, (shared, settings) in sweeps.items():
        for value, changed in settings.items():
            flags = dict(zip(base.split()[::2], base.split()[1::2]))
            flags |= dict(zip(changed.split()[::2], changed.split()[1::2]))
            flags = " ".join(f"{flag} {setting}" for flag, setting in flags.items())
            for precision, end in (("fp32", ""), ("bf16", "-bf16")):
                ppo, sprl = METHODS[f"ppo{end}"], METHODS[f"sprl{end}"]
                points[name, value, precision] = f"{ppo} {flags if shared else base}", f"{sprl} {flags}"
    jobs = list(dict.fromkeys(job for pair in points.values() for job in pair))
    for repetition in range(args.repetitions):
        for number, job in enumerate(jobs, 1):
            runs[job].append(measure(job, args))
            where = f"repetition {repetition + 1} of {args.repetitions}, {number} of {len(jobs)}"
            print(f"{where}, {job}: {runs[job][-1]['sps']:.0f} steps/s", file=sys.stderr)

    def constraint(run):  # milliseconds per 1000 steps in the cost and in the RNet's training
        return 1e6 * (run["parts"]["intrinsic reward"] + run["parts"]["rnet update"]) / run["steps"]

    rows = []
    for point, jobs in points.items():
        sps = [[run["sps"] for run in runs[job]] for job in jobs]
        cost = [constraint(run) for run in runs[jobs[1]]]
        rows.append((*point, *((statistics.median(x), min(x), max(x)) for x in (*sps, cost))))
    with open(folder / "scaling.csv", "w", newline="") as file:
        writer = csv.writer(file)
        columns = ("ppo_steps_per_s", "sprl_steps_per_s", "constraint_ms_per_1000_steps")
        ends = [f"{column}{end}" for column in columns for end in ("", "_min", "_max")]
        writer.writerow(("against", "value", "precision", *ends))
        writer.writerows((*row[:3], *(round(x) for triple in row[3:] for x in triple)) for row in rows)
    draw_scaling(rows, folder / "scaling.png")


if __name__ == "__main__":
    args = tyro.cli(Args)
    world, known = DOMAINS[args.domain]
    args.env_id, args.methods = args.env_id or world, args.methods or tuple(known)
    unknown = set(args.methods) - set(known)
    if unknown:
        print(f"bench_speed.py: error: --methods {sorted(unknown)}, accepted: {', '.join(known)}", file=sys.stderr)
        sys.exit(2)
    task = child if args.child else scaling if args.scaling else pixel_cost if args.pixel_cost else compare
    task(args)
