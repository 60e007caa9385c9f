"""Runs slices through the stages of a pipeline, alternating forward and backward to keep few
activations.

Megatron's own schedules need a GPU for their counters; here every rank knows all slices, so no
shapes are sent. The order is that of PipeDream-Flush (Narayanan et al. 2021, arXiv 2104.04473,
figure 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from learner.backends.megatron.grid import ProcessGroups, RankGrid

# Takes a slice and the previous stage's output; returns this stage's, or in the last stage, with
# gradient, the loss.
Forward = Callable[[int, Tensor | None], Tensor | None]


def pass_order(num: int, stage: int, num_stages: int) -> list[tuple[bool, int]]:
    """Return a stage's passes of ``num`` slices: (whether backward, which slice)."""
    ahead = min(num_stages - 1 - stage, num)
    found = [(False, index) for index in range(ahead)]
    for index in range(num - ahead):
        found += [(False, ahead + index), (True, index)]
    return found + [(True, index) for index in range(num - ahead, num)]


class StagePipeline:
    """One stage of the pipeline.

    One exchange sends a pass's output and receives the next input, so neighbours never deadlock.

    Args:
        device: receives tensors.
        dtype: of tensors between stages.
    """

    def __init__(
        self, grid: RankGrid, groups: ProcessGroups, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._grid = grid
        self._group = groups.pipeline
        self._device = device
        self._dtype = dtype
        self._before = grid.at(grid.share, grid.copy, grid.stage - 1) if grid.stage else None
        self._behind = (
            grid.at(grid.share, grid.copy, grid.stage + 1) if grid.stage < grid.pp - 1 else None
        )

    def run(
        self, shapes: Sequence[tuple[int, ...]], forward: Forward, done: Callable[[], None] | None
    ) -> None:
        """Run all slices forward and, with ``done``, backward.

        Args:
            shapes: of the tensor between stages, for each slice.
            done: called after each backward pass.
        """
        forward_only = [(False, index) for index in range(len(shapes))]
        steps = pass_order(len(shapes), self._grid.stage, self._grid.pp) if done else forward_only
        held: dict[int, tuple[Tensor | None, GradientEdge]] = {}
        made = None
        to = None
        for is_backward, index in steps:
            arrived = self._exchange(
                made, to, self._behind if is_backward else self._before, shapes[index]
            )
            if is_backward:
                assert done is not None
                made = _backward(*held.pop(index), arrived)
                to = self._before
                done()
                continue
            if arrived is not None and done:
                arrived.requires_grad_()
            left = forward(index, arrived)
            made = None if left is None else left.detach()
            to = self._behind
            if done:
                assert left is not None
                # not the output: only the next stage needs it
                held[index] = arrived, get_gradient_edge(left)
        self._exchange(made, to, None, ())

    def _exchange(
        self, made: Tensor | None, to: int | None, src: int | None, shape: tuple[int, ...]
    ) -> Tensor | None:
        arriving = (
            None if src is None else torch.empty(shape, dtype=self._dtype, device=self._device)
        )
        sent = (
            []
            if made is None or to is None
            else [dist.P2POp(dist.isend, made.contiguous(), to, self._group)]
        )
        received = [] if arriving is None else [dist.P2POp(dist.irecv, arriving, src, self._group)]
        for work in dist.batch_isend_irecv(sent + received) if sent or received else ():
            work.wait()
        return arriving


def _backward(entered: Tensor | None, left: GradientEdge, gradient: Tensor | None) -> Tensor | None:
    """Return the gradient that the previous stage needs."""
    torch.autograd.backward([left], None if gradient is None else [gradient])
    return None if entered is None else entered.grad
