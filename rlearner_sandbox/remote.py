"""Stand-ins for the program's functions, classes and objects in its tests. Runs inside.

Responses of the program are plain data of exact builtin types, or other stand-ins, and no stand-in
lets the program decide a comparison: ``==`` is identity, an object of the program has no ``<``,
``in`` searches its items, and arithmetic works only between the program's own objects.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from rlearner_sandbox.channel import Channel, TooMuch
from rlearner_sandbox.plain import MUTABLE, Garbled, from_json, put_back, to_json

# Exit code of tests whose program is gone.
PROGRAM_GONE = 88
MOST_ITEMS = 1_000_000  # of an iterator that is given to the program
# Modules whose exceptions are the same on both sides. A test runner takes all of them for failures.
SHARED = frozenset(
    {
        "json.decoder",
        "decimal",
        "struct",
        "binascii",
        "queue",
        "statistics",
        "csv",
        "re",
        "zlib",
        "dataclasses",
    }
)
# They would end a loop without an error, or the tests.
NOT_PASSED_ON = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit"})


class _Class(type):
    """Metaclass of stand-ins for classes of the program: calling one makes an object there."""

    _remote_class: int

    def __new__(cls, name: str, bases: tuple[type, ...], scope: dict[str, Any]) -> _Class:
        raise TypeError("tests cannot derive from the program's classes")

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        return _current_program().do("call", cls, *args, **keywords)

    def __getattr__(cls, name: str) -> Any:
        return _current_program().attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        _current_program().do("setattr", cls, name, value)


class Thing:
    """Stand-in for anything of the program that is not plain data."""

    __slots__ = ("_remote_number",)
    _remote_number: int

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return _current_program().do("call", self, *args, **keywords)

    def __getattr__(self, name: str) -> Any:
        return _current_program().attribute(self, name)


class Function(Thing):
    """A function of the program's."""

    __slots__ = ("__name__",)


class Object(Thing):
    """An object of a class of the program's."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        _current_program().do("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _current_program().do("delattr", self, name)

    def __iter__(self) -> Any:
        return _current_program().do("iter", self)

    def __next__(self) -> Any:
        return _current_program().next(self)

    def __enter__(self) -> Any:
        return _current_program().do("getattr", self, "__enter__")()

    # The result is ignored, so that the program cannot suppress a failure of the test.
    def __exit__(self, *_: object) -> None:
        _current_program().do("getattr", self, "__exit__")(None, None, None)


class Iterated(Thing):
    """An iterator of the program's."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _current_program().next(self)


def _forward_operation(name: str, *, takes_others: bool) -> Callable[..., Any]:
    def operation(self: Object, *args: Any) -> Any:
        if not takes_others and not all(isinstance(argument, Object) for argument in args):
            # It would learn what the test expects, and choose the difference.
            return NotImplemented
        return _current_program().do(name, self, *args)

    return operation


for _name in ("len", "bool", "str", "repr", "getitem", "setitem", "delitem"):
    setattr(Object, f"__{_name}__", _forward_operation(_name, takes_others=True))
for _name in ("add", "sub", "mul", "truediv", "neg"):
    setattr(Object, f"__{_name}__", _forward_operation(_name, takes_others=False))


class Program:
    """The program at the other end of the socket ``fd``; when it is gone this process exits."""

    def __init__(self, fd: int) -> None:
        self._channel = Channel(fd, self._obey, lambda: os._exit(PROGRAM_GONE))
        self._things: dict[int, Any] = {}  # stand-ins by number
        self._classes: dict[int, type] = {}
        self._errors: dict[tuple[str, str], type[BaseException]] = {}
        self._callbacks: list[Callable[..., Any]] = []
        _programs.append(self)

    def names(self, names: list[str]) -> dict[str, Any]:
        """Return those of these names that the program defines, without modules it has imported."""
        return {
            name: value
            for name, value in self.do("names", names)
            if name in names and value is not MODULE
        }

    def do(self, operation: str, *args: Any, **keywords: Any) -> Any:
        """Perform an operation on objects of the program; raise what the program raised.

        Raises:
            TypeError: if an argument cannot be passed on.
        """
        arguments = [to_json(argument, self._theirs) for argument in args]
        # The test looks at what is printed.
        is_captured = sys.stdout is not sys.__stdout__
        keyword_arguments = {
            key: to_json(argument, self._theirs) for key, argument in keywords.items()
        }
        answer = self._channel.ask([operation, arguments, keyword_arguments, is_captured])
        try:
            kind, printed, *details = answer
            if printed and is_captured:
                sys.stdout.write(str(printed))
            if kind == "value":
                value = from_json(details[0], self._stand_in)
                changed_arguments = [from_json(node, self._stand_in) for node in details[1] or ()]
                for old, new in zip(args, changed_arguments, strict=False):
                    if new is not None and type(new) is type(old) and isinstance(old, MUTABLE):
                        put_back(old, new)
                return value
            error = self._error(*details)
        except (Garbled, ValueError, TypeError, IndexError, KeyError, AttributeError):
            sys.excepthook(*sys.exc_info())
            # It answers what no program does.
            os._exit(PROGRAM_GONE)
        raise error

    def attribute(self, thing: Any, name: str) -> Any:
        """Return an attribute; special attributes of Python are not passed on."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self.do("getattr", thing, name)

    def next(self, thing: Any) -> Any:
        """Return the next item of an iterator."""
        item = self.do("next", thing)
        if type(item) is list and len(item) == 1 and item[0] == END:
            raise StopIteration
        return item

    # -------------------------------------------------------------------------------------------
    # what is sent

    def _theirs(self, value: Any) -> Any:
        if isinstance(value, _Class):
            return ["mine", value._remote_class]
        if isinstance(value, Thing):
            return ["mine", value._remote_number]
        if hasattr(value, "__next__"):
            return ["items", to_json(list(itertools.islice(value, MOST_ITEMS)), self._theirs)]
        if callable(value):
            self._callbacks.append(value)
            return ["yours", len(self._callbacks) - 1]
        raise TypeError(
            f"a {type(value).__name__} cannot be passed to the program; plain data, "
            "functions and its own objects can"
        )

    def _obey(self, question: Any) -> Any:
        """Call a function of the tests for the program."""
        try:
            if isinstance(question, TooMuch):
                raise question
            number, args, keywords = question
            keyword_arguments = {
                key: from_json(node, self._stand_in) for key, node in keywords.items()
            }
            arguments = [from_json(node, self._stand_in) for node in args]
            return [
                "value",
                to_json(self._callbacks[number](*arguments, **keyword_arguments), self._theirs),
            ]
        except Exception as error:  # noqa: BLE001 - what it raises goes to the program
            return ["raised", type(error).__name__, str(error)]

    # ------------------------------------------------------------------------------------------
    # what is answered

    def _stand_in(self, node: Any) -> Any:
        kind = node[0]
        if kind == "module":
            return MODULE
        if kind == "error":
            return self._error_class(node[1])
        if kind == "class":
            return self._class(*node[1:])
        if kind not in ("function", "iterator", "awaitable", "object") or type(node[1]) is not int:
            raise Garbled(str(kind))
        if kind == "awaitable":
            return self._coroutine(node[1])
        thing = self._things.get(node[1])
        if thing is None:
            cls = {"function": Function, "iterator": Iterated}.get(kind) or self._class(
                *node[2][1:]
            )
            thing = self._things[node[1]] = object.__new__(cls)
            object.__setattr__(thing, "_remote_number", node[1])
            if kind == "function":
                object.__setattr__(thing, "__name__", str(node[2]))
        return thing

    def _class(self, number: int, name: str, bases: list[Any]) -> type:
        if number not in self._classes:
            parents = tuple(self._class(*parent[1:]) for parent in bases) or (Object,)
            cls: type = type.__new__(
                _Class, str(name), parents, {"__slots__": (), "__module__": "solution"}
            )
            type.__setattr__(cls, "_remote_class", int(number))
            self._classes[number] = cls
        return self._classes[number]

    async def _coroutine(self, number: int) -> Any:
        thing = object.__new__(Function)
        object.__setattr__(thing, "_remote_number", number)
        return self.do("await", thing)

    def _error_class(self, chain: list[list[str]]) -> type[BaseException]:
        (module, name), *base_chain = chain
        if (module in SHARED and module in sys.modules) or module == "builtins":
            error_class = getattr(sys.modules[module], name, None)
            if isinstance(error_class, type) and issubclass(error_class, BaseException):
                return RuntimeError if name in NOT_PASSED_ON else error_class
        if (module, name) not in self._errors:
            base = self._error_class(base_chain) if base_chain else Exception
            self._errors[module, name] = type(str(name), (base,), {"__module__": "solution"})
        return self._errors[module, name]

    def _error(self, chain: list[list[str]], message: str, details: list[Any]) -> BaseException:
        cls = self._error_class(chain)
        args, attributes = (
            None if node is None else from_json(node, _refuse_node) for node in details
        )
        try:
            error = cls(*(args if type(args) is tuple else (str(message),)))
        except Exception:  # noqa: BLE001 - it wants other arguments
            error = cls.__new__(cls)
            error.args = (str(message),)
        if type(attributes) is dict and cls.__module__ == "solution":
            vars(error).update(
                {key: value for key, value in attributes.items() if type(key) is str}
            )
        return error


class Solution(ModuleType):
    """The tests' module ``solution``; ``offered`` is what ``from solution import *`` imports."""

    def __init__(self, program: Program, offered: dict[str, Any]) -> None:
        super().__init__("solution")
        vars(self).update(offered, __all__=list(offered), _remote_program=program)

    def __getattr__(self, name: str) -> Any:
        values = {} if name.startswith("__") else vars(self)["_remote_program"].names([name])
        if name not in values:
            raise AttributeError(f"the program has no {name}")
        vars(self)[name] = values[name]
        return values[name]


END = "the iterator's end"
MODULE = object()  # stands for any module of the program's
_programs: list[Program] = []


def _current_program() -> Program:
    return _programs[-1]


def _refuse_node(node: Any) -> NoReturn:
    raise Garbled(str(node)[:100])
