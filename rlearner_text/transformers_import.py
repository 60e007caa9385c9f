"""Imports transformers safely from several threads."""

from __future__ import annotations

from importlib import import_module


def import_transformers() -> None:
    """Import transformers completely; call it before ``from transformers import …``.

    At the end of its import the package replaces its own module. An import statement in a second
    thread that has waited for this gets the first module, which has hardly any names (CPython:
    ``PyImport_ImportModuleLevelObject`` looks it up before it waits); ``import_module`` looks it up
    again afterwards.

    Raises:
        ImportError: if it is not installed.
    """
    import_module("transformers")
