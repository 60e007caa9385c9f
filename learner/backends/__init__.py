"""Training backends by name, resolved by ``broker.settings.registry.resolve``."""

from __future__ import annotations

from typing import Final

BACKENDS: Final[dict[str, str]] = {
    "torch": "learner.backends.torch:TorchBackend",
    "ddp": "learner.backends.ddp:DdpBackend",
    "fsdp2": "learner.backends.fsdp2:Fsdp2Backend",
    "deepspeed": "learner.backends.deepspeed.backend:DeepspeedBackend",
    "megatron": "learner.backends.megatron.backend:MegatronBackend",
}

# Train in one process. Listed here because `check` must know it without importing torch.
SINGLE_PROCESS_BACKENDS: Final = frozenset({"torch"})
# Backends whose models are plain PyTorch modules.
_PLAIN: Final = ("torch", "ddp", "fsdp2")
# For each option of the section train, and for a critic, the backends that support it.
SUPPORTED_OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "lora": (*_PLAIN, "deepspeed", "megatron"),
    "activation_offload": (*_PLAIN, "deepspeed", "megatron"),
    "optimizer_offload": (*_PLAIN, "megatron"),
    "compile": (*_PLAIN, "deepspeed", "megatron"),
    "critic": (*_PLAIN, "deepspeed", "megatron"),
}
