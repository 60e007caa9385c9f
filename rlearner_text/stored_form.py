"""The form in which a model's files hold its weights, where transformers holds them otherwise.

transformers 5 renames tensors and stacks experts when it loads a model, and reverts that when it saves one. Files may
also hold tensors that a causal language model leaves out: a vision tower, layers that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor


def use_conversions(
    module: Any, stored: Collection[str], names: Collection[str], untrained: Collection[str] = ()
) -> list[str]:
    """Have transformers save a model under the names of some files, as if it had been loaded from them.

    Args:
        module: a transformers model, which may be on the meta device, empty or sharded.
        stored: names in the files.
        names: of the model's tensors, tied ones under each of their names.
        untrained: those of the names that never change.

    Returns:
        Names in the files of what the model leaves out or never changes, sorted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(module)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix, own, same = module.base_model_prefix, dict.fromkeys(names, True), frozenset(untrained)
    kept = []
    for name in stored:
        renamed, _ = rename_source_key(name, renamings, converters, prefix, own)
        if renamed not in own:  # then it is not to be renamed, or not held at all
            renamed = rename_source_key(name, [], [], prefix, own)[0]
        if renamed not in own or renamed in same:
            kept.append(name)
    module._weight_conversions = [each for each in conversions if each.was_used()]  # as ``from_pretrained`` sets it
    return sorted(kept)


def keeps_names(module: Any, shapes: Mapping[str, Tensor]) -> bool:
    """Return whether transformers stores the weights of a model as they are; others it renames, splits or merges."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    conversions = getattr(module, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(module, add_legacy=False)
    if not all(isinstance(each, WeightRenaming) for each in conversions):
        return False
    return not conversions or set(stored_form(module, shapes)) == set(shapes)


def stored_form(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the files hold them: views, where nothing but names, slices and the order of axes changes."""
    from transformers.core_model_loading import revert_weight_conversion

    form: dict[str, Tensor] = revert_weight_conversion(module, dict(tensors))
    return form


def stored_groups(module: Any, shapes: Mapping[str, Tensor]) -> list[tuple[list[str], dict[str, Tensor]]]:
    """Return which weights are converted together, and what they become; single ones if that is possible.

    Args:
        shapes: the model's weights on the meta device.
    """
    whole = stored_form(module, shapes)
    try:
        groups = [([name], stored_form(module, {name: tensor})) for name, tensor in shapes.items()]
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError):  # it needs several weights at once
        return [(list(shapes), whole)]
    parts = {name: tensor.shape for _, form in groups for name, tensor in form.items()}
    same = parts == {name: tensor.shape for name, tensor in whole.items()}
    return groups if same and len(parts) == sum(len(form) for _, form in groups) else [(list(shapes), whole)]
