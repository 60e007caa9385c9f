"""The engine ``vllm`` tells of tokens while it samples: the same as the whole output, with
versions, and nothing of wrong weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import hf_models as models
import torch
from vllm_kit import prompt, renewed

from broker.errors import TransferFailed
from broker.weights.probe import make_probe
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rollout.engines.base import StreamingEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")


def rows(model: Any, context: list[int], output: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context + output])).logits[0].float()
    table: torch.Tensor = (logits[len(context) - 1 : -1] / temperature).log_softmax(-1)
    return table


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_the_pieces_are_the_output(make: Any, folder: Path, temperature: float) -> None:
    engine, told = await make(), list[TokenEvent]()
    assert isinstance(engine, StreamingEngine)
    ask = models.request("a", prompt(9), max_tokens=20, seed=4, temperature=temperature)
    output = await engine.generate(ask, TokenListener(told.append, 3))
    again = await engine.generate(
        models.request("b", prompt(9), max_tokens=20, seed=4, temperature=temperature)
    )
    assert (
        list(output.token_ids)
        == list(again.token_ids)
        == [one for piece in told for one in piece.token_ids]
    )
    assert list(output.logprobs) == [one for piece in told for one in piece.logprobs]
    torch.testing.assert_close(
        torch.tensor(output.logprobs), torch.tensor(again.logprobs), atol=1e-4, rtol=0
    )
    assert (output.version_runs, output.finish_reason, {piece.version for piece in told}) == (
        [(0, 20)],
        "length",
        {0},
    )
    assert len(told) > 1
    top = [one for piece in told for one in piece.top]
    best = rows(models.load(folder), prompt(9), list(output.token_ids), temperature or 1.0).topk(3)
    assert [[token for token, _ in one] for one in top] == best.indices.tolist()
    torch.testing.assert_close(
        torch.tensor([[value for _, value in one] for one in top]), best.values, atol=1e-3, rtol=0
    )


async def test_a_listener_that_fails_costs_its_request_alone(make: Any) -> None:
    engine = await make()

    def broken(_: TokenEvent) -> None:
        raise ValueError("nobody listens")

    output = await engine.generate(
        models.request("a", prompt(9), max_tokens=90), TokenListener(broken)
    )
    assert output.error == "vLLM rejected the request: nobody listens"
    assert not engine._loading.llm.output_processor.request_states
    assert len((await engine.generate(models.request("b", prompt(9)))).token_ids) == 8


async def test_cut_off_tokens_are_not_told(make: Any, folder: Path) -> None:
    engine, told = await make(), list[TokenEvent]()
    output = await engine.generate(
        models.request("a", prompt(9), seed=4, top_k=2), TokenListener(told.append, 5)
    )
    table = (
        rows(models.load(folder), prompt(9), list(output.token_ids), 1.0)
        .topk(2)
        .values.log_softmax(-1)
    )
    found = [[value for _, value in one] for piece in told for one in piece.top]
    torch.testing.assert_close(torch.tensor(found), table, atol=1e-3, rtol=0)


async def some(engine: Any, told: list[TokenEvent], tokens: int) -> asyncio.Task[Any]:
    task = asyncio.create_task(
        engine.generate(
            models.request("x", prompt(8), max_tokens=tokens, seed=3), TokenListener(told.append)
        )
    )
    async with asyncio.timeout(30):
        while len(told) < 3:  # noqa: ASYNC110 - what is told is a list
            await asyncio.sleep(0)
    return task


async def test_new_weights_show_in_the_pieces(make: Any, folder: Path) -> None:
    engine, told = await make(), list[TokenEvent]()
    task = await some(engine, told, 90)
    model, tensors = renewed(folder)
    await engine.update_weights(
        tensors, 4, "keep", make_probe([*prompt(3), *prompt(5, 1)], _whole(model), tolerance=1e-2)
    )
    output = await task
    runs: dict[int, int] = {}
    for piece in told:
        runs[piece.version] = runs.get(piece.version, 0) + len(piece.token_ids)
    assert (list(runs.items()), [one for piece in told for one in piece.token_ids]) == (
        output.version_runs,
        list(output.token_ids),
    )
    assert sum(runs.values()) == 90


async def test_nothing_of_weights_that_fail_their_probe_is_told(make: Any, folder: Path) -> None:
    engine, told = await make(), list[TokenEvent]()
    task = await some(engine, told, 100)
    model, tensors = renewed(folder)
    with pytest.raises(TransferFailed):
        await engine.update_weights(
            tensors,
            4,
            "keep",
            make_probe([*prompt(3), *prompt(5, 1)], _whole(model) + 1, tolerance=1e-2),
        )
    output = await task
    assert {piece.version for piece in told} == {0}
    assert (output.finish_reason, list(output.token_ids)) == (
        "abort",
        [one for piece in told for one in piece.token_ids],
    )


def _whole(model: Any) -> Any:
    context = [*prompt(3), *prompt(5, 1)]
    return models.logprobs(model, context[:1], context[1:]).numpy()
