"""Refuses YAML that is small as a text and huge as a value, or nested too deeply."""

from __future__ import annotations

from typing import Final

import yaml

MAX_CHARACTERS: Final = 1 << 20
MAX_NODES: Final = 100_000  # with every alias replaced by what it stands for
MAX_DEPTH: Final = 32


class YamlBomb(ValueError):
    """A YAML text that is too large; the message says how."""


def compose_bounded(text: str) -> yaml.Node | None:
    """Return the node at the top of a YAML text, None for an empty one.

    Raises:
        YamlBomb: if it is too large, too deep, or contains itself.
        yaml.YAMLError: if it is not YAML.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlBomb(f"more than {MAX_CHARACTERS} characters")
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise YamlBomb(f"nested more than {MAX_DEPTH} deep") from None
    if node is not None:
        _count_nodes(node, {}, 1)
    return node


def _count_nodes(node: yaml.Node, sizes: dict[int, int | None], depth: int) -> int:
    """Return the number of nodes with all aliases expanded.

    Args:
        sizes: of the nodes so far by their identity, None for those that are being counted.
    """
    if depth > MAX_DEPTH:
        raise YamlBomb(f"nested more than {MAX_DEPTH} deep")
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise YamlBomb("an alias contains itself")
        return size
    sizes[id(node)] = None
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1
    for child in children:
        size += _count_nodes(child, sizes, depth + 1)
        if size > MAX_NODES:
            raise YamlBomb(f"its aliases stand for more than {MAX_NODES} values")
    sizes[id(node)] = size
    return size
