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
    ORACLE,
    SPRL,
    assert_uniform,
    fake_envs,
    farama,
    handle_objects,
    load,
    random_frames,
    random_segments,
    slow_ends,
    steps,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analysis.oracle import Oracle


# RING ################################################################################################################
@settings(max_examples=40)
@given(num_rows=st.integers(1, 12), lengths=st.lists(st.integers(1, 12), max_size=6))
@example(num_rows=7, lengths=[3, 3, 3, 7, 2])
def test_ring_keeps_the_newest_rows_in_order(num_rows, lengths):
    """Against the end of a plain list; rollouts that do not divide the ring."""
    ring, written = load(CANONICAL).Ring(num_rows, torch.zeros((1, 2, 1, 1, 3), dtype=torch.uint8)), 0
    assert ring.obs.dtype == torch.uint8
    for length in (min(length, num_rows) for length in lengths):
        ids = torch.arange(written, written + length)[:, None] * 2 + torch.arange(2)  # (length, 2), all different
        ring.add(ids[..., None, None, None].expand(-1, -1, 1, 1, 3).to(torch.uint8), ids.numpy())
        written += length
        rows, newest = ring.rows(ring.size), 2 * torch.arange(written)[-num_rows:]
        assert ring.size == len(newest)
        for n in range(2):
            assert ring.segment_steps[rows, n].tolist() == (newest + n).tolist()
            assert ring.obs[rows, n, 0, 0, 2].tolist() == ((newest + n) % 256).tolist()
        assert ring.rows(1).tolist() == rows.tolist()[-1:]


# TRIPLETS ############################################################################################################
def walk_algorithm_1(segment_steps, k, negative_bias, positive_bias, rng):
    """Algorithm 1 as the paper prints it, one environment (T,): (anchor, positive, negative) triplets."""
    triplets = []
    for t in range(len(segment_steps)):
        if t == 0 or segment_steps[t] == 0:
            end = t
            while end + 1 < len(segment_steps) and segment_steps[end + 1] > 0:
                end += 1
            while t + k + negative_bias <= end:
                positive, nearest = rng.integers(t + 1, t + k + 1), t + k + negative_bias
                triplets.append((t, positive, rng.integers(nearest, end + 1)))
                t = rng.integers(positive + 1, positive + positive_bias + 1)
    return triplets


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), cut=st.sampled_from([0.0, 0.02, 0.1, 0.5]), k=st.integers(1, 6),
       negative_bias=st.integers(0, 25), positive_bias=st.integers(1, 7),
       num_rows=st.integers(1, 120), num_envs=st.integers(1, 4))  # fmt: skip
def test_triplets_obey_algorithm_1(seed, cut, k, negative_bias, positive_bias, num_rows, num_envs):
    """All in their ranges and segments; anchors form one unbroken chain from each segment's first frame."""
    np.random.seed(seed % 2**32)
    segment_steps = random_segments(np.random.default_rng(seed), num_rows, num_envs, cut)
    ends = slow_ends(segment_steps)
    triplets = load(CANONICAL).sample_triplets(segment_steps, k, negative_bias, positive_bias)
    firsts = [(t, n) for t, n in np.ndindex(*segment_steps.shape) if t == 0 or segment_steps[t, n] == 0]
    following = {(n, ends[t, n]): range(t, t + 1) for t, n in firsts}  # where a segment's next anchor may lie
    for anchor, positive, negative, n in triplets.T[np.argsort(triplets[0])].tolist():
        end, nearest = ends[anchor, n], anchor + k + negative_bias
        assert anchor in following[n, end]
        assert anchor < positive <= anchor + k <= end
        assert nearest <= negative <= end
        following[n, end] = range(positive + 1, positive + positive_bias + 1)
    for (_, end), rows in following.items():  # none is missing: only one too near to the end may be
        assert rows[-1] + k + negative_bias > end


def test_triplets_are_distributed_as_algorithm_1_walks(script):
    """4,000 environments with the same four segments: how often each anchor, gap and negative is drawn."""
    np.random.seed(1)
    rng, num_envs, settings_ = np.random.default_rng(1), 4000, (3, 7, 4)
    segment_steps = np.concatenate([np.arange(2, 22), np.arange(10), np.arange(11), np.arange(35)])
    slow = np.array(
        [triplet for _ in range(num_envs) for triplet in walk_algorithm_1(segment_steps, *settings_, rng)]
    ).T
    fast = script.sample_triplets(np.repeat(segment_steps[:, None], num_envs, 1), *settings_)
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
    assert_uniform(firsts[2], 10, 19)


def test_anchor_gaps_are_uniform(script):
    """In one endless segment: positive - anchor on 1..k, next anchor - positive on 1..Delta+."""
    np.random.seed(2)
    triplets = script.sample_triplets(np.arange(20_000)[:, None], 4, 20, 5)
    anchors, positives = triplets[:2, np.argsort(triplets[0])]
    assert anchors[0] == 0 and len(anchors) == pytest.approx(20_000 / (2.5 + 3), rel=0.05)
    assert_uniform(positives - anchors, 1, 4)
    assert_uniform(anchors[1:] - positives[:-1], 1, 5)


def test_the_first_triplets_are_a_fair_choice(script):
    """They are shuffled: the first 500 of some thousand come from everywhere."""
    np.random.seed(3)
    triplets = script.sample_triplets(np.repeat(np.arange(4000)[:, None], 3, 1), 2, 20, 5)
    assert triplets.shape[1] == pytest.approx(3 * 4000 / (1.5 + 3), rel=0.05)
    anchors, _, _, envs = triplets[:, :500]
    assert_uniform(anchors * 10 // 3979, 0, 9)
    assert_uniform(envs, 0, 2)


def test_short_segments_have_no_triplets(script):
    """k + Delta- = 6: a segment of 6 states has none, one of 7 has exactly the pair of its first and last state."""
    for length, expected in ((6, 0), (7, 3)):
        triplets = script.sample_triplets(np.tile(np.arange(length), 3)[:, None], 1, 5, 5)
        assert triplets.shape == (4, expected)
        assert (triplets[2] - triplets[0] == 6).all() and (triplets[0] % 7 == 0).all()


def test_segment_ends(script):
    for seed, cut in enumerate((0.0, 0.1, 0.5, 1.0)):
        segment_steps = random_segments(np.random.default_rng(seed), 50, 4, cut)
        np.testing.assert_array_equal(script.segment_ends(segment_steps), slow_ends(segment_steps))


def test_heldout_pairs(script):
    """Appendix B with k = 2, Dt = 1, Delta- = 4: positives from 1..3 behind t, negatives from 7..11."""
    np.random.seed(5)
    segment_steps = random_segments(np.random.default_rng(5), 300, 3, 0.04)
    ends = slow_ends(segment_steps)
    rows, envs = np.divmod(script.sample_heldout(segment_steps, 2, 1, 4, 30_000), 3)
    assert rows.shape == (2, 60_000) and (envs == envs[0, np.arange(60_000) % 30_000]).all()
    assert (rows[0, :30_000] == rows[0, 30_000:]).all()
    rows, positives, negatives, envs = rows[0, :30_000], rows[1, :30_000], rows[1, 30_000:], envs[0, :30_000]
    usable = np.arange(300)[:, None] + 7 <= ends
    index = np.cumsum(usable).reshape(usable.shape) - 1  # the usable states, counted
    assert usable[rows, envs].all()
    assert_uniform(index[rows, envs], 0, usable.sum() - 1)
    assert_uniform(positives - rows, 1, 3)
    for room in range(7, 13):  # states whose segment goes on for `room` more; 12: for longer than the range
        here = np.minimum(ends[rows, envs] - rows, 12) == room
        assert_uniform((negatives - rows)[here], 7, min(room, 11))
    assert script.sample_heldout(np.arange(7)[:, None], 2, 1, 4, 10).shape == (2, 0)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), cut=st.sampled_from([0.0, 0.05, 0.3, 1.0]), k=st.integers(1, 6),
       tolerance=st.integers(0, 3), negative_bias=st.integers(0, 12), num_rows=st.integers(1, 60),
       num_envs=st.integers(1, 4))  # fmt: skip
def test_heldout_pairs_obey_appendix_b(seed, cut, k, tolerance, negative_bias, num_rows, num_envs):
    """Every pair in its range and its segment; there are pairs if a walk finds usable states."""
    np.random.seed(seed)
    segment_steps = random_segments(np.random.default_rng(seed), num_rows, num_envs, cut)
    ends, reach = slow_ends(segment_steps), k + tolerance
    pairs = load(CANONICAL).sample_heldout(segment_steps, k, tolerance, negative_bias, 100)
    usable = (np.arange(num_rows)[:, None] + reach + negative_bias <= ends).any()
    assert pairs.shape == (2, 200 if usable else 0)
    for i, ((t, late), (n, late_n)) in enumerate(np.stack(np.divmod(pairs, num_envs)).transpose(2, 0, 1).tolist()):
        assert n == late_n
        if i < 100:
            assert t < late <= t + reach
        else:
            assert t + reach + negative_bias <= late <= min(t + reach + 2 * negative_bias, ends[t, n])


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


def test_rnet_loss_by_hand(script):
    """Smoothing 0.2 makes the labels 0.9 and 0.1. Embeddings are numbers, a pair's logit is their difference."""
    anchors, positives, negatives = torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 1.5]])  # logits 0, 2 and -1, 0.5

    def cross_entropy(logit, label):
        r = 1 / (1 + math.exp(-logit))
        return -label * math.log(r) - (1 - label) * math.log(1 - r)

    rnet = SimpleNamespace(embed=lambda x: torch.stack([x, x], 1), compare=lambda early, late: early - late)
    for smoothing, label in ((0.0, 1.0), (0.2, 0.9)):
        expected = (cross_entropy(0, label) + cross_entropy(2, label)) / 2
        expected += (cross_entropy(-1, 1 - label) + cross_entropy(0.5, 1 - label)) / 2
        loss, accuracy = script.rnet_loss(rnet, anchors, positives, negatives, smoothing)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert accuracy.item() == 0.5  # 2 > 0 and -1 < 0; 0 and 0.5 are wrong


# COST ################################################################################################################
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
    segment_steps = np.zeros((num_frames, num_envs), np.int64)
    for t in range(1, num_frames):
        segment_steps[t] = np.where(rewards[t - 1] | began[t - 1], 0, segment_steps[t - 1] + 1)
    table = torch.from_numpy(scale * rng.normal(size=(num_frames * num_envs,) * 2)).float()
    numbers = torch.arange(num_frames * num_envs).view(num_frames, num_envs, 1, 1).expand(-1, -1, 2, -1)
    rnet = SimpleNamespace(compare=lambda early, late: table[early[:, 0], late[:, 0]])
    settings_, gaps = (k, tolerance, num_samples, q), k + tolerance * np.arange(1, num_samples + 1)
    costs = load(CANONICAL).ksp_cost(rnet, numbers, segment_steps[-num_steps:], gaps, q)
    scores = table.sigmoid().view(num_frames, num_envs, num_frames, num_envs).diagonal(dim1=1, dim2=3)
    assert_costs(costs, scores, rewards, began, *settings_, first=num_frames - num_steps - 1)


@pytest.mark.parametrize("num_samples", [1, 60])
@pytest.mark.parametrize("flags", ["", " --stack-observations 2"])
def test_reward_of_a_run_is_eq_15(run, num_samples, flags):
    """The last of nine rollouts, in which the RNet was not trained: r + lambda (bias - c), with the cost by Eq. 14 from
    the states that the ring holds, each embedded by itself."""
    flags += f" --cost-bias 0.25 --max-episode-steps 100 --num-tolerance-samples {num_samples} --ring-size 4000"
    result = run(SPRL + flags + steps(9))
    args, ring, rnet = result["args"], result["ring"], result["rnet"]
    rows = ring.rows(ring.size)
    assert len(rows) == 9 * args.num_steps + 1 and "rnet/loss" not in result["history"][-1]
    states, segments = ring.obs[rows], ring.segment_steps[rows]
    cut = segments[1:] == 0  # by a reward or by a new episode
    scores = pair_scores(rnet, states[:, :, -1])
    bonus = (result["total_rewards"] - torch.from_numpy(result["rewards"])) / args.cost_scale
    costs = (args.cost_bias - bonus).round(decimals=4)
    settings_ = (args.k, args.tolerance, num_samples, args.cost_percentile)
    assert_costs(costs, scores, cut, np.zeros_like(cut), *settings_, first=8 * args.num_steps)
    assert 0.02 < costs.mean() < 0.98
    rate = costs[torch.from_numpy(result["valid"])].mean().item()
    assert result["history"][-1]["sprl/cost_rate"] == pytest.approx(rate, abs=1e-5)
    assert all("sprl/cost_rate" in row for row in result["history"])  # judged before the gate opens, too


def test_heldout_accuracy_of_a_run(script, run):
    """Before the first training an untrained network judges the newest rollout: the same pairs, frame by frame."""
    result = run(SPRL + " --seed 5" + steps(8))
    accuracies = [row.get("rnet/heldout_accuracy") for row in result["history"]]
    assert [accuracy is None for accuracy in accuracies] == 4 * [True, False]
    assert accuracies[1] == pytest.approx(0.5, abs=0.2)
    args, segments = result["args"], result["segment_steps"][1:]
    frames, embeddings = result["obs"][1:], script.embed_all(result["rnet"], result["obs"][1:])
    pairs = script.sample_heldout(segments, args.k, args.tolerance, args.negative_bias, 500)
    early, late = torch.from_numpy(pairs)
    mine = script.compare_all(result["rnet"], embeddings, early, late, chunk=64).sigmoid()
    expected = pair_scores(result["rnet"], frames[:, :, -1])[early // 4, late // 4, early % 4]
    torch.testing.assert_close(mine, expected)


def test_trainings_are_as_far_apart_as_asked(run):
    """rnet_start and the interval are two rollouts."""
    history = run(SPRL + steps(7))["history"]
    assert ["rnet/loss" in row for row in history] == [False, True, False, True, False, True, False]


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
    envs, plain = script.GridWorlds(env_id, 1, 1, 100), farama(env_id).unwrapped
    oracle = Oracle(envs, k - 1)
    envs.reset(seed=seed), plain.reset(seed=seed)
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


def test_oracle_remembers_the_window(run):
    """A window of 62 steps is many rollouts of 8 long. The oldest state that is compared is still known."""
    flags = (
        "--max-episode-steps 100 --num-tolerance-samples 60 --cost-percentile 100 --num-steps 8 --total-timesteps 384"
    )
    result = run(f"{ORACLE} --env-id MiniGrid-Empty-16x16-v0 {flags}")
    assert result["window"] == 62 and result["segment_steps"].max() > 80
    assert 0 < result["charts"]["sprl/cost_rate"] <= 1


def test_oracle_leaves_the_world_untouched(script):
    """A twin that is never looked at goes the same way, episode after episode."""
    rng = np.random.default_rng(10)
    watched, twin = (script.GridWorlds(KEY_DOORS, 2, 1, 60) for _ in range(2))
    watched.reset(seed=0), twin.reset(seed=0)
    oracle = Oracle(watched, 2)
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
