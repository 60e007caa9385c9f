"""What every engine is: it takes token ids, gives token ids, and may take new weights in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from rlearner_text.openai.pieces import Tap
from rollout.config import RolloutSection

if TYPE_CHECKING:
    import torch

UpdateMode = Literal["keep", "recompute", "abort"]
REPLY_ROOM_BYTES: Final = 4096  # for all in a reply that is no column
NO_VERSION: Final = -1  # no weights that may be served yet: every request waits


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine is built from.

    Attributes:
        model_path: folder or hub name of weights and tokenizer.
        section: the section ``rollout``.
        dtype: torch dtype by name, from ``model.dtype``.
        trust_remote_code: from ``model.trust_remote_code``.
        device: ``cpu``, ``cuda``, or ``auto``: cuda where there is one.
        policy_version: of the weights in ``model_path``; NO_VERSION holds every request until ``adopt`` or ``update_weights``.
    """

    model_path: str
    section: RolloutSection = field(default_factory=RolloutSection)
    dtype: str = "float32"
    trust_remote_code: bool = False
    device: Literal["cpu", "cuda", "auto"] = "auto"
    policy_version: int = NO_VERSION


@dataclass(frozen=True, slots=True)
class Output:
    """What one request came to.

    Attributes:
        token_ids: sampled tokens, the stop token included.
        logprobs: natural log of the probability of each token under the distribution it was drawn from.
        version_runs: pairs (policy_version, number of tokens), in token order; the counts add up to the tokens.
        finish_reason: ``error`` comes with a text in ``error`` and no tokens.
        prefix_hit_tokens: context tokens whose KV was found in the cache.
        error: one line.
        reshaped: for each token whether a guide, penalty or bias changed what it was drawn from; empty: none did.
        top_ids, top_logprobs: (n - 1, k) for a request with ``prompt_top_k``, which samples nothing.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    version_runs: Sequence[tuple[int, int]] = ()
    finish_reason: wire.FinishReason = "error"
    prefix_hit_tokens: int = 0
    error: str = ""
    reshaped: Sequence[bool] = ()
    top_ids: npt.NDArray[np.int32] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot; counters only grow.

    Attributes:
        running: requests being generated now.
        waiting: requests queued.
        slots: requests that can run at once.
        busy_s: seconds with at least one request running.
        generated_tokens: tokens sampled.
        prefill_tokens: context tokens run through the model.
        prefix_hit_tokens: context tokens that were not, thanks to the cache.
        finished: requests answered, by finish reason.
        pause_s: seconds in which generation stood still for new weights.
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    busy_s: float = 0.0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    prefix_hit_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    pause_s: float = 0.0


class Engine(Protocol):
    """One policy behind one queue. All coroutines run on the loop that called ``start``.

    An engine without weights (``has_weights`` False) serves version 0 for ever, ignores ``min_version``, and is never asked
    for anything about weights.

    An engine with ``keeps_tensors`` True (absent: False) computes from the tensors of an update themselves until the next update has
    returned, so nobody may write into them meanwhile; others copy them.
    """

    has_weights: bool
    policy_version: int  # of the weights being sampled from, NO_VERSION when none may be

    def __init__(self, config: EngineConfig) -> None: ...

    async def start(self) -> None:
        """Load everything and be ready to generate.

        Raises:
            UserError: the model path is no model, the engine cannot run it, or a setting does not fit it.
        """
        ...

    async def generate(self, request: wire.GenerateRequest) -> Output:
        """One request to its end; never raises for what the request says (``finish_reason`` is then ``error``).

        The seconds of ``deadline_s`` start with this call. At the deadline the output so far is returned.
        With ``prompt_top_k`` it samples nothing and scores the context; an engine that cannot answers with an error. Who asks
        for that keeps the deadline, and cancels it (``rollout.answering``).
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request early: its ``generate`` returns the output so far. An unknown id does nothing."""
        ...

    async def adopt(self, version: int) -> None:
        """The weights already held are this version; caches stay valid."""
        ...

    async def update_weights(self, tensors: Mapping[str, torch.Tensor], version: int, mode: UpdateMode, probe: wire.Probe | None) -> float:
        """Load new weights between two tokens and serve them once the probe matches; seconds that generation stood still.

        Requests in flight go on: ``keep`` with the KV they have, ``recompute`` with KV rebuilt before their next token,
        ``abort`` ends them with their partial output. KV kept for later requests is dropped.
        The tensors are copied, or kept (``keeps_tensors``).

        Raises:
            TransferFailed: names or shapes do not fit (the old weights stay), or the probe does not match (the engine
                holds all requests and is at NO_VERSION until an update succeeds).
        """
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """log p(token[i + 1] | token[: i + 1]) at temperature 1, shape (n - 1,), under the weights held now."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors now held by their Hugging Face names, tied ones once; names, shapes and dtypes are what an update carries.

        Read only, and only while nothing updates them.
        """
        ...

    def stats(self) -> Stats: ...

    async def join(self) -> None:
        """Returns once the engine is closed.

        Raises:
            Exception: whatever broke it.
        """
        ...

    async def close(self) -> None:
        """Abort what runs and free everything; idempotent."""
        ...


@runtime_checkable
class TappedEngine(Protocol):
    """An engine that tells of tokens as they are sampled, to a listener in the same process. An engine need not be one."""

    tells_top: bool  # whether it knows the likeliest tokens at each place

    async def generate(self, request: wire.GenerateRequest, tap: Tap | None = None) -> Output:
        """See ``Engine``. The pieces told, one after the other, are what the output holds, unless it is an error."""
        ...


def problem(request: wire.GenerateRequest, *, max_context_tokens: int, vocab_size: int | None) -> str:
    """Why a request cannot be run, in one line; empty when it can."""
    tokens = request.token_ids.array()
    sampling = request.sampling
    if tokens.size == 0:
        return "the prompt is empty"
    if tokens.size >= max_context_tokens:
        return f"the prompt has {tokens.size} tokens and leaves no room to generate in rollout.max_context_tokens={max_context_tokens}"
    if vocab_size is not None and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        bad = next(int(t) for t in tokens if not 0 <= t < vocab_size)
        return f"token id {bad} is outside the model's vocabulary of {vocab_size}"
    if request.prompt_top_k:
        return _scoring_problem(tokens.size, request.prompt_top_k, vocab_size)
    if sampling.max_tokens < 1:
        return f"max_tokens={sampling.max_tokens} is not allowed; at least 1"
    return ""


def _scoring_problem(num_tokens: int, k: int, vocab_size: int | None) -> str:
    if vocab_size is None:
        return "prompt_top_k is not allowed; this engine has no distributions to tell of"
    if k > vocab_size:
        return f"prompt_top_k={k} is not allowed; the model's vocabulary has {vocab_size}"
    if (size := (num_tokens - 1) * k * 8) > wire.MAX_PAYLOAD_BYTES - REPLY_ROOM_BYTES:
        return f"{num_tokens} tokens with prompt_top_k={k} answer {size} bytes, more than fit into a message of {wire.MAX_PAYLOAD_BYTES}"
    return ""
