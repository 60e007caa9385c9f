"""Trial runs that choose a model's attention, and decide whether it takes packed rows.

A trial compares with transformers itself: each sequence alone, by the model's own (eager)
attention. Its limit is measured on the same model: it is the geometric mean of what rounding errors
do to the result, and of what a leak between sequences does. Windows, chunks and other switches by
position are a few tokens long during the trial, so that its short sequences cross them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from broker.errors import ConfigError
from learner.algorithm.packing import Array
from learner.backends.models.attention import NAME, InexactAttentionError, register_attention
from learner.backends.models.exact_attention import EXACT_NAME, register_exact_attention
from learner.backends.models.mixers import separate_sequences
from learner.backends.models.packed_rows import SharedRow, pack_row
from rlearner_text.exact.exact_layers import refuse_exact

# Tokens that all sequences begin with, so that packed rows share a prefix.
_PREFIX: Final = 2
# Tokens behind the prefix: shorter and longer than a switch, alike and not.
_LENGTHS: Final = (3, 1, 12, 20, 21)
# Tokens of each window and chunk during a trial, so that short sequences cross them.
_SWITCH: Final = 5
# Read in each forward pass, from the configuration or from a module (Llama 4 scales attention by
# position).
_SWITCHES: Final = ("sliding_window", "attention_chunk_size", "floor_scale")
# What models raise that cannot take an attention or packed rows: their code checks little.
_FAILURES: Final = (
    InexactAttentionError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    IndexError,
    RuntimeError,
    AssertionError,
)
# Of a leak to rounding errors; below it one cannot be distinguished from the other.
_MIN_CONTRAST: Final = 4.0
# A few tokens may happen to be computed without any rounding error.
_MIN_NOISE: Final = 1e-6


@torch.no_grad()
def choose_attention(
    model: Any, device: torch.device, path: str, *, packed: bool, exact: bool = False
) -> str:
    """Give a causal language model an attention that computes what transformers does.

    Args:
        path: of the model, for the error.
        packed: let it take packed rows, if it can.
        exact: rows give the same bits as each gives alone.

    Returns:
        Why it takes no packed rows; empty if it does.

    Raises:
        ConfigError: if rows of different lengths do not give what each gives alone.
    """
    register_attention()
    original = model.config._attn_implementation
    if exact:
        return _choose_exact(model, device, packed=packed)
    with _short_switches(model):
        _set_attention(model, "eager")
        trunk = trunk_of(model)
        trial = AttentionTrial(trunk, device)
        problem = "it was not asked to"
        if packed:
            undo = separate_sequences(trunk)
            problem = "its attention cannot be replaced"
            if _set_attention(model, NAME) and not (problem := trial.refuse(trial.read_packed)):
                return ""
            undo()
        difference = ""
        # A few models, such as Falcon, choose theirs when they are built.
        for name in (NAME, "eager", original):
            if _set_attention(model, name) and not (difference := trial.refuse(trial.read_padded)):
                return problem
    _set_attention(model, original)
    kind = type(model).__name__
    raise ConfigError(
        "model.path", path, f"{kind} cannot be trained: {difference} in rows of different lengths"
    )


def _choose_exact(model: Any, device: torch.device, *, packed: bool) -> str:
    """As ``choose_attention``, for ``rollout.exact``; the model's layers are exact already."""
    register_exact_attention()
    with _short_switches(model):
        _set_attention(model, "eager")
        trunk = trunk_of(model)
        trial = AttentionTrial(trunk, device)
        undo = separate_sequences(trunk)
        if not _set_attention(model, EXACT_NAME):
            raise refuse_exact(model, "its attention cannot be replaced")
        try:
            alone = AttentionTrial(trunk, device)
        except _FAILURES as error:
            raise refuse_exact(model, _first_words(error)) from None
        problem = "it was not asked to"
        if packed:
            problem = trial.refuse(trial.read_packed) or alone.refuse_bits(alone.read_packed)
            if not problem:
                return ""
        undo()
        if reason := trial.refuse(trial.read_padded) or alone.refuse_bits(alone.read_padded):
            raise refuse_exact(model, reason)
        return problem


def trunk_of(model: Any) -> Any:
    """Return the model below the head, which computes hidden states, or else the model itself."""
    trunk = model.base_model
    # Llama 4 names another part as its base model.
    return getattr(model, "model", model) if trunk is model else trunk


class AttentionTrial:
    """Compares ways of reading sequences with what a model computes for each sequence alone."""

    def __init__(self, trunk: Any, device: torch.device) -> None:
        self._trunk = trunk
        self._device = device
        vocabulary = int(trunk.get_input_embeddings().num_embeddings)
        ids = np.random.default_rng(0).integers(0, vocabulary, max(_LENGTHS) + len(_LENGTHS))
        self.sequences = [
            np.append(ids[:_PREFIX], ids[n : n + length]) for n, length in enumerate(_LENGTHS)
        ]
        self._alone = [self._states(sequence) for sequence in self.sequences]
        with _rounding_errors(trunk, device):
            # The longest sequence is enough: the others have the same weights.
            noise = _relative_difference(self._states(self.sequences[-1]), self._alone[-1])
        leaked = self._states(np.concatenate(self.sequences))
        self.leak = self._distance(
            torch.split(leaked, [len(sequence) for sequence in self.sequences])
        )
        self.noise = max(noise, _MIN_NOISE)
        self.limit = math.sqrt(self.noise * self.leak)

    def refuse(self, read: Callable[[], Sequence[Tensor]]) -> str:
        """Return why a way of reading the sequences is not exact; empty if it is."""
        try:
            difference = self._distance(read())
        except _FAILURES as error:
            return _first_words(error)
        if self.leak < _MIN_CONTRAST * self.noise and difference > self.noise:
            return f"rounding errors ({self.noise:.1g}) hide whether sequences are separate"
        if difference <= self.limit:
            return ""
        return (
            f"states differ by {difference:.1g} of their size, rounding errors by {self.noise:.1g}"
        )

    def refuse_bits(self, read: Callable[[], Sequence[Tensor]]) -> str:
        """Return why a way of reading the sequences changes a bit; empty if it does not."""
        for states, alone in zip(read(), self._alone, strict=True):
            if not torch.equal(states, alone):
                return "its states change with the sequences next to them"
        return ""

    def read_packed(self) -> list[Tensor]:
        """Return the states of the sequences in one row."""
        row = SharedRow.of(self.sequences)
        arguments = {
            "position_ids": self._put(row.places)[None],
            "packing": pack_row(row.indices, self._device),
        }
        states = self._states(
            row.token_ids,
            attention_mask=self._put(np.ones((1, len(row.places)), np.int64)),
            **arguments,
        )
        return [states[self._put(indices)] for indices in row.indices]

    def read_padded(self) -> list[Tensor]:
        """Return the states of the sequences in a padded batch."""
        longest = max(map(len, self.sequences))
        ids = np.stack(
            [np.pad(sequence, (0, longest - len(sequence))) for sequence in self.sequences]
        )
        states = self._trunk(input_ids=self._put(ids), use_cache=False).last_hidden_state
        return [row[: len(sequence)] for row, sequence in zip(states, self.sequences, strict=True)]

    def _states(self, ids: Array, **arguments: Any) -> Tensor:
        states: Tensor = self._trunk(
            input_ids=self._put(ids)[None], use_cache=False, **arguments
        ).last_hidden_state[0]
        return states

    def _put(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _distance(self, results: Sequence[Tensor]) -> float:
        """Return how far results are from those of the sequences alone, of the worst sequence."""
        return max(
            _relative_difference(states, alone)
            for states, alone in zip(results, self._alone, strict=True)
        )


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _relative_difference(states: Tensor, expected: Tensor) -> float:
    """Return the size of the difference by that of the state, of the median token.

    A leak reaches most tokens; a router that takes another expert by a rounding error changes a
    few, and those as much.
    """
    sizes = (states.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    difference = float(sizes.median())
    return difference if math.isfinite(difference) else math.inf


def _set_attention(model: Any, name: str) -> bool:
    """Set the attention of a model if it allows that; return whether it has it now."""
    with suppress(ValueError, KeyError, AttributeError, ImportError):
        model.set_attn_implementation(name)
    return bool(model.config._attn_implementation == name)


@contextmanager
def _short_switches(model: Any) -> Iterator[None]:
    """Make windows and the like a few tokens long while it is open."""
    original: list[tuple[Any, str, float]] = []
    for holder in (model.config.get_text_config(), *model.modules()):
        for name in _SWITCHES:
            size = vars(holder).get(name)
            if isinstance(size, int | float) and size > _SWITCH:
                original.append((holder, name, size))
                setattr(holder, name, _SWITCH)
    try:
        yield
    finally:
        for holder, name, size in original:
            setattr(holder, name, size)


@contextmanager
def _rounding_errors(trunk: Any, device: torch.device) -> Iterator[None]:
    """Change each block's result by up to a rounding error of its dtype while it is open."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    random = torch.Generator(device).manual_seed(0)

    def disturb(_: Any, __: Any, output: Any) -> Any:
        states = output if isinstance(output, Tensor) else output[0]
        error = torch.rand(states.shape, generator=random, device=device) * 2 - 1
        states = (states.float() * (1 + error * torch.finfo(states.dtype).eps / 2)).to(states.dtype)
        return states if isinstance(output, Tensor) else (states, *output[1:])

    places = [
        module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    handles = [
        module.register_forward_hook(disturb) for module in (trunk.get_input_embeddings(), *places)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
