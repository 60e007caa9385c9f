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
    """The state between two steps: a copy of each rank's part in its own host memory."""

    def write(self, folder: Path) -> list[PartFile]:
        """Write and sync each rank's part into a folder that exists.

        It may be called from any thread, and again after an error.

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
        exact: the policy's logprobs have the same bits as those of engine hf.

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
        exact: bool = False,
    ) -> None: ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def version(self) -> int:
        """Steps completed, over all incarnations."""

    def follow_rules(self, *, steps: int, seed: int) -> None:
        """Use these from now on: the log's settings of a step come before the configuration's.

        Args:
            steps: at which the schedule of the learning rate ends.
            seed: of the order of minibatches and of dropout.
        """

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        """Return what cuts samples, in the order of the log, into micro-batches."""

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add one micro-batch to the gradient of the current step, not yet normalised.

        Returns:
            Sums over the micro-batch: ``tokens``, ``rows``, ``inputs`` (tokens read) and those of
                the metrics.

        Raises:
            WireError: if a token id is outside the model's vocabulary; nothing is added then.
        """

    def step(self) -> dict[str, float]:
        """Normalise, clip and update; return metrics by their published names."""

    def update(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Run a step, ``num_epochs`` passes of ``num_minibatches`` updates; return metrics."""

    def score(self, samples: Sequence[TrainSample]) -> list[SampleScores]:
        """Return the scores of policy, reference and critic for each sample before the step."""

    def take_problem(self) -> str:
        """Return the weight or gradient by which an update since the last call was skipped.

        Empty if none was, or the tensor is not known.
        """

    def record_tokens(self) -> bool:
        """Record entropy and ratio of each trained token from now on; return whether it can."""

    def take_recorded(self) -> dict[int, TokenFigures]:
        """Return the figures of the samples trained since the last call, by the samples' ids.

        Of each sample the first pass counts.
        """

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference in the current step."""

    def discard(self) -> None:
        """Forget what was added since the last step, as if the current step had not begun."""

    @property
    def hosts_address(self) -> str:
        """Address of this host for ranks on other hosts; empty if all ranks are on this host."""

    @property
    def device(self) -> torch.device:
        """Device of ``weights``."""

    def shapes(self) -> dict[str, Tensor]:
        """Return ``weights`` on the meta device."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live tensors by state-dict name, tied ones once; ``step`` changes them.

        A sharded backend gathers them a bucket at a time as they are read: read them once and in
        order.
        """

    def adapter(self) -> wire.Adapter | None:
        """Describe ``factors`` for an offer; None if the whole model is sent."""

    def factors(self) -> Mapping[str, Tensor]:
        """Return the adapters' live factors by peft's names, whole; empty without adapters."""

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1.

        Weights are those of a server: where ``train.weights_dtype`` is fp8, the rounded ones.

        Returns:
            (n - 1,) float32 on the CPU.
        """

    def plain_logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor | None:
        """Return ``logprobs`` with transformers' own attention; None if there is no other."""

    def snapshot(self) -> Snapshot:
        """Copy what a checkpoint holds and drop the previous copy; training waits only for this."""

    def describe(self, path: str | Path) -> StoredModel:
        """Write configuration and tokenizer into a folder; return what the weights are.

        It may be called from any thread.
        """

    def save(self, path: str | Path) -> None:
        """Write the live policy into a folder that transformers loads."""

    def load_state(self, parts: Sequence[PartFile]) -> None:
        """Restore all but the weights from the files of a snapshot, or of a format 1 checkpoint.

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
        """Move everything back onto the device; later steps are bit for bit as without it."""

    def stripes(self, plan: LayoutPlan) -> RankStripes | None:
        """Return the means for all ranks to send what they hold; None if they cannot."""

    def close(self) -> None:
        """Stop the processes and communicators that it started; no other call may follow."""
