"""The interface of training backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from broker.contract import wire
from broker.weights.plan import LayoutPlan
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import SampleScores, TrainSample
from learner.algorithm.token_figures import TokenFigures
from learner.backends.parts.part_file import PartFile
from learner.backends.parts.stored_model import StoredModel
from learner.backends.stripes import RankStripes
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection


class Snapshot(Protocol):
    """The state between two steps: each rank's part, copied to its host memory, which training does
    not change.
    """

    def write(self, folder: Path) -> list[PartFile]:
        """Write each rank's part into a folder that exists and sync it; from any thread, again
        after an error.

        Raises:
            OSError: if a rank cannot write.
            UserError: if a rank does not see the folder.
        """

    def drop(self) -> None:
        """Give the memory of the copies back; ``write`` may not follow."""


class Backend(Protocol):
    """A policy, its optimizer and its gradient, used by one thread at a time.

    A step is any number of ``forward_backward`` calls, then ``step`` or ``discard``; or one
    ``update``, after ``score`` if the algorithm needs the models' scores of the samples. State may
    be read and loaded only between steps.

    Args:
        model_path: folder or hub name of the weights to start from, in Hugging Face format.
        train: learning rate, schedule, clipping, device.
        algorithm: loss, aggregation, KL, entropy.
        model: dtype and whether remote code is trusted.
        seed: seed of all random numbers in training.
        ref_path: the reference policy's weights, ``model_path`` by default; loaded if
            ``algorithm.kl_coef`` is above 0.
        max_length: the constant of ``seq-mean-token-sum-norm``, in tokens.
        max_context: tokens of the run's longest sequence, by which some models scale positions;
            None for the model's.

    Raises:
        ConfigError: if the model, the device or the loss does not exist, or settings exclude each
            other.
    """

    def __init__(
        self,
        model_path: str,
        *,
        train: TrainSection,
        algorithm: AlgorithmSection,
        model: ModelSection,
        seed: int,
        ref_path: str | None = None,
        max_length: int | None = None,
        max_context: int | None = None,
    ) -> None: ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def follow_rules(self, *, steps: int, seed: int) -> None:
        """Use these from now on: the log has them for the current step, whatever the configuration
        says.

        Args:
            steps: at which the schedule of the learning rate ends.
            seed: of the order of minibatches and of dropout.
        """

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        """Return a cutter of samples, in the order of the log, into micro-batches for
        ``forward_backward``.
        """

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add one micro-batch to the gradient of the current step, not yet normalised.

        Returns:
            Sums over the micro-batch: ``tokens``, ``rows``, ``inputs`` (tokens read) and those of
                the metrics.

        Raises:
            WireError: if a token id is outside the model's vocabulary; nothing is added then.
        """

    def step(self) -> dict[str, float]:
        """Normalise over everything added since the last step, clip, update; return metrics by
        published names.
        """

    def update(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Run a step, ``num_epochs`` passes of ``num_minibatches`` updates, also of the critic;
        return metrics.
        """

    def score(self, samples: Sequence[TrainSample]) -> list[SampleScores]:
        """Return the scores that policy, reference and critic give each sample before the step, a
        micro-batch of it.
        """

    def take_problem(self) -> str:
        """Return by which weight or gradient an update since the last call was skipped; empty if
        none, or unknown.
        """

    def record_tokens(self) -> bool:
        """Record entropy and importance ratio of each trained token from now on; return False if it
        cannot.
        """

    def take_recorded(self) -> dict[int, TokenFigures]:
        """Return the figures of the samples trained since the last call, by their ids; of each
        sample's first pass.
        """

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference in the current step."""

    def discard(self) -> None:
        """Forget what was added since the last step, as if the current step had not begun."""

    @property
    def hosts_address(self) -> str:
        """Address of this host that the ranks on other hosts have reached; empty if all ranks are
        on this host.
        """

    @property
    def device(self) -> torch.device:
        """Device of ``weights``."""

    def shapes(self) -> dict[str, Tensor]:
        """Return ``weights`` on the meta device."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live tensors by state-dict name, tied ones once; they change at the next
        ``step``.

        A sharded backend gathers them a bucket at a time as they are read: read them once and in
        order.
        """

    def adapter(self) -> wire.Adapter | None:
        """Describe ``factors`` for an offer; None if there are none, or ``train.lora.send`` is the
        whole model.
        """

    def factors(self) -> Mapping[str, Tensor]:
        """Return the adapters' live factors by peft's names, whole; empty without adapters."""

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1, (n - 1,) float32 on the
        CPU.

        Weights are those of a server: where ``train.weights_dtype`` is fp8, the rounded ones.
        """

    def plain_logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor | None:
        """Return ``logprobs`` with attention as transformers defines it, without faster kernels;
        None if it cannot.
        """

    def snapshot(self) -> Snapshot:
        """Copy what a checkpoint holds; training waits only for this. The copy before it is
        dropped.
        """

    def describe(self, path: str | Path) -> StoredModel:
        """Write configuration and tokenizer of the policy into a folder; return what its weights
        are; any thread.
        """

    def save(self, path: str | Path) -> None:
        """Write the live policy into a folder that transformers loads."""

    def load_state(self, parts: Sequence[PartFile]) -> None:
        """Restore all but the weights from the files of a snapshot, or of a checkpoint in the first
        format.

        Raises:
            DamagedFileError: if a file is missing or damaged.
            UserError: if it belongs to another model.
        """

    def offload(self, folder: str | Path) -> None:
        """Move everything off the device, between two steps, so that another process can use it.

        From a GPU it goes to host memory, from the CPU to a file in ``folder``. Only ``reload``,
        ``save`` and ``close`` may follow. Backends without it say so by the attribute ``offloads``,
        which is False.

        Raises:
            OSError: if the folder cannot be written.
        """

    def reload(self) -> None:
        """Move everything back onto the device; the next step is the same as without ``offload``,
        bit for bit.
        """

    def stripes(self, plan: LayoutPlan) -> RankStripes | None:
        """Have every rank send what it holds, instead of this process everything; None if the ranks
        cannot.
        """

    def close(self) -> None:
        """Stop the processes and communicators that it started; no other call may follow."""
