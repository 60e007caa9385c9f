"""Tool calls as chat templates spell them: found out by a probe, read from what a policy says,
answered by tools.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from envhub_kit import Scripted, domain
from hypothesis import given
from hypothesis import strategies as st
from template_models import make_tokenizer_folder

from broker.contract import checks, codec, wire
from broker.errors import ConfigError
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.task import EpisodeTask
from envhub.tickets.assignment import assignment, group
from envhub.tickets.early_scores import score_request
from envhub.workers.calls import EnvironmentCalls
from rewardhub.episode_samples import sample_of, sample_of_request
from rewardhub.rewards.base import SampleTurn
from rewardhub.rewards.function_forms import adapt_function
from rewardhub.rewards.judges.conversation import conversation_text
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.openai import tool_calls
from rlearner_text.template_rules import TemplateRules
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import ToolCall, ToolCallError, ToolSyntax

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"to": {"type": "number"}}},
        },
    }
]
ADD_3, ADD_4 = '{"name": "add", "arguments": {"to": 3}}', '{"name": "add", "arguments": {"to": 4}}'


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("templates")
    return {
        name: Tokenizer.load(make_tokenizer_folder(root / name, name))
        for name in ("hermes", "bare", "listed", "plain")
    }


@pytest.mark.parametrize(
    ("family", "spelling"),
    [
        (
            "hermes",
            ToolSyntax("<tool_call>", "name", "arguments", "<tool_call>\n", "\n</tool_call>"),
        ),
        ("bare", ToolSyntax("", "name", "parameters")),
        ("listed", ToolSyntax("[TOOL_CALLS]", "name", "arguments", "[TOOL_CALLS][", "]")),
    ],
)
def test_the_spelling_is_read_off_the_template(
    tokenizers: dict[str, Tokenizer], family: str, spelling: ToolSyntax
) -> None:
    assert tool_calls.tool_syntax(tokenizers[family]) == spelling
    assert (
        TemplateRules(tokenizers[family], tools=json.dumps(TOOLS))._spelling.opener
        == spelling.opener
    )


def test_a_template_without_tool_calls_is_refused_where_there_are_tools(
    tokenizers: dict[str, Tokenizer],
) -> None:
    TemplateRules(tokenizers["plain"])
    with pytest.raises(
        ConfigError,
        match=r"model\.path.*cannot be used with tools: it does not write tool calls as JSON",
    ):
        TemplateRules(tokenizers["plain"], tools=json.dumps(TOOLS))


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("hermes", "plain words", []),
        ("hermes", f"Let me see.\n<tool_call>\n{ADD_3}\n</tool_call><|im_end|>", [3]),
        ("hermes", f"<tool_call>{ADD_3}</tool_call>\n<tool_call>\n{ADD_4}\n</tool_call>", [3, 4]),
        ("hermes", f"<tool_call>{ADD_3}", [3]),  # cut off behind its object: all is said
        ("bare", ' {"name": "add", "parameters": {"to": 3}}<|im_end|>', [3]),
        ("bare", "The object is {}.", []),
        ("listed", f"[TOOL_CALLS][{ADD_3}, {ADD_4}]</s>", [3, 4]),
        # arguments as a text
        ("listed", '[TOOL_CALLS]{"name": "add", "arguments": "{\\"to\\": 3}"}', [3]),
    ],
)
def test_calls_are_read(
    tokenizers: dict[str, Tokenizer], family: str, text: str, calls: list[int]
) -> None:
    rules = TemplateRules(tokenizers[family], tools=json.dumps(TOOLS))
    assert rules.calls(text) == [ToolCall("add", {"to": number}) for number in calls]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>add 3</tool_call>", "the tool call is not valid JSON: Expecting value"),
        (f"<tool_call>{ADD_3[:-1]}", "the tool call is not valid JSON: Expecting ',' delimiter"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'the tool call has no string as "name"'),
        ("<tool_call>7</tool_call>", 'the tool call has no string as "name"'),
        (
            '<tool_call>{"name": "add", "arguments": [3]}</tool_call>',
            'the tool call\'s "arguments" is not an object',
        ),
        ("<tool_call>" + "[" * 100_000, "the tool call is not valid JSON: "),
        (
            r'<tool_call>{"name": "add", "arguments": {"to": "\ud83d"}}',
            "the tool call is not valid JSON: it holds half of a surrogate pair",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"to": NaN}}',
            "the tool call is not valid JSON: it holds NaN",
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"to": 1e999}}',
            "the tool call is not valid JSON: the number 1e999 is too large",
        ),
        (
            r'<tool_call>{"name": "add", "arguments": "{\"to\": \"\\ud83d\"}"}',
            'the tool call\'s "arguments" is not an object',
        ),
        (
            f'<tool_call>{{"name": "add", "arguments": {{"to": {10**30}}}}}',
            'the tool call\'s "arguments" cannot be passed on: ',
        ),
    ],
)
def test_what_is_no_call_says_why(text: str, says: str) -> None:
    with pytest.raises(ToolCallError) as caught:
        ToolSyntax("<tool_call>", "name", "arguments").calls(text)
    assert str(caught.value).startswith(says)


@given(st.text())
def test_any_text_gives_calls_or_a_bad_call(text: str) -> None:
    for opener in ("", "<tool_call>"):
        with contextlib.suppress(ToolCallError):
            assert isinstance(ToolSyntax(opener, "name", "arguments").calls(opener + text), list)


@pytest.mark.parametrize("family", ["hermes", "bare", "listed"])
def test_a_conversation_with_tools_grows_into_the_whole_rendering(
    tokenizers: dict[str, Tokenizer], family: str
) -> None:
    tokenizer = tokenizers[family]
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a23456789", "function": {"name": "add", "arguments": {"to": 3}}}],
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 4 + 3?"},
        call,
        {"role": "tool", "content": "x 7 x"},
    ]
    messages += [
        {"role": "assistant", "content": "It is 7."},
        {"role": "user", "content": "Once more."},
    ]
    rendered = [
        tokenizer.render_chat(messages[:n], add_generation_prompt=n in (1, 3, 5), tools=TOOLS)
        for n in range(1, 6)
    ]
    conversation = Conversation(tokenizer, tools=json.dumps(TOOLS))
    for turn, role in ((0, "user"), (2, "tool"), (4, "user")):
        conversation.observe(str(messages[turn]["content"]), role)  # type: ignore[arg-type]
        assert tokenizer.decode(conversation.token_ids, skip_special_tokens=False) == rendered[turn]
        if turn < 4:
            said = (
                rendered[turn + 1]
                .removeprefix(rendered[turn])
                .removesuffix(conversation.rules.end_of_turn)
            )
            ids = [*tokenizer.encode(said), *conversation.rules.closing]
            conversation.sampled(ids, [-0.5] * len(ids), [1, len(ids)])


class Calculator(Environment):
    """Adds up what it is told by tool calls; the answer in plain words ends the episode."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._sum = 0

    @classmethod
    def tools(cls, args: Any) -> list[dict[str, Any]]:
        return TOOLS

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        self._sum = 0
        self.row = {"numbers": (3, 4), "level": 0.5}
        return Observation("Add 3 and 4.")

    def use(self, calls: Sequence[ToolCall]) -> StepResult:
        self._sum += sum(call.arguments["to"] for call in calls)
        return StepResult(Observation(f"sum {self._sum}"), 0.25 * len(calls), done=False)

    def step(self, text: str) -> StepResult:
        return StepResult(Observation(""), 1.0, done=True, success=text == str(self._sum))


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_an_episode_calls_tools_and_then_says_the_answer(
    tokenizers: dict[str, Tokenizer], isolation: str
) -> None:
    said = iter(
        [
            f"<tool_call>{ADD_3}</tool_call>",
            "<tool_call>add 4",
            f"<think>\n<tool_call>oops</think><tool_call>{ADD_4}</tool_call>",
            "7",
        ]
    )
    scripted = Scripted(tokenizers["hermes"], lambda _: next(said))
    crew = EpisodeRunners(
        tokenizers["hermes"], scripted, EnvironmentCalls(20.0), EpisodeLimits(60.0, 10.0)
    )
    section: dict[str, Any] = {
        "isolation": isolation,
        "max_turns": 9,
        "sampling": {"max_tokens": 200},
        "thinking": "drop",
    }
    chosen = domain(f"{Path(__file__).stem}:Calculator", **section)
    (trajectory,) = (
        await crew.play(
            EpisodeTask("c", chosen, task_index=0, split="train", seed=1, episode=0), lambda _: None
        )
    ).trajectories
    await crew.close()
    checks.check_trajectory(trajectory)
    assert [(turn.reward, turn.valid) for turn in trajectory.turns] == [
        (0.25, True),
        (0.0, False),
        (0.25, True),
        (1.0, True),
    ]
    assert (trajectory.success, trajectory.end, trajectory.reward) == (True, "terminated", 1.5)
    shown = tokenizers["hermes"].decode(
        trajectory.token_ids.array().tolist(), skip_special_tokens=False
    )
    answers = [part.split("\n</tool_response>")[0] for part in shown.split("<tool_response>\n")[1:]]
    assert answers == ["sum 3", "error: the tool call is not valid JSON: Expecting value", "sum 7"]
    assert '"name": "add"' in shown.split("<|im_end|>")[0]  # the template tells of the tools


CALL_3 = {"type": "function", "function": {"name": "add", "arguments": {"to": 3}}}
WHOLE = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "Add 1."},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Add 3 and 4."},
    {"role": "assistant", "content": f"<tool_call>{ADD_3}</tool_call>", "tool_calls": [CALL_3]},
    {"role": "tool", "content": "sum 3"},
    {"role": "assistant", "content": "<tool_call>add 4"},
    {"role": "tool", "content": "error: the tool call is not valid JSON: Expecting value"},
    {"role": "assistant", "content": "3"},
]


@pytest.mark.parametrize("context", ["full", "steps"])
@pytest.mark.parametrize("reward", ["./mine.py:f", "math_answer"])
async def test_a_reward_sees_every_message_call_and_result(
    tokenizers: dict[str, Tokenizer], context: str, reward: str
) -> None:
    texts = iter([f"<tool_call>{ADD_3}</tool_call>", "<tool_call>add 4", "3"])
    scripted = Scripted(tokenizers["hermes"], lambda _: next(texts))
    runners = EpisodeRunners(
        tokenizers["hermes"], scripted, EnvironmentCalls(20.0), EpisodeLimits(60.0, 10.0)
    )
    calculator = domain(
        f"{Path(__file__).stem}:Calculator",
        isolation="none",
        context=context,
        max_turns=9,
        sampling={"max_tokens": 200},
        system_prompt="be brief",
        examples=[{"question": "Add 1.", "answer": "1"}],
        rewards=[{"name": reward}],
    )
    task = EpisodeTask("c", calculator, task_index=5, split="train", seed=1, episode=0)
    result = await runners.play(task, lambda _: None)
    await runners.close()
    ticket = assignment(
        wire.Ticket(
            number=7, domain="d", task_index=5, seed=1, min_version=0, max_staleness=1,
            group_size=1, min_group_size=1, deadline_s=60.0,
        )
    )  # fmt: skip
    complete = group(ticket, [result], pools=["p"], hub="h", deliveries=1, temperature=1.0)
    decoded = codec.decode(codec.encode(complete), wire.Group)
    sample = sample_of(decoded, decoded.trajectories[-1], max_turns=9)
    assert sample == sample_of_request(score_request(ticket, result), max_turns=9)
    if reward == "math_answer":
        # it reads the response alone
        assert (sample.messages, sample.row, sample.num_turns) == ([], {}, 3)
        return
    assert sample.messages == WHOLE
    assert sample.row == {"numbers": [3, 4], "level": 0.5}
    assert [
        (turn.message, turn.reward, turn.valid, turn.num_tokens > 0) for turn in sample.turns
    ] == [(4, 0.25, True, True), (6, 0.0, False, True), (8, 1.0, True, True)]
    assert isinstance(sample.turns[0], SampleTurn)

    def count_tool_calls(completions: Any, level: list[float], **kwargs: Any) -> list[float]:
        assert completions == [WHOLE[4:]]
        assert kwargs == {"prompts": [WHOLE[:4]], "numbers": [[3, 4]]}
        calls = [call for message in completions[0] for call in message.get("tool_calls", ())]
        return [level[0] * len(calls)]

    assert adapt_function(count_tool_calls, {})(sample) == 0.5
    assert conversation_text(sample).startswith(
        "[system]\n    be brief\n\n[user]\n    Add 1.\n\n[assistant]\n    1\n\n[user]\n    Add 3 and 4."
    )
    assert "\n\n[tool]\n    sum 3\n\n[assistant]\n    <tool_call>add 4" in conversation_text(sample)
