"""Adapters on the weight channel: names and shapes of factors, merging, the digest of the model
below, and who is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
import torch
from torch import Tensor

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.errors import UserError, WireError
from broker.weights.adapter import (
    AdapterBase,
    MergedModel,
    adapted,
    digest_of,
    factor_names,
    factor_shapes,
    merge,
)
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.rounding import cast

MIB = 2**-20


def model(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (11, 4), "layers.0.q_proj.weight": (6, 4), "layers.0.q_proj.bias": (6,),
        "layers.0.norm.weight": (4,),
        "layers.1.q_proj.weight": (6, 4), "layers.1.up.weight": (3, 4), "scale": (),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def factors(tensors: Mapping[str, Tensor], rank: int = 2) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(9)
    return {
        name: torch.randn(tensor.shape, generator=made)
        for name, tensor in factor_shapes(tensors, ["q_proj"], rank).items()
    }


def adapter_of(tensors: Mapping[str, Tensor], bucket_mib: float = 1) -> wire.Adapter:
    return wire.Adapter(
        base=digest_of(plan_of(tensors, bucket_mib), tensors), targets=["q_proj"], rank=2, scale=1.5
    )


@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_digest_is_that_of_the_whole_buffer(bucket_bytes: int, dtype: str | None) -> None:
    tensors = {
        f"t{i}": torch.randn(size)
        for i, size in enumerate([(), (1,), (37, 41), (3000,), (0,), (1024,), (5, 7, 11)])
    }
    tensors["ints"] = torch.arange(500)
    plan = plan_of(tensors, bucket_bytes * MIB, dtype=dtype)
    flat = FlatBuffer(plan)
    flat.fill(tensors)
    assert digest_of(plan, tensors) == flat.digest()
    assert digest_of(plan, {**tensors, "t2": -tensors["t2"]}) != flat.digest()


def test_which_weights_have_factors_and_what_these_are_like() -> None:
    tensors = model()
    assert adapted(tensors, ["q_proj"]) == ["layers.0.q_proj.weight", "layers.1.q_proj.weight"]
    assert adapted(tensors, ["norm", "proj"]) == []
    shapes = factor_shapes(tensors, ["up"], 2)
    assert {name: (tuple(t.shape), t.dtype, t.device.type) for name, t in shapes.items()} == {
        "base_model.model.layers.1.up.lora_A.weight": ((2, 4), torch.float32, "meta"),
        "base_model.model.layers.1.up.lora_B.weight": ((3, 2), torch.float32, "meta"),
    }


def test_merging_by_hand() -> None:
    weight, a, b = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([[2.0], [0.5]]),
    )
    assert merge(weight, a, b, 0.5).tolist() == [[2.0, 1.0], [3.25, 3.75]]
    low = merge(weight.bfloat16(), a, b, 0.01)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, cast(torch.tensor([[1.02, 1.98], [3.005, 3.995]]), torch.bfloat16))


def test_a_merged_model_is_the_base_with_what_the_factors_add() -> None:
    tensors = model()
    given = factors(tensors)
    found = MergedModel(tensors, given, ["q_proj"], 1.5)
    assert list(found) == list(tensors)
    assert found.changed == {"layers.0.q_proj.weight", "layers.1.q_proj.weight"}
    for name, tensor in tensors.items():
        if name in found.changed:
            a, b = (given[factor] for factor in factor_names(name))
            torch.testing.assert_close(found[name], tensor + 1.5 * b @ a)
        else:
            assert found[name] is tensor
    assert all(torch.equal(made, found[name]) for name, made in found.made().items())


def test_a_foundation_merges_onto_what_the_engine_held_first() -> None:
    tensors, given = model(), factors(model())
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    made = AdapterBase(plan_of(held, 1), 1, held, lambda: (held, False))
    adapter = adapter_of(tensors)
    assert made.plan(None) == plan_of(tensors, 1)
    assert made.plan(adapter) == plan_of(given, 1)
    assert made.lay(adapter) == ""
    for _ in range(2):  # an engine that copies into what it holds
        for name, tensor in made.merged(given).made().items():
            held[name].copy_(tensor)
    expected = MergedModel(tensors, given, ["q_proj"], 1.5)
    assert all(torch.equal(held[name], expected[name]) for name in held)
    assert made.lay(adapter) == ""  # not compared again: it would not match


def test_weights_that_are_nobody_elses_are_not_copied() -> None:
    held = model()
    made = AdapterBase(plan_of(held, 1), 1, held, lambda: (held, True))
    assert made.lay(adapter_of(held)) == ""
    assert all(made.merged({}).base[name] is held[name] for name in held)


def test_another_model_below_is_refused_in_one_line() -> None:
    made = AdapterBase(plan_of(model(1), 1), 1, model(1), lambda: (model(1), True))
    adapter = adapter_of(model(0))
    why = made.lay(adapter)
    assert why == (
        f"the learner's adapters need another base: expected digest {adapter.base}, found "
        f"{adapter_of(model(1)).base}; start this server from the weights that the run started from"
    )


def test_a_model_that_cannot_be_read_is_refused_in_one_line() -> None:
    def fails() -> tuple[Mapping[str, Tensor], bool]:
        raise UserError("model path 'x': no model there")

    shapes = {name: tensor.to("meta") for name, tensor in model().items()}
    for first, why in (
        (None, "the engine does not expose its weights"),
        (fails, "model path 'x': no model there"),
        (lambda: ({"embed.weight": torch.zeros(11, 4)}, True), "it has no layers.0.norm.weight"),
    ):
        made = AdapterBase(plan_of(shapes, 1), 1, shapes, first)
        said = (
            f"the learner sends adapters, but their base cannot be read here ({why}); "
            f"train.lora.send=merged sends the whole model"
        )
        assert made.lay(adapter_of(model())) == said


def test_a_model_without_such_layers_plans_the_whole_of_itself() -> None:
    made = AdapterBase(plan_of(model(), 1), 1, model())
    assert made.plan(wire.Adapter(base="0", targets=["k_proj"], rank=2, scale=1.0)) == plan_of(
        model(), 1
    )


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"targets": []}, "targets"),
        ({"targets": ["q", ""]}, "targets"),
        ({"rank": 0}, "rank"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_an_offer_of_a_senseless_adapter_is_refused(wrong: dict[str, object], why: str) -> None:
    offer = EXAMPLES[wire.WeightsOffer]
    assert isinstance(offer, wire.WeightsOffer)
    assert offer.adapter is not None
    assert codec.decode(codec.encode(offer), wire.WeightsOffer) == offer
    with pytest.raises(WireError, match=rf"Adapter\W.*{why}"):
        codec.encode(
            msgspec.structs.replace(offer, adapter=msgspec.structs.replace(offer.adapter, **wrong))
        )


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_merged_one_by_one(transposed: bool) -> None:
    """As peft lays them out: A has the rows of one expert after those of another, B its columns in
    turn.
    """
    experts, outputs, inputs, rank = 3, 6, 6, 2  # a square does not tell which axis is which
    name = "layers.0.experts.up"
    weight, random = torch.zeros(experts, outputs, inputs), torch.Generator().manual_seed(0)
    shapes = factor_shapes(
        {name: weight}, ["layers.*.experts.up"], rank, ["layers.*.experts.up"] * transposed
    )
    assert [list(factor.shape) for factor in shapes.values()] == [
        [experts * rank, inputs],
        [outputs, rank * experts],
    ]
    a, b = (torch.randn(factor.shape, generator=random) for factor in shapes.values())
    found = merge(weight, a, b, 0.5, transposed=transposed)
    for expert in range(experts):
        product = 0.5 * b[:, expert::experts] @ a[expert * rank : (expert + 1) * rank]
        torch.testing.assert_close(found[expert], product.T if transposed else product)


def test_factors_of_experts_have_their_own_shapes() -> None:
    weights = {
        "layers.10.experts.up": torch.zeros(4, 6, 5),
        "layers.10.gate.weight": torch.zeros(4, 5),
    }
    shapes = factor_shapes(weights, ["layers.*.experts.up"], 2, ["layers.*.experts.up"])
    assert {name: list(factor.shape) for name, factor in shapes.items()} == {
        "base_model.model.layers.10.experts.up.lora_A.weight": [8, 6],
        "base_model.model.layers.10.experts.up.lora_B.weight": [5, 8],
    }
