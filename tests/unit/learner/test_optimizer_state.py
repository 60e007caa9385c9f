"""What ranks do who only take part in another's state."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from learner.backends.optimizer import MasterOptimizer
from learner.config import TrainSection


class Counting(MasterOptimizer):
    """Makes a tensor for each that is asked for, as who gathers does, and knows how many live at the same time."""

    made = alive = most = 0

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        found = tensor.clone()
        self.made, self.alive = self.made + 1, self.alive + 1
        self.most = max(self.most, self.alive)
        weakref.finalize(found, self.gone)
        return found

    def gone(self) -> None:
        self.alive -= 1


def test_ranks_that_only_gather_keep_nothing() -> None:
    parameters = {f"p{index}": nn.Parameter(torch.randn(3, 2).to(torch.bfloat16)) for index in range(8)}
    optimizer = Counting(parameters, TrainSection())
    state = optimizer.state()
    assert len(state) == 1 + 8 * 4  # updates; step, two moments and a master weight of each
    assert optimizer.made == 8 * 4
    assert list(state) == list(optimizer.empty_state())
    optimizer.made = optimizer.most = 0
    optimizer.gather_state()
    assert (optimizer.made, optimizer.most) == (8 * 4, 2)  # all of them, as rank 0 waits for each; the one before goes
    assert all(torch.equal(state[f"master.{name}"], parameter.float()) for name, parameter in parameters.items())
