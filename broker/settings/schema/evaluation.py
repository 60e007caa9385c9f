"""The sections ``eval`` and ``warm_start``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from broker.settings.config import DomainSection, Section


class WarmStartSection(Section):
    """Supervised steps before the first version, for models built by this project."""

    steps: NonNegativeInt = 0  # 0: none
    # whose demonstrations; "*": those of every trained domain; empty: of the only one
    domain: str = ""
    episodes: PositiveInt = 512  # demonstrations of each, written by ``envhub demos``
    noise: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of random moves in them
    data: str | None = None  # a JSONL of conversations instead of demonstrations
    # conversations per step
    batch_size: PositiveInt = 32
    # learning rate
    lr: PositiveFloat = 1e-3


class EvalSection(Section):
    """Evaluation on held-out tasks, without stopping training."""

    every_steps: NonNegativeInt = 0  # 0: never
    # names of those that are evaluated; null: all
    domains: Annotated[list[str], Field(min_length=1)] | None = None
    tasks: PositiveInt | None = None  # per domain; null: 256, or the fewest that a domain has
    group_size: PositiveInt = 1  # episodes per task
    # of sampling; 0: greedy
    temperature: NonNegativeFloat = 1.0
    # also evaluate before the first step, which then waits until this is done
    at_start: bool = True
    baseline: str = ""  # policy measured once for comparison, for example ``random``; empty: none
    # other policies, measured on the same tasks at every evaluation
    against: list[str] = Field(default_factory=list)
    # engine_args of the server of ``random`` in ``rlearner up``
    baseline_args: dict[str, Any] = Field(default_factory=dict)
    # without a new result, an evaluation ends after this; null: derived, see
    # broker.settings.timeouts
    timeout_s: PositiveFloat | None = None

    def of_domain(self, domain: DomainSection) -> EvalSection:
        """Return the section with the values of a domain's own section ``eval``."""
        own = {name: value for name, value in domain.eval if value is not None}
        return self.model_copy(update=own)
