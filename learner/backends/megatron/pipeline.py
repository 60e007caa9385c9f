"""Runs slices through the stages of a pipeline, alternating forward and backward passes.

So a stage holds the activations of a slice for itself and for each stage behind it, not of all.

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
    passes = [(False, index) for index in range(ahead)]
    for index in range(num - ahead):
        passes += [(False, ahead + index), (True, index)]
    return passes + [(True, index) for index in range(num - ahead, num)]


class StagePipeline:
    """One stage of the pipeline.

    One exchange sends a pass's output and receives the next input, so that two stages never wait
    for each other.

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
        self._behind: int | None = None
        if grid.stage < grid.pp - 1:
            self._behind = grid.at(grid.share, grid.copy, grid.stage + 1)

    def run(
        self,
        shapes: Sequence[tuple[int, ...]],
        forward: Forward,
        on_backward: Callable[[], None] | None,
    ) -> None:
        """Run all slices forward and, with ``on_backward``, backward.

        Args:
            shapes: of the tensor between stages, for each slice.
            on_backward: called after each backward pass.
        """
        if on_backward:
            steps = pass_order(len(shapes), self._grid.stage, self._grid.pp)
        else:
            steps = [(False, index) for index in range(len(shapes))]
        pending: dict[int, tuple[Tensor | None, GradientEdge]] = {}
        outgoing = None
        target = None
        for is_backward, index in steps:
            source = self._behind if is_backward else self._before
            incoming = self._exchange(outgoing, target, source, shapes[index])
            if is_backward:
                assert on_backward is not None
                outgoing = _run_backward(*pending.pop(index), incoming)
                target = self._before
                on_backward()
                continue
            if incoming is not None and on_backward:
                incoming.requires_grad_()
            output = forward(index, incoming)
            outgoing = None if output is None else output.detach()
            target = self._behind
            if on_backward:
                assert output is not None
                # The output itself is not kept: only the next stage needs it.
                pending[index] = incoming, get_gradient_edge(output)
        self._exchange(outgoing, target, None, ())

    def _exchange(
        self,
        outgoing: Tensor | None,
        target: int | None,
        source: int | None,
        shape: tuple[int, ...],
    ) -> Tensor | None:
        operations: list[dist.P2POp] = []
        incoming = None
        if outgoing is not None and target is not None:
            operations.append(dist.P2POp(dist.isend, outgoing.contiguous(), target, self._group))
        if source is not None:
            incoming = torch.empty(shape, dtype=self._dtype, device=self._device)
            operations.append(dist.P2POp(dist.irecv, incoming, source, self._group))
        # torch refuses an empty batch.
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return incoming


def _run_backward(
    stage_input: Tensor | None, output: GradientEdge, gradient: Tensor | None
) -> Tensor | None:
    """Return the gradient that the previous stage needs."""
    torch.autograd.backward([output], None if gradient is None else [gradient])
    return None if stage_input is None else stage_input.grad
