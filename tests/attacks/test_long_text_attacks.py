"""A long text does not silence a server or a hub: it is refused, or encoded where the interpreter
is free.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from template_models import make_tokenizer_folder

from bench.support.long_prompt import TEXTS, measure, measure_body
from rlearner_text.openai.backends import refuse_long
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatBody, CompletionBody, GenerationBody
from rlearner_text.special_text import CUT, shielder
from rlearner_text.tokenizer import LONG_TEXT, Tokenizer

SPACES = " " * 1_500_000
TURN = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
IN_ONE_CALL = re.compile(r"(?=(?:<\|a\|><\|b\|>|<\|im_end\|>|<\|a\|>))(.)", re.DOTALL)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("long") / "qwen3", "qwen3"))


def longest_stall_s(work: Callable[[], object]) -> float:
    """Return the longest time that another thread waited for the interpreter."""
    is_over, stalls = threading.Event(), [0.0]

    def look() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.005)
            last, before = time.perf_counter(), last
            stalls.append(last - before)

    looking = threading.Thread(target=look)
    looking.start()
    work()
    is_over.set()
    looking.join()
    return max(stalls)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_prompt_of_8_mb(text: str, path: str) -> None:
    assert measure(TEXTS[text], path=path)["loop_stall_ms"] < 1000  # 20 s without the limits


BODIES: dict[str, tuple[str, object]] = {
    "tools": ("/chat/completions", {"messages": [TURN], "tools": [TOOL] * 90_000}),
    "messages": ("/chat/completions", {"messages": [TURN] * 200_000}),
    "parts": ("/chat/completions", {"messages": [{"role": "user", "content": [PART] * 200_000}]}),
    "calls": (
        "/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 80_000}]},
    ),
    "biases": ("/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(400_000)}}),
    "prompts": ("/completions", {"prompt": ["a"] * 1_500_000}),
    "lists": ("/completions", {"prompt": [[1]] * 1_000_000}),
    "items": ("/responses", {"input": [TURN] * 200_000}),
    "messages-within-the-limit": ("/chat/completions", {"messages": [TURN] * 99_000}),
}


@pytest.mark.parametrize("attack", BODIES)
def test_body_of_many_parts(attack: str) -> None:
    """Minutes for the prompts, seconds for the others, without the limits."""
    path, body = BODIES[attack]
    assert measure_body(body, path=path)["loop_stall_ms"] < 1000


@pytest.mark.parametrize("text", TEXTS.values())
def test_long_text_leaves_the_interpreter_to_others(text: str, tokenizer: Tokenizer) -> None:
    whole = text * (len(SPACES) // len(text))
    assert longest_stall_s(lambda: tokenizer.encode(tokenizer.shield(whole))) < 1.0


@pytest.mark.parametrize(
    "body",
    [
        CompletionBody(prompt=SPACES),
        CompletionBody(prompt=["a", SPACES]),
        ChatBody.model_validate({"messages": [{"role": "user", "content": SPACES}]}),
        ChatBody.model_validate(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": SPACES}]}]}
        ),
        ChatBody.model_validate(
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": SPACES}}],
            }
        ),
    ],
)
def test_refused_by_its_characters(body: GenerationBody) -> None:
    with pytest.raises(
        HttpError, match="characters, more than 524288, which do not fit into 4096 tokens"
    ) as error:
        refuse_long(body, 4096)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    refuse_long(body, 131_072)


def test_long_text_is_refused_after_a_part_of_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = tokenizer._backend.encode
    monkeypatch.setattr(
        tokenizer._backend, "encode", lambda text: (lengths.append(len(text)), encode(text))[1]
    )
    assert tokenizer.exceeds("ab " * 500_000, 4096)
    assert 0 < sum(lengths) <= 4 * LONG_TEXT
    assert not tokenizer.exceeds("ab " * 20, 4096)
    lengths.clear()
    assert tokenizer.exceeds(f"<{CUT}|" * 500_000, 4096)
    assert sum(lengths) < LONG_TEXT


@pytest.mark.parametrize("size", [65_530, 65_536, 65_540, 200_003])
def test_special_tokens_across_pieces_are_shielded(size: int) -> None:
    """At every border of the pieces in which a long text is searched."""
    shield = shielder(["<|im_end|>", "<|a|><|b|>", "<|a|>"])
    for text in (
        "x" * (size - 4) + "<|im_end|>" * 3 + "y" * 70_000,
        ("<|a|>" * size)[:size] + "<|b|>",
        "<" * size,
    ):
        cut = shield(text)
        assert cut.replace(CUT, "") == text
        assert "<|im_end|>" not in cut
        assert "<|a|>" not in cut
        assert cut == IN_ONE_CALL.sub(rf"\1{CUT}", text)  # as short texts are searched


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma"])
def test_long_text_has_the_tokens_of_the_whole(family: str, tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / family, family)
    ours, theirs = (
        Tokenizer.load(folder),
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    text = "How many é→ 17  +\n25? " * 2000
    assert len(text) > LONG_TEXT
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
