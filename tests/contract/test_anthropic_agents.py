"""Agents on Anthropic's protocol as real processes: what was sampled is what is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_kit import Policy, agent_runners, agent_task, play_agent, sampled_spans
from template_models import make_tokenizer_folder

from envhub.task import EpisodeFailed, EpisodeResult
from rlearner_text.tokenizer import Tokenizer

PROGRAMS = str(Path(__file__).parents[1] / "kit" / "anthropic_programs.py")
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
OMITS = {"thinking": {"type": "adaptive", "display": "omitted"}}
# neither reasoning nor call as a template would write it
CALL = '<think>2 and\n3 </think> Let me add.\n<tool_call>\n{"arguments":  {"of": [2,3.0]}, "name": "add"}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("hermes"), "hermes"))


def args_of(name: str, **fields: Any) -> dict[str, Any]:
    return {"command": ["python", PROGRAMS, name], "env": {"FIELDS": json.dumps(fields)}}


def calling(context: str) -> str:
    return "5" if "<tool_response>" in context else CALL


def closed(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    return [[*tokenizer.encode(text), end] for text in texts]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "kinds"),
    [({}, "teto"), (THINKS, "thteto"), (OMITS, "thteto")],
    ids=["hidden", "shown", "omitted"],
)
async def test_a_conversation_with_tools_is_one_sample(
    tokenizer: Tokenizer, fields: dict[str, Any], kinds: str, stream: bool
) -> None:
    policy = Policy(tokenizer, calling)
    args = args_of("calls_tools", stream=stream, **fields)
    episode = await play_agent(tokenizer, policy, args)
    (sample,) = episode.trajectories
    assert (sample.reward, sample.response) == (1.0, kinds)
    assert sampled_spans(episode) == [closed(tokenizer, CALL, "5")] == [policy.sampled]
    text = tokenizer.decode(sample.token_ids.array(), skip_special_tokens=False)
    assert f"assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n5" in text
    assert "<|im_start|>system\nbe brief<|im_end|>" in text
    # what was trained on is what was asked
    assert policy.asks[1].token_ids.tolist() == sample.token_ids.array().tolist()[:-2]


@pytest.mark.parametrize("fields", [{}, THINKS], ids=["hidden", "shown"])
async def test_answers_that_look_alike_keep_their_own_reasoning(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    texts = [f"<think>\nthought {number}</think>\nyes" for number in range(3)]
    policy = Policy(tokenizer, lambda context: texts[context.count("<think>")])
    episode = await play_agent(tokenizer, policy, args_of("converses", **fields))
    assert sampled_spans(episode) == [closed(tokenizer, *texts)] == [policy.sampled]
    assert episode.trajectory.response == "yes"


async def test_an_answer_that_was_changed_begins_another_sample(tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, lambda _: "<think>so</think>yes")
    episode = await play_agent(tokenizer, policy, args_of("changes"))
    assert sampled_spans(episode) == [closed(tokenizer, "<think>so</think>yes")] * 2
    asked = tokenizer.decode(policy.asks[1].token_ids, skip_special_tokens=False)
    assert "assistant\n<think>\nanother\n</think>\n\nyes<|im_end|>" in asked


async def test_counting_is_no_call(tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, lambda _: "yes")
    episode = await play_agent(tokenizer, policy, args_of("counts"))
    assert (len(policy.asks), episode.trajectory.end) == (1, "terminated")
    metrics = episode.trajectory.metrics
    assert (metrics["difference"], metrics["status"]) == (0.0, 400.0)


async def test_a_prompt_beyond_the_context_ends_the_episode(tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, lambda _: "yes")
    episode = await play_agent(tokenizer, policy, args_of("too_long"), max_context_tokens=900)
    assert (episode.trajectory.end, episode.trajectory.reward) == ("length", 0.0)


async def fail(tokenizer: Tokenizer, name: str) -> EpisodeFailed:
    with pytest.raises(EpisodeFailed) as caught:
        await play_agent(tokenizer, Policy(tokenizer, lambda _: "yes"), args_of(name))
    return caught.value


async def test_an_image_is_refused_in_the_form_of_the_protocol(tokenizer: Tokenizer) -> None:
    failed = await fail(tokenizer, "sends_image")
    status, _, body = failed.detail.partition(": ")[2].partition(" ")
    assert (failed.kind, status) == ("env", "400")
    assert json.loads(body) == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "messages.0.content.0: blocks of type 'image' are not supported here; the "
            "model reads text only",
        },
    }


async def test_either_header_holds_the_key(tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, lambda _: "yes")
    episode: EpisodeResult = await play_agent(tokenizer, policy, args_of("says_bearer"))
    assert episode.trajectory.response == "assistant"
    assert episode.trajectory.metrics["status"] == 200.0


async def test_rewards_see_the_messages(tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, calling)
    args = args_of("calls_tools")
    episode = await play_agent(tokenizer, policy, args, rewards=[{"name": "./mine.py:f"}])
    (sample,) = episode.trajectories
    assert [(message.role, message.turn) for message in sample.messages] == [
        ("system", -1),
        ("user", -1),
        ("assistant", 0),
        ("tool", -1),
        ("assistant", 1),
    ]
    (call,) = sample.messages[2].tool_calls
    assert (call.name, call.arguments) == ("add", {"of": [2, 3.0]})


async def test_a_finished_episode_answers_nothing_more(tokenizer: Tokenizer) -> None:
    import aiohttp

    runners = agent_runners(tokenizer, Policy(tokenizer, lambda _: "yes"))
    seen = "import os; print(os.environ['ANTHROPIC_BASE_URL'], os.environ['ANTHROPIC_API_KEY'])"
    task = agent_task({"command": ["python", "-c", seen]})
    try:
        with pytest.raises(EpisodeFailed) as caught:
            await runners.play(task, lambda _: None)
        address, key = caught.value.detail.split("'")[1].split()
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{address}/v1/messages", json={}) as response,
        ):
            assert response.status == 401
            assert (await response.json())["error"]["type"] == "authentication_error"
    finally:
        await runners.close()
