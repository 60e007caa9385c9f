"""The form in which a model's files hold its weights, where transformers holds them otherwise.

transformers 5 renames tensors and stacks experts when it loads a model, and reverts that when it
saves one. Files may also hold tensors that a causal language model leaves out: a vision tower,
layers that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

# name in the files, shape, strides, and first element in the weight
View = tuple[str, list[int], list[int], int]


def use_conversions(
    module: Any,
    stored_names: Collection[str],
    names: Collection[str],
    untrained: Collection[str] = (),
) -> list[str]:
    """Have transformers save a model under the names of some files, as if loaded from them.

    Args:
        module: a transformers model, which may be on the meta device, empty or sharded.
        stored_names: names in the files.
        names: of the model's tensors, tied ones under each of their names.
        untrained: those of the names that never change.

    Returns:
        Names in the files of what the model leaves out or never changes, sorted.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(module)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [
        conversion for conversion in conversions if isinstance(conversion, WeightConverter)
    ]
    prefix = module.base_model_prefix
    own = dict.fromkeys(names, True)
    unchanged = frozenset(untrained)
    selected = []
    for name in stored_names:
        renamed, _ = rename_source_key(name, renamings, converters, prefix, own)
        # Then it is not to be renamed, or not held at all.
        if renamed not in own:
            renamed = rename_source_key(name, [], [], prefix, own)[0]
        if renamed not in own or renamed in unchanged:
            selected.append(name)
    # as ``from_pretrained`` sets it
    module._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
    return sorted(selected)


def keeps_names(module: Any, shapes: Mapping[str, Tensor]) -> bool:
    """Return whether transformers stores a model's weights without renaming or splitting them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    conversions = getattr(module, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(module, add_legacy=False)
    if not all(isinstance(conversion, WeightRenaming) for conversion in conversions):
        return False
    return not conversions or set(stored_form(module, shapes)) == set(shapes)


def stored_form(module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the files hold them; views where only names, slices or axes change."""
    from transformers.core_model_loading import revert_weight_conversion

    form: dict[str, Tensor] = revert_weight_conversion(module, dict(tensors))
    return form


def stored_groups(
    module: Any, shapes: Mapping[str, Tensor]
) -> list[tuple[list[str], dict[str, Tensor]]]:
    """Return which weights are converted together, and what they become; single ones if possible.

    Args:
        shapes: the model's weights on the meta device.
    """
    whole = stored_form(module, shapes)
    try:
        groups = [([name], stored_form(module, {name: tensor})) for name, tensor in shapes.items()]
    # it needs several weights at once
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError):
        return [(list(shapes), whole)]
    parts = {name: tensor.shape for _, form in groups for name, tensor in form.items()}
    is_same = parts == {name: tensor.shape for name, tensor in whole.items()}
    if is_same and len(parts) == sum(len(form) for _, form in groups):
        return groups
    return [(list(shapes), whole)]


class _ViewsOnly(TorchFunctionMode):
    """Within it ``contiguous`` copies no tensor, as transformers would when it saves slices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def stored_views(module: Any, shapes: Mapping[str, Tensor]) -> dict[str, list[View]]:
    """Return what the files hold of each changed weight, if all of that are views of it.

    Servers that read a model's files load updates by the same names, without a copy.

    Args:
        shapes: the model's weights on the meta device.
    """
    views: dict[str, list[View]] = {}
    with _ViewsOnly():
        groups = stored_groups(module, shapes)
    for names, form in groups:
        weight = shapes[names[0]]
        same_storage = all(
            t.untyped_storage()._cdata == weight.untyped_storage()._cdata for t in form.values()
        )
        if len(names) > 1 or not same_storage:
            return {}
        if list(form) != names or form[names[0]].shape != weight.shape:
            views[names[0]] = [
                (n, list(t.shape), list(t.stride()), int(t.storage_offset()))
                for n, t in form.items()
            ]
    return views


def as_stored(
    tensors: Iterable[tuple[str, Tensor]], views: Mapping[str, Iterable[View]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights as the files hold them."""
    for name, tensor in tensors:
        if name not in views:
            yield name, tensor
            continue
        whole = tensor.contiguous()
        for stored_name, shape, stride, offset in views[name]:
            yield stored_name, whole.as_strided(shape, stride, offset + whole.storage_offset())
