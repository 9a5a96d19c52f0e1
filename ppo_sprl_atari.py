"""SPRL on Atari: PPO whose reward is reduced by a k-shortest-path cost, judged by a learned reachability network.

Paper: "Shortest-Path Constrained Reinforcement Learning for Sparse Reward Tasks", Sohn, Lee et al., ICML 2021.

    python ppo_sprl_atari.py                                         # Montezuma's Revenge, on a GPU
    python ppo_sprl_atari.py --env-id Freeway-v5 --rnet-width 16     # bearable on a CPU

Differences from the paper: a time limit bootstraps; the RNet has GroupNorm, LayerNorm, and an FC layer on all places.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from typing import Literal

import envpool
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from filelock import FileLock
from matplotlib.figure import Figure
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


# ARGS ################################################################################################################
@dataclass
class Args:
    seed: int = 1  # of the networks, the sampling and the environments
    cuda: bool = True  # use CUDA if there is a CUDA device
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the large layers; auto: bf16 where it is fast, else fp32
    track: bool = False  # mirror the charts to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "sprl"  # the project in Weights & Biases
    run_name: str | None = None  # folder of this run below runs/ (default: environment, method, seed and time)
    checkpoint_interval: int = 100_000  # environment steps between checkpoints; one more at the end and on Ctrl-C
    capture_video: bool = False  # also a GIF of one episode at each interval, by analysis/evaluate.py
    resume: str | None = None  # path of an agent.pt to go on from; its settings hold unless a flag says otherwise

    # PPO
    env_id: str = "MontezumaRevenge-v5"  # also Freeway, MsPacman, Gravitar, Seaquest, Hero or any Atari game of EnvPool
    total_timesteps: int = 10_000_000  # environment steps of the experiment
    learning_rate: float = 5e-4  # of the policy's Adam (paper: 5e-4)
    num_envs: int = 12  # parallel environments (authors' code: 12)
    num_steps: int = 256  # steps per environment and rollout (authors' code: 256)
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs over each rollout
    norm_adv: bool = True  # normalize the advantages in each minibatch
    clip_coef: float = 0.1  # clipping range of the policy ratio (authors' code: 0.1)
    anneal_clip: bool = True  # anneal the clipping range linearly to 0 (authors' code)
    clip_vloss: bool = True  # clip the value loss by the same range
    ent_coef: float = 0.01  # entropy bonus (paper: 0.01)
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the policy's gradient
    max_episode_steps: int = 10_000  # time limit of an episode, a truncation (paper: 10,000)
    stack_observations: int = 3  # m: the networks see the last m frames besides the current one (paper: 3)

    # SPRL
    cost_scale: float = 0.05  # lambda, the weight of the k-SP cost; 0 is plain PPO (paper: 0.05)
    cost_bias: float = 0.0  # the reward becomes r + lambda * (bias - cost) (paper: 0)
    k: int = 12  # k of the k-SP constraint; RNet positives lie within k steps (paper: 12)
    tolerance: int = 1  # Delta t: how far apart the compared older states lie (paper: 1)
    num_tolerance_samples: int = 200  # N: s_t is compared with s_{t-(k+n*Delta t)}, n = 1..N (paper: 200)
    cost_percentile: float = 90.0  # the cost is 1 where this percentile of the N outputs exceeds 0.5 (paper: 90)
    ring_size: int = 30_000  # the RNet learns from the agent's last this many steps (paper: 30K)
    negative_bias: int = 80  # Delta-: negatives lie at least k + Delta- steps after the anchor (paper: 80)
    positive_bias: int = 5  # Delta+: the next anchor lies 1..Delta+ steps after the positive (paper: 5)
    rnet_intervals: tuple[int, int, int] = (6_000, 150_000, 150_000)  # steps between trainings: to 1M, to 2M, after
    rnet_start: int = 15_000  # steps in the ring before the first RNet training (authors' code: 30K)
    rnet_triplets: int = 2_500  # most triplets, two pairs each, of one RNet training (authors' code: 15K)
    rnet_batch_size: int = 64  # triplets per RNet minibatch (authors' code: 64)
    rnet_learning_rate: float = 3e-4  # of the RNet's Adam (authors' code: 3e-4)
    rnet_weight_decay: float = 0.03  # L2 penalty of the RNet, whose layers are normalized (paper: 0.03)
    label_smoothing: float = 0.1  # of the RNet's loss (authors' code: 0.1)
    heldout_pairs: int = 7_500  # new pairs of each kind that measure the RNet's accuracy (paper: 7,500)
    rnet_reliable_accuracy: float = 0.75  # no cost until a heldout-out accuracy has passed this
    rnet_input: Literal["auto", "pixel-difference", "embedding-difference"] = "auto"  # the paper's on a GPU, else ours
    rnet_width: int = 64  # channels of the RNet's first blocks; its FC layers have 8 times as many (16 suits a CPU)


SHOWN = ("charts/episodic_return", "charts/success_rate", "sprl/cost_rate", "rnet/heldout_accuracy")  # on bar and curve
MAY_BE_0 = ("seed", "stack_observations", "tolerance", "negative_bias", "rnet_start")  # other whole numbers: from 1
HIGHEST = {"gamma": 1, "gae_lambda": 1, "label_smoothing": 1, "rnet_reliable_accuracy": 1, "cost_percentile": 100}


def fail(message):
    """Ends the program as a wrong command line should: one line on stderr, exit code 2."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args(default):
    """The command line on top of the default settings. What is wrong with it is said in one line."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            args = tyro.cli(Args, default=default)
    except SystemExit as end:
        if end.code:  # not --help; tyro draws a box
            fail(re.sub(r"[│╭╮╰╯─\s]+", " ", errors.getvalue()).strip())
        raise
    for name, value in vars(args).items():
        low, high = (1 if type(value) is int and name not in MAY_BE_0 else 0), HIGHEST.get(name, 2**31 - 1)
        if isinstance(value, (int, float)) and not low <= value <= high:
            fail(f"--{name.replace('_', '-')} {value} is out of range, accepted: {low} to {high}")
    return args


# ENVIRONMENT #########################################################################################################
class AtariGames(gym.vector.VectorWrapper):
    """EnvPool's Atari, preprocessed as in the paper. The NEXT_STEP autoreset and the stacks of frames are EnvPool's."""

    def __init__(self, env_id, num_envs, num_frames, max_episode_steps):
        if envpool.registration.registry.specs.get(env_id, [""])[0] != "envpool.atari":
            fail(f"--env-id {env_id}, accepted: MontezumaRevenge-v5, Freeway-v5 or another Atari game of EnvPool")
        self.settings = dict(task_id=env_id, num_envs=num_envs, stack_num=num_frames, img_height=84, img_width=84)
        self.settings |= dict(max_episode_steps=max_episode_steps, gray_scale=True, frame_skip=4, noop_max=30)
        self.settings |= dict(full_action_space=True, repeat_action_probability=0.0, use_fire_reset=True)
        self.settings |= dict(episodic_life=False, reward_clip=False)
        super().__init__(envpool.make_gymnasium(**self.settings))
        self.map_size = (24 * 256, 256)  # Montezuma's rooms side by side

    def reset(self, *, seed=None, options=None):
        self.env = envpool.make_gymnasium(**self.settings, seed=seed or 0)  # EnvPool takes a seed only here
        self.obs, info = self.env.reset()
        return self.obs, self.locate(info["ram"])

    def step(self, actions):
        self.obs, rewards, terminations, truncations, info = self.env.step(actions)
        return self.obs, rewards, terminations, truncations & ~terminations, self.locate(info["ram"])

    def locate(self, ram):
        room, x, y = ram[:, (3, 42, 43)].astype(np.int64).T  # in Montezuma's Revenge
        return {"position": np.stack([room % 24 * 256 + x, y], 1)}  # the true (x, y), for GT-Grid

    def render(self):
        return self.obs[0, -1].repeat(3, 0).repeat(9, 1).reshape(252, 252, 3)  # larger, and grey as RGB


def make_envs(args):
    return AtariGames(args.env_id, args.num_envs, 1 + args.stack_observations, args.max_episode_steps)


# AGENT ###############################################################################################################
class Scale(nn.Module):
    def forward(self, obs):  # uint8 -> [0, 1], channels_last; multiplying in place is faster than a division
        return obs.contiguous(memory_format=torch.channels_last).float().mul_(1 / 255)


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, network, out_features, num_actions):
        super().__init__()
        self.network, self.precision = network, contextlib.nullcontext()  # the heads are fp32 in every precision
        self.actor = layer_init(nn.Linear(out_features, num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(out_features, 1), std=1)

    def get_action_and_value(self, obs, action=None):
        with self.precision:  # the same in rollout and update, or their ratio would be noise
            hidden = self.network(obs)
        hidden = hidden.float()
        probs = Categorical(logits=self.actor(hidden), validate_args=False)  # validating would wait for the device
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden).squeeze(-1)


def make_agent(envs, args):
    network = nn.Sequential(  # the Nature CNN of Mnih et al. (2015)
        Scale(), layer_init(nn.Conv2d(envs.single_observation_space.shape[0], 32, 8, stride=4)), nn.ReLU(),
        layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(), layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(),
        nn.Flatten(), layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
    )  # fmt: skip
    return Agent(network.to(memory_format=torch.channels_last), 512, int(envs.single_action_space.n))


def gae(rewards, values, terminations, dones, gamma, gae_lambda):
    """Generalized advantages (T, N) of values (T + 1, N). With NEXT_STEP autoreset values[t + 1] is the value of the
    state that step t led to, also where the episode ends: so a truncation bootstraps and a termination does not."""
    advantages = torch.zeros_like(rewards)
    lastgaelam = torch.zeros_like(rewards[0])
    delta = rewards + gamma * values[1:] * ~terminations - values[:-1]
    discount = gamma * gae_lambda * ~dones
    for t in reversed(range(len(rewards))):
        advantages[t] = lastgaelam = delta[t] + discount[t] * lastgaelam
    return advantages


# REACHABILITY NETWORK ################################################################################################
class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(1, outputs), nn.GroupNorm(1, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(1, outputs))

    def forward(self, x):
        return (self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


class AtariRNet(nn.Module):
    """Can the late state be reached from the early one in at most k - 1 steps? A siamese ResNet embeds two images: the
    paper's s_t and s_t - s_{t-k} (`is_pixel`), anew for each pair, or ours, the two states, each once."""

    def __init__(self, num_frames, width, blocks, num_layers, is_pixel):
        super().__init__()
        self.is_pixel, widths = is_pixel, [width * 2**stage for stage, n in enumerate(blocks) for _ in range(n)]
        hidden, side = 8 * width, -(-21 // 2 ** (len(blocks) - 1))  # the stem leaves 21 of 84, each stage halves it
        self.branch = nn.Sequential(
            Scale(), nn.Conv2d(num_frames, width, 7, 2, padding=3, bias=False), nn.GroupNorm(1, width), nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1), *(ResidualBlock(i, o, o // i) for i, o in zip([width, *widths], widths)),
            nn.Flatten(), nn.Linear(widths[-1] * side**2, hidden), nn.ReLU(),  # a mean over places would forget them
        ).to(memory_format=torch.channels_last)  # fmt: skip
        self.early, self.late = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        if not is_pixel:
            self.late.weight.data = -self.early.weight.data  # begin with a difference, which learns sooner
        layers = [(nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, hidden)) for _ in range(num_layers - 1)]
        self.head = nn.Sequential(*sum(layers, ()), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def embed(self, obs):  # (B, frames, 84, 84) uint8 -> (B, 2, ...): as the early and as the late state of a pair
        if self.is_pixel:
            return obs.unsqueeze(1).expand(-1, 2, *obs.shape[1:])
        embedding = self.branch(obs)
        return torch.stack([self.early(embedding), self.late(embedding)], 1)

    def compare(self, early, late):  # (B, ...), (B, ...) -> (B,) logits
        if not self.is_pixel:
            return self.head(early + late).squeeze(-1)
        pairs = zip(early.split(256), late.split(256))  # what the ResNet computes of them must fit the memory
        images = [self.branch(torch.cat([b.float() - a.float(), b])).chunk(2) for a, b in pairs]
        return torch.cat([self.head(self.early(a) + self.late(b)) for a, b in images]).squeeze(-1)


def make_rnet(envs, args, blocks=(2, 2, 1), num_layers=3):  # the paper's SPRL; ECO has a larger one, of embeddings
    is_pixel = getattr(args, "rnet_input", "embedding-difference") == "pixel-difference"
    return AtariRNet(1 + args.stack_observations, args.rnet_width, blocks, num_layers, is_pixel)


@torch.inference_mode()
def embed_all(rnet, obs, chunk=256):
    """Embeddings (T, N, ...) of observations (T, N, ...), by chunks that stay in the cache."""
    return torch.cat([rnet.embed(part) for part in obs.flatten(0, 1).split(chunk)]).unflatten(0, obs.shape[:2])


@torch.inference_mode()
def compare_all(rnet, embeddings, early, late, chunk=2_048):
    """Logits of pairs of embeddings (T, N, 2, ...), given as numbers t * N + n, by chunks that stay in the cache."""
    as_early, as_late = embeddings.flatten(0, 1).unbind(1)
    pairs = zip(early.split(chunk), late.split(chunk))
    return torch.cat([rnet.compare(as_early.index_select(0, i), as_late.index_select(0, j)) for i, j in pairs]).float()


def rnet_loss(rnet, anchors, positives, negatives, label_smoothing):
    """Eq. 20, -log R(anc, +) - log(1 - R(anc, -)), with smoothed labels; and the accuracy."""
    embeddings = rnet.embed(torch.cat([anchors, positives, negatives]))
    early, late = embeddings[: len(anchors), 0], embeddings[len(anchors) :, 1]
    logits = rnet.compare(torch.cat([early, early]), late).float()  # one batch: BatchNorm must see both kinds
    is_positive = torch.arange(len(logits), device=logits.device) < len(anchors)
    labels = torch.where(is_positive, 1 - label_smoothing / 2, label_smoothing / 2)
    accuracy = ((logits > 0) == is_positive).float().mean()
    return 2 * F.binary_cross_entropy_with_logits(logits, labels), accuracy


class FrameRing:
    """The last states of each environment, as single frames. `segment_steps` counts since a segment began, at an
    episode's start or after a non-zero reward; no pair crosses a cut. No stack crosses `episode_steps` of 0."""

    def __init__(self, num_rows, obs):  # obs (T, N, frames, ...) as they will be added, first an episode's start
        self.back = torch.arange(obs.shape[2] - 1, -1, -1, device=obs.device)  # how long ago a stack's frames were
        self.obs = obs.new_zeros((num_rows + len(self.back) - 1, *obs[0, :, 0].shape))
        self.segment_steps = np.zeros(self.obs.shape[:2], np.int64)  # on the host, where pairs are drawn
        self.episode_steps = torch.zeros(self.obs.shape[:2], dtype=torch.int64, device=obs.device)
        self.head = self.size = 0  # next row to write, rows that can be read

    def add(self, obs, segment_steps, episode_steps):
        rows = (self.head + np.arange(len(obs))) % len(self.obs)
        self.obs[rows], self.segment_steps[rows] = obs[:, :, -1], segment_steps
        self.episode_steps[rows] = torch.from_numpy(episode_steps).to(obs.device)
        self.head = (self.head + len(obs)) % len(self.obs)
        self.size = min(self.size + len(obs), len(self.obs) - len(self.back) + 1)  # the oldest only complete stacks

    def rows(self, newest):  # of the newest states, oldest first
        return (self.head - newest + np.arange(newest)) % len(self.obs)

    def read(self, rows, envs):
        """The states (..., frames, H, W) in these rows; before an episode's first frame stands that frame again."""
        rows, envs = (torch.as_tensor(part, device=self.obs.device).unsqueeze(-1) for part in (rows, envs))
        return self.obs[(rows - torch.minimum(self.back, self.episode_steps[rows, envs])) % len(self.obs), envs]


def segment_ends(segment_steps):
    """For each state (T, N), oldest first, the row of the last state of its segment."""
    is_last = np.append(segment_steps[1:] == 0, np.ones_like(segment_steps[:1], bool), 0)
    rows = np.arange(len(segment_steps))[:, None]
    return np.minimum.accumulate(np.where(is_last, rows, len(rows))[::-1])[::-1]


def sample_triplets(segment_steps, k, negative_bias, positive_bias):
    """Algorithm 1, a walk in all segments at once: anchors, positives, negatives, environments (4, B), shuffled."""
    anchors, envs = np.append(np.ones_like(segment_steps[:1], bool), segment_steps[1:] == 0, 0).nonzero()
    ends, triplets = segment_ends(segment_steps)[anchors, envs], [np.zeros((4, 0), np.int64)]
    while len(anchors):
        nearest = anchors + k + negative_bias
        positives = anchors + np.random.randint(1, k + 1, len(anchors))
        negatives = np.random.randint(nearest, np.maximum(ends, nearest) + 1)
        triplets.append(np.stack([anchors, positives, negatives, envs])[:, nearest <= ends])
        anchors = positives + np.random.randint(1, positive_bias + 1, len(anchors))
        walking = anchors <= ends
        anchors, envs, ends = anchors[walking], envs[walking], ends[walking]
    triplets = np.concatenate(triplets, 1)
    return triplets[:, np.random.permutation(triplets.shape[1])]


def sample_heldout(segment_steps, k, tolerance, negative_bias, num_pairs):
    """Appendix B's validation pairs: positives from [t+1, t+k+Dt], then as many negatives from [t+k+Dt+D-, t+k+Dt+2D-].
    The early and the late states (2, B) as numbers t * N + n."""
    ends, near = segment_ends(segment_steps), k + tolerance
    anchors, envs = (np.arange(len(ends))[:, None] + near + negative_bias <= ends).nonzero()
    pick = np.random.randint(0, len(anchors), num_pairs if len(anchors) else 0)
    anchors, envs, nearest = anchors[pick], envs[pick], anchors[pick] + near + negative_bias
    positives = np.random.randint(anchors + 1, anchors + near + 1)
    negatives = np.random.randint(nearest, np.minimum(nearest + negative_bias, ends[anchors, envs]) + 1)
    pairs = np.stack([np.append(anchors, anchors), np.append(positives, negatives)])
    return pairs * ends.shape[1] + np.append(envs, envs)


# INTRINSIC REWARD ####################################################################################################
def ksp_cost(rnet, embeddings, segment_steps, gaps, percentile):
    """The k-SP cost (T, N) of the newest T states: c_t = I[ percentile over n = 1..N of
    Rnet_{k-1}(s_{t-(k+n*Dt)}, s_t) > 0.5 ], Eq. 18 for N = 1. A pair counts as 0 unless both states are in one segment:
    the older lies gap = k + n*Dt steps back, and the state must have made that many steps in its segment."""
    (num_steps, num_envs), device = segment_steps.shape, embeddings.device
    steps, envs, samples = (segment_steps[..., None] >= gaps).nonzero()  # on the host: nothing waits for the device
    late = (len(embeddings) - num_steps + steps) * num_envs + envs
    slots = (steps * num_envs + envs) * len(gaps) + samples
    early, late, slots = torch.from_numpy(np.stack([late - gaps[samples] * num_envs, late, slots])).to(device)
    scores = torch.zeros(num_steps * num_envs * len(gaps), device=device)
    scores[slots] = compare_all(rnet, embeddings, early, late).sigmoid()
    return (scores.view(num_steps, num_envs, len(gaps)).quantile(percentile / 100, -1) > 0.5).float()


# CHECKPOINTS #########################################################################################################
def save_checkpoint(path, learned, **progress):
    """Writes beside the old file and renames, so that there is a whole checkpoint at every moment."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(progress | {name: part.state_dict() for name, part in learned.items()}, file)
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path, learned):
    """Fills what is learned; returns settings, command, global_step and history. Runs no code of the file."""
    try:
        if os.path.basename(path) != "agent.pt" or zipfile.ZipFile(path).testzip():
            raise ValueError("another name, or damaged")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in learned.items():
            part.load_state_dict(checkpoint[name])
        args = Args(**{**checkpoint["args"], "resume": path, "track": False})  # only a flag starts W&B
        return args, checkpoint["command"], checkpoint["global_step"], checkpoint["history"]
    except Exception as error:
        fail(f"--resume {path}, accepted: a whole agent.pt of this script and these settings ({error!r:.200})")


def plot_curve(history, path):
    """Draws the charts that tell how a run went: their points, and the mean over ten of them."""
    names = [name for name in SHOWN if any(name in row for row in history)]
    figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        points = np.array([(row["step"], row[name]) for row in history if name in row])
        axis.plot(*points.T, ".", alpha=0.3)
        axis.plot(*np.transpose([points[max(0, i - 9) : i + 1].mean(0) for i in range(len(points))]))
        axis.set(title=name.split("/")[1].replace("_", " "), xlabel="steps", ylim=(min(0, *points[:, 1]), None))
    figure.savefig(path)


if __name__ == "__main__":
    # SETUP ###########################################################################################################
    sys.stderr = sys.stderr or open(os.devnull, "w")  # it is None after 2>&-
    script, global_step, history = os.path.basename(__file__), 0, []
    command = shlex.join(["python", script, *sys.argv[1:]])
    args = parse_args(Args())
    if args.resume is not None:
        old_args, command, global_step, history = load_checkpoint(args.resume, {})
        args = parse_args(old_args)
    method = "sprl" if args.cost_scale else "ppo"
    batch_size = args.num_envs * args.num_steps
    num_iterations = max(1, args.total_timesteps // batch_size)
    seed = args.seed + 1_000 * (global_step // batch_size)  # a resumed run must not repeat its first episodes
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    if args.precision == "auto":
        fast = torch.cuda.is_bf16_supported(False) if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
        args.precision = "bf16" if fast else "fp32"
    if args.rnet_input == "auto":  # the paper's is a pass of the ResNet for each pair, too much for a CPU
        args.rnet_input = "pixel-difference" if device.type == "cuda" else "embedding-difference"

    envs = make_envs(args)
    agent = make_agent(envs, args).to(device)
    agent.precision = bf16 = torch.autocast(device.type, torch.bfloat16, args.precision == "bf16")
    embed_all, compare_all, rnet_loss = bf16(embed_all), bf16(compare_all), bf16(rnet_loss)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    learned = {"agent": agent, "optimizer": optimizer}  # what a checkpoint holds
    gaps = args.k + args.tolerance * np.arange(1, args.num_tolerance_samples + 1)  # a cost looks that many steps back
    window = int(gaps[-1])
    rnet = ring = None
    if method == "sprl":
        rnet = make_rnet(envs, args).to(device).eval()
        rnet_optimizer = torch.optim.Adam(rnet.parameters(), fused=True)  # its rate is set where it trains
        learned |= {"rnet": rnet, "rnet_optimizer": rnet_optimizer}
    next_rnet_step, empty_trainings = global_step + args.rnet_start, 0  # a resumed run fills its ring first

    args.run_name = re.sub(r"[^\w.-]", "-", args.run_name or f"{args.env_id}__{method}__{seed}__{int(time.time())}")
    run_dir = os.path.dirname(args.resume) or "." if args.resume else f"runs/{args.run_name}"
    try:
        os.makedirs(run_dir, exist_ok=bool(args.resume))
        lock = FileLock(f"{run_dir}/lock", timeout=0).acquire()  # for as long as this process lives
    except OSError as error:
        fail(f"--run-name or --resume: {run_dir}, accepted: a new one, or to resume one without a live run ({error})")
    if args.resume:  # once more: now nobody else can write it
        *_, global_step, history = load_checkpoint(args.resume, learned)
    folder = os.path.dirname(os.path.abspath(__file__))
    commit = subprocess.getoutput(f"git -C {shlex.quote(folder)} describe --always --dirty --exclude=*")  # or an error
    origin = {"script": script, "command": command, "commit": commit, "args": asdict(args)}
    if args.track:
        import wandb

        names = dict(name=args.run_name, id=args.run_name, resume="allow", group=args.env_id, job_type=method)
        wandb.init(project=args.wandb_project_name, config=asdict(args), sync_tensorboard=True, save_code=True, **names)
    writer = SummaryWriter(run_dir, purge_step=global_step + 1 if args.resume else None)

    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    obs = torch.from_numpy(np.zeros((args.num_steps + 1, args.num_envs, *obs_space.shape), obs_space.dtype)).to(device)
    logprobs = torch.zeros((args.num_steps, args.num_envs), device=device)
    values = torch.zeros((args.num_steps + 1, args.num_envs), device=device)
    rewards = np.zeros((args.num_steps, args.num_envs), np.float32)
    actions = torch.from_numpy(np.zeros((*rewards.shape, *action_space.shape), action_space.dtype)).to(device)
    terminations, truncations, valid = np.zeros((3, args.num_steps, args.num_envs), bool)  # valid: not a reset's row
    segment_steps = np.zeros((args.num_steps + 1, args.num_envs), np.int64)  # since an episode's start or last reward
    episode_returns, episode_steps = np.zeros(args.num_envs), np.zeros_like(segment_steps)
    next_done = np.zeros(args.num_envs, bool)
    obs[-1] = torch.from_numpy(envs.reset(seed=seed)[0])  # a rollout begins where the last one ended
    if method == "sprl":
        ring = FrameRing(max(args.ring_size // args.num_envs, args.num_steps, window + 1), obs)
        ring.add(obs[-1:], segment_steps[-1:], episode_steps[-1:])
    if rnet:
        embeddings = torch.cat(window * [embed_all(rnet, obs[-1:])])  # no pair has any but the last
    failure, start_time, start_step = None, time.time(), global_step
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, as Ctrl-C does
    try:
        print(f"{method} on {args.env_id} ({device}, {args.precision}), writing to {run_dir}", file=sys.stderr)
        iterations = range(global_step // batch_size + 1, num_iterations + 1)
        bar = tqdm(iterations, initial=iterations.start - 1, total=num_iterations, unit="step", unit_scale=batch_size)
        for iteration in bar:
            frac = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate if args.anneal_lr else args.learning_rate
            clip_coef = frac * args.clip_coef if args.anneal_clip else args.clip_coef
            charts, finished_returns, finished_lengths = {}, [], []

            # ROLLOUT #################################################################################################
            obs[0] = obs[-1]
            segment_steps[0] = segment_steps[-1]
            episode_steps[0] = episode_steps[-1]
            with torch.inference_mode(), torch.autocast(device.type, enabled=False):  # bf16 weights are cast once
                for step in range(args.num_steps):
                    action, logprobs[step], _, values[step] = agent.get_action_and_value(obs[step])
                    next_obs, reward, terminations[step], truncations[step], info = envs.step(action.cpu().numpy())
                    actions[step] = action
                    obs[step + 1] = torch.from_numpy(next_obs).to(device, non_blocking=True)
                    valid[step], rewards[step] = ~next_done, reward
                    next_done = terminations[step] | truncations[step]
                    segment_steps[step + 1] = np.where(valid[step] & (reward == 0), segment_steps[step] + 1, 0)
                    episode_returns = np.where(valid[step], episode_returns + reward, 0.0)
                    episode_steps[step + 1] = np.where(valid[step], episode_steps[step] + 1, 0)
                    finished_returns += episode_returns[next_done].tolist()
                    finished_lengths += episode_steps[step + 1, next_done].tolist()

            # INTRINSIC REWARD ########################################################################################
            total_rewards = torch.from_numpy(rewards.clip(-1, 1)).to(device)
            rnet_is_reliable = any(row.get("rnet/heldout_accuracy", 0) > args.rnet_reliable_accuracy for row in history)
            if rnet:  # each state is embedded once, and once more when the RNet has changed
                embeddings = torch.cat([embeddings[-window:], embed_all(rnet, obs[1:])])  # (window + T, N, 2, ...)
                cost = ksp_cost(rnet, embeddings, segment_steps[1:], gaps, args.cost_percentile)
                charts["sprl/cost_rate"] = (cost * torch.from_numpy(valid).to(device)).sum() / valid.sum()
            if rnet and rnet_is_reliable:
                total_rewards = total_rewards + args.cost_scale * (args.cost_bias - cost)  # Eq. 15, with a bias

            # ADVANTAGE ###############################################################################################
            with torch.inference_mode():
                values[-1] = agent.get_action_and_value(obs[-1])[3]
            ends = torch.from_numpy(np.stack([terminations, terminations | truncations])).to(device)
            advantages = gae(total_rewards, values, *ends, args.gamma, args.gae_lambda)
            returns = advantages + values[:-1]

            # UPDATE POLICY ###########################################################################################
            b_obs, b_actions, b_logprobs = obs[:-1].flatten(0, 1), actions.flatten(0, 1), logprobs.flatten()
            b_advantages, b_returns, b_values = advantages.flatten(), returns.flatten(), values[:-1].flatten()
            b_inds, clipfracs = np.flatnonzero(valid), []  # no row that autoreset inserted
            for _ in range(args.update_epochs):
                np.random.shuffle(b_inds)
                for mb_inds in np.array_split(b_inds, args.num_minibatches):
                    mb_inds = torch.from_numpy(mb_inds).to(device, non_blocking=True)
                    _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
                    logratio = newlogprob - b_logprobs[mb_inds]
                    ratio = logratio.exp()
                    with torch.no_grad():
                        old_approx_kl = (-logratio).mean()
                        approx_kl = ((ratio - 1) - logratio).mean()
                        clipfracs.append(((ratio - 1.0).abs() > clip_coef).float().mean())

                    mb_advantages = b_advantages[mb_inds]
                    if args.norm_adv:
                        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

                    # Policy loss
                    pg_loss1 = -mb_advantages * ratio
                    pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                    pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                    # Value loss
                    v_loss = (newvalue - b_returns[mb_inds]) ** 2
                    if args.clip_vloss:
                        v_clipped = b_values[mb_inds] + (newvalue - b_values[mb_inds]).clamp(-clip_coef, clip_coef)
                        v_loss = torch.max(v_loss, (v_clipped - b_returns[mb_inds]) ** 2)
                    v_loss = 0.5 * v_loss.mean()

                    entropy_loss = entropy.mean()
                    loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    optimizer.step()
            charts |= {"losses/policy_loss": pg_loss, "losses/value_loss": v_loss, "losses/entropy": entropy_loss}
            charts |= {"losses/approx_kl": approx_kl, "losses/clipfrac": torch.stack(clipfracs).mean()}
            unexplained = b_advantages[b_inds].var() / b_returns[b_inds].var().clamp(min=1e-8)
            charts |= {"losses/old_approx_kl": old_approx_kl, "losses/explained_variance": 1 - unexplained}
            charts |= {"losses/grad_norm": grad_norm, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
            global_step += batch_size

            # UPDATE RNET #############################################################################################
            if ring:
                ring.add(obs[1:], segment_steps[1:], episode_steps[1:])
            if ring and global_step >= next_rnet_step:
                held = sample_heldout(segment_steps[1:], args.k, args.tolerance, args.negative_bias, args.heldout_pairs)
                if held.shape[1]:  # of the newest rollout, which the RNet has not trained on yet (Appendix B)
                    early, late = torch.from_numpy(held).to(device)
                    near, far = compare_all(rnet, embeddings[-args.num_steps :], early, late).chunk(2)
                    charts["rnet/heldout_accuracy"] = torch.cat([near > 0, far <= 0]).float().mean()

                rows = ring.rows(ring.size)
                triplets = sample_triplets(ring.segment_steps[rows], args.k, args.negative_bias, args.positive_bias)
                triplets, accuracies = triplets[:, : args.rnet_triplets], []
                triplets[:3] = rows[triplets[:3]]
                rnet_optimizer.param_groups[0] |= dict(lr=args.rnet_learning_rate, weight_decay=args.rnet_weight_decay)
                if triplets.shape[1]:
                    rnet.train()
                    for mb_triplets in torch.from_numpy(triplets).to(device).split(args.rnet_batch_size, 1):
                        mb_obs = ring.read(mb_triplets[:3], mb_triplets[3])  # as anchors, positives, negatives
                        loss, accuracy = rnet_loss(rnet, *mb_obs, args.label_smoothing)
                        rnet_optimizer.zero_grad()
                        loss.backward()
                        rnet_optimizer.step()
                        accuracies.append(accuracy)
                    rnet.eval()
                    charts |= {"rnet/loss": loss, "rnet/train_accuracy": torch.stack(accuracies).mean()}
                    embeddings = embed_all(rnet, ring.read(ring.rows(window)[:, None], np.arange(args.num_envs)))
                charts["rnet/triplets"] = triplets.shape[1]
                empty_trainings = 0 if triplets.shape[1] else empty_trainings + 1
                if empty_trainings == 5:
                    print("\nno triplets in 5 RNet trainings: too dense rewards or too short episodes", file=sys.stderr)
                if next_rnet_step == start_step + args.rnet_start and device.type == "cpu":  # the first training
                    eta = (args.total_timesteps - global_step) / (global_step - start_step) * (time.time() - start_time)
                    print(f"\nat least {eta / 3600:.1f} h on this CPU, less with `--rnet-width 16`", file=sys.stderr)
                next_rnet_step = global_step + args.rnet_intervals[min(global_step // 1_000_000, 2)]

            # LOG #####################################################################################################
            charts["charts/SPS"] = (global_step - start_step) / (time.time() - start_time)
            if finished_returns:
                charts["charts/episodic_return"] = np.mean(finished_returns)
                charts["charts/episodic_length"] = np.mean(finished_lengths)
                charts["charts/success_rate"] = np.mean(np.array(finished_returns) > 0)
            charts = {name: torch.as_tensor(value).item() for name, value in charts.items()}  # waits for the device
            for name, value in charts.items():
                writer.add_scalar(name, value, global_step)
                if not np.isfinite(value):  # then the networks may be ruined: they must not be saved
                    sys.exit(f"error: {name} is {value} at step {global_step}, nothing of this iteration is saved")
            history.append({"step": global_step, **charts})
            bar.set_postfix({name.split("/")[1]: row[name] for row in history[-10:] for name in SHOWN if name in row})

            # CHECKPOINT ##############################################################################################
            if global_step % args.checkpoint_interval < batch_size or iteration == num_iterations:
                save_checkpoint(f"{run_dir}/agent.pt", learned, **origin, global_step=global_step, history=history)
                if args.capture_video:
                    evaluate = f"{folder}/analysis/evaluate.py", f"{run_dir}/agent.pt", "--script", __file__
                    subprocess.run([sys.executable, *evaluate, "--episodes=1", f"--video={run_dir}/{global_step}.gif"])
                if args.track and os.path.exists(f"{run_dir}/{global_step}.gif"):
                    wandb.log({"video": wandb.Video(f"{run_dir}/{global_step}.gif")})
    except (KeyboardInterrupt, OSError) as error:  # Ctrl-C or SIGTERM; a closed terminal, a full disk
        failure = error

    sys.tracebacklimit = 0  # what fails from here on, or a second Ctrl-C, ends it with one line
    if all(weight.isfinite().all() for weight in agent.parameters()):  # a stop may come before LOG has looked
        save_checkpoint(f"{run_dir}/agent.pt", learned, **origin, global_step=global_step, history=history)
    returns = [row["charts/episodic_return"] for row in history if "charts/episodic_return" in row][-10:]
    outcome = f"return {np.mean(returns):.3f}" if returns else "no episode has ended"
    print(f"\n{'stopped' if failure else 'done'} at step {global_step:,}, {outcome}, see {run_dir}", file=sys.stderr)
    envs.close()
    writer.close()
    if returns:
        plot_curve(history, f"{run_dir}/curve.png")
    if isinstance(failure, OSError):
        raise failure
