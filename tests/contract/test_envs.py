"""One suite that every registered environment passes; a line in the registry enrols a newcomer."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.errors import NotInstalled
from broker.settings.config import DomainSection
from broker.settings.registry import known
from broker.settings.sections import parse
from envhub.domain import Domain, load_domain
from envhub.envs import ENVS
from envhub.envs.base import Environment, Observation, StepResult, can_demonstrate, can_render

MAX_TURNS = 64


@pytest.fixture(params=known("envs", ENVS))
def domain(request: pytest.FixtureRequest, tmp_path: Path) -> Domain:
    bare = load_domain_class(request.param)
    try:
        example = bare.example(tmp_path)
    except NotInstalled as error:
        pytest.skip(str(error))
    section = DomainSection(
        env=request.param,
        env_args=example,
        rewards=[] if bare.has_reward else [{"name": "math_answer"}],
        seats=dict.fromkeys(bare.seats(parse("env_args", example, bare.Args)), "actor"),
    )
    made = load_domain("d", section)
    made.check()
    return made


def load_domain_class(name: str) -> type[Environment]:
    from broker.settings.registry import resolve

    found: type[Environment] = resolve("envs", name, ENVS)
    return found


async def call(environment: Environment, method: str, *args: Any) -> Any:
    result = getattr(environment, method)(*args)
    return await result if inspect.isawaitable(result) else result


async def episode(
    environment: Environment, texts: Any, split: str = "train", index: int = 0, seed: int = 1
) -> list[str]:
    """Observations of one episode whose actions come from ``texts(turn)``."""
    observation = await call(environment, "reset", index, split, seed)
    assert isinstance(observation, Observation)
    seen = [observation.text]
    for turn in range(MAX_TURNS):
        step = await call(environment, "step", texts(turn))
        assert isinstance(step, StepResult)
        assert all(map(math.isfinite, (step.reward, *step.metrics.values())))
        assert step.done or not step.success, "solved, but it goes on"
        seen.append(step.observation.text)
        if step.done:
            break
    return seen


async def test_an_episode_is_a_function_of_its_task_and_actions(domain: Domain) -> None:
    one, other = domain.make(), domain.make()
    rng = np.random.default_rng(0)
    texts = ["".join(chr(c) for c in rng.integers(32, 127, size=3)) for _ in range(MAX_TURNS)]
    if can_demonstrate(domain.environment):
        await call(one, "reset", 0, "train", 1)
        texts[0] = one.demonstrate(rng, 0.0)
    for split in ("train", "eval"):
        first = await episode(one, texts.__getitem__, split)
        assert first == await episode(other, texts.__getitem__, split)
        assert first == await episode(one, texts.__getitem__, split), (
            "an instance remembers its last episode"
        )
    await call(one, "close")
    await call(other, "close")


async def test_there_are_many_tasks_and_held_out_ones_are_others(domain: Domain) -> None:
    environment = domain.make()
    prompts: dict[str, set[str]] = {}
    for split in ("train", "eval"):
        prompts[split] = {
            (await call(environment, "reset", index, split, index)).text for index in range(40)
        }
    # a game with several seats begins alike; what differs is who plays, or what a seat knows
    if not domain.seats:
        assert len(prompts["train"]) > 8
        assert not prompts["train"] & prompts["eval"]
    for split in ("train", "eval"):
        there = domain.num_tasks(split)  # type: ignore[arg-type]
        assert there is None or there >= 1
    await call(environment, "close")


@pytest.mark.parametrize("text", ["", " ", "\n\n", "no action at all", "𓀀\x00", "x" * 100_000])
async def test_no_text_breaks_it(domain: Domain, text: str) -> None:
    environment = domain.make()
    await episode(environment, lambda _: text)
    await call(environment, "close")


async def test_pictures_and_frames_if_it_has_any(domain: Domain) -> None:
    environment = domain.make()
    await call(environment, "reset", 0, "eval", 1)
    assert isinstance(environment.text_frame(), str)
    if can_render(domain.environment):
        frame = environment.render_frame()
        assert (frame.dtype, frame.ndim, frame.shape[2]) == (np.uint8, 3, 3)
    await call(environment, "close")


async def test_its_solver_does_better_without_noise(domain: Domain) -> None:
    # the programs of `programs` are run by a test of its own
    if not can_demonstrate(domain.environment) or domain.section.env == "programs":
        return
    environment = domain.make()

    async def return_of(noise: float) -> float:
        """Return the sum of the rewards, of the last seat if there are several."""
        total, rng = 0.0, np.random.default_rng(0)
        for index in range(30):
            observation = await call(environment, "reset", index, "train", index)
            for _ in range(MAX_TURNS):
                is_measured = not domain.seats or observation.seat == domain.seats[-1]
                text = environment.demonstrate(rng, noise if is_measured else 1.0)
                step = await call(environment, "step", text)
                if step.seat_rewards:
                    total += step.seat_rewards[domain.seats[-1]]
                elif domain.environment.has_reward:
                    total += step.reward * is_measured
                else:
                    total += text == environment.reference
                if step.done:
                    break
                observation = step.observation
        return total

    assert await return_of(0.0) > await return_of(1.0)
    await call(environment, "close")
