"""What the engine ``vllm`` does without vLLM: translation, shared memory, causes of a failed start."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from broker.contract import wire
from broker.errors import TransferFailed, UserError
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.update_check import check_fit
from rollout.engines.vllm.conversion import (
    output_of,
    sampling_fields,
    seed_of,
    serial_of,
    top_rows,
    version_label,
    version_runs,
)
from rollout.engines.vllm.engine import VLLMEngine
from rollout.engines.vllm.shared_weights import SharedWeights, map_shared
from rollout.engines.vllm.startup import check_heads, check_installed, startup_error

Span = namedtuple("Span", "version start end")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
async def test_without_the_package_one_line_names_the_extra() -> None:
    with pytest.raises(
        UserError, match=r"engine vllm needs the package vllm: pip install 'rlearner\[vllm\]'"
    ):
        check_installed()
    engine = VLLMEngine(EngineConfig("nowhere", RolloutSection(engine="vllm"), device="cpu"))
    with pytest.raises(UserError, match="needs the package vllm"):
        await engine.start()
    await engine.close()


def test_version_runs_merge_loads_of_one_version_and_can_stop_before_a_load() -> None:
    spans = [
        Span(version_label(1, 4), 0, 3),
        Span(version_label(2, 4), 3, 5),
        Span(version_label(3, 5), 5, 5),
        Span(version_label(4, 7), 5, 9),
    ]
    assert version_runs(spans) == [(4, 5), (7, 4)]
    assert version_runs(spans, keep_before=4) == [(4, 5)]
    assert version_runs(spans, keep_before=2) == [(4, 3)]
    assert version_runs([]) == []
    assert serial_of(version_label(12, -1)) == 12


def test_the_seed_counts_the_position() -> None:
    assert seed_of(None, 5) is None
    assert seed_of(7, 5) == seed_of(7, 5)
    assert len({seed_of(seed, length) for seed in (0, 7, 2**64 - 1) for length in (1, 2, 300)}) == 9
    assert all(0 <= (seed_of(seed, 9) or 0) < 2**63 for seed in (0, -5, 2**64 - 1))


def test_sampling_fields() -> None:
    given = wire.SamplingParams(
        max_tokens=50,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=1,
        stop=["", "end"],
        stop_token_ids=[9],
    )
    fields = sampling_fields(given, 100, 128, {1, 2})
    assert fields["max_tokens"] == 28
    assert (fields["temperature"], fields["top_k"], fields["top_p"], fields["min_p"]) == (
        0.7,
        3,
        0.9,
        0.1,
    )
    assert (
        fields["stop"],
        fields["stop_token_ids"],
        fields["ignore_eos"],
        fields["detokenize"],
    ) == (
        ["end"],
        [1, 2, 9],
        True,
        True,
    )
    greedy = sampling_fields(
        wire.SamplingParams(max_tokens=5, temperature=0, seed=3, ignore_eos=True), 10, 128, {1}
    )
    assert (greedy["seed"], greedy["stop_token_ids"], greedy["detokenize"]) == (None, [], False)


def test_a_request_that_reshapes_what_it_is_drawn_from() -> None:
    given = wire.SamplingParams(
        max_tokens=50, frequency_penalty=0.5, presence_penalty=-1.0, logit_bias={7: -100.0}
    )
    fields = sampling_fields(given, 10, 128, {1})
    assert (fields["frequency_penalty"], fields["presence_penalty"], fields["logit_bias"]) == (
        0.5,
        -1.0,
        {7: -100.0},
    )
    output = output_of(
        completion([5, 6], [-0.5, -0.25], [Span("1:3", 0, 2)]), 0, 1.0, reshaped=True
    )
    assert list(output.reshaped) == [True, True]  # vLLM does not say where: none is trained on


def completion(
    tokens: list[int], logprobs: list[float], spans: list[Span], reason: str = "length"
) -> SimpleNamespace:
    return SimpleNamespace(
        finish_reason=reason,
        token_ids=tokens,
        logprobs=SimpleNamespace(logprobs=logprobs),
        weight_versions=spans,
    )


def test_outputs_carry_versions_and_lose_what_wrong_weights_said() -> None:
    spans = [Span(version_label(1, 0), 0, 2), Span(version_label(2, 1), 2, 3)]
    whole = completion([5, 6, 7], [-1.0, -2.0, -3.0], spans)
    assert output_of(whole, 4, 1.0) == GenerationOutput(
        [5, 6, 7], [-1.0, -2.0, -3.0], [(0, 2), (1, 1)], "length", 4
    )
    assert output_of(whole, None, 0) == GenerationOutput(
        [5, 6, 7], [0.0, 0.0, 0.0], [(0, 2), (1, 1)], "length", 0
    )
    assert output_of(whole, 0, 1.0, keep_before=2) == GenerationOutput(
        [5, 6], [-1.0, -2.0], [(0, 2)], "abort", 0
    )
    assert (
        output_of(completion([5], [float("nan")], spans[:1]), 0, 1.0).error
        == "the model's logits are not finite"
    )
    assert (
        output_of(completion([5, 6], [-1.0], spans[:1]), 0, 1.0).error
        == "vLLM returned 1 logprobs for 2 tokens"
    )
    assert (
        output_of(completion([], [], [], "error"), 0, 1.0).error
        == "vLLM ended the request with 'error'"
    )


def test_the_likeliest_are_sorted_and_the_sampled_one_counts_only_among_them() -> None:
    def row(**logprobs: float) -> dict[int, SimpleNamespace]:
        return {int(token[1:]): SimpleNamespace(logprob=value) for token, value in logprobs.items()}

    ids, logprobs = top_rows([row(t9=-5.0, t1=-0.5, t2=-1.0), row(t3=-0.1, t4=-3.0)], 2)
    assert ids.tolist() == [[1, 2], [3, 4]]
    assert logprobs.tolist() == [[-0.5, -1.0], [pytest.approx(-0.1), -3.0]]


def test_another_process_sees_the_shared_weights_change() -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b.c": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "empty": torch.zeros(0),
    }
    shared = SharedWeights(tensors)
    assert all(torch.equal(shared.tensors[name], tensor) for name, tensor in tensors.items())
    there = map_shared(shared.path, shared.size_bytes, shared.layout)
    shared.fill({name: tensor + 1 for name, tensor in tensors.items()})
    assert there["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    script = (
        f"from rollout.engines.vllm.shared_weights import map_shared as m; t = m({shared.path!r}, "
        f"{shared.size_bytes}, {shared.layout!r})"
    )
    found = subprocess.run(
        [sys.executable, "-c", f"{script}; print(t['b.c'].tolist())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.strip() == "[2.5, 3.5]"
    shared.close()
    shared.close()
    with pytest.raises(FileNotFoundError):
        map_shared(shared.path, shared.size_bytes, shared.layout)


def test_what_does_not_fit_is_named() -> None:
    held = {"a": torch.zeros(2), "b": torch.zeros(3)}
    check_fit(held, {name: tensor + 1 for name, tensor in held.items()})
    for bad, why in (
        ({"a": held["a"]}, "the update lacks 1 of 2 tensors, the first is b"),
        ({**held, "c": held["a"]}, "the update has 1 unknown tensors, the first is c"),
        ({**held, "b": torch.zeros(4)}, r"b has shape \(4,\), the model expects \(3,\)"),
    ):
        with pytest.raises(TransferFailed, match=why):
            check_fit(held, bad)


def test_heads_must_divide() -> None:
    check_heads(SimpleNamespace(num_attention_heads=12), 4)
    with pytest.raises(
        UserError,
        match="tensor_parallel: 5 is not allowed; the model's 12 attention heads divide by 1, 2, 3, 4, 6, 12",
    ):
        check_heads(SimpleNamespace(num_attention_heads=12), 5)


def test_the_cause_is_the_first_error_that_was_logged_and_memory_says_what_to_lower(
    tmp_path: Path,
) -> None:
    errors = tmp_path / "errors.log"
    assert (
        startup_error(
            "1 validation error for X\n  Value error, no such model [type=value_error, x]\n", errors
        )
        == "no such model"
    )
    errors.write_text(
        "EngineCore failed to start.\nTraceback (most recent call last):\n  File x\nKeyError: 'first'\nRuntimeError: "
        "then\n"
    )
    assert startup_error("see above", errors) == "KeyError: 'first'"
    errors.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried\n")
    found = startup_error("see above", errors)
    assert found.startswith(
        "torch.OutOfMemoryError: CUDA out of memory. Tried; lower rollout.max_context_tokens"
    )
    assert "\n" not in found
