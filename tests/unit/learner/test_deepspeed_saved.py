"""Views of gathered weights are kept as places: what is dropped after a layer's forward pass is
dropped.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from learner.backends import activation_offload
from learner.backends.deepspeed.saved_views import save_views_as_places

HERE, GONE = SimpleNamespace(name="AVAILABLE"), SimpleNamespace(name="NOT_AVAILABLE")


class Divided:
    """A layer's weight as ZeRO's stage 3 has it: whole while it is gathered, each time somewhere
    else, and otherwise nothing.
    """

    def __init__(self, layer):
        self.weight, self._whole, self.gathered = layer.weight, layer.weight.detach().clone(), 0
        self.weight.ds_id, self.weight.all_gather, self.weight.partition = 1, self.gather, self.drop
        self.gather()

    def gather(self):
        self.gathered += 1
        flat = torch.full((self._whole.numel() + 9,), torch.nan)  # among others, in one buffer
        flat[self.gathered : self.gathered + self._whole.numel()] = self._whole.flatten()
        self.weight.data = flat[self.gathered : self.gathered + self._whole.numel()].view_as(
            self._whole
        )
        self.weight.ds_status = HERE

    def drop(self):
        self.weight.data, self.weight.ds_status = torch.empty(0), GONE


def layer():
    torch.manual_seed(0)
    return nn.Linear(5, 3, bias=False)


def plain(inputs):
    made, inputs = layer(), inputs.clone().requires_grad_()
    made(inputs).square().sum().backward()
    return inputs.grad, made.weight.grad


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("offloaded", [False, True])
def test_nothing_of_a_gathered_weight_is_held(monkeypatch, trained, offloaded):
    left = []

    def as_on_a_gpu(tensor):  # nothing is moved on a CPU, so who would be is asked alone
        left.append(tensor.shape)
        return True

    monkeypatch.setattr(activation_offload, "_is_offloaded", as_on_a_gpu)
    made, inputs = layer(), torch.randn(2, 4, 5)
    ours = inputs.clone().requires_grad_()
    divided = Divided(made)
    made.weight.requires_grad_(trained)
    with save_views_as_places(offloaded):
        hidden = made(ours).square()
    held = StorageWeakRef(made.weight.untyped_storage())
    divided.drop()
    assert held.expired()
    if trained:
        divided.gather()  # as what stands before a layer's backward pass does
    hidden.sum().backward()
    expected = plain(inputs)
    assert torch.equal(ours.grad, expected[0])
    assert torch.equal(made.weight.grad, expected[1]) if trained else made.weight.grad is None
    assert divided.gathered == 2
    # what was gathered for the view alone is dropped again
    assert made.weight.ds_status is (HERE if trained else GONE)
    # the layer's input, for its weight, and output: no weight
    kept = [(8, 5), (2, 4, 3)] if trained else [(2, 4, 3)]
    assert left == (kept if offloaded else [])


def test_a_view_of_what_was_gathered_before_stays_as_it_is():
    made = layer().requires_grad_(False)
    divided = Divided(made)
    early = made.weight.t()
    divided.drop()
    divided.gather()
    inputs = torch.randn(4, 5, requires_grad=True)
    with save_views_as_places(False):
        out = inputs @ early
    divided.drop()
    out.sum().backward()
    assert torch.equal(inputs.grad, divided._whole.sum(0).expand(4, 5))
