"""A transformers causal language model that scores only the tokens asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from broker.errors import ConfigError
from broker.weights.memory.cuda import numbered
from learner.backends.models.attention_trial import choose_attention, trunk_of
from learner.backends.models.auto_classes import LANGUAGE_MODEL, AutoClass, import_auto_class
from learner.backends.models.batch import TokenBatch
from learner.backends.models.block_compilation import compile_blocks
from learner.backends.models.empty_model import EmptyModel, open_empty, open_parts
from learner.backends.models.language_model import untrained_parts
from learner.backends.models.lora import Find, LoraAdapters, MergedWeights
from learner.backends.models.support import training_problem
from learner.backends.models.token_scores import token_scores
from learner.config import LoraSection
from rlearner_text.config import ModelSection, check_model_path
from rlearner_text.exact.exact_layers import exact_problem, make_exact, refuse_exact
from rlearner_text.finite_weights import weights_problem
from rlearner_text.hub import model_folder, read_json
from rlearner_text.rope import fix_rope
from rlearner_text.transformers_import import import_transformers

log = logging.getLogger(__name__)

# float32 numbers that logits may hold at once, 1 GiB.
_LOGIT_BUDGET: Final = 1 << 28
# Copies of the logits that functions of plain operations hold at the same time.
MANY_COPIES: Final = 5
# A cap or a factor shows in a few tokens already.
_PROBE_TOKENS: Final = 8
_NOUNS: Final[dict[AutoClass, str]] = {
    "AutoModelForCausalLM": "a causal language model",
    "AutoModelForSequenceClassification": "a sequence classifier",
}
# Takes logits and columns, (t, …) each.
LogitFunction = Callable[..., tuple[Tensor, ...]]


class PolicyModel:
    """A causal language model on one device, without dropout, so that logprobs equal the engines'.

    The vocabulary-sized part of the forward pass, usually the largest, runs for trained positions
    only; if one chunk does not hold them all, chunks are computed again in the backward pass.

    Args:
        packing: let it take packed rows if it can.
        max_context: tokens of the run's longest sequence; None for the model's positions.
        divided: leave its weights to a backend that reads a part of them on each rank, if their
            files allow that.
        exact: compute each token with the same bits in any batch (``rollout.exact``).

    Attributes:
        empty: its weights, which must be read before ``probe``; None if it has them.
        unpackable: why it takes no packed rows; empty if it does.
        adapters: the trained part, None if all weights are trained.
        auto_class: class of transformers that loads it.
    """

    auto_class: ClassVar[AutoClass] = LANGUAGE_MODEL

    def __init__(
        self,
        path: str,
        model: ModelSection,
        device: torch.device,
        *,
        trainable: bool = True,
        packing: bool = False,
        divided: bool = False,
        exact: bool = False,
        max_context: int | None = None,
    ) -> None:
        self.device = device
        self.path = path
        self._packing = packing
        self._exact = exact
        self.empty: EmptyModel | None = None
        if divided:
            opened = open_empty(path, model)
            if isinstance(opened, EmptyModel):
                self.empty = opened
                fix_positions(opened.module, max_context)
            else:
                log.info("%s: every rank loads the whole model: %s", path, opened)
        if self.empty is not None:
            self.module = self.empty.module
        else:
            self.module = load_model(path, model, device, max_context, kind=self.auto_class)
        if exact:
            self._make_exact(max_context)
        self.module.requires_grad_(trainable)
        for name in untrained_parts(self.module):
            # Text does not reach them: they would only decay. Checkpoints keep them as they are.
            self.module.get_parameter(name).requires_grad_(False)
        self.head = self.find_head()
        # Read now: a weight that DeepSpeed divides later has no rows.
        self._head_rows = int(self.head.weight.shape[0])
        self.adapters: LoraAdapters | None = None
        # Calls a function that reads weights; sharded models replace it to gather them.
        self.within: Callable[..., Any] = _call_directly
        self.unpackable = ""
        self._plain_head = False
        if self.empty is None:
            self.probe()

    def find_head(self) -> Any:
        """Return the layer from hidden states to logits.

        Raises:
            ConfigError: if there is none.
        """
        head = self.module.get_output_embeddings()
        if head is None:
            allowed = f"{type(self.module).__name__} has no output embeddings: not a language model"
            raise ConfigError("model.path", self.path, allowed)
        return head

    @property
    def vocab_size(self) -> int:
        """Number of rows of the input embeddings."""
        return int(self.module.get_input_embeddings().num_embeddings)

    @torch.no_grad()
    def probe(self) -> None:
        """Find out by trial runs what the model can do; on all ranks, once it has its weights."""

        def run() -> Tensor:
            self.unpackable = choose_attention(
                self.module,
                self.device,
                self.path,
                packed=self._packing,
                exact=self._exact,
            )
            self._plain_head = self.probe_head()
            return torch.zeros(())

        self.within(run)
        self.empty = None

    def _make_exact(self, max_context: int | None) -> None:
        if problem := exact_problem(self.module):
            raise refuse_exact(self.module, problem)
        positions = self.module.config.get_text_config().max_position_embeddings
        make_exact(self.module, max_context or int(positions))

    def adapt(self, section: LoraSection, seed: int) -> LoraAdapters:
        """Freeze the model and train adapters; see ``learner.backends.models.lora``."""
        self.adapters = LoraAdapters(self.module, section, seed, self.path)
        return self.adapters

    def checkpoint_blocks(self) -> None:
        """Keep each block's input only, and recompute the rest in the backward pass.

        Raises:
            ConfigError: if the model does not support it.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        blocks = [
            block
            for block in self.module.modules()
            if isinstance(block, GradientCheckpointingLayer)
        ]
        if not blocks or not self.module.supports_gradient_checkpointing:
            allowed = f"false: {type(self.module).__name__} has no blocks to checkpoint"
            raise ConfigError("train.gradient_checkpointing", True, allowed)
        self.module.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        for block in blocks:
            # Blocks check this flag; their layers stay in evaluation mode, without dropout.
            block.training = True

    def compile_blocks(self) -> None:
        """See ``learner.backends.models.block_compilation``."""
        compile_blocks(self.module, self.device)

    def score(self, batch: TokenBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return each trained token's logprob and entropy, (T,) float32, in nats.

        Args:
            entropy_grad: let gradient flow through the entropy too.
        """
        scores: tuple[Tensor, Tensor] = self.within(self._score, batch, entropy_grad)
        return scores

    def _score(self, batch: TokenBatch, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        return self.score_features(self.features(batch), batch, entropy_grad=entropy_grad)

    def score_features(
        self, features: Tensor, batch: TokenBatch, *, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return what ``score`` does, from ``features``."""
        if batch.temperature is None:
            columns = [batch.targets]
        else:
            columns = [batch.targets, batch.temperature]
        # A plain head's logits may be overwritten. What caps logits needs them for its gradient.
        scores = partial(token_scores, entropy_grad=entropy_grad, owned=self._plain_head)
        logprobs, entropy = map_chunks(scores, self.logits, features, columns, self._chunk_width)
        return logprobs, entropy

    def score_and_map(
        self,
        batch: TokenBatch,
        function: Callable[..., Tensor],
        columns: Sequence[Tensor],
        *,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``score`` does, and a function of the logits, from one pass.

        Args:
            function: takes the logits of t of the first T tokens and their part of the columns;
                returns (t,).
            columns: (T, …) each.
        """

        def run() -> tuple[Tensor, Tensor, Tensor]:
            features = self.features(batch)
            logprobs, entropy = self.score_features(features, batch, entropy_grad=entropy_grad)
            width = MANY_COPIES * self._chunk_width
            of_columns = features[: len(columns[0])]
            (values,) = map_chunks(
                lambda *parts: (function(*parts),), self.logits, of_columns, columns, width
            )
            return logprobs, entropy, values

        scores: tuple[Tensor, Tensor, Tensor] = self.within(run)
        return scores

    @property
    def _chunk_width(self) -> int:
        return self._head_rows if self._plain_head else 0

    def map_logits(
        self, batch: TokenBatch, function: LogitFunction, *columns: Tensor
    ) -> tuple[Tensor, ...]:
        """Apply a function to the logits of the trained tokens, in chunks; return (T, …) each.

        Args:
            function: takes the logits of t of the T tokens and their part of the columns; returns
                tensors (t, …).
            columns: (T, …) each.
        """
        results: tuple[Tensor, ...] = self.within(self._map_logits, batch, function, *columns)
        return results

    def _map_logits(
        self, batch: TokenBatch, function: LogitFunction, *columns: Tensor
    ) -> tuple[Tensor, ...]:
        features = self.features(batch)
        return map_chunks(function, self.logits, features, columns, MANY_COPIES * self._chunk_width)

    def features(self, batch: TokenBatch) -> Tensor:
        """Return the input of ``logits`` for the T trained tokens.

        Hidden states if the head is plain, else logits.
        """
        if not self._plain_head:
            return self._selected_logits(batch)
        hidden = trunk_of(self.module)(**batch.inputs(), use_cache=False).last_hidden_state
        selected: Tensor = hidden.flatten(0, 1).index_select(0, batch.predictors)
        return selected

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits, (t, vocabulary), of ``features``, (t, …)."""
        logits: Tensor = self.head(features) if self._plain_head else features
        return logits

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1.

        Args:
            token_ids: (n,) int64.

        Returns:
            (n - 1,) float32.
        """
        if len(token_ids) < 2:
            return torch.zeros(0, device=self.device)
        logprobs: Tensor = self.within(self._logprobs, token_ids)
        return logprobs

    def _logprobs(self, token_ids: Tensor) -> Tensor:
        logits = self.module(input_ids=token_ids[None, :-1], use_cache=False).logits[0]
        logprobs: Tensor = logits.float().log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]
        return logprobs

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """Compute attention as the model's own code defines it, without faster kernels."""
        configs = {
            id(part.config): part.config
            for part in self.module.modules()
            if hasattr(part, "config")
        }
        originals = [(config, config._attn_implementation) for config in configs.values()]
        try:
            for config, _ in originals:
                config._attn_implementation = "eager"
            yield
        finally:
            # The whole model comes first, because setting its attention sets that of its parts.
            for config, implementation in originals:
                config._attn_implementation = implementation

    def weights(self) -> Mapping[str, Tensor]:
        """Return parameters, then persistent buffers, by state-dict name; tied ones once.

        Adapters are merged into each weight when it is read.
        """
        tensors = self.tensors()
        plain = {name: name for name in tensors} if self.adapters is None else self.adapters.names
        # Tied tensors are found by storage: on the meta device, or moved away, they have no
        # address.
        places: set[tuple[int, int]] = set()
        distinct: list[str] = []
        for name, tensor in tensors.items():
            place = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()))
            if name in plain and (tensor.numel() == 0 or place not in places):
                places.add(place)
                distinct.append(plain[name])
        if self.adapters is None:
            return {name: tensors[name] for name in distinct}
        return MergedWeights(distinct, lambda name: self.whole(name, tensors.__getitem__))

    def tensors(self) -> dict[str, Tensor]:
        """Return the module's live parameters and persistent buffers by the module's names."""
        tensors = dict(self.module.named_parameters())
        tensors |= {
            name: tensor for name, tensor in self.module.state_dict().items() if name not in tensors
        }
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def whole(self, name: str, find: Find) -> Tensor:
        """Return one of ``weights``, computed from the module's tensors."""
        return find(name) if self.adapters is None else self.adapters.merged(name, find)

    def parts(self, name: str) -> list[str]:
        """Return the names of the module's tensors that ``whole`` reads."""
        return [name] if self.adapters is None else self.adapters.parts(name)

    def shapes(self) -> dict[str, Tensor]:
        """Return ``weights`` on the meta device."""
        tensors = self.tensors()
        if self.adapters is not None:
            tensors = {plain: tensors[name] for name, plain in self.adapters.names.items()}
        return {name: tensors[name].to("meta") for name in self.weights()}

    def _selected_logits(self, batch: TokenBatch) -> Tensor:
        # The model's own forward pass may change logits, so it runs whole; only its head is limited
        # to the selected positions.
        def select(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0].flatten(0, 1).index_select(0, batch.predictors)[None], *args[1:])

        handle = self.head.register_forward_pre_hook(select)
        try:
            logits: Tensor = self.module(**batch.inputs(), use_cache=False).logits[0]
        finally:
            handle.remove()
        return logits

    @torch.no_grad()
    def probe_head(self) -> bool:
        """Return whether logits are ``head(last hidden state)``; some models cap or scale them."""
        ids = torch.arange(_PROBE_TOKENS, device=self.device)[None] % self.vocab_size
        try:
            ours = self.head(
                trunk_of(self.module)(input_ids=ids, use_cache=False).last_hidden_state
            )
        except (AttributeError, TypeError):
            # The trunk takes other arguments, or has no hidden states.
            return False
        return bool(torch.equal(ours, self.module(input_ids=ids, use_cache=False).logits))


def map_chunks(
    function: LogitFunction,
    logits: Callable[[Tensor], Tensor],
    features: Tensor,
    columns: Sequence[Tensor],
    width: int,
) -> tuple[Tensor, ...]:
    """Return ``function(logits(features), *columns)``, in chunks that fit the budget.

    If there are several, the backward pass computes each again.

    Args:
        features: (T, …), as are the columns.
        width: float32 numbers that a row of logits takes, in all its copies; 0 for one chunk.
    """
    chunk = len(features)
    if width:
        chunk = max(1, _LOGIT_BUDGET // width)

    def part(features: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        return function(logits(features), *columns)

    if len(features) <= chunk:
        return part(features, *columns)
    pieces = [slice(start, start + chunk) for start in range(0, len(features), chunk)]
    repeated = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    parts = [repeated(features[piece], *(column[piece] for column in columns)) for piece in pieces]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def _call_directly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def fix_positions(module: Any, max_context: int | None) -> None:
    """Let a token's rotary position not depend on the other sequences of a batch.

    Args:
        max_context: tokens of the longest sequence, None for the model's positions.
    """
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if (longest := max_context or positions) is not None:
        fix_rope(module, longest)


def load_model(
    path: str,
    section: ModelSection,
    device: torch.device,
    max_context: int | None = None,
    *,
    kind: AutoClass = LANGUAGE_MODEL,
) -> Any:
    """Load a causal language model, or a classifier, in evaluation mode.

    Args:
        max_context: as for ``fix_positions``.
        kind: class of transformers that loads it.

    Raises:
        ConfigError: if the path holds none, or weights are missing, which transformers would
            initialise at random, or hold NaN or infinity.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    import_transformers()
    from transformers.utils import logging as transformers_logging

    if (empty := open_parts(path, section, kind)) is not None:
        empty.fill(device)
        fix_positions(empty.module, max_context)
        return empty.module
    check_model_path(path)
    transformers_logging.disable_progress_bar()
    folder = model_folder(path, trust_remote_code=section.trust_remote_code)
    if problem := training_problem(read_json(Path(folder) / "config.json", path, "model.path")):
        raise ConfigError("model.path", path, problem)
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, section.dtype),
        "trust_remote_code": section.trust_remote_code,
        # Other files are pickles, which may run code.
        "use_safetensors": True,
        "output_loading_info": True,
    }
    try:
        model, info = import_auto_class(kind).from_pretrained(folder, **arguments)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        SafetensorError,
        StrictDataclassError,
    ) as error:
        reason = " ".join(str(error).split())[:300]
        allowed = f"transformers cannot load {_NOUNS[kind]} from it: {reason}"
        raise ConfigError("model.path", path, allowed) from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            "model.path",
            path,
            f"{len(missing)} of its weights are missing, the first is {missing[0]}",
        )
    model = model.eval().to(device)
    if problem := weights_problem(dict(model.named_parameters()), folder):
        raise ConfigError("model.path", path, f"a model of finite weights: {problem}")
    fix_positions(model, max_context)
    return model


def pick_device(name: str) -> torch.device:
    """Return the device; ``auto`` is cuda if available.

    Raises:
        ConfigError: if this machine does not have it.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = ["cpu"]
    if count:
        devices += ["cuda", *(f"cuda:{index}" for index in range(count))]
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    if name not in devices:
        raise ConfigError("train.device", name, f"this machine has {', '.join(devices)}")
    return numbered(name)
