"""Counts what a model saves for its backward pass, on torch's meta device: shapes only."""

from __future__ import annotations

import math
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from broker.errors import UserError
from rlearner.plan.facts import ActivationFacts
from rlearner_text.rope import FIXED

ATTENTION: Final = "rlearner_plan"
# Of a traced row; everything grows in proportion to it.
TOKENS: Final = 1024


@dataclass
class Traced:
    """Everything that one forward pass of the model has shown.

    Attributes:
        calls: module, arguments and named arguments of each block.
        saved: bytes by storage; those as wide as the residual stream again in ``wide``.
        heads: of queries and of keys and values; where layers differ, their greatest common
            divisor, which GPUs can share.
        kv: bytes of one token's keys and values in all layers.
    """

    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    wide: int = 0
    outside: int = 0
    heads: tuple[int, int] = (0, 0)
    kv: int = 0


class FlashShapes(torch.autograd.Function):
    """Attention as fused kernels save it: inputs, result, and a float32 per head and token."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class GroupedShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products of experts in any dtype: torch's own for the meta device takes bfloat16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **kwargs)
        first, second, *optional = args
        if second.ndim == 3:  # tokens by experts' weights
            return first.new_empty(*first.shape[:-1], second.shape[-1])
        # Of each expert's tokens: the gradient of weights.
        offsets = optional[0] if optional else kwargs["offs"]
        return first.new_empty(len(offsets), first.shape[0], second.shape[1])


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations create, as long as they live.

    Attributes:
        most: largest sum so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and (key := tensor.untyped_storage()._cdata) not in self._sizes
            ):
                self._sizes[key] = tensor.untyped_storage().nbytes()
                self.now += self._sizes[key]
                self.most = max(self.most, self.now)
                weakref.finalize(tensor.untyped_storage(), self._freed, key)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def trace_model(model: Any, hidden: int) -> tuple[ActivationFacts, Traced]:
    """Trace a causal language model on the meta device, whose attention is replaced.

    Raises:
        UserError: if its passes depend on the values of tensors.
    """
    kind = type(model).__name__
    try:
        traced = _trace_forward(model, hidden, TOKENS)
        # Two lengths, whose difference has only what grows with the tokens.
        wide, narrow = (_largest_block(model, hidden, tokens) for tokens in (TOKENS, TOKENS // 2))
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
        IndexError,
        KeyError,
        AttributeError,
    ) as error:
        problem = " ".join(str(error).split())[:200]
        raise UserError(
            f"model.path: cannot plan for {kind}, whose activations cannot be traced: {problem}"
        ) from error
    saved = sum(traced.saved.values()) - traced.outside
    facts = ActivationFacts(
        kept=saved / TOKENS,
        wide=traced.wide / TOKENS,
        outside=traced.outside / TOKENS,
        # The difference has no gradients of weights, which do not depend on the tokens.
        block=2 * (wide - narrow) / TOKENS,
        stream=hidden * model.dtype.itemsize,
    )
    return facts, traced


def add_adapters(model: Any, rank: int, targets: Callable[[str], bool]) -> None:
    """Freeze a model and give linear layers in its blocks float32 factors, as peft does.

    Args:
        targets: decides by a layer's last name.
    """
    model.requires_grad_(False)
    for block in blocks_of(model):
        for name, layer in list(block.named_modules()):
            # Not a subclass with its own pass, such as the router of experts.
            if type(layer).forward is nn.Linear.forward and targets(name.rpartition(".")[2]):
                sizes = {
                    "factor_a": (rank, layer.in_features),
                    "factor_b": (layer.out_features, rank),
                }
                for factor, size in sizes.items():
                    layer.register_parameter(factor, nn.Parameter(torch.empty(size, device="meta")))
                layer.register_forward_hook(_add_factors)


def _add_factors(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    adapted = nn.functional.linear(inputs[0].float(), layer.get_parameter("factor_a"))
    return (output + nn.functional.linear(adapted, layer.get_parameter("factor_b")) * 2.0).to(
        output.dtype
    )


def _trace_forward(model: Any, hidden: int, tokens: int) -> Traced:
    traced = Traced()
    weights = {
        tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())
    }
    storages: list[Any] = []  # so that no address is used twice
    blocks = blocks_of(model)
    has_left_blocks = False

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in traced.saved:
            size = traced.saved[storage._cdata] = storage.nbytes()
            storages.append(storage)
            if not traced.calls or has_left_blocks:
                traced.outside += size
            elif tensor.ndim >= 2 and tensor.shape[-1] == hidden:
                traced.wide += size
        return tensor

    def leave_blocks(*_: Any) -> None:
        nonlocal has_left_blocks
        has_left_blocks = True

    hooks = [
        block.register_forward_pre_hook(_record_calls(traced), with_kwargs=True) for block in blocks
    ]
    hooks.append(blocks[-1].register_forward_hook(leave_blocks))
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    # With a padding token some models look for padding in the ids, which have no values here.
    model.base_model.config.pad_token_id = None
    try:
        with (
            _shape_attention(model, traced),
            torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        ):
            model.base_model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return traced


def _largest_block(model: Any, hidden: int, tokens: int) -> int:
    return max(_peak_bytes(model, call) for call in _trace_forward(model, hidden, tokens).calls)


def _record_calls(traced: Traced) -> Callable[..., None]:
    return lambda module, args, kwargs: traced.calls.append((module, args, kwargs))


def _peak_bytes(model: Any, call: tuple[nn.Module, tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the most bytes that a block holds in its two passes, its gradients included."""
    block, args, kwargs = call
    # The graphs of other blocks are not part of this one's.
    args, kwargs = tree_map(_detach, (args, kwargs))
    first = args[0] if args else kwargs.pop("hidden_states")
    live = LiveBytes()
    with _shape_attention(model, Traced()):
        stream = first.detach().requires_grad_()
        with live:
            result = block(stream, *args[1:], **kwargs)
            if not isinstance(result, Tensor):
                result = result[0]
            result.backward(torch.empty_like(result))
    for parameter in block.parameters():
        parameter.grad = None
    return live.most


def _detach(value: Any) -> Any:
    if isinstance(value, UserDict):  # keys and values that Gemma's later layers share
        return UserDict(tree_map(_detach, dict(value)))
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the transformer blocks.

    Raises:
        UserError: if the model has none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [
        module
        for module in model.base_model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    if not blocks:
        raise UserError(
            f"model.path: cannot plan for {type(model).__name__}, which has no transformer blocks"
        )
    return blocks


@contextmanager
def _shape_attention(model: Any, traced: Traced) -> Iterator[None]:
    from transformers import AttentionInterface

    def attend(
        _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
    ) -> tuple[Tensor, None]:
        query_heads, key_heads = traced.heads
        traced.heads = (math.gcd(query_heads, query.shape[1]), math.gcd(key_heads, key.shape[1]))
        traced.kv += key.shape[1] * (key.shape[-1] + value.shape[-1]) * key.itemsize
        return FlashShapes.apply(query, key, value), None  # type: ignore[no-untyped-call]

    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)
    for module in model.modules():
        # Tables of one size: those of other types follow the values of tensors.
        if isinstance(getattr(module, "rope_type", None), str):
            module.rope_type = FIXED
    try:
        with GroupedShapes():  # type: ignore[no-untyped-call]
            yield
    finally:
        AttentionInterface._global_mapping.pop(ATTENTION, None)
