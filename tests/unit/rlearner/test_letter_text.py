"""What ``broker dead show`` prints of a message: text, never a Python object or its bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import run_folder_kit as kit
from envhub_kit import write_tokenizer

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.jetstream.bus import Bus
from broker.operations.dead_letter_retry import _missing_process
from broker.operations.letter_text import DECODERS, content_lines, has_tokens
from broker.settings.registry import resolve
from learner.reporting.transcripts import run_decoder
from rlearner_text.tokenizer import Tokenizer


def make_group(tokenizer: Tokenizer) -> wire.Group:
    """Return a group of one episode: prompt, answer, what the environment said, answer."""
    texts = ["go", "Left", "next", "R"]
    pieces = [tokenizer.encode(text) for text in texts]
    ends = [sum(map(len, pieces[: index + 1])) for index in range(len(pieces))]
    ids = [token for piece in pieces for token in piece]
    whole = kit.trajectory(0, 0.5, [3, 3])
    turns = [
        msgspec.structs.replace(whole.turns[0], start=ends[0], end=ends[1]),
        msgspec.structs.replace(whole.turns[0], start=ends[2], end=ends[3]),
    ]
    trajectory = msgspec.structs.replace(
        whole, token_ids=wire.column(ids, "<i4"), turns=turns, reward_parts={"env": 0.5}
    )
    example = cast("wire.Group", EXAMPLES[wire.Group])
    return msgspec.structs.replace(example, prompt="Which way?\nSay it.", trajectories=[trajectory])


def test_prompt_and_answers_are_text(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model")
    group = make_group(Tokenizer.load(path))
    decode, note = run_decoder({}, str(path))
    assert note == ""
    lines = content_lines(codec.encode(group), decode)
    start = next(at for at, line in enumerate(lines) if line.startswith("episode"))
    assert lines[start:] == [
        "episode 0: not solved, reward 0.5, env 0.5; terminated after 2 turns",
        "  prompt",
        "    | go",
        "  answer 1, stop",
        "    | Left",
        "  seen",
        "    | next",
        "  answer 2, stop",
        "    | R",
    ]
    at = lines.index("  prompt")
    assert lines[at : at + 3] == ["  prompt", "    | Which way?", "    | Say it."]
    assert {"message   Group", "ticket    417", "domain    lake"} <= set(lines)
    assert not any("Column" in line or "b'" in line or "\\x" in line for line in lines)


def test_tokens_are_numbers_without_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    group = make_group(tokenizer)
    decode, note = run_decoder({}, str(tmp_path / "none"))
    assert note.startswith("tokens are shown by their numbers: ")
    numbers = " ".join(map(str, tokenizer.encode("Left")))
    assert f"    | {numbers}" in content_lines(codec.encode(group), decode)
    assert content_lines(codec.encode(group), decode) == content_lines(codec.encode(group))


def test_the_decoder_is_found_by_its_name() -> None:
    assert resolve("decoders", "run", DECODERS) is run_decoder


def test_fields_of_other_messages() -> None:
    data = codec.encode(EXAMPLES[wire.Ticket])
    assert not has_tokens(data)
    assert has_tokens(codec.encode(EXAMPLES[wire.Group]))
    assert content_lines(data)[:3] == ["message   Ticket", "number    417", "domain    lake"]
    closed = wire.Closed(ticket=3, domain="lake", reason="env_error", detail="a\x1b[2J", by="h")
    assert "detail    a\\x1b[2J" in content_lines(codec.encode(closed))


def test_what_is_no_message() -> None:
    data = msgspec.msgpack.encode({"x": 1, "ids": b"\x01\x02"})
    assert content_lines(data)[1] == '{"x": 1, "ids": "AQI="}'
    title, beginning = content_lines(b"\xc1\x00")
    assert title.startswith("not a message: ")
    assert beginning == "bytes: c1 00"
    assert content_lines(b"\xc1" * 600)[1].endswith("c1 …")


def test_retry_names_the_missing_process() -> None:
    link = SimpleNamespace(url="nats://me:secret@10.0.0.1:4222")
    bus = cast("Bus", SimpleNamespace(run="quick", link=link))
    command = "`rewardhub --run quick --broker nats://10.0.0.1:4222 --pools code` starts one"
    assert _missing_process(bus, "rewardhub", "code", []) == f"none is running; {command}"
    judge = wire.Presence(
        role="rewardhub", id="r1", host="h", pid=1, state="draining", serves=["judge"]
    )
    hub = wire.Presence(role="envhub", id="e1", host="h", pid=1, state="serving", serves=["lake"])
    assert _missing_process(bus, "rewardhub", "code", [judge, hub]) == (
        f"r1 (draining) serves judge; {command}"
    )
    assert _missing_process(bus, "envhub", "sea", [hub]) == (
        "e1 (serving) serves lake; "
        "`envhub --run quick --broker nats://10.0.0.1:4222 --domains sea` starts one"
    )
