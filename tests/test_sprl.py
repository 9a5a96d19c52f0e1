"""Triplets, k-SP cost, reachability network, ring and oracle against slow readings of the paper."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import (
    CANONICAL,
    FOUR_ROOMS,
    KEY_DOORS,
    SPRL,
    assert_uniform,
    fake_envs,
    farama,
    handle_objects,
    load,
    random_ages,
    random_frames,
    slow_ends,
    snapshot,
    steps,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st


# RING ################################################################################################################
@settings(max_examples=40)
@given(num_rows=st.integers(1, 12), lengths=st.lists(st.integers(1, 30), max_size=6), train_after=st.integers(0, 6))
@example(num_rows=7, lengths=[3, 3, 3, 20, 2], train_after=3)
def test_ring_keeps_the_newest_rows_in_order(num_rows, lengths, train_after):
    """Against the end of a plain list; rollouts that do not divide the ring, and that are longer than it."""
    ring = load(CANONICAL).Ring(num_rows, 2, (1, 1, 3), torch.uint8, torch.device("cpu"))
    assert ring.frames.dtype == torch.uint8
    written, unseen = 0, 0
    for i, length in enumerate(lengths):
        ids = torch.arange(written, written + length)[:, None] * 2 + torch.arange(2)  # (length, 2), all different
        ring.add(ids[..., None, None, None].expand(-1, -1, 1, 1, 3).to(torch.uint8), -ids, ids)
        written, unseen = written + length, unseen + length
        rows, newest = ring.rows(ring.size), 2 * torch.arange(written)[-num_rows:]
        assert ring.size == len(newest) and ring.unseen == min(unseen, num_rows)
        for n in range(2):
            assert ring.ages[rows, n].tolist() == (newest + n).tolist() == (-ring.depths[rows, n]).tolist()
            assert ring.frames[rows, n, 0, 0, 2].tolist() == ((newest + n) % 256).tolist()
        assert ring.rows(ring.unseen).tolist() == rows.tolist()[len(rows) - ring.unseen :]
        if i == train_after:
            ring.unseen = unseen = 0


# TRIPLETS ############################################################################################################
def walk_algorithm_1(ages, k, negative_bias, positive_bias, negative_cap, rng):
    """Algorithm 1 as the paper prints it, one environment (T,): (anchor, positive, negative) triplets."""
    triplets = []
    for t in range(len(ages)):
        if t == 0 or ages[t] == 0:
            end = t
            while end + 1 < len(ages) and ages[end + 1] > 0:
                end += 1
            while t + k + negative_bias <= end:
                positive, nearest = rng.integers(t + 1, t + k + 1), t + k + negative_bias
                furthest = min(end, int(nearest + 0.1 * (k + negative_bias))) if negative_cap else end
                triplets.append((t, positive, rng.integers(nearest, furthest + 1)))
                t = rng.integers(positive + 1, positive + positive_bias + 1)
    return triplets


def real_triplets(script, ages, *settings_, num_triplets=None):
    *triplets, count = script.sample_triplets(torch.as_tensor(ages), *settings_, num_triplets or ages.size)
    return torch.stack(triplets)[:, : int(count)].numpy(), int(count)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), cut=st.sampled_from([0.0, 0.02, 0.1, 0.5]), k=st.integers(1, 6),
       negative_bias=st.integers(0, 25), positive_bias=st.integers(1, 7), cap=st.booleans(),
       num_rows=st.integers(1, 120), num_envs=st.integers(1, 4))  # fmt: skip
def test_triplets_obey_algorithm_1(seed, cut, k, negative_bias, positive_bias, cap, num_rows, num_envs):
    """All in their ranges and segments; anchors form one unbroken chain from each segment's first frame."""
    torch.manual_seed(seed)
    ages = random_ages(np.random.default_rng(seed), num_rows, num_envs, cut)
    ends = slow_ends(ages)
    triplets, count = real_triplets(load(CANONICAL), ages, k, negative_bias, positive_bias, cap)
    assert triplets.shape == (4, count)
    firsts = [(t, n) for t, n in np.ndindex(*ages.shape) if t == 0 or ages[t, n] == 0]
    following = {(n, ends[t, n]): range(t, t + 1) for t, n in firsts}  # where a segment's next anchor may lie
    for anchor, positive, negative, n in triplets.T[np.argsort(triplets[0])].tolist():
        end, nearest = ends[anchor, n], anchor + k + negative_bias
        assert anchor in following[n, end]
        assert anchor < positive <= anchor + k <= end
        assert nearest <= negative <= (min(end, nearest + (k + negative_bias) // 10) if cap else end)
        following[n, end] = range(positive + 1, positive + positive_bias + 1)
    for (_, end), rows in following.items():  # none is missing: only one too near to the end may be
        assert rows[-1] + k + negative_bias > end


@pytest.mark.parametrize("cap", [False, True])
def test_triplets_are_distributed_as_algorithm_1_walks(script, cap):
    """4,000 environments with the same four segments: how often each anchor, gap and negative is drawn."""
    torch.manual_seed(1)
    rng, num_envs, settings_ = np.random.default_rng(1), 4000, (3, 7, 4, cap)
    ages = np.concatenate([np.arange(2, 22), np.arange(10), np.arange(11), np.arange(35)])
    slow = np.array([triplet for _ in range(num_envs) for triplet in walk_algorithm_1(ages, *settings_, rng)]).T
    fast, _ = real_triplets(script, np.repeat(ages[:, None], num_envs, 1), *settings_)
    for describe in (
        lambda anchors, positives, negatives: anchors,
        lambda anchors, positives, negatives: 100 * anchors + positives,
        lambda anchors, positives, negatives: 100 * anchors + negatives,
    ):
        counts = [np.bincount(describe(*triplets[:3]), minlength=10_000) for triplets in (slow, fast)]
        deviations = (counts[1] - counts[0]) / np.sqrt(np.maximum(1, counts[0] + counts[1]))
        assert np.abs(deviations).max() < 5
    firsts = fast[:, fast[0] == 0]  # every environment's first anchor
    assert firsts.shape[1] == num_envs
    assert_uniform(firsts[1], 1, 3)
    assert_uniform(firsts[2], 10, 11 if cap else 19)


def test_anchor_gaps_are_uniform(script):
    """In one endless segment: positive - anchor on 1..k, next anchor - positive on 1..Delta+."""
    torch.manual_seed(2)
    (anchors, positives, _, _), count = real_triplets(script, np.arange(20_000)[:, None], 4, 20, 5, False)
    order = np.argsort(anchors)
    anchors, positives = anchors[order], positives[order]
    assert anchors[0] == 0 and count == pytest.approx(20_000 / (2.5 + 3), rel=0.05)
    assert_uniform(positives - anchors, 1, 4)
    assert_uniform(anchors[1:] - positives[:-1], 1, 5)


def test_fewer_triplets_are_a_fair_choice(script):
    """Of more triplets than asked for: as many as asked, all different, from everywhere; the count says all."""
    torch.manual_seed(3)
    *triplets, count = script.sample_triplets(torch.arange(4000).expand(3, -1).T, 2, 20, 5, False, 500)
    anchors, positives, _, envs = torch.stack(triplets)
    assert len(set(zip(anchors.tolist(), envs.tolist()))) == 500
    assert int(count) == pytest.approx(3 * 4000 / (1.5 + 3), rel=0.05)
    assert_uniform((anchors * 10 // 3979).tolist(), 0, 9)
    assert_uniform(envs.tolist(), 0, 2)
    assert (positives - anchors).max() <= 2  # none of them is filled up from unusable ones


def test_short_segments_have_no_triplets(script):
    """k + Delta- = 6: a segment of 6 frames has none, one of 7 has exactly the pair of its first and last frame."""
    for length, expected in ((6, 0), (7, 3)):
        triplets, count = real_triplets(script, np.tile(np.arange(length), 3)[:, None], 1, 5, 5, False)
        assert count == expected
        assert (triplets[2] - triplets[0] == 6).all() and (triplets[0] % 7 == 0).all()


def test_segment_ends(script):
    for seed, cut in enumerate((0.0, 0.1, 0.5, 1.0)):
        ages = random_ages(np.random.default_rng(seed), 50, 4, cut)
        np.testing.assert_array_equal(script.segment_ends(torch.from_numpy(ages)).numpy(), slow_ends(ages))


def test_uniform_includes_both_ends(script):
    torch.manual_seed(4)
    low = torch.full((6000,), 3)
    assert_uniform(script.uniform(low, low + 2).tolist(), 3, 5)
    assert script.uniform(low, low).eq(3).all()


def test_heldout_pairs(script):
    """Appendix B with k = 2, Dt = 1, Delta- = 4: positives from 1..3 behind t, negatives from 7..11."""
    torch.manual_seed(5)
    ages = random_ages(np.random.default_rng(5), 300, 3, 0.04)
    ends = slow_ends(ages)
    rows, positives, negatives, envs, count = script.sample_heldout(torch.from_numpy(ages), 2, 1, 4, 30_000)
    usable = np.arange(300)[:, None] + 7 <= ends
    assert int(count) == usable.sum()
    index = np.cumsum(usable).reshape(usable.shape) - 1  # the usable frames, counted
    assert usable[rows, envs].all()
    assert_uniform(index[rows, envs], 0, int(count) - 1)
    assert_uniform((positives - rows).tolist(), 1, 3)
    ends = torch.from_numpy(ends)[rows, envs]
    for room in range(7, 13):  # frames whose segment goes on for `room` more; 12: for longer than the range
        here = (ends - rows).clamp(max=12) == room
        assert_uniform((negatives - rows)[here].tolist(), 7, min(room, 11))
    *_, count = script.sample_heldout(torch.arange(7)[:, None], 2, 1, 4, 10)
    assert int(count) == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), cut=st.sampled_from([0.0, 0.05, 0.3, 1.0]), k=st.integers(1, 6),
       tolerance=st.integers(0, 3), negative_bias=st.integers(0, 12), num_rows=st.integers(1, 60),
       num_envs=st.integers(1, 4))  # fmt: skip
def test_heldout_pairs_obey_appendix_b(seed, cut, k, tolerance, negative_bias, num_rows, num_envs):
    """Every pair in its range and its segment; usable frames counted by walking."""
    torch.manual_seed(seed)
    ages = random_ages(np.random.default_rng(seed), num_rows, num_envs, cut)
    ends, reach = slow_ends(ages), k + tolerance
    *pairs, count = load(CANONICAL).sample_heldout(torch.from_numpy(ages), k, tolerance, negative_bias, 100)
    assert int(count) == (np.arange(num_rows)[:, None] + reach + negative_bias <= ends).sum()
    for t, positive, negative, n in torch.stack(pairs).T.tolist() if int(count) else ():
        assert t < positive <= t + reach
        assert t + reach + negative_bias <= negative <= min(t + reach + 2 * negative_bias, ends[t, n])


# NETWORK #############################################################################################################
def make_rnet(script):
    torch.manual_seed(6)
    return script.make_rnet(fake_envs(), script.Args())


def pair_scores(rnet, frames):
    """R(frame i, frame j) for all pairs (T, T, ...) of (T, ...) frames: a plain layer on the concatenation."""
    concatenated = nn.Linear(2 * rnet.early.in_features, rnet.early.out_features)
    with torch.no_grad():
        concatenated.weight.copy_(torch.cat([rnet.early.weight, rnet.late.weight], 1))
        concatenated.bias.copy_(rnet.early.bias)
        embedding = rnet.branch(frames.flatten(0, -4).unsqueeze(1)).unflatten(0, frames.shape[:-3])
        pairs = [
            embedding[:, None].expand(-1, len(frames), *embedding.shape[1:]),
            embedding[None].expand(len(frames), *embedding.shape),
        ]
        return rnet.head(concatenated(torch.cat(pairs, -1))).squeeze(-1).sigmoid()


def test_split_comparator_is_the_concatenated_one(script):
    rnet, frames = make_rnet(script), random_frames(9)
    assert rnet.early.weight.shape == rnet.late.weight.shape == (256, 128) and rnet.late.bias is None
    early, late = rnet.embed(frames.unsqueeze(1)).unbind(1)
    mine = torch.stack([rnet.compare(early[i].expand(9, -1), late) for i in range(9)]).sigmoid()
    torch.testing.assert_close(mine, pair_scores(rnet, frames))
    anchors, positives, negatives = frames.unsqueeze(1).chunk(3)
    with torch.no_grad():
        logits = script.rnet_logits(rnet, anchors, positives, negatives)
    for logit, offset in zip(logits, (3, 6)):
        torch.testing.assert_close(logit.sigmoid(), pair_scores(rnet, frames)[range(3), range(offset, offset + 3)])


def test_rnet_loss_by_hand(script):
    """Smoothing 0.2 makes the labels 0.9 and 0.1."""
    positive, negative = torch.tensor([0.0, 2.0]), torch.tensor([-1.0, 0.5])

    def cross_entropy(logit, label):
        r = 1 / (1 + math.exp(-logit))
        return -label * math.log(r) - (1 - label) * math.log(1 - r)

    for smoothing, label in ((0.0, 1.0), (0.2, 0.9)):
        expected = (cross_entropy(0, label) + cross_entropy(2, label)) / 2
        expected += (cross_entropy(-1, 1 - label) + cross_entropy(0.5, 1 - label)) / 2
        assert script.rnet_loss(positive, negative, smoothing).item() == pytest.approx(expected, rel=1e-6)
    assert script.rnet_accuracy(positive, negative).item() == 0.5  # 2 > 0 and -1 < 0; 0 and 0.5 are wrong


# COST ################################################################################################################
def test_percentile_is_numpys(script):
    rng = np.random.default_rng(7)
    for n in [*range(1, 32), 60, 61, 200]:
        scores = rng.random((3, 2, n), np.float32)
        for q in (0, 1, 33.3, 50, 57, 75, 90, 95, 99.9, 100):
            expected = np.percentile(scores, q, axis=-1)
            np.testing.assert_allclose(script.percentile(torch.from_numpy(scores), q), expected, atol=1e-6)


def slow_cost(scores, rewards, began, t, n, k, tolerance, num_samples, q):
    """Eq. 14 as printed, with N samples: rewards[j] and began[j] (an autoreset) belong to the step from frame j."""
    outputs = []
    for sample in range(1, num_samples + 1):
        old = t - k - sample * tolerance
        one_segment = old >= 0 and not any(rewards[j, n] or began[j, n] for j in range(old, t))
        outputs.append(float(scores[old, t, n]) if one_segment else 0.0)
    p = np.percentile(outputs, q)
    return None if abs(p - 0.5) < 1e-5 else float(p > 0.5)  # None: too near to tell in float32


def assert_costs(costs, *slow_arguments, first=0):
    """The costs (T, N) of the frames behind frame `first`, one by one."""
    for t, n in np.ndindex(*costs.shape):
        expected = slow_cost(*slow_arguments[:3], first + t + 1, n, *slow_arguments[3:])
        assert expected is None or costs[t, n] == expected, (t, n)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 25), num_envs=st.integers(1, 4), k=st.integers(1, 8),
       tolerance=st.integers(0, 4), num_samples=st.integers(1, 12), q=st.floats(0, 100),
       cut=st.sampled_from([0.0, 0.02, 0.2, 1.0]), scale=st.sampled_from([1.0, 1e4]))  # fmt: skip
def test_cost_of_any_outputs_is_eq_14(seed, num_steps, num_envs, k, tolerance, num_samples, q, cut, scale):
    """A network that looks every pair of frames up in a table of random outputs, some saturated."""
    rng, num_frames = np.random.default_rng(seed), k + num_samples * tolerance + 1 + num_steps
    rewards, began = (rng.random((num_frames - 1, num_envs)) < cut / 2 for _ in range(2))
    ages = np.zeros((num_frames, num_envs), np.int64)
    for t in range(1, num_frames):
        ages[t] = np.where(rewards[t - 1] | began[t - 1], 0, ages[t - 1] + 1)
    table = torch.from_numpy(scale * rng.normal(size=(num_frames * num_envs,) * 2)).float()
    numbers = torch.arange(num_frames * num_envs).view(num_frames, num_envs, 1, 1).expand(-1, -1, 2, -1)
    rnet = SimpleNamespace(chunk=50, compare=lambda early, late: table[early[:, 0], late[:, 0]])
    settings_ = (k, tolerance, num_samples, q)
    costs = load(CANONICAL).ksp_cost(rnet, numbers, ages[-num_steps:], *settings_)
    scores = table.sigmoid().view(num_frames, num_envs, num_frames, num_envs).diagonal(dim1=1, dim2=3)
    assert_costs(costs, scores, rewards, began, *settings_, first=num_frames - num_steps - 1)


@pytest.mark.parametrize("num_samples, q", [(1, 90.0), (60, 90.0), (7, 40.0)])
@pytest.mark.parametrize("tolerance", [0, 1, 2, 3])
def test_cost_over_several_rollouts(script, num_samples, q, tolerance):
    """Four rollouts with rows carried over, as the main block does: embeddings kept or made anew, by Eq. 14."""
    k, num_steps, num_envs, rng = 2, 30, 3, np.random.default_rng(8)
    frames = random_frames(4 * num_steps + 1, num_envs)
    rewards = (rng.random((4 * num_steps, num_envs)) < 0.02) * 0.5
    began = rng.random((4 * num_steps, num_envs)) < 0.02
    began[:, 2] = rewards[:, 2] = 0  # here the whole window is used
    rnet = make_rnet(script)
    rnet.chunk = 100
    logits = pair_scores(rnet, frames).logit()
    with torch.no_grad():  # a network that says yes in some cases
        rnet.head[-1].bias -= logits.quantile(0.5 if num_samples == 1 else q / 100 - 0.02)
    scores = pair_scores(rnet, frames)

    past = k + num_samples * tolerance
    rows = past + num_steps + 1
    obs, ages = torch.zeros((rows, *frames.shape[1:]), dtype=torch.uint8), np.zeros((rows, num_envs), np.int64)
    obs[past], kept, costs = frames[0], None, []
    for start in range(0, 4 * num_steps, num_steps):
        obs[past + 1 :] = frames[start + 1 : start + 1 + num_steps]
        for t in range(num_steps):
            cut = (rewards[start + t] != 0) | began[start + t]
            ages[past + t + 1] = np.where(cut, 0, ages[past + t] + 1)
        with torch.inference_mode():
            anew = rnet.embed(obs.flatten(0, 1).unsqueeze(1)).unflatten(0, (rows, num_envs))
            kept = anew if kept is None else torch.cat([kept[num_steps:], anew[past + 1 :]])
            settings_ = (k, tolerance, num_samples, q)
            mine, again = (script.ksp_cost(rnet, x, ages[past + 1 :], *settings_) for x in (kept, anew))
        assert torch.equal(mine, again)
        costs.append(mine)
        obs[: past + 1], ages[: past + 1] = obs[num_steps:].clone(), ages[num_steps:].copy()
    costs = torch.cat(costs)
    assert 0.02 < costs.mean() < 0.98
    assert_costs(costs, scores, rewards, began, k, tolerance, num_samples, q)


@pytest.mark.parametrize("num_samples", [1, 60])
def test_reward_of_a_run_is_eq_15(run, num_samples):
    """A whole run: r + lambda (bias - c) with the cost by Eq. 14 from the network as it was then, and r before that."""
    flags = f" --cost-bias 0.25 --max-episode-steps 100 --num-tolerance-samples {num_samples}"
    probe = snapshot("obs rewards valid total_rewards rnet")
    result = run(SPRL + flags + steps(9), probes={"ADVANTAGE": probe})
    args, trace, costs = result["args"], result["trace"], []
    frames = [shot["obs"][-args.num_steps - 1 : -1] for shot in trace]
    frames = torch.cat([*frames, trace[-1]["obs"][-1:]])
    rewards, began = np.concatenate([shot["rewards"] for shot in trace]), ~np.concatenate([s["valid"] for s in trace])
    assert began.any() and rewards.any()
    for i, shot in enumerate(trace):
        bonus = (shot["total_rewards"] - torch.from_numpy(shot["rewards"])) / args.cost_scale
        assert bonus.any() == (i >= 2)  # the first training is behind the second rollout
        if i < 2:
            continue
        costs.append((args.cost_bias - bonus).round(decimals=4))
        oldest = max(0, i * args.num_steps + 1 - args.k - args.tolerance * num_samples)  # that the window can touch
        scores = pair_scores(shot["rnet"], frames[oldest : (i + 1) * args.num_steps + 1])
        settings_ = (args.k, args.tolerance, num_samples, args.cost_percentile)
        first = i * args.num_steps - oldest
        assert_costs(costs[-1], scores, rewards[oldest:], began[oldest:], *settings_, first=first)
        same = all(torch.equal(a, b) for a, b in zip(shot["rnet"].parameters(), trace[i - 1]["rnet"].parameters()))
        assert same == (i % 2 == 1)  # the network learned between the rollouts every other time
    assert 0.02 < torch.cat(costs).mean() < 0.98
    rates = [row["cost_rate"] for row in result["history"] if "cost_rate" in row]
    for rate, cost, shot in zip(rates, costs, trace[2:], strict=True):
        assert rate == pytest.approx(cost[torch.from_numpy(shot["valid"])].mean().item(), abs=1e-5)


def test_heldout_accuracy_of_a_run(script, run):
    """Measured before the network trains, on the two rollouts since it last did or as many rows of them as the cost was
    asked of, frame by frame."""
    probes = {
        "UPDATE RNET": "torch_rng = torch.get_rng_state()\n" + snapshot("torch_rng obs ages past rnet embeddings"),
        "LOG": "trace[-1]['charts'] = dict(charts)",
    }
    result = run(SPRL + steps(6), probes=probes)
    args, trace = result["args"], result["trace"]
    for i, shot in enumerate(trace):
        assert ("rnet/heldout_accuracy" in shot["charts"]) == (i % 2 == 1)
        if i % 2 == 0:
            continue
        rollouts = [trace[i - 1], shot]
        frames, ages = (
            torch.cat([torch.as_tensor(r[name][r["past"] : -1]) for r in rollouts]) for name in ("obs", "ages")
        )
        assert (shot["embeddings"] is not None) == (i > 1)
        if i > 1:
            frames, ages = frames[-len(shot["embeddings"]) + 1 :], ages[-len(shot["embeddings"]) + 1 :]
        torch.set_rng_state(shot["torch_rng"])
        *rows, envs, _ = script.sample_heldout(ages, args.k, args.tolerance, args.negative_bias, args.heldout_pairs)
        scores = pair_scores(shot["rnet"], frames)
        anchors, positives, negatives = rows
        right = torch.cat([scores[anchors, positives, envs] > 0.5, scores[anchors, negatives, envs] < 0.5])
        assert shot["charts"]["rnet/heldout_accuracy"].item() == pytest.approx(right.float().mean().item(), abs=0.002)
    accuracies = [row["rnet_accuracy"] for row in result["history"] if "rnet_accuracy" in row]
    assert len(accuracies) == 3 and accuracies[1] != 0.5


def test_schedule_by_hand(script):
    """6 steps apart before 1M, 12 before 2M, 36 after; ready when the last 20 accuracies average above 0.75."""
    schedule, intervals = script.Schedule(5, False), (6, 12, 36)
    for step, gap in ((0, 6), (999_999, 6), (1_000_000, 12), (1_999_999, 12), (2_000_000, 36)):
        schedule.trained(step, intervals, [0.5], 0.75)
        assert schedule.next_step == step + gap and not schedule.ready
    for accuracies, ready in (([0.76] * 20, True), ([0.74] * 9, True), ([0.74], False), ([1.0] * 5, True)):
        schedule.trained(0, intervals, accuracies, 0.75)
        assert schedule.ready == ready


# ORACLE ##############################################################################################################
def signature(world):
    """All that the dynamics know of a state."""
    carrying = world.carrying and (world.carrying.type, world.carrying.color)
    return world.grid.encode().tobytes(), tuple(map(int, world.agent_pos)), int(world.agent_dir), carrying


def roll_out(world, depth):
    """Signatures of the states that action sequences of at most `depth` lead to, each played on a copy."""
    found = {signature(world)}
    for action in range(world.action_space.n if depth else 0):
        after = copy.deepcopy(world)
        ended = after.step(action)[2]
        found |= {signature(after)} if ended else roll_out(after, depth - 1)
    return found


@pytest.mark.parametrize("env_id", [KEY_DOORS, FOUR_ROOMS])
@pytest.mark.parametrize("k, num_early", [(2, 40), (3, 12), (4, 4)])
def test_oracle_is_what_roll_outs_reach(script, env_id, k, num_early):
    """One episode in which the key is taken and dropped and the door opened and shut, or the goal found; all of its
    states as the late ones, most of all states before a change of the grid as the early ones."""
    rng, seed, ended = np.random.default_rng(9), 3, False
    envs, plain = script.GridWorlds(env_id, 1, 100), farama(script, env_id).unwrapped
    envs.reset(seed=seed), plain.reset(seed=seed)
    oracle = script.Oracle(envs.worlds, k - 1)
    numbers, states, copies = [], [], []
    for _ in range(90):
        numbers.append(oracle.observe()[0])
        states.append(signature(plain))
        copies.append(copy.deepcopy(plain))
        if ended:
            break
        action = handle_objects(plain, rng)
        envs.step(np.array([action]))
        ended = plain.step(action)[2]
    changes = [t for t in range(len(states) - 1) if states[t][0] != states[t + 1][0]]
    assert len(changes) >= 4 or (env_id == FOUR_ROOMS and ended)
    early = (changes + list(range(len(states) - 2, 0, -2)))[:num_early]
    numbers, num_reached = torch.tensor(np.array(numbers))[:, None], 0
    for t in early:
        reached = roll_out(copies[t], k - 1)
        expected = [state in reached for state in states]
        assert (oracle.compare(numbers[t].expand_as(numbers), numbers) > 0).tolist() == expected
        num_reached += sum(expected)
    assert num_reached > len(early)


def test_oracle_leaves_the_world_untouched(script):
    """A twin that is never looked at goes the same way, episode after episode."""
    rng = np.random.default_rng(10)
    watched, twin = (script.GridWorlds(KEY_DOORS, 2, 60) for _ in range(2))
    watched.reset(seed=0), twin.reset(seed=0)
    oracle = script.Oracle(watched.worlds, 2)
    for _ in range(150):
        oracle.observe()
        actions = np.array([handle_objects(world, rng) for world in twin.worlds])
        for mine, expected in zip(watched.step(actions)[:4], twin.step(actions)[:4]):
            np.testing.assert_array_equal(mine, expected)
        for mine, expected in zip(watched.worlds, twin.worlds):
            assert signature(mine) == signature(expected) and mine.step_count == expected.step_count
            assert mine.np_random.bit_generator.state == expected.np_random.bit_generator.state
            places = [
                [tuple(cell.cur_pos) for cell in w.grid.grid if cell and cell.can_pickup()] for w in (mine, expected)
            ]
            assert places[0] == places[1]  # what PutNext tasks are judged by
