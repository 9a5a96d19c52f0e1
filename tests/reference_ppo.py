"""Plain PPO on MiniGrid without any shortest-path code: what `--cost-scale 0` has to be, bit by bit."""

import numpy as np
import torch
import torch.nn as nn


def advantages_of(rewards, values, terminations, truncations, gamma, gae_lambda):
    """GAE; values[t + 1] is the value of the state that step t led to, a final observation included."""
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        bootstrap = torch.where(terminations[t], torch.zeros_like(values[t + 1]), values[t + 1])
        delta = rewards[t] + gamma * bootstrap - values[t]
        goes_on = (~(terminations[t] | truncations[t])).float()
        advantages[t] = running = delta + gamma * gae_lambda * goes_on * running
    return advantages


def train(script, args, num_iterations):
    """Returns the agent after num_iterations of PPO with the settings of args."""
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    envs = script.make_envs(args)
    agent = script.make_agent(envs, args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    shape = (args.num_steps, args.num_envs)
    next_obs, next_done = torch.from_numpy(envs.reset(seed=args.seed)[0]), torch.zeros(args.num_envs, dtype=torch.bool)

    for iteration in range(num_iterations):
        left = 1.0 - iteration / num_iterations
        optimizer.param_groups[0]["lr"], clip = left * args.learning_rate, left * args.clip_coef
        obs = torch.zeros((*shape, *next_obs.shape[1:]), dtype=torch.uint8)
        actions, logprobs, rewards = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(shape)
        values = torch.zeros((args.num_steps + 1, args.num_envs))
        terminations, truncations, began = (torch.zeros(shape, dtype=torch.bool) for _ in range(3))
        for t in range(args.num_steps):
            obs[t], began[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], logprobs[t], _, values[t] = agent.get_action_and_value(obs[t])
            outcome = envs.step(actions[t].numpy())
            next_obs, rewards[t], terminations[t], truncations[t] = map(torch.from_numpy, outcome[:4])
            next_done = terminations[t] | truncations[t]
        with torch.no_grad():
            values[-1] = agent.get_action_and_value(next_obs)[3]
        advantages = advantages_of(rewards, values, terminations, truncations, args.gamma, args.gae_lambda)
        returns = advantages + values[:-1]

        inds = np.flatnonzero(~began.numpy())  # steps that only began an episode teach nothing
        for _ in range(args.update_epochs):
            np.random.shuffle(inds)
            for mb in np.array_split(inds, args.num_minibatches):
                old_value, target, advantage = (x.flatten()[mb] for x in (values[:-1], returns, advantages))
                _, logprob, entropy, value = agent.get_action_and_value(obs.flatten(0, 1)[mb], actions.flatten()[mb])
                ratio = (logprob - logprobs.flatten()[mb]).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
                clipped_value = old_value + (value - old_value).clamp(-clip, clip)
                value_loss = 0.5 * torch.max((value - target) ** 2, (clipped_value - target) ** 2).mean()
                loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
    return agent
