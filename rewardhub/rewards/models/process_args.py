"""The arguments of process rewards; nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from broker.settings.config import Device, ModelPath, Section
from rewardhub.rewards.thinking import Thinking

# Fields of the arguments of both rewards that need no trust.
_HARMLESS: Final = (
    "credit", "scale", "offset", "system_prompt", "max_length", "batch_size", "device", "dtype",
    "num_threads", "timeout_s",
)  # fmt: skip
NonEmpty = Annotated[str, Field(min_length=1)]


class ModelArgs(Section):
    """What process rewards have in common."""

    path: ModelPath  # folder or hub name
    # turn: one score for each turn of the policy; episode: one for all of them
    credit: Literal["turn", "episode"] = "turn"
    scale: float = 1.0  # of each score, and after it
    offset: float = 0.0
    # replaces the domain's; null: the domain's own
    system_prompt: str | None = None
    # tokens; steps beyond count as wrong, tokens beyond as 0, with the note ``truncated``
    max_length: PositiveInt = 4096
    batch_size: PositiveInt = 8
    device: Device = "auto"  # auto: cuda if there is a GPU
    # auto: bfloat16 on a GPU, else float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: PositiveInt = 1  # on a CPU
    timeout_s: PositiveFloat = 120.0  # one score, waiting for its batch included

    @property
    def max_concurrency(self) -> int:
        """Samples at once in one process: the current batch and the next."""
        return 2 * self.batch_size


class ProcessRewardArgs(ModelArgs):
    """Arguments of the reward ``process_reward``."""

    harmless = (
        *_HARMLESS, "form", "label", "separator", "joiner", "good_token", "bad_token", "split",
        "aggregate", "template", "thinking",
    )  # fmt: skip

    # classifier: an output for each token, read at the end of each separator; tags: a language
    # model that says good_token or bad_token there
    form: Literal["classifier", "tags"] = "classifier"
    label: NonNegativeInt = 1  # classifier with several outputs: the class of right steps
    separator: NonEmpty = "<extra_0>"  # what the model reads at the end of each step
    joiner: str = ""  # what it reads between the separator and the next step
    good_token: NonEmpty = "+"
    bad_token: NonEmpty = "-"
    split: NonEmpty = "\n\n"  # text between the steps of a response
    # of the scores of steps
    aggregate: Literal["min", "product", "last", "mean"] = "min"
    # replaces the chat template; null: the model's own, without one "{prompt}\n{response}"
    template: str | None = None
    thinking: Thinking = "keep"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.good_token == self.bad_token:
            raise ValueError(f"good_token and bad_token are both {self.good_token!r}")
        if self.template is not None and self.template.count("{response}") != 1:
            raise ValueError("template needs {response} once; also allowed: {prompt}")
        return self


class ImplicitRewardArgs(ModelArgs):
    """Arguments of the reward ``implicit_reward``."""

    harmless = (*_HARMLESS, "beta", "aggregate")

    reference: ModelPath  # folder or hub name of the model that training started from
    beta: PositiveFloat = 0.1  # as in its training, dpo.beta
    # of the tokens of a turn, or of the episode
    aggregate: Literal["sum", "mean"] = "sum"
