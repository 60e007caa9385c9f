"""Chooses the weights that get adapters: matrices of the language model that multiply tokens.

Vision and audio towers get none, because only the language model is trained. Nor do routers: a
small change of theirs sends tokens to other experts, and servers, which sum in another order, may
choose differently.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from broker.errors import ConfigError
from broker.weights.adapter import name_pattern
from learner.config import LoraSection

_ROUTER: Final = re.compile(r"(^|\.)(router|gate|wg|shared_expert_gate|modality_router)(\.|$)")
_TOWER: Final = re.compile("vision|visual|audio|projector")
# Of the weights. The log line sums up layers with less, or it would name every norm.
SMALLEST_SHARE: Final = 0.005
# Mamba multiplies by the weight without calling the layer, so its adapters would be ignored.
_UNCALLED: Final = ("dt_proj",)
_WEIGHT: Final = ".weight"


@dataclass(frozen=True)
class AdapterTargets:
    """What peft is to adapt, as its configuration names it.

    Attributes:
        modules: of linear layers, for ``target_modules``.
        parameters: of weights, for ``target_parameters``: stacked experts, and linear layers whose
            names peft takes for those of experts.
    """

    modules: list[str]
    parameters: list[str]


@dataclass(frozen=True)
class _Candidate:
    """A matrix of the language model, or its stacked experts.

    Attributes:
        name: of the layer, or of the stacked parameter.
        problem: why peft cannot adapt it; empty if it can.
    """

    name: str
    stacked: bool
    problem: str = ""

    @property
    def last(self) -> str:
        """The name in ``train.lora.target_modules``."""
        parts = self.name.split(".")
        if self.stacked and parts[-1] == "weight" and len(parts) > 1:
            return parts[-2]
        return parts[-1]

    @property
    def parameter(self) -> str:
        """The weight's name."""
        if self.stacked:
            return self.name
        return self.name + _WEIGHT


def find_targets(module: Any, section: LoraSection) -> AdapterTargets:
    """Return what peft is to adapt in a transformers model.

    Raises:
        ConfigError: if no layer has a name, the output layer has it, or peft cannot adapt it as
            configured.
    """
    candidates = list(_find_candidates(module))
    usable = sorted({candidate.last for candidate in candidates if not candidate.problem})
    if not usable:
        problems = sorted(
            {f"{candidate.last}: {candidate.problem}" for candidate in candidates}
        ) or ["it has no linear layers"]
        allowed = f"null: peft can adapt no layer of {type(module).__name__}; {'; '.join(problems)}"
        raise ConfigError("train.lora", section.model_dump(), allowed)
    if section.target_modules == "all-linear":
        targets = _linear_candidates(candidates)
    else:
        targets = _named_candidates(candidates, section)
    if not targets:
        raise ConfigError(
            "train.lora.target_modules", "all-linear", f"names out of {', '.join(usable)}"
        )
    renamed = _renamed_by_peft(
        module, {candidate.last for candidate in targets if not candidate.stacked}
    )
    by_weight = [
        candidate for candidate in targets if candidate.stacked or candidate.last in renamed
    ]
    if by_weight and section.dropout:
        names = ", ".join(sorted({candidate.last for candidate in by_weight}))
        allowed = (
            f"0, or target_modules without {names}: peft adapts stacked experts without dropout"
        )
        raise ConfigError("train.lora.dropout", section.dropout, allowed)
    layers = [candidate.name for candidate in targets if candidate not in by_weight]
    weights = [candidate.parameter for candidate in by_weight]
    return AdapterTargets(
        _short_names(layers, [name for name, _ in module.named_modules()], parts=1),
        _short_names(
            weights, [name for name, _ in module.named_parameters(remove_duplicate=False)], parts=2
        ),
    )


def describe_share(sizes: Mapping[str, int], adapted: Collection[str]) -> str:
    """Return in one line what share of the weights has adapters, and which weights have none.

    Args:
        sizes: elements of all weights, by name.
    """
    total = max(1, sum(sizes.values()))
    with_adapters = Counter[str]()
    without_adapters = Counter[str]()
    for name, size in sizes.items():
        layer = name_pattern(name).removesuffix(_WEIGHT).split(".")
        if name in adapted:
            with_adapters[".".join(layer[-2:] if "experts" in layer else layer[-1:])] += size
        else:
            without_adapters[_outer_name(layer)] += size
    names = ", ".join(sorted(with_adapters))
    line = f"adapters on {with_adapters.total() / total:.1%} of the weights ({names})"
    shares = {
        name: size / total
        for name, size in without_adapters.most_common()
        if size / total >= SMALLEST_SHARE
    }
    shares["other weights"] = without_adapters.total() / total - sum(shares.values())
    return f"{line}; none on {', '.join(f'{name} {share:.1%}' for name, share in shares.items())}"


def _outer_name(layer: list[str]) -> str:
    """Return the tower that a weight without adapters belongs to, or else its layer's name."""
    tower = next((part for part in layer if _TOWER.search(part)), "")
    return tower or ".".join(part for part in layer[-2:] if part not in ("*", "model"))


def _find_candidates(module: Any) -> Iterator[_Candidate]:
    """Yield the matrices of the language model but the output layer's."""
    head = module.get_output_embeddings()
    text = set(module.get_decoder().modules())
    places = Counter(id(layer) for _, layer in module.named_modules(remove_duplicate=False))
    for name, layer in module.named_modules():
        if layer not in text or layer is head:
            continue
        if isinstance(layer, nn.Linear):
            yield _Candidate(name, False, _find_problem(module, name, layer, places[id(layer)]))
        else:
            for key, weight in layer.named_parameters(recurse=False):
                if weight.ndim == 3 and "experts" in type(layer).__name__.lower():
                    shared = "it is used in several places" if places[id(layer)] > 1 else ""
                    yield _Candidate(f"{name}.{key}", True, shared)


def _find_problem(module: Any, name: str, layer: nn.Linear, places: int) -> str:
    """Return why peft cannot adapt a linear layer."""
    if type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__} computes more than a product"
    if places > 1:
        return "it is used in several places"
    if (last := name.rpartition(".")[2]) in _UNCALLED:
        return "the model reads its weight without calling it"
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    config = LoraConfig(target_modules=[name])
    try:
        LoraModel._check_target_module_compatiblity(None, config, module, last)
    except ValueError as error:
        return " ".join(str(error).split())
    return ""


def _linear_candidates(candidates: Collection[_Candidate]) -> list[_Candidate]:
    return [
        candidate
        for candidate in candidates
        if not candidate.problem and not _ROUTER.search(candidate.name)
    ]


def _named_candidates(candidates: Collection[_Candidate], section: LoraSection) -> list[_Candidate]:
    """Return the candidates with the configured names.

    Raises:
        ConfigError: if there is none of a name, or peft cannot adapt it.
    """
    names = set(section.target_modules)
    usable = {candidate.last for candidate in candidates if not candidate.problem}
    for candidate in candidates:
        if candidate.last in names and candidate.problem:
            reason = f"{candidate.name}: {candidate.problem}"
            allowed = f"layers that peft can adapt: {', '.join(sorted(usable))}; {reason}"
            raise ConfigError("train.lora.target_modules", candidate.last, allowed)
    if odd := sorted(names - usable):
        allowed = f"linear layers that this model has: {', '.join(sorted(usable)) or 'none at all'}"
        raise ConfigError("train.lora.target_modules", odd, allowed)
    return [candidate for candidate in candidates if candidate.last in names]


def _renamed_by_peft(module: Any, names: Collection[str]) -> set[str]:
    """Return the names of linear layers that peft replaces by those of stacked experts.

    Adapters of transformers 4 named single experts, whose layers have the names of shared experts
    and dense layers.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    renamed: set[str] = set()
    for name in names:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, module, conversions=None)
        except ValueError:
            # It needs the other layers of the experts, too.
            renamed.add(name)
        else:
            if name not in config.target_modules:
                renamed.add(name)
    return renamed


def _short_names(selected: Collection[str], every: Collection[str], *, parts: int) -> list[str]:
    """Return the last parts of names where only chosen ones end so, otherwise whole names."""
    own = set(selected)

    def tail(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    ambiguous = {tail(name) for name in every if name not in own}
    return sorted({name if tail(name) in ambiguous else tail(name) for name in own})
