"""docs/wire.md is up to date, complete and built from what the code says."""

from __future__ import annotations

import inspect

import msgspec

from broker import docs
from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import STREAMS


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
