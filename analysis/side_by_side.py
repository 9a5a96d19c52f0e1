"""Draws two agents side by side on one layout; a step's k-SP cost is the colour of its piece of the trail.

    python analysis/side_by_side.py results/agents/<env>__ppo__s1.pt results/agents/<env>__sprl__s1.pt
    python analysis/side_by_side.py runs/<ppo>/agent.pt runs/<sprl>/agent.pt --judge learned --seed 2 --out pictures

Both agents play the same fresh layouts. Drawn is not a chosen layout but the most typical one: where steps and cost of
both agents are nearest to their medians over all layouts. Both are judged alike, by the true reachability of MiniGrid
or by the RNet of the second checkpoint, with k, Dt, N and percentile of the second. A trail is shaken a little, so that
what overlaps is seen and turning in place becomes a scribble.
"""

import os
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import tyro
from common import check_ranges, fail, load_rnet, load_run, load_script, parse_args, written_whole
from curves import method_label, method_name
from evaluate import play, summary
from oracle import Oracle, get_state, set_state
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm
from trajectories import SPRL, VIEWS, Recorder, find_domain, first_episodes, step_costs

COLOURS = ((86, 180, 233), (230, 159, 0))  # of cost 0 and 1; Okabe and Ito's, which the colour-blind tell apart
TILE, BAR, SCALE = 48, 34, 2  # pixels of a grid square and of a line of text; drawn larger and then made smaller
NAMES = ("k", "tolerance", "num_tolerance_samples", "cost_percentile")


@dataclass
class Args:
    left: tyro.conf.Positional[str]  # path of the first agent.pt, e.g. PPO's
    right: tyro.conf.Positional[str]  # path of the second agent.pt, e.g. SPRL's, whose settings judge both
    layouts: int = 100  # fresh layouts that both agents play, 1 to 10000
    seed: int = 1  # of the layouts and of the sampled actions, at least 0
    judge: Literal["oracle", "learned"] = "oracle"  # who tells the cost: the true reachability or the second's RNet
    script: str | None = None  # your own script, if the second agent is of a changed copy
    out: str = "."  # folder of side_by_side.gif


# PLAY ################################################################################################################
def film(run, k):
    """The rows of `play`, and the episodes by environment and order of play; the worlds' oracle, and its states by
    their numbers, from which a world is drawn."""
    oracle, states = Oracle(run.envs, k - 1), {}

    def observe():
        numbers = oracle.observe()
        states.update(zip(numbers.tolist(), map(get_state, run.envs.worlds)))
        return numbers

    recorder = Recorder(run.envs, *VIEWS["MiniGrid"][:2], observe)
    rows = play(recorder, run.agent, run.quotas, run.world_seed)
    episodes = sorted(first_episodes(recorder.finished, run.quotas), key=lambda episode: episode.env)  # a stable sort
    return rows, episodes, oracle, states


def most_typical(numbers):
    """The row of (layouts, numbers) nearest the medians, each number measured in its mean distance from its median."""
    distances = np.abs(numbers - np.median(numbers, 0))
    return int((distances / np.maximum(distances.mean(0), 1e-9)).sum(1).argmin())


# DRAW ################################################################################################################
def trail(states, rng):
    """Where the agent was (T + 1, 2), in squares: shaken, and therefore a line also where it turns in place."""
    return np.array([state[2] for state in states]) + 0.5 + rng.uniform(-0.3, 0.3, (len(states), 2))


def draw_panel(world, states, line, costs, step):
    """The world at a step, an image of SCALE times its size, and the trail that led there."""
    set_state(world, states[step])
    image = Image.fromarray(world.get_frame(highlight=False, tile_size=TILE * SCALE))
    canvas, points, half = ImageDraw.Draw(image), line * TILE * SCALE, 1.5 * SCALE
    for t in range(step):
        colour, ends = COLOURS[int(costs[t])], [tuple(points[t]), tuple(points[t + 1])]
        canvas.line(ends, colour, int(2 * half))
        for x, y in ends:  # round ends
            canvas.ellipse((x - half, y - half, x + half, y + half), colour)
    x, y = points[step]
    canvas.ellipse((x - 3 * half, y - 3 * half, x + 3 * half, y + 3 * half), "white", "black", SCALE)  # here it is now
    return image


def draw(worlds, films, names, judge_name):
    """The GIF's frames: both worlds at step 0, 1, ...; the shorter episode waits at its end."""
    font, small = (ImageFont.load_default(size * SCALE) for size in (17, 13))
    margin, lines = 8 * SCALE, [trail(states, np.random.default_rng(0)) for states, *_ in films]
    width, height = (TILE * SCALE * size for size in (worlds[0].width, worlds[0].height))
    frames = []
    for step in tqdm(range(1 + max(len(costs) for *_, costs in films)), "frames"):
        image = Image.new("RGB", (2 * width + 3 * margin, height + 2 * BAR * SCALE), "white")
        canvas, top = ImageDraw.Draw(image), BAR * SCALE
        for i, (world, (states, rewards, costs)) in enumerate(zip(worlds, films)):
            now, left = min(step, len(costs)), margin + i * (width + margin)
            image.paste(draw_panel(world, states, lines[i], costs, now), (left, top))
            title = f"{names[i]}   step {now}   return {sum(rewards[:now]):.2f}   cost {int(sum(costs[:now]))}"
            canvas.text((left, top // 2), title, "black", font, "lm")
        left, middle = margin, top + height + top // 2
        for colour, words in zip(COLOURS, ("k-SP cost 0", "k-SP cost 1: there was a shorter way")):
            canvas.line([(left, middle), (left + 24 * SCALE, middle)], colour, 5 * SCALE)
            canvas.text((left + 30 * SCALE, middle), words, "black", small, "lm")
            left += int(small.getlength(words)) + 50 * SCALE
        canvas.text((image.width - margin, middle), f"judge: {judge_name}", "black", small, "rm")
        frames.append(image.resize((image.width // SCALE, image.height // SCALE), Image.Resampling.LANCZOS))
    return frames


def write_gif(frames, path):
    """Ten frames a second, the last one stays for two seconds; one palette for all, or colours would flicker."""
    both = Image.new("RGB", (frames[0].width, 2 * frames[0].height))
    both.paste(frames[0], (0, 0))
    both.paste(frames[-1], (0, frames[0].height))
    palette = both.quantize(128, dither=Image.Dither.NONE)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [100] * (len(images) - 1) + [2_000]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=True)


def main(args):
    check_ranges(args, layouts=(1, 10_000), seed=(0, float("inf")))
    runs = [load_run(args.left, args.layouts, args.seed), load_run(args.right, args.layouts, args.seed, args.script)]
    for path, run in zip((args.left, args.right), runs):
        if find_domain(run) != "MiniGrid":
            fail(f"{path} plays {run.args.env_id}, accepted: agents of MiniGrid")
    worlds = [f"{run.args.env_id} in {run.envs.num_envs} environments" for run in runs]
    if worlds[0] != worlds[1]:
        fail(f"{args.left} plays {worlds[0]}, {args.right} {worlds[1]}, accepted: two that play the same")
    if args.judge == "learned" and "rnet" not in runs[1].checkpoint:
        fail(f"{args.right} has no RNet for --judge learned, accepted: an agent.pt of SPRL, or --judge oracle")
    sprl = load_script(SPRL)
    k, tolerance, num_samples, percentile = (getattr(runs[1].args, name, getattr(sprl.Args, name)) for name in NAMES)
    gaps = k + tolerance * np.arange(1, num_samples + 1)
    names, films, numbers, random_state = [], [], [], torch.get_rng_state()
    for run in runs:
        torch.set_rng_state(random_state)  # the episodes of evaluate.py
        names.append(method_name(method_label(os.path.basename(run.script.__file__), vars(run.args))))
        rows, episodes, judge, states = film(run, k)
        if args.judge == "learned":
            judge = load_rnet(runs[1], args.right)
        costs = [step_costs(episode, sprl, judge, gaps, percentile) for episode in tqdm(episodes, "costs")]
        films.append([([states[n] for n in e.states], e.rewards, found) for e, found in zip(episodes, costs)])
        numbers.append([(len(found), found.mean()) for found in costs])
        cost = np.concatenate(costs).mean()
        print(f"{names[-1]}: {summary(*list(zip(*rows))[1:], args.seed)}, cost {cost:.3f} a step")
    numbers = np.concatenate(numbers, 1)  # (layouts, 4)
    chosen = most_typical(numbers)
    for name, drawn, usual in zip(names, *(found.reshape(2, 2) for found in (numbers[chosen], np.median(numbers, 0)))):
        print(f"drawn of {name}: {drawn[0]:g} steps, cost {drawn[1]:.2f} a step; medians {usual[0]:g}, {usual[1]:.2f}")
    judge_name = f"{'true reachability' if args.judge == 'oracle' else 'the RNet'}, k = {k}"
    with written_whole(args.out, "side_by_side.gif") as (path,):
        frames = draw([run.envs.worlds[0] for run in runs], [played[chosen] for played in films], names, judge_name)
        write_gif(frames, path)
        size = os.path.getsize(path)
    print(f"{os.path.join(args.out, 'side_by_side.gif')}: {len(frames)} frames, {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(parse_args(Args))
