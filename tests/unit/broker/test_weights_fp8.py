"""FP8 on the way: what each element becomes, what travels, and what an engine is given."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from broker.contract import wire
from broker.errors import TransferFailed
from broker.weights import fp8
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.probe import make_probe
from broker.weights.receiver.acceptance import OfferAcceptance
from broker.weights.receiver.weight_loader import WeightLoader
from broker.weights.rounding import cast
from rollout.engines.update_check import check_fit, materialized
from rollout.engines.vllm.shared_weights import SharedWeights

FP8 = torch.float8_e4m3fn


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    found, scales = (
        torch.empty(weight.shape, dtype=FP8),
        torch.full(fp8.scale_shape(weight.shape), math.pi),
    )
    told = list(fp8.quantise(weight, found, scales))
    assert told == sorted(told)
    assert told[-1] == weight.numel()
    return found, scales


def spread(scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale of each element."""
    return scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[
        ..., : shape[-2], : shape[-1]
    ]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def test_blocks_by_hand() -> None:
    weight = torch.zeros(130, 200)
    # four bits; ties to even; the least, half of it
    weight[0, :6] = torch.tensor([448.0, 17.0, 18.0, -19.0, 2.0**-9, 2.0**-10])
    weight[1, 128:131] = torch.tensor([464.0, 1.0, -0.0]) / 1024  # 464 rounds to 448
    weight[129, 0] = 465.0  # rounds to 480, above 448: the scale is 2
    found, scales = quantised(weight)
    assert scales.tolist() == [[1.0, 2.0**-10], [2.0, 2.0**-126]]
    assert found[0, :6].float().tolist() == [448.0, 16.0, 18.0, -20.0, 2.0**-9, 0.0]
    assert found[1, 128:131].float().tolist() == [448.0, 1.0, 0.0]
    assert bits(found)[1, 130] == 0x80  # the sign of zero
    assert found[129, 0].float() == 240.0
    whole = fp8.dequantise(found, scales, torch.float32)
    assert whole[0, :6].tolist() == [448.0, 16.0, 18.0, -20.0, 2.0**-9, 0.0]
    assert whole[129, 0] == 480.0
    # all else stayed zero, the block of zeros at the lower right too
    assert whole.count_nonzero() == 8


SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300)) | st.tuples(
    st.integers(1, 3), st.integers(1, 140), st.integers(1, 140)
)


@settings(deadline=None, max_examples=60)
@given(
    shape=SHAPES,
    seed=st.integers(0, 2**31),
    power=st.integers(-140, 118),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_bounded_and_quantising_again_gives_the_same_bits(
    shape: tuple[int, ...], seed: int, power: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (
        torch.randn(shape, generator=generator)
        * 2.0**power
        * torch.rand(shape[-1], generator=generator)
    ).to(dtype)
    found, scales = quantised(weight)
    whole = fp8.dequantise(found, scales, torch.float32)
    each = spread(scales, shape)
    assert torch.equal(whole, found.float() * each)  # exact: torch's own cast says the same
    # half a unit in the fourth significant bit; half the least number
    bound = torch.maximum(weight.float().abs() / 16, each / 1024)
    assert bool(((whole - weight.float()).abs() <= bound).all())
    again, scales_again = quantised(whole)
    assert torch.equal(bits(again), bits(found))
    assert torch.equal(scales_again, scales)
    if power > -100:  # bfloat16's own least numbers are coarser
        # four significant bits and a power of two
        assert torch.equal(fp8.dequantise(found, scales, torch.bfloat16).float(), whole)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 3.1e38])
def test_what_is_not_finite_makes_its_block_nan(odd: float) -> None:
    weight = torch.ones(128, 256)
    weight[5, 200] = odd
    whole = fp8.dequantise(*quantised(weight), torch.float32)
    assert torch.equal(whole[:, :128], weight[:, :128])
    assert bool(whole[:, 128:].isnan().all())


def test_wide_matrices_are_worked_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 1000)
    whole = quantised(weight)
    monkeypatch.setattr(fp8, "PIECE_ELEMENTS", 128 * 384)
    parts = quantised(weight)
    assert torch.equal(bits(parts[0]), bits(whole[0]))
    assert torch.equal(parts[1], whole[1])
    assert torch.equal(
        fp8.dequantise(*parts, torch.float32), whole[0].float() * spread(whole[1], (300, 1000))
    )
    # whatever the strides
    assert torch.equal(bits(quantised(weight.T.contiguous().T)[0]), bits(whole[0]))


@pytest.mark.parametrize(
    ("name", "shape", "linear"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.11.mlp.gate_proj.weight", (64, 64), True),
        ("transformer.h.0.attn.c_attn.weight", (64, 192), True),
        ("model.layers.3.mlp.experts.7.up_proj.weight", (64, 64), True),
        ("model.layers.3.mlp.experts.gate_up_proj", (8, 64, 64), True),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", (8, 64), False),
        ("model.layers.3.mlp.gate.weight", (8, 64), False),
        ("model.layers.3.mlp.router.weight", (8, 64), False),
        ("model.layers.3.block_sparse_moe.router.layer.weight", (8, 64), False),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 64), False),
        ("model.layers.3.input_layernorm.weight", (64,), False),
        ("model.layers.3.self_attn.q_proj.bias", (64,), False),
        ("model.layers.0.conv1d.weight", (64, 1, 4), False),
        ("model.layers.0.mixer.A_log", (64, 16), False),
        ("model.layers.61.embed_tokens.weight", (100, 64), False),
        ("model.layers.61.shared_head.head.weight", (100, 64), False),
        ("model.embed_tokens.weight", (100, 64), False),
        ("lm_head.weight", (100, 64), False),
        ("transformer.wpe.weight", (100, 64), False),
    ],
)
def test_which_are_linear_layers(name: str, shape: tuple[int, ...], linear: bool) -> None:
    assert fp8.is_linear(name, shape) == linear


def model(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "embed.weight": (300, 60),
        "layers.0.up.weight": (300, 200),
        "layers.0.experts.down": (2, 130, 5),
        "layers.0.up.bias": (300,),
    }
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()} | {
        "layers.0.steps": torch.arange(3)
    }


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")]
)
def test_plan_names_what_travels(dtype: torch.dtype, bias: str) -> None:
    plan = plan_of(
        {name: tensor.to("meta") for name, tensor in model(dtype).items()}, 1, dtype="fp8"
    )
    assert {str(slot.spec) for slot in plan.slots} == {
        "embed.weight bfloat16[300, 60]",
        "layers.0.up.weight float8_e4m3fn[300, 200]",
        "layers.0.up.weight_scale_inv float32[3, 2]",
        "layers.0.experts.down float8_e4m3fn[2, 130, 5]",
        "layers.0.experts.down_scale_inv float32[2, 2, 1]",
        f"layers.0.up.bias {bias}[300]",
        "layers.0.steps int64[3]",
    }


class Once(Mapping[str, Tensor]):
    """Tensors as a sharded trainer gives them: each may be asked for once, in the plan's order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.asked = tensors, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_filled_as_it_is_told_and_given_to_an_engine() -> None:
    tensors = model()
    tensors["layers.1.wide.weight"] = torch.randn(1500, 1000)
    plan = plan_of(tensors, 0.25, dtype="fp8")
    flat, whole, given, seen = FlatBuffer(plan), FlatBuffer(plan), Once(tensors), list[int]()
    whole.fill(tensors)

    def reached(offset: int) -> None:
        seen.append(offset)
        assert torch.equal(flat.buffer[:offset], whole.buffer[:offset])

    flat.fill(given, reached)
    assert given.asked == sorted(tensors)
    assert len(plan.buckets) > 5  # each can leave while the next is made
    assert all(
        any(stop <= offset < stop + plan.bucket_bytes for offset in seen)
        for _, stop in plan.buckets
    )
    assert flat.digest() == whole.digest()
    engine = fp8.DequantizedModel(
        flat.tensors, {name: tensor.dtype for name, tensor in tensors.items()}
    )
    assert set(engine) == set(tensors)
    whole_model = engine.made()
    for name, tensor in tensors.items():
        assert whole_model[name].shape == tensor.shape
        if fp8.is_linear(name, tensor.shape):
            found, scales = quantised(tensor)
            assert torch.equal(
                whole_model[name], found.float() * spread(scales, tuple(tensor.shape))
            )
        else:
            assert torch.equal(
                whole_model[name], cast(tensor, torch.bfloat16) if tensor.ndim > 1 else tensor
            )
        assert torch.equal(whole_model[name].to(tensor.dtype), fp8.as_sent(name, tensor))
        assert (
            whole_model[name].untyped_storage().data_ptr()
            != flat.buffer.untyped_storage().data_ptr()
        )
    held = {name: tensor.to(tensors[name].dtype) for name, tensor in whole_model.items()}
    again = FlatBuffer(plan)
    again.fill(held)
    assert again.digest() == flat.digest()  # who computes with them holds these bytes


def test_engines_take_it_as_any_update() -> None:
    tensors = model()
    flat = FlatBuffer(plan_of(tensors, 1, dtype="fp8"))
    flat.fill(tensors)
    update = fp8.DequantizedModel(
        flat.tensors, {name: tensor.dtype for name, tensor in tensors.items()}
    )
    sent = {name: fp8.as_sent(name, tensor) for name, tensor in tensors.items()}
    shared = SharedWeights(tensors)  # vLLM's
    try:
        check_fit(shared.tensors, update)
        shared.fill(update)
        assert all(torch.equal(tensor, sent[name]) for name, tensor in shared.tensors.items())
    finally:
        shared.close()
    assert isinstance(materialized(update), dict)  # what SGLang writes and hf computes from
    assert materialized(update).keys() == tensors.keys()
    with pytest.raises(
        TransferFailed, match=r"the update lacks 1 of 6 tensors, the first is layers.1.up.weight"
    ):
        check_fit({**tensors, "layers.1.up.weight": torch.zeros(2, 2)}, update)


def test_a_model_of_fp8_travels_as_it_is() -> None:
    own = {
        "layers.0.up.weight": torch.ones(130, 130).to(FP8),
        "layers.0.up.weight_scale_inv": torch.full((2, 2), 3.0),
    }
    flat = FlatBuffer(plan_of(own, 1, dtype="fp8"))
    flat.fill(own)
    given = fp8.DequantizedModel(flat.tensors, {name: tensor.dtype for name, tensor in own.items()})
    assert {
        name: (tensor.dtype, tensor.float().unique().tolist()) for name, tensor in given.items()
    } == {
        "layers.0.up.weight": (FP8, [1.0]),
        "layers.0.up.weight_scale_inv": (torch.float32, [3.0]),
    }


async def test_who_holds_the_first_weights_computes_from_what_fp8_makes_of_them() -> None:
    tensors, loads = model(), list[dict[str, Tensor]]()
    plan = plan_of(tensors, 1, dtype="fp8")

    async def load(given: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        loads.append(dict(given))

    async def landing() -> tuple[WeightLoader, OfferAcceptance, wire.WeightsOffer]:
        state = OfferAcceptance(plan.digest, None)
        landed = WeightLoader(
            state,
            plan,
            tensors,
            load,
            bucket_mib=1,
            device=None,
            kept=True,
            first=None,
            quantised=True,
        )
        await landed.begin()
        probe = make_probe([1, 2], [0.0], tolerance=1.0)
        offer = wire.WeightsOffer(
            epoch=1,
            version=0,
            digest=state.digest or "",
            plan=plan.digest,
            size_bytes=plan.size_bytes,
            carriers=["gloo"],
            probe=probe,
        )
        return landed, state, offer

    first, _, offer = await landing()
    await first.adopt(offer)
    assert all(
        torch.equal(loads[0][name].to(tensor.dtype), fp8.as_sent(name, tensor))
        for name, tensor in tensors.items()
    )
    await first.adopt(offer)  # by a new learner: it holds these bytes now
    assert loads[1] == {}

    broken, state, offer = await landing()
    broken.take(plan)  # a transfer that failed may still be written into it
    with pytest.raises(TransferFailed, match="were not quantized, so they must be sent"):
        await broken.adopt(offer)
    assert state.digest is None  # so it joins next
