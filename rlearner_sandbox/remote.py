"""Stand-ins for the program's functions, classes and objects in its tests. Runs inside, with the
tests.

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

GONE = 88  # exit code of tests whose program is gone
MOST_ITEMS = 1_000_000  # of an iterator that is given to the program
# Their exceptions are the same ones on both sides. None that a test runner takes for anything but a
# failure.
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
# They end a loop in silence, or the tests.
NOT_PASSED_ON = frozenset({"StopIteration", "StopAsyncIteration", "GeneratorExit"})


class _Class(type):
    """Metaclass of stand-ins for classes of the program: calling one makes an object there."""

    _remote_class: int

    def __new__(cls, name: str, bases: tuple[type, ...], scope: dict[str, Any]) -> _Class:
        raise TypeError("tests cannot derive from the program's classes")

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return _program().do("call", cls, *args, **named)

    def __getattr__(cls, name: str) -> Any:
        return _program().attribute(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        _program().do("setattr", cls, name, value)


class Thing:
    """Stand-in for anything of the program that is not plain data."""

    __slots__ = ("_remote_number",)
    _remote_number: int

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _program().do("call", self, *args, **named)

    def __getattr__(self, name: str) -> Any:
        return _program().attribute(self, name)


class Function(Thing):
    """A function of the program's."""

    __slots__ = ("__name__",)


class Object(Thing):
    """An object of a class of the program's."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        _program().do("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _program().do("delattr", self, name)

    def __iter__(self) -> Any:
        return _program().do("iter", self)

    def __next__(self) -> Any:
        return _program().next(self)

    def __enter__(self) -> Any:
        return _program().do("getattr", self, "__enter__")()

    # whatever it answers, no failure of the test is swallowed
    def __exit__(self, *_: object) -> None:
        _program().do("getattr", self, "__exit__")(None, None, None)


class Iterated(Thing):
    """An iterator of the program's."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _program().next(self)


def _operation(name: str, *, with_others: bool) -> Callable[..., Any]:
    def operation(self: Object, *args: Any) -> Any:
        if not with_others and not all(isinstance(one, Object) for one in args):
            return NotImplemented  # it would learn what the test expects, and choose the difference
        return _program().do(name, self, *args)

    return operation


for _name in ("len", "bool", "str", "repr", "getitem", "setitem", "delitem"):
    setattr(Object, f"__{_name}__", _operation(_name, with_others=True))
for _name in ("add", "sub", "mul", "truediv", "neg"):
    setattr(Object, f"__{_name}__", _operation(_name, with_others=False))


class Program:
    """The program at the other end of the socket ``fd``; when it is gone this process exits."""

    def __init__(self, fd: int) -> None:
        self._channel = Channel(fd, self._obey, lambda: os._exit(GONE))
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

    def do(self, operation: str, *args: Any, **named: Any) -> Any:
        """Perform an operation on objects of the program; raise what the program raised.

        Raises:
            TypeError: if an argument cannot be passed on.
        """
        given = [to_json(one, self._theirs) for one in args]
        is_heard = sys.stdout is not sys.__stdout__  # the test looks at what is printed
        sent = {key: to_json(one, self._theirs) for key, one in named.items()}
        answer = self._channel.ask([operation, given, sent, is_heard])
        try:
            kind, printed, *rest = answer
            if printed and is_heard:
                sys.stdout.write(str(printed))
            if kind == "value":
                value = from_json(rest[0], self._stand_in)
                told = [from_json(one, self._stand_in) for one in rest[1] or ()]
                for old, new in zip(args, told, strict=False):
                    if new is not None and type(new) is type(old) and isinstance(old, MUTABLE):
                        put_back(old, new)
                return value
            error = self._error(*rest)
        except (Garbled, ValueError, TypeError, IndexError, KeyError, AttributeError):
            sys.excepthook(*sys.exc_info())
            os._exit(GONE)  # it answers what no program does
        raise error

    def attribute(self, thing: Any, name: str) -> Any:
        """Return an attribute; special attributes of Python are not passed on."""
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self.do("getattr", thing, name)

    def next(self, thing: Any) -> Any:
        """Return the next item of an iterator."""
        found = self.do("next", thing)
        if type(found) is list and len(found) == 1 and found[0] == END:
            raise StopIteration
        return found

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
        why = f"a {type(value).__name__} cannot be passed to the program; plain data, functions and its own objects can"
        raise TypeError(why)

    def _obey(self, question: Any) -> Any:
        """Call a function of the tests for the program."""
        try:
            if isinstance(question, TooMuch):
                raise question
            number, args, named = question
            given = {key: from_json(one, self._stand_in) for key, one in named.items()}
            taken = [from_json(one, self._stand_in) for one in args]
            return ["value", to_json(self._callbacks[number](*taken, **given), self._theirs)]
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
        found = self._things.get(node[1])
        if found is None:
            cls = {"function": Function, "iterator": Iterated}.get(kind) or self._class(
                *node[2][1:]
            )
            found = self._things[node[1]] = object.__new__(cls)
            object.__setattr__(found, "_remote_number", node[1])
            if kind == "function":
                object.__setattr__(found, "__name__", str(node[2]))
        return found

    def _class(self, number: int, name: str, bases: list[Any]) -> type:
        if number not in self._classes:
            found = tuple(self._class(*one[1:]) for one in bases) or (Object,)
            cls: type = type.__new__(
                _Class, str(name), found, {"__slots__": (), "__module__": "solution"}
            )
            type.__setattr__(cls, "_remote_class", int(number))
            self._classes[number] = cls
        return self._classes[number]

    async def _coroutine(self, number: int) -> Any:
        thing = object.__new__(Function)
        object.__setattr__(thing, "_remote_number", number)
        return self.do("await", thing)

    def _error_class(self, chain: list[list[str]]) -> type[BaseException]:
        (module, name), *rest = chain
        if (module in SHARED and module in sys.modules) or module == "builtins":
            found = getattr(sys.modules[module], name, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                return RuntimeError if name in NOT_PASSED_ON else found
        if (module, name) not in self._errors:
            base = self._error_class(rest) if rest else Exception
            self._errors[module, name] = type(str(name), (base,), {"__module__": "solution"})
        return self._errors[module, name]

    def _error(self, chain: list[list[str]], said: str, details: list[Any]) -> BaseException:
        cls = self._error_class(chain)
        args, attributes = (None if one is None else from_json(one, _nothing) for one in details)
        try:
            error = cls(*(args if type(args) is tuple else (str(said),)))
        except Exception:  # noqa: BLE001 - it wants other arguments
            error = cls.__new__(cls)
            error.args = (str(said),)
        if type(attributes) is dict and cls.__module__ == "solution":
            vars(error).update(
                {key: value for key, value in attributes.items() if type(key) is str}
            )
        return error


class Solution(ModuleType):
    """The module ``solution`` of the tests; ``offered`` is what ``from solution import *`` imports."""

    def __init__(self, program: Program, offered: dict[str, Any]) -> None:
        super().__init__("solution")
        vars(self).update(offered, __all__=list(offered), _remote_program=program)

    def __getattr__(self, name: str) -> Any:
        found = {} if name.startswith("__") else vars(self)["_remote_program"].names([name])
        if name not in found:
            raise AttributeError(f"the program has no {name}")
        vars(self)[name] = found[name]
        return found[name]


END = "the iterator's end"
MODULE = object()  # stands for any module of the program's
_programs: list[Program] = []


def _program() -> Program:
    return _programs[-1]


def _nothing(node: Any) -> NoReturn:
    raise Garbled(str(node)[:100])
