"""The library transformers, for processes in which several threads come to need it at once."""

from __future__ import annotations

from importlib import import_module


def import_transformers() -> None:
    """Import transformers, and return only when it is there whole; to be called before ``from transformers import …``.

    At its end the package puts another module in its own place. An import statement of a second thread that waited for that end goes
    on with the first module, which has hardly any names (CPython: ``PyImport_ImportModuleLevelObject`` looks it up before it waits);
    ``import_module`` looks it up again afterwards.

    Raises:
        ImportError: it is not installed.
    """
    import_module("transformers")
