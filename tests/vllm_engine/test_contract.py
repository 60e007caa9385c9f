"""The suite of tests/contract/test_engines.py, for the engine ``vllm``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import pytest_asyncio
from engine_kit import ask
from test_engines import (  # noqa: F401 - collected here with the fixtures of this folder
    check_output,
    test_a_cancelled_asker_costs_nobody_else,
    test_a_deadline_returns_what_there_is,
    test_a_request_id_twice_at_once_is_refused_and_the_first_goes_on,
    test_abort_returns_what_there_is_and_unknown_ids_do_nothing,
    test_as_many_tokens_as_asked_for,
    test_close_ends_what_runs_and_is_idempotent,
    test_end_tokens_end_unless_ignored,
    test_many_at_once,
    test_stop_strings_end_and_are_kept,
    test_stop_tokens_end_and_are_kept,
    test_the_context_bounds_the_output,
    test_the_seed_decides,
    test_weights_go_in_and_are_sampled_from,
    test_what_cannot_run_is_answered_with_one_line,
)

from rollout.engines.base import NO_VERSION, Engine

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def engine(make) -> AsyncIterator[Engine]:  # type: ignore[no-untyped-def]
    yield await make()


async def test_no_version_until_told(make) -> None:  # type: ignore[no-untyped-def]
    engine = await make(NO_VERSION)
    assert engine.policy_version == NO_VERSION
    output = await engine.generate(ask("x", deadline_s=0.1))
    assert (list(output.token_ids), output.finish_reason) == ([], "deadline")
    await engine.adopt(7)
    check_output(await engine.generate(ask("y", min_version=7)), version=7)
