"""The settings of the engine ``sglang``; nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.engines.args import EngineArgs

Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]


class SGLangArgs(EngineArgs):
    """How the SGLang server is started and how new weights reach it."""

    processed_logprobs: ClassVar[bool] = True
    weights_memory: ClassVar[Literal["device", "host"]] = "host"
    needs_gpu: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("sglang",)

    command: list[str] | None = (
        None  # what starts it, in place of this Python and -m sglang.launch_server; it may be of another environment
    )
    tensor_parallel: PositiveInt = 1  # GPUs that share one copy of the model
    data_parallel: PositiveInt | None = None  # copies; None: as many as the visible GPUs hold
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None  # of a GPU's memory for weights and KV; None: SGLang decides
    deterministic: bool = False  # its deterministic inference, with which a request's seed decides; slower
    weights: Literal["disk", "distributed"] = "disk"  # a file in memory that it reads, or a gloo group that it joins
    weights_dir: str | None = None  # where that file is; None: /dev/shm where there is room, else the folder for temporary files
    flags: dict[Flag, str | int | float | bool] = Field(default_factory=dict)  # its further options: name without dashes; true: no value
    start_timeout_s: PositiveFloat = 900.0  # loading, compiling, warming up
    update_timeout_s: PositiveFloat = 300.0  # one update of the weights
