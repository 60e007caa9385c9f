"""The program's side of its tests: applies their requests to its objects. Runs inside.

The tests trust nothing here: it shares a process with the program, which may have changed any of
it.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

from rlearner_sandbox.channel import Channel, TooMuch
from rlearner_sandbox.plain import MUTABLE, from_json, to_json

OUT_OF_MEMORY = 86
END = "the iterator's end"


class Host:
    """Answers one channel with the names of the program's module, ``scope``."""

    def __init__(self, fd: int, scope: dict[str, Any]) -> None:
        self._scope = scope
        self._objects: list[Any] = []  # that the tests know, by number
        self._numbers: dict[int, int] = {}  # by id
        self._channel = Channel(fd, self._obey, lambda: os._exit(0))
        self._operations: dict[str, Callable[..., Any]] = {
            "call": lambda function, *args, **keywords: function(*args, **keywords),
            "names": lambda names: [[name, scope[name]] for name in names if name in scope],
            "getattr": getattr,
            "setattr": setattr, "delattr": delattr, "len": len, "bool": bool, "str": str,
            "repr": repr, "iter": iter,
            "getitem": lambda of, key: of[key], "setitem": self._set, "delitem": self._delete,
            "next": lambda of: next(of, [END]), "await": self._await, "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b,
            "neg": lambda a: -a,
        }  # fmt: skip

    def serve(self) -> None:
        """Answer until the tests are done."""
        self._channel.serve()

    def _obey(self, question: Any) -> Any:
        printed = StringIO()
        if isinstance(question, TooMuch):
            return self._raised(question, "")
        try:
            name, args, keywords, is_captured = question
            arguments = [from_json(node, self._mine) for node in args]
            with redirect_stdout(printed) if is_captured else nullcontext():
                keywords = {key: from_json(node, self._mine) for key, node in keywords.items()}
                result = self._operations[name](*arguments, **keywords)
            # Changes of arguments are passed on only where the function returns nothing else.
            changed_arguments = None
            if result is None:
                changed_arguments = [
                    to_json(argument, self._handle) if isinstance(argument, MUTABLE) else None
                    for argument in arguments
                ]
            return ["value", printed.getvalue(), to_json(result, self._handle), changed_arguments]
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            return self._raised(error, printed.getvalue())

    def _raised(self, error: BaseException, printed: str) -> Any:
        chain = [[cls.__module__, cls.__qualname__] for cls in type(error).__mro__[:-1]]
        try:
            message = str(error)[:10_000]
            details = [to_json(error.args, _refuse_value), to_json(vars(error), _refuse_value)]
        except BaseException:  # noqa: BLE001 - its own methods may raise anything
            return ["raised", printed, chain, type(error).__name__, [None, None]]
        return ["raised", printed, chain, message, details]

    def _mine(self, node: Any) -> Any:
        if node[0] == "mine":
            return self._objects[node[1]]
        if node[0] == "items":
            return iter(from_json(node[1], self._mine))
        number = node[1]  # of a function of the tests'

        def callback(*args: Any, **keywords: Any) -> Any:
            arguments = [to_json(argument, self._handle) for argument in args]
            keywords = {key: to_json(argument, self._handle) for key, argument in keywords.items()}
            kind, content, *details = self._channel.ask([number, arguments, keywords])
            if kind == "raised":
                raise getattr(builtins, content, RuntimeError)(*details)
            return from_json(content, self._mine)

        return callback

    def _handle(self, value: Any) -> Any:
        if isinstance(value, type(sys)):
            return ["module", value.__name__]
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return ["error", [[cls.__module__, cls.__qualname__] for cls in value.__mro__[:-1]]]
            bases = [
                self._handle(cls)
                for cls in value.__bases__
                if cls is not object and isinstance(cls, type)
            ]
            return [
                "class",
                self._number(value),
                value.__name__,
                [cls for cls in bases if cls[0] == "class"],
            ]
        if hasattr(value, "__next__"):
            return ["iterator", self._number(value)]
        if hasattr(value, "__await__"):
            return ["awaitable", self._number(value)]
        if type(value).__module__ in ("builtins", "functools") and callable(value):
            return ["function", self._number(value), getattr(value, "__name__", "function")]
        return ["object", self._number(value), self._handle(type(value))]

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # which also keeps its id from being another's
        return number

    def _set(self, of: Any, key: Any, value: Any) -> None:
        of[key] = value

    def _delete(self, of: Any, key: Any) -> None:
        del of[key]

    def _await(self, work: Any) -> Any:
        import asyncio

        async def wait() -> Any:
            return await work

        return asyncio.run(wait())


def _refuse_value(value: Any) -> Any:
    raise TooMuch(f"a {type(value).__name__}")
