"""A value model: the policy's architecture with one output per position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from broker.errors import UserError
from learner.backends.models.attention_trial import choose_attention, trunk_of
from learner.backends.models.batch import TokenBatch
from learner.backends.models.policy import load_model
from learner.backends.optimizer import MasterOptimizer, shapes_below
from learner.backends.parts.names import OPTIMIZER
from learner.backends.parts.slices import Slice
from learner.config import CriticSection, TrainSection
from rlearner_text.config import ModelSection

_WEIGHT: Final = "weight."
# In the order of the columns that ``forward_backward`` sums up.
_SUMS: Final = ("loss", "clipped", "values", "error", "returns", "returns_squared")


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return PPO's ``0.5 max((V - R)^2, (V_old + clip(V - V_old, ±clip) - R)^2)``.

    See Schulman et al., Proximal policy optimization algorithms, 2017.

    Args:
        values: (T,) now, with gradient.
        old_values: (T,) at the start of the step.
        returns: (T,) targets.
        clip: largest useful move; None for the plain squared error.

    Returns:
        Losses (T,), and where the clipped branch is the larger one, (T,) bool.
    """
    plain = torch.square(values - returns)
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    bounded = torch.square(old_values + (values - old_values).clamp(-clip, clip) - returns)
    return 0.5 * torch.maximum(plain, bounded), bounded > plain


class ValueModel:
    """The value of the state in which each trained token was sampled; all values start at 0.

    Args:
        path: weights of the trunk, with which the policy started.
        max_context: as for ``PolicyModel``.

    Attributes:
        unpackable: why it takes no packed rows, empty if it does.
    """

    def __init__(
        self,
        path: str,
        section: CriticSection,
        train: TrainSection,
        model: ModelSection,
        device: torch.device,
        max_context: int | None = None,
    ) -> None:
        self._section = section
        language_model = load_model(path, model, device, max_context)
        self.unpackable = choose_attention(
            language_model, device, path, packed=train.packing != "padded"
        )
        head = nn.Linear(language_model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.module = nn.ModuleDict({"trunk": trunk_of(language_model), "head": head})
        self.module.to(device).requires_grad_(True)
        overrides = {
            "lr": section.lr,
            "weight_decay": section.weight_decay,
            "max_grad_norm": section.max_grad_norm,
        }
        self.optimizer = MasterOptimizer(
            dict(self.module.named_parameters()), train.model_copy(update=overrides)
        )

    def values(self, batch: TokenBatch) -> Tensor:
        """Return the values of the trained tokens, (T,) float32."""
        hidden = self.module["trunk"](**batch.inputs(), use_cache=False).last_hidden_state
        features = hidden.flatten(0, 1).index_select(0, batch.predictors).float()
        values: Tensor = self.module["head"](features)[:, 0]
        return values

    def forward_backward(self, batch: TokenBatch) -> dict[str, float]:
        """Add a slice to the gradient, not yet normalised; return sums over its tokens."""
        assert batch.values is not None
        assert batch.returns is not None
        values = self.values(batch)
        losses, clipped = value_losses(values, batch.values, batch.returns, self._section.clip)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.collect()
        error = torch.square(values.detach() - batch.returns)
        columns = [
            losses.detach(),
            clipped,
            values.detach(),
            error,
            batch.returns,
            torch.square(batch.returns),
        ]
        sums = dict(
            zip(_SUMS, torch.stack([part.double().sum() for part in columns]).tolist(), strict=True)
        )
        return {"tokens": float(len(losses))} | sums

    def step(
        self, sums: Mapping[str, float], at: int, steps: int | None = None
    ) -> dict[str, float]:
        """Update, normalised over all tokens since the last update; return the metrics.

        Args:
            sums: over everything added since.
            at: steps completed.
            steps: at which the schedule of the learning rate ends; None: ``train.steps``.
        """
        count = max(sums.get("tokens", 0.0), 1.0)
        update = self.optimizer.step(count, at, steps)
        mean = {name: sums.get(name, 0.0) / count for name in _SUMS}
        variance = mean["returns_squared"] - mean["returns"] ** 2
        # Returns that are all alike have a variance of rounding errors only.
        explained = 1.0 - mean["error"] / variance if variance > 1e-12 else 0.0
        return {
            "critic/vf_loss": mean["loss"],
            "critic/vf_clipfrac": mean["clipped"],
            "critic/vpred_mean": mean["values"],
            "critic/vf_explained_var": explained,
            "critic/grad_norm": update["grad_norm"],
            "critic/lr": update["lr"],
        }

    def slices(self) -> Iterator[Slice]:
        """Yield weights, moments and masters; every rank holds all of them."""
        for name, parameter in self.module.named_parameters():
            yield Slice.whole(_WEIGHT + name, parameter)
        for piece in self.optimizer.slices():
            yield piece.below(OPTIMIZER)

    def check_shapes(self, state: Mapping[str, tuple[int, ...]]) -> None:
        """Check the shapes of a stored state.

        Raises:
            UserError: if it belongs to another model, or has no critic.
        """
        own = {_WEIGHT + name: tuple(p.shape) for name, p in self.module.named_parameters()}
        if own != {name: shape for name, shape in state.items() if name.startswith(_WEIGHT)}:
            raise UserError(
                "the checkpoint's critic belongs to another model, or there is none; "
                "begin a new run"
            )
        self.optimizer.check_shapes(shapes_below(OPTIMIZER, state))
