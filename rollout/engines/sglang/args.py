"""Settings of the engine ``sglang``; imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from rollout.engines.args import EngineArgs

# its port is on loopback and requires a key
OURS: Final = ("host", "port", "config", "api-key", "admin-api-key")


def _flag(name: str) -> str:
    if name in OURS:
        raise ValueError(f"any option but {', '.join(OURS)}, which the engine sets")
    return name


Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$"), AfterValidator(_flag)]


class SGLangArgs(EngineArgs):
    """Startup of the SGLang server and transfer of new weights."""

    harmless = (
        "tensor_parallel", "data_parallel", "mem_fraction_static", "deterministic", "weights",
        "start_timeout_s", "update_timeout_s",
    )  # fmt: skip

    processed_logprobs: ClassVar[bool] = True
    weights_memory: ClassVar[Literal["device", "host"]] = "host"
    workers_receive: ClassVar[bool] = True
    workers_need: ClassVar[str] = "rlearner in SGLang's environment"
    sleeps: ClassVar[bool] = True
    needs_gpu: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("sglang",)
    scores_contexts: ClassVar[bool] = True

    # start command; None: this Python with -m sglang.launch_server
    command: list[str] | None = None
    tensor_parallel: PositiveInt = 1  # GPUs that share one copy of the model
    data_parallel: PositiveInt | None = None  # copies; None: as many as the visible GPUs hold
    # of a GPU's memory for weights and KV; None: SGLang decides
    mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    # SGLang's deterministic inference, makes request seeds effective; slower
    deterministic: bool = False
    # a file in memory that it reads, or a gloo group that it joins
    weights: Literal["disk", "distributed"] = "disk"
    # folder of that file; None: /dev/shm if it fits, else the temporary folder
    weights_dir: str | None = None
    # options, no dashes; true: no value
    flags: dict[Flag, str | int | float | bool] = Field(default_factory=dict)
    start_timeout_s: PositiveFloat = 900.0  # loading, compiling, warming up
    update_timeout_s: PositiveFloat = 300.0  # one update of the weights
