"""The child process of ``family_trial``: runs engine hf and the learner on a small model."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from broker.contract import wire
from broker.errors import ConfigError, UserError
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection
from rlearner_text.transformers_import import import_transformers
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine_core import EngineCore

VOCABULARY: Final = 256
WINDOW: Final = 16
CONTEXT: Final = 96
# Lengths in tokens, shorter and longer than any window.
PROMPTS: Final = (5, 60, 24)
# Largest difference of logprobs, which sum in another order.
EXACT: Final = 1e-3
# Divisors of the widths, tried until transformers can build the model.
DIVISORS: Final = (8, 4, 2, 1)
_WIDTHS: Final = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "n_embd", "n_head", "n_inner", "ffn_dim",
)  # fmt: skip
_WINDOWS: Final = (
    "sliding_window",
    "attention_chunk_size",
    "attention_window_size",
    "sliding_window_size",
)
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HEADS: Final = ("num_attention_heads", "n_head")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers")


def main() -> None:
    """Print one JSON object: by role why it cannot run the copy, empty if it can."""
    order = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    # The machine may run other processes of the user; a small model needs no more.
    torch.set_num_threads(2)
    try:
        folder = build_small(
            Path(order["folder"]), Path(order["work"]), trust=order["trust_remote_code"]
        )
    except Exception as error:  # noqa: BLE001 - an unknown configuration may raise anything
        print(json.dumps({"problem": _one_line(error)}))
        return
    plain = load_plain(folder, trust=order["trust_remote_code"])
    runs: dict[str, Callable[..., None]] = {"learner": try_learner, "engine": try_engine}
    problems = {
        role: _find_problem(runs[role], folder, plain, order["trust_remote_code"])
        for role in order["roles"]
    }
    print(json.dumps(problems))


def _find_problem(run: Callable[..., None], folder: Path, plain: Any, trust: bool) -> str:
    try:
        run(folder, plain, trust=trust)
    except Exception as error:  # noqa: BLE001 - it is the answer
        # The key and value are those of the small copy, which says nothing to the user.
        return error.allowed if isinstance(error, ConfigError) else _one_line(error)
    return ""


def build_small(folder: Path, work: Path, *, trust: bool) -> Path:
    """Write a copy with few small layers and random weights; return its folder.

    Raises:
        ValueError, TypeError, RuntimeError, …: what transformers raises for the last, least
        shrunken attempt.
    """
    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    for divisor in DIVISORS:
        try:
            config = shrink_config(
                AutoConfig.from_pretrained(folder, trust_remote_code=trust), divisor
            )
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=trust
            ).eval()
            with torch.no_grad():
                model(input_ids=torch.arange(CONTEXT)[None] % VOCABULARY, use_cache=False)
        except Exception:
            if divisor == DIVISORS[-1]:
                raise
            continue
        break
    model.save_pretrained(work / "small")
    return work / "small"


def shrink_config(config: Any, divisor: int) -> Any:
    """Make a configuration small, in place: narrow, short, few experts, but every kind of layer."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        heads = next(
            (getattr(part, name) for name in _HEADS if isinstance(getattr(part, name, None), int)),
            divisor,
        )
        # The size of a head must stay: rotary factors are listed by it.
        common = math.gcd(divisor, heads)
        number = next(
            (getattr(part, name) for name in _LAYERS if isinstance(getattr(part, name, None), int)),
            0,
        )
        kinds = getattr(part, "layer_types", None) or getattr(part, "layers_block_type", None) or []
        few = _enough_layers(kinds) if kinds else min(number, 4)
        for name, value in list(vars(part).items()):
            if name in _LAYERS and isinstance(value, int):
                setattr(part, name, few)
            elif isinstance(value, list) and len(value) == number and number > few:
                setattr(part, name, value[:few])
            elif name in _WIDTHS and isinstance(value, int):
                setattr(part, name, max(1, value // common))
            elif name in _WINDOWS and isinstance(value, int):
                setattr(part, name, WINDOW)
            elif name in _EXPERTS and isinstance(value, int):
                setattr(part, name, max(4, min(value, 8)))
            elif name.endswith("_token_id"):
                setattr(
                    part, name, None if value is None else min(_first_id(value), VOCABULARY - 1)
                )
        part.vocab_size = VOCABULARY
    return config


def _first_id(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)


def _enough_layers(kinds: Sequence[str]) -> int:
    """Return the length of the shortest beginning with every kind of layer."""
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def load_plain(folder: Path, *, trust: bool) -> Any:
    """Return the copy as transformers runs it, with attention by its definition."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=trust, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def plain_logprobs(plain: Any, token_ids: Sequence[int]) -> Tensor:
    """Return log p(token[i + 1] | token[: i + 1]), (n - 1,)."""
    ids = torch.tensor(list(token_ids))
    logits: Tensor = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def make_prompts() -> Iterator[list[int]]:
    """Yield prompts of all lengths."""
    for seed, length in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        yield torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def try_learner(folder: Path, plain: Any, *, trust: bool) -> None:
    """Score sequences in the learner's rows, and take one step.

    Raises:
        UserError: if it cannot.
    """
    from learner.backends.models.batch import collate_samples

    train = TrainSection(lr=1e-3, device="cpu")
    model = ModelSection(path=str(folder), trust_remote_code=trust)
    backend = TorchBackend(
        str(folder),
        train=train,
        algorithm=AlgorithmSection(),
        model=model,
        seed=0,
        max_length=CONTEXT,
    )
    samples = [_make_sample(ids, number) for number, ids in enumerate(make_prompts())]
    with torch.no_grad():
        logprobs, _ = backend.policy.score(
            collate_samples(samples, backend.device, packed=backend.worker.passes.packs)
        )
    expected = torch.cat([plain_logprobs(plain, ids) for ids in make_prompts()])
    _compare_logprobs(logprobs, expected)
    backend.update(samples)


def _make_sample(ids: list[int], number: int) -> Any:
    import numpy as np

    from learner.algorithm.samples import TrainSample

    mask = (np.arange(len(ids)) > 0).astype(np.uint8)
    return TrainSample(
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        rollout_logprobs=mask.astype(np.float32) * -5.0,
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=mask.astype(np.float32),
        group=number,
        reward=1.0,
    )


def try_engine(folder: Path, plain: Any, *, trust: bool) -> None:
    """Generate with engine hf in a batch with sequences of other lengths.

    Raises:
        UserError: if it cannot.
    """
    section = RolloutSection(max_running=4, max_context_tokens=CONTEXT, prefill_tokens=32)
    config = EngineConfig(
        str(folder), section, device="cpu", policy_version=0, trust_remote_code=trust
    )
    core = EngineCore(config)
    prompts = list(make_prompts())
    for number, prompt in enumerate(prompts):
        sampling = wire.SamplingParams(max_tokens=20, ignore_eos=True, seed=number)
        ids = wire.column(prompt, "<i4")
        name = str(number)
        core.submit(
            wire.GenerateRequest(
                request_id=name, conversation_id=name, token_ids=ids, sampling=sampling
            ),
            0.0,
        )
    while core.scheduler.num_running or core.scheduler.num_waiting:
        core.admit(0.0)
        core.step()
    for name, output in core.outbox:
        if output.error:
            raise UserError(output.error)
        prompt = prompts[int(name)]
        _compare_logprobs(
            torch.tensor(output.logprobs),
            plain_logprobs(plain, [*prompt, *output.token_ids])[len(prompt) - 1 :],
        )


def _compare_logprobs(logprobs: Tensor, expected: Tensor) -> None:
    if not (difference := float((logprobs - expected).abs().max())) <= EXACT:
        raise UserError(f"logprobs differ from those of transformers by {difference:.2g}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    main()
