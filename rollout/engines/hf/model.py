"""A causal language model of transformers with attention over KV slots: load, check, forward."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from broker.errors import UserError
from broker.weights.memory.cuda import numbered
from broker.weights.memory.offload import OffloadedMemory
from rlearner_text.exact.exact_layers import exact_problem, make_exact, refuse_exact
from rlearner_text.finite_weights import weights_problem
from rlearner_text.hub import model_folder
from rlearner_text.rope import fix_rope
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.args import HFArgs
from rollout.engines.base import EngineConfig
from rollout.engines.context_scores import ContextScores
from rollout.engines.hf.attention import SlotAttention
from rollout.engines.hf.cuda_graphs import make_recorder
from rollout.engines.hf.forward_pass import ForwardPass, Segment
from rollout.engines.hf.mask_rule import make_rule
from rollout.engines.hf.recurrent import PassCache, RecurrentStates, pass_over
from rollout.engines.hf.self_test import test_slots, test_static_passes
from rollout.engines.hf.static_decoder import StaticDecoder
from rollout.engines.hf.static_pass import StaticPass
from rollout.engines.hf.support import unsupported_class, unsupported_reason
from rollout.engines.hf.weights import HeldWeights

log = logging.getLogger(__name__)

_numbers: Final = itertools.count()
_DISCOVERY_TOKENS: Final = 8


class SlotModel:
    """A model with its KV slots and weights; not thread-safe.

    Raises:
        UserError: if the path has no causal language model, slots do not support its attention, or
            no slot fits.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        section = config.section
        args = HFArgs.model_validate(section.engine_args)
        self.device = pick_device(config.device)
        self.model = load_model(config, self.device)
        if section.exact:
            self._make_exact(section.max_context_tokens)
        self._held = HeldWeights(self.model)
        self.vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        self.max_context = fitting_context(self.model, section.max_context_tokens)
        fix_rope(self.model, self.max_context)
        self.attention = SlotAttention(self.device, exact=section.exact)
        self.states = RecurrentStates(self.device)
        self._name = f"rlearner_slots_{next(_numbers)}"
        self._native = self.model.config._attn_implementation
        self._cache = PassCache()
        self._plug_in()
        self.num_slots, self.max_running = self._allocate(
            args, section.max_running, section.prefix_cache
        )
        self._offloaded = OffloadedMemory()
        is_eager = args.enforce_eager or section.exact
        self.decoder = None if is_eager else self._make_decoder()
        # Products of matrices at other addresses may be summed in another order.
        self._held.copies = section.exact or self.decoder is not None
        test = test_slots(self, tokenizer)
        if section.exact and (problem := test.exact_problem()):
            raise refuse_exact(self.model, problem)
        if self.decoder is not None and (problem := test_static_passes(self, test)):
            self.decoder.turn_off(problem)
            self.decoder = None
            self._held.copies = False

    @property
    def copies_weights(self) -> bool:
        """Whether ``load_weights`` copies all tensors: CUDA graphs read the model's at their
        addresses.
        """
        return self._held.copies

    @property
    def has_states(self) -> bool:
        """Whether layers have recurrent states, which a prefix is only reused with at its very end."""
        return bool(self.states.layers)

    def copy_prefixes(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Give slots the first ``length`` tokens of others; all of them, if the model has recurrent
        states.
        """
        self.attention.copy(sources, targets, length)
        self.states.copy(sources, targets)

    def wipe(self, slot: int) -> None:
        """Zero a slot that may hold NaN: values beyond a sequence's end have weight 0, and 0 times
        NaN is NaN.
        """
        self.attention.wipe(slot)
        self.states.wipe(slot)

    def offload(self) -> None:
        """Move the weights off the device and drop all slots' KV; use nothing of the model until
        ``reload``.
        """
        if self.decoder is not None:
            self.decoder.drop()
        self.attention.free()
        self.states.free()
        self._offloaded.release([*self.model.parameters(), *self.model.buffers()])

    def reload(self) -> None:
        """Move the weights back, with empty slots."""
        self._offloaded.restore()
        self.attention.allocate(self.num_slots, self.max_context)
        self.states.allocate(self.num_slots)
        self._note_addresses()

    def close(self) -> None:
        """Unregister attention and masks from transformers."""
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(self._name, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(self._name, None)

    @contextmanager
    def native_attention(self) -> Iterator[None]:
        """Let the model compute as plain transformers does; with capped scores, as its own code
        does.
        """
        self.model.set_attn_implementation("eager" if self.attention.is_capped else self._native)
        try:
            yield
        finally:
            self.model.set_attn_implementation(self._name)

    @torch.inference_mode()
    def forward(
        self, segments: Sequence[Segment], token_ids: torch.Tensor, sample_rows: torch.Tensor
    ) -> torch.Tensor:
        """Run the new tokens of many sequences.

        Args:
            segments: ordered by slot; each slot already holds ``start`` tokens.
            token_ids: (rows,) int64, the new tokens in that order.
            sample_rows: (k,) int64, the rows whose logits to return.

        Returns:
            Logits (k, vocabulary).
        """
        now = ForwardPass(segments, self.max_context, self.device)
        with pass_over(now, self.attention, self.states, self._cache):
            return self._run(token_ids, now.positions(), sample_rows, self._cache)

    @torch.inference_mode()
    def decode(self, segments: Sequence[Segment], token_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """Run one new token of each of many sequences, from a CUDA graph where possible.

        Args:
            segments: as for ``forward``, each of one token.
            token_ids: (rows,), on the host.

        Returns:
            Logits (rows, vocabulary), valid until the next pass.
        """
        if self.decoder is not None:
            logits = self.decoder.decode(segments, token_ids)
            if logits is not None:
                return logits
        ids = torch.from_numpy(token_ids).to(self.device)
        return self.forward(segments, ids, torch.arange(len(ids), device=self.device))

    def run_alone(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of some rows of one sequence, without using a slot; arguments are (n,),
        (n,) and (k,).
        """
        return self._run(token_ids, positions[None], rows)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return log p(token[i + 1] | token[: i + 1]), shape (n - 1,) float32 on the CPU, without
        using a slot.
        """
        ids = torch.tensor(token_ids, device=self.device)
        rows = torch.arange(len(ids), device=self.device)
        logits = self.run_alone(ids, rows, rows)
        return logits[:-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0].cpu()

    @torch.inference_mode()
    def score_context(self, token_ids: Sequence[int], k: int) -> ContextScores:
        """Score every token but the first at temperature 1, without using a slot.

        Args:
            token_ids: n tokens.
            k: likeliest tokens to return at each position.
        """
        if len(token_ids) < 2:
            no_values = np.zeros((0, k), np.float32)
            return ContextScores(np.zeros(0, np.float32), no_values.astype(np.int32), no_values)
        n = len(token_ids) - 1
        ids = torch.tensor(token_ids, device=self.device)
        positions = torch.arange(n, device=self.device)
        logprobs = self.run_alone(ids[:-1], positions, positions).float().log_softmax(-1)
        of_context = logprobs.gather(-1, ids[1:, None])[:, 0]
        best = logprobs.topk(k, -1)
        return ContextScores(
            of_context.cpu().numpy(), best.indices.int().cpu().numpy(), best.values.cpu().numpy()
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers by name, tied ones once, in model order."""
        return self._held.tensors()

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; see ``HeldWeights.load``."""
        self._held.load(tensors)
        self._note_addresses()

    def _note_addresses(self) -> None:
        if self.decoder is not None:
            self.decoder.keep_addresses([*self.model.parameters(), *self.model.buffers()])

    def _make_exact(self, max_context: int) -> None:
        if problem := exact_problem(self.model):
            raise refuse_exact(self.model, problem)
        make_exact(self.model, max_context)

    def _make_decoder(self) -> StaticDecoder | None:
        """Return a decoder with CUDA graphs; None if the device has none, or the model's states
        prevent it.
        """
        recorder = make_recorder(self.device)
        if recorder is None:
            return None
        if self.has_states:
            log.info("engine hf decodes without CUDA graphs: layers have recurrent states")
            return None
        sizes = [heads * (k + v) * d.itemsize for heads, k, v, d in self.attention.shapes.values()]
        decoder = StaticDecoder(
            self._run_static,
            recorder,
            num_slots=self.num_slots,
            max_context=self.max_context,
            token_bytes=max(sizes),
            device=self.device,
        )
        decoder.keep_addresses([*self.model.parameters(), *self.model.buffers()])
        return decoder

    def _run_static(self, layout: StaticPass) -> torch.Tensor:
        with pass_over(layout, self.attention, self.states, self._cache):
            return self._run(layout.token_ids, layout.positions(), 0, self._cache)

    def _run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | int,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Return the logits of some rows; 0: of all."""
        out = self.model(
            input_ids=token_ids[None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _plug_in(self) -> None:
        """Replace attention, masks and states of the model's layers; a pass finds out what each
        layer keeps.

        Raises:
            UserError: if its layers cannot be taken over.
        """
        name = type(self.model).__name__
        if reason := unsupported_reason(self.model.config) or unsupported_class(type(self.model)):
            raise UserError(f"engine hf cannot run {name}: {reason}")
        ALL_ATTENTION_FUNCTIONS.register(self._name, self.attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(self._name, make_rule)
        ids = torch.arange(
            min(_DISCOVERY_TOKENS, self.vocab_size, self.max_context), device=self.device
        )
        try:
            self.model.set_attn_implementation(self._name)
            self.attention.discovers = True
            with torch.inference_mode():
                self.states.adopt_layers(
                    self.model, lambda cache: self._run(ids, ids[None], ids[-1:], cache)
                )
            self.attention.discovers = False
            if self.attention.exact and self.states.layers:
                raise UserError("rollout.exact has no layers with recurrent states")
            if not self.attention.shapes and not self.states.layers:
                raise UserError(
                    "none of its layers has attention or a state that transformers' caches know"
                )
        except (
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
            NotImplementedError,
            UserError,
        ) as error:
            self.close()
            raise UserError(f"engine hf cannot run {name}: {one_line(error)}") from error

    def _allocate(self, args: HFArgs, max_running: int, prefix_cache: bool) -> tuple[int, int]:
        per_slot = self.attention.bytes_per_token * self.max_context + self.states.bytes_per_slot
        fit = int(args.kv_cache_gib * 2**30 // per_slot)
        if fit < 1:
            need = f"one slot of rollout.max_context_tokens={self.max_context} needs {per_slot / 2**30:.2f} GiB"
            raise UserError(
                f"rollout.engine_args.kv_cache_gib: {args.kv_cache_gib} is not allowed; {need}"
            )
        num_slots = args.kv_slots or max_running * (2 if prefix_cache else 1)
        slots = min(num_slots, fit)
        self.attention.allocate(slots, self.max_context)
        self.states.allocate(slots)
        return slots, min(max_running, slots)


def load_model(config: EngineConfig, device: torch.device) -> Any:
    """Load the model in evaluation mode on its device.

    Raises:
        UserError: if there is no causal language model at the path, or its weights hold NaN or
            infinity.
    """
    transformers.utils.logging.disable_progress_bar()
    path = config.model_path
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise UserError(f"model path {path!r}: no model there, the folder has no config.json")
    try:
        dtype = getattr(torch, config.dtype)
        trusted = config.trust_remote_code
        if config.has_weights:
            folder = model_folder(path, trust_remote_code=trusted)
            options = {"dtype": dtype, "trust_remote_code": trusted, "use_safetensors": True}
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        else:
            model = _without_weights(path, dtype, trust_remote_code=trusted)
    except Exception as error:
        is_expected = isinstance(error, (OSError, ValueError, KeyError, RuntimeError))
        if not is_expected and not type(error).__module__.startswith(
            ("safetensors", "huggingface_hub")
        ):
            raise
        raise UserError(
            f"model path {path!r}: no causal language model could be loaded: {one_line(error)}"
        ) from error
    model = model.requires_grad_(False).eval().to(device)
    if config.has_weights and (problem := weights_problem(dict(model.named_parameters()), folder)):
        raise UserError(f"model path {path!r}: its weights are not finite: {problem}")
    return model


def _without_weights(path: str, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
    """Return the model with random weights, which are replaced before it answers."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if os.path.isfile(os.path.join(path, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model


def pick_device(name: str) -> torch.device:
    """Return the torch device; ``auto`` is cuda if available.

    Raises:
        UserError: if cuda is requested and this torch cannot use it.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        reason = f"this torch ({torch.__version__}) cannot use them; install its CUDA build"
        raise UserError(f"GPUs are requested, but {reason}")
    if not available or name == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() > 1:
        count = torch.cuda.device_count()
        log.warning(
            "engine hf uses only the first of %d GPUs; start one rollout-server per GPU", count
        )
    return numbered("cuda")


def fitting_context(model: Any, max_tokens: int) -> int:
    """Return the requested context length.

    Raises:
        UserError: if the model has fewer positions.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and max_tokens > positions:
        raise UserError(
            f"rollout.max_context_tokens: {max_tokens} is not allowed; "
            f"the model has {positions} positions"
        )
    return max_tokens


def end_tokens(model: Any) -> frozenset[int]:
    """Return the model's own end tokens, from its generation configuration, else its configuration."""
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def one_line(error: BaseException) -> str:
    """Return the first non-empty line of an error."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
