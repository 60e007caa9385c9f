"""The arguments of the reward ``reward_model``; nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from broker.settings.config import Device, ModelPath, Section


class RewardModelArgs(Section):
    """Arguments of the reward ``reward_model``."""

    harmless = (
        "head", "label", "activation", "scale", "offset", "clip", "system_prompt", "template",
        "max_length", "batch_size", "device", "dtype", "num_threads", "timeout_s",
    )  # fmt: skip

    path: ModelPath  # folder or hub name
    # auto: by the architectures in its config.json
    head: Literal["auto", "classifier", "value"] = "auto"
    # the class of a classifier whose logit, or probability with softmax, is used
    label: NonNegativeInt = 0
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    scale: float = 1.0  # the reward is scale * output + offset, within clip
    offset: float = 0.0
    # [lowest, highest]
    clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    system_prompt: str = ""
    template: str = "{prompt}\n{response}"  # if the model has no chat template
    # tokens; longer texts lose their beginning, with the note ``truncated``
    max_length: PositiveInt = 4096
    batch_size: PositiveInt = 16
    device: Device = "auto"  # auto: cuda if there is a GPU
    # auto: bfloat16 on a GPU, else float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    num_threads: PositiveInt = 1  # on a CPU
    trust_remote_code: bool = False
    timeout_s: PositiveFloat = 120.0  # one score, waiting for its batch included

    @property
    def max_concurrency(self) -> int:
        """Samples at once in one process: the current batch and the next."""
        return 2 * self.batch_size

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(f"expected clip as [lowest, highest], got {self.clip}")
        return self
