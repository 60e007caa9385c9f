"""One family's model in one dtype, and what its cells share; computed when first needed."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bench.families.reference import PlainModel, sample_tokens
from learner.algorithm.samples import TrainSample
from learner.backends.torch import TorchBackend
from learner.checkpoints import checkpoint
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine_core import EngineCore

LONGEST = 128  # tokens of a sequence, prompt and answer


class Scene:
    """A model folder, the sequences that are read, and the trained models that several cells look
    at.

    Attributes:
        context: tokens of the longest sequence: 128, or as many as the model has positions.
        lengths: of the prompts, from shorter than any window to longer than any.
        answer: tokens that are generated.
        device: of engine hf; the reference and the learner are on the CPU.
    """

    def __init__(self, folder: Path, dtype: str, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.work = Path(tempfile.mkdtemp(prefix="cells.", dir=folder.parent))
        config = PlainModel(folder, dtype, LONGEST).module.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or LONGEST
        self.context = min(LONGEST, int(positions))
        self.lengths = [max(4, int(self.context * share)) for share in (0.04, 0.37, 0.18, 0.48)]
        self.answer = int(self.context * 0.18)

    @cached_property
    def plain(self) -> PlainModel:
        """The reference."""
        return PlainModel(self.folder, self.dtype, self.context)

    @property
    def model(self) -> ModelSection:
        """The configuration section."""
        return ModelSection(path=str(self.folder), dtype=self.dtype)

    def core(self, **section: Any) -> EngineCore:
        """Start engine hf on the family's folder."""
        sizes = {
            "max_running": 3,
            "max_context_tokens": self.context,
            "prefill_tokens": 24,
            "num_threads": 1,
        }
        rollout = RolloutSection.model_validate({**sizes, **section})
        config = EngineConfig(
            str(self.folder), rollout, dtype=self.dtype, device=self.device, policy_version=0
        )
        return EngineCore(config)

    def backend(self, path: Path | None = None, **train: Any) -> TorchBackend:
        """Return the learner's backend for the family's folder, or a checkpoint of it."""
        sizes = {
            "lr": 2e-2,
            "device": "cpu",
            "micro_batch_tokens": 4 * self.context,
            "num_threads": 1,
        }
        return TorchBackend(
            str(path or self.folder),
            train=TrainSection.model_validate({**sizes, **train}),
            algorithm=AlgorithmSection(),
            model=self.model,
            seed=0,
            ref_path=str(self.folder),
            max_length=self.context,
            max_context=self.context,
        )

    @cached_property
    def samples(self) -> list[TrainSample]:
        """Sequences of mixed lengths for training, two of them with a common prompt, with the
        reference's logprobs.
        """
        texts = [
            sample_tokens(length + self.answer, seed) for seed, length in enumerate(self.lengths)
        ]
        prompt = texts[1][: self.lengths[1]]
        texts += [
            prompt + sample_tokens(length, 20 + length)
            for length in (self.answer, self.answer // 2)
        ]
        return [self._sample(ids, number) for number, ids in enumerate(texts)]

    def _sample(self, ids: list[int], number: int) -> TrainSample:
        rng = np.random.default_rng(number)
        n = len(ids)
        mask = (np.arange(n) >= 2).astype(np.uint8)
        logprobs = np.concatenate([[0.0], self.plain.logprobs(ids).numpy()]).astype(np.float32)
        return TrainSample(
            token_ids=np.array(ids, np.int32),
            loss_mask=mask,
            rollout_logprobs=logprobs * mask,
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=(rng.normal(size=n) * mask).astype(np.float32),
            group=number,
            reward=0.0,
        )

    @cached_property
    def trained(self) -> Trained:
        """The learner after one step with all weights trained."""
        return Trained(self, "whole")

    @cached_property
    def adapted(self) -> Trained:
        """The learner after one step with adapters."""
        return Trained(self, "adapters", lora={})


class Trained:
    """A learner after a step, its checkpoint, and the checkpoint's model as transformers loads it."""

    def __init__(self, scene: Scene, name: str, **train: Any) -> None:
        self.scene = scene
        self.name = name
        self.train = train
        self.backend = scene.backend(**train)
        self.first = self.backend.logprobs(self.probe).clone()
        self.backend.update(scene.samples)

    @property
    def probe(self) -> list[int]:
        """Tokens as long as the longest sequence."""
        return sample_tokens(self.scene.context, seed=77)

    @cached_property
    def logprobs(self) -> torch.Tensor:
        """The learner's own, of the probe."""
        return self.backend.logprobs(self.probe)

    @cached_property
    def checkpoint(self) -> checkpoint.Checkpoint:
        """Its checkpoint on disk, with the model in the format of transformers."""
        return checkpoint.read_checkpoint(
            checkpoint.write_checkpoint(
                self.scene.work / self.name, self.backend, {"version": 1}, 1
            )
        )

    @cached_property
    def plain(self) -> PlainModel:
        """The checkpoint's model."""
        return PlainModel(self.checkpoint.path, self.scene.dtype, self.scene.context)
