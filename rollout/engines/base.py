"""The engine interface: token ids in, token ids out, and weight updates while requests run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from broker.telemetry.operator_profile import ProfilePlan
from rlearner_text.openai.token_events import TokenListener
from rollout.config import RolloutSection

if TYPE_CHECKING:
    import torch

UpdateMode = Literal["keep", "recompute", "abort"]
REPLY_ROOM_BYTES: Final = 4096  # for the fields of a reply other than its columns
NO_VERSION: Final = -1  # no weights to serve yet: every request waits


@dataclass(frozen=True)
class EngineConfig:
    """Arguments of an engine.

    Attributes:
        model_path: folder or hub name of weights and tokenizer.
        section: the configuration section ``rollout``.
        dtype: name of a torch dtype, from ``rollout.dtype`` or else ``model.dtype``.
        trust_remote_code: from ``model.trust_remote_code``.
        chat_template: from ``model.chat_template``: None, ``plain`` or the text of a template.
        device: ``cpu``, ``cuda``, or ``auto``: cuda if available.
        has_weights: False: the folder has no weights, the first ones come from the learner.
        policy_version: of the weights in ``model_path``; NO_VERSION holds every request until
            ``adopt`` or
        ``update_weights``.
        shares_device: whether the engine will ``sleep``, which some must know when they start.
        profile: the steps whose operators engine hf records, each while it samples with the weights
            that the step starts from; None: none.
    """

    model_path: str
    section: RolloutSection = field(default_factory=RolloutSection)
    dtype: str = "float32"
    trust_remote_code: bool = False
    device: Literal["cpu", "cuda", "auto"] = "auto"
    policy_version: int = NO_VERSION
    has_weights: bool = True
    shares_device: bool = False
    chat_template: str | None = None
    profile: ProfilePlan | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The result of one request.

    Attributes:
        token_ids: sampled tokens, including the stop token.
        logprobs: natural log of each token's probability under the distribution it was drawn from.
        version_runs: pairs (policy_version, number of tokens), in token order; the counts add up to
            the tokens.
        finish_reason: ``error`` means no tokens, and a message in ``error``.
        prefix_hit_tokens: context tokens whose KV was in the cache.
        error: one line.
        reshaped: for each token whether a guide, penalty or bias changed its distribution; empty if
            none did.
        top_ids, top_logprobs: (n - 1, k) for a request with ``prompt_top_k``, which samples
            nothing.
        prompt_logprobs: (n - 1,) for a request with ``prompt_logprobs``, likewise.
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
    prompt_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine's load; counters never decrease.

    Attributes:
        running: requests being generated now.
        waiting: queued requests.
        slots: requests that can run at once.
        busy_s: seconds with at least one running request.
        generated_tokens: sampled tokens.
        prefill_tokens: context tokens run through the model.
        prefix_hit_tokens: context tokens found in the cache instead.
        finished: answered requests by finish reason.
        pause_s: seconds in which generation paused for new weights.
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
    """One policy behind one queue. All coroutines run on the event loop that called ``start``.

    An engine without weights (``has_weights`` False) always serves version 0 and ignores
    ``min_version``; its weight methods are never called.

    An engine with ``keeps_tensors`` True (absent: False) computes from the very tensors of an
    update until the next update has returned, so they must not be written to before; other engines
    copy them.
    """

    has_weights: bool
    policy_version: int  # of the weights being sampled from, NO_VERSION if there are none

    def __init__(self, config: EngineConfig) -> None: ...

    async def start(self) -> None:
        """Load everything and get ready to generate.

        Raises:
            UserError: if there is no model at the path, the engine cannot run it, or a setting does
                not fit it.
        """
        ...

    async def generate(self, request: wire.GenerateRequest) -> GenerationOutput:
        """Run one request to its end. An invalid request does not raise: its ``finish_reason`` is
        ``error``.

        The seconds of ``deadline_s`` start with this call; at the deadline the output so far is
        returned. A request that ``scores_context`` samples nothing; an engine that cannot score
        returns an error. The caller (``rollout.request_handler``) then enforces the deadline
        by cancelling the call.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request early: its ``generate`` returns the output so far. Ignores an unknown id."""
        ...

    async def adopt(self, version: int) -> None:
        """Declare that the weights already held are this version; caches stay valid."""
        ...

    async def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
    ) -> float:
        """Load new weights between two tokens, serve them once the probe matches, and return the
        seconds of pause.

        Requests in flight continue with the KV they have (``keep``) or with KV rebuilt before their
        next token (``recompute``); ``abort`` ends them with their partial output. KV kept for later
        requests is dropped. The tensors are copied, or kept (``keeps_tensors``).

        Raises:
            TransferFailed: if names or shapes do not fit (the old weights stay), or the probe does
                not match (the engine holds all requests and is at NO_VERSION until an update
                succeeds).
        """
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1 under the current weights,
        shape (n - 1,).
        """
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by Hugging Face name, tied ones once; updates have the same names,
        shapes and dtypes.

        Read-only, and valid only while no update runs.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def join(self) -> None:
        """Return once the engine is closed.

        Raises:
            Exception: if the engine fails.
        """
        ...

    async def close(self) -> None:
        """Abort running requests and free everything; idempotent."""
        ...


@runtime_checkable
class ReceivingEngine(Protocol):
    """An engine whose own workers can receive weights from the learner; optional for engines."""

    def worker_carriers(self) -> dict[wire.Carrier, int]:
        """Return the carriers by which the workers receive, with the number of workers; empty: they
        do not.
        """
        ...

    async def receive_weights(
        self,
        transfer: str,
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
        go: Callable[[], Awaitable[None]],
    ) -> tuple[float, str]:
        """Have the workers receive a version; return the seconds of pause and the digest of the
        received bytes.

        Requests in flight continue as in ``Engine.update_weights``.

        Args:
            transfer: text of a ``WorkerTransfer``, for the workers' ``WorkerReceiver``.
            go: waits until the learner sends; generation continues until then.

        Raises:
            TransferFailed: if it did not begin (the old weights stay), if it failed half-way or the
                probe does not match (the engine holds all requests and is at NO_VERSION until an
                update succeeds).
        """
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that can stream tokens to a listener in the same process; optional for engines."""

    tells_top: bool  # whether it can report the likeliest tokens at each position

    async def generate(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        """See ``Engine``. The streamed pieces add up to the output, unless that is an error."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can leave its device to another process; optional for engines."""

    async def sleep(self) -> None:
        """Move the weights off the device and drop all KV; return once the memory is free.

        Requests wait, those that run, too: their KV is rebuilt before their next token. Aborts and
        deadlines end them as ever. Until ``wake``, no weights may be loaded or read and nothing
        scored.

        Raises:
            OSError: if the weights cannot be written anywhere.
        """
        ...

    async def wake(self) -> None:
        """Move the weights back and go on."""
        ...


def request_problem(
    request: wire.GenerateRequest, *, max_context_tokens: int, vocab_size: int | None
) -> str:
    """Return why a request cannot run, in one line; empty if it can."""
    tokens = request.token_ids.array()
    sampling = request.sampling
    if tokens.size == 0:
        return "the prompt is empty"
    if tokens.size >= max_context_tokens:
        room = f"leaves no room to generate in rollout.max_context_tokens={max_context_tokens}"
        return f"the prompt has {tokens.size} tokens and {room}"
    if vocab_size is not None and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        bad = next(int(t) for t in tokens if not 0 <= t < vocab_size)
        return f"token id {bad} is outside the model's vocabulary of {vocab_size}"
    if request.scores_context:
        return _scoring_problem(request, tokens.size, vocab_size)
    if sampling.max_tokens < 1:
        return f"max_tokens={sampling.max_tokens} is not allowed; at least 1"
    return ""


def _scoring_problem(request: wire.GenerateRequest, num_tokens: int, vocab_size: int | None) -> str:
    k = request.prompt_top_k
    if vocab_size is None:
        return "a context cannot be scored; this engine does not know its distributions"
    if k > vocab_size:
        return f"prompt_top_k={k} is not allowed; the model's vocabulary has {vocab_size}"
    if (
        size := (num_tokens - 1) * (8 * k + 4 * request.prompt_logprobs)
    ) > wire.MAX_PAYLOAD_BYTES - REPLY_ROOM_BYTES:
        most = wire.MAX_PAYLOAD_BYTES
        return f"{num_tokens} tokens with prompt_top_k={k}: the reply has {size} bytes, at most {most} fit"
    return ""
