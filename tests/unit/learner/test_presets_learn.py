"""Every preset raises the reward of a policy on a task of two one-token turns, through assembly,
scoring and updates.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_backend_kit import VOCAB, backend, save_model

from broker.contract import wire
from broker.settings.registry import resolve
from broker.settings.runspec import load, validate
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.assembly import SampleAssembler
from learner.algorithm.selection import most_varied
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, CriticSection, TrainSection

PRESETS = sorted(
    path.stem for path in (Path(__file__).parents[3] / "configs" / "algorithm").glob("*.yaml")
)
STEPS, GROUPS, GROUP_SIZE = 14, 6, 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@torch.no_grad()
def play(trainer: TorchBackend, prompt: int, greedy: list[bool]) -> tuple[np.ndarray, np.ndarray]:
    """Two tokens for each episode and their logprobs; between them the environment says token 3."""
    model, ids, logprobs = trainer.policy.module, torch.tensor([[2, prompt]] * len(greedy)), []
    for _ in range(2):
        distribution = torch.distributions.Categorical(logits=model(input_ids=ids).logits[:, -1])
        chosen = torch.where(
            torch.tensor(greedy), distribution.logits.argmax(-1), distribution.sample()
        )
        logprobs.append(distribution.log_prob(chosen))
        ids = torch.cat([ids, chosen[:, None], torch.full((len(greedy), 1), 3)], 1)
    return ids[:, :5].numpy(), torch.stack(logprobs, 1).numpy()


def group(trainer: TorchBackend, number: int, num_greedy: int) -> wire.Group:
    prompt = 4 + number % 3
    greedy = [False] * GROUP_SIZE + [True] * num_greedy
    tokens, logprobs = play(trainer, prompt, greedy)
    trajectories = []
    for episode, (ids, chosen) in enumerate(zip(tokens, logprobs, strict=True)):
        spans = [(2, 3), (4, 5)]
        # a third of the vocabulary is good
        rewards = [0.5 * float(ids[start] < VOCAB // 3) for start, _ in spans]
        full = np.zeros(5, np.float32)
        full[[2, 4]] = chosen
        turns = [
            wire.Turn(
                start=a,
                end=b,
                reward=r,
                valid=True,
                finish_reason="stop",
                server="s",
                anchor=f"{prompt}-{i}",
            )
            for i, ((a, b), r) in enumerate(zip(spans, rewards, strict=True))
        ]
        trajectories.append(
            wire.Trajectory(
                episode=episode,
                token_ids=wire.column(ids, "<i4"),
                loss_mask=wire.column([0, 0, 1, 0, 1], "|u1"),
                logprobs=wire.column(full, "<f4"),
                version_runs=wire.column([trainer.version, 2], "<i4"),
                turns=turns,
                reward=sum(rewards),
                reward_parts={"first": rewards[0], "second": rewards[1]},
                success=sum(rewards) == 1,
                end="terminated",
                greedy=greedy[episode],
            )
        )
    return wire.Group(
        ticket=number,
        domain="d",
        task_index=0,
        min_version=0,
        hub="h",
        deliveries=1,
        pools=[],
        trajectories=trajectories,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_reward_rises(path: str, name: str) -> None:
    config = validate(load("configs/quickstart.yaml", [f"algorithm={name}"]))
    algorithm = AlgorithmSection.model_validate(config["algorithm"])
    critic = (
        algorithm.critic.model_copy(update={"lr": 1e-2})
        if algorithm.critic.enabled
        else CriticSection()
    )
    algorithm = algorithm.model_copy(update={"critic": critic})
    trainer = backend(
        path,
        algorithm=algorithm,
        train=TrainSection(lr=1e-2, device="cpu", steps=STEPS),
        max_length=5,
    )
    assembly = SampleAssembler(
        resolve("advantages", algorithm.adv_estimator, ADVANTAGES), algorithm
    )
    num_greedy = int(algorithm.adv_estimator == "remax")
    means = []
    for _ in range(STEPS):
        groups = [group(trainer, number, num_greedy) for number in range(GROUPS)]
        means.append(
            np.mean([one.reward for each in groups for one in each.trajectories if not one.greedy])
        )
        if assembly.needs_batch:
            kept = algorithm.keep_fraction if algorithm.pg_variant == "starpo_s" else 1.0
            metrics = trainer.update(
                assembly.batch(most_varied(groups, kept), trainer.score, trainer.kl_coef)
            )
        else:
            for each in groups:
                trainer.forward_backward(assembly.stream(each))
            metrics = trainer.step()
        assert all(np.isfinite(value) for value in metrics.values())
    start, end = float(means[0]), float(np.mean(means[-3:]))
    assert end > 1.5 * start, f"{start:.2f} to {end:.2f}"
