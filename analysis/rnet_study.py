"""Trains a script's RNet alone, on the same steps of a random agent whatever the setting, and judges it on new ones.

    python analysis/rnet_study.py ppo_sprl_atari.py --flags="--env-id Freeway-v5 --rnet-width 16" --out study.csv
    python analysis/rnet_study.py ppo_sprl_fetch.py --keep-positives --label kept --out study.csv

Command, commit and a row per RNet training are added to the CSV file: the held-out accuracy of Appendix B, on the
newest rollout before the RNet trains on it; the same near the ends of segments; training accuracy; the norm of the
weights.
"""

import csv
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from common import ROOT, check_ranges, fail, load_script, parse_args
from tqdm import tqdm


@dataclass
class Args:
    script: tyro.conf.Positional[str]  # ppo_sprl_*.py
    flags: str = ""  # flags of that script, in quotes
    steps: int = 30_000  # environment steps of the random agent
    label: str = "default"  # name of the setting, a column of the CSV
    keep_positives: bool = False  # train also on positives that have no negative in their segment, as the authors do
    out: str = "rnet_study.csv"  # the CSV file


def lone_positives(script, segment_steps, k, negative_bias):
    """Anchors, positives, environments (3, B): all states too near their segment's end to have a negative, shuffled."""
    ends = script.segment_ends(segment_steps)
    to_end = ends - np.arange(len(ends))[:, None]
    anchors, envs = ((to_end >= 1) & (to_end < k + negative_bias)).nonzero()
    order = np.random.permutation(len(anchors))
    anchors, envs = anchors[order], envs[order]
    positives = np.random.randint(anchors + 1, np.minimum(anchors + k, ends[anchors, envs]) + 1)
    return np.stack([anchors, positives, envs])


@torch.inference_mode()
def judge(script, rnet, args, obs, segment_steps):
    """Accuracies on states (T, N) that are new to the RNet: of Appendix B's pairs, of positives that are too near their
    segment's end to have a negative, and of negatives that near to it."""
    num_envs, embeddings = segment_steps.shape[1], script.embed_all(rnet, obs)
    pairs = script.sample_heldout(segment_steps, args.k, args.tolerance, args.negative_bias, args.heldout_pairs)
    lone = lone_positives(script, segment_steps, args.k, args.negative_bias)[:, : args.heldout_pairs]
    if not pairs.shape[1] or not lone.shape[1]:
        return {}
    near, far = script.compare_all(rnet, embeddings, *torch.from_numpy(pairs)).chunk(2)
    late_rows, envs = np.divmod(pairs[1, len(near) :], num_envs)
    is_last = script.segment_ends(segment_steps)[late_rows, envs] - late_rows < args.k + args.negative_bias
    lone = script.compare_all(rnet, embeddings, *torch.from_numpy(lone[:2] * num_envs + lone[2]))
    accuracies = {"heldout_accuracy": torch.cat([near > 0, far <= 0]), "positives_near_end": lone > 0}
    accuracies["negatives_near_end"] = far[torch.from_numpy(is_last)] <= 0
    return {name: right.float().mean().item() for name, right in accuracies.items()}


def loss_with_lone_positives(rnet, triplets, lone, label_smoothing):
    """rnet_loss with positives that have no negative, in the same batch: (3, B, ...) and (2, L, ...) states."""
    anchors, positives, negatives = triplets
    embeddings = rnet.embed(torch.cat([anchors, lone[0], positives, lone[1], negatives]))
    early, late = embeddings[: len(anchors) + len(lone[0]), 0], embeddings[len(anchors) + len(lone[0]) :, 1]
    logits = rnet.compare(torch.cat([early, early[: len(anchors)]]), late)
    is_positive = torch.arange(len(logits)) < len(early)
    labels = torch.where(is_positive, 1 - label_smoothing / 2, label_smoothing / 2)
    accuracy = ((logits > 0) == is_positive).float().mean()
    return 2 * F.binary_cross_entropy_with_logits(logits, labels), accuracy


def study(script, args, num_steps, keep_positives):
    """Plays and trains as the script does, with random actions; a row for each training."""
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    envs, rng = script.make_envs(args), np.random.default_rng(args.seed)
    envs.single_action_space.seed(args.seed)
    rnet = script.make_rnet(envs, args).eval()
    optimizer = torch.optim.Adam(rnet.parameters(), lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay)
    shape, is_image = (args.num_steps + 1, args.num_envs), hasattr(script, "FrameRing")
    space = envs.single_observation_space
    obs = torch.from_numpy(np.zeros((*shape, *space.shape), space.dtype))
    segment_steps, episode_steps, done = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape[1], bool)
    obs[-1] = torch.from_numpy(envs.reset(seed=args.seed)[0])
    ring = (script.FrameRing if is_image else script.Ring)(args.ring_size // args.num_envs, obs)
    read = ring.read if is_image else lambda rows, envs: ring.obs[rows, envs]
    rows, next_training = [], args.rnet_start
    for step in tqdm(range(0, num_steps, args.num_envs * args.num_steps)):
        obs[0], segment_steps[0], episode_steps[0] = obs[-1], segment_steps[-1], episode_steps[-1]
        for t in range(args.num_steps):
            if hasattr(envs.single_action_space, "n"):
                actions = rng.integers(envs.single_action_space.n, size=args.num_envs)
            else:
                actions = rng.standard_normal((args.num_envs, *envs.single_action_space.shape)).astype(np.float32)
            next_obs, reward, terminations, truncations, _ = envs.step(actions)
            obs[t + 1] = torch.from_numpy(next_obs)
            segment_steps[t + 1] = np.where(~done & (reward == 0), segment_steps[t] + 1, 0)
            episode_steps[t + 1] = np.where(done, 0, episode_steps[t] + 1)
            done = terminations | truncations
        ring.add(obs[1:], segment_steps[1:], *([episode_steps[1:]] if is_image else []))
        step += args.num_envs * args.num_steps
        if step < next_training:
            continue
        next_training = step + args.rnet_intervals[0]
        row = {"step": step, **judge(script, rnet, args, obs[1:], segment_steps[1:])}
        indices = ring.rows(ring.size)
        steps_of_ring = ring.segment_steps[indices]
        triplets = script.sample_triplets(steps_of_ring, args.k, args.negative_bias, args.positive_bias)
        triplets = torch.from_numpy(triplets[:, : args.rnet_triplets])
        lone = torch.from_numpy(lone_positives(script, steps_of_ring, args.k, args.negative_bias))
        share = lone.shape[1] / (
            ring.size * args.num_envs - lone.shape[1]
        )  # as many as Algorithm 1 meets beside others
        lone = lone.split(round(share * args.rnet_batch_size), 1)
        accuracies = []
        rnet.train()
        for i, mb in enumerate(triplets.split(args.rnet_batch_size, 1)):
            states = read(indices[mb[:3]], mb[3])
            if keep_positives and i < len(lone):
                lone_states = read(indices[lone[i][:2]], lone[i][2])
                loss, accuracy = loss_with_lone_positives(rnet, states, lone_states, args.label_smoothing)
            else:
                loss, accuracy = script.rnet_loss(rnet, *states, args.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracies.append(accuracy)
        rnet.eval()
        weights = [part.detach() for part in rnet.parameters() if part.ndim > 1]
        row |= {"train_accuracy": torch.stack(accuracies).mean().item()}
        row |= {"weight_norm": torch.nn.utils.get_total_norm(weights).item(), "triplets": triplets.shape[1]}
        rows.append(row)
    envs.close()
    return rows


def main(args):
    check_ranges(args, steps=(1, 2**31 - 1))
    path = args.script if os.path.isfile(args.script) else str(ROOT / args.script)
    if not os.path.isfile(path):
        fail(f"{args.script}: no such file, accepted: a script ppo_sprl_*.py")
    script = load_script(path)
    run_args = tyro.cli(script.Args, args=shlex.split(args.flags))
    rows = study(script, run_args, args.steps, args.keep_positives)
    columns = ["label", "env_id", "seed", "step", "heldout_accuracy", "positives_near_end", "negatives_near_end"]
    columns += ["train_accuracy", "weight_norm", "triplets"]
    is_new = not os.path.exists(args.out)
    with open(args.out, "a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        commit = subprocess.getoutput(f"git -C '{ROOT}' describe --always --dirty --exclude=*")
        command = shlex.join(["python", "analysis/rnet_study.py", *sys.argv[1:]])
        file.write(f"# command: {command}\n# commit: {commit}\n")
        for row in rows:
            row = {name: round(value, 4) for name, value in row.items()}
            writer.writerow({"label": args.label, "env_id": run_args.env_id, "seed": run_args.seed, **row})
            print(args.label, row)


if __name__ == "__main__":
    main(parse_args(Args))
