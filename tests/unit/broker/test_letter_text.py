"""What ``broker dead show`` prints of a message: text, never a Python object or its bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
from envhub_kit import write_tokenizer
from run_folder_kit import two_turns

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.jetstream.bus import Bus
from broker.operations.dead_letter_retry import _missing_process
from broker.operations.letter_text import DECODERS, content_lines, has_tokens
from broker.settings.registry import resolve
from learner.reporting.transcripts import run_decoder
from rlearner_text.tokenizer import Tokenizer


def make_group(tokenizer: Tokenizer) -> wire.Group:
    example = cast("wire.Group", EXAMPLES[wire.Group])
    return msgspec.structs.replace(
        example, prompt="Which way?\nSay it.", trajectories=[two_turns(tokenizer)]
    )


def spec_of(model: Path) -> wire.RunSpec:
    return wire.RunSpec(
        run="a", wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path=str(model)
    )


def test_prompt_and_answers_are_text(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model")
    group = make_group(Tokenizer.load(path))
    decode, note = run_decoder(spec_of(path))
    assert note == ""
    lines = content_lines(codec.encode(group), decode)
    start = next(at for at, line in enumerate(lines) if line.startswith("episode"))
    assert lines[start:] == [
        "episode 0: solved, reward 1.75, env 1.5, length 0.25; terminated after 2 turns",
        "  prompt",
        "    | <|im_user|>PF",
        "    | HG<|im_end|><|im_assistant|>",
        "  answer 1, stop",
        "    | R",
        "  seen",
        "    | <|im_user|>SP",
        "    | HG<|im_end|><|im_assistant|>",
        "  answer 2, stop",
        "    | DX",
    ]
    at = lines.index("  prompt")
    assert lines[at : at + 3] == ["  prompt", "    | Which way?", "    | Say it."]
    assert {"message   Group", "ticket    417", "domain    lake"} <= set(lines)
    assert not any("Column" in line or "b'" in line or "\\x" in line for line in lines)


def test_tokens_are_numbers_without_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    group = make_group(tokenizer)
    decode, note = run_decoder(spec_of(tmp_path / "none"))
    assert note.startswith("tokens are shown by their numbers: ")
    numbers = " ".join(map(str, tokenizer.encode("DX")))
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
