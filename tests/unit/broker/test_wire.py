"""Encoding, decoding and every rule that the types cannot say."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable
from typing import Any, cast

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broker.contract import checks, codec, wire
from broker.contract.examples import EXAMPLES
from broker.errors import WireError

GROUP = cast(wire.Group, EXAMPLES[wire.Group])
TRAJECTORY = GROUP.trajectories[0]
REPLY = EXAMPLES[wire.GenerateReply]
REQUEST = EXAMPLES[wire.GenerateRequest]
replace = msgspec.structs.replace


def refused(message: wire.Message, pattern: str) -> None:
    """It is refused before it is sent and after it is received."""
    with pytest.raises(WireError, match=pattern):
        codec.encode(message)
    with pytest.raises(WireError):
        codec.decode(msgspec.msgpack.encode(message), type(message))


def in_group(**changes: Any) -> wire.Group:
    return replace(GROUP, trajectories=[TRAJECTORY, replace(TRAJECTORY, **changes)])


# -------------------------------------------------------------------------------------------------------
# columns


@pytest.mark.parametrize(
    ("values", "dtype", "data"),
    [
        ([1, -2, 2**31 - 1], "<i4", struct.pack("<3i", 1, -2, 2**31 - 1)),
        ([0.5, -1.0], "<f4", struct.pack("<2f", 0.5, -1.0)),
        ([1, 0, 1], "|u1", b"\1\0\1"),
        ([], "<i4", b""),
    ],
)
def test_a_column_is_its_bytes(values: list[float], dtype: wire.Dtype, data: bytes) -> None:
    packed = wire.column(values, dtype)
    assert packed.data == data
    assert packed.array().tolist() == values
    assert not packed.array().flags.writeable


def test_a_column_of_a_big_endian_strided_array_is_little_endian_and_dense() -> None:
    assert wire.column(np.arange(6, dtype=">i8")[::2], "<i4").data == struct.pack("<3i", 0, 2, 4)


# -------------------------------------------------------------------------------------------------
# encode, decode


@pytest.mark.parametrize("kind", wire.MESSAGES)
def test_every_message_survives(kind: type[wire.Message]) -> None:
    assert codec.decode(codec.encode(EXAMPLES[kind]), *wire.MESSAGES) == EXAMPLES[kind]


def test_the_type_decides_among_several() -> None:
    closed = EXAMPLES[wire.Closed]
    assert isinstance(codec.decode(codec.encode(closed), wire.Group, wire.Closed), wire.Closed)
    with pytest.raises(WireError, match="Ticket"):
        codec.decode(codec.encode(closed), wire.Ticket)
    with pytest.raises(WireError, match="Ticket/EvalTicket"):
        codec.decode(codec.encode(closed), wire.Ticket, wire.EvalTicket)


def test_unknown_fields_are_refused_at_every_depth() -> None:
    plain = msgpack.unpackb(codec.encode(GROUP))
    with pytest.raises(WireError, match="unknown field `colour`"):
        codec.decode(msgpack.packb(plain | {"colour": 1}), wire.Group)
    plain["trajectories"][0]["turns"][0]["colour"] = 1
    with pytest.raises(WireError, match="unknown field `colour`"):
        codec.decode(msgpack.packb(plain), wire.Group)


@pytest.mark.parametrize("field", ["ticket", "trajectories", "type"])
def test_missing_fields_are_refused(field: str) -> None:
    plain = msgpack.unpackb(codec.encode(GROUP))
    del plain[field]
    with pytest.raises(WireError, match=field):
        codec.decode(msgpack.packb(plain), wire.Group)


def test_wrong_types_are_refused() -> None:
    plain = msgpack.unpackb(codec.encode(GROUP))
    for field, value in [
        ("ticket", "1"),
        ("ticket", 1.5),
        ("pools", "judge"),
        ("trajectories", None),
        ("hub", b"x"),
        ("ticket", True),
    ]:
        with pytest.raises(WireError, match=field):
            codec.decode(msgpack.packb(plain | {field: value}), wire.Group)


def test_too_large_is_refused_before_decoding_and_before_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = codec.encode(GROUP)
    monkeypatch.setitem(wire.MAX_BYTES, wire.Group, len(data))
    monkeypatch.setattr(codec, "_DECODERS", {})
    assert codec.decode(codec.encode(GROUP), wire.Group) == GROUP
    monkeypatch.setitem(wire.MAX_BYTES, wire.Group, len(data) - 1)
    monkeypatch.setattr(codec, "_DECODERS", {})
    with pytest.raises(WireError, match=f"{len(data)} bytes, the limit is {len(data) - 1}"):
        codec.decode(data, wire.Group)
    with pytest.raises(WireError, match=r"Group is .* the limit is"):
        codec.encode(GROUP)


def test_the_cap_comes_before_the_decoder() -> None:
    with pytest.raises(WireError, match="the limit is 8388608"):
        codec.decode(b"\xc1" * (wire.MAX_PAYLOAD_BYTES + 1), wire.GenerateRequest)


@pytest.mark.parametrize(
    "change",
    [
        {"ticket": 2**70},
        {"ticket": "seven"},
        {"generate_s": np.float64(1.0)},
        {"ticket": np.int64(1)},
        {"prompt": "\ud800"},
        {"trajectories": None},
        {"trajectories": [None]},
        {"domain": 7},
        {"pools": [7]},
    ],
)
def test_what_cannot_be_encoded_is_a_wire_error(change: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="Group"):
        codec.encode(replace(GROUP, **change))


# -------------------------------------------------------------------------------------------------------
# numbers


def _number_fields() -> list[tuple[type, str]]:
    return [
        (struct_type, field.name)
        for struct_type in checks.RANGES
        for field in msgspec.structs.fields(struct_type)
        if field.type in (int, float, int | None)
    ]


def test_every_number_has_a_range_and_every_range_a_number() -> None:
    assert {(kind, name) for kind, ranges in checks.RANGES.items() for name in ranges} == set(
        _number_fields()
    )
    assert set(wire.MESSAGES) <= set(checks.RANGES)


@pytest.mark.parametrize("kind", wire.MESSAGES)
def test_every_number_of_a_message_is_checked(kind: type[wire.Message]) -> None:
    """One below and one above its range, NaN and infinity are refused; the bounds themselves pass
    the range check.
    """
    for name, (least, most, _) in checks.RANGES[kind].items():
        is_float = isinstance(getattr(EXAMPLES[kind], name), float)
        below = math.nextafter(least, -math.inf) if is_float else int(least) - 1
        bad: list[float] = [below] + ([math.nan, math.inf, -math.inf] if is_float else [])
        if most < checks.LARGEST:
            bad.append(most + 1)
        for value in bad:
            refused(replace(EXAMPLES[kind], **{name: value}), rf"{kind.__name__}\.{name}: ")


def test_numbers_of_nested_structs_are_checked() -> None:
    assert isinstance(REQUEST, wire.GenerateRequest)
    for name, value in [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("top_k", -1),
    ]:
        sampling = replace(REQUEST.sampling, **{name: value})
        refused(replace(REQUEST, sampling=sampling), rf"SamplingParams\.{name}: {value}; ")
    offer = EXAMPLES[wire.WeightsOffer]
    assert isinstance(offer, wire.WeightsOffer)
    refused(
        replace(offer, probe=replace(offer.probe, tolerance=math.nan)),
        r"Probe\.tolerance: nan; >= 0",
    )


def test_the_upper_quantile_of_a_length_is_not_below_its_median() -> None:
    assert isinstance(REQUEST, wire.GenerateRequest)
    assert (REQUEST.expected_tokens, REQUEST.expected_high) == (24, 90)
    for high in (0, 24, 25):
        codec.decode(codec.encode(replace(REQUEST, expected_high=high)), wire.GenerateRequest)
    problem = r"GenerateRequest\.expected_high: 23; must be 0 or at least expected_tokens, 24"
    refused(replace(REQUEST, expected_high=23), problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"counts": wire.column([1.0, 2.0], "<f4")},
            r"LengthRecord.counts.data: 8 bytes; must be 4 bytes for 1 values",
        ),
        (
            {"values": wire.column([math.nan], "<f4")},
            r"LengthRecord.values: another value; must be numbers from -1000000",
        ),
        (
            {"means": wire.column([2e6], "<f4")},
            r"LengthRecord.means: another value; must be numbers from -1000000",
        ),
        (
            {"counts": wire.column([-1.0], "<f4")},
            r"LengthRecord.counts: another value; must be numbers from 0 ",
        ),
        ({"tasks": wire.column([1], "<f4")}, r"LengthRecord.tasks.dtype: <f4; must be <i4"),
        ({"tasks": wire.column(range(4097), "<i4")}, r"LengthRecord.tasks: 4097; at most 4096"),
        ({"estimator": ""}, r"LengthRecord.estimator: 0 characters; 1 to 256"),
        (
            {"values": wire.column([0.0] * 17_000, "<f4")},
            r"LengthRecord is .* bytes, the limit is 65536",
        ),
    ],
)
def test_a_record_of_lengths_is_bounded_and_finite(changes: dict[str, Any], problem: str) -> None:
    refused(replace(EXAMPLES[wire.LengthRecord], **changes), problem)


# --------------------------------------------------------------------------------------------------
# trajectories


def i4(values: Iterable[int]) -> wire.Column:
    return wire.column(list(values), "<i4")


def f4(values: Iterable[float]) -> wire.Column:
    return wire.column(list(values), "<f4")


def u1(values: Iterable[int]) -> wire.Column:
    return wire.column(list(values), "|u1")


T0, T1 = TRAJECTORY.turns
# The example: tokens 0-8, turns 3:5 and 7:9, versions 11 x 3 and 12 x 1.

BAD_TRAJECTORIES: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": i4(range(8))}, r"token_ids\.data: 32 bytes; must be 36 bytes for 9 values"),
    ({"token_ids": f4(range(9))}, r"token_ids\.dtype: <f4; must be <i4"),
    ({"token_ids": wire.Column("<i4", b"\0" * 35)}, "must be 36 bytes"),
    ({"token_ids": i4([1, 2, 3, 4, 5, 6, 7, 8, -1])}, r"token_ids: -1; >= 0"),
    ({"logprobs": f4([0] * 8)}, r"logprobs\.data: 32 bytes"),
    ({"logprobs": i4([0] * 9)}, r"logprobs\.dtype: <i4"),
    ({"logprobs": f4([0, 0, 0, math.nan, -1, 0, 0, -1, -1])}, "logprobs: nan; must be finite"),
    ({"logprobs": f4([0, 0, 0, -math.inf, -1, 0, 0, -1, -1])}, "logprobs: -inf; must be finite"),
    ({"logprobs": f4([0, 0, 0, math.inf, -1, 0, 0, -1, -1])}, "logprobs: inf; must be finite"),
    (
        {"logprobs": f4([0, 0, 0, 0.01, -1, 0, 0, -1, -1])},
        r"logprobs: 0\.0\d+; must be finite and at most 0\.001",
    ),
    (
        {"logprobs": f4([-0.1, 0, 0, -1, -1, 0, 0, -1, -1])},
        r"must be 0 where the mask is 0, in 0:3",
    ),
    (
        {"logprobs": f4([0, 0, 0, -1, -1, 0, math.nan, -1, -1])},
        r"must be 0 where the mask is 0, in 5:7",
    ),
    ({"loss_mask": i4([0, 0, 0])}, r"loss_mask\.dtype: <i4; must be \|u1"),
    ({"loss_mask": u1([0, 0, 0, 1, 1, 0, 0, 1, 2])}, "must be 0 or 1 in the turn 7:9"),
    (
        {"loss_mask": u1([0, 0, 0, 1, 0, 0, 0, 1, 1])},
        "logprobs: another value; must be 0 where the mask is 0, in 3:5",
    ),
    ({"loss_mask": u1([0, 0, 1, 1, 1, 0, 0, 1, 1])}, "must be 0 outside the turns, in 0:3"),
    ({"loss_mask": u1([0, 0, 0, 1, 1, 0, 255, 1, 1])}, "must be 0 outside the turns, in 5:7"),
    ({"turns": [T0]}, "must be 0 outside the turns, in 5:9"),
    ({"turns": []}, "must be 0 outside the turns, in 0:9"),
    ({"turns": [T1, T0]}, "must be 0 outside the turns, in 0:7"),
    ({"turns": [T0, replace(T1, start=4)]}, "must lie in order within 5 to 9"),
    ({"turns": [T0, replace(T1, end=10)]}, "must lie in order"),
    ({"turns": [T0, replace(T1, start=9, end=7)]}, "must lie in order"),
    ({"turns": [replace(T0, start=-1), T1]}, "must lie in order"),
    ({"turns": [replace(T0, reward=math.nan), T1]}, r"Turn\.reward: nan; finite"),
    ({"version_runs": i4([11, 3])}, "version_runs: 3; must count the 4 sampled tokens"),
    ({"version_runs": i4([11, 3, 12, 2])}, "must count the 4 sampled"),
    ({"version_runs": i4([11, 3, 12])}, "must be pairs"),
    ({"version_runs": i4([])}, "version_runs: 0; must count"),
    ({"version_runs": i4([-1, 3, 12, 1])}, r"version_runs: \(-1, 3\)"),
    ({"version_runs": i4([11, 4, 12, 0])}, r"version_runs: \(12, 0\)"),
    ({"version_runs": i4([11, 5, 12, -1])}, r"version_runs: \(12, -1\)"),
    ({"version_runs": f4([11, 3, 12, 1])}, "pairs of <i4"),
    ({"reward": math.inf}, r"Trajectory\.reward: inf"),
    ({"episode": -1}, r"Trajectory\.episode: -1"),
    ({"reward_parts": {"env": 1.0, "judge": math.nan}}, r"reward_parts\['judge'\]: nan; finite"),
    ({"metrics": {"x": -math.inf}}, r"metrics\['x'\]: -inf; finite"),
    (
        {
            "token_ids": i4([]),
            "loss_mask": u1([]),
            "logprobs": f4([]),
            "version_runs": i4([]),
            "turns": [],
        },
        "at least one token",
    ),
]


@pytest.mark.parametrize(("changes", "pattern"), BAD_TRAJECTORIES)
def test_a_trajectory_that_contradicts_itself_is_refused(
    changes: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(WireError, match=pattern):
        checks.check_trajectory(replace(TRAJECTORY, **changes))
    refused(in_group(**changes), rf"Group\.trajectories\[1\]: .*{pattern}")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprobs": f4([-0.0, 0, 0, -1, 0, 0, -0.0, 5e-4, -1e30])},  # negative zero is zero
        # a conversation may move to a server with an older version
        {"version_runs": i4([11, 1, 11, 1, 10, 2])},
        {"turns": [T0, replace(T0, start=5, end=5), T1]},  # a turn may end before its first token
        {"turns": [T0, replace(T1, end=8), replace(T1, start=8)]},  # turns may touch
        # nothing sampled
        {"loss_mask": u1([0] * 9), "logprobs": f4([0] * 9), "version_runs": i4([]), "turns": []},
        {
            "loss_mask": u1([0, 0, 0, 1, 0, 0, 0, 1, 1]),
            "logprobs": f4([0, 0, 0, -1, 0, 0, 0, -1, -1]),
            "version_runs": i4([11, 3]),
        },  # reshaped
        {
            "loss_mask": u1([1] * 9),
            "version_runs": i4([0, 9]),
            "turns": [replace(T0, start=0, end=9)],
        },
    ],
)
def test_unusual_trajectories_that_are_right_pass(changes: dict[str, Any]) -> None:
    group = in_group(**changes)
    assert codec.decode(codec.encode(group), wire.Group) == group


@given(st.data())
def test_the_fast_check_agrees_with_the_plain_one(data: st.DataObject) -> None:
    """Against a check written token by token, over trajectories with a few things wrong."""
    n = data.draw(st.integers(1, 12))
    edges = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    turns = [replace(T0, start=a, end=b) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    mask = [int(any(turn.start <= i < turn.end for turn in turns)) for i in range(n)]
    logprobs = [-0.5 * bit for bit in mask]
    ids = list(range(n))
    runs = [3, sum(mask)] if any(mask) else []
    for _ in range(data.draw(st.integers(0, 2))):
        where = data.draw(st.integers(0, n - 1))
        what = data.draw(st.sampled_from(["mask", "logprob", "id", "runs"]))
        if what == "mask":
            mask[where] = data.draw(st.integers(0, 3))
        elif what == "logprob":
            logprobs[where] = data.draw(
                st.sampled_from([0.0, -0.0, -2.0, 1.0, math.nan, -math.inf])
            )
        elif what == "id":
            ids[where] = data.draw(st.integers(-2, 2))
        else:
            runs = data.draw(st.lists(st.integers(-1, 3), max_size=4))
    covered = [any(turn.start <= i < turn.end for turn in turns) for i in range(n)]
    right = (
        # in a turn 0: drawn from a reshaped distribution
        all(bit in (0, inside) for bit, inside in zip(mask, covered, strict=True))
        and all(
            math.isfinite(p) and (p <= 1e-3 if bit else p == 0)
            for p, bit in zip(logprobs, mask, strict=True)
        )
        and all(token >= 0 for token in ids)
        and len(runs) % 2 == 0
        and all(version >= 0 for version in runs[::2])
        and all(count >= 1 for count in runs[1::2])
        and sum(runs[1::2]) == sum(mask)
    )
    trajectory = replace(
        TRAJECTORY,
        token_ids=i4(ids),
        loss_mask=u1(mask),
        logprobs=f4(logprobs),
        version_runs=i4(runs),
        turns=turns,
    )
    try:
        checks.check_trajectory(trajectory)
    except WireError:
        assert not right
    else:
        assert right


# --------------------------------------------------------------------------------------------------
# other messages


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        (replace(GROUP, trajectories=[]), r"Group\.trajectories: \[\]; at least one"),
        (replace(GROUP, domain="a.b"), r"Group\.domain: a\.b; must be 1-64 letters"),
        (replace(GROUP, pools=["ok", ""]), r"Group\.pools: ; must be"),
        (
            replace(EXAMPLES[wire.Ticket], min_group_size=9),
            "min_group_size: 9; must be at most group_size, 8",
        ),
        (replace(REQUEST, token_ids=i4([])), "at least one token"),
        (replace(REQUEST, token_ids=i4([1, -1])), "token_ids: -1"),
        (replace(REQUEST, token_ids=wire.Column("<i4", b"abc")), "multiple of 4 bytes"),
        (replace(REQUEST, request_id=""), "request_id"),
        (replace(REQUEST, sampling=wire.SamplingParams(max_tokens=1, stop=["a", ""])), "stop"),
        (
            replace(REQUEST, sampling=wire.SamplingParams(max_tokens=1, stop_token_ids=[5, -4])),
            "stop_token_ids: -4",
        ),
        (
            replace(REQUEST, sampling=wire.SamplingParams(max_tokens=1, presence_penalty=2.5)),
            r"presence_penalty: 2\.5; -2 to 2",
        ),
        (
            replace(REQUEST, sampling=wire.SamplingParams(max_tokens=1, logit_bias={7: 101.0})),
            r"logit_bias: \{7: 101\.0\}; must be token ids",
        ),
        (
            replace(REQUEST, sampling=wire.SamplingParams(max_tokens=1, logit_bias={-7: 1.0})),
            r"logit_bias: \{-7: 1\.0\}; must be token ids",
        ),
        (
            replace(
                REQUEST, sampling=wire.SamplingParams(max_tokens=1, guides=[wire.Guide(schema="")])
            ),
            r"Guide\.schema: ''; must not be empty",
        ),
        (
            replace(
                REQUEST,
                sampling=wire.SamplingParams(
                    max_tokens=1, guides=[wire.Guide(schema="{}", before="x" * 65535)]
                ),
            ),
            "guides: of 65537 characters; must have at most 65536",
        ),
        (replace(REPLY, reshaped=u1([1])), "reshaped: another value; must be 2 bytes"),
        (replace(REPLY, reshaped=u1([1, 2])), "reshaped: another value; must be 2 bytes of dtype"),
        (
            replace(REPLY, top_ids=i4([1, 2, 3]), top_logprobs=f4([-1, -2, -3])),
            "must be as many for each of 2 tokens",
        ),
        (wire.AbortRequest(request_id=""), r"AbortRequest\.request_id"),
        (replace(REPLY, logprobs=f4([-0.5])), "must be 8 bytes for 2 values"),
        (replace(REPLY, logprobs=f4([-0.5, math.nan])), "logprobs: nan"),
        (replace(REPLY, version_runs=i4([11, 1])), "must count the 2 sampled tokens"),
        (
            replace(REPLY, finish_reason="error", error="broken"),
            "must come with a text in `error` and without tokens",
        ),
        (
            replace(
                REPLY, finish_reason="error", token_ids=i4([]), logprobs=f4([]), version_runs=i4([])
            ),
            "must come with a text in `error`",
        ),
        (
            replace(EXAMPLES[wire.WeightsSession], carrier="gloo"),
            "rank: 3; must be below world_size, 3",
        ),
        (
            replace(EXAMPLES[wire.WeightsSession], rank=2),
            "rank: 2; must not be below world_size, 3",
        ),
        (
            replace(EXAMPLES[wire.WeightsJoin], carriers={}),
            "carriers: {}; must be at least one, each with 1 to 4096 ranks",
        ),
        (
            replace(EXAMPLES[wire.WeightsJoin], carriers={"gloo": 0}),
            r"carriers: .*; must be at least one",
        ),
        (wire.Metrics(role="r", id="i", time=0.0, values={"a": math.nan}), r"values\['a'\]: nan"),
        (wire.Metrics(role="r", id="i.j", time=0.0, values={}), r"Metrics\.id"),
        (
            replace(EXAMPLES[wire.DeadLetter], data=bytes(2**20 + 1)),
            "1048577 bytes; at most 1048576",
        ),
        (
            replace(EXAMPLES[wire.RunSpec], config={"a": {"b": [1, math.inf]}}),
            r"config\.a\.b\[1\]: inf; finite",
        ),
        (replace(EXAMPLES[wire.RunSpec], config={"a": {1: 2}}), "keys must be strings"),
        (
            replace(EXAMPLES[wire.RunSpec], config={"a": b"x"}),
            r"config\.a: b'x'; must be a mapping",
        ),
    ],
)
def test_other_rules(message: wire.Message, pattern: str) -> None:
    refused(message, pattern)


def test_an_error_reply_needs_no_tokens() -> None:
    empty = {"token_ids": i4([]), "logprobs": f4([]), "version_runs": i4([]), "reshaped": None}
    reply = replace(REPLY, finish_reason="error", error="x", policy_version=-1, **empty)
    assert codec.decode(codec.encode(reply), wire.GenerateReply) == reply


def test_a_run_spec_nested_without_end_is_refused() -> None:
    config: dict[str, Any] = {}
    for _ in range(100_000):
        config = {"a": config}
    with pytest.raises(WireError):
        codec.encode(replace(EXAMPLES[wire.RunSpec], config=config))
    spec = codec.encode(EXAMPLES[wire.RunSpec])
    start = spec.index(b"\xa6config") + 7
    with pytest.raises(WireError):
        codec.decode(spec[:start] + b"\x81\xa1a" * 1_000_000, wire.RunSpec)


# --------------------------------------------------------------------------------------------------------
# fuzzing

EVERY = [codec.encode(EXAMPLES[kind]) for kind in wire.MESSAGES]


def survives(data: bytes) -> None:
    """Bytes decode to a message that encodes again, or raise WireError and nothing else."""
    try:
        message: wire.Message = codec.decode(data, *wire.MESSAGES)
    except WireError as error:
        problem = str(error)
    else:
        problem = ""
    assert "\n" not in problem
    if problem:
        return
    assert codec.decode(codec.encode(message), type(message)) == message


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_flipped_bits(original: bytes, data: st.DataObject) -> None:
    changed = bytearray(original)
    for position in data.draw(
        st.lists(st.integers(0, len(original) * 8 - 1), min_size=1, max_size=4)
    ):
        changed[position // 8] ^= 1 << position % 8
    survives(bytes(changed))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_cut_repeated_and_spliced(original: bytes, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from(EVERY))
    a, b = data.draw(st.integers(0, len(original))), data.draw(st.integers(0, len(other)))
    survives(original[:a] + other[b:])
    survives(original[:a])
    survives(original + other)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\xdf\xff\xff\xff\xff")  # a map of 2^32 - 1 entries
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x91" * 100_000)
def test_arbitrary_bytes(data: bytes) -> None:
    survives(data)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_any_field_with_any_value(original: bytes, data: st.DataObject) -> None:
    plain = msgpack.unpackb(original)
    field = data.draw(st.sampled_from(sorted(plain)))
    plain[field] = data.draw(_VALUES)
    survives(msgpack.packb(plain))


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_any_field_of_a_trajectory_with_any_value(data: st.DataObject) -> None:
    plain = msgpack.unpackb(codec.encode(GROUP))
    trajectory = plain["trajectories"][0]
    field = data.draw(st.sampled_from(sorted(trajectory)))
    if isinstance(trajectory[field], dict) and "dtype" in trajectory[field]:
        trajectory[field] = {
            "dtype": data.draw(st.sampled_from(["<i4", "<f4", "|u1"])),
            "data": data.draw(st.binary(max_size=40)),
        }
    elif field == "turns":
        bound = st.integers(-(2**63), 2**64 - 1) | st.integers(-1, 10)
        trajectory[field][data.draw(st.integers(0, 1))][
            data.draw(st.sampled_from(["start", "end", "reward"]))
        ] = data.draw(bound)
    else:
        trajectory[field] = data.draw(_VALUES)
    survives(msgpack.packb(plain))


@pytest.mark.parametrize("length", [1, 2, 1024, 1025, 3000])
@pytest.mark.parametrize("at", [0, -1])
def test_a_negative_token_id_is_found_in_columns_of_any_length(length: int, at: int) -> None:
    values = np.full(length, 2**31 - 1, "<i4")
    good = wire.GenerateRequest(
        request_id="r",
        conversation_id="c",
        token_ids=wire.column(values, "<i4"),
        sampling=wire.SamplingParams(max_tokens=1),
    )
    codec.decode(codec.encode(good), wire.GenerateRequest)
    values[at] = -7
    with pytest.raises(WireError, match="token_ids: -7; "):
        codec.encode(msgspec.structs.replace(good, token_ids=wire.column(values, "<i4")))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [(array("i", [1, -2]), "<i4"), (array("f", [0.5]), "<f4"), (array("B", [1, 0]), "|u1")],
)
def test_a_column_of_an_array_holds_the_bytes_that_numpy_would_make(
    values: array[float], dtype: wire.Dtype
) -> None:
    assert wire.column(values, dtype) == wire.column(list(values), dtype)


def test_an_array_of_another_type_is_converted() -> None:
    assert wire.column(array("q", [3, 4]), "<i4").array().tolist() == [3, 4]


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [("<i4", [0, -1, 2**31 - 1]), ("<f4", [0.5, -1.0, 0.0]), ("|u1", [0, 1, 255])],
)
def test_a_column_grows_as_an_array_and_goes_back(dtype: wire.Dtype, numbers: list[float]) -> None:
    column = wire.column(numbers, dtype)
    grown = wire.growable_array(column)
    assert list(grown) == numbers
    assert wire.column(grown, dtype) == column
    grown.append(numbers[0])
    assert wire.column(grown, dtype).array().tolist() == [*numbers, numbers[0]]


def test_a_mask_of_bytes_is_a_column() -> None:
    assert wire.column(bytearray(b"\0\1\1"), "|u1") == wire.column([0, 1, 1], "|u1")
