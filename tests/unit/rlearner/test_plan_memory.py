"""The plan's memory against bytes of tensors that torch counts in real steps, and against the cache
of engine hf.
"""

from __future__ import annotations

import pytest

from bench import plan as bench
from learner.backends.models import policy
from rlearner.plan import training_memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("train", "algorithm"),
    [
        ({}, {}),
        ({"gradient_checkpointing": True}, {}),
        ({"optimizer_offload": True}, {"kl_coef": 0.1}),
        ({"lora": {"rank": 8}}, {}),
    ],
    ids=["plain", "checkpointing", "offload-reference", "lora"],
)
def test_a_step_holds_what_was_planned(
    dtype: str, train: dict[str, object], algorithm: dict[str, object]
) -> None:
    error, planned, measured = bench.error_of(
        bench.Case("0.5", dtype, train=train, algorithm=algorithm)
    )
    assert error < 0.02, f"planned {planned:,.0f} bytes, measured {measured:,.0f}"


def test_a_step_with_a_critic_holds_what_was_planned() -> None:
    critic = {"critic": {"enabled": True}, "adv_estimator": "gae"}
    error, planned, measured = bench.error_of(bench.Case("0.5", "bfloat16", algorithm=critic))
    assert error < 0.02, f"planned {planned:,.0f} bytes, measured {measured:,.0f}"


def test_ten_million_parameters_whose_peak_is_the_end_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few logits at once and few tokens, gradients of weights are the most."""
    monkeypatch.setattr(policy, "_LOGIT_BUDGET", 1 << 16)
    monkeypatch.setattr(training_memory, "LOGIT_BUDGET", 1 << 16)
    case = bench.Case(
        "10", "bfloat16", length=40, sequences=2, train={"gradient_checkpointing": True}
    )
    error, planned, measured = bench.error_of(case)
    assert error < 0.01, f"planned {planned:,.0f} bytes, measured {measured:,.0f}"


def test_the_cache_of_engine_hf_is_what_was_planned() -> None:
    # Each layer has one row more, which idle rows of CUDA graphs write to.
    assert bench.kv_error("0.5", slots=6) < 1e-3
