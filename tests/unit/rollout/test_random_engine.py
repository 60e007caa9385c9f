"""The random engine: uniform tokens or uniform choices, with the logprobs that belong to them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from broker.contract import wire
from broker.errors import UserError
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.random import RandomEngine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel(
        hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, intermediate_size=16
    )
    return str(build_tiny(tmp_path_factory.mktemp("tiny") / "model", tiny))


async def engine(path: str, **args: Any) -> RandomEngine:
    made = RandomEngine(
        EngineConfig(path, RolloutSection(engine="random", engine_args=args, max_context_tokens=64))
    )
    await made.start()
    return made


def ask(
    name: str, prompt: int = 3, deadline_s: float = 9.0, **sampling: Any
) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        request_id=name, conversation_id=name, token_ids=wire.column([5] * prompt, "<i4"), min_version=9,
        deadline_s=deadline_s,
        sampling=wire.SamplingParams(**{"max_tokens": 8, **sampling}),
    )  # fmt: skip


async def test_every_token_of_the_vocabulary_is_equally_likely(path: str) -> None:
    made, size = await engine(path), Tokenizer.load(path).vocab_size
    counts: Counter[int] = Counter()
    for seed in range(200):
        output = await made.generate(ask(str(seed), seed=seed, max_tokens=50, ignore_eos=True))
        assert list(output.logprobs) == [-math.log(size)] * 50
        assert (list(output.version_runs), output.finish_reason) == ([(0, 50)], "length")
        counts.update(output.token_ids)
    mean = 10_000 / size
    assert set(counts) == set(range(size))
    assert sum((count - mean) ** 2 / mean for count in counts.values()) < size + 4 * math.sqrt(
        2 * size
    )


async def test_end_tokens_end_the_output(path: str) -> None:
    made, ends = await engine(path), Tokenizer.load(path).eos_token_ids
    outputs = [await made.generate(ask(str(seed), seed=seed, max_tokens=40)) for seed in range(100)]
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    for output in outputs:
        assert (output.token_ids[-1] in ends) == (output.finish_reason == "stop")
        assert not set(output.token_ids[:-1]) & set(ends)


async def test_choices_are_whole_texts_with_the_probability_on_the_first_token(path: str) -> None:
    texts, tokenizer = ["left", "up", "right", "down"], Tokenizer.load(path)
    made = await engine(path, choices=texts)
    end = tokenizer.token_id("<|im_end|>")
    counts: Counter[str] = Counter()
    for seed in range(400):
        output = await made.generate(ask(str(seed), seed=seed))
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == end
        assert list(output.logprobs) == pytest.approx(
            [-math.log(4)] + [0.0] * (len(output.token_ids) - 1)
        )
        counts[tokenizer.decode(output.token_ids)] += 1
    assert set(counts) == set(texts)
    assert all(70 < count < 130 for count in counts.values())  # 100 +- 3.5 standard deviations


async def test_a_choice_that_is_cut_has_the_probability_of_all_that_begin_so(path: str) -> None:
    made = await engine(path, choices=["left", "lest", "up", "up"])
    seen = set()
    for seed in range(60):
        output = await made.generate(ask(str(seed), seed=seed, max_tokens=2))
        assert output.finish_reason == "length"
        seen.add(
            (
                Tokenizer.load(path).decode(output.token_ids),
                round(math.exp(sum(output.logprobs)), 6),
            )
        )
    assert seen == {("le", 0.5), ("up", 0.5)}


async def test_a_delay_is_cut_by_deadline_and_abort(path: str) -> None:
    made = await engine(path, delay_s=0.05)
    late = await made.generate(ask("late", deadline_s=0.12, seed=1, ignore_eos=True))
    assert (late.finish_reason, len(late.token_ids)) == ("deadline", 2)
    running = asyncio.create_task(made.generate(ask("x", max_tokens=60, seed=1, ignore_eos=True)))
    await asyncio.sleep(0.12)
    made.abort("x")
    partial = await running
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 20
    assert list(partial.version_runs) == [(0, len(partial.token_ids))]


async def test_a_timer_that_is_early_cuts_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(waited: Coroutine[Any, Any, Any], timeout: float) -> None:
        waited.close()
        raise TimeoutError

    made = await engine(path, delay_s=0.05)
    monkeypatch.setattr(asyncio, "wait_for", at_once)
    output = await made.generate(ask("early", max_tokens=8, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (8, "length")


async def test_the_context_bounds_the_output(path: str) -> None:
    made = await engine(path)
    output = await made.generate(ask("x", prompt=60, max_tokens=50, ignore_eos=True))
    assert (output.finish_reason, len(output.token_ids)) == ("length", 4)
    assert await made.generate(ask("y", prompt=64)) == GenerationOutput(
        error="the prompt has 64 tokens and leaves no room to generate in rollout.max_context_tokens=64"
    )


async def test_a_path_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        await engine(str(tmp_path / "missing"))
