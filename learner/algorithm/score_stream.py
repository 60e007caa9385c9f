"""Scores a step's samples by the models, in micro-batches cut by the order of the log, as its
groups arrive.

The pieces, and so the scores bit for bit, do not depend on when the groups arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import SampleScores, TrainSample

Score = Callable[[Sequence[TrainSample]], list[SampleScores]]
Key = tuple[int, int]  # a ticket, and which of its samples


class ScoreStream:
    """The scores of one step after the other.

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
        self._held: list[Key] = []  # of the samples in the cutter, in its order
        self._scores: dict[Key, SampleScores] = {}
        self._counts = Counter[int]()

    def add(self, samples: Sequence[TrainSample]) -> None:
        """Score the micro-batches that are full with these samples, which follow the earlier ones
        in the log.
        """
        for sample in samples:
            key = sample.group, self._counts[sample.group]
            self._counts[sample.group] += 1
            if not sample.num_inputs:
                (self._scores[key],) = self._score([sample])
                continue
            if (full := self._cutter.add(sample)) is not None:
                self._take(full)
            self._held.append(key)

    def finish(self, samples: Sequence[TrainSample]) -> list[SampleScores]:
        """Return the scores of all samples of the step, in order; those that were not added are
        scored now.
        """
        if not self._counts:
            self.add(samples)
        if rest := self._cutter.flush():
            self._take(rest)
        counts = Counter[int]()
        found = list[SampleScores]()
        for sample in samples:
            found.append(self._scores[sample.group, counts[sample.group]])
            counts[sample.group] += 1
        self.reset()
        return found

    def _take(self, piece: Sequence[TrainSample]) -> None:
        self._scores |= zip(self._held, self._score(piece), strict=True)
        self._held = []
