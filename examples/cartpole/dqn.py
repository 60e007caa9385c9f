"""Double DQN with returns of several steps on CartPole-v1, in one process.

    python -m examples.cartpole.dqn [--seed 0] [--solved 475] [--max-steps 150000]

It trains until the greedy policy's mean return over 100 episodes reaches ``--solved``, confirms
that on 100 other episodes, and prints one JSON line. ``examples.cartpole.actors`` distributes the
same parts over several processes.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from broker.settings.arguments import ArgumentParser, count, natural, positive
from broker.system.entry import enter

Floats = npt.NDArray[np.float32]

OBSERVATION: Final = 4  # position and speed of the cart, angle and speed of the pole
ACTIONS: Final = 2
SCALE: Final = torch.tensor([1.2, 1.5, 0.1, 1.5])  # of observations
GAMMA: Final = 0.99
LOOKAHEAD: Final = 3  # steps whose rewards count before the value of a state
EVALUATE_EVERY: Final = 2000  # environment steps
LARGEST_SEED: Final = 2**32 - 1  # a million seeds of episodes for each still fit 64 bits


@dataclass(frozen=True)
class Episode:
    """One finished episode of n steps.

    Attributes:
        observations: float32, shape (n + 1, OBSERVATION); the last is the one after the last step.
        actions: uint8, shape (n,).
        terminated: whether the pole fell; else the episode was truncated, and its last state still
            has a value.
    """

    observations: Floats
    actions: npt.NDArray[np.uint8]
    terminated: bool


class QNetwork(nn.Sequential):
    """Observations of shape (n, OBSERVATION) to action values of shape (n, ACTIONS)."""

    def __init__(self, width: int = 64) -> None:
        layers = [nn.Linear(OBSERVATION, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, ACTIONS))

    def forward(self, observations: Tensor) -> Tensor:
        values: Tensor = super().forward(observations / SCALE)  # type: ignore[no-untyped-call]
        return values


class Replay:
    """The newest steps, in a ring."""

    def __init__(self, capacity: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._before, self._after = (
            np.zeros((capacity, OBSERVATION), np.float32) for _ in range(2)
        )
        self._actions = np.zeros(capacity, np.int64)
        self._rewards, self._discounts = (np.zeros(capacity, np.float32) for _ in range(2))
        self.total = 0  # steps ever added

    def add(self, episode: Episode) -> None:
        """Store each step with the discounted reward of up to ``LOOKAHEAD`` steps and the state
        after them.
        """
        n = len(episode.actions)
        steps = np.arange(n)
        end = np.minimum(steps + LOOKAHEAD, n)
        discounts = GAMMA ** (end - steps)
        at = (self.total + steps) % len(self._actions)
        self._before[at], self._after[at] = episode.observations[:-1], episode.observations[end]
        self._actions[at] = episode.actions
        self._rewards[at] = (1 - discounts) / (1 - GAMMA)  # every step has reward 1
        self._discounts[at] = np.where((end == n) & episode.terminated, 0.0, discounts)
        self.total += n

    def sample(self, size: int) -> tuple[Tensor, ...]:
        """Return observations, actions, rewards, discounts and later observations of ``size``
        random steps.
        """
        at = self._random.integers(0, min(self.total, len(self._actions)), size)
        arrays = (self._before, self._actions, self._rewards, self._discounts, self._after)
        return tuple(torch.from_numpy(array[at]) for array in arrays)


class Agent:
    """A Q-network that learns from a replay buffer by double DQN with a soft target.

    Args:
        warm_up: steps before the first update.
    """

    def __init__(
        self, seed: int, *, lr: float = 2e-3, batch: int = 128, warm_up: int = 1000
    ) -> None:
        torch.manual_seed(seed)
        self.network = QNetwork()
        self._target = copy.deepcopy(self.network).requires_grad_(requires_grad=False)
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=lr)
        self._batch, self._warm_up = batch, warm_up
        self.replay = Replay(50_000, seed)
        self.updates = 0

    def learn(self, episode: Episode) -> None:
        """Add an episode, and update once for every second of its steps."""
        self.replay.add(episode)
        if self.replay.total >= self._warm_up:
            for _ in range(-(-len(episode.actions) // 2)):
                self._update()

    def _update(self) -> None:
        before, actions, rewards, discounts, after = self.replay.sample(self._batch)
        with torch.no_grad():
            # chosen by one network, valued by the other
            best = self.network(after).argmax(1, keepdim=True)
            wanted = rewards + discounts * self._target(after).gather(1, best).squeeze(1)
        values = self.network(before).gather(1, actions.unsqueeze(1)).squeeze(1)
        loss = nn.functional.smooth_l1_loss(values, wanted)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self._target.parameters()), list(self.network.parameters()), 0.01
            )
        self.updates += 1


def epsilon(steps: int) -> float:
    """Return the share of random actions after this many steps: from 1 to 0.04 over the first
    10,000.
    """
    return max(0.04, 1.0 - 0.96 * steps / 10_000)


@torch.no_grad()
def play(env: gymnasium.Env[Any, Any], network: nn.Module, seed: int, epsilon: float) -> Episode:
    """Play one episode, a pure function of the weights, the seed and epsilon."""
    random = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    observations, actions = [observation], list[int]()
    terminated = truncated = False
    while not (terminated or truncated):
        explores = random.random() < epsilon
        action = (
            int(random.integers(ACTIONS))
            if explores
            else int(network(torch.from_numpy(observation)).argmax())
        )
        observation, _, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        actions.append(action)
    return Episode(np.stack(observations), np.array(actions, np.uint8), terminated)


@torch.no_grad()
def evaluate(network: nn.Module, seed: int, episodes: int = 100) -> float:
    """Return the mean return of the greedy policy, all episodes at once."""
    envs = gymnasium.make_vec("CartPole-v1", episodes, vectorization_mode="vector_entry_point")
    observations, _ = envs.reset(seed=seed)
    running, total = np.ones(episodes, bool), 0
    while running.any():
        total += int(running.sum())
        observations, _, terminated, truncated, _ = envs.step(
            network(torch.from_numpy(observations)).argmax(1).numpy()
        )
        running &= ~(terminated | truncated)
    envs.close()
    return total / episodes


class Progress:
    """Evaluates now and then, and decides when training is over.

    Attributes:
        confirmed: mean return over 100 episodes that played no part in the decision to stop; None
            while training.
    """

    def __init__(self, seed: int, solved: float, max_steps: int) -> None:
        self._seed, self._solved, self._max_steps = seed, solved, max_steps
        self._next, self._started = EVALUATE_EVERY, time.monotonic()
        self.confirmed: float | None = None

    def over(self, agent: Agent) -> bool:
        """Return whether the policy is good enough, or the steps are used up."""
        steps = agent.replay.total
        if steps >= self._next or steps >= self._max_steps:
            self._next = steps + EVALUATE_EVERY
            mean = evaluate(agent.network, seed=self._seed + self._next)
            print(
                f"{time.monotonic() - self._started:6.1f} s  {steps:6d} steps  mean return {mean:.1f}",
                flush=True,
            )
            if mean >= self._solved or steps >= self._max_steps:
                confirmed = evaluate(agent.network, seed=self._seed + self._next + 1)
                if confirmed >= self._solved or steps >= self._max_steps:
                    self.confirmed = confirmed
        return self.confirmed is not None


def seed(text: str) -> int:
    """Parse a seed."""
    if (value := natural(text)) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; a whole number from 0 to {LARGEST_SEED}"
        )
    return value


def make_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of training."""
    form = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(
        prog=f"python -m examples.cartpole.{program}", description=description, formatter_class=form
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="of weights, exploration and episodes (%(default)s)"
    )
    parser.add_argument(
        "--solved",
        type=positive,
        default=475.0,
        help="mean return that ends training (%(default)s)",
    )
    parser.add_argument(
        "--max-steps", type=count, default=150_000, help="environment steps at most (%(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser("dqn", __doc__).parse_args(argv)
    return enter(lambda: train(options))


def train(options: argparse.Namespace) -> int:
    """Train in this process and print the figures."""
    started = time.monotonic()
    torch.set_num_threads(1)
    env = gymnasium.make("CartPole-v1")
    agent, progress = Agent(options.seed), Progress(options.seed, options.solved, options.max_steps)
    played = 0
    while not progress.over(agent):
        played += 1
        agent.learn(
            play(env, agent.network, options.seed * 1_000_003 + played, epsilon(agent.replay.total))
        )
    figures = {"mean_return": progress.confirmed, "steps": agent.replay.total, "episodes": played}
    print(
        json.dumps(
            {**figures, "updates": agent.updates, "seconds": round(time.monotonic() - started, 1)}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
