"""What the learner asks of a training backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from broker.contract import wire
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import SampleScores, TrainSample
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds of a backend: contiguous copies in host memory, which training does not change.

    Attributes:
        weights: of the policy, by state-dict name, tied ones once.
        state: all else that the next step depends on: optimizer, schedule, RNG, critic.
    """

    weights: dict[str, Tensor]
    state: dict[str, Tensor]


class Backend(Protocol):
    """A policy, its optimizer and its gradient. Used by one thread at a time.

    A step is any number of ``forward_backward`` calls and one ``step``, or ``discard``; or one ``update``, with ``score`` before it
    where the algorithm needs the models' word on the samples. State may be taken and loaded only between steps.

    Args:
        model_path: folder or hub name of the weights to start from, in Hugging Face format.
        train: learning rate, schedule, clipping, device.
        algorithm: loss, aggregation, KL, entropy.
        model: dtype and whether remote code is trusted.
        seed: of whatever draws random numbers in training.
        ref_path: weights of the reference policy, ``model_path`` by default; loaded only if ``algorithm.kl_coef`` is above 0.
        max_length: the constant of ``seq-mean-token-sum-norm``, in tokens.

    Raises:
        ConfigError: a path that holds no model, a device that does not exist, an unknown loss, an impossible combination.
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
    ) -> None: ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        """Cuts samples, in the order of the log, into micro-batches for ``forward_backward``."""
        ...

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add one micro-batch to the gradient of the step under way, not yet normalised.

        Returns:
            Sums over the micro-batch: ``tokens``, ``rows``, ``inputs`` (tokens read) and the sums that the step's metrics are made of.
        """
        ...

    def step(self) -> dict[str, float]:
        """Normalise over all that was added since the last step, clip, update; the step's metrics by their published names."""
        ...

    def update(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """A whole step at once: ``num_epochs`` passes in ``num_minibatches`` updates each, the critic's among them; its metrics."""
        ...

    def score(self, samples: Sequence[TrainSample]) -> list[SampleScores]:
        """What policy, reference and critic say about samples before the step, one entry each."""
        ...

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference in the step under way."""
        ...

    def discard(self) -> None:
        """Forget what was added since the last step, as if the step under way had not begun."""
        ...

    @property
    def device(self) -> torch.device:
        """Where ``weights`` lie."""
        ...

    def shapes(self) -> dict[str, Tensor]:
        """As ``weights``, on the meta device."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The live tensors by their state-dict names, tied ones once; they change at the next ``step``.

        A sharded backend gathers them as they are asked for, a bucket at a time: go through them once and in order.
        """
        ...

    def adapter(self) -> wire.Adapter | None:
        """What an offer of ``factors`` says of them; None: there are none, or the whole model is sent (``train.lora.send``)."""
        ...

    def factors(self) -> Mapping[str, Tensor]:
        """The adapters' live factors by peft's names, whole; empty without adapters."""
        ...

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """log p(token[i + 1] | token[: i + 1]) at temperature 1, (n - 1,) float32 on the CPU.

        By a server's weights: where ``train.weights_dtype`` is fp8, those that it makes of what it is sent.
        """
        ...

    def snapshot(self) -> Snapshot:
        """Copy what a checkpoint holds; all that training waits for. With several ranks all of them call it, and one gets it whole."""
        ...

    def save(self, path: str | Path, weights: Mapping[str, Tensor]) -> None:
        """Write a snapshot's weights, configuration and tokenizer to a folder that transformers loads; from any thread."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back the ``state`` of a snapshot.

        Raises:
            UserError: it belongs to another model.
        """
        ...

    def close(self) -> None:
        """End what it has started: processes, communicators. Nothing may be called after it."""
        ...
