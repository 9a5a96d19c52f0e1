"""Atari: single frames and their stacks against EnvPool's own, rewards and positions; the networks and the cost against
slow readings; then a whole run whose frames are stamped, so that every stack and every pair can be told."""

import difflib

import envpool
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import BATCH, fake_envs, load, random_ages, snapshot, steps
from test_sprl import slow_cost

ATARI = "ppo_sprl_atari.py"
MONTEZUMA, ASTEROIDS = "MontezumaRevenge-v5", "Asteroids-v5"
INPUTS = ("pixel-difference", "embedding-difference")
META = torch.device("meta")


@pytest.fixture(scope="module")
def atari():
    return load(ATARI)


@pytest.fixture(scope="module")
def asteroids(atari):
    return atari.AtariGames(ASTEROIDS, 3, 12)


def games(num_actions=18):
    return fake_envs((84, 84, 1), num_actions)


def random_frames(*shape):
    """(*shape, 84, 84, 1) bytes, of 6 x 6 patches that can be told apart."""
    patches = torch.randint(256, (*shape, 6, 6), dtype=torch.uint8)
    return patches.repeat_interleave(14, -1).repeat_interleave(14, -2).unsqueeze(-1)


# GAMES ###############################################################################################################
def test_stacks_are_envpools_own(atari, asteroids):
    """The same seed and actions with stack_num=4, through three episodes: equal from the very first frame on, for
    EnvPool fills an episode's first stack with its first frame, too. The row after an end is that frame, unrewarded."""
    envs = asteroids
    options = envs.make.keywords | {"stack_num": 4}
    reference = envpool.make_gymnasium(ASTEROIDS, seed=5, **options)
    frames, depths = torch.zeros(40, 3, 84, 84, 1, dtype=torch.uint8), torch.zeros(40, 3, dtype=torch.int64)
    frames[0], expected = torch.from_numpy(envs.reset(seed=5)[0]), reference.reset()[0]
    rng, done, everyone, ends = np.random.default_rng(0), np.zeros(3, bool), torch.arange(3), 0
    for t in range(40):
        stacks = atari.stack_frames(frames, depths, torch.full((3,), t), everyone, 3)
        np.testing.assert_array_equal(stacks[..., 0], expected, err_msg=f"step {t}")
        if t == 39:
            break
        actions = rng.integers(18, size=3)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        expected, plain_rewards, plain_terminations, plain_truncations, info = reference.step(actions)
        np.testing.assert_array_equal(rewards, plain_rewards)
        np.testing.assert_array_equal(rewards, info["reward"])
        np.testing.assert_array_equal(terminations, plain_terminations)
        assert not rewards[done].any() and not (terminations | truncations)[done].any()
        frames[t + 1], depths[t + 1] = torch.from_numpy(obs), (depths[t] + 1) * torch.from_numpy(~done)
        np.testing.assert_array_equal(truncations, (depths[t + 1] == 12).numpy() & ~terminations)
        done = terminations | truncations
        ends += done.sum()
    assert ends == 9 and obs.shape == (3, 84, 84, 1) and obs.dtype == np.uint8
    assert len(torch.unique(frames[:12, 0].flatten(1), dim=0)) > 6, "too dull for a test"


def test_all_18_actions_and_the_papers_options(asteroids):
    """Asteroids alone would offer 14. No life ends an episode, no reward is clipped, no action sticks."""
    pool = getattr(asteroids, "pool", None) or asteroids.make(seed=0)
    assert asteroids.single_action_space.n == pool.action_space.n == 18
    wanted = dict(
        stack_num=1, frame_skip=4, img_height=84, img_width=84, gray_scale=True, episodic_life=False,
        reward_clip=False, repeat_action_probability=0.0, max_episode_steps=12, noop_max=30, use_fire_reset=True,
    )  # fmt: skip
    assert wanted.items() <= pool.config.items()


def test_both_ends_at_once_are_a_termination(atari):
    class Pool:
        def step(self, actions):
            flags = np.array([True, True, False]), np.array([True, False, True])
            return np.zeros((3, 1, 84, 84), np.uint8), np.zeros(3), *flags, {"ram": np.zeros((3, 128))}

    envs = atari.AtariGames(ASTEROIDS, 3, 7)
    envs.pool = Pool()
    _, _, terminations, truncations, _ = envs.step(np.zeros(3))
    assert terminations.tolist() == [True, True, False] and truncations.tolist() == [False, False, True]


def test_learning_rewards_are_clipped(atari):
    rewards = np.float32([[0, 20, -3], [0.5, -0.2, 1]])
    clipped = atari.AtariGames(ASTEROIDS, 3, 7).learning_rewards(rewards, np.ones((2, 3), bool))
    assert clipped.tolist() == np.float32([[0, 1, -1], [0.5, -0.2, 1]]).tolist() and clipped.dtype == np.float32
    assert rewards[0, 1] == 20, "the raw ones stay"


def test_policy_is_the_nature_network(atari):
    """Layer by layer, on numbers: 84 -> 20 -> 9 -> 7 places, 512 features."""
    torch.manual_seed(0)
    network = atari.NatureCNN((84, 84, 1), 4)
    obs = torch.randint(0, 256, (2, 4, 84, 84, 1), dtype=torch.uint8)
    x = obs[..., 0].float() / 255
    shapes = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    convs = [layer for layer in network.convs if isinstance(layer, torch.nn.Conv2d)]
    assert [tuple(conv.weight.shape) for conv in convs] == shapes and network.dense.weight.shape == (512, 64 * 7 * 7)
    for conv, stride in zip(convs, (4, 2, 1)):
        x = torch.nn.functional.conv2d(x, conv.weight, conv.bias, stride).clamp(min=0)
    x = (x.flatten(1) @ network.dense.weight.T + network.dense.bias).clamp(min=0)
    torch.testing.assert_close(network(obs), x, rtol=1e-4, atol=1e-5)


def test_positions_are_those_in_the_ram(atari, capsys):
    """By hand, then in the game: the agent starts in room 1 at (77, 235), and LEFT takes it to the left by 4 a step."""
    envs = atari.AtariGames(MONTEZUMA, 2, 60)
    envs.ram = np.arange(256, dtype=np.uint8).reshape(2, 128)  # bytes 3, 42, 43 and 131, 170, 171
    assert envs.positions().tolist() == [[3 * 256 + 42, 43], [131 % 24 * 256 + 170, 171]]
    envs.ram[:, 3] = 23
    assert (envs.positions() < envs.map_size).all() and envs.map_size == (24 * 256, 256)
    envs.reset(seed=1)
    assert envs.positions().tolist() == 2 * [[256 + 77, 235]]
    for action in (0, 0, 0, 0, 0, 4, 4, 4):  # it lands, then goes
        envs.step(np.full(2, action))
    assert envs.positions().tolist() == 2 * [[256 + 77 - 12, 235]]
    with pytest.raises(SystemExit) as exit_:
        atari.AtariGames(ASTEROIDS, 1, 7).positions()
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and ASTEROIDS in error and MONTEZUMA in error


def test_unknown_id_is_refused(run, capsys, tmp_path):
    """One line that names the nearest ids."""
    for env_id, said in (("Montezuma-v5", MONTEZUMA), ("Astroids-v5", ASTEROIDS), ("FetchReach-v4", "close")):
        with pytest.raises(SystemExit) as exit_:
            run(f"--env-id {env_id}", ATARI)
        error = capsys.readouterr().err
        assert exit_.value.code == 2 and error.count("\n") == 1 and f"--env-id {env_id}" in error
        assert said in error.split("; all:")[0]
    assert list(tmp_path.iterdir()) == [] and difflib.get_close_matches("Astroids-v5", [ASTEROIDS])


# NETWORKS ############################################################################################################
def hand_norm(x, norm):
    """Each image by its own mean and variance, each channel by its own weight and bias."""
    centred = x - x.mean((1, 2, 3), keepdim=True)
    scaled = centred / ((centred**2).mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


def hand_resnet(network, x, blocks, width):
    """The stem and the stages written out from the paper's numbers; only the weights are the network's."""
    stem, norm, _, _, *residuals = network.blocks
    x = hand_norm(F.conv2d(x, stem.weight, None, 2, 3), norm).clamp(min=0)
    x = F.max_pool2d(x, 3, 2, 1)
    residuals = iter(residuals)
    for stage, count in enumerate(blocks):
        for number in range(count):
            block, stride = next(residuals), 2 if stage > 0 and number == 0 else 1
            y = hand_norm(F.conv2d(x, block.conv1.weight, None, stride, 1), block.norm1).clamp(min=0)
            y = hand_norm(F.conv2d(y, block.conv2.weight, None, 1, 1), block.norm2)
            if stride == 2:
                conv, shortcut_norm = block.shortcut
                x = hand_norm(F.conv2d(x, conv.weight, None, 2), shortcut_norm)
            x = (x + y).clamp(min=0)
            assert x.shape[1] == width * 2**stage
    assert next(residuals, None) is None
    features = F.linear(x.reshape(len(x), -1), network.dense.weight, network.dense.bias).clamp(min=0)
    assert features.shape[1] == 8 * width
    return features


def images(stacks):
    """(B, 4, 84, 84, 1) bytes -> (B, 4, 84, 84) in [0, 1]."""
    return stacks[..., 0].float() / 255


def lively_rnet(module, **settings):
    """An RNet whose answers differ, and whose normalization has other weights than at the beginning."""
    torch.manual_seed(1)
    rnet = module.make_rnet(games(), module.Args(stack_observations=3, rnet_width=4, **settings)).eval()
    for part in rnet.modules():
        if isinstance(part, torch.nn.GroupNorm):
            part.weight.data.uniform_(0.5, 1.5), part.bias.data.uniform_(-0.5, 0.5)
        elif isinstance(part, torch.nn.Linear):
            part.weight.data *= 2
    return rnet


def judge(rnet, early, late):
    """Logits (B,) of pairs of stacks, from the images: (late, late - early) as the paper says, or a layer on both
    embeddings."""
    if hasattr(rnet, "branch"):
        x = torch.cat([hand_resnet(rnet.branch, images(stacks), (2, 2, 1), 4) for stacks in (early, late)], 1)
        weight = torch.cat([rnet.early.weight, rnet.late.weight], 1)
        x, layers = (x @ weight.T + rnet.early.bias).clamp(min=0), rnet.head[1:]
    else:
        x = torch.cat([images(late), images(late) - images(early)], 1)
        x, layers = hand_resnet(rnet.network[0], x, (2, 2, 1), 4), rnet.network[1:]
    linears = [layer for layer in layers if hasattr(layer, "weight")]
    assert [layer.out_features for layer in linears] == (4 - hasattr(rnet, "branch") - 1) * [32] + [1]
    for layer in linears[:-1]:
        x = F.linear(x, layer.weight, layer.bias).clamp(min=0)
    return F.linear(x, linears[-1].weight, linears[-1].bias)[:, 0]


@pytest.mark.parametrize("rnet_input", INPUTS)
def test_rnet_by_hand(atari, rnet_input):
    """Six pairs; `embed` and `compare` one by one, by chunks, and as one batch of positives and negatives."""
    rnet, (early, late) = lively_rnet(atari, rnet_input=rnet_input), random_frames(2, 6, 4)
    with torch.no_grad():
        expected = judge(rnet, early, late)
        embeddings = rnet.embed(torch.cat([early, late]))
        mine = rnet.compare(embeddings[:6, 0], embeddings[6:, 1])
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
        rnet.chunk = 4
        mine = atari.compare_pairs(rnet, embeddings, torch.arange(6), torch.arange(6, 12))
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
        positives, negatives = atari.rnet_logits(rnet, early[:3], late[:3], late[3:])
        torch.testing.assert_close(positives, expected[:3], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(negatives, judge(rnet, early[:3], late[3:]), rtol=1e-3, atol=1e-3)
        swapped = rnet.compare(embeddings[6:, 0], embeddings[:6, 1])
    assert (swapped - expected).abs().max() > 0.05 and expected.std() > 0.05, "too dull for a test"


def test_embedding_network_begins_with_the_difference(atari):
    """Of equal states nothing is left but the first layer's bias."""
    torch.manual_seed(0)
    rnet = atari.make_rnet(games(), atari.Args(rnet_width=4, rnet_input=INPUTS[1])).eval()
    with torch.no_grad():
        early, late = rnet.embed(random_frames(3, 4)).unbind(1)
    torch.testing.assert_close(early + late, rnet.early.bias.expand(3, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rnet_input", INPUTS)
def test_cost_pair_by_pair(atari, rnet_input):
    """Two games of 13 frames, k = 2, N = 3: Eq. 14 with each pair judged from its stacks, cut out of a list."""
    torch.manual_seed(2)
    rnet = lively_rnet(atari, rnet_input=rnet_input)
    frames = random_frames(13, 2)
    began, rewards = np.zeros((12, 2), bool), np.zeros((12, 2))
    began[6, 0], rewards[8, 1] = True, 20.0
    depths, ages = np.zeros((13, 2), int), np.zeros((13, 2), int)
    stacks = torch.zeros(13, 2, 4, 84, 84, 1, dtype=torch.uint8)
    for t, n in np.ndindex(13, 2):
        if t:
            depths[t, n] = 0 if began[t - 1, n] else depths[t - 1, n] + 1
            ages[t, n] = 0 if began[t - 1, n] or rewards[t - 1, n] else ages[t - 1, n] + 1
        stacks[t, n] = torch.stack([frames[t - min(back, depths[t, n]), n] for back in (3, 2, 1, 0)])
    scores = np.zeros((13, 13, 2))
    with torch.no_grad():
        for late, n in np.ndindex(13, 2):
            old = np.arange(late)
            if late:
                pairs = stacks[old, n], stacks[late, n].expand(late, -1, -1, -1, -1)
                scores[old, late, n] = judge(rnet, *pairs)
        middle = np.median(scores[scores != 0])  # a network that says yes in some cases
        (rnet.head if hasattr(rnet, "head") else rnet.network)[-1].bias -= float(middle)
        scores = 1 / (1 + np.exp(middle - scores))
        everything = torch.arange(13), rnet.m
        embeddings = atari.embed_frames(rnet.embed, frames, torch.from_numpy(depths), *everything)
        costs = atari.ksp_cost(rnet, embeddings, ages[3:], 2, 1, 3, 90.0)
        rnet.chunk = 7  # fewer than there are pairs
        assert torch.equal(atari.ksp_cost(rnet, embeddings, ages[3:], 2, 1, 3, 90.0), costs)
        with torch.autocast("cpu", torch.bfloat16):  # with CUDA the run's are made so, in half precision
            embeddings = atari.embed_frames(rnet.embed, frames, torch.from_numpy(depths), *everything)
            halved = atari.ksp_cost(rnet, embeddings, ages[3:], 2, 1, 3, 90.0)
        assert halved.dtype == torch.float32 and (halved == costs).float().mean() > 0.8
    for t, n in np.ndindex(*costs.shape):
        expected = slow_cost(scores, rewards, began, 3 + t, n, 2, 1, 3, 90.0)
        assert expected is None or costs[t, n] == expected, (t, n)
    assert 0.1 < costs.mean() < 0.9


def test_ring_holds_single_frames(atari):
    """30,000 x 84 x 84 bytes with the default settings, a quarter of what stacks would take."""
    args = atari.Args()
    ring = atari.Ring(args.ring_size // args.num_envs, args.num_envs, (84, 84, 1), torch.uint8, META)
    assert ring.frames.nbytes == 30_000 * 84 * 84 == 211_680_000


@pytest.mark.parametrize("rnet_input", INPUTS)
def test_parts_stay_on_the_device(atari, rnet_input):
    """As in test_device: on meta, what reads back or mixes devices raises."""
    args = atari.Args(rnet_input=rnet_input, rnet_width=4)
    with META:
        agent, rnet = atari.make_agent(games(), args), atari.make_rnet(games(), args)
    ring = atari.Ring(50, 4, (84, 84, 1), torch.uint8, META)
    ages = torch.from_numpy(random_ages(np.random.default_rng(0), 50, 4, 0.05))
    ring.add(torch.zeros(50, 4, 84, 84, 1, dtype=torch.uint8, device=META), ages.to(META), ages.to(META))
    rows = ring.rows(ring.size - rnet.m)
    obs = atari.stack_frames(ring.frames, ring.depths, rows, rows % 4, args.stack_observations)
    for action in (None, torch.zeros(47, dtype=torch.int64, device=META)):
        action, logprob, entropy, value = agent.get_action_and_value(obs, action)
        (logprob + entropy + value).sum().backward()
    assert {part.device for part in (action, *(p.grad for p in agent.parameters()))} == {META}
    *triplets, count = atari.sample_triplets(ring.ages[rows], 2, 5, 5, False, 64)
    *heldout, _ = atari.sample_heldout(ring.ages[rows], 2, 1, 5, 64)
    logits = atari.rnet_logits(
        rnet.train(),
        *(atari.stack_frames(ring.frames, ring.depths, rows[r], triplets[3], rnet.m) for r in triplets[:3]),
    )
    atari.rnet_loss(*logits, 0.1).backward()
    assert {part.device for part in (count, *heldout, *(p.grad for p in rnet.parameters()))} == {META}
    rnet.eval()
    with torch.inference_mode():
        embeddings = atari.embed_frames(rnet.embed, ring.frames, ring.depths, rows, rnet.m)
        logits = atari.compare_pairs(rnet, embeddings.flatten(0, 1), heldout[0], heldout[1])
        cost = atari.ksp_cost(rnet, embeddings, ages[30:].numpy(), 2, 1, 10, 90.0)
    assert logits.device == cost.device == META and cost.shape == (20, 4)


# RUNS ################################################################################################################
SMALL = (
    f"--env-id {ASTEROIDS} --num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 1 --max-episode-steps 25 "
    "--run-name small --cost-scale 0.1 --cost-bias 0.25 --k 2 --num-tolerance-samples 3 --ring-size 260 "
    f"--negative-bias 3 --rnet-ready-accuracy 0 --rnet-start {2 * BATCH} "
    f"--rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16 --rnet-width 4 --heldout-pairs 64 "
    "--rnet-triplets 32"
)
# Four pixels of each frame tell its game, episode, step and segment. What the networks see is taken down: of each frame
# these four numbers and the sum of all pixels.
STAMP = """
if iteration == 1:
    step_games, seen, film = envs.step, [], {}
    episodes, times, segments, ended = np.zeros((4, args.num_envs), int)

    def stamp(frames):
        frames = frames.copy()
        frames[:, 0, :4, 0] = np.stack([np.arange(args.num_envs), episodes, times, segments], 1)
        film.update({tuple(frame[0, :3, 0].tolist()): int(frame.sum()) for frame in frames})
        return frames

    def stamped_step(actions):
        frames, reward, termination, truncation, info = step_games(actions)
        episodes[:] += ended
        times[:] = np.where(ended, 0, times + 1)
        segments[:] = np.where(ended, 0, segments + (reward != 0))
        ended[:] = termination | truncation
        return stamp(frames), reward, termination, truncation, info

    def take_down(stacks):
        return torch.cat([stacks[:, :, 0, :4, 0].long(), stacks.flatten(2).long().sum(2, keepdim=True)], 2)

    def watched_act(stacks, action=None, act=agent.get_action_and_value):
        seen.append(("policy", torch.is_grad_enabled(), take_down(stacks)))
        return act(stacks, action)

    def watched_compare(early, late, compare=rnet.compare):
        seen.append((phase, torch.is_grad_enabled(), take_down(early), take_down(late)))
        return compare(early, late)

    obs[past] = torch.from_numpy(stamp(obs[past].numpy()))
    envs.step, agent.get_action_and_value, rnet.compare = stamped_step, watched_act, watched_compare
"""
KEPT = "rewards valid total_rewards ages terminations truncations charts past seen"


@pytest.fixture(scope="module")
def stamped_run(shared_run):
    """Four rollouts, in a ring of two."""
    probes = {
        "ROLLOUT": STAMP,
        "INTRINSIC REWARD": "phase = 'cost'",
        "UPDATE RNET": "phase = 'rnet'",
        "CHECKPOINT": snapshot(KEPT) + "\nseen.clear()",
    }
    return shared_run(SMALL + steps(4), ATARI, probes)


def assert_stacks(film, stacks):
    """(B, 4, 5): the newest frame of each says which three should lie before it."""
    for stack in stacks.tolist():
        game, episode, time, *_ = stack[-1]
        expected = [(game, episode, max(0, time - back)) for back in (3, 2, 1, 0)]
        assert [tuple(frame[:3]) for frame in stack] == expected
        assert [frame[4] for frame in stack] == [film[place] for place in expected]


def test_no_stack_crosses_an_episode(stamped_run):
    """All that the policy sees while it acts and learns, and the RNet from rollouts and from the ring."""
    result = stamped_run[0]
    for shot in result["trace"]:
        kinds = set()
        for phase, learns, *sides in shot["seen"]:
            kinds.add((phase, learns))
            for stacks in sides:
                assert_stacks(result["film"], stacks)
        assert kinds >= {("policy", False), ("policy", True)}
    assert {time for _, _, time in result["film"]} == set(range(26)) and len(result["film"]) == 4 * (4 * 32 + 1)
    acting = [stacks for phase, learns, stacks in result["trace"][0]["seen"] if phase == "policy" and not learns]
    assert len(acting) == 33 and acting[0][:, :, 2].tolist() == 4 * [[0, 0, 0, 0]]
    assert acting[2][0, :, 2].tolist() == [0, 0, 1, 2] and acting[5][0, :, 2].tolist() == [2, 3, 4, 5]


def test_no_pair_crosses_a_segment(stamped_run):
    """Gaps of the cost, of held-out pairs and of triplets; differences are of one game, episode and segment."""
    gaps = {"cost": [], "heldout+": [], "heldout-": [], "train": []}
    for i, shot in enumerate(stamped_run[0]["trace"]):
        measured = 0
        for phase, learns, *sides in shot["seen"]:
            if phase == "policy":
                continue
            early, late = (side[:, -1] for side in sides)
            assert torch.equal(early[:, [0, 1, 3]], late[:, [0, 1, 3]])
            gap = (late - early)[:, 2].tolist()
            if phase == "cost":
                gaps["cost"] += gap
            elif learns:
                half = len(gap) // 2
                assert all(1 <= g <= 2 for g in gap[:half]) and all(g >= 5 for g in gap[half:])
                assert torch.equal(early[:half], early[half:]), "the same anchors"
                gaps["train"] += gap
            else:
                gaps["heldout-" if measured else "heldout+"] += gap
                measured += 1
        assert measured == 2 * (i % 2) and any(phase == "cost" for phase, *_ in shot["seen"]) == (i >= 2)
    assert set(gaps["cost"]) == {3, 4, 5}
    assert set(gaps["heldout+"]) == {1, 2, 3} and set(gaps["heldout-"]) == {6, 7, 8, 9}
    assert len(gaps["train"]) > 40


def test_rewards_are_stored_raw_and_learned_clipped(stamped_run):
    """Scores of 20 and more in the storage and the charts; what is learned from is their clip, and the cost's share.
    A segment ends where the raw reward is not zero."""
    result = stamped_run[0]
    trace, returns = result["trace"], np.zeros(4)
    assert max(shot["rewards"].max() for shot in trace) >= 20
    for i, shot in enumerate(trace):
        added = shot["total_rewards"].numpy() - shot["rewards"].clip(-1, 1)
        finished = []
        for t in range(32):
            returns = np.where(shot["valid"][t], returns + shot["rewards"][t], 0)
            finished += returns[shot["terminations"][t] | shot["truncations"][t]].tolist()
        assert not (shot["terminations"] & shot["truncations"]).any()
        if finished:
            assert shot["charts"]["charts/episodic_return"] == pytest.approx(np.mean(finished))
        if i < 2:
            np.testing.assert_allclose(added, 0, atol=1e-6)
        else:  # 0.1 * (0.25 - cost)
            np.testing.assert_allclose(np.minimum(abs(added - 0.025), abs(added + 0.075)), 0, atol=1e-6)
            rate = (added < 0)[shot["valid"]].mean()
            assert shot["charts"]["sprl/cost_rate"] == pytest.approx(rate, abs=1e-4)
        ages = shot["ages"][shot["past"] :]
        cut = ~shot["valid"] | (shot["rewards"] != 0)
        np.testing.assert_array_equal(ages[1:], np.where(cut, 0, ages[:-1] + 1))
    assert max(shot["charts"].get("charts/episodic_return", 0) for shot in trace) > 5


def test_resumed_run_goes_on_with_new_episodes(stamped_run, shared_run):
    before, _, folder = stamped_run
    after, printed, _ = shared_run(f"--resume {folder}/runs/small/agent.pt{steps(5)}", ATARI)
    assert f"resumed at step {4 * BATCH:,} with new episodes" in printed and "without the replay ring" in printed
    assert after["global_step"] == 5 * BATCH and len(after["history"]) == 5
    assert after["history"][:4] == before["history"] and after["ring"].size == 32
    assert (after["depths"][after["past"]] <= 25).all()


def test_weight_decay_is_decoupled(stamped_run):
    result, *_ = stamped_run
    (group,) = result["rnet_optimizer"].param_groups
    assert type(result["rnet_optimizer"]) is torch.optim.AdamW and group["weight_decay"] == 0.03


def test_embedding_difference_runs(run):
    """The other network, as plain as it comes; an RNet of width 4 is trained once and asked."""
    result = run(f"{SMALL} --rnet-input embedding-difference --rnet-start {BATCH}{steps(2)}", ATARI)
    assert type(result["rnet"]).__name__ == "ImageRNet" and len(result["history"]) == 2
    assert all(np.isfinite(row["cost_rate"]) for row in result["history"][1:])
