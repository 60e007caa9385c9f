"""Compares a model over slots with plain transformers, before it answers anyone.

The text is ordinary and passes every window, chunk and other switch of the model. It is read into a
slot in parts, next to a neighbour of another length, and goes on token by token. How much may
differ is the model's own noise: what transformers itself differs by when the embeddings are rounded
otherwise, and, before a model is refused, when it reads the text in parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from broker.errors import UserError
from rlearner_text.model_noise import Values, noise_limit, noise_problem
from rlearner_text.probe_text import MARGIN, SHORTEST, probe_tokens, switch_lengths
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.hf.forward_pass import Segment

if TYPE_CHECKING:
    from rollout.engines.hf.model import SlotModel

log = logging.getLogger(__name__)

# where transformers reads its parts, before a refusal
_SPLITS: Final = (1 / 2, 1 / 3, 3 / 4, 1 / 5, 9 / 10)
_DECODED: Final = 4  # tokens at the end of a text that are read one by one
_COLUMNS: Final = 512  # tokens of the vocabulary that are compared
# times the noise of rounding; more is a fault of transformers when it reads in parts
_NO_NOISE: Final = 100.0


@dataclass(frozen=True)
class TestText:
    """A text and the rows of it that are compared: those at its beginning, and those past each
    switch.

    Attributes:
        ids: (n,) int64, on the device.
        rows: ascending.
        stretches: the indices in ``rows`` at which a switch is passed.
    """

    ids: Tensor
    rows: list[int]
    stretches: list[int]


def test_slots(slots: SlotModel, tokenizer: Tokenizer | None) -> _SelfTest:
    """Check that the model computes the same over slots as in plain transformers.

    Returns:
        What ``test_static_passes`` compares with.

    Raises:
        UserError: if it does not; with the reason as far as it is known.
    """
    test = _SelfTest(slots, tokenizer)
    problem = test.problem(())
    if problem and (problem := test.problem(_SPLITS)):
        raise UserError(
            f"engine hf cannot run {type(slots.model).__name__}: {problem}{test.uncovered_layers()}"
        )
    return test


def test_static_passes(slots: SlotModel, test: _SelfTest) -> str:
    """Return why the model cannot decode with recorded passes, empty if it can: it fails, or
    computes something else.
    """
    try:
        return test.static_problem()
    except Exception as error:
        log.debug("recording a pass of %s failed", type(slots.model).__name__, exc_info=True)
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


class _SelfTest:
    def __init__(self, slots: SlotModel, tokenizer: Tokenizer | None) -> None:
        self._slots = slots
        config = slots.model.config.get_text_config().to_dict()
        switches = switch_lengths(config)
        size: dict[str, int] = {"vocab_size": slots.vocab_size, "max_context": slots.max_context}
        text = probe_tokens(tokenizer, config, **size)
        neighbour = probe_tokens(tokenizer, config, **size, start=101)
        self._texts = [self._text(text, switches)]
        if slots.num_slots > 1:
            self._texts.append(self._text(neighbour[: max(2, len(text) // 3)], switches))
        columns = np.random.default_rng(0).permutation(slots.vocab_size)[:_COLUMNS]
        self._columns = torch.from_numpy(columns).to(slots.device)
        self._epsilon = torch.finfo(slots.model.dtype).eps
        self._samples: list[Values] = []

    def _text(self, ids: Sequence[int], switches: Sequence[int]) -> TestText:
        rows = set(range(min(SHORTEST, len(ids)))) | {len(ids) - 1}
        passed = [switch for switch in switches if switch < len(ids)]
        for switch in passed:
            rows |= set(range(switch, min(switch + MARGIN, len(ids))))
        ordered = sorted(rows)
        starts = [int(np.searchsorted(ordered, switch)) for switch in passed]
        return TestText(torch.tensor(ids, device=self._slots.device), ordered, starts)

    @torch.inference_mode()
    def problem(self, splits: Sequence[float]) -> str:
        """Return how slots differ from transformers, by its noise with these and all earlier
        splits.
        """
        with self._slots.native_attention():
            if not self._samples:
                self._samples.append(self._joined([self._native(text, ()) for text in self._texts]))
                self._check_finite()
                self._add_rounding()
            for split in splits:
                self._add_rounding()
                self._add_parts(split)
        judge = self._judge()
        alone = self._joined([self._without_slots(text) for text in self._texts])
        if reason := noise_problem(self._samples, alone, **judge):
            return f"its attention needs more than positions and masks: {reason}"
        if reason := noise_problem(self._samples, self._joined(self._over_slots()), **judge):
            return f"its output changes when a sequence is read in parts, next to others: {reason}"
        return ""

    @torch.inference_mode()
    def exact_problem(self) -> str:
        """Return how slots change the bits that a sequence gives alone; empty if not."""
        alone = self._joined([self._without_slots(text) for text in self._texts])
        if np.array_equal(alone, self._joined(self._over_slots())):
            return ""
        return "a sequence read in parts, next to others, gives other bits than alone"

    @torch.inference_mode()
    def static_problem(self) -> str:
        """Return how recorded passes differ from transformers, by the noise of ``problem``."""
        for gathers in (False, True):
            values = self._joined(self._over_slots(gathers=gathers))
            if reason := noise_problem(self._samples, values, **self._judge()):
                return f"its output changes in a CUDA graph: {reason}"
        return ""

    def _judge(self) -> dict[str, Any]:
        """Return the other arguments of ``noise_problem``."""
        stretches = []
        at = 0
        for text in self._texts:
            stretches += [at, *(at + start for start in text.stretches)]
            at += len(text.rows)
        return {"epsilon": self._epsilon, "stretches": stretches}

    def uncovered_layers(self) -> str:
        """Return which layers mix tokens otherwise than by attention or states, as an addition to a
        reason.
        """
        count = self._slots.model.config.get_text_config().num_hidden_layers
        covered = len(set(self._slots.attention.shapes) | self._slots.states.layers)
        return (
            f"; only {covered} of its {count} layers are known to have attention or a state"
            if covered < count
            else ""
        )

    def _check_finite(self) -> None:
        if np.isfinite(self._samples[0]).all():
            return
        for name, tensor in self._slots.weights().items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise UserError(
                    f"model path: the weights hold values that are not finite, the first in {name}"
                )
        raise UserError(
            f"engine hf cannot run {type(self._slots.model).__name__}: its logits are not finite"
        )

    def _add_parts(self, split: float) -> None:
        """Add what transformers computes when it reads the texts in parts."""
        try:
            parts = [
                self._native(text, (max(1, int(len(text.ids) * split)),)) for text in self._texts
            ]
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            log.info(
                "transformers cannot read %s in parts: %s", type(self._slots.model).__name__, error
            )
            return
        sample = self._joined(parts)
        limit = noise_limit(self._samples, epsilon=self._epsilon, ratio=_NO_NOISE)
        if np.abs(sample - self._samples[0]).max() <= limit:
            self._samples.append(sample)

    def _add_rounding(self) -> None:
        """Add what transformers computes from embeddings that differ by a rounding."""
        generator = torch.Generator(self._slots.device).manual_seed(len(self._samples))

        def round_otherwise(_: torch.nn.Module, __: Any, embedded: Tensor) -> Tensor:
            noise = torch.randn(embedded.shape, generator=generator, device=embedded.device)
            return (embedded * (1 + self._epsilon * noise)).to(embedded.dtype)

        hook = self._slots.model.get_input_embeddings().register_forward_hook(round_otherwise)
        try:
            self._samples.append(self._joined([self._native(text, ()) for text in self._texts]))
        finally:
            hook.remove()

    def _native(self, text: TestText, ends: Sequence[int]) -> Tensor:
        """Compute a text as plain transformers does, in parts that end there and at its end."""
        logprobs = []
        cache = None
        start = 0
        for end in (*ends, len(text.ids)):
            rows = [row - start for row in text.rows if start <= row < end]
            output = self._slots.model(
                input_ids=text.ids[None, start:end],
                position_ids=torch.arange(start, end, device=text.ids.device)[None],
                past_key_values=cache,
                use_cache=bool(ends),
                logits_to_keep=torch.tensor(rows or [0], device=text.ids.device),
            )
            if rows:
                logprobs.append(self._values(output.logits[0]))
            cache = output.past_key_values if ends else None
            start = end
        return torch.cat(logprobs)

    def _without_slots(self, text: TestText) -> Tensor:
        positions = torch.arange(len(text.ids), device=text.ids.device)
        rows = torch.tensor(text.rows, device=text.ids.device)
        return self._values(self._slots.run_alone(text.ids, positions, rows))

    def _over_slots(self, *, gathers: bool | None = None) -> list[Tensor]:
        """Read the texts into the last slots: half, the rest but a few tokens, and those one by
        one.

        Args:
            gathers: read single tokens in recorded passes, in place or gathered; None: as others.
        """
        first_slot = self._slots.num_slots - len(self._texts)
        plans = [_lengths(len(text.ids)) for text in self._texts]
        rows_of_text: list[list[Tensor]] = [[] for _ in self._texts]
        starts = [0] * len(self._texts)
        for step in range(max(len(plan) for plan in plans)):
            segments = []
            ids = []
            rows = []
            owners = []
            offset = 0
            for number, (text, plan) in enumerate(zip(self._texts, plans, strict=True)):
                if step >= len(plan):
                    continue
                start = starts[number]
                new = plan[step]
                segments.append(Segment(first_slot + number, start, new))
                ids.append(text.ids[start : start + new])
                positions = [
                    row - start + offset for row in text.rows if start <= row < start + new
                ]
                rows += positions
                owners += [number] * len(positions)
                starts[number] = start + new
                offset = offset + new
            sample_rows = torch.tensor(rows or [0], device=ids[0].device)
            decoder = self._slots.decoder
            if gathers is None or decoder is None or any(segment.new > 1 for segment in segments):
                logits = self._slots.forward(segments, torch.cat(ids), sample_rows)
            else:
                token_ids = torch.cat(ids).cpu().numpy()
                logits = decoder.decode_as(segments, token_ids, gathers=gathers)[sample_rows]
            for owner, values in zip(owners, self._values(logits), strict=False):
                rows_of_text[owner].append(values)
        return [torch.stack(rows) for rows in rows_of_text]

    def _values(self, logits: Tensor) -> Tensor:
        return logits.float().log_softmax(-1)[:, self._columns]

    @staticmethod
    def _joined(parts: Sequence[Tensor]) -> Values:
        values: Values = torch.cat(list(parts)).float().cpu().numpy()
        return values


def _lengths(total: int) -> list[int]:
    """Return the new tokens of each pass over a text."""
    decoded = min(_DECODED, total - 1)
    half = (total - decoded + 1) // 2
    return [length for length in (half, total - decoded - half) if length] + [1] * decoded
