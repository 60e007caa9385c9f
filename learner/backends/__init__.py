"""Training backends by name; a new one is one file plus one line here. Resolved by ``broker.settings.registry.resolve``."""

from __future__ import annotations

from typing import Final

BACKENDS: Final[dict[str, str]] = {
    "torch": "learner.backends.torch:TorchBackend",
    "ddp": "learner.backends.ddp:DdpBackend",
    "fsdp2": "learner.backends.fsdp2:Fsdp2Backend",
    "deepspeed": "learner.backends.deepspeed:DeepspeedBackend",
    "megatron": "learner.backends.megatron.backend:MegatronBackend",
}

ONE_RANK: Final = frozenset({"torch"})  # train in one process; what settings are checked by, without importing anything
_PLAIN: Final = ("torch", "ddp", "fsdp2")
# Which of them know an option of the section train, and a critic.
KNOW: Final[dict[str, tuple[str, ...]]] = {
    "lora": (*_PLAIN, "deepspeed", "megatron"),
    "activation_offload": (*_PLAIN, "deepspeed", "megatron"),
    "optimizer_offload": (*_PLAIN, "megatron"),
    "compile": (*_PLAIN, "deepspeed", "megatron"),
    "critic": (*_PLAIN, "deepspeed", "megatron"),
}
