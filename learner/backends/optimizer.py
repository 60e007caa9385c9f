"""AdamW over float32 weights for models of any dtype, with schedule, clipping and state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from broker.errors import UserError
from broker.weights.finite import first_non_finite
from broker.weights.memory.copying import copy_into
from learner.backends.parts.slices import Slice
from learner.config import TrainSection

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
# In a stored state: how many updates were made.
UPDATES: Final = "updates"


def lr_factor(update: int, train: TrainSection, steps: int | None = None) -> float:
    """Return the factor of ``train.lr`` at an update, counted from 0.

    It rises linearly to 1 at the last of ``warmup_steps`` updates, then stays constant or falls
    linearly or as a cosine towards 0, which it would reach at update ``steps``; None:
    ``train.steps``.
    """
    if update < train.warmup_steps:
        return (update + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return 1.0
    last = train.steps if steps is None else steps
    progress = min(1.0, (update - train.warmup_steps) / max(1, last - train.warmup_steps))
    if train.lr_schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


class MasterOptimizer:
    """AdamW for parameters of any floating dtype; only matrices decay, not biases and norms.

    Parameters that are not float32 get a float32 master copy, which sums the gradients and is
    updated: at usual learning rates most updates are smaller than bfloat16 can add. bfloat16
    weights follow it by ``broker.weights.rounding``, which loses no small update. With
    ``optimizer_offload`` all parameters get one in host memory, next to their gradients and
    moments.

    Attributes:
        problem: why this rank's part of the last gradient was not finite; empty if it was.
    """

    problem = ""

    def __init__(self, parameters: Mapping[str, nn.Parameter], train: TrainSection) -> None:
        self._train = train
        self._live = dict(parameters)
        self.updates = 0
        self._masters = {
            name: _make_master(parameter, train.optimizer_offload)
            for name, parameter in self._live.items()
        }
        self._copied = [
            name for name, parameter in self._live.items() if self._masters[name] is not parameter
        ]
        self._rounded = [name for name in self._copied if self._live[name].dtype != torch.float32]
        groups = decay_groups(self._masters, train.weight_decay)
        self._adamw = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, fused=True)
        for master in self._masters.values():
            self._adamw.state[master] = fresh_state(master)

    def backward(self, total: Tensor) -> None:
        """Add to the gradient."""
        total.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def collect(self) -> None:
        """After each backward pass, move gradients into the float32 sums of their masters."""
        for name in self._copied:
            live = self._live[name]
            master = self._masters[name]
            if live.grad is not None:
                gradient = live.grad.to(master.device, torch.float32)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                live.grad = None

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Return the summed gradient in parameter order; zeros where nothing was trained."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients, over all ranks that hold a part."""
        norm: Tensor = nn.utils.get_total_norm(gradients)
        return norm

    def tensors(self) -> list[Tensor]:
        """Return everything that ranks must agree on: live weights, master weights and moments."""
        tensors = [parameter.detach() for parameter in self._live.values()]
        tensors += [self._masters[name].detach() for name in self._copied]
        return tensors + [
            tensor
            for master in self._masters.values()
            for tensor in self._adamw.state[master].values()
        ]

    def resident_tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the parts held here: live and master weights, gradients, moments."""
        for parameter in (*self._live.values(), *self._masters.values()):
            yield from (tensor for tensor in (parameter, parameter.grad) if tensor is not None)
        for master in self._masters.values():
            yield from self._adamw.state[master].values()

    @torch.no_grad()
    def step(
        self, denominator: float, at: int | None = None, steps: int | None = None
    ) -> dict[str, float]:
        """Divide the gradient by the loss's ``denominator``, clip it, update, and drop it.

        A gradient that is not finite changes only the count of updates, and sets ``problem``.

        Args:
            at: position in the schedule of the learning rate, in steps from 0; None counts every
                update.
            steps: at which that schedule ends; None: ``train.steps``.

        Returns:
            ``grad_norm`` before clipping, ``lr`` of this update, ``skipped`` (0 or 1).
        """
        masters = list(self._masters.values())
        grads = self.gradients()
        torch._foreach_div_(grads, denominator)
        norm = self.norm(grads)
        is_finite = bool(torch.isfinite(norm))
        if self._train.max_grad_norm and is_finite:
            nn.utils.clip_grads_with_norm_(masters, self._train.max_grad_norm, norm)
        position = self.updates if at is None else at
        lr = self._train.lr * lr_factor(position, self._train, steps)
        if is_finite:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            for name in self._copied:
                copy_into(self._live[name].detach(), self._masters[name].detach())
        # Before the gradient is dropped, which the search reads.
        self.problem = "" if is_finite else self._first_non_finite(grads)
        self._adamw.zero_grad()
        self.updates += 1
        return {"grad_norm": float(norm), "lr": lr, "skipped": float(not is_finite)}

    def _first_non_finite(self, gradients: list[Tensor]) -> str:
        """Return which weight, or else which gradient, of this rank is not finite."""
        if problem := first_non_finite(
            {name: parameter.detach() for name, parameter in self._live.items()}
        ):
            return f"the weight {problem}"
        if problem := first_non_finite(dict(zip(self._masters, gradients, strict=True))):
            return f"the gradient of {problem}"
        return ""

    def discard(self) -> None:
        """Drop the gradient."""
        self._adamw.zero_grad()
        for parameter in self._live.values():
            parameter.grad = None

    def slices(self) -> Iterator[Slice]:
        """Yield this rank's slices of moments, masters and counts by ``<kind>.<parameter>``."""
        for name, master in self._masters.items():
            for kind, tensor in self._adamw.state[master].items():
                yield self.slice_of(kind, name, tensor)
        for name in self._rounded:
            yield self.slice_of("master", name, self._masters[name])

    def slice_of(self, kind: str, name: str, tensor: Tensor) -> Slice:
        """Return the slice of a tensor that is divided like its parameter, or of a scalar."""
        return Slice.whole(f"{kind}.{name}", tensor)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole state, of all ranks, by name."""
        return {piece.name: piece.shape for piece in self.slices()} | {UPDATES: ()}

    def check_shapes(self, state: Mapping[str, tuple[int, ...]]) -> None:
        """Check the shapes of a stored state.

        Raises:
            UserError: if names or shapes are those of another model.
        """
        problem = "the optimizer state belongs to another model"
        shapes = self.shapes()
        if odd := sorted(shapes.keys() ^ state.keys()):
            raise UserError(f"{problem}: {len(odd)} entries differ, the first is {odd[0]}")
        for name, shape in shapes.items():
            if shape != state[name]:
                raise UserError(f"{problem}: {name} has shape {state[name]}, not {shape}")

    @torch.no_grad()
    def finish_restore(self, updates: int) -> None:
        """Make weights and masters agree after the slices were loaded."""
        self.updates = updates
        for name in self._copied:
            if name in self._rounded:
                copy_into(self._live[name].detach(), self._masters[name].detach())
            else:
                # An offloaded float32 master equals the weights, which may have been loaded later.
                self._masters[name].copy_(self._live[name])


def _make_master(parameter: nn.Parameter, offload: bool) -> nn.Parameter:
    if offload:
        return nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True))
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())


def decay_groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: matrices, which decay, and the others; none is empty."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    return [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, weight_decay), (vectors, 0.0))
        if members
    ]


def fresh_state(master: Tensor) -> dict[str, Tensor]:
    """Return what AdamW would create at its first step."""
    # Checkpoints need the same entries before the first step as after it.
    moments = {kind: torch.zeros_like(master, requires_grad=False) for kind in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device=master.device)} | moments


def shapes_below(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the entries whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }
