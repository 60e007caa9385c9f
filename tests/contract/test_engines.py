"""One suite that every engine of the registry passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit import PROMPT, TINY, ask
from http_kit import KEY, api
from safetensors.torch import load_file
from sglang_double import double
from waits import LONG_S

from broker.errors import ConfigError, TransferFailed, UserError
from broker.settings.registry import resolve
from broker.weights.probe import make_probe
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer
from rollout.checks import check_engine
from rollout.config import RolloutSection
from rollout.engines import ENGINE_ARGS, ENGINES
from rollout.engines.base import NO_VERSION, Engine, EngineConfig, GenerationOutput

# which has an environment of its own, where tests/vllm_engine holds it to the same suite
HERE = sorted(ENGINES.keys() - {"vllm"})
MAX_CONTEXT = 128


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("contract") / "model", TINY))


def build(
    name: str,
    model_path: str,
    *,
    version: int = 0,
    url: str = "http://127.0.0.1:1/v1",
    command: list[str] | None = None,
    **section: Any,
) -> Engine:
    """An engine that forwards does so to ``url``; one that starts a server of its own does so by
    ``command``.
    """
    if name == "openai":
        section = {
            "policy": "judge",
            "engine_args": {"base_url": url, "api": "completions", "token_ids": True},
            **section,
        }
    if name == "sglang":
        section = {"engine_args": {"command": command or ["/bin/false"]}, **section}
    settings = RolloutSection(
        engine=name, max_running=4, max_context_tokens=MAX_CONTEXT, num_threads=1, **section
    )
    engine: Engine = resolve("engines", name, ENGINES)(
        EngineConfig(model_path, settings, device="cpu", policy_version=version)
    )
    return engine


@pytest.fixture
async def url(model_path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The HTTP API of a rollout server, for engines that forward to one."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with api(model_path, max_context_tokens=MAX_CONTEXT) as served:
        yield served.address


@pytest.fixture
async def command() -> AsyncIterator[list[str]]:
    """What starts the double of an SGLang server."""
    async with double() as made:
        yield made.command


@pytest.fixture(params=HERE)
async def engine(
    request: pytest.FixtureRequest, model_path: str, url: str, command: list[str]
) -> AsyncIterator[Engine]:
    made = build(request.param, model_path, url=url, command=command)
    await made.start()
    yield made
    await made.close()


def check_output(output: GenerationOutput, version: int = 0) -> None:
    assert output.error == ""
    assert (
        len(output.token_ids)
        == len(output.logprobs)
        == sum(count for _, count in output.version_runs)
    )
    assert all(logprob <= 1e-6 and np.isfinite(logprob) for logprob in output.logprobs)
    assert all(token == int(token) >= 0 for token in output.token_ids)
    assert {v for v, _ in output.version_runs} <= {version}


async def test_as_many_tokens_as_asked_for(engine: Engine) -> None:
    for length in (1, 2, 33):
        output = await engine.generate(ask(f"r{length}", max_tokens=length))
        check_output(output)
        assert (len(output.token_ids), output.finish_reason) == (length, "length")


async def test_the_seed_decides(engine: Engine) -> None:
    first, again, other = await asyncio.gather(
        *(engine.generate(ask(n, seed=s, max_tokens=30)) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    )
    assert list(first.token_ids) == list(again.token_ids) != list(other.token_ids)


async def test_stop_tokens_end_and_are_kept(engine: Engine) -> None:
    free = list((await engine.generate(ask("free", max_tokens=20))).token_ids)
    stop = free[4]
    output = await engine.generate(ask("stopped", max_tokens=20, stop_token_ids=[stop]))
    check_output(output)
    assert list(output.token_ids) == free[: free.index(stop) + 1]
    assert output.finish_reason == "stop"


async def test_stop_strings_end_and_are_kept(engine: Engine, model_path: str) -> None:
    tokenizer = Tokenizer.load(model_path)
    free = list((await engine.generate(ask("free", max_tokens=20))).token_ids)
    stop = tokenizer.decode(free[5:7], skip_special_tokens=False)
    assert stop
    output = await engine.generate(ask("stopped", max_tokens=20, stop=["never said", stop]))
    check_output(output)
    cut = next(
        n for n in range(1, 21) if stop in tokenizer.decode(free[:n], skip_special_tokens=False)
    )
    assert (list(output.token_ids), output.finish_reason) == (free[:cut], "stop")


async def test_end_tokens_end_unless_ignored(engine: Engine, model_path: str) -> None:
    ends = Tokenizer.load(model_path).eos_token_ids
    outputs = await asyncio.gather(
        *(engine.generate(ask(f"{s}", seed=s, max_tokens=100, ignore_eos=False)) for s in range(40))
    )
    assert "stop" in {output.finish_reason for output in outputs}
    for output in outputs:
        check_output(output)
        assert (output.token_ids[-1] in ends) == (output.finish_reason == "stop")
        assert not set(output.token_ids[:-1]) & set(ends)


async def test_the_context_bounds_the_output(engine: Engine) -> None:
    output = await engine.generate(ask("x", [5] * (MAX_CONTEXT - 3), max_tokens=100))
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], {}, "the prompt is empty"),
        (
            [5] * MAX_CONTEXT,
            {},
            f"the prompt has {MAX_CONTEXT} tokens and leaves no room to generate in "
            f"rollout.max_context_tokens={MAX_CONTEXT}",
        ),
        (PROMPT, {"max_tokens": 0}, "max_tokens=0 is not allowed; at least 1"),
    ],
    ids=["empty", "too long", "no tokens"],
)
async def test_what_cannot_run_is_answered_with_one_line(
    engine: Engine, prompt: list[int], sampling: dict[str, Any], error: str
) -> None:
    assert await engine.generate(ask("bad", prompt, **sampling)) == GenerationOutput(error=error)
    check_output(await engine.generate(ask("good")))


async def test_a_request_id_twice_at_once_is_refused_and_the_first_goes_on(engine: Engine) -> None:
    first, second = await asyncio.gather(
        engine.generate(ask("x", max_tokens=60)), engine.generate(ask("x")), return_exceptions=False
    )
    done = [output for output in (first, second) if not output.error]
    assert done
    check_output(done[0])
    check_output(await engine.generate(ask("x")))  # free again


async def test_many_at_once(engine: Engine) -> None:
    outputs = await asyncio.gather(
        *(
            engine.generate(ask(f"{i}", [5 + i % 20] * (1 + i), seed=i, max_tokens=1 + i % 17))
            for i in range(60)
        )
    )
    for i, output in enumerate(outputs):
        check_output(output)
        assert len(output.token_ids) == 1 + i % 17
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.finished["length"]) == (0, 0, 60)
    assert stats.generated_tokens == sum(1 + i % 17 for i in range(60))


async def test_a_deadline_returns_what_there_is(engine: Engine) -> None:
    began = time.monotonic()
    outputs = await asyncio.gather(
        *(engine.generate(ask(f"{i}", max_tokens=110, deadline_s=0.02)) for i in range(30))
    )
    assert time.monotonic() - began < 30
    for output in outputs:
        check_output(output)
        assert output.finish_reason in ("deadline", "length")


async def test_abort_returns_what_there_is_and_unknown_ids_do_nothing(engine: Engine) -> None:
    engine.abort("never seen")
    # more than run at once
    running = [asyncio.create_task(engine.generate(ask(f"{i}", max_tokens=110))) for i in range(10)]
    await asyncio.sleep(0.01)
    for i in range(10):
        engine.abort(f"{i}")
    for output in await asyncio.wait_for(asyncio.gather(*running), LONG_S):
        check_output(output)
        assert output.finish_reason in ("abort", "length")


async def test_a_cancelled_asker_costs_nobody_else(engine: Engine) -> None:
    gone = asyncio.create_task(engine.generate(ask("gone", max_tokens=110)))
    await asyncio.sleep(0)
    gone.cancel()
    check_output(await engine.generate(ask("stays")))
    async with asyncio.timeout(LONG_S):
        while engine.stats().running:  # noqa: ASYNC110 - engines tell their numbers, not when they change
            await asyncio.sleep(0.01)


async def test_close_ends_what_runs_and_is_idempotent(engine: Engine) -> None:
    running = asyncio.create_task(engine.generate(ask("x", max_tokens=120, min_version=0)))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    await asyncio.wait_for(engine.join(), LONG_S)
    (ended,) = await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), LONG_S)
    if isinstance(ended, GenerationOutput):
        check_output(ended)
    else:
        assert str(ended) == "the engine was closed"
    with pytest.raises(RuntimeError, match="stopped"):
        await engine.generate(ask("y"))


async def test_weights_go_in_and_are_sampled_from(engine: Engine, model_path: str) -> None:
    """What an engine without weights does instead is in the next test."""
    if not engine.has_weights:
        pytest.skip("no weights")
    held = engine.weights()
    # those of a server in another process are not
    readable = not any(tensor.is_meta for tensor in held.values())
    if not readable:
        files = load_file(Path(model_path) / "model.safetensors")
        held = {name: files[name] for name in held}
    before = await engine.logprobs(PROMPT)
    assert before.shape == (3,)
    new = {name: tensor.clone() * 1.5 for name, tensor in held.items()}
    waiting = asyncio.create_task(engine.generate(ask("waits", min_version=3)))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pause_s = await engine.update_weights(new, 3, "keep", None)
    assert 0 <= pause_s < 5
    assert engine.policy_version == 3
    check_output(await waiting, version=3)
    after = await engine.logprobs(PROMPT)
    assert np.abs(after - before).max() > 1e-3
    assert not readable or all(
        bool((engine.weights()[name] == tensor).all()) for name, tensor in new.items()
    )
    output = await engine.generate(ask("scored"))
    whole = await engine.logprobs([*PROMPT, *output.token_ids])
    assert np.abs(whole[len(PROMPT) - 1 :] - np.array(output.logprobs)).max() < 1e-4
    good = make_probe(PROMPT, after, tolerance=1e-4)
    with pytest.raises(TransferFailed, match="probe"):
        await engine.update_weights(
            {name: tensor * 2 for name, tensor in new.items()}, 4, "keep", good
        )
    assert engine.policy_version == NO_VERSION
    await engine.update_weights(new, 4, "recompute", good)
    check_output(await engine.generate(ask("again", min_version=4)), version=4)
    await engine.adopt(5)
    check_output(await engine.generate(ask("adopted", min_version=5)), version=5)


@pytest.mark.parametrize("name", HERE)
async def test_without_weights_it_serves_version_0_for_ever_and_with_them_none_until_told(
    name: str, model_path: str, url: str, command: list[str]
) -> None:
    engine = build(name, model_path, version=NO_VERSION, url=url, command=command)
    await engine.start()
    try:
        if not engine.has_weights:
            assert engine.policy_version == 0
            check_output(await engine.generate(ask("x", min_version=9)))
            assert engine.weights() == {}
            return
        assert engine.policy_version == NO_VERSION
        output = await engine.generate(ask("x", deadline_s=0.1))
        assert (list(output.token_ids), output.finish_reason) == ([], "deadline")
    finally:
        await engine.close()


@pytest.mark.parametrize("name", HERE)
async def test_a_model_path_that_is_none(name: str, tmp_path: Path) -> None:
    engine = build(name, str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="nothing") as caught:
        await engine.start()
    assert "\n" not in str(caught.value)
    await engine.close()


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_says_which_arguments_it_takes(name: str) -> None:
    assert name in ENGINE_ARGS
    with pytest.raises(
        ConfigError,
        match=r"rollout\.engine_args\.never: 1 is not allowed; unknown key, known here: ",
    ):
        check_engine(RolloutSection(engine=name, engine_args={"never": 1}))


def test_an_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: hf, openai, random, sglang, vllm"):
        check_engine(RolloutSection(engine="vlm"))
