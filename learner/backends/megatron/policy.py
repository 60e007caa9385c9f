"""A causal language model in Megatron's layers, divided over ranks; it scores selected tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learner.backends.megatron.adapters import MegatronAdapters
from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.megatron.mapping import parts_of, share_size
from learner.backends.megatron.model import RowLayout, build_stage, megatron_library
from learner.backends.megatron.model_shell import ModelShell
from learner.backends.megatron.pipeline import StagePipeline
from learner.backends.megatron.tensor_exchange import TensorExchange
from learner.backends.megatron.vocabulary import measure_shares
from learner.backends.models.batch import TokenBatch
from learner.backends.models.block_compilation import check_compiler
from learner.backends.models.empty_model import refuse_non_finite
from learner.backends.models.policy import MANY_COPIES, map_chunks
from learner.backends.parts.sources import CastWeights
from learner.config import LoraSection

# logprobs and entropies, (T,) each
Measured = tuple[Tensor, Tensor]


class MegatronPolicy:
    """This rank's part of a model; all ranks of a copy call it together, with the same slices.

    Attributes:
        module: transformers' model, on the meta device, for the configuration saved with weights.
        model: Megatron's model of this stage.
        adapters: the trained part, None if all weights are trained.

    Raises:
        ConfigError: if a weight is NaN or infinite, on all ranks.
    """

    unpackable = ""

    def __init__(
        self,
        shell: ModelShell,
        grid: RankGrid,
        groups: ProcessGroups,
        device: torch.device,
        *,
        trainable: bool = True,
    ) -> None:
        self.path = shell.path
        self.device = device
        self.module = shell.module
        self._shape = shell.shape
        self._grid = grid
        self._groups = groups
        shape = self._shape
        self._like = shell.tensors
        self._weights_in_files = shell.weights
        self._parts = parts_of(shape, grid.tp, grid.pp)
        self.adapters: MegatronAdapters | None = None
        dtype = self.module.dtype
        self.model = build_stage(shape, shell.inv_freq, dtype, grid, groups)
        self.exchange = TensorExchange(grid, groups, self._parts, self._like, device)
        holders = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        # Rows behind the vocabulary's end are padding, and stay zeros.
        torch._foreach_zero_(list(holders.values()))
        shell.weights.load(self.exchange.slices(holders))
        shares = {own.name: own.tensor for own in self.exchange.slices(holders)}
        refuse_non_finite(shell.path, shares, self.weights(), device)
        self.model.to(device).requires_grad_(trainable)
        self._pipeline = StagePipeline(grid, groups, device, dtype)
        self._columns = share_size(shape.vocab, grid.tp)

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab

    @property
    def speaks(self) -> bool:
        """Whether this rank computes logits."""
        return self._grid.stage == self._grid.pp - 1

    def adapt(self, section: LoraSection, seed: int) -> MegatronAdapters:
        """Freeze the model and train adapters.

        Their ``first`` values may be changed until ``divide_adapters``.
        """
        self.model.requires_grad_(False)
        self.adapters = MegatronAdapters(self.module, section, seed, self.path)
        return self.adapters

    def divide_adapters(self) -> None:
        """Leave each rank its shares of the adapters."""
        if self.adapters is not None:
            self.adapters.divide(self.model, self._parts, self._grid, self._groups, self.device)

    def trained_parameters(self) -> tuple[dict[str, nn.Parameter], TensorExchange]:
        """Return this rank's trained parameters and the exchange that knows the other ranks'."""
        if self.adapters is not None:
            return self.adapters.live, self.adapters.exchange
        return dict(self.model.named_parameters()), self.exchange

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapters' first values, whole."""
        assert self.adapters is not None
        return self.adapters.first

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that were loaded, read from their files again."""
        return CastWeights(self._weights_in_files, self._like)

    def checkpoint_blocks(self) -> None:
        """Keep each block's input only, and recompute the rest in the backward pass."""
        for layer in self.model.decoder.layers:
            layer.forward = partial(_checkpointed_forward, layer.forward)

    def compile_blocks(self) -> None:
        """Compile each block, except for the layers that ranks divide."""
        check_compiler(self.device)
        for layer in self.model.decoder.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
            for part in layer.modules() if self._grid.tp > 1 else ():
                if isinstance(part, megatron_library().Parallel):
                    # Its all-reduce overlaps with computation, which torch cannot compile.
                    forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
                    part.forward = forward

    def shapes(self) -> dict[str, Tensor]:
        return dict(self._like)

    def gather(self, name: str) -> Tensor | None:
        """Return a whole live tensor with adapters merged on rank 0, None elsewhere; collective."""
        weight = self.exchange.gather(
            name, dict(self.model.named_parameters()), self._like[name].dtype
        )
        if self.adapters is None:
            return weight
        base_name, *names = self.adapters.parts(name)
        factors = {
            factor: tensor for factor in names if (tensor := self.gather_factor(factor)) is not None
        }
        if weight is None:
            return None
        return self.adapters.merged(name, ({base_name: weight} | factors).__getitem__)

    def gather_factor(self, name: str) -> Tensor | None:
        """Return one of the adapters' whole factors on rank 0, None elsewhere; collective."""
        assert self.adapters is not None
        return self.adapters.exchange.gather(name, self.adapters.live, torch.float32)

    def measure(self, batches: Sequence[TokenBatch]) -> list[Measured | None]:
        """Return logprobs and entropies of slices, without gradient; None without logits here."""
        results: list[Measured | None] = [None] * len(batches)

        def keep(index: int, measured: Measured) -> None:
            results[index] = measured

        with torch.no_grad():
            self._run(batches, keep, None, entropy_grad=False)
        return results

    def train_batches(
        self,
        batches: Sequence[TokenBatch],
        loss: Callable[[int, Measured], Tensor],
        on_backward: Callable[[], None],
        saving: Callable[[], AbstractContextManager[Any]],
        *,
        entropy_grad: bool,
    ) -> None:
        """Run slices forward and backward.

        Args:
            loss: of one slice, called on ranks with logits.
            on_backward: called after each backward pass.
            saving: context of each forward pass, which keeps its activations.
            entropy_grad: let gradient flow through the entropy too.
        """
        self._run(batches, loss, on_backward, saving, entropy_grad=entropy_grad)

    def _run(
        self,
        batches: Sequence[TokenBatch],
        finish: Callable[[int, Measured], Tensor | None],
        on_backward: Callable[[], None] | None,
        saving: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        entropy_grad: bool,
    ) -> None:
        def forward(index: int, stage_input: Tensor | None) -> Tensor | None:
            with saving():
                output = self._through(batches[index], stage_input)
                if self.speaks:
                    return finish(index, self._measure(output, batches[index], entropy_grad))
                return output

        shapes = [
            (batch.input_ids.shape[1], batch.input_ids.shape[0], self._shape.hidden)
            for batch in batches
        ]
        self._pipeline.run(shapes, forward, on_backward)

    def _through(self, batch: TokenBatch, stage_input: Tensor | None) -> Tensor:
        """Run the stage's layers on the previous stage's output, (tokens, rows, hidden) both."""
        ids = batch.input_ids
        packed = batch.position_ids
        positions = torch.arange(ids.shape[1], device=self.device) if packed is None else packed[0]
        self.model.set_input_tensor(stage_input)
        output: Tensor = self.model(
            ids, None, None, packed_seq_params=RowLayout(positions, batch.packing)
        )
        self.model.set_input_tensor(None)
        return output

    def _measure(self, hidden: Tensor, batch: TokenBatch, entropy_grad: bool) -> Measured:
        """Return logprobs and entropies of the trained tokens.

        Args:
            hidden: (tokens, rows, hidden) of the last layer.
        """
        features = hidden.transpose(0, 1).flatten(0, 1).index_select(0, batch.predictors)
        if batch.temperature is None:
            columns = [batch.targets]
        else:
            columns = [batch.targets, batch.temperature]

        def function(
            logits: Tensor, targets: Tensor, temperature: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            first = self._columns * self._grid.share
            share = {"first": first, "vocab": self._shape.vocab, "group": self._groups.tp}
            return measure_shares(logits, targets, temperature, **share, entropy_grad=entropy_grad)

        logprobs, entropy = map_chunks(
            function, self._logits, features, columns, MANY_COPIES * self._columns
        )
        return logprobs, entropy

    def _logits(self, features: Tensor) -> Tensor:
        """Return this rank's columns of the logits, (t, columns), of (t, hidden)."""
        weight = self.model.shared_embedding_or_output_weight() if self._shape.tied else None
        logits: Tensor = self.model.output_layer(features, weight=weight)[0]
        return logits

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1; collective.

        Args:
            token_ids: (n,) int64.

        Returns:
            (n - 1,) float32.
        """
        if len(token_ids) < 2:
            return torch.zeros(0, device=self.device)
        (measured,) = self.measure([_single_row(token_ids)])
        if measured is not None:
            logprobs = measured[0]
        else:
            logprobs = torch.empty(len(token_ids) - 1, device=self.device)
        if self._grid.pp > 1:
            dist.broadcast(logprobs, self._grid.speakers[0])
        return logprobs


def _checkpointed_forward(
    forward: Callable[..., Any], hidden_states: Tensor, **keywords: Any
) -> Any:
    # Positional, since the hooks of ``activations_in_host_memory`` do not see keyword arguments.
    return checkpoint(
        forward, hidden_states, use_reentrant=False, preserve_rng_state=False, **keywords
    )


def _single_row(ids: Tensor) -> TokenBatch:
    predictors = torch.arange(len(ids) - 1, device=ids.device)
    no_values = torch.zeros(len(ids) - 1, device=ids.device)
    no_counts = torch.zeros_like(predictors)
    return TokenBatch(
        input_ids=ids[None, :-1],
        predictors=predictors,
        targets=ids[1:],
        sequence=no_counts,
        rollout_logprobs=no_values,
        advantages=no_values,
        temperature=None,
        num_rows=1,
        versions=no_counts,
    )
