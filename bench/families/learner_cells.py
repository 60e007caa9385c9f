"""The cells of the learner: rows, adapters, checkpoints, and what they export."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bench.families.engine_cells import load_adapters
from bench.families.reference import DifferenceError
from bench.families.scene import Scene, Trained
from learner.algorithm.samples import TrainSample
from learner.checkpoints import checkpoint
from learner.checkpoints.export import export_model
from learner.config import LoraSection
from rlearner.plan.model_reader import read_folder

GRADIENT = 1e-3  # largest difference in float32, of the largest element
SMALL = 0.01  # of the largest of all: smaller gradients are differences of large terms
SHARD_BYTES = 100_000  # several files


def run_padded(scene: Scene) -> float:
    """Score and train sequences of mixed lengths in padded rows."""
    return _rows(scene, "padded")


def run_packed(scene: Scene) -> float:
    """Score and train sequences of mixed lengths in one row, a shared prompt once."""
    return _rows(scene, "packed")


def _rows(scene: Scene, packing: str) -> float:
    backend = scene.backend(packing=packing)
    worst = 0.0
    for sample, scores in zip(scene.samples, backend.score(scene.samples), strict=True):
        assert scores.logprobs is not None
        expected = torch.from_numpy(sample.rollout_logprobs[sample.positions])
        worst = max(
            worst, scene.plain.compare("training", torch.from_numpy(scores.logprobs), expected)
        )
    if scene.dtype == "float32":
        backend.forward_backward(scene.samples)
        found = {
            name: p.grad
            for name, p in backend.policy.module.named_parameters()
            if p.grad is not None
        }
        _compare_gradients(found, plain_gradients(scene.plain.module, scene.samples))
    return worst


def plain_gradients(module: torch.nn.Module, samples: list[TrainSample]) -> dict[str, Tensor]:
    """Return the gradient of the weighted logprobs, one sequence after the other."""
    module.zero_grad()
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype("int64"))
        logprobs = module(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        chosen = logprobs[:-1].gather(-1, ids[1:, None])[:, 0]
        (-(chosen * torch.from_numpy(sample.advantages[1:])).sum()).backward()
    return {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def _compare_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if odd := sorted(set(expected) - set(found)):
        raise DifferenceError(f"no gradient of {odd[0]}")
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        largest = max(float(gradient.abs().max()), SMALL * scale)
        if not (difference := float((found[name] - gradient).abs().max()) / largest) <= GRADIENT:
            raise DifferenceError(
                f"the gradient of {name} differs by {difference:.1g} of its largest element"
            )


def run_lora(scene: Scene) -> float:
    """Train adapters on the default layers, merge them, resume, and send them to a server."""
    trained = scene.adapted
    _require_change(trained)
    worst = trained.plain.compare(
        "the merged model", trained.logprobs, trained.plain.logprobs(trained.probe)
    )
    _same_names(scene.folder, trained.checkpoint.path)
    _resume(trained)
    return max(worst, load_adapters(scene))


def run_resume(scene: Scene) -> float:
    """Continue from a checkpoint: weights, optimizer and random numbers are the same, bit for bit."""
    _resume(scene.trained)
    return 0.0


def run_export(scene: Scene) -> float:
    """Write a checkpoint's model for transformers: names of the original files, the learner's
    logprobs.
    """
    trained = scene.trained
    out = scene.work / "exported"
    _require_change(trained)
    folder = scene.work / "parts"
    made = checkpoint.read_checkpoint(
        checkpoint.write_checkpoint(folder, trained.backend, {"version": 1}, 1, hf_max_gib=0)
    )
    export_model(made, out, SHARD_BYTES)
    for path in (out, trained.checkpoint.path):
        _same_names(scene.folder, path)
        if not (path / "chat_template.jinja").is_file():
            raise DifferenceError("the export lacks the chat template")
    return trained.plain.compare(
        "the exported model", trained.plain.logprobs(trained.probe), trained.logprobs
    )


def run_plan(scene: Scene) -> float:
    """Trace the model for ``rlearner plan``, with all weights trained and with adapters."""
    facts = read_folder(scene.folder, str(scene.folder), scene.model, None)
    read_folder(scene.folder, str(scene.folder), scene.model, LoraSection())
    own = sum(parameter.numel() for parameter in scene.plain.module.parameters())
    if facts.parameters != own:
        raise DifferenceError(f"the plan counts {facts.parameters} parameters of {own}")
    return 0.0


def _require_change(trained: Trained) -> None:
    if not float((trained.logprobs - trained.first).abs().max()) > trained.scene.plain.limit:
        raise DifferenceError("training changed nothing")


def _resume(trained: Trained) -> None:
    scene = trained.scene
    first = trained.checkpoint
    resumed = scene.backend(first.path, **trained.train)
    checkpoint.load_state(first, resumed)
    if not torch.equal(resumed.logprobs(trained.probe), trained.logprobs):
        raise DifferenceError("the resumed model is another one")
    again = checkpoint.write_checkpoint(
        scene.work / f"{trained.name}-again", resumed, {"version": 1}, 1
    )
    states = [
        {file.name: file.read_bytes() for file in path.glob("learner/part-*")}
        for path in (first.path, again)
    ]
    if states[0] != states[1]:
        raise DifferenceError("a checkpoint of the resumed model has other bytes")


def _same_names(before: Path, after: Path) -> None:
    """Refuse a folder whose tensors have other names, shapes or dtypes, or whose untrained parts
    changed.
    """
    old = stored_tensors(before)
    new = stored_tensors(after)
    if odd := sorted(set(old) ^ set(new)):
        which = "lost" if odd[0] in old else "not in the original"
        raise DifferenceError(f"{len(old)} tensors became {len(new)}; {odd[0]} is {which}")
    for name, tensor in old.items():
        if new[name].shape != tensor.shape:
            raise DifferenceError(f"{name} became {tuple(new[name].shape)}")
        if any(
            part in name for part in ("vision", "visual", "multi_modal_projector")
        ) and not torch.equal(new[name].to(tensor.dtype), tensor):
            raise DifferenceError(f"{name} is not trained, and changed")


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in a folder's safetensors files."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return found
