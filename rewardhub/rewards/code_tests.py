"""Parses the reference of the reward ``code``: tests in one of these forms.

- asserts: a JSON list of Python statements: ``["assert add(1, 2) == 3", "assert add(0, 0) == 0"]``.
- pairs: ``{"inputs": [...], "outputs": [...]}``, the texts for stdin and the expected stdout, each
  a text or a list of lines; or a JSON list of ``{"input": ..., "output": ...}``.
- calls: ``{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}``: arguments and result of a
  function, or of a method of ``class Solution``.
- test file: Python source. Each function ``test_*`` and each method ``test*`` of its classes
  ``Test*`` and of unittest's is a test; a file without any is one test, and must run something. The
  program's names are predefined, and ``import solution`` works.

No form runs a test in the program's process. Asserts and test files run in a second sandbox, where
the program's functions, classes and objects are proxies (see docs/rewards.md); names that tests
bind, Python's builtins and the modules of its library are never the program's.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any, Final

from rlearner_sandbox.names import MODULE, names_of

MAX_TESTS: Final = 10_000


class InvalidTestsError(ValueError):
    """The reference holds no valid tests."""


@dataclass(frozen=True)
class StdioTests:
    """Texts for stdin, and the expected stdout."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class FunctionCallTests:
    """A function's arguments in JSON, and its expected results."""

    function: str
    arguments: tuple[str, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class StatementTests:
    """Python statements that raise if the program is wrong; ``first`` runs before them."""

    first: str
    cases: tuple[str, ...]


Tests = StdioTests | FunctionCallTests | StatementTests


def parse(reference: str) -> Tests:
    """Return the tests in a reference.

    Raises:
        InvalidTestsError: if it has none of the forms, or no tests.
    """
    text = reference.strip()
    if not text:
        raise InvalidTestsError("there are no tests")
    if text[0] not in "[{":
        return _check_tests(_parse_file(text))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidTestsError(f"not JSON: {error}") from None
    tests = _parse_mapping(value) if isinstance(value, dict) else _parse_list(value)
    if isinstance(tests, StatementTests):
        size = len(tests.cases)
    else:
        size = len(tests.inputs if isinstance(tests, StdioTests) else tests.arguments)
    if not 1 <= size <= MAX_TESTS:
        raise InvalidTestsError(f"{size} tests; between 1 and {MAX_TESTS} are allowed")
    return _check_tests(tests)


def _check_tests(tests: Tests) -> Tests:
    """Return the same tests.

    Raises:
        InvalidTestsError: if any program would pass them, or could tamper with them.
    """
    if isinstance(tests, StatementTests):
        names = names_of((tests.first, *tests.cases))
        if names.unsafe:
            raise InvalidTestsError(
                f"they use {names.unsafe[0]}, so a program's results would run inside its tests"
            )
        if (
            not names.program
            and not names.imports
            and MODULE not in tests.first + "".join(tests.cases)
        ):
            raise InvalidTestsError(
                "they use no name of the program; builtins and modules of Python's library "
                "are never the program's"
            )
    return tests


def _parse_list(value: list[Any]) -> StdioTests | StatementTests:
    if all(isinstance(item, str) for item in value):
        for number, text in enumerate(value, start=1):
            _parse_python(text, f"test {number}")
        return StatementTests("", tuple(value))
    if all(isinstance(item, dict) and "input" in item and "output" in item for item in value):
        return _parse_mapping(
            {
                "inputs": [item["input"] for item in value],
                "outputs": [item["output"] for item in value],
            }
        )  # type: ignore[return-value]
    raise InvalidTestsError("a list must hold either statements or mappings with input and output")


def _parse_mapping(value: dict[str, Any]) -> StdioTests | FunctionCallTests:
    inputs = value.get("inputs")
    outputs = value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise InvalidTestsError(
            "a mapping needs the lists inputs and outputs; it has "
            f"{', '.join(sorted(value)) or 'nothing'}"
        )
    if len(inputs) != len(outputs):
        raise InvalidTestsError(f"{len(inputs)} inputs, but {len(outputs)} outputs")
    name = value.get("fn_name")
    if name is None:
        return StdioTests(tuple(map(_stream_text, inputs)), tuple(map(_stream_text, outputs)))
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidTestsError(f"fn_name {name!r} is not a function name")
    for item in inputs:
        if not isinstance(item, list):
            raise InvalidTestsError(
                f"the inputs of a function must be lists of arguments, got {item!r:.80}"
            )
    return FunctionCallTests(name, tuple(map(json.dumps, inputs)), tuple(outputs))


def _stream_text(value: object) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise InvalidTestsError(
            f"an input or output must be a text or a list of lines, got {value!r:.80}"
        )
    return value


def _parse_python(text: str, noun: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidTestsError(f"{noun} is not valid Python: {error}: {text!r:.80}") from None


def _parse_file(text: str) -> StatementTests:
    body = _parse_python(text, "the test file").body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    tests: list[str] = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith(
            "test_"
        ):
            _without_arguments(node, 0)
            tests.append(
                _ASYNC.format(name=node.name)
                if isinstance(node, ast.AsyncFunctionDef)
                else f"{node.name}()"
            )
        elif isinstance(node, ast.ClassDef):
            is_case = any(
                "TestCase" in ast.unparse(base)
                for ancestor in _class_lineage(node, classes)
                for base in ancestor.bases
            )
            if is_case or node.name.startswith("Test"):
                form = _UNITTEST if is_case else _PLAIN
                tests += [
                    form.format(name=node.name, method=method)
                    for method in _test_methods(_class_lineage(node, classes))
                ]
    if tests:
        return StatementTests(text, tuple(tests))
    if all(isinstance(node, _SILENT) or _is_text(node) or _is_guard(node) for node in body):
        raise InvalidTestsError(
            "the test file has no test_* function, no class of tests, and runs nothing itself"
        )
    return StatementTests("", (text,))


def _class_lineage(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and its base classes in the same file."""
    lineage = [node]
    for class_node in lineage:
        names = (base.id for base in class_node.bases if isinstance(base, ast.Name))
        lineage += [
            classes[name] for name in names if name in classes and classes[name] not in lineage
        ]
    return lineage


def _test_methods(lineage: list[ast.ClassDef]) -> list[str]:
    methods = [
        statement
        for node in lineage
        for statement in node.body
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    tests = {method.name: method for method in reversed(methods) if method.name.startswith("test")}
    for method in tests.values():
        _without_arguments(method, 1)
    return [name for name in dict.fromkeys(method.name for method in methods) if name in tests]


def _without_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, allowed: int) -> None:
    arguments = node.args
    patched = any("patch" in ast.unparse(decorator) for decorator in node.decorator_list)
    if (
        len(arguments.posonlyargs + arguments.args) - len(arguments.defaults) > allowed
        and not patched
    ):
        raise InvalidTestsError(
            f"{node.name} takes arguments; fixtures and parametrize are not supported"
        )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


_SILENT: Final = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.Pass,
)
# One test each; a skipped test counts as failed.
_UNITTEST: Final = (
    "import unittest\n_outcome = "
    "unittest.TestResult()\nunittest.TestSuite([{name}({method!r})]).run(_outcome)\n"
    "assert _outcome.testsRun == 1 and _outcome.wasSuccessful() and not _outcome.skipped, "
    "_outcome.errors + "
    "_outcome.failures"
)
_PLAIN: Final = (
    "_instance = {name}()\n"
    "if hasattr(_instance, 'setup_method'): _instance.setup_method(*[None] * "
    "(_instance.setup_method.__code__.co_argcount - 1))\n"
    "_instance.{method}()"
)
_ASYNC: Final = "import asyncio\nasyncio.run({name}())"
