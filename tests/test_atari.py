"""Atari: games, frame stacks and positions against EnvPool itself; networks, ring and cost against slow readings."""

import envpool
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import BATCH, fake_envs, load, steps
from test_sprl import assert_costs

ATARI = "ppo_sprl_atari.py"
MONTEZUMA, ASTEROIDS = "MontezumaRevenge-v5", "Asteroids-v5"
INPUTS = ("pixel-difference", "embedding-difference")


@pytest.fixture(scope="module")
def atari():
    return load(ATARI)


def games(env_id=ASTEROIDS, num_envs=3, **flags):
    return load(ATARI).make_envs(load(ATARI).Args(env_id=env_id, num_envs=num_envs, **flags))


def random_stacks(*shape):
    """(*shape, 4, 84, 84) bytes, of 6 x 6 patches that can be told apart."""
    patches = torch.randint(256, (*shape, 4, 6, 6), dtype=torch.uint8)
    return patches.repeat_interleave(14, -1).repeat_interleave(14, -2)


# GAMES ###############################################################################################################
def test_games_and_ring_are_envpools_own(atari):
    """The same seed and actions without stacks, through three episodes of 12 steps. A list makes the stacks: an
    episode's first frame fills its first stack. The ring, which keeps single frames, gives every stack back."""
    envs = games(max_episode_steps=12)
    single = envpool.make_gymnasium(**envs.settings | {"stack_num": 1}, seed=5)
    obs, frames = envs.reset(seed=5)[0], single.reset()[0]
    assert obs.shape == (3, 4, 84, 84) and obs.dtype == np.uint8
    expected = np.repeat(frames, 4, 1)
    ring = atari.FrameRing(25, torch.from_numpy(obs)[None])
    rng, done, ends, depths, stacks = np.random.default_rng(0), np.zeros(3, bool), 0, np.zeros(3, int), []
    for t in range(40):
        np.testing.assert_array_equal(obs, expected, err_msg=f"step {t}")
        ring.add(torch.from_numpy(obs)[None], depths[None], depths[None])
        stacks.append(obs)
        actions = rng.integers(18, size=3)
        obs, rewards, terminations, truncations, _ = envs.step(actions)
        frames, plain_rewards, plain_terminations, _, info = single.step(actions)
        np.testing.assert_array_equal(rewards, plain_rewards)
        np.testing.assert_array_equal(rewards, info["reward"])  # not clipped
        np.testing.assert_array_equal(terminations, plain_terminations)
        assert not rewards[done].any() and not (terminations | truncations)[done].any()
        depths = np.where(done, 0, depths + 1)
        np.testing.assert_array_equal(truncations, (depths == 12) & ~terminations)
        expected = np.where(done[:, None, None, None], frames, np.concatenate([expected[:, 1:], frames], 1))
        done = terminations | truncations
        ends += done.sum()
    assert ends == 9 and len(np.unique(np.stack(stacks[:12])[:, 0, -1], axis=0)) > 6, "too dull for a test"
    assert ring.size == 25 and len(ring.obs) == 28  # three more, for the oldest stack
    kept = ring.read(ring.rows(25)[:, None], np.arange(3))
    np.testing.assert_array_equal(kept, np.stack(stacks[-25:]))
    np.testing.assert_array_equal(ring.read(ring.rows(1), np.array([2])), stacks[-1][2:])


def test_ring_gives_all_stacks_back(atari):
    """Made-up frames that are numbers, rollouts that do not divide the ring, episodes of all lengths."""
    rng, shown, added = np.random.default_rng(1), [], 0
    depths = np.zeros((200, 2), int)
    for t in range(1, 200):
        depths[t] = np.where(rng.random(2) < 0.2, 0, depths[t - 1] + 1)
    for t, n in np.ndindex(200, 2):
        shown.append([2 * (t - min(back, depths[t, n])) + n for back in (2, 1, 0)])
    stacks = torch.tensor(shown).view(200, 2, 3, 1, 1)
    ring = atari.FrameRing(17, stacks)
    assert len(ring.obs) == 17 + 2
    for length in (1, 5, 17, 3, 11, 17, 2, 16, 7):
        part = slice(added, added + length)
        ring.add(stacks[part], depths[part] + 100, depths[part])
        added += length
        rows = ring.rows(ring.size)
        assert len(rows) == min(added, 17)
        newest = slice(added - len(rows), added)
        assert torch.equal(ring.read(rows[:, None], np.arange(2)), stacks[newest])
        np.testing.assert_array_equal(ring.segment_steps[rows], depths[newest] + 100)
        assert torch.equal(ring.read(torch.from_numpy(rows), torch.ones(len(rows)).long()), stacks[newest, 1])


def test_all_18_actions_and_the_papers_options():
    """Asteroids alone would offer 14. No life ends an episode, no reward is clipped, no action sticks."""
    envs = games(max_episode_steps=12)
    assert envs.single_action_space.n == 18 and envs.single_observation_space.shape == (4, 84, 84)
    wanted = dict(
        stack_num=4, frame_skip=4, img_height=84, img_width=84, gray_scale=True, episodic_life=False,
        reward_clip=False, repeat_action_probability=0.0, max_episode_steps=12, noop_max=30, use_fire_reset=True,
    )  # fmt: skip
    assert wanted.items() <= envs.env.config.items()


def test_both_ends_at_once_are_a_termination():
    class Pool:
        def step(self, actions):
            flags = np.array([True, True, False]), np.array([True, False, True])
            return np.zeros((3, 4, 84, 84), np.uint8), np.zeros(3), *flags, {"ram": np.zeros((3, 128))}

    envs = games()
    envs.env = Pool()
    _, _, terminations, truncations, _ = envs.step(np.zeros(3))
    assert terminations.tolist() == [True, True, False] and truncations.tolist() == [False, False, True]


def test_positions_are_those_in_the_ram():
    """By hand, then in the game: the agent starts in room 1 at (77, 235), and LEFT takes it to the left by 4 a step."""
    envs = games(MONTEZUMA, 2)
    ram = np.arange(256, dtype=np.uint8).reshape(2, 128)  # bytes 3, 42, 43 and 131, 170, 171
    assert envs.locate(ram)["position"].tolist() == [[3 * 256 + 42, 43], [131 % 24 * 256 + 170, 171]]
    ram[:, 3] = 23
    assert (envs.locate(ram)["position"] < envs.map_size).all() and envs.map_size == (24 * 256, 256)
    assert envs.reset(seed=1)[1]["position"].tolist() == 2 * [[256 + 77, 235]]
    for action in (0, 0, 0, 0, 0, 4, 4, 4):  # it lands, then goes
        *_, info = envs.step(np.full(2, action))
    assert info["position"].tolist() == 2 * [[256 + 77 - 12, 235]]
    picture = envs.render()
    assert picture.shape == (252, 252, 3) and picture.dtype == np.uint8
    for i, j, colour in ((0, 0, 0), (100, 7, 1), (7, 100, 2), (251, 251, 0)):
        assert picture[i, j, colour] == envs.obs[0, 3, i // 3, j // 3]


@pytest.mark.parametrize("env_id", ["Montezuma-v5", "FetchReach-v4"])
def test_unknown_id_is_refused(run, capsys, tmp_path, env_id):
    with pytest.raises(SystemExit) as exit_:
        run(f"--env-id {env_id}", ATARI)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and error.count("\n") == 1 and f"--env-id {env_id}" in error and MONTEZUMA in error
    assert list(tmp_path.iterdir()) == []


# NETWORKS ############################################################################################################
def test_policy_is_the_nature_network(atari):
    """Layer by layer, on numbers: 84 -> 20 -> 9 -> 7 places, 512 features."""
    torch.manual_seed(0)
    agent = atari.make_agent(fake_envs((4, 84, 84), 18), atari.Args())
    obs = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    *convs, dense = [layer for layer in agent.network if hasattr(layer, "weight")]
    assert [tuple(conv.weight.shape) for conv in convs] == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]
    assert dense.weight.shape == (512, 64 * 7 * 7) and agent.actor.weight.shape == (18, 512)
    x = obs.float() / 255
    for conv, stride in zip(convs, (4, 2, 1)):
        x = F.conv2d(x, conv.weight, conv.bias, stride).clamp(min=0)
    x = (x.flatten(1) @ dense.weight.T + dense.bias).clamp(min=0)
    torch.testing.assert_close(agent.network(obs), x, rtol=1e-4, atol=1e-5)
    action, logprob, entropy, value = agent.get_action_and_value(obs)
    logs = (x @ agent.actor.weight.T + agent.actor.bias).log_softmax(1)
    torch.testing.assert_close(logprob, logs[torch.arange(2), action], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, -(logs.exp() * logs).sum(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value, agent.critic(x)[:, 0], rtol=1e-4, atol=1e-5)


def hand_norm(x, norm):
    """Each image by its own mean and variance, each channel by its own weight and bias."""
    centred = x - x.mean((1, 2, 3), keepdim=True)
    scaled = centred / ((centred**2).mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


def hand_resnet(branch, x, blocks, width):
    """The stem and the stages written out from the paper's numbers; only the weights are the network's."""
    _, stem, norm, _, _, *residuals, _, dense, _ = branch
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
    features = F.linear(x.reshape(len(x), -1), dense.weight, dense.bias).clamp(min=0)
    assert features.shape[1] == 8 * width
    return features


def lively_rnet(atari, rnet_input):
    """An RNet whose answers differ, and whose normalization has other weights than at the beginning."""
    torch.manual_seed(1)
    rnet = atari.make_rnet(None, atari.Args(rnet_width=4, rnet_input=rnet_input)).eval()
    for part in rnet.modules():
        if isinstance(part, (torch.nn.GroupNorm, torch.nn.LayerNorm)):
            part.weight.data.uniform_(0.5, 1.5), part.bias.data.uniform_(-0.5, 0.5)
        elif isinstance(part, torch.nn.Linear):
            part.weight.data *= 2
    return rnet


@torch.no_grad()
def judge(rnet, early, late):
    """Logits (B,) of pairs of stacks: a layer on the embeddings of two images, then normalized layers. The images are
    late - early and late, as the paper says, or early and late."""
    early, late = early / 255, late / 255
    images = (late - early, late) if rnet.is_pixel else (early, late)
    x = torch.cat([hand_resnet(rnet.branch, image, (2, 2, 1), 4) for image in images], 1)
    x = x @ torch.cat([rnet.early.weight, rnet.late.weight], 1).T + rnet.early.bias
    linears = [layer for layer in rnet.head if isinstance(layer, torch.nn.Linear)]
    norms = [layer for layer in rnet.head if isinstance(layer, torch.nn.LayerNorm)]
    assert [layer.out_features for layer in linears] == [32, 32, 1] and len({id(layer) for layer in linears}) == 3
    for norm, layer in zip(norms, linears, strict=True):
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        x = F.linear((x * norm.weight + norm.bias).clamp(min=0), layer.weight, layer.bias)
    return x[:, 0]


@pytest.mark.parametrize("rnet_input", INPUTS)
def test_rnet_by_hand(atari, rnet_input):
    """Six pairs; `embed` and `compare` one by one, by chunks, and as one batch of positives and negatives."""
    rnet, (early, late) = lively_rnet(atari, rnet_input), random_stacks(2, 6)
    expected, negatives = judge(rnet, early, late), judge(rnet, early[:3], late[3:])
    assert rnet.is_pixel == (rnet_input == "pixel-difference")
    embeddings = atari.embed_all(rnet, torch.stack([early, late]), chunk=5)
    mine = atari.compare_all(rnet, embeddings, torch.arange(6), torch.arange(6, 12), chunk=4)
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
    swapped = atari.compare_all(rnet, embeddings, torch.arange(6, 12), torch.arange(6))
    assert (swapped - expected).abs().max() > 0.05 and expected.std() > 0.05, "too dull for a test"
    pairs = torch.randint(6, (300,))  # more than the ResNet takes at once
    mine = atari.compare_all(rnet, embeddings, pairs, 6 + pairs)
    torch.testing.assert_close(mine, expected[pairs], rtol=1e-3, atol=1e-3)
    loss, accuracy = atari.rnet_loss(rnet, early[:3], late[:3], late[3:], 0.0)
    torch.testing.assert_close(
        loss.detach(), F.softplus(torch.cat([-expected[:3], negatives])).mean() * 2, rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(accuracy, torch.cat([expected[:3] > 0, negatives <= 0]).float().mean())


def test_embedding_network_begins_with_the_difference(atari):
    """Of equal states nothing is left but the first layer's bias."""
    torch.manual_seed(0)
    rnet = atari.make_rnet(None, atari.Args(rnet_width=4, rnet_input=INPUTS[1])).eval()
    with torch.no_grad():
        early, late = rnet.embed(random_stacks(3)).unbind(1)
    torch.testing.assert_close(early + late, rnet.early.bias.detach().expand(3, -1), rtol=0, atol=1e-6)


def all_scores(rnet, states, gaps):
    """R(state i, state j) at [i, j, n] of states (T, N, ...), by hand, where j - i is one of the gaps."""
    scores = torch.zeros(len(states), *states.shape[:2])
    for gap in gaps:
        early = torch.arange(len(states) - gap)
        logits = judge(rnet, states[early].flatten(0, 1), states[early + gap].flatten(0, 1))
        scores[early, early + gap] = logits.sigmoid().view(-1, states.shape[1])
    return scores


@pytest.mark.parametrize("rnet_input", INPUTS)
def test_cost_pair_by_pair(atari, rnet_input):
    """Two games of 13 states, k = 2, N = 3: Eq. 14 with each pair judged from its stacks."""
    rnet = lively_rnet(atari, rnet_input)
    states = random_stacks(13, 2)
    began, rewards = np.zeros((12, 2), bool), np.zeros((12, 2))
    began[6, 0], rewards[8, 1] = True, 20.0
    segment_steps = np.zeros((13, 2), int)
    for t in range(12):
        segment_steps[t + 1] = np.where(began[t] | (rewards[t] != 0), 0, segment_steps[t] + 1)
    rnet.head[-1].bias.data -= judge(rnet, states[:10, 0], states[3:, 0]).median()  # it says yes in some cases
    embeddings = atari.embed_all(rnet, states)
    costs = atari.ksp_cost(rnet, embeddings, segment_steps[3:], np.array([3, 4, 5]), 90.0)
    assert_costs(costs, all_scores(rnet, states, (3, 4, 5)), rewards, began, 2, 1, 3, 90.0, first=2)
    assert 0.1 < costs.mean() < 0.9


def test_ring_holds_single_frames(atari):
    """30,000 x 84 x 84 bytes with the default settings and 3 more a game, a quarter of what stacks would take."""
    ring = atari.FrameRing(30_000 // 12, torch.zeros(1, 12, 4, 84, 84, dtype=torch.uint8, device="meta"))
    assert ring.obs.nbytes == (30_000 + 3 * 12) * 84 * 84 and atari.Args().ring_size == 30_000


# RUNS ################################################################################################################
SMALL = (
    f"--env-id {ASTEROIDS} --num-envs 4 --num-steps 32 --num-minibatches 2 --update-epochs 1 --max-episode-steps 25 "
    "--run-name small --cost-scale 0.1 --cost-bias 0.25 --k 2 --num-tolerance-samples 3 --ring-size 260 "
    f"--negative-bias 3 --rnet-reliable-accuracy 0 --rnet-start {2 * BATCH} "
    f"--rnet-intervals {2 * BATCH} {2 * BATCH} {2 * BATCH} --rnet-batch-size 16 --rnet-width 4 --heldout-pairs 64 "
    "--rnet-triplets 32 --rnet-learning-rate 0.003 --seed 2"
)


@pytest.mark.parametrize("rnet_input", INPUTS)
def test_reward_of_a_run_is_eq_15(shared_run, rnet_input):
    """The fifth rollout, right after a training: clipped rewards and lambda (bias - c), with the cost by Eq. 14 from
    the stacks in the ring. A segment ends where the raw reward is not zero."""
    result = shared_run(f"{SMALL} --rnet-input {rnet_input}{steps(5)}", ATARI)
    ring, rewards, valid, segment_steps = (result[name] for name in ("ring", "rewards", "valid", "segment_steps"))
    rows = ring.rows(32 + 6)
    states, segments = ring.read(rows[:, None], np.arange(4)), ring.segment_steps[rows]
    assert torch.equal(states[-32:], result["obs"][1:])
    anew = load(ATARI).embed_all(result["rnet"], states[-32 - 5 :])  # the window before was embedded after the training
    torch.testing.assert_close(result["embeddings"], anew, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(segments[-32:], segment_steps[1:])
    begins = np.where(~valid | (rewards != 0), 0, np.concatenate([segments[-33:-32], segment_steps[1:-1]]) + 1)
    np.testing.assert_array_equal(segment_steps[1:], begins)
    assert rewards.max() > 1 and (~valid).any(), "choose another seed"

    costs = 0.25 - (result["total_rewards"] - torch.from_numpy(rewards.clip(-1, 1))) / 0.1
    torch.testing.assert_close(costs, costs.round(), rtol=0, atol=1e-4)
    cut = segments[1:] == 0
    scores = all_scores(result["rnet"], states, (3, 4, 5))
    assert_costs(costs.round(), scores, cut, np.zeros_like(cut), 2, 1, 3, 90.0, first=5)
    assert 0.02 < costs.mean() < 0.98
    history = result["history"]
    assert all("sprl/cost_rate" in row for row in history)  # judged before the gate opens, too
    assert ["rnet/loss" in row for row in history] == [False, True, False, True, False]
    rate = costs[torch.from_numpy(valid)].mean().item()
    assert history[-1]["sprl/cost_rate"] == pytest.approx(rate, abs=1e-5)
    assert max(row.get("charts/episodic_return", 0) for row in history) > 5, "charts are of the raw scores"


def change(stacks, share):
    """The same stacks with that share of their patches drawn anew."""
    is_new = (torch.rand(len(stacks), 1, 6, 6) < share).repeat_interleave(14, -1).repeat_interleave(14, -2)
    return torch.where(is_new, random_stacks(len(stacks)), stacks)


@pytest.mark.parametrize("rnet_input", INPUTS)
def test_weight_decay_acts_and_does_no_harm(atari, rnet_input):
    """New pairs in every step, near ones with 30 % of their patches changed, far ones with 70 %. With a penalty of 0.03
    the weights shrink and pairs are told apart. Without the comparator's norms the RNet stays at chance."""
    for has_norms in (True, False):
        torch.manual_seed(0)
        rnet, accuracies = atari.make_rnet(None, atari.Args(rnet_width=4, rnet_input=rnet_input)).train(), []
        if not has_norms:
            rnet.head = torch.nn.Sequential(*(part for part in rnet.head if not isinstance(part, torch.nn.LayerNorm)))
        optimizer = torch.optim.Adam(rnet.parameters(), lr=3e-3, weight_decay=0.03)
        begin = torch.nn.utils.get_total_norm([part.detach() for part in rnet.parameters()])
        for _ in range(60):
            anchors = random_stacks(32)
            loss, accuracy = atari.rnet_loss(rnet, anchors, change(anchors, 0.3), change(anchors, 0.7), 0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracies.append(accuracy.item())
        assert torch.nn.utils.get_total_norm([part.detach() for part in rnet.parameters()]) < 0.9 * begin
        assert (np.mean(accuracies[40:]) > 0.6) == has_norms, (has_norms, np.mean(accuracies[40:]))


def test_a_cpu_embeds_each_state_once(run):
    """The mission's line must end on any machine; what was chosen is in the settings that a run records."""
    result = run(SMALL + steps(1), ATARI)
    assert load(ATARI).Args().rnet_input == "auto" and not result["rnet"].is_pixel
    assert result["origin"]["args"]["rnet_input"] == "embedding-difference"


def test_resumed_run_goes_on_with_new_episodes(run):
    before = run(SMALL + steps(1), ATARI)
    after = run(f"--resume runs/small/agent.pt{steps(2)}", ATARI)
    assert after["global_step"] == 2 * BATCH and after["history"][:1] == before["history"]
    assert after["ring"].size == 1 + 32 and after["args"].rnet_width == 4
