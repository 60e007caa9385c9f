"""docs/wire.md is up to date, complete and built from what the code says."""

from __future__ import annotations

import base64
import inspect
import json
import re
from pathlib import Path

import msgspec
from nacl.signing import SigningKey

from broker import docs
from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import STREAMS
from broker.identity.tokens import read_token
from broker.identity.vouchers import check_voucher


def test_the_document_is_up_to_date() -> None:
    assert docs.TARGET.read_text(encoding="utf-8") == docs.render(), "run `python -m broker.docs`"


def test_every_field_says_what_it_means() -> None:
    silent = [
        f"{name}.{field.name}"
        for name, fields in docs.fields_of(inspect.getsource(wire)).items()
        for field in fields
        if not field.meaning
    ]
    assert silent == []


def test_every_message_and_stream_is_in_it() -> None:
    text = docs.render()
    for message in wire.MESSAGES:
        assert f"\n### {message.__name__}\n" in text
        for field in message.__struct_fields__:
            assert f"| {field} | " in text
    for stream in STREAMS:
        assert f"| {stream.name} | " in text


def test_every_message_has_an_example_that_survives_the_wire() -> None:
    assert set(EXAMPLES) == set(wire.MESSAGES)
    for kind, example in EXAMPLES.items():
        assert codec.decode(codec.encode(example), kind) == example


def test_fields_are_read_from_source_with_their_comments() -> None:
    source = 'class A:\n    """Doc."""\n    a: int  # first, in µs\n    b: list[str] = []  # second\n    c: str\n'
    assert docs.fields_of(source) == {
        "A": [
            docs.FieldDoc("a", "int", None, "first, in µs"),
            docs.FieldDoc("b", "list[str]", "[]", "second"),
            docs.FieldDoc("c", "str", None, ""),
        ]
    }


def test_nested_structs_are_documented_once() -> None:
    text = docs.render()
    for struct in (wire.Turn, wire.Trajectory, wire.SamplingParams, wire.Probe):
        assert issubclass(struct, msgspec.Struct)
        assert text.count(f"\n### {struct.__name__}\n") == 1


def test_the_voucher_of_the_document_is_recomputed_from_what_it_says(tmp_path: Path) -> None:
    """With PyNaCl alone, as a hub in another language would do it."""
    text = docs.TARGET.read_text(encoding="utf-8")
    section = text[text.index("## Join tokens and vouchers") : text.index("## Streams")]
    token_text = re.search(r"```json\n(.*?)```", section, re.DOTALL)
    assert token_text is not None
    token = json.loads(token_text[1])
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    quoted, statement, signature, *voucher = lines
    certified = quoted.strip('"')

    owner = SigningKey(bytes(range(32)))
    key = SigningKey(base64.b32decode(token["seed"] + "=" * 6)[2:34])
    assert bytes(key) == bytes(range(32, 64))
    assert base64.b32decode(token["owner"])[1:33] == bytes(owner.verify_key)
    public, expires, owners_signature = token["certificate"].split(".")
    assert base64.b32decode(public)[1:33] == bytes(key.verify_key)
    assert certified == f"rlearner certificate lake envhub {public} {expires}"
    assert owners_signature == base64.b64encode(owner.sign(certified.encode()).signature).decode()
    curve_key = json.loads(statement)[-1]
    fields = ["lake", "envhub", "hub-1", "", "", "actor", ["lake"], curve_key]
    assert statement == json.dumps(fields, separators=(",", ":"))
    signed = key.sign(b"rlearner statement\n" + statement.encode()).signature
    assert signature == base64.b64encode(signed).decode()
    assert "".join(voucher) == f"{token['certificate']}.{signature}"

    check_voucher(token["owner"], "lake", "envhub", statement.encode(), "".join(voucher))
    file = tmp_path / "hub.token"
    file.write_text(token_text[1])
    file.chmod(0o600)
    assert read_token(str(file), "envhub").login.name == "hub-a"
