"""What a streaming client is shown of a growing output: in the end the whole text, never more,
never taken back. No network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_models import make_tokenizer_folder

from broker.contract import wire
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter
from rlearner_text.openai.partial_text import PartialText
from rlearner_text.openai.request_bodies import ChatBody, CompletionBody, GenerationBody, parse
from rlearner_text.openai.sse_chunks import ChunkEvents
from rlearner_text.openai.token_events import TokenEvent
from rlearner_text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hello"}]
WORDS = "The goal — größer, 東京 🎉 — is at row 3.\n\n  So: 17 + 25 = 42. <tool> STOP"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "qwen3"))


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(list(ids[at : at + size]))
        at += size
    return [*pieces, list(ids[at:])]


@given(
    st.lists(st.integers(0, 2**31), max_size=40),
    st.lists(st.integers(1, 5), max_size=30),
    st.data(),
)
def test_any_tokens_in_any_pieces_come_to_the_whole_text(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], data: Any
) -> None:
    ids = [one % tokenizer.vocab_size for one in ids]
    ids = data.draw(st.permutations([*ids, *tokenizer.encode(data.draw(st.text(max_size=12)))]))
    end = frozenset(tokenizer.eos_token_ids)
    spoken, shown = PartialText(tokenizer, ends=end), ""
    whole = tokenizer.decode(ids[:-1] if ids and ids[-1] in end else ids)
    for piece in cut(ids, sizes):
        shown += spoken.add(piece)
        assert whole.startswith(shown)
    assert shown + spoken.rest(whole) == whole


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", ["STOP", "42", "東京 🎉", "row 3.\n\n  So", "T"])
def test_nothing_of_a_stop_string_is_shown(tokenizer: Tokenizer, stop: str, size: int) -> None:
    ids = tokenizer.encode(WORDS)
    spoken = PartialText(tokenizer, ends=frozenset(), stops=["never said", stop])
    whole, shown = WORDS[: WORDS.index(stop)], ""
    for piece in cut(ids, [size] * (len(ids) // size)):
        shown += spoken.add(piece)
        assert whole.startswith(shown)
    assert shown == whole
    assert spoken.rest(whole) == ""


def test_text_comes_with_its_tokens_and_characters_come_whole(tokenizer: Tokenizer) -> None:
    spoken = PartialText(tokenizer, ends=frozenset(tokenizer.eos_token_ids))
    assert [spoken.add([one]) for one in tokenizer.encode("so 東")][-3:] == ["", "", "東"]
    (end, *_) = tokenizer.eos_token_ids
    assert spoken.add([end]) == ""
    assert spoken.add(tokenizer.encode("x")) == "x"  # it was none: the output went on


def answer(
    ids: Sequence[int], reason: wire.FinishReason, runs: Sequence[int]
) -> wire.GenerateReply:
    return wire.GenerateReply(
        request_id="x", server="s", token_ids=wire.column(ids, "<i4"), logprobs=wire.column([-0.5] * len(ids), "<f4"),
        finish_reason=reason,
        version_runs=wire.column(runs, "<i4"), policy_version=9,
    )  # fmt: skip


def streamed(
    tokenizer: Tokenizer,
    body: GenerationBody,
    told: Sequence[TokenEvent],
    reply: wire.GenerateReply,
    prompt: Sequence[int] = (5,),
) -> list[Any]:
    writer = AnswerWriter(body, tokenizer, "actor", "1")
    chunks = ChunkEvents(body, tokenizer, writer, 0, prompt)
    return [
        *(chunk for piece in told for chunk in chunks.of([piece])),
        *chunks.last(AnswerChoice(0, prompt, reply)),
    ]


def test_every_token_is_in_one_chunk_with_its_version(tokenizer: Tokenizer) -> None:
    body = parse(json.dumps({"prompt": "a", "logprobs": 2}).encode(), CompletionBody)
    ids = tokenizer.encode("so be it")
    top = [[(ids[0], -0.25), (ids[1], -2.0)]]
    told = [TokenEvent([one], [-0.5], 6 if at < 2 else 7, top) for at, one in enumerate(ids[:-1])]
    made = streamed(tokenizer, body, told, answer(ids, "length", [6, 2, 7, len(ids) - 2]))
    choices = [one["choices"][0] for one in made]
    # the last was not told, and comes with the reply
    assert [one["token_ids"] for one in choices[:-1]] == [[one] for one in ids]
    assert [one["version_runs"] for one in choices[:-1]] == [[[6, 1]]] * 2 + [[[7, 1]]] * (
        len(ids) - 2
    )
    assert "".join(one["text"] for one in choices) == "so be it"
    assert [one["finish_reason"] for one in choices] == [None] * len(ids) + ["length"]
    assert [one["policy_version"] for one in made[:3]] == [6, 6, 7]
    assert made[-1]["policy_version"] == 9
    first, last = choices[0], choices[len(ids) - 1]
    assert (first["prompt_token_ids"], "prompt_token_ids" in choices[1]) == ([5], False)
    assert first["logprobs"]["top_logprobs"] == [
        {tokenizer.decode([one]): value for one, value in top[0]}
    ]
    assert first["logprobs"]["token_logprobs"] == [-0.5]
    offsets = [offset for one in choices[:-1] for offset in one["logprobs"]["text_offset"]]
    assert offsets == [len(tokenizer.decode(ids[:at])) for at in range(len(ids))]
    assert last["logprobs"]["top_logprobs"] is None


def test_an_engine_that_tells_nothing_gives_one_piece(tokenizer: Tokenizer) -> None:
    body = parse(json.dumps({"messages": HELLO, "logprobs": True}).encode(), ChatBody)
    ids = tokenizer.encode("so be it")
    first, last = (
        one["choices"][0]
        for one in streamed(tokenizer, body, [], answer(ids, "length", [6, 2, 7, len(ids) - 2]))
    )
    assert first["delta"] == {"role": "assistant", "content": "so be it"}
    assert (first["token_ids"], first["version_runs"]) == (ids, [[6, 2], [7, len(ids) - 2]])
    assert (last["delta"], last["finish_reason"], len(first["logprobs"]["content"])) == (
        {},
        "length",
        len(ids),
    )


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call>'


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = Path(make_tokenizer_folder(tmp_path_factory.mktemp("tools"), "qwen3"))
    template = """{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (f"I add. \n{CALL}", "I add.", ["add"]),
        (CALL, "", ["add"]),
        ("a <b> is no call", "a <b> is no call", []),
        ("broken \n<tool_call>\n{", "broken \n<tool_call>\n{", []),
    ],
    ids=["words and a call", "a call", "words", "broken"],
)
def test_a_tool_call_is_not_shown_as_text(
    calling: Tokenizer, said: str, content: str, calls: list[str]
) -> None:
    body = parse(json.dumps({"messages": HELLO, "tools": TOOLS}).encode(), ChatBody)
    end = calling.token_id("<|im_end|>")
    assert end is not None
    ids = [*calling.encode(said), end]
    made = streamed(
        calling,
        body,
        [TokenEvent([one], [-0.5], 0) for one in ids],
        answer(ids, "stop", [0, len(ids)]),
    )
    deltas = [one["choices"][0]["delta"] for one in made]
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    told = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"]["name"] for call in told] == calls
    assert made[-1]["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    if calls:
        assert (told[0]["index"], json.loads(told[0]["function"]["arguments"])) == (0, {"a": 17})
    else:
        assert deltas[0]["content"]  # words are not held back for calls that nobody makes
