"""Low-rank adapters by peft: each linear layer keeps its frozen weight W and trains two small factors.

A layer computes ``x W' + (x A') B' * alpha / rank`` (Hu et al., LoRA, 2021, arXiv 2106.09685). Merged weights are
``W + B A * alpha / rank``, computed in float32 and cast to W's dtype. The factors are always float32.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from broker.contract import wire
from broker.errors import ConfigError
from broker.weights.adapter import PREFIX, merge
from learner.backends.parts.hugging_face import ADAPTER_WEIGHTS
from learner.config import LoraSection

_NAME: Final = "default"  # peft's name of a single adapter
_CONFIG: Final = "adapter_config.json"

Find = Callable[[str], Tensor]  # returns a tensor of the module by the module's name


class LoraAdapters:
    """Injects factors into a model, whose class and arguments stay the same.

    Args:
        module: a transformers model, which is frozen.
        seed: of the factors A; the factors B start at 0, so the model's results stay the same.
        base: folder or hub name of the frozen weights, for the adapter's configuration.

    Attributes:
        names: Hugging Face's names of the model's tensors by the module's names, without factors.

    Raises:
        ConfigError: if peft is missing, or ``target_modules`` names no linear layers.
    """

    def __init__(self, module: nn.Module, section: LoraSection, seed: int, base: str) -> None:
        peft = _peft(section)
        targets = _targets(module, section)
        self._scale = section.alpha / section.rank
        self._config = peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=section.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(self._config, module)
        kind = peft.tuners.lora.LoraLayer
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, kind)}
        self._layers: list[Any] = list(layers.values())
        self._dropouts = [layer.lora_dropout[_NAME] for layer in self._layers if section.dropout]
        module.requires_grad_(False)
        for layer in self._layers:
            for factors in (layer.lora_A, layer.lora_B):
                factors[_NAME].to(torch.float32).requires_grad_(True)
        module.eval()
        self._factors = {f"{n}.weight": (f"{n}.lora_A.{_NAME}.weight", f"{n}.lora_B.{_NAME}.weight") for n in layers}
        own = {name for pair in self._factors.values() for name in pair}
        self.names = {name: name.replace(".base_layer.", ".") for name in module.state_dict() if name not in own}
        self._found = {plain: name for name, plain in self.names.items()}

    def merged(self, name: str, find: Find) -> Tensor:
        """Return a weight by Hugging Face's name, merged as in a model without adapters."""
        weight = find(self._found[name])
        if name not in self._factors:
            return weight
        a, b = (find(factor) for factor in self._factors[name])
        return merge(weight, a, b, self._scale)

    def parts(self, name: str) -> list[str]:
        """Return the names of the module's tensors that ``merged`` reads."""
        return [self._found[name], *self._factors.get(name, ())]

    def shown(self, base: str) -> wire.Adapter:
        """Describe the adapters for an offer; ``base`` is the digest of the weights below them."""
        targets = sorted(self._config.target_modules)
        return wire.Adapter(base=base, targets=targets, rank=self._config.r, scale=self._scale)

    def factors(self, find: Find) -> dict[str, Tensor]:
        """Return all live factors by peft's names."""
        return {exported_name(name): find(name) for pair in self._factors.values() for name in pair}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model computes with the frozen weights alone; only for passes without gradient."""
        self._disable(True)
        try:
            yield
        finally:
            self._disable(False)

    def _disable(self, disabled: bool) -> None:
        for layer in self._layers:
            # enable_adapters would also change requires_grad of the factors, which FSDP reads once, in the first pass.
            layer._disable_adapters = disabled

    @contextmanager
    def dropping(self, seed: Callable[[], int]) -> Iterator[None]:
        """Within it the adapters' dropout is active, if there is any, with a seed for itself."""
        if self._dropouts:
            torch.manual_seed(seed())
        for dropout in self._dropouts:
            dropout.train()
        try:
            yield
        finally:
            for dropout in self._dropouts:
                dropout.eval()

    def save_config(self, folder: Path) -> None:
        """Write peft's configuration; callable from any thread."""
        folder.mkdir(exist_ok=True)
        self._config.save_pretrained(str(folder))

    @torch.no_grad()
    def load(self, folder: Path, find: Find) -> None:
        """Restore what ``save`` wrote, bit for bit.

        Raises:
            ConfigError: if the folder has no adapters, or they were trained with other settings.
        """
        from safetensors.torch import load_file

        if not (folder / _CONFIG).is_file():
            own = {"rank": self._config.r, "alpha": self._config.lora_alpha}
            raise ConfigError("train.lora", own, f"null: {folder.parent} was trained without adapters")
        said = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        for key, name in (("rank", "r"), ("alpha", "lora_alpha"), ("target_modules", "target_modules")):
            values = (said.get(name), getattr(self._config, name))
            before, now = (sorted(value) if isinstance(value, list | set) else value for value in values)
            if before != now:
                allowed = f"{before}, as in {folder.parent}: adapters cannot change their shape"
                raise ConfigError(f"train.lora.{key}", now, allowed)
        held = load_file(str(folder / ADAPTER_WEIGHTS))
        for name, factor in self.factors(find).items():
            factor.copy_(held[name])


class MergedWeights(Mapping[str, Tensor]):
    """Weights by Hugging Face's names, each merged when it is read."""

    def __init__(self, names: Sequence[str], find: Find) -> None:
        self._names, self._find = dict.fromkeys(names), find

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _peft(section: LoraSection) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import peft
            import peft.tuners.lora
    except ModuleNotFoundError as error:
        allowed = f"null, for the package {error.name} is not installed: pip install 'rlearner[lora]'"
        raise ConfigError("train.lora", section.model_dump(), allowed) from None
    return peft


def _targets(module: Any, section: LoraSection) -> list[str]:
    """Return the last names of the linear layers that get adapters.

    Raises:
        ConfigError: if no inner linear layer has a name, or the output layer has it.
    """
    head, linear = module.get_output_embeddings(), dict[str, bool]()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            last = name.rpartition(".")[2]
            linear[last] = linear.get(last, False) or layer is head
    inner = sorted(name for name, is_head in linear.items() if not is_head)
    wanted = inner if section.target_modules == "all-linear" else sorted(set(section.target_modules))
    odd = [name for name in wanted if name not in inner]
    if odd or not wanted:
        allowed = f"linear layers that this model has: {', '.join(inner) or 'none at all'}"
        raise ConfigError("train.lora.target_modules", odd or "all-linear", allowed)
    return wanted


def exported_name(name: str) -> str:
    """Return peft's name of a factor by the module's."""
    return PREFIX + name.replace(f".{_NAME}.", ".")
