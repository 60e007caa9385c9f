"""The step loop of the Hugging Face engine, without threads: admit, forward, sample, finish,
update.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from broker.contract import wire
from broker.errors import OfferRefused, UserError
from broker.weights.finite import first_non_finite
from broker.weights.probe import check_probe
from rlearner_text.guided_decoding import GuideCompiler, GuideError
from rlearner_text.openai.token_events import TokenEvent
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.base import (
    NO_VERSION,
    EngineConfig,
    EngineStats,
    GenerationOutput,
    UpdateMode,
    request_problem,
)
from rollout.engines.hf.forward_pass import Segment
from rollout.engines.hf.logit_offsets import MOVED, LogitOffsets, is_reshaped
from rollout.engines.hf.logit_offsets import offsets_problem as reshaping_problem
from rollout.engines.hf.model import SlotModel, end_tokens
from rollout.engines.hf.request_row import RequestRow, request_end_tokens
from rollout.engines.hf.sampling import (
    SamplingBatch,
    likeliest,
    probability_moved,
    sample,
    uniforms,
)
from rollout.engines.hf.shared_prefixes import SharedPrefixes
from rollout.engines.stop_strings import StopStrings
from rollout.job_queue import GenerationJob
from rollout.scheduler import Scheduler

MAX_FAILURES: Final = 3  # consecutive failed passes before the engine gives up
# replayed passes that new requests wait for at most, since a pass that reads takes as long as
# several of them
MAX_POSTPONED: Final = 8


class EngineCore:
    """Continuous batching over one model. All methods run on one thread; finished outputs collect
    in ``outbox``.
    """

    def __init__(self, config: EngineConfig) -> None:
        section = config.section
        self._tokenizer = find_tokenizer(config)
        self.model = SlotModel(config, self._tokenizer)
        self.scheduler = Scheduler(
            num_slots=self.model.num_slots,
            max_running=self.model.max_running,
            prefix_cache=section.prefix_cache,
            version=config.policy_version,
            preempt_after_s=section.preempt_after_s,
            whole_prefixes=self.model.has_states,
        )
        self.outbox: list[tuple[str, GenerationOutput]] = []
        # of requests with a tap, until the engine takes them
        self.told: list[tuple[str, TokenEvent]] = []
        # requests that stream, with the number of likeliest tokens at each position
        self._taps: dict[str, int] = {}
        self._prefill_tokens = section.prefill_tokens
        self._guides = (
            GuideCompiler(self._tokenizer, self.model.vocab_size)
            if self._tokenizer is not None
            else None
        )
        self._reshapings: dict[str, LogitOffsets] = {}  # of queued requests
        eos = self._tokenizer.eos_token_ids if self._tokenizer else ()
        self._end_ids = end_tokens(self.model.model) | frozenset(eos)
        self._requests: dict[str, wire.GenerateRequest] = {}
        self._rows: dict[int, RequestRow] = {}  # by slot
        # rows in prefill (more than one token to run), oldest first
        self._reading: list[RequestRow] = []
        self._postponed = 0  # passes that have not read, although rows wait
        self._prefixes = (
            SharedPrefixes(whole_prompts=self.model.has_states) if section.prefix_cache else None
        )
        self._stalled = False  # whether the current weights failed their probe
        self.asleep = False  # the weights are off the device
        self._failures = 0
        self._weights_problem: str | None = None  # None: the current weights were not searched
        self._batch: tuple[list[RequestRow], SamplingBatch, npt.NDArray[np.uint64]]
        self._batch = [], SamplingBatch.of([]), np.empty(0, np.uint64)
        self._busy_s = self._pause_s = 0.0
        self._generated = self._prefilled = self._hits = 0
        self._finished: Counter[str] = Counter()

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def can_step(self) -> bool:
        """Whether there is work to compute."""
        return bool(self._rows) and not self._stalled and not self.asleep

    def submit(
        self,
        request: wire.GenerateRequest,
        now: float,
        top_logprobs: int | None = None,
        reshaping: LogitOffsets | str | None = None,
    ) -> None:
        """Queue a request; answer it at once if it cannot run.

        Args:
            top_logprobs: stream its tokens, each with this many of the likeliest; None: do not
                stream.
            reshaping: see ``reshape``.
        """
        reason = request_problem(
            request, max_context_tokens=self.model.max_context, vocab_size=self.model.vocab_size
        )
        if not reason and request.sampling.stop and self._tokenizer is None:
            reason = "stop strings need a tokenizer, and the model's folder has none"
        if not reason and self.scheduler.job(request.request_id) is not None:
            reason = f"request_id {request.request_id!r} is already running or waiting"
        if reason or isinstance(reshaping, str):
            self._answer(request.request_id, GenerationOutput(error=reason or str(reshaping)))
            return
        if reshaping is not None:
            self._reshapings[request.request_id] = reshaping
        self._requests[request.request_id] = request
        if top_logprobs is not None:
            self._taps[request.request_id] = min(top_logprobs, self.model.vocab_size)
        self.scheduler.submit(GenerationJob.of(request, now))

    def reshape(self, sampling: wire.SamplingParams) -> LogitOffsets | str | None:
        """Return a request's logit offsets, None without any, or an error; thread-safe, as a
        grammar takes a second.
        """
        if not is_reshaped(sampling):
            return None
        if reason := reshaping_problem(sampling, self.model.vocab_size, self._tokenizer):
            return reason
        try:
            ends = request_end_tokens(sampling, self._end_ids)
            return LogitOffsets(sampling, self.model.vocab_size, ends, self._guides)
        except GuideError as error:
            return f"guide: {error}"

    def score(self, request: wire.GenerateRequest) -> GenerationOutput:
        """Score a context, without a slot."""
        reason = request_problem(
            request, max_context_tokens=self.model.max_context, vocab_size=self.model.vocab_size
        )
        if reason or self.version < max(request.min_version, 0):
            return GenerationOutput(
                error=reason
                or f"no weights of version {request.min_version} or later to score with"
            )
        scores = self.model.score_context(request.token_ids.array().tolist(), request.prompt_top_k)
        if not scores.is_finite:
            return GenerationOutput(error=self._not_finite())
        return scores.output_for(request)

    def abort(self, request_id: str) -> None:
        job = self.scheduler.abort(request_id)
        if job is not None:
            self._end(job, "abort")

    def admit(self, now: float) -> None:
        """End jobs past their deadline and start waiting ones."""
        for job in self.scheduler.expire(now):
            self._end(job, "deadline")
        if self._stalled or self.asleep:
            return
        self._start(now)
        while (
            yielding := self.scheduler.preempt(now, lambda job: len(self._rows[job.slot].logprobs))
        ) is not None:
            self._end(yielding, "abort")
            self._start(now)

    def _start(self, now: float) -> None:
        """Start waiting jobs in the free slots."""
        for start in self.scheduler.admit(now):
            params = self._requests[start.job.request_id].sampling
            stops = (
                StopStrings(self._tokenizer, params.stop)
                if params.stop and self._tokenizer
                else None
            )
            room = self.model.max_context - len(start.job.tokens)
            reshaping = self._reshapings.pop(start.job.request_id, None)
            row = RequestRow(
                start.job,
                params,
                start.reused,
                version=self.version,
                room=room,
                end_ids=self._end_ids,
                stops=stops,
                reshaping=reshaping,
            )
            self._rows[start.slot] = row
            if self._prefixes is not None:
                self._prefixes.add(row)
            self._hits += row.reused
            if row.length - row.cached > 1:
                self._reading.append(row)

    def _copy_prefixes(self) -> None:
        """Give waiting rows the KV of their source that has been computed by now; at least the last
        token is left, which makes logits.
        """
        if self._prefixes is None:
            return
        copies = defaultdict[int, list[RequestRow]](list)
        for row in self._reading:
            if row.source is None:
                continue
            if not self._prefixes.is_usable(row.source, row.num_shared):
                row.source = None  # ended early: computed here
            elif row.source.cached >= row.num_shared:
                copies[row.num_shared].append(row)
        for length, rows in copies.items():
            sources = [row.source.slot for row in rows if row.source is not None]
            self.model.copy_prefixes(sources, [row.slot for row in rows], length)
            for row in rows:
                self._hits += length - row.reused
                row.cached = row.reused = length
                row.source = None
        self._reading = [row for row in self._reading if row.length - row.cached > 1]

    def step(self) -> None:
        """Run one forward pass and sample one token for every row whose context is complete.

        Raises:
            RuntimeError: if passes keep failing (out of memory, device lost); one failure only ends
                its requests.
        """
        began = time.perf_counter()
        rows, segments = self._plan()
        try:
            self._sample(rows, segments, self._forward(rows, segments))
            self._failures = 0
        except RuntimeError as error:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            for row in rows:
                if row.job.slot in self._rows:
                    self.model.wipe(row.job.slot)
                    self._end(
                        row.job,
                        "error",
                        f"the forward pass failed: {str(error).splitlines()[0]}",
                        keep=False,
                    )
        self._busy_s += time.perf_counter() - began

    def update(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
    ) -> float:
        """See ``Engine.update_weights``."""
        began = time.perf_counter()
        self.model.load_weights(tensors)
        if mode == "abort":
            for row in list(self._rows.values()):
                self._end(row.job, "abort", keep=False)
        self._weights_problem = None
        if probe is not None:
            logprobs = self.model.logprobs(probe.token_ids.array().tolist()).numpy()
            try:
                check_probe(probe, logprobs)
            except OfferRefused as error:
                self._stalled = True
                self.scheduler.update(NO_VERSION)
                if not np.isfinite(logprobs).all():
                    raise OfferRefused(f"{error}; {self._not_finite()}") from None
                raise
        self._set_version(version, weights_changed=True)
        if mode == "recompute":
            self._reread()
        self._pause_s += time.perf_counter() - began
        return time.perf_counter() - began

    def _not_finite(self) -> str:
        """Describe why logits are not finite; the weights are searched once per version."""
        if self._weights_problem is None:
            self._weights_problem = first_non_finite(self.model.weights())
        problem = self._weights_problem
        cause = f": the weight {problem}" if problem else ", although all weights are finite"
        return f"the model's logits are not finite{cause}"

    def adopt(self, version: int) -> None:
        """See ``Engine.adopt``."""
        self._set_version(version, weights_changed=False)

    def sleep(self) -> None:
        """See ``SleepingEngine.sleep``; jobs past their deadline still end."""
        self.scheduler.drop_prefixes()
        self._reread()
        self.model.offload()
        self.asleep = True

    def wake(self) -> None:
        """See ``SleepingEngine.wake``."""
        self.model.reload()
        self.asleep = False

    def stats(self) -> EngineStats:
        """Return counters, each consistent on its own; thread-safe."""
        return EngineStats(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            slots=self.model.max_running,
            busy_s=self._busy_s,
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            prefix_hit_tokens=self._hits,
            finished=dict(self._finished),
            pause_s=self._pause_s,
        )

    def _set_version(self, version: int, *, weights_changed: bool) -> None:
        self._stalled = False
        changed = version != self.version
        if weights_changed:
            self._forget_prefixes()
        for job in self.scheduler.update(version, weights_changed=weights_changed):
            self._end(job, "abort", keep=False)
        if changed:
            for row in self._rows.values():
                row.new_version(version)

    def _forget_prefixes(self) -> None:
        """Let no row use the KV of another from now on: it is, or will be, of other weights."""
        if self._prefixes is not None:
            self._prefixes.clear()
        for row in self._reading:
            row.source = None

    def _reread(self) -> None:
        self._forget_prefixes()
        for row in self._rows.values():
            row.cached = 0
            self.scheduler.refreshed(row.job.slot)
        self._reading = [row for row in self._rows.values() if row.length > 1]

    def _plan(self) -> tuple[list[RequestRow], list[Segment]]:
        """Return the rows of this pass by slot, and the tokens of each; prefill is bounded,
        decoding is not.
        """
        self._copy_prefixes()
        if not self._reading:
            rows = [self._rows[slot] for slot in sorted(self._rows)]
            return rows, [Segment(row.job.slot, row.cached, 1) for row in rows]
        if self._postpones_reading():
            self._postponed += 1
            reading = {row.job.slot for row in self._reading}
            rows = [self._rows[slot] for slot in sorted(self._rows) if slot not in reading]
            return rows, [Segment(row.job.slot, row.cached, 1) for row in rows]
        self._postponed = 0
        share: dict[int, int] = {}
        num_left = self._prefill_tokens
        for row in self._reading:
            unread = row.length - row.cached
            if self.model.has_states and self._prefixes is not None and unread > 1:
                unread -= 1  # others copy its states at this point
            share[row.job.slot] = min(unread, num_left) if row.source is None else 0
            num_left -= share[row.job.slot]
        rows = [self._rows[slot] for slot in sorted(self._rows) if share.get(slot, 1)]
        return rows, [Segment(row.job.slot, row.cached, share.get(row.job.slot, 1)) for row in rows]

    def _postpones_reading(self) -> bool:
        """Return whether this pass only decodes, from a CUDA graph, while rows wait to be read."""
        decoder = self.model.decoder
        if decoder is None or not decoder.has_replayed or self._postponed >= MAX_POSTPONED:
            return False
        unread = sum(row.length - row.cached for row in self._reading if row.source is None)
        return unread < self._prefill_tokens and len(self._reading) < len(self._rows)

    def _forward(self, rows: list[RequestRow], segments: list[Segment]) -> Tensor:
        """Return the logits of the rows that this pass completes."""
        parts = [
            row.tokens[row.cached : row.cached + s.new]
            for row, s in zip(rows, segments, strict=True)
        ]
        ids = np.concatenate(parts)
        if all(row.length - row.cached == 1 for row in rows):
            return self.model.decode(segments, ids.astype(np.int64))
        ends = np.cumsum([s.new for s in segments]) - 1
        complete = np.array(
            [row.cached + s.new == row.length for row, s in zip(rows, segments, strict=True)]
        )
        self._prefilled += len(ids)
        device = self.model.device
        last_positions = torch.from_numpy(ends[complete]).to(device)
        return self.model.forward(
            segments, torch.from_numpy(ids.astype(np.int64)).to(device), last_positions
        )

    def _sample(self, rows: list[RequestRow], segments: list[Segment], logits: Tensor) -> None:
        for row, segment in zip(rows, segments, strict=True):
            row.cached += segment.new
        if self._reading:
            self._reading = [row for row in self._reading if row.length - row.cached > 0]
            rows = [row for row in rows if row.cached == row.length]
        if not rows:
            return
        if any(row.reshaping is not None for row in rows):
            rows, logits, flags = self._reshaped(rows, logits)
            if not rows:
                return
        else:
            flags = {}
        tokens, logprobs = self._draw(rows, logits)
        self._generated += len(rows)
        if self._taps:
            self._tell(rows, tokens, logprobs, logits)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                self.model.wipe(row.job.slot)
                self._end(row.job, "error", self._not_finite(), keep=False)
                continue
            if row.reshaping is not None:
                row.reshaping.take(token, flags[row.job.request_id])
            reason = row.add(token, logprob)
            if reason is not None:
                self._end(row.job, reason)

    @torch.inference_mode()
    def _reshaped(
        self, rows: list[RequestRow], logits: Tensor
    ) -> tuple[list[RequestRow], Tensor, dict[str, bool]]:
        """Return the rows that continue, their logits, and for each request whether its
        distribution was changed.
        """
        offsets: dict[int, npt.NDArray[np.float32]] = {}
        broken: set[int] = set()
        for index, row in enumerate(rows):
            if row.reshaping is not None:
                try:
                    offsets[index] = row.reshaping.offsets()
                except GuideError as error:
                    broken.add(index)
                    self._end(row.job, "error", f"guide: {error}")
        at = list(offsets)
        shaped = logits.float()
        if at:
            own = shaped[at]
            changed = own + torch.from_numpy(np.stack([offsets[index] for index in at])).to(
                own.device
            )
            shaped = shaped.index_copy(0, torch.tensor(at, device=own.device), changed)
            distances = probability_moved(
                own, changed, [rows[index].params for index in at]
            ).tolist()
        else:
            distances = []
        flags = {
            rows[index].job.request_id: distance > MOVED
            for index, distance in zip(at, distances, strict=True)
        }
        sound_rows = [index for index in range(len(rows)) if index not in broken]
        return (
            [rows[index] for index in sound_rows],
            shaped[sound_rows] if broken else shaped,
            flags,
        )

    @torch.inference_mode()
    def _tell(
        self, rows: list[RequestRow], tokens: list[int], logprobs: list[float], logits: Tensor
    ) -> None:
        """Collect the sampled tokens of requests that stream."""
        streamed = [index for index, row in enumerate(rows) if row.job.request_id in self._taps]
        tapped = [index for index in streamed if math.isfinite(logprobs[index])]
        wanting = [index for index in tapped if self._taps[rows[index].job.request_id]]
        top: dict[int, list[tuple[int, float]]] = {}
        if wanting:
            most = max(self._taps[rows[index].job.request_id] for index in wanting)
            top_tokens = likeliest(logits[wanting], [rows[index].params for index in wanting], most)
            ids, values = (part.tolist() for part in top_tokens)
            for index, row_ids, row_values in zip(wanting, ids, values, strict=True):
                pairs = zip(row_ids, row_values, strict=True)
                finite = [pair for pair in pairs if math.isfinite(pair[1])]
                top[index] = finite[: self._taps[rows[index].job.request_id]]
        for index in tapped:
            piece = TokenEvent(
                [tokens[index]],
                [logprobs[index]],
                self.version,
                [top[index]] if index in top else (),
            )
            self.told.append((rows[index].job.request_id, piece))

    @torch.inference_mode()
    def _draw(self, rows: list[RequestRow], logits: Tensor) -> tuple[list[int], list[float]]:
        if rows != self._batch[0]:
            seeds = np.array([row.seed for row in rows], dtype=np.uint64)
            self._batch = (
                rows,
                SamplingBatch.of([row.params for row in rows], self.model.device),
                seeds,
            )
        _, batch, seeds = self._batch
        positions = np.array([row.length for row in rows], dtype=np.int64)
        tokens, logprobs = sample(
            logits, batch, torch.from_numpy(uniforms(seeds, positions)).to(self.model.device)
        )
        return tokens.tolist(), logprobs.tolist()

    def _end(
        self, job: GenerationJob, reason: wire.FinishReason, error: str = "", *, keep: bool = True
    ) -> None:
        """Answer a job that left the queue or finished its row."""
        row = self._rows.pop(job.slot, None) if job.slot >= 0 else None
        if row is None:
            self._answer(job.request_id, GenerationOutput(finish_reason=reason, error=error))
            return
        if row in self._reading:
            self._reading.remove(row)
        if self._prefixes is not None and not keep:
            self._prefixes.forget(row.slot)
        self.scheduler.finish(job.slot, row.kept() if keep else None)
        self._answer(job.request_id, row.output(reason, error))

    def _answer(self, request_id: str, output: GenerationOutput) -> None:
        self._requests.pop(request_id, None)
        self._reshapings.pop(request_id, None)
        self._taps.pop(request_id, None)
        self._finished[output.finish_reason] += 1
        self.outbox.append((request_id, output))


def find_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Return the model's tokenizer; a model without one generates, but without stop strings."""
    try:
        return Tokenizer.load(config.model_path, trust_remote_code=config.trust_remote_code)
    except UserError:
        return None
