"""Scores a step's samples by the models as its groups arrive, in micro-batches of the log's order.

The micro-batches, and so the scores bit for bit, do not depend on when the groups arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import SampleScores, TrainSample

Score = Callable[[Sequence[TrainSample]], list[SampleScores]]
# A ticket, and the index of its sample.
Key = tuple[int, int]


class ScoreStream:
    """Scores of one step after the other.

    Args:
        cutter: of this stream alone.
        score: scores one micro-batch.
    """

    def __init__(self, cutter: MicroBatchCutter[TrainSample], score: Score) -> None:
        self._cutter = cutter
        self._score = score
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._cutter.flush()
        self._waiting_keys: list[Key] = []  # of the samples in the cutter, in its order
        self._scores: dict[Key, SampleScores] = {}
        self._counts = Counter[int]()

    def add(self, samples: Sequence[TrainSample]) -> None:
        """Add samples in log order, and score the micro-batches that they fill."""
        for sample in samples:
            key = sample.group, self._counts[sample.group]
            self._counts[sample.group] += 1
            if not sample.num_inputs:
                (self._scores[key],) = self._score([sample])
                continue
            if (full := self._cutter.add(sample)) is not None:
                self._store_scores(full)
            self._waiting_keys.append(key)

    def finish(self, samples: Sequence[TrainSample]) -> list[SampleScores]:
        """Return the scores of all samples of the step, in order; score the remaining ones now."""
        if not self._counts:
            self.add(samples)
        if last_batch := self._cutter.flush():
            self._store_scores(last_batch)
        counts = Counter[int]()
        scores = list[SampleScores]()
        for sample in samples:
            scores.append(self._scores[sample.group, counts[sample.group]])
            counts[sample.group] += 1
        self.reset()
        return scores

    def _store_scores(self, micro_batch: Sequence[TrainSample]) -> None:
        self._scores |= zip(self._waiting_keys, self._score(micro_batch), strict=True)
        self._waiting_keys = []
