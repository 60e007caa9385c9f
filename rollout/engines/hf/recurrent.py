"""Recurrent states per slot, for layers that have states instead of keys and values (Qwen3.5, LFM2,
Falcon-H1).

Such a layer reads its sequence from a state: the last inputs of a short convolution, and a matrix
that sums up all before. transformers computes them for whole batches. Here each sequence of a pass
is computed with the state of its slot: those with one new token together, as a batch, each other
one by itself. Everything around such a layer sees one row, as with attention.

A state belongs to one length. A prefix can be used again only where a state was kept: at the end of
what a slot holds.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from broker.errors import UserError
from rollout.engines.hf.forward_pass import ForwardPass, PassLayout

# Arguments by which transformers tells packed sequences apart; each is computed alone here.
_PACKING: Final = (
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "attention_mask",
)

_EXACT: Final = 1e-4  # relative, in float32; a state that is ignored differs by about 1


class StateKey(NamedTuple):
    """A state of a layer: ``kind`` is conv_states, recurrent_states or linear."""

    layer: int
    kind: str
    number: int


class PassCache(Cache):  # type: ignore[misc]  # transformers has no types
    """The cache that a model is given in a pass over slots: attention and layers with states keep
    theirs elsewhere.

    With it transformers makes masks for sequences, not for the row that holds them. ``current`` is
    the pass under way.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.current: PassLayout | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return how far each row's position is ahead of its number in the pass, to a layer that
        asks for itself.

        A layer adds it to the numbers of its rows (Llama 4).
        """
        if layer_idx is None or self.current is None:
            return 0
        return self.current.positions()[0] - torch.arange(
            self.current.num_rows, device=self.current.device
        )

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return False


class LayerStates(PassCache):
    """The states of one layer for a batch of sequences, as transformers' layers read and write
    them.

    Args:
        layer: number of the layer.
        count: number of states of each kind.
        states: what they are; none for sequences that begin.
    """

    def __init__(self, layer: int, count: int, states: dict[StateKey, Tensor]) -> None:
        super().__init__()
        self._layer = layer
        self._linear = states.get(StateKey(layer, "linear", 0))
        states_of_layer = LinearAttentionLayer(number_of_states=count)
        for key, state in states.items():
            if key.kind != "linear":
                getattr(states_of_layer, key.kind)[key.number] = state
                getattr(states_of_layer, f"is_{key.kind}_initialized")[key.number] = True
                states_of_layer.has_previous_state[key.number] = True
                states_of_layer.dtype = state.dtype
                states_of_layer.device = state.device
            if key.kind == "conv_states":
                states_of_layer.conv_kernel_size[key.number] = state.shape[-1]
        self.layers = [None] * layer + [states_of_layer]

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        states = self.layers[self._layer].has_previous_state
        return all(states.values()) if state_idx is None else bool(states[state_idx])

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return MiniMax's state."""
        return self._linear

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Replace MiniMax's state."""
        self._linear = linear_cache

    def tensors(self) -> Iterator[tuple[StateKey, Tensor]]:
        """Yield the states after the layer has run, each (sequences, …)."""
        layer = self.layers[self._layer]
        for kind in ("conv_states", "recurrent_states"):
            for number, state in getattr(layer, kind).items():
                if state is not None:
                    yield StateKey(self._layer, kind, number), state
        if self._linear is not None:
            yield StateKey(self._layer, "linear", 0), self._linear


class _DiscoveryCache(PassCache):
    """Finds out which modules have states, in a pass over one sequence."""

    def __init__(self, count: int, innermost: list[torch.nn.Module]) -> None:
        super().__init__()
        self._count = count
        self._innermost = innermost
        self.of_layer: dict[int, tuple[torch.nn.Module, LayerStates]] = {}

    def _note(self, layer: int) -> LayerStates:
        module = self._innermost[-1] if self._innermost else None
        if layer not in self.of_layer:
            if module is None:
                raise UserError(f"layer {layer} keeps a state that belongs to none of its modules")
            self.of_layer[layer] = module, LayerStates(layer, self._count, {})
        if self.of_layer[layer][0] is not module:
            raise UserError(f"two modules of layer {layer} share a state")
        return self.of_layer[layer][1]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        result: Tensor = self._note(layer_idx).update_conv_state(
            conv_states, layer_idx, state_idx, **kwargs
        )
        return result

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        result: Tensor = self._note(layer_idx).update_recurrent_state(
            recurrent_states, layer_idx, state_idx, **kwargs
        )
        return result

    def get_linear_cache(self, layer_idx: int) -> None:
        self._note(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._note(layer_idx).set_linear_cache(layer_idx, linear_cache)


class RecurrentStates:
    """The states of all slots, and the layers that read and write them.

    ``current`` is the pass under way, None for sequences that use no slot. ``reads_singly`` tells
    that a layer can only go on from a state by one token at a time (Jamba).
    """

    def __init__(self, device: torch.device) -> None:
        self.reads_singly = False
        self.current: ForwardPass | None = None
        self.layers: set[int] = set()
        self._device = device
        self._count = 1
        self._shapes: dict[StateKey, tuple[torch.Size, torch.dtype]] = {}
        self._states: dict[StateKey, Tensor] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of the states of one slot."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self._shapes.values())

    def allocate(self, num_slots: int) -> None:
        """Allocate the states of all slots."""
        for key, (shape, dtype) in self._shapes.items():
            self._states[key] = torch.zeros((num_slots, *shape), dtype=dtype, device=self._device)

    def free(self) -> None:
        """Drop all states; ``allocate`` makes them again."""
        self._states.clear()

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states of slots to others."""
        for states in self._states.values():
            states[list(targets)] = states[list(sources)]

    def wipe(self, slot: int) -> None:
        """Zero the states of a slot."""
        for states in self._states.values():
            states[slot].zero_()

    def adopt_layers(self, model: Any, run: Callable[[Cache], Any]) -> None:
        """Find the modules with states in a pass over one sequence, and let them use those of
        slots.

        Args:
            run: computes a sequence with a cache.

        Raises:
            UserError: if states cannot be told apart.
        """
        self._count = int(getattr(model.config.get_text_config(), "number_of_conv_states", 1))
        innermost: list[torch.nn.Module] = []
        calls: dict[torch.nn.Module, dict[str, Any]] = {}

        def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            innermost.append(module)
            calls[module] = _named_arguments(module, args, kwargs)

        def leave(*_: Any) -> None:
            innermost.pop()

        numbered = [
            module
            for module in model.modules()
            if isinstance(getattr(module, "layer_idx", None), int)
        ]
        hooks: list[Any] = [
            module.register_forward_pre_hook(enter, with_kwargs=True) for module in numbered
        ]
        hooks += [module.register_forward_hook(leave) for module in numbered]
        cache = _DiscoveryCache(self._count, innermost)
        try:
            run(cache)
        finally:
            for hook in hooks:
                hook.remove()
        tested: set[type] = set()
        for layer, (module, states) in cache.of_layer.items():
            if type(module) not in tested:
                tested.add(type(module))
                self.reads_singly = self.reads_singly or not self._continues(
                    layer, module, calls[module]
                )
            self.layers.add(layer)
            self._shapes |= {key: (state.shape[1:], state.dtype) for key, state in states.tensors()}
            module.forward = partial(self._compute, layer, module, module.forward)

    def _continues(self, layer: int, module: torch.nn.Module, arguments: Mapping[str, Any]) -> bool:
        """Return whether a layer goes on from a state with several tokens as with one; in float32,
        without its noise.

        Args:
            arguments: of its call in the pass over one sequence.
        """
        forward = copy.deepcopy(module).float()
        arguments = {name: _in_float32(value) for name, value in arguments.items()}
        rows = next(
            value.shape[1]
            for value in arguments.values()
            if isinstance(value, Tensor) and value.dim() == 3
        )
        states = LayerStates(layer, self._count, {})
        ends = (0, rows // 2, rows)
        try:
            whole = _first(
                forward(
                    **_pieces(
                        arguments, LayerStates(layer, self._count, {}), slice(0, rows), 1, rows
                    )
                )
            )
            parts = [
                _first(forward(**_pieces(arguments, states, slice(start, end), 1, rows)))
                for start, end in itertools.pairwise(ends)
            ]
        except (RuntimeError, TypeError, ValueError):
            return True  # its kernels take no float32; the comparison with transformers decides
        return bool((torch.cat(parts, 1) - whole).abs().max() <= _EXACT * whole.abs().max())

    def _compute(
        self,
        layer: int,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute a layer for each group of sequences of the current pass, each from its slots'
        states.
        """
        if self.current is None:
            return forward(*args, **kwargs)
        arguments = _named_arguments(module, args, kwargs)
        rows = self.current.num_rows
        outputs: list[Any] = []
        groups = self.current.state_groups(singly=self.reads_singly)
        for group in groups:
            states = LayerStates(
                layer, self._count, self._read(layer, group.slots) if group.start else {}
            )
            result = forward(**_pieces(arguments, states, group.rows, group.size, rows))
            self._write(states, group.slots)
            outputs.append(_first(result))
        joined = [output.reshape(-1, *output.shape[2:]) for output in outputs]
        whole = joined[0] if len(groups) == 1 else joined[0].new_empty((rows, *joined[0].shape[1:]))
        if len(groups) > 1:
            for group, part in zip(groups, joined, strict=True):
                whole[group.rows] = part
        return (whole[None], *result[1:]) if isinstance(result, tuple) else whole[None]

    def _read(self, layer: int, slots: Tensor | slice) -> dict[StateKey, Tensor]:
        return {key: states[slots] for key, states in self._states.items() if key.layer == layer}

    def _write(self, states: LayerStates, slots: Tensor | slice) -> None:
        for key, state in states.tensors():
            own = self._states[key]
            if not isinstance(slots, slice) or own[slots].data_ptr() != state.data_ptr():
                own[slots] = state.to(own.dtype)


def _named_arguments(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a layer's call by name, without those that tell packed sequences
    apart.
    """
    names = inspect.signature(type(module).forward).parameters
    arguments = dict(zip(list(names)[1:], args, strict=False)) | dict(kwargs)
    return {name: None if name in _PACKING else value for name, value in arguments.items()}


def _in_float32(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_in_float32(item) for item in value)
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _first(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _pieces(
    arguments: Mapping[str, Any], states: LayerStates, rows: Tensor | slice, size: int, total: int
) -> dict[str, Any]:
    """Return a group's part of a layer's arguments; see ``_piece``."""
    return {name: _piece(value, states, rows, size, total) for name, value in arguments.items()}


def _piece(value: Any, states: LayerStates, rows: Tensor | slice, size: int, total: int) -> Any:
    """Return a group's part of an argument: (1, all rows, …) to (sequences, new tokens, …)."""
    if isinstance(value, Cache):
        return states
    if isinstance(value, tuple):
        return tuple(_piece(item, states, rows, size, total) for item in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, total):
        return value[0, rows].reshape(size, -1, *value.shape[2:])
    return value


@contextmanager
def pass_over(current: PassLayout, *holders: Any) -> Iterator[None]:
    """Let attention and states work on the slots of a pass."""
    for holder in holders:
        holder.current = current
    try:
        yield
    finally:
        for holder in holders:
            holder.current = None
