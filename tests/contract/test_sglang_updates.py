"""The engine sglang takes new weights: versions of tokens, requests in flight, what fails on the
way.
"""

# ruff: noqa: F811 - fixtures come by import

from __future__ import annotations

import asyncio
import os
import sys
import time
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import PROMPT, ask
from safetensors import SafetensorError
from sglang_double import Double, double
from sglang_kit import config, engine, logprobs_under, model_path, scaled, server, trained  # noqa: F401 - fixtures among them
from waits import until

from broker.errors import TransferFailed
from broker.weights.adapter import MergedModel, factor_shapes
from broker.weights.probe import make_probe
from rollout.engines.base import NO_VERSION
from rollout.engines.hf.model import SlotModel
from rollout.engines.sglang import weight_senders
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.weight_senders import BroadcastSender, meta_tensors


@pytest.mark.parametrize(
    ("mode", "spans"),
    [("keep", True), ("recompute", True), ("keep", False)],
    ids=["keep", "recompute", "old server"],
)
async def test_each_token_has_the_version_and_the_logprob_of_the_weights_that_sampled_it(
    mode: Any, spans: bool, model_path: str, trained: SlotModel
) -> None:
    new = scaled(trained, 1.5)
    async with double(spans=spans) as server:
        engine = SGLangEngine(config(model_path, server.command))
        await engine.start()
        running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
        await server.stand(40)
        await engine.update_weights(new, 1, mode, None)
        server.go()
        output = await running
        await engine.close()
    assert (output.error, output.finish_reason, len(output.token_ids)) == ("", "length", 120)
    (first, before), (second, after) = output.version_runs
    assert (first, second, before + after) == (0, 1, 120)
    assert before == 40
    tokens, start = [*PROMPT, *output.token_ids], len(PROMPT) - 1
    old = logprobs_under(trained, scaled(trained, 1.0), tokens)[start:]
    assert np.abs(old[:before] - output.logprobs[:before]).max() < 1e-4
    # kept KV is of the old weights, so only rebuilt KV gives the new ones' own logprobs
    if mode == "recompute" or not spans:
        assert (
            np.abs(
                logprobs_under(trained, new, tokens)[start + before :] - output.logprobs[before:]
            ).max()
            < 1e-4
        )
    else:
        assert np.abs(old[before:] - output.logprobs[before:]).max() > 1e-2
    paths = [path for path, _ in server.calls]
    assert ("/pause_generation" in paths) == (mode == "keep" and spans)
    assert server.asked("/update_weights_from_disk")[0]["flush_cache"] == (
        not (mode == "keep" and spans)
    )


async def test_every_token_counts_for_the_weights_that_sampled_it(
    model_path: str, trained: SlotModel
) -> None:
    """SGLang notes the last token of the old weights as the new weights' first."""
    async with double() as server:
        engine = SGLangEngine(config(model_path, server.command))
        await engine.start()
        running = asyncio.create_task(engine.generate(ask("long", max_tokens=60)))
        for version, factor in enumerate((1.5, 0.7, 1.2), 1):
            await server.stand(1 if version == 1 else 9)
            await engine.update_weights(scaled(trained, factor), version, "keep", None)
        server.go()
        output = await running
        await engine.close()
    assert [count for _, count in output.version_runs] == [1, 9, 9, 41]
    assert list(output.version_runs) == server.true_runs[-1]


async def test_abort_returns_what_there_was(
    engine: SGLangEngine, server: Double, trained: SlotModel
) -> None:
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
    await server.stand(30)
    await engine.update_weights(scaled(trained, 1.5), 1, "abort", None)
    output = await running
    assert output.finish_reason == "abort"
    assert len(output.token_ids) == 30
    assert list(output.version_runs) == [(0, len(output.token_ids))]


async def test_no_later_request_finds_what_was_read_by_older_weights(
    engine: SGLangEngine, server: Double, trained: SlotModel
) -> None:
    """The double keeps the old KV through an update in place, as SGLang does: only another name
    space hides it.
    """
    prompt = [5 + i % 20 for i in range(100)]
    await engine.generate(ask("first", prompt))
    again = await engine.generate(ask("again", prompt))
    assert again.prefix_hit_tokens == 99
    new = scaled(trained, 1.5)
    await engine.update_weights(new, 1, "keep", None)
    after = await engine.generate(ask("after", prompt))
    assert after.prefix_hit_tokens == 0
    expected = logprobs_under(trained, new, [*prompt, *after.token_ids])[99:]
    assert np.abs(expected - after.logprobs).max() < 1e-4
    assert {body["extra_key"] for body in server.asked("/generate")} == {
        "first",
        "weights-0",
        "weights-1",
    }


@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_weights_that_fail_their_probe_serve_nobody(
    mode: Any, engine: SGLangEngine, server: Double, trained: SlotModel
) -> None:
    probe = make_probe(PROMPT, await engine.logprobs(PROMPT), tolerance=1e-4)
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
    await server.stand(30)
    with pytest.raises(TransferFailed, match="probe"):
        await engine.update_weights(scaled(trained, 2.0), 1, mode, probe)
    assert engine.policy_version == NO_VERSION
    server.go()
    waiting = asyncio.create_task(engine.generate(ask("waits")))
    await asyncio.sleep(0.1)
    assert not running.done()
    assert not waiting.done()
    await engine.update_weights(scaled(trained, 1.0), 2, mode, probe)
    output = await running
    assert [version for version, _ in output.version_runs] == [0, 2]  # nothing by version 1
    assert len(output.token_ids) == 120
    expected = trained.logprobs([*PROMPT, *output.token_ids]).numpy()[len(PROMPT) - 1 :]
    assert np.abs(expected - output.logprobs).max() < 1e-4
    assert list((await waiting).version_runs) == [(2, 12)]


async def test_a_refused_update_is_told_and_the_next_one_serves(
    engine: SGLangEngine, server: Double, trained: SlotModel
) -> None:
    server.refuse = "/update_weights_from_disk"
    with pytest.raises(
        TransferFailed, match="SGLang answered /update_weights_from_disk with 400: as told refused"
    ):
        await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert engine.policy_version == NO_VERSION
    server.refuse = ""
    await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert list((await engine.generate(ask("x"))).version_runs) == [(1, 12)]
    folders = [body["model_path"] for body in server.asked("/update_weights_from_disk")]
    assert not any(os.path.exists(folder) for folder in folders)  # noqa: ASYNC240


async def test_a_pause_that_is_refused_does_not_last(
    engine: SGLangEngine, server: Double, trained: SlotModel
) -> None:
    server.refuse = "/pause_generation"
    with pytest.raises(TransferFailed, match="/pause_generation"):
        await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert server.asked("/continue_generation")
    assert engine.policy_version == NO_VERSION


async def test_a_version_that_is_not_adopted_is_a_failed_transfer(
    engine: SGLangEngine, server: Double
) -> None:
    server.refuse = "/update_weight_version"
    with pytest.raises(TransferFailed, match="/update_weight_version"):
        await engine.adopt(1)
    assert engine.policy_version == 0


async def test_an_update_that_is_cancelled_leaves_no_version_served(
    engine: SGLangEngine, server: Double, trained: SlotModel
) -> None:
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
    await server.stand(30)
    server.hold = asyncio.Event()
    update = asyncio.create_task(engine.update_weights(scaled(trained, 1.5), 1, "keep", None))
    await until(lambda: server.asked("/update_weights_from_disk"))
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert engine.policy_version == NO_VERSION
    server.hold.set()
    await engine.update_weights(scaled(trained, 1.0), 2, "keep", None)
    server.go()
    output = await running
    assert {version for version, _ in output.version_runs} <= {0, 2}
    expected = trained.logprobs([*PROMPT, *output.token_ids]).numpy()[len(PROMPT) - 1 :]
    assert np.abs(expected - output.logprobs).max() < 1e-4


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
async def test_a_full_disk_is_a_failed_transfer_and_the_old_weights_serve(
    error: Exception, engine: SGLangEngine, trained: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(weight_senders, "save_file", full)
        with pytest.raises(
            TransferFailed, match=r"cannot be written for SGLang to read: .*No space left"
        ):
            await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert not glob(f"/dev/shm/rlearner-weights-{os.getpid()}-*")
    assert list((await engine.generate(ask("x"))).version_runs) == [(0, 12)]


async def test_an_update_that_does_not_fit_changes_nothing(
    engine: SGLangEngine, trained: SlotModel
) -> None:
    good = scaled(trained, 1.0)
    with pytest.raises(
        TransferFailed, match=r"the update lacks 1 of \d+ tensors, the first is model.norm.weight"
    ):
        await engine.update_weights(
            {name: one for name, one in good.items() if name != "model.norm.weight"},
            1,
            "keep",
            None,
        )
    with pytest.raises(TransferFailed, match="has 1 unknown tensors, the first is extra"):
        await engine.update_weights(good | {"extra": torch.zeros(1)}, 1, "keep", None)
    with pytest.raises(
        TransferFailed, match=r"model.norm.weight has shape \(3,\), the model expects \(32,\)"
    ):
        await engine.update_weights(good | {"model.norm.weight": torch.zeros(3)}, 1, "keep", None)
    assert engine.policy_version == 0


async def test_the_server_is_given_the_model_that_factors_make_of_the_base(
    engine: SGLangEngine, trained: SlotModel
) -> None:
    base = {name: tensor.clone() for name, tensor in trained.weights().items()}
    shapes = factor_shapes(base, ["q_proj", "up_proj"], 2)
    merged = MergedModel(
        base,
        {name: torch.randn(shape.shape) for name, shape in shapes.items()},
        ["q_proj", "up_proj"],
        0.5,
    )
    expected = logprobs_under(trained, merged.made(), PROMPT)
    assert np.abs(expected - logprobs_under(trained, base, PROMPT)).max() > 1e-2
    await engine.update_weights(merged, 1, "keep", make_probe(PROMPT, expected, tolerance=1e-5))
    assert np.abs(expected - await engine.logprobs(PROMPT)).max() < 1e-5


async def test_weights_over_a_group_that_a_server_in_another_process_joins(
    model_path: str, trained: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "kit" / "sglang_double.py")]
    engine = SGLangEngine(config(model_path, command, weights="distributed"))
    await engine.start()
    try:
        for version, factor in ((1, 1.5), (2, 0.5)):
            new = scaled(trained, factor)
            # one that ends halfway leaves no half of itself to the next, which makes another group
            if version == 2:
                monkeypatch.setattr(BroadcastSender, "_broadcast", lambda *_: time.sleep(1.0))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await engine.update_weights(new, version, "keep", None)
                monkeypatch.undo()
                assert engine.policy_version == NO_VERSION
            await engine.update_weights(
                new,
                version,
                "keep",
                make_probe(PROMPT, logprobs_under(trained, new, PROMPT), tolerance=1e-4),
            )
            output = await engine.generate(ask("x"))
            assert list(output.version_runs) == [(version, 12)]
            expected = logprobs_under(trained, new, [*PROMPT, *output.token_ids])[len(PROMPT) - 1 :]
            assert np.abs(expected - output.logprobs).max() < 1e-4
    finally:
        await engine.close()


def test_names_and_shapes_are_those_of_the_trainer(model_path: str, trained: SlotModel) -> None:
    held, model = meta_tensors(model_path, "float32", trust_remote_code=False)
    own = trained.weights()
    assert list(held) == list(own)
    assert all(
        held[name].is_meta
        and held[name].shape == own[name].shape
        and held[name].dtype == own[name].dtype
        for name in own
    )
    assert model.config.num_attention_heads == 2
