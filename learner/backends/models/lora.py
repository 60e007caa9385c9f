"""Low-rank adapters by peft: a linear layer freezes its weight W and trains two small factors.

A layer computes ``x W' + (x A') B' * alpha / rank`` (Hu et al., LoRA, 2021, arXiv 2106.09685).
Merged weights are ``W + B A * alpha / rank``, computed in float32 and cast to W's dtype. The
factors are always float32.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from broker.contract import wire
from broker.errors import ConfigError
from broker.weights.adapter import PREFIX, factor_names, merge, name_pattern
from learner.backends.models.lora_targets import find_targets
from learner.backends.parts.hugging_face import ADAPTER_WEIGHTS
from learner.config import LoraSection

# peft's name of a single adapter
_NAME: Final = "default"
_CONFIG: Final = "adapter_config.json"

# Returns a tensor of the module by the module's name.
Find = Callable[[str], Tensor]


class LoraAdapters:
    """Injects factors into a model, whose class and arguments stay the same.

    Args:
        module: a transformers model, which is frozen.
        seed: of the factors A; the factors B start at 0, so the model's results stay the same.
        base: folder or hub name of the frozen weights, for the adapter's configuration.
        extra_modules: linear layers to adapt besides those that the section names, such as a
            classifier's head.

    Attributes:
        names: Hugging Face's names of the model's tensors by the module's names, without factors.
        exported_names: peft's names of the factors by their names here, see
            ``broker.weights.adapter``.

    Raises:
        ConfigError: if peft is missing, or cannot adapt what ``target_modules`` names.
    """

    def __init__(
        self,
        module: nn.Module,
        section: LoraSection,
        seed: int,
        base: str,
        *,
        extra_modules: Sequence[str] = (),
    ) -> None:
        peft = _import_peft(section)
        targets = find_targets(module, section)
        modules = [*targets.modules, *extra_modules]
        self._scale = section.alpha / section.rank
        self._config = peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=section.dropout,
            target_modules=modules,
            target_parameters=targets.parameters or None,
            # peft would train the head of a SEQ_CLS model whole, next to its adapter.
            task_type=None if extra_modules else "CAUSAL_LM",
            base_model_name_or_path=base,
        )
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(self._config, module)
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            allowed = f"null: peft cannot adapt {type(module).__name__}: {reason}"
            raise ConfigError("train.lora", section.model_dump(), allowed) from error
        self._config.target_modules = modules
        self._config.target_parameters = targets.parameters or None
        kind = peft.tuners.lora.LoraLayer
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, kind)}
        self._layers: list[Any] = list(layers.values())
        self._dropouts = [layer.lora_dropout[_NAME] for layer in self._layers if section.dropout]
        module.requires_grad_(False)
        for layer in self._layers:
            for factors in (layer.lora_A, layer.lora_B):
                factors[_NAME].to(torch.float32).requires_grad_(True)
        module.eval()
        self._factors: dict[str, tuple[str, str]] = {}
        self._transposed: set[str] = set()
        for name, layer in layers.items():
            weight = f"{plain_name(name)}.{getattr(layer, 'parameter_name', 'weight')}"
            self._factors[weight] = (
                f"{name}.lora_A.{_NAME}.weight",
                f"{name}.lora_B.{_NAME}.weight",
            )
            if getattr(layer, "num_experts", 1) > 1 and getattr(
                layer.get_base_layer(), "is_transposed", False
            ):
                self._transposed.add(name_pattern(weight))
        self.names = {name: plain_name(name) for name in module.state_dict() if not is_factor(name)}
        self._module_names = {plain: name for name, plain in self.names.items()}
        self.exported_names = {
            factor: exported_name(own)
            for weight, pair in self._factors.items()
            for factor, own in zip(factor_names(weight), pair, strict=True)
        }

    @property
    def adapted(self) -> Collection[str]:
        """Hugging Face's names of the weights that have factors."""
        return self._factors.keys()

    def merged(self, name: str, find: Find) -> Tensor:
        """Return a weight by Hugging Face's name, merged as in a model without adapters."""
        weight = find(self._module_names[name])
        if name not in self._factors:
            return weight
        a, b = (find(factor) for factor in self._factors[name])
        return merge(weight, a, b, self._scale, transposed=name_pattern(name) in self._transposed)

    def parts(self, name: str) -> list[str]:
        """Return the names of the module's tensors that ``merged`` reads."""
        return [self._module_names[name], *self._factors.get(name, ())]

    def describe(self, base: str) -> wire.Adapter:
        """Describe the adapters for an offer; ``base`` is the digest of the weights below them."""
        targets = sorted({name_pattern(name) for name in self._factors})
        return wire.Adapter(
            base=base,
            targets=targets,
            rank=self._config.r,
            scale=self._scale,
            transposed=sorted(self._transposed),
        )

    def factors(self, find: Find) -> dict[str, Tensor]:
        """Return all live factors by name, see ``broker.weights.adapter.factor_names``."""
        return {
            factor: find(own)
            for weight, pair in self._factors.items()
            for factor, own in zip(factor_names(weight), pair, strict=True)
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the frozen weights alone; only for passes without gradient."""
        self._disable(True)
        try:
            yield
        finally:
            self._disable(False)

    def _disable(self, disabled: bool) -> None:
        for layer in self._layers:
            # enable_adapters would also change requires_grad of the factors, which FSDP reads only
            # in the first pass.
            layer._disable_adapters = disabled

    @contextmanager
    def dropping(self, seed: Callable[[], int]) -> Iterator[None]:
        """Activate the adapters' dropout, if there is any, with a seed of its own."""
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
            raise ConfigError(
                "train.lora", own, f"null: {folder.parent} was trained without adapters"
            )
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        for key, name in (
            ("rank", "r"),
            ("alpha", "lora_alpha"),
            ("target_modules", "target_modules"),
            ("target_modules", "target_parameters"),
        ):
            saved = config.get(name)
            current = getattr(self._config, name)
            # peft writes sets as lists, in any order.
            saved, current = (
                sorted(value) if isinstance(value, list | set) else value
                for value in (saved, current)
            )
            if saved != current:
                allowed = f"{saved}, as in {folder.parent}: adapters cannot change their shape"
                raise ConfigError(f"train.lora.{key}", current, allowed)
        factors = load_file(str(folder / ADAPTER_WEIGHTS))
        for name, factor in self.factors(find).items():
            factor.copy_(factors[self.exported_names[name]])


class MergedWeights(Mapping[str, Tensor]):
    """Weights by Hugging Face's names, each merged when it is read."""

    def __init__(self, names: Sequence[str], find: Find) -> None:
        self._names = dict.fromkeys(names)
        self._find = find

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _import_peft(section: LoraSection) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import peft
            import peft.tuners.lora
    except ModuleNotFoundError as error:
        allowed = (
            f"null, for the package {error.name} is not installed: pip install 'rlearner[lora]'"
        )
        raise ConfigError("train.lora", section.model_dump(), allowed) from None
    return peft


def plain_name(name: str) -> str:
    """Return the name that a tensor of an adapted module has without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def is_factor(name: str) -> bool:
    """Return whether a tensor of an adapted module is a factor."""
    return ".lora_" in name


def exported_name(name: str) -> str:
    """Return peft's name of a factor by the module's."""
    return PREFIX + name.replace(f".{_NAME}.", ".")
