"""AdamW over float32 weights, whatever the model computes in; learning-rate schedule, clipping, and their state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from broker.errors import UserError
from learner.config import TrainSection


def lr_factor(update: int, train: TrainSection) -> float:
    """What ``train.lr`` is multiplied by at an update, counted from 0.

    Linear over ``warmup_steps`` updates up to 1, which the last of them has; then constant, or linear or cosine towards 0,
    which would be reached at update ``train.steps``: the last one still moves.
    """
    if update < train.warmup_steps:
        return (update + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return 1.0
    progress = min(1.0, (update - train.warmup_steps) / max(1, train.steps - train.warmup_steps))
    return 1.0 - progress if train.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW with decoupled decay on matrices only (biases and norms have none), for parameters of any floating dtype.

    Parameters that are not float32 get a float32 master copy, which is what is updated and what gradients are summed in: at
    usual learning rates most updates are smaller than bfloat16 can add. With ``optimizer_offload`` all of them get one, in host
    memory, where their gradients, moments and updates are, too.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], train: TrainSection) -> None:
        self._train = train
        self.updates = 0
        self._live = dict(parameters)
        self._masters = {name: _master(parameter, train.optimizer_offload) for name, parameter in self._live.items()}
        self._copied = [name for name, parameter in self._live.items() if self._masters[name] is not parameter]
        self._rounded = [name for name in self._copied if self._live[name].dtype != torch.float32]  # their masters know more
        groups = [
            {"params": [p for p in self._masters.values() if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in self._masters.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=train.lr, betas=train.betas, fused=True)
        for master in self._masters.values():
            self._adamw.state[master] = _fresh(master)

    @torch.no_grad()
    def collect(self) -> None:
        """After each backward pass: move low-precision gradients into the float32 sums, and offloaded ones to where their masters are."""
        for name in self._copied:
            live, master = self._live[name], self._masters[name]
            if live.grad is not None:
                found = live.grad.to(master.device, torch.float32)
                master.grad = found if master.grad is None else master.grad.add_(found)
                live.grad = None

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """The summed gradient, not yet normalised, in the order of the parameters; zeros where nothing was trained."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of all of them together, over all ranks that hold a part."""
        found: Tensor = nn.utils.get_total_norm(gradients)
        return found

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of a parameter's shape, or a scalar, of which this process may hold a part."""
        return tensor

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a whole tensor that this process holds."""
        return tensor

    def tensors(self) -> list[Tensor]:
        """Live weights, master weights and moments: all that other ranks must have the same."""
        found = [parameter.detach() for parameter in self._live.values()]
        found += [self._masters[name].detach() for name in self._copied]
        return found + [tensor for master in self._masters.values() for tensor in self._adamw.state[master].values()]

    @torch.no_grad()
    def step(self, denominator: float, at: int | None = None) -> dict[str, float]:
        """Divide the gradient by ``denominator``, clip it to ``max_grad_norm``, update, and forget it.

        Args:
            denominator: of the loss.
            at: where the schedule of the learning rate stands, in steps from 0; None: every update is a step.

        A gradient that is not finite changes nothing but the count of updates.

        Returns:
            ``grad_norm`` before clipping, ``lr`` of this update, ``skipped`` (0 or 1).
        """
        masters, grads = list(self._masters.values()), self.gradients()
        torch._foreach_div_(grads, denominator)
        norm = self.norm(grads)
        finite = bool(torch.isfinite(norm))
        if self._train.max_grad_norm and finite:
            nn.utils.clip_grads_with_norm_(masters, self._train.max_grad_norm, norm)
        lr = self._train.lr * lr_factor(self.updates if at is None else at, self._train)
        if finite:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            for name in self._copied:
                self._live[name].copy_(self._masters[name])
        self._adamw.zero_grad()
        self.updates += 1
        return {"grad_norm": float(norm), "lr": lr, "skipped": float(not finite)}

    def discard(self) -> None:
        """Forget the gradient."""
        self._adamw.zero_grad()
        for parameter in self._live.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """CPU copies of moments, master weights and counts, by ``<kind>.<parameter name>``; with parts on other ranks, all at once."""
        return {"updates": torch.tensor(self.updates)} | {name: _copy(tensor) for name, tensor in self._entries()}

    def gather_state(self) -> None:
        """Another rank's part in ``state``: nothing of it is kept."""
        for _ in self._entries():
            pass

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors, each made when it is asked for."""
        for name, master in self._masters.items():
            for kind, tensor in self._adamw.state[master].items():
                yield f"{kind}.{name}", self.whole(name, tensor)
        for name in self._rounded:
            yield f"master.{name}", self.whole(name, self._masters[name])

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state`` gave, whole or not at all.

        Raises:
            UserError: names or shapes are those of another model.
        """
        self.refuse(state, self.empty_state())
        self.take(state)

    def empty_state(self) -> dict[str, Tensor]:
        """Of the names and shapes that ``state`` has."""
        return self.state()

    def refuse(self, state: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """
        Raises:
            UserError: ``state`` has other names or shapes than ``held``.
        """
        if odd := sorted(held.keys() ^ state.keys()):
            raise UserError(f"the optimizer state belongs to another model: {len(odd)} entries differ, the first is {odd[0]}")
        for name, tensor in held.items():
            if tensor.shape != state[name].shape:
                raise UserError(
                    f"the optimizer state belongs to another model: {name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> None:
        """Take a state that fits."""
        self.updates = int(state["updates"])
        for name, master in self._masters.items():
            for kind, tensor in self._adamw.state[master].items():
                tensor.copy_(self.own(name, state[f"{kind}.{name}"]))
        for name in self._copied:
            if name not in self._rounded:
                self._masters[name].copy_(self._live[name])  # which may have been loaded since it was copied
                continue
            self._masters[name].copy_(self.own(name, state[f"master.{name}"]))
            self._live[name].copy_(self._masters[name])


def _master(parameter: nn.Parameter, offload: bool) -> nn.Parameter:
    if offload:
        return nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True))
    return parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())


def _fresh(master: Tensor) -> dict[str, Tensor]:
    # What AdamW would make at its first step; made now, so that the state has the same entries from the start.
    return {
        "step": torch.zeros((), dtype=torch.float32, device=master.device),
        "exp_avg": torch.zeros_like(master),
        "exp_avg_sq": torch.zeros_like(master),
    }


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
