"""The cells of engine hf: generation with reused and copied prefixes, and new weights while
requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from bench.families.reference import DifferenceError, PlainModel, sample_tokens
from bench.families.scene import Scene, Trained
from broker.contract import wire
from broker.errors import TransferFailed
from broker.weights.adapter import AdapterBase
from broker.weights.memory.staging import plan_of
from learner.weights.probing import WeightProbe
from rollout.engines.base import GenerationOutput
from rollout.engines.hf.engine_core import EngineCore

BUCKET_MIB = 32.0  # as train.weights_bucket_mib


def run_engine(scene: Scene) -> float:
    """Generate next to neighbours of other lengths, from copied prompts and kept prefixes; return
    the difference.
    """
    core = scene.core()
    try:
        prompts = {str(n): sample_tokens(length, n) for n, length in enumerate(scene.lengths)}
        prompts |= {name: prompts["3"] for name in ("copy-a", "copy-b")}
        for number, (name, prompt) in enumerate(prompts.items()):
            core.submit(request(name, prompt, scene.answer, seed=number), 0.0)
        outputs = drain(core)
        worst = max(compare(scene.plain, name, prompts[name], outputs[name]) for name in prompts)
        copied = outputs["copy-a"].prefix_hit_tokens + outputs["copy-b"].prefix_hit_tokens
        longer = [*prompts["3"], *outputs["3"].token_ids, *sample_tokens(5, 50)]
        core.submit(request("more", longer, scene.answer // 2, conversation="3"), 0.0)
        core.submit(request("beside", prompts["0"], scene.answer, seed=9), 0.0)
        outputs = drain(core)
        worst = max(worst, compare(scene.plain, "a longer conversation", longer, outputs["more"]))
        if not copied or not outputs["more"].prefix_hit_tokens:
            raise DifferenceError("no prefix is reused")
        return max(worst, compare(scene.plain, "its neighbour", prompts["0"], outputs["beside"]))
    finally:
        core.model.close()


def run_weights(scene: Scene) -> float:
    """Load the learner's weights into a running server, whole; return the difference."""
    trained = scene.trained
    return _update(scene, trained, lambda core: _whole(core, trained))


def load_adapters(scene: Scene) -> float:
    """Load the learner's adapters into a running server; return the difference."""
    trained = scene.adapted
    return _update(scene, trained, lambda core: _adapters(core, trained))


def _update(
    scene: Scene, trained: Trained, find: Callable[[EngineCore], Mapping[str, torch.Tensor]]
) -> float:
    core = scene.core()
    try:
        prompt = sample_tokens(scene.lengths[3], 3)
        kept = sample_tokens(scene.lengths[2], 2)
        core.submit(request("running", prompt, scene.answer), 0.0)
        core.submit(request("finished", kept, 4), 0.0)
        while core.stats().generated_tokens < 8:
            core.admit(0.0)
            core.step()
        core.update(find(core), 1, "recompute", WeightProbe(trained.backend, scene.dtype).make())
        core.submit(
            request("later", [*kept, *sample_tokens(6, 8)], scene.answer, conversation="finished"),
            0.0,
        )
        outputs = drain(core)
        (_, old), (version, _) = outputs["running"].version_runs
        if version != 1:
            raise DifferenceError(f"the running request continued with version {version}")
        tokens = [*prompt, *outputs["running"].token_ids]
        expected = trained.plain.logprobs(tokens, len(prompt) + old)
        found = torch.tensor(outputs["running"].logprobs[old:])
        worst = trained.plain.compare("a running request", found, expected)
        later = [*kept, *sample_tokens(6, 8)]
        return max(worst, compare(trained.plain, "a later request", later, outputs["later"]))
    finally:
        core.model.close()


def _whole(core: EngineCore, trained: Trained) -> Mapping[str, torch.Tensor]:
    sent = plan_of(trained.backend.shapes(), BUCKET_MIB)
    held = plan_of(core.model.weights(), BUCKET_MIB)
    if sent.text != held.text:
        names = [{slot.spec.name for slot in plan.slots} for plan in (sent, held)]
        odd = sorted(names[0] ^ names[1])
        raise TransferFailed(
            f"the learner's weights are not the server's: {odd[0] if odd else 'shapes or dtypes'}"
        )
    return {name: tensor.clone() for name, tensor in trained.backend.weights().items()}


def _adapters(core: EngineCore, trained: Trained) -> Mapping[str, torch.Tensor]:
    adapter = trained.backend.adapter()
    held = core.model.weights()
    assert adapter is not None, "train.lora.send is adapter"
    base = AdapterBase(plan_of(held, BUCKET_MIB), BUCKET_MIB, held, lambda: (held, False))
    if problem := base.lay(adapter):
        raise TransferFailed(problem)
    factors = trained.backend.factors()
    wanted = {slot.spec.name for slot in base.plan(adapter).slots}
    sent = set(factors)
    if wanted != sent:
        raise TransferFailed(
            f"{min(wanted ^ sent)} is in the {'plan' if wanted - sent else 'offer'} alone"
        )
    return dict(base.merged(factors))


def compare(plain: PlainModel, name: str, prompt: list[int], output: GenerationOutput) -> float:
    """Compare an answer's logprobs with the reference's."""
    if output.error:
        raise DifferenceError(f"request {name}: {output.error}")
    expected = plain.logprobs([*prompt, *output.token_ids], len(prompt))
    return plain.compare(
        f"request {name} of {len(prompt)} tokens", torch.tensor(np.array(output.logprobs)), expected
    )


def request(
    name: str, prompt: list[int], tokens: int, *, conversation: str = "", seed: int = 0
) -> wire.GenerateRequest:
    """Return a request of exactly so many tokens."""
    sampling = wire.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)
    ids = wire.column(prompt, "<i4")
    return wire.GenerateRequest(
        request_id=name, conversation_id=conversation or name, token_ids=ids, sampling=sampling
    )


def drain(core: EngineCore) -> dict[str, GenerationOutput]:
    """Run until all requests are answered."""
    while core.scheduler.num_running or core.scheduler.num_waiting:
        core.admit(0.0)
        core.step()
    outputs = dict(core.outbox)
    core.outbox = []
    return outputs
