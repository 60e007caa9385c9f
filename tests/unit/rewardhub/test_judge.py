"""The reward ``judge`` against an endpoint that answers from a script: scores, repeats, refusals,
keys, the cache, and its process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from judge_endpoint import Endpoint, said, serve_endpoint

from broker.errors import UserError
from broker.settings.config import RewardConfig
from broker.settings.secret import SecretRef
from rewardhub.reward_processes import RewardProcesses
from rewardhub.rewards.base import NoScore, Sample, Scored
from rewardhub.rewards.judge import JudgeArgs, JudgeReward
from rewardhub.worker_pool import ScoreError

KEY = "sk-a-secret-of-this-test"


def sample(response: str = "four", **fields: Any) -> Sample:
    return Sample(
        domain="essays", task_index=3, prompt="2 + 2?", response=response, reference=fields.get("reference", "4"),
        reward=0.0,
        reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=4, metrics={},
    )  # fmt: skip


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Endpoint], Any]]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    async with AsyncExitStack() as stack:

        async def start(endpoint: Endpoint) -> str:
            return await stack.enter_async_context(serve_endpoint(endpoint))

        yield start


async def judge(url: str, **args: Any) -> JudgeReward:
    made = JudgeReward(
        JudgeArgs(base_url=url, api_key=SecretRef(env="JUDGE_KEY"), backoff_s=0.01, **args)
    )
    await made.start()
    return made


async def close(made: JudgeReward) -> None:
    await made.client.close()


async def test_a_score_its_tokens_and_its_cost(serve: Any) -> None:
    endpoint = Endpoint(said("Right. Score: 3 at first, but on reflection\n**Score:** 7.5"))
    made = await judge(
        await serve(endpoint), price_in=2.0, price_out=10.0, system_prompt="be strict"
    )
    scored = await made.score(sample("I say {reference} and {low}"))
    assert scored.value == 0.75
    notes = {
        "tokens_in": 100,
        "tokens_out": 20,
        "cost": 0.0004,
        "cached": 0.0,
        "asked": 1.0,
        "truncated": 0.0,
    }
    assert scored.notes == notes
    (asked,) = endpoint.asked
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("m1", 0.0, 1024)
    system, user = asked["messages"]
    assert system == {"role": "system", "content": "be strict"}
    assert "I say {reference} and {low}" in user["content"]  # what the policy wrote is no template
    assert "[Reference answer]\n4\n" in user["content"]
    assert user["content"].endswith("where N is a number from 0 to 10.")
    assert endpoint.keys == {f"Bearer {KEY}"}
    again = await made.score(sample("I say {reference} and {low}"))
    assert (again.value, again.notes["cost"], again.notes["cached"], len(endpoint.asked)) == (
        0.75,
        0.0,
        1.0,
        1,
    )
    await close(made)


async def test_equal_questions_at_once_are_one_and_the_oldest_answers_go_first(serve: Any) -> None:
    endpoint = Endpoint(said("Score: 5"))
    endpoint.delay_s = 0.05
    made = await judge(await serve(endpoint), cache=2)
    scores = await asyncio.gather(*(made.score(sample("same")) for _ in range(8)))
    assert [one.value for one in scores] == [0.5] * 8
    assert [one.notes["cached"] for one in scores] == [0.0] + [1.0] * 7
    assert len(endpoint.asked) == 1
    for text in ("a", "b", "same", "b"):
        await made.score(sample(text))
    assert len(endpoint.asked) == 4  # "same" had made way for "b"
    await close(made)


async def test_an_answer_without_a_score_is_asked_for_again_and_never_a_zero(serve: Any) -> None:
    endpoint = Endpoint(said("Score: 11"), said("I cannot say"), said("Score: 2"))
    made = await judge(await serve(endpoint))
    scored = await made.score(sample())
    assert (scored.value, scored.notes["asked"], scored.notes["tokens_in"]) == (0.2, 3.0, 300)
    last = endpoint.asked[-1]["messages"]
    assert [message["role"] for message in last] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert (
        last[2]["content"]
        == "That holds no line `Score: N` with a number N from 0 to 10. Answer with that line alone."
    )
    endpoint.answers = [said("no idea")]
    line = r"^domain 'essays', task 3: the judge gave no score from 0 to 10 in 3 answers; the last ends 'no idea'$"
    with pytest.raises(NoScore, match=line):
        await made.score(sample("other"))
    endpoint.answers = [said("Score: 10")]  # a failure is not kept
    assert (await made.score(sample("other"))).value == 1.0
    await close(made)


async def test_a_score_in_the_thinking_of_the_judge_is_no_score(serve: Any) -> None:
    endpoint = Endpoint(said("<think>Score: 9"), said("<think>Score: 9, no</think>Score: 2"))
    made = await judge(await serve(endpoint))
    try:
        scored = await made.score(sample())
    finally:
        await close(made)
    assert scored.value == 0.2
    assert scored.notes["asked"] == 2.0


async def test_busy_endpoints_are_tried_again_and_refusals_are_not(serve: Any) -> None:
    busy = (503, {"error": {"message": "overloaded"}})
    endpoint = Endpoint(busy, busy, said("Score: 1"))
    made = await judge(await serve(endpoint), retries=2)
    assert (await made.score(sample())).value == 0.1
    endpoint.answers = [busy]
    with pytest.raises(
        RuntimeError,
        match=r"^domain 'essays', task 3: http://.* gave no answer in 3 tries: 503: overloaded$",
    ):
        await made.score(sample("b"))
    endpoint.answers, endpoint.asked = [(401, {"error": {"message": f"no such key: {KEY}"}})], []
    line = (
        r"^domain 'essays', task 3: http://\S+/v1: the endpoint answered 401: no such key: \*\*\*; "
        r"its key is taken from the .* JUDGE_KEY$"
    )
    with pytest.raises(NoScore, match=line):
        await made.score(sample("c"))
    assert len(endpoint.asked) == 1
    await close(made)


async def test_long_responses_are_shown_from_their_end_and_noted(serve: Any) -> None:
    endpoint = Endpoint(said("4"))
    made = await judge(
        await serve(endpoint),
        max_chars=3,
        template="{response}|",
        score_pattern=r"(\d)",
        low=1,
        high=5,
        extra_body={"max_tokens": None},
    )
    scored = await made.score(sample("abcdef"))
    assert (scored.value, scored.notes["truncated"]) == (0.75, 1.0)
    assert endpoint.asked[0]["messages"] == [{"role": "user", "content": "def|"}]
    assert "max_tokens" not in endpoint.asked[0]
    await close(made)


@pytest.mark.parametrize(
    ("endpoint", "line"),
    [
        (
            Endpoint(said("x"), status=401),
            r": the endpoint answered 401: .*; its key is taken from the .* JUDGE_KEY$",
        ),
        (Endpoint(said("x"), models=("m1", "m2")), r" serves m1, m2; set args\.model$"),
    ],
)
async def test_what_can_be_known_at_the_start(serve: Any, endpoint: Endpoint, line: str) -> None:
    with pytest.raises(UserError, match=line):
        await judge(await serve(endpoint))


async def test_its_process_takes_many_at_once_within_the_limit_and_is_replaced_when_it_dies(
    serve: Any,
) -> None:
    endpoint = Endpoint(said("Score: 5"))
    endpoint.delay_s = 0.2
    args = {
        "base_url": await serve(endpoint),
        "api_key": {"env": "JUDGE_KEY"},
        "max_concurrency": 4,
    }
    reward, hosts = RewardConfig(name="judge", args=args), RewardProcesses()
    await hosts.start({"domains.essays.rewards.0": reward})
    try:
        scores = await asyncio.gather(*(hosts.score(reward, sample(str(n))) for n in range(12)))
        assert {type(one) for one in scores} == {Scored}
        assert [one.value for one in scores] == [0.5] * 12
        assert endpoint.most_at_once == 4
        (process,) = (worker for pool in hosts.pools.values() for worker in pool.living)
        late = asyncio.create_task(hosts.score(reward, sample("late")))
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ScoreError, match="judge: the worker process died by SIGKILL") as caught:
            await late
        assert caught.value.retry
        assert (await hosts.score(reward, sample("late"))).value == 0.5
        assert hosts.num_killed == 1
        endpoint.answers = [(404, {"error": {"message": "no such model"}})]
        with pytest.raises(
            ScoreError, match=r"^judge: domain 'essays', task 3: http.*404: no such model$"
        ) as caught:
            await hosts.score(reward, sample("refused"))
        assert not caught.value.retry
    finally:
        await hosts.close()


async def test_a_process_that_says_nothing_any_more_is_killed(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewardhub.reward_processes.GRACE_S", 0.1)
    reward = RewardConfig(
        name="judge", args={"base_url": await serve(Endpoint(said("Score: 5"))), "timeout_s": 0.5}
    )
    hosts = RewardProcesses()
    await hosts.start({"domains.essays.rewards.0": reward})
    try:
        (process,) = (worker for pool in hosts.pools.values() for worker in pool.living)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ScoreError, match=r"^judge: no score within 0\.6 s$") as caught:
            await hosts.score(reward, sample())
        assert caught.value.retry
        assert process.gone == "was killed: it answered nothing for 0.6 s"
    finally:
        await hosts.close()


async def test_an_endpoint_that_does_not_take_the_key_ends_the_hub_with_one_line(
    serve: Any,
) -> None:
    args = {
        "base_url": await serve(Endpoint(said("x"), status=403)),
        "api_key": {"env": "JUDGE_KEY"},
    }
    hosts = RewardProcesses()
    with pytest.raises(
        UserError,
        match=r"^domains\.essays\.rewards\.1: judge: http://.*403.*; its key is taken from the .* JUDGE_KEY$",
    ):
        await hosts.start({"domains.essays.rewards.1": RewardConfig(name="judge", args=args)})
    await hosts.close()


async def test_a_judge_reads_the_whole_conversation(serve: Any) -> None:
    endpoint = Endpoint(said("Score: 10"))
    made = await judge(await serve(endpoint), template="{conversation}\n\nFrom {low} to {high}?")
    call = {"type": "function", "function": {"name": "add", "arguments": {"to": 4}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Add 4."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four.\n\n[tool]\nIt is {low}."},
    ]
    scored = await made.score(msgspec.structs.replace(sample(), messages=messages))
    await close(made)
    assert scored.value == 1.0
    # the policy's text is indented and holds no slot
    assert endpoint.asked[0]["messages"][-1]["content"] == (
        '[user]\n    Add 4.\n\n[assistant]\n    add({"to": 4})\n\n[tool]\n    4\n\n'
        "[assistant]\n    Four.\n    \n    [tool]\n    It is {low}.\n\nFrom 0 to 10?"
    )


async def test_a_long_conversation_is_cut_to_its_end(serve: Any) -> None:
    endpoint = Endpoint(said("Score: 5"))
    made = await judge(await serve(endpoint), template="{conversation}", max_chars=14)
    scored = await made.score(sample("four"))
    await close(made)
    assert endpoint.asked[0]["messages"][-1]["content"] == "tant]\n    four"
    assert scored.notes["truncated"] == 1.0


def test_a_template_shows_the_response_or_the_conversation() -> None:
    with pytest.raises(ValueError, match=r"it must hold \{response\} or \{conversation\}"):
        JudgeArgs(base_url="http://127.0.0.1:1/v1", template="{prompt}")
