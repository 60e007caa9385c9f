"""The program's side of its tests: applies their requests to the program's objects. Runs inside,
with the program.

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
            "call": lambda function, *args, **named: function(*args, **named),
            "names": lambda names: [[name, scope[name]] for name in names if name in scope], "getattr": getattr,
            "setattr": setattr, "delattr": delattr, "len": len, "bool": bool, "str": str, "repr": repr, "iter": iter,
            "getitem": lambda of, key: of[key], "setitem": self._set, "delitem": self._delete,
            "next": lambda of: next(of, [END]), "await": self._await, "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b, "neg": lambda a: -a,
        }  # fmt: skip

    def serve(self) -> None:
        """Answer until the tests are done."""
        self._channel.serve()

    def _obey(self, question: Any) -> Any:
        printed = StringIO()
        if isinstance(question, TooMuch):
            return self._raised(question, "")
        try:
            name, args, named, heard = question
            given = [from_json(one, self._mine) for one in args]
            with redirect_stdout(printed) if heard else nullcontext():
                named = {key: from_json(one, self._mine) for key, one in named.items()}
                result = self._operations[name](*given, **named)
            # What a function did to its arguments is told only where that is all it does.
            told = (
                [to_json(one, self._handle) if isinstance(one, MUTABLE) else None for one in given]
                if result is None
                else None
            )
            return ["value", printed.getvalue(), to_json(result, self._handle), told]
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            return self._raised(error, printed.getvalue())

    def _raised(self, error: BaseException, printed: str) -> Any:
        chain = [[one.__module__, one.__qualname__] for one in type(error).__mro__[:-1]]
        try:
            said = str(error)[:10_000]
            details = [to_json(error.args, _refuse), to_json(vars(error), _refuse)]
        except BaseException:  # noqa: BLE001 - it cannot be told in full
            return ["raised", printed, chain, type(error).__name__, [None, None]]
        return ["raised", printed, chain, said, details]

    def _mine(self, node: Any) -> Any:
        if node[0] == "mine":
            return self._objects[node[1]]
        if node[0] == "items":
            return iter(from_json(node[1], self._mine))
        number = node[1]  # of a function of the tests'

        def callback(*args: Any, **named: Any) -> Any:
            given = [to_json(one, self._handle) for one in args]
            named = {key: to_json(one, self._handle) for key, one in named.items()}
            kind, content, *rest = self._channel.ask([number, given, named])
            if kind == "raised":
                raise getattr(builtins, content, RuntimeError)(*rest)
            return from_json(content, self._mine)

        return callback

    def _handle(self, value: Any) -> Any:
        if isinstance(value, type(sys)):
            return ["module", value.__name__]
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return ["error", [[one.__module__, one.__qualname__] for one in value.__mro__[:-1]]]
            bases = [
                self._handle(one)
                for one in value.__bases__
                if one is not object and isinstance(one, type)
            ]
            return [
                "class",
                self._number(value),
                value.__name__,
                [one for one in bases if one[0] == "class"],
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


def _refuse(value: Any) -> Any:
    raise TooMuch(f"a {type(value).__name__}")
