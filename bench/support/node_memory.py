"""One rank that loads a model and writes its part of a checkpoint, and measures its memory.

Memory is RssAnon of /proc/self/status, sampled every few milliseconds: files that are read count
only as far as this process copies them.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from learner.backends import fsdp2
from learner.backends.context import RunContext
from learner.backends.models.policy import PolicyModel
from learner.backends.ranks.group import RankGroup
from learner.backends.ranks.rendezvous import Meeting
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection
from rlearner_text.transformers_import import import_transformers

EVERY_S: Final = 0.002


def rss_anon() -> int:
    """Return this process's anonymous memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


class MemoryPeak:
    """The growth of anonymous memory within the context."""

    def __enter__(self) -> Self:
        self._first = self._most = rss_anon()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self) -> int:
        """Return the largest growth so far, in bytes."""
        self._most = max(self._most, rss_anon())
        return self._most - self._first

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._most = max(self._most, rss_anon())


def measure(rank: int, size: int, store: str, model: str, folder: Path) -> dict[str, float]:
    """Load, copy and write as a learner's rank does; return bytes and seconds."""
    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=torch.float32
        )
    model_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    del whole
    train = TrainSection(device="cpu", ranks=size, num_threads=1)
    context = RunContext(model, train, AlgorithmSection(), ModelSection(), seed=0)
    loaded: dict[str, float] = {}
    began = time.monotonic()

    with MemoryPeak() as peak:

        def noted(policy: PolicyModel) -> None:
            shard = sum(parameter.to_local().nbytes for parameter in policy.module.parameters())
            loaded.update(load=peak.growth() - shard, shard=shard, load_s=time.monotonic() - began)
            with MemoryPeak() as trial:
                probe(policy)
            loaded.update(trial=trial.growth())

        probe, PolicyModel.probe = PolicyModel.probe, noted  # type: ignore[method-assign, assignment]
        _, build = fsdp2.Fsdp2Backend.plan(context)
        worker = build(context, RankGroup(size, rank, meeting=Meeting.in_file(store, size)))
    with MemoryPeak() as peak:
        began = time.monotonic()
        staged = worker.stage()
        copied = time.monotonic()
        staged.write(folder)
        written = time.monotonic()
        beyond = peak.growth() - staged.nbytes
    worker.part()
    times = {"copy_s": copied - began, "write_s": written - copied}
    return {"model": model_bytes, **loaded, "checkpoint": beyond, "staged": staged.nbytes, **times}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("rank", int),
        ("size", int),
        ("store", str),
        ("model", str),
        ("folder", Path),
    ):
        parser.add_argument(name, type=kind)
    print(json.dumps(measure(**vars(parser.parse_args()))))
    sys.exit(0)
