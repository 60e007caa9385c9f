"""Adapters on the weight channel: factors A and B travel, and the receiver merges them into its
base, W + B A * scale.

Both ends name the factors by the weight, plan them from the model's weights and merge them by the
same function, so the receiver gets exactly the numbers that the sender would have sent. The base is
compared once, by its digest.

The experts of a layer are one tensor of matrices, which peft adapts together: A (experts * rank,
inputs) holds each expert's rows after those of the expert before, B (outputs, rank * experts) the
columns of all experts for each rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from broker.contract import wire
from broker.errors import TransferFailed, UserError
from broker.weights.digest import combine, digest_bucket
from broker.weights.memory.copying import copy_into
from broker.weights.memory.on_demand import OnDemand
from broker.weights.memory.staging import plan_of
from broker.weights.plan import LayoutPlan
from broker.weights.rounding import cast

log = logging.getLogger(__name__)

PREFIX: Final = "base_model.model."  # of all names in peft's format
PIECE_ELEMENTS: Final = 1 << 17  # merged at a time
_WEIGHT: Final = ".weight"
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names of the factors A and B of a weight, for example of
    ``layers.0.q_proj.weight``.
    """
    layer = PREFIX + weight.removesuffix(_WEIGHT)
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def name_pattern(weight: str) -> str:
    """Return a weight's name with ``*`` for each number, which is the same in all layers."""
    return _NUMBER.sub("*", weight)


def adapted(shapes: Mapping[str, Tensor], targets: Collection[str]) -> list[str]:
    """Return the weights that have factors.

    Args:
        targets: patterns as of ``name_pattern``, of matrices and of stacked matrices; or, as in
            checkpoints of older versions, last names of linear layers.
    """
    patterns = set(targets)
    return [name for name, weight in shapes.items() if _is_target(name, weight.ndim, patterns)]


def _is_target(name: str, ndim: int, targets: Collection[str]) -> bool:
    layer = name.removesuffix(_WEIGHT)
    by_last_name = ndim == 2 and layer != name and layer.rpartition(".")[2] in targets
    return by_last_name or (ndim in (2, 3) and name_pattern(name) in targets)


def factor_shapes(
    shapes: Mapping[str, Tensor],
    targets: Collection[str],
    rank: int,
    transposed: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the factors of a model's weights on the meta device, float32.

    Args:
        transposed: those of the targets that hold inputs x outputs of each expert.
    """
    factors: dict[str, Tensor] = {}
    for name in adapted(shapes, targets):
        *experts, outputs, inputs = shapes[name].shape
        if name_pattern(name) in transposed:
            outputs, inputs = inputs, outputs
        rows = rank * (experts[0] if experts else 1)
        for factor, shape in zip(
            factor_names(name), ((rows, inputs), (outputs, rows)), strict=True
        ):
            factors[factor] = torch.empty(shape, device="meta")
    return factors


def merge(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool = False
) -> Tensor:
    """Return W + B A * scale, computed in float32 and cast to W's dtype by ``copy_into``, a few
    rows at a time for the cache.

    Args:
        weight: (outputs, inputs), or those of all experts stacked.
        transposed: whether each expert's matrix is (inputs, outputs).
    """
    if weight.ndim == 3:
        experts = len(weight)
        merged = torch.empty_like(weight)
        all_a = a.reshape(experts, -1, a.shape[1])
        all_b = b.reshape(b.shape[0], -1, experts)
        for expert in range(experts):
            own_a = all_a[expert]
            own_b = all_b[:, :, expert]
            factors = (own_b.T, own_a.T) if transposed else (own_a, own_b)
            merged[expert] = merge(weight[expert], *factors, scale)
        return merged
    merged = torch.empty_like(weight)
    a = a.float()
    b = b.float()
    rows = max(1, PIECE_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        sums = torch.addmm(weight[part].float(), b[part], a, alpha=scale)
        copy_into(merged[part], sums, first=start * weight.shape[1])
    return merged


def digest_of(plan: LayoutPlan, tensors: Mapping[str, Tensor]) -> str:
    """Return what ``FlatBuffer.digest`` would, with one bucket in memory; each tensor is read once,
    in plan order.
    """
    digests: list[bytes] = []
    buffer: Tensor | None = None
    for slot in plan.slots:
        tensor = cast(tensors[slot.spec.name].detach(), getattr(torch, slot.spec.dtype))
        source = tensor.contiguous().view(-1).view(torch.uint8)
        source = source if buffer is None else source.to(buffer.device)
        buffer = (
            torch.zeros(plan.bucket_bytes, dtype=torch.uint8, device=source.device)
            if buffer is None
            else buffer
        )
        position = 0
        while position < len(source):
            index, start = divmod(slot.offset + position, plan.bucket_bytes)
            _finish(plan, digests, buffer, index)
            size = min(len(source) - position, plan.bucket_bytes - start)
            buffer[start : start + size] = source[position : position + size]
            position += size
    assert buffer is not None, "a plan has tensors"
    _finish(plan, digests, buffer, len(plan.buckets))
    return combine(digests)


def _finish(plan: LayoutPlan, digests: list[bytes], buffer: Tensor, upto: int) -> None:
    """Digest the bucket in the buffer, and those of gaps after it, below this index."""
    while len(digests) < upto:
        start, stop = plan.buckets[len(digests)]
        digests.append(digest_bucket(buffer[: stop - start]))
        buffer.zero_()


class MergedModel(OnDemand):
    """A whole model whose weights with factors are merged each time they are read; the others are
    the base's.

    Attributes:
        base: the base model, with the same names and shapes.
        changed: names of the weights that have factors.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        factors: Mapping[str, Tensor],
        targets: Sequence[str],
        scale: float,
        transposed: Collection[str] = (),
    ) -> None:
        self.base = base
        self._factors = factors
        self._scale = scale
        self._transposed = transposed
        self.changed = frozenset(adapted(base, targets))

    def __getitem__(self, name: str) -> Tensor:
        weight = self.base[name]
        if name not in self.changed:
            return weight
        a, b = (self._factors[factor].to(weight.device) for factor in factor_names(name))
        with torch.no_grad():
            return merge(
                weight, a, b, self._scale, transposed=name_pattern(name) in self._transposed
            )


First = Callable[[], tuple[Mapping[str, Tensor], bool]]


class AdapterBase:
    """The base model of adapters at a receiver: the weights that the run started from.

    Args:
        plan: of the whole model.
        bucket_mib: the sender's.
        held: the engine's weights by name; only names, shapes and dtypes are used.
        first: the weights that the run started from, and whether no other code changes them;
            otherwise those with factors are copied to host memory. None: they are not available.
    """

    def __init__(
        self,
        plan: LayoutPlan,
        bucket_mib: float,
        held: Mapping[str, Tensor],
        first: First | None = None,
    ) -> None:
        self._plan = plan
        self._bucket_mib = bucket_mib
        self._first = first
        self._shapes = {name: tensor.to("meta") for name, tensor in held.items()}
        self._plans: tuple[wire.Adapter, LayoutPlan] | None = None
        self._laid: wire.Adapter | None = None
        self._base: dict[str, Tensor] = {}

    def plan(self, adapter: wire.Adapter | None) -> LayoutPlan:
        """Return the plan of what travels: an adapter's factors, or the whole model for None.

        A model without any of the adapter's layers is sent whole, which no learner with adapters
        agrees to.
        """
        if adapter is None:
            return self._plan
        if self._plans is None or self._plans[0] != adapter:
            shapes = factor_shapes(self._shapes, adapter.targets, adapter.rank, adapter.transposed)
            self._plans = (adapter, plan_of(shapes, self._bucket_mib) if shapes else self._plan)
        return self._plans[1]

    def lay(self, adapter: wire.Adapter) -> str:
        """Load the adapter's base, which takes a digest and a copy once; return why it failed,
        empty on success.
        """
        if self._laid == adapter:
            return ""
        try:
            source, own = self._find()
        except (UserError, TransferFailed) as error:
            problem = f"the learner sends adapters, but their base cannot be read here ({error})"
            return f"{problem}; train.lora.send=merged sends the whole model"
        if (digest := digest_of(self._plan, source)) != adapter.base:
            problem = f"the learner's adapters need another base: expected digest {adapter.base}, found {digest}"
            return f"{problem}; start this server from the weights that the run started from"
        copied = () if own else adapted(source, adapter.targets)
        self._base = dict(source) | {
            name: source[name].detach().to("cpu", copy=True).contiguous() for name in copied
        }
        self._laid = adapter
        return ""

    def merged(self, factors: Mapping[str, Tensor]) -> MergedModel:
        """Return the whole model with these factors; call ``lay`` before."""
        assert self._laid is not None, "nothing was laid"
        adapter = self._laid
        return MergedModel(self._base, factors, adapter.targets, adapter.scale, adapter.transposed)

    def _find(self) -> tuple[Mapping[str, Tensor], bool]:
        """Return the base model, and whether no other code changes it.

        Raises:
            UserError, TransferFailed: if it is not available.
        """
        if self._first is None:
            raise TransferFailed("the engine does not expose its weights")
        source, own = self._first()
        names = (slot.spec.name for slot in self._plan.slots)
        if (missing := next((name for name in names if name not in source), None)) is not None:
            raise TransferFailed(f"it has no {missing}")
        return source, own
