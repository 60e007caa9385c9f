"""The bucket plan: order, offsets, ties, digests, and the first difference between two models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import UserError, WireError
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.plan import ITEM_BYTES, TensorSpec, from_text, make_plan

specs = st.lists(
    st.builds(
        TensorSpec,
        st.text("abc.01", min_size=1, max_size=6),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.sampled_from(sorted(ITEM_BYTES)),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda spec: spec.name,
)


def test_offsets_and_buckets_by_hand() -> None:
    plan = make_plan(
        [TensorSpec("b", (3,), "float32"), TensorSpec("a", (2, 5), "bfloat16")], 4096 / 2**20
    )
    assert [(slot.spec.name, slot.offset, slot.stop) for slot in plan.slots] == [
        ("a", 0, 20),
        ("b", 64, 76),
    ]
    assert plan.size_bytes == 128
    assert plan.buckets == ((0, 128),)
    large = make_plan([TensorSpec("a", (5000,), "uint8")], 4096 / 2**20)
    assert large.buckets == ((0, 4096), (4096, 5056))


@given(specs, st.randoms())
@settings(deadline=None)
def test_plan_does_not_depend_on_the_order_given(listed: list[TensorSpec], random: object) -> None:
    shuffled = list(listed)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert make_plan(listed, 1) == make_plan(shuffled, 1)
    assert make_plan(listed, 1).digest == make_plan(shuffled, 1).digest


@given(specs, st.integers(1, 5))
@settings(deadline=None)
def test_tensors_do_not_overlap_and_buckets_cover_all(
    listed: list[TensorSpec], num_pages: int
) -> None:
    plan = make_plan(listed, num_pages * 4096 / 2**20)
    for before, after in zip(plan.slots, plan.slots[1:], strict=False):
        assert before.stop <= after.offset
    assert all(slot.offset % 64 == 0 for slot in plan.slots)
    edges = [0, *(stop for _, stop in plan.buckets)]
    assert [start for start, _ in plan.buckets] == edges[:-1]
    assert edges[-1] == plan.size_bytes >= plan.slots[-1].stop
    assert from_text(plan.text) == plan


def test_digest_tells_name_shape_dtype_and_bucket_size_apart() -> None:
    plans = [
        make_plan([TensorSpec("a", (2, 3), "float32")], 1),
        make_plan([TensorSpec("b", (2, 3), "float32")], 1),
        make_plan([TensorSpec("a", (3, 2), "float32")], 1),
        make_plan([TensorSpec("a", (2, 3), "int32")], 1),
        make_plan([TensorSpec("a", (2, 3), "float32")], 2),
    ]
    assert len({plan.digest for plan in plans}) == 5


def test_first_difference() -> None:
    here = make_plan([TensorSpec("a", (2,), "float32"), TensorSpec("c", (2,), "float32")], 1)
    assert here.difference(
        make_plan([TensorSpec("a", (3,), "float32"), TensorSpec("b", (), "int8")], 1)
    ) == ("a float32[2] here is a float32[3] in the offer")
    assert here.difference(
        make_plan([TensorSpec("a", (2,), "float32"), TensorSpec("b", (), "int8")], 1)
    ) == ("b int8[] is in the offer but not here")
    assert (
        here.difference(make_plan([TensorSpec("a", (2,), "float32")], 1))
        == "c float32[2] is here but not in the offer"
    )
    assert here.difference(make_plan([slot.spec for slot in here.slots], 2)) == (
        "buckets of 1048576 bytes here are 2097152 bytes in the offer"
    )
    assert here.difference(here) == ""


@pytest.mark.parametrize(
    ("listed", "bucket_mib", "message"),
    [
        ([], 1.0, "no tensors"),
        ([TensorSpec("a", (1,), "complex64")], 1.0, "a has dtype complex64; known: float64"),
        (
            [TensorSpec("a", (1,), "int8"), TensorSpec("a", (1,), "int8")],
            1.0,
            "two tensors are named a",
        ),
        ([TensorSpec("a", (1,), "int8")], 0.0, "0.0 MiB is not allowed"),
    ],
)
def test_bad_input_is_one_line(listed: list[TensorSpec], bucket_mib: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(listed, bucket_mib)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"bucket_bytes":1}', '{"bucket_bytes":1,"tensors":[["a",[1],"nope"]]}']
)
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(WireError, match="not a plan"):
        from_text(text)


def test_tied_parameters_travel_once_under_the_first_name() -> None:
    embed = torch.zeros(4, 3)
    tensors = {
        "embed": embed,
        "lm_head": embed.detach(),
        "slice": embed[:2],
        "norm": torch.zeros(3, dtype=torch.int64),
    }
    assert [str(slot.spec) for slot in plan_of(tensors, 1).slots] == [
        "embed float32[4, 3]",
        "norm int64[3]",
        "slice float32[2, 3]",
    ]
    meta = torch.zeros(4, 3, device="meta")
    tied = plan_of(
        {"embed": meta, "lm_head": meta.detach(), "other": torch.zeros(4, 3, device="meta")}, 1
    )
    assert [slot.spec.name for slot in tied.slots] == ["embed", "other"]


def test_cast_touches_floating_point_only() -> None:
    plan = plan_of(
        {"w": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int32)}, 1, dtype="bfloat16"
    )
    assert [str(slot.spec) for slot in plan.slots] == ["ids int32[2]", "w bfloat16[2]"]


@given(specs)
@settings(deadline=None)
def test_views_hold_what_was_filled_in(listed: list[TensorSpec]) -> None:
    tensors = {
        spec.name: torch.randint(0, 2, spec.shape).to(getattr(torch, spec.dtype)) for spec in listed
    }
    flat = FlatBuffer(make_plan(listed, 4096 / 2**20))
    flat.fill(tensors)
    for name, tensor in tensors.items():
        assert flat.tensors[name].dtype == tensor.dtype
        assert torch.equal(flat.tensors[name].double(), tensor.double())
    joined = torch.cat([flat.bucket(index) for index in range(len(flat.plan.buckets))])
    assert torch.equal(joined, flat.buffer)
