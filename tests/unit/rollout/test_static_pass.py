"""Engine hf decodes with static passes as with any other, and records them when that is safe."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import model_families as families
import numpy as np
import pytest
import torch
from hf_models import request
from pass_recorder import PassRecorderDouble, record_passes

from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.hf import static_decoder
from rollout.engines.hf.engine_core import MAX_POSTPONED, EngineCore
from rollout.engines.hf.forward_pass import Segment
from rollout.engines.hf.model import SlotModel
from rollout.engines.hf.static_pass import StaticShape, fitting_shapes, rounded_up

CONTEXT = 256
CLOSE = 1e-4  # float32
MODELS = (
    "llama", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "phi3", "gpt2", "opt", "gpt_oss", "llama4", "qwen3_moe",
    "deepseek_v3",
)  # fmt: skip


@contextmanager
def opened(name: str, folder: Path, **section: Any) -> Iterator[EngineCore]:
    families.make_model(name).save_pretrained(folder)
    settings = {"max_running": 3, "max_context_tokens": CONTEXT, "num_threads": 1, **section}
    config = EngineConfig(
        str(folder), RolloutSection(**settings), "float32", device="cpu", policy_version=0
    )
    core = EngineCore(config)
    yield core
    core.model.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(2, families.VOCAB) for _ in range(length)]


def fill(model: SlotModel, slot: int, tokens: Sequence[int]) -> None:
    ids = torch.tensor(tokens)
    model.forward([Segment(slot, 0, len(tokens))], ids, torch.tensor([len(tokens) - 1]))


def caches(model: SlotModel) -> list[torch.Tensor]:
    attention = model.attention
    return [*attention._keys.values(), *attention._values.values()]


def assert_same_pass(model: SlotModel, starts: dict[int, int], *, gathers: bool) -> None:
    """Decode a token in these slots eagerly and in a static pass, which leaves all other keys and
    values as they are.
    """
    assert model.decoder is not None
    segments = [Segment(slot, start, 1) for slot, start in starts.items()]
    ids = np.array(prompt(len(segments), seed=sum(starts.values())), np.int64)
    former = [cache.clone() for cache in caches(model)]
    expected = model.forward(segments, torch.from_numpy(ids), torch.arange(len(ids)))
    changed = [cache.clone() for cache in caches(model)]
    for cache, values in zip(caches(model), former, strict=True):
        cache.copy_(values)
    with torch.inference_mode():
        logits = model.decoder.decode_as(segments, ids, gathers=gathers).clone()
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=CLOSE, rtol=0)
    for cache, values, eager in zip(caches(model), former, changed, strict=True):
        for slot, start in starts.items():
            torch.testing.assert_close(
                cache[slot, :, start], eager[slot, :, start], atol=CLOSE, rtol=CLOSE
            )
            values[slot, :, start] = cache[slot, :, start]
        assert torch.equal(cache, values)


@pytest.mark.parametrize("name", MODELS)
def test_static_pass_computes_as_any_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle slots between running ones, a kept prefix, two lengths of shapes, a slot used again."""
    recorder = record_passes(monkeypatch)
    with opened(name, tmp_path) as core:
        model = core.model
        assert model.decoder is not None
        assert recorder.records == len(model.decoder.shapes) == 2  # by the self-test
        for slot, length in ((1, 33), (2, 20), (3, families.WINDOW + 9), (4, 126)):
            fill(model, slot, prompt(length))
        for gathers in (False, True):
            for step in range(3):  # slot 2 is idle, and slot 4 goes beyond 128
                starts = {1: 33 + step, 3: families.WINDOW + 9 + step, 4: 126 + step}
                assert_same_pass(model, starts, gathers=gathers)
        fill(model, 3, prompt(5))
        assert_same_pass(model, {3: 5}, gathers=False)
        assert_same_pass(model, {0: 0}, gathers=True)
        lengths = {(shape.length, shape.gathers) for shape in model.decoder.shapes}
        assert lengths >= {(128, False), (128, True), (192, False), (192, True)}


def answers(core: EngineCore, number: int, name: str = "r") -> dict[str, GenerationOutput]:
    """Answer requests of several lengths, with and without randomness, in turns."""
    for index in range(number):
        sampling = {"temperature": float(index % 2), "seed": index, "max_tokens": 12 + index}
        core.submit(request(f"{name}{index}", prompt(7 + 5 * index), **sampling), 0.0)
    for _ in range(500):
        core.admit(0.0)
        if not core.can_step:
            break
        core.step()
    outputs = {key.removeprefix(name): output for key, output in core.outbox}
    core.outbox.clear()
    assert len(outputs) == number
    return outputs


def assert_same_answers(
    outputs: dict[str, GenerationOutput], expected: dict[str, GenerationOutput]
) -> None:
    for key, output in expected.items():
        assert list(outputs[key].token_ids) == list(output.token_ids)
        np.testing.assert_allclose(outputs[key].logprobs, output.logprobs, atol=CLOSE)


def test_recordings_outlive_new_weights_but_not_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("qwen3", tmp_path) as core:
        assert core.model.decoder is None
        assert not core.model.copies_weights
        old = answers(core, 5)
        new_weights = {key: tensor * 1.1 for key, tensor in core.model.weights().items()}
        core.update(new_weights, 1, "keep", None)
        new = answers(core, 5)
    assert [list(o.token_ids) for o in old.values()] != [list(o.token_ids) for o in new.values()]
    recorder = record_passes(monkeypatch)
    with opened("qwen3", tmp_path) as core:
        assert core.model.decoder is not None
        assert core.model.copies_weights
        replays = recorder.replays
        assert_same_answers(answers(core, 5), old)
        assert recorder.replays > replays + 10
        records = recorder.records
        core.update(new_weights, 1, "keep", None)
        assert_same_answers(answers(core, 5, "n"), new)
        assert recorder.drops == 0
        assert recorder.records < records + 3
        core.sleep()
        assert recorder.drops == 1
        assert not core.model.decoder.shapes
        core.wake()
        assert_same_answers(answers(core, 5, "w"), new)
        assert recorder.drops == 1
        assert core.model.decoder.shapes
        for parameter in core.model.model.parameters():
            parameter.data = parameter.data.clone()
        core.update(new_weights, 2, "keep", None)  # something has moved the weights
        assert recorder.drops == 2
        assert_same_answers(answers(core, 5, "m"), new)


def passes_until_read(core: EngineCore, tokens: int) -> int:
    """Return the passes that a request for which this prompt waits, while another one decodes."""
    core.submit(request("running", prompt(9), max_tokens=100), 0.0)
    for _ in range(2 * static_decoder.RECORD_AFTER):
        core.admit(0.0)
        core.step()
    core.submit(request("waiting", prompt(tokens), max_tokens=2), 0.0)
    prefilled = core.stats().prefill_tokens
    passes = 0
    while core.stats().prefill_tokens == prefilled:
        core.admit(0.0)
        core.step()
        passes += 1
    return passes - 1


def test_prompts_wait_for_a_few_replayed_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("llama", tmp_path, prefill_tokens=30) as core:
        assert passes_until_read(core, 20) == 0
    recorder = record_passes(monkeypatch)
    with opened("llama", tmp_path, prefill_tokens=30) as core:
        assert passes_until_read(core, 20) == MAX_POSTPONED
    with opened("llama", tmp_path, prefill_tokens=30) as core:
        assert passes_until_read(core, 50) == 0  # they fill a pass
    with opened("llama", tmp_path, prefill_tokens=30) as core:
        recorder.problem = "out of memory"
        core.sleep()
        core.wake()
        assert passes_until_read(core, 20) == 0


@pytest.mark.parametrize("fault", ["fails", "differs"])
def test_engine_runs_without_recordings_that_fail_the_self_test(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = record_passes(monkeypatch)
    recorder.problem = (
        "operation not permitted when stream is capturing" if fault == "fails" else ""
    )
    recorder.is_stuck = fault == "differs"
    with opened("llama", tmp_path) as core:
        assert core.model.decoder is None
        assert not core.model.copies_weights
        assert recorder.drops == 1
        assert len(answers(core, 3)) == 3
    reason = recorder.problem or "its output changes in a CUDA graph"
    assert "engine hf decodes without CUDA graphs" in caplog.text
    assert reason in caplog.text


def test_failure_after_the_start_turns_recording_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened("llama", tmp_path) as core:
        expected = answers(core, 4)
    recorder = record_passes(monkeypatch)
    with opened("llama", tmp_path) as core:
        recorder.problem = "out of memory"
        assert_same_answers(answers(core, 4), expected)
        assert core.model.decoder is not None
        assert core.model.decoder.problem == "out of memory"
        assert not core.model.decoder.shapes
    assert caplog.text.count("engine hf decodes without CUDA graphs") == 1


def test_nothing_is_recorded_without_memory_or_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = record_passes(monkeypatch)
    monkeypatch.setattr(static_decoder, "MAX_RECORDINGS", 3)
    with opened("llama", tmp_path) as core:
        recorder.room = False
        answers(core, 3)
        assert core.model.decoder is not None
        assert recorder.records == 2
        core.sleep()
        core.wake()
        recorder.room = True
        answers(core, 5)
        assert recorder.records > 2
        assert len(core.model.decoder.shapes) <= 3


def test_settings_and_states_leave_passes_unrecorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = record_passes(monkeypatch)
    with opened("llama", tmp_path / "llama", engine_args={"enforce_eager": True}) as core:
        assert core.model.decoder is None
    assert not caplog.text
    with (
        caplog.at_level(logging.INFO, "rollout.engines.hf.model"),
        opened("lfm2", tmp_path / "lfm2") as core,
    ):
        assert core.model.decoder is None
    assert "layers have recurrent states" in caplog.text
    assert recorder.records == 0


def test_shapes_are_few_and_fit() -> None:
    sizes = {rounded_up(number, 1, 200) for number in range(1, 201)}
    assert sizes == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200}
    assert {rounded_up(n, 128, 1000) for n in range(1, 1001)} == {
        128,
        192,
        256,
        384,
        512,
        768,
        1000,
    }
    slots = np.array([3, 60], np.int64)
    in_place, gathered = fitting_shapes(slots, 300, 64, 4096)
    assert in_place == StaticShape(64, 384, False)
    assert gathered == StaticShape(2, 384, True)
    assert in_place.covers(slots, 384)
    assert gathered.covers(slots, 384)
    assert not in_place.covers(slots, 385)
    assert not gathered.covers(np.array([1, 2, 3]), 9)
    assert not StaticShape(48, 384, False).covers(slots, 300)
    assert gathered.cost < in_place.cost


def test_double_records_as_the_protocol_says() -> None:
    recorder: static_decoder.PassRecorder = PassRecorderDouble()
    done: list[int] = []
    replay = recorder.record(lambda: done.append(1))
    replay()
    assert len(done) == 2
