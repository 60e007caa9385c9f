"""The tests' side: executes them in a process without the program. Runs inside."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlearner_sandbox.remote import Program, Solution

OUT_OF_MEMORY = 86


def run_tests(fd: int, say: Callable[[str], None], take: Callable[[], str]) -> None:
    """Execute the tests and report which pass.

    Args:
        say: sends one line to the process that wants the verdict.
        take: returns the next text: the token of verdict lines, names as JSON, setup code, number
            of tests, each test.
    """
    token = take()
    names = json.loads(take())
    first = take()
    num_tests = int(take())
    tests = [take() for _ in range(num_tests)]
    scope = _build_scope(Program(fd), names)
    try:
        exec(compile(first, "<tests>", "exec", dont_inherit=True), scope)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # noqa: BLE001 - tests may raise anything
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    for index, test in enumerate(tests):
        try:
            exec(compile(test, "<test>", "exec", dont_inherit=True), scope)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # noqa: BLE001 - the same
            sys.excepthook(*sys.exc_info())
        else:
            say(f"{token} {index} true")
    os._exit(0)


def _build_scope(program: Program, names: dict[str, Any]) -> dict[str, Any]:
    """Return the names that the tests begin with."""
    offered = program.names(names["program"])
    sys.modules["solution"] = Solution(program, offered)
    if not any(finder.find_spec("pytest", None) for finder in sys.meta_path):
        sys.modules["pytest"] = sys.modules["rlearner_sandbox.pytest_subset"]
    tests = ModuleType("tests")
    sys.modules["tests"] = tests
    scope = vars(tests)
    # A builtin must not pass for a function that the program lacks.
    missing = {name: None for name in names["program"] if hasattr(builtins, name)}
    scope.update(missing | offered, __builtins__=builtins)
    for name, (module, attribute) in names["library"].items():
        try:
            imported = importlib.import_module(module)
        except ImportError:
            continue
        scope[name] = getattr(imported, attribute) if attribute else imported
    return scope
