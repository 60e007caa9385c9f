"""Small problems with solutions and cases, rendered in each form of tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class CanonicalProblem:
    """A function, its source, and arguments with results; results are what JSON can say, so that
    every form can.
    """

    name: str
    source: str
    cases: tuple[tuple[tuple[Any, ...], Any], ...]


PROBLEMS: Final = (
    CanonicalProblem("add", "def add(a, b): return a + b", (((1, 2), 3), ((-4, 0.5), -3.5), (([1], [2]), [1, 2]))),
    CanonicalProblem("fib", "def fib(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return "
    "a", (((0,), 0), ((10,), 55), ((300,), 222232244629420445529739893461909967206666939096499764990979600))),
    CanonicalProblem("is_prime", "def is_prime(n): return n > 1 and all(n % k for k in range(2, int(n ** 0.5) + "
    "1))", (((7,), True), ((1,), False), ((91,), False), ((7919,), True))),
    CanonicalProblem("reverse_words", "def reverse_words(text): return ' "
    "'.join(text.split()[::-1])", ((("a b  c",), "c b a"), (("",), ""))),
    CanonicalProblem("count_letters", "from collections import Counter\ndef count_letters(text): return "
    "Counter(text)", ((("aab",), {"a": 2, "b": 1}), (("",), {}))),
    CanonicalProblem("flatten", "def flatten(x):\n    return [z for y in x for z in (flatten(y) if isinstance(y, list) "
    "else [y])]", ((([1, [2, [3, []]]],), [1, 2, 3]), (([],), []))),
    CanonicalProblem("transpose", "def transpose(m): return [list(row) for row in "
    "zip(*m)]", ((([[1, 2], [3, 4], [5, 6]],), [[1, 3, 5], [2, 4, 6]]),)),
    CanonicalProblem("two_sum", "def two_sum(xs, t):\n    seen = {}\n    for i, x in enumerate(xs):\n        if t - x "
    "in seen: return [seen[t - x], i]\n        seen[x] = i", ((([2, 7, 11], 9), [0, 1]), (([1, 2], 9), None))),
    CanonicalProblem("gcd", "import math\ndef gcd(a, b): return math.gcd(a, b)", (((12, 18), 6), ((0, 5), 5))),
    CanonicalProblem("palindrome", "def palindrome(s):\n    s = [c for c in s.lower() if c.isalnum()]\n    return s == "
    "s[::-1]", ((("A man, a plan, a canal: Panama",), True), (("ab",), False))),
    CanonicalProblem("mean", "def mean(xs): return sum(xs) / len(xs)", ((([1, 2, 4],), 7 / 3), (([0.1],), 0.1))),
    CanonicalProblem("unique", "def unique(xs): return sorted(set(xs))", ((([3, 1, 3],), [1, 3]), (([],), []))),
    CanonicalProblem("caesar", "def caesar(s, k): return ''.join(chr((ord(c) - 97 + k) % 26 + 97) if 'a' <= c <= 'z' "
    "else c for c in s)", ((("abz!", 1), "bca!"), (("é", 5), "é"))),
    CanonicalProblem("powerset_size", "from itertools import chain, combinations\ndef powerset_size(xs): return "
    "len(list(chain.from_iterable(combinations(xs, r) for r in range(len(xs) + 1))))", ((([1, 2, 3],), 8),)),
    CanonicalProblem("merge", "import heapq\ndef merge(a, b): return list(heapq.merge(a, "
    "b))", ((([1, 4], [2, 3]), [1, 2, 3, 4]),)),
    CanonicalProblem("roman", "def roman(n):\n    out = ''\n    for v, s in "
    "((1000,'M'),(900,'CM'),(500,'D'),(400,'CD'),(100,'C'),(90,'XC'),(50,'L'),(40,'XL'),(10,'X'),(9,'IX'),(5,'V'),(4,'IV'),(1,'I')):\n        while n >= v: out += s; n -= v\n    return out", (((1994,), "MCMXCIV"), ((4,), "IV"))),
    CanonicalProblem("binary", "def binary(n): return bin(n)[2:]", (((10,), "1010"), ((0,), "0"))),
    CanonicalProblem("group", "from collections import defaultdict\ndef group(xs):\n    d = defaultdict(list)\n    for "
    "x in xs: d[str(len(x))].append(x)\n    return d", (((["a", "bb", "c"],), {"1": ["a", "c"], "2": ["bb"]}),)),
    CanonicalProblem("depth", "import sys\nsys.setrecursionlimit(10**6)\ndef depth(n): return 0 if n == 0 else 1 + "
    "depth(n - 1)", (((5000,), 5000),)),
    CanonicalProblem("matmul", "def matmul(a, b): return [[sum(x * y for x, y in zip(r, c)) for c in zip(*b)] for r in "
    "a]", ((([[1, 2]], [[3], [4]]), [[11]]),)),
    CanonicalProblem("levenshtein", "def levenshtein(a, b):\n    row = list(range(len(b) + 1))\n    for i, x in "
    "enumerate(a, 1):\n        last, row[0] = row[0], i\n        for j, y in enumerate(b, 1):\n            last, "
    "row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))\n    return "
    "row[-1]", ((("kitten", "sitting"), 3), (("", "ab"), 2))),
    CanonicalProblem("nothing", "def nothing(x): pass", (((1,), None),)),
    CanonicalProblem("nested", "def nested(x): return {'a': [x, {'b': None}], 'c': "
    "True}", ((("\0é\U0001f600",), {"a": ["\0é\U0001f600", {"b": None}], "c": True}),)),
    CanonicalProblem("median", "import statistics\ndef median(xs): return "
    "statistics.median(xs)", ((([3, 1, 2],), 2), (([1, 2],), 1.5))),
)  # fmt: skip

# What JSON cannot say; only tests that are Python can.
MORE: Final[tuple[tuple[str, str], ...]] = (  # source, a test file
    ("def pairs(xs): return [(a, b) for a in xs for b in xs if a < b], {1, (2, 3)}, b'x\\xff', 2 + 3j, range(3), "
    "frozenset({None})", "def test_it(): assert pairs([2, 1]) == ([(1, 2)], {1, (2, 3)}, b'x\\xff', 2 + 3j, range(3), "
    "frozenset({None}))"),
    ("def sort(xs): xs.sort()", "def test_it():\n    xs = [3, 1, 2]\n    assert sort(xs) is None\n    assert xs == [1, "
    "2, 3]"),
    ("def positive(n):\n    if n < 0: raise ValueError(f'{n} is negative')\n    return n", "import unittest\nclass "
    "T(unittest.TestCase):\n    def test_it(self):\n        with self.assertRaisesRegex(ValueError, '-1 is "
    "negative'):\n            positive(-1)\n        self.assertEqual(positive(2), 2)"),
    ("class TooMuch(ValueError):\n    def __init__(self, n):\n        super().__init__(n)\n        self.n = n\ndef "
    "little(n):\n    if n > 9: raise TooMuch(n)", "from solution import TooMuch, little\ndef test_it():\n    try:\n    "
    "    little(10)\n    except TooMuch as error:\n        assert error.n == 10 and isinstance(error, ValueError)\n    "
    "else:\n        raise AssertionError"),
    ("import json\ndef read(text): return json.loads(text)", "import json, unittest\nclass T(unittest.TestCase):\n    "
    "def test_it(self): self.assertRaises(json.JSONDecodeError, read, '{')"),
    ("def squares():\n    n = 0\n    while True:\n        yield n * n\n        n += 1", "from itertools import "
    "islice\ndef test_it(): assert list(islice(squares(), 4)) == [0, 1, 4, 9]"),
    ("def apply(f, xs): return [f(x) for x in xs]", "def test_it(): assert apply(lambda x: x * 2, [1, 2]) == [2, 4] "
    "and apply(str, (1,)) == ['1']"),
    ("def adder(n): return lambda x: x + n", "def test_it(): assert adder(2)(3) == 5"),
    ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def "
    "pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n    def __iter__(self): return "
    "iter(self.items)\n    def __str__(self): return f'Stack({self.items})'", "def test_it():\n    s = Stack()\n    "
    "s.push(1)\n    s.push((2, 3))\n    assert len(s) == 2 and list(s) == [1, (2, 3)] and 1 in s and str(s) == "
    "'Stack([1, (2, 3)])'\n    assert s.pop() == (2, 3) and isinstance(s, Stack) and s.items == [1]\n    s.pop()\n    "
    "try:\n        s.pop()\n    except IndexError:\n        pass\n    else:\n        raise AssertionError"),
    ("class Node:\n    def __init__(self, value, left=None, right=None): self.value, self.left, self.right = value, "
    "left, right\ndef total(node): return node.value + total(node.left) + total(node.right) if node else "
    "0", "def test_it():\n    root = Node(1, right=Node(3))\n    root.left = Node(2)\n    assert total(root) == 6 and "
    "root.left.value == 2"),
    ("def has_close(numbers, threshold):\n    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b "
    "in numbers[:i])", "METADATA = {'author': 'x'}\ndef check(candidate):\n    assert candidate([1.0, 2.0, 3.9, 4.0], "
    "0.3) == True\n    assert candidate([1.0, 2.0], 0.95) == False\ncheck(has_close)"),
    ("import asyncio\nasync def later(x):\n    await asyncio.sleep(0)\n    return x", "import asyncio\ndef test_it(): "
    "assert asyncio.run(later(4)) == 4"),
    ("from decimal import Decimal\nfrom fractions import Fraction\nfrom collections import deque\ndef exact(): return "
    "Decimal('0.1'), Fraction(1, 3), deque([1])", "from collections import deque\nfrom decimal import Decimal\nfrom "
    "fractions import Fraction\ndef test_it(): assert exact() == (Decimal('0.1'), Fraction(1, 3), deque([1]))"),
)  # fmt: skip


def asserts(problem: CanonicalProblem) -> str:
    return json.dumps(
        [
            f"assert {problem.name}{_arguments(given)} == {wanted!r}"
            for given, wanted in problem.cases
        ]
    )


def test_file(problem: CanonicalProblem) -> str:
    lines = [
        f"    def test_{number}(self): self.assertEqual({problem.name}{_arguments(given)}, {wanted!r})"
        for number, (given, wanted) in enumerate(problem.cases)
    ]
    head = (
        "import unittest",
        f"from solution import {problem.name}",
        "class Cases(unittest.TestCase):",
    )
    return "\n".join((*head, *lines))


def calls(problem: CanonicalProblem) -> str:
    given, wanted = zip(*problem.cases, strict=True)
    return json.dumps({"fn_name": problem.name, "inputs": given, "outputs": wanted})


def pairs(problem: CanonicalProblem) -> str:
    """Return the cases as texts that a script reads and prints; see ``script``."""
    return json.dumps(
        [
            {"input": json.dumps(given), "output": json.dumps(wanted)}
            for given, wanted in problem.cases
        ]
    )


def script(problem: CanonicalProblem) -> str:
    return f"{problem.source}\nimport json\nprint(json.dumps({problem.name}(*json.loads(input()))))"


def _arguments(given: tuple[Any, ...]) -> str:
    return f"({', '.join(map(repr, given))})"
