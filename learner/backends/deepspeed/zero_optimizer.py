"""Adapts the engine and the optimizer of DeepSpeed's ZeRO to the learner's steps.

The number of backward passes of a step and the denominator of its gradient are known only at its
end. So DeepSpeed accumulates without a fixed number of passes (``managed_gradient_accumulation``,
since 0.19.8) and measures the norm of the averaged gradient; one multiplication in the optimizer's
``step``, which all stages call, divides and clips.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from broker.weights.finite import first_non_finite
from learner.backends.models.block_compilation import blocks_of, check_compiler
from learner.backends.models.policy import PolicyModel
from learner.backends.optimizer import (
    MOMENTS,
    UPDATES,
    MasterOptimizer,
    decay_groups,
    fresh_state,
    lr_factor,
)
from learner.backends.parts.slices import Slice
from learner.config import DeepspeedSection, TrainSection

# The content of DeepSpeed's own configuration file.
DeepSpeedConfig = dict[str, Any]
# Fills a parameter by its name.
Read = Callable[[str, Tensor], None]


class FunctionModule(nn.Module):
    """Makes any function of a model a forward pass, which DeepSpeed's engine has to see."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class DividedPolicy(PolicyModel):
    """The policy of stage 3, whose layers have hooks that gather weights and drop them again."""

    def compile_blocks(self) -> None:
        """Compile each block, with its weights gathered before it."""
        check_compiler(self.device)
        leaves = importlib.import_module("deepspeed.utils.z3_leaf_module")
        for block in blocks_of(self.module):
            # A leaf module gathers all of its weights at once: no hook is in the compiled code.
            leaves.set_z3_leaf_module(block, True)
            block.forward = torch.compile(block.forward, dynamic=True)


class ScaledAdamW(AdamW):
    """AdamW that first multiplies gradients by ``factor()``; if that is None, it does nothing."""

    factor: Callable[[], float | None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that DeepSpeed currently exposes."""
        factor = self.factor()
        if factor is None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        super().step()


def settings_of(section: DeepspeedSection, dtype: torch.dtype) -> DeepSpeedConfig:
    """Return DeepSpeed's configuration."""
    zero: dict[str, Any] = {
        "stage": section.stage,
        "overlap_comm": False,
        "reduce_bucket_size": section.reduce_bucket_size,
        "allgather_bucket_size": section.reduce_bucket_size,
        "memory_efficient_linear": False,
    }
    offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if section.offload_optimizer:
        zero["offload_optimizer"] = offload
    if section.offload_param:
        zero["offload_param"] = offload
    if section.stage == 3:
        zero["stage3_param_persistence_threshold"] = section.param_persistence_threshold
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = (
            section.max_live_parameters
        )
    if dtype == torch.bfloat16:
        precision = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    else:
        precision = {}
    return {
        # DeepSpeed requires it; slices here are cut before they reach the engine.
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0,
    } | precision


class ZeroOptimizer(MasterOptimizer):
    """DeepSpeed's AdamW over the parts that this rank holds; every method is collective.

    Args:
        module: the model; its parameters become DeepSpeed's.
        parameters: those that are trained, by name.
        read: reads a parameter of a module that has no weights yet, in stage 3; called on rank 0.

    Attributes:
        engine: wraps the model; call it to run a function of the model.
        dirty: whether something was added since the last step.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        train: TrainSection,
        device: torch.device,
        read: Read | None = None,
    ) -> None:
        self._train = train
        self._live = dict(parameters)
        self._size = train.ranks
        self.updates = 0
        self.dirty = False
        dtype = next(iter(self._live.values())).dtype
        # Weights that are float32 already have no master copies.
        self._kinds = MOMENTS if dtype == torch.float32 else (*MOMENTS, "master")
        self._shapes = {name: parameter.shape for name, parameter in self._live.items()}
        groups = decay_groups(self._live, train.weight_decay)
        self._adamw = ScaledAdamW(groups, lr=train.lr, betas=train.betas, fused=True)
        self._adamw.factor = self._factor
        self._denominator: float | None = None
        self._sharded = train.deepspeed.stage == 3
        settings = settings_of(train.deepspeed, dtype)
        if read is not None:
            prepare_library(device)
            divide_while_reading(module, settings, dtype, read)
        self.engine = initialize_engine(FunctionModule(module), self._adamw, settings, device)
        self._zero = self.engine.optimizer
        live_parameters = [
            parameter for group in self._adamw.param_groups for parameter in group["params"]
        ]
        self._flat: list[Tensor] = list(
            getattr(self._zero, "fp32_partitioned_groups_flat", live_parameters)
        )
        for flat in self._flat:
            self._adamw.state[flat] = fresh_state(flat)
        if not self._sharded:
            # Checkpoints may read the moments before the first step creates them.
            self._zero._lazy_init_hp_params_optimizer_state()

    def backward(self, total: Tensor) -> None:
        self.engine.backward(total, scale_wrt_gas=False)
        self.dirty = True

    def collect(self) -> None:
        """DeepSpeed collects gradients by itself."""

    def gradients(self) -> list[Tensor]:
        raise TypeError("DeepSpeed's gradients cannot be read")

    def tensors(self) -> list[Tensor]:
        live = [
            getattr(parameter, "ds_tensor", parameter).detach() for parameter in self._live.values()
        ]
        state = self._adamw.state
        return live + [
            tensor
            for flat in self._flat
            for tensor in (flat.detach(), *(state[flat][kind] for kind in MOMENTS))
        ]

    @torch.no_grad()
    def step(
        self, denominator: float, at: int | None = None, steps: int | None = None
    ) -> dict[str, float]:
        """As ``MasterOptimizer.step``; a gradient must have been added, even of zeros."""
        position = self.updates if at is None else at
        lr = self._train.lr * lr_factor(position, self._train, steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        # DeepSpeed takes the mean over ranks, the learner divides a sum.
        self._denominator = denominator / self._size
        self.engine.step()
        norm = self._norm() / abs(self._denominator)
        self._denominator = None
        self.dirty = False
        self.problem = ""
        if not math.isfinite(norm):
            # DeepSpeed has dropped the gradients by now: only weights can be examined.
            self.problem = self._first_non_finite([])
        self.updates += 1
        return {"grad_norm": norm, "lr": lr, "skipped": float(not math.isfinite(norm))}

    def _first_non_finite(self, gradients: list[Tensor]) -> str:
        problem = first_non_finite(
            {
                name: getattr(parameter, "ds_tensor", parameter)
                for name, parameter in self._live.items()
            }
        )
        return f"the weight {problem}" if problem else ""

    def discard(self) -> None:
        if self.dirty:
            # Only a step makes DeepSpeed drop gradients; without a denominator it updates nothing.
            self._denominator = None
            self.engine.step()
            self.dirty = False

    def _norm(self) -> float:
        norm = float(self.engine.get_global_grad_norm())
        # DeepSpeed returns -1 for a gradient that is not finite; NaN counts as such, too.
        return norm if norm >= 0 else math.inf

    def _factor(self) -> float | None:
        if self._denominator is None:
            return None
        # The engine's own figure is set only after the step.
        norm = float(self._zero._global_grad_norm)
        if not (math.isfinite(norm) and norm >= 0):
            return None
        limit = self._train.max_grad_norm
        clip = 1.0
        if limit:
            clip = min(1.0, limit / (norm / abs(self._denominator) + 1e-6))
        return clip / self._denominator

    def slices(self) -> Iterator[Slice]:
        """Yield this rank's ranges of DeepSpeed's flat partitions."""
        step = self._adamw.state[self._flat[0]]["step"]
        for name, parameter in self._live.items():
            yield Slice.whole(f"step.{name}", step)
            for kind in self._kinds:
                # DeepSpeed has no key for its float32 weights.
                key = None if kind == "master" else kind
                yield from self._range(f"{kind}.{name}", parameter, tuple(self._shapes[name]), key)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {UPDATES: ()}
        for name, shape in self._shapes.items():
            shapes[f"step.{name}"] = ()
            shapes |= {f"{kind}.{name}": tuple(shape) for kind in self._kinds}
        return shapes

    def finish_restore(self, updates: int) -> None:
        # Live weights stay as the model was loaded: only counts must agree.
        self.updates = updates
        step = self._adamw.state[self._flat[0]]["step"]
        for flat in self._flat[1:]:
            self._adamw.state[flat]["step"].copy_(step)

    def _range(
        self, entry: str, parameter: Any, shape: tuple[int, ...], key: str | None
    ) -> Iterator[Slice]:
        """Yield this rank's part of a moment, or of the float32 weights if ``key`` is None."""
        if self._sharded:
            partitions = self._zero._get_fp32_opt_state_partition(
                parameter, release_swap_buffers=False, optim_state_key=key
            )
            yield partition_slice(entry, shape, partitions[0])
        elif (mapping := parameter._hp_mapping) is not None:
            yield Slice(
                entry, shape, mapping.lp_fragment_address.start, mapping.get_hp_fragment(key)
            )


def partition_slice(name: str, shape: tuple[int, ...], partition: Tensor) -> Slice:
    """Return a rank's part of a tensor in stage 3; parts have equal sizes, the last has padding."""
    start = dist.get_rank() * partition.numel()
    size = prod(shape)
    return Slice(name, shape, min(start, size), partition.detach().view(-1)[: max(0, size - start)])


def deepspeed_library() -> Any:
    """Import DeepSpeed."""
    return importlib.import_module("deepspeed")


def initialize_engine(
    model: nn.Module, optimizer: Optimizer, settings: DeepSpeedConfig, device: torch.device
) -> Any:
    """Return DeepSpeed's engine; the process group must exist."""
    prepare_library(device)
    engine, *_ = deepspeed_library().initialize(model=model, optimizer=optimizer, config=settings)
    # The model's modes stay: evaluation, except for blocks whose activations are recomputed.
    return engine


def divide_while_reading(
    module: nn.Module, settings: DeepSpeedConfig, dtype: torch.dtype, read: Read
) -> None:
    """Divide parameters among ranks while rank 0 reads them, so that no rank holds the model."""

    def filled() -> Iterator[nn.Parameter]:
        for name, parameter in module.named_parameters():
            if dist.get_rank() == 0:
                # DeepSpeed then sends the parameter to the other ranks.
                read(name, parameter)
            yield parameter

    class Parameters(nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return filled()

    deepspeed = deepspeed_library()
    deepspeed.init_distributed()
    deepspeed.zero.Init(module=Parameters(), config_dict_or_path=settings, dtype=dtype)


def prepare_library(device: torch.device) -> None:
    """Set what DeepSpeed reads once, and silence it."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # DeepSpeed takes the GPU of this number.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    # DeepSpeed calls torch functions that torch has deprecated.
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings(
            "ignore", message=r".*`torch\.\S+` is deprecated", category=category
        )
    deepspeed = deepspeed_library()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Otherwise it spends a minute compiling an operator for inference.
    deepspeed.ops.__compatible_ops__ = {}
    bf16_optimizer: Any = importlib.import_module("deepspeed.runtime.bf16_optimizer")
    # It prints at any log level.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
