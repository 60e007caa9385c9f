"""The engine ``vllm`` against plain transformers: logprobs, prefixes, new weights in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import hf_models as models
import torch
from vllm_kit import CLOSE, assert_logprobs, assert_reread, in_flight, prompt, renewed, split

from broker.errors import TransferFailed
from broker.weights.probe import make_probe
from rollout.engines.base import NO_VERSION, UpdateMode
from rollout.engines.vllm import weight_loader
from rollout.engines.vllm.weight_loader import reload_weights

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_logprobs_are_those_of_a_plain_forward(make: Any, folder: Path) -> None:
    engine, model = await make(), models.load(folder)
    contexts = {str(i): prompt(3 + 5 * i, seed=i) for i in range(9)}
    for round_ in range(3):
        asked = {
            key: engine.generate(
                models.request(
                    f"{key}-{round_}",
                    context,
                    conversation=key,
                    seed=int(key),
                    temperature=(1.0, 0.6, 1.7)[int(key) % 3],
                )
            )
            for key, context in contexts.items()
        }
        for key, output in zip(asked, await asyncio.gather(*asked.values()), strict=True):
            assert output.version_runs == [(0, 8)]
            assert_logprobs(model, contexts[key], output, (1.0, 0.6, 1.7)[int(key) % 3])
            contexts[key] += [*output.token_ids, *prompt(4, seed=round_)]
    assert engine.stats().prefix_hit_tokens > 0


async def test_top_k_and_greedy_logprobs(make: Any, folder: Path) -> None:
    engine, model, context = await make(), models.load(folder), prompt(10)
    filtered = await engine.generate(models.request("k", context, top_k=3, temperature=0.8, seed=1))
    greedy = await engine.generate(models.request("greedy", context, temperature=0))
    ids = list(context)
    for token, logprob in zip(filtered.token_ids, filtered.logprobs, strict=True):
        with torch.no_grad():
            best = (model(torch.tensor([ids])).logits[0, -1] / 0.8).topk(3)
        place = best.indices.tolist().index(token)
        assert abs(float(best.values.log_softmax(-1)[place]) - logprob) < CLOSE
        ids.append(token)
    generated = model.generate(
        torch.tensor([context]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert list(greedy.token_ids) == generated[0, len(context) :].tolist()
    assert list(greedy.logprobs) == [0.0] * 8


async def test_logprobs_and_the_likeliest_tokens_of_a_context(make: Any, folder: Path) -> None:
    engine, model, ids = await make(), models.load(folder), prompt(30)
    found = await engine.logprobs(ids)
    torch.testing.assert_close(
        torch.tensor(found), models.logprobs(model, ids[:1], ids[1:]), atol=CLOSE, rtol=0
    )
    asked = models.request("s", ids)
    output = await engine.generate(
        type(asked)(**{f: getattr(asked, f) for f in asked.__struct_fields__} | {"prompt_top_k": 5})
    )
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(5)
    assert output.finish_reason == "stop"
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    np.testing.assert_array_equal(output.top_ids, best.indices.numpy())
    np.testing.assert_allclose(output.top_logprobs, best.values.numpy(), atol=CLOSE)


async def test_recompute_goes_on_as_if_the_new_weights_had_read_everything(
    make: Any, folder: Path
) -> None:
    engine, old, context = await make(), models.load(folder), prompt(11)
    new, tensors = renewed(folder)
    task = await in_flight(engine, context)
    await engine.update_weights(tensors, 1, "recompute", None)
    output = await task
    assert_reread(old, new, context, output)


async def test_keep_goes_on_with_the_old_keys_and_values(make: Any, folder: Path) -> None:
    engine, old, context = await make(), models.load(folder), prompt(11)
    new, tensors = renewed(folder)
    task = await in_flight(engine, context)
    await engine.update_weights(tensors, 1, "keep", None)
    output = await task
    before, sampled = split(output, (0, 1)), list(output.token_ids)
    with torch.no_grad():
        cache = old(torch.tensor([context + sampled[: before - 1]]), use_cache=True).past_key_values
        logits = new(
            torch.tensor([sampled[before - 1 : -1]]), past_key_values=cache, use_cache=True
        ).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(sampled[before:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs[before:]), expected, atol=CLOSE, rtol=0)
    again = await engine.generate(models.request("y", context + sampled, conversation="x"))
    assert again.prefix_hit_tokens == 0  # its blocks hold old keys
    assert_logprobs(new, context + sampled, again)


async def test_abort_returns_the_partial_output_and_the_queue_goes_on(
    make: Any, folder: Path
) -> None:
    engine, old, context = await make(max_running=1), models.load(folder), prompt(11)
    new, tensors = renewed(folder)
    task = await in_flight(engine, context)
    waits = asyncio.create_task(engine.generate(models.request("waits", context, seed=9)))
    await asyncio.sleep(0)
    await engine.update_weights(tensors, 1, "abort", None)
    output = await task
    assert output.finish_reason == "abort"
    assert 0 < len(output.token_ids) < 90
    assert output.version_runs == [(0, len(output.token_ids))]
    assert_logprobs(old, context, output)
    queued = await waits
    assert queued.version_runs == [(1, 8)]
    assert_logprobs(new, context, queued)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
async def test_prefixes_are_never_stale(mode: UpdateMode, make: Any, folder: Path) -> None:
    """One conversation before the update, many of its prefix in flight during it, one after it."""
    engine, context = await make(), prompt(40)
    new, tensors = renewed(folder, seed=2)
    await engine.generate(models.request("1", context, conversation="c"))
    hit = await engine.generate(models.request("1b", [*context, 5], conversation="c"))
    assert hit.prefix_hit_tokens > 0
    during = [
        asyncio.create_task(
            engine.generate(models.request(f"d{i}", [*context, 9 + i], max_tokens=2, seed=i))
        )
        for i in range(12)
    ]
    await asyncio.sleep(0.005)
    await engine.update_weights(tensors, 1, mode, None)
    output = await engine.generate(models.request("2", context, conversation="c", temperature=0.7))
    assert_logprobs(new, context, output, 0.7)
    for i, each in enumerate(await asyncio.gather(*during)):
        # wholly of the new weights, so no old key or value may be in it
        if each.version_runs == [(1, 2)]:
            assert_logprobs(new, [*context, 9 + i], each)


def probe_of(model: Any) -> Any:
    ids = prompt(8, seed=77)
    return make_probe(ids, models.logprobs(model, ids[:1], ids[1:]).numpy(), tolerance=1e-3)


async def test_nothing_sampled_from_wrong_weights_is_given_out(make: Any, folder: Path) -> None:
    engine, old, context = await make(), models.load(folder), prompt(11)
    new, tensors = renewed(folder)
    task = await in_flight(engine, context)
    with pytest.raises(TransferFailed, match="loaded incorrectly"):
        await engine.update_weights(tensors, 1, "keep", probe_of(old))
    assert engine.policy_version == NO_VERSION
    output = await task
    assert output.finish_reason == "abort"
    assert output.version_runs == [(0, len(output.token_ids))]
    assert_logprobs(old, context, output)
    late = asyncio.create_task(engine.generate(models.request("late", context, seed=1)))
    await asyncio.sleep(0.1)
    assert not late.done()
    await engine.update_weights(tensors, 1, "keep", probe_of(new))
    assert (await late).version_runs == [(1, 8)]
    assert_logprobs(new, context, await late)


async def test_nothing_sampled_after_a_load_that_broke_is_given_out(
    make: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers may hold half of the new weights then, and those in flight are sampled from them
    until they end.
    """
    engine, old, context = await make(), models.load(folder), prompt(11)
    new, tensors = renewed(folder)

    async def half(llm: Any, *, received: bool) -> None:
        await reload_weights(llm, received=received)
        raise RuntimeError("a worker failed")

    task = await in_flight(engine, context, tokens=110)
    with monkeypatch.context() as patch:
        patch.setattr(weight_loader, "reload_weights", half)
        with pytest.raises(TransferFailed, match="vLLM could not load version 1: a worker failed"):
            await engine.update_weights(tensors, 1, "keep", None)
    output = await task
    assert (output.finish_reason, engine.policy_version) == ("abort", NO_VERSION)
    assert output.version_runs == [(0, len(output.token_ids))]
    assert_logprobs(old, context, output)
    await engine.update_weights(tensors, 2, "keep", None)
    assert_logprobs(new, context, await engine.generate(models.request("after", context)))


async def test_a_probe_that_matches_lets_what_runs_go_on(make: Any, folder: Path) -> None:
    engine, context = await make(), prompt(11)
    new, tensors = renewed(folder)
    tasks = [await in_flight(engine, context, tokens=60, name=name) for name in "abc"]
    await engine.update_weights(tensors, 1, "keep", probe_of(new))
    for output in await asyncio.gather(*tasks):
        assert output.finish_reason == "length"
        assert sum(count for _, count in output.version_runs) == 60


async def test_an_update_that_does_not_fit_changes_nothing(make: Any, folder: Path) -> None:
    engine, model, context = await make(), models.load(folder), prompt(9)
    good = models.changed(model, seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    for bad, why in (
        (
            {k: v for k, v in good.items() if k != name},
            rf"lacks 1 of \d+ tensors, the first is {name}",
        ),
        ({**good, "extra": torch.zeros(1)}, "has 1 unknown tensors, the first is extra"),
        ({**good, name: torch.zeros(2, 3)}, rf"{name} has shape \(2, 3\)"),
    ):
        with pytest.raises(TransferFailed, match=why):
            await engine.update_weights(bad, 1, "keep", None)
    assert engine.policy_version == 0
    assert_logprobs(model, context, await engine.generate(models.request("x", context)))


async def test_an_older_version_of_a_new_learner_ends_what_may_not_go_on(
    make: Any, folder: Path
) -> None:
    engine = await make(5)
    _, tensors = renewed(folder)
    new = asyncio.create_task(
        engine.generate(models.request("new", prompt(5), min_version=5, max_tokens=110))
    )
    old = await in_flight(engine, prompt(5), tokens=110)
    await engine.update_weights(tensors, 3, "keep", None)
    assert (await new).finish_reason == "abort"
    assert [version for version, _ in (await old).version_runs] == [5, 3]


async def test_logits_that_are_not_finite_end_the_request_with_an_error(
    make: Any, folder: Path
) -> None:
    engine, model = await make(), models.load(folder)
    good = {name: tensor.clone() for name, tensor in engine.weights().items()}
    await engine.update_weights(
        {name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()},
        1,
        "keep",
        None,
    )
    for i in range(4):
        assert (
            await engine.generate(models.request(f"x{i}", prompt(40, i)))
        ).error == "the model's logits are not finite"
    await engine.update_weights(good, 2, "keep", None)
    asked = {
        length: engine.generate(models.request(str(length), prompt(length)))
        for length in (9, 30, 41)
    }
    for length, output in zip(asked, await asyncio.gather(*asked.values()), strict=True):
        assert_logprobs(model, prompt(length), output)


async def test_names_of_the_weights_are_the_models_own_with_tied_ones_once(
    make: Any, folder: Path
) -> None:
    found = (await make()).weights()
    expected = dict(models.load(folder).named_parameters())
    assert found.keys() == expected.keys()
    assert "lm_head.weight" not in found
    assert all(torch.equal(found[name], expected[name]) for name in expected)
