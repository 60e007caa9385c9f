"""Requests that score a context in place of sampling: the engine's answer against plain
transformers, the messages, what is refused.
"""

from __future__ import annotations

from pathlib import Path

import hf_models as models
import msgspec
import numpy as np
import pytest
import torch

from broker.contract import codec, wire
from broker.errors import WireError
from rollout.config import RolloutSection
from rollout.engines.base import NO_VERSION, REPLY_ROOM_BYTES, EngineConfig, request_problem
from rollout.engines.hf.engine_core import EngineCore

PROMPT = [5, 17, 40, 3, 99, 17, 6]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("gemma2", tmp_path_factory.mktemp("scoring"))


def request(k: int, prompt: list[int] | None = None) -> wire.GenerateRequest:
    return msgspec.structs.replace(models.request("a", prompt or PROMPT), prompt_top_k=k)


def test_the_likeliest_tokens_are_those_of_transformers(path: Path) -> None:
    core = EngineCore(
        EngineConfig(
            str(path),
            RolloutSection(max_running=2, max_context_tokens=64, num_threads=1),
            device="cpu",
            policy_version=0,
        )
    )
    model = models.load(path)
    with torch.no_grad():
        table = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    output = core.score(request(6))
    assert output.finish_reason == "stop"
    assert list(output.token_ids) == []
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    best = table.topk(6, -1)
    assert output.top_ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(output.top_logprobs, best.values.numpy(), atol=1e-4)
    whole = core.score(request(models.VOCAB))
    assert whole.top_logprobs is not None
    np.testing.assert_allclose(np.exp(whole.top_logprobs).sum(-1), 1.0, atol=1e-5)
    one = core.score(request(3, [5]))
    assert one.top_ids is not None
    assert one.top_ids.shape == (0, 3)
    assert (
        core.score(request(models.VOCAB + 1)).error
        == f"prompt_top_k=121 is not allowed; the model's vocabulary has {models.VOCAB}"
    )
    assert (
        core.score(msgspec.structs.replace(request(3), min_version=2)).error
        == "no weights of version 2 or later to score with"
    )
    core.scheduler.update(NO_VERSION)
    assert core.score(request(3)).error.startswith("no weights of version 0 or later")
    core.model.close()


def test_an_answer_that_fits_no_message_is_refused() -> None:
    most = (wire.MAX_PAYLOAD_BYTES - REPLY_ROOM_BYTES) // 8
    for tokens, refused in ((most // 4 + 1, False), (most // 4 + 2, True)):
        asked = request(4, [1] * tokens)
        assert bool(request_problem(asked, max_context_tokens=1 << 30, vocab_size=10)) is refused
    assert request_problem(request(4), max_context_tokens=64, vocab_size=None).startswith(
        "a context cannot be scored; this engine does not know"
    )


def reply(**fields: object) -> wire.GenerateReply:
    empty = {
        "token_ids": wire.column([], "<i4"),
        "logprobs": wire.column([], "<f4"),
        "version_runs": wire.column([], "<i4"),
    }
    base = {"request_id": "a", "server": "s", "finish_reason": "stop", "policy_version": 0}
    return wire.GenerateReply(**(base | empty | fields))


def test_candidates_come_in_pairs_and_as_many_for_each_token() -> None:
    ids, logprobs = wire.column([3, 4], "<i4"), wire.column([-0.5, -1.5], "<f4")
    assert (
        codec.decode(
            codec.encode(reply(top_ids=ids, top_logprobs=logprobs)), wire.GenerateReply
        ).top_ids
        == ids
    )
    for fields in (
        {"top_ids": ids},
        {"top_logprobs": logprobs},
        {"top_ids": ids, "top_logprobs": wire.column([-0.5], "<f4")},
        {"top_ids": wire.column([-1, 4], "<i4"), "top_logprobs": logprobs},
        {"top_ids": ids, "top_logprobs": wire.column([-0.5, float("nan")], "<f4")},
        {
            "top_ids": ids, "top_logprobs": logprobs, "token_ids": wire.column([1] * 3, "<i4"),
            "logprobs": wire.column([-1] * 3, "<f4"),
            "version_runs": wire.column([0, 3], "<i4"),
        },
    ):  # fmt: skip
        with pytest.raises(WireError, match=r"GenerateReply\.(top_|token_ids|logprobs)"):
            codec.encode(reply(**fields))
