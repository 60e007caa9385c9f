"""Adversarial answers for ``bench.answers``, from small generators. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# in an answer: replaced by the path of a file that only executed code would make
CANARY: Final = "CANARY"


def adversarial() -> list[str]:
    """Yield responses that are all wrong where 18 is the right answer."""
    formulas = dict.fromkeys(
        [
            *_huge_numbers(),
            *_huge_sums(),
            *_nested(),
            *_expansions(),
            *_transcendental(),
            *_long(),
            *_code(),
            *_odd(),
            *_raising(),
        ]
    )
    boxed = [f"\\boxed{{{formula}}}" for formula in formulas]
    plain = [f"#### {formula}" for formula in [*_huge_numbers(), *_expansions(), *_code()]]
    return [*boxed, *plain, *_prose()]


def _huge_numbers() -> Iterator[str]:
    for base in (2, 7, 10, 99):
        for exponent in ("10^{10}", "10^{10^{10}}", "9^{9^{9^{9}}}", "99999999", "2^{64}"):
            yield f"{base}^{{{exponent}}}"
    for n in (10**5, 10**7, 10**9, 10**12):
        yield f"{n}!"
        yield f"\\binom{{{n}}}{{{n // 2}}}"
        yield f"\\frac{{{n}!}}{{{n - 1}!}}"
        yield f"\\left({n}!\\right)^{{{n}}}"
        yield f"\\sqrt{{2}}^{{{n}}}"
        yield f"{n}^{{{n}}} \\bmod 7"
    yield from (
        "5!!!!!!!!",
        "(((9!)!)!)!",
        "0.5^{-10^{12}}",
        "e^{e^{e^{e^{10}}}}",
        "10^{-10^{10^{10}}}",
    )
    yield from ("(10^{10^{10}})^{0}", "\\pi^{10^{10^{8}}}")


def _huge_sums() -> Iterator[str]:
    for top in ("10^{6}", "10^{9}", "10^{10^{10}}", "\\infty"):
        yield f"\\sum_{{n=1}}^{{{top}}} \\frac{{1}}{{n^2+n!}}"
        yield f"\\sum_{{n=1}}^{{{top}}} \\sin(n^3)"
        yield f"\\prod_{{n=1}}^{{{top}}} (n^2+1)"
        yield f"\\sum_{{i=1}}^{{{top}}} \\sum_{{j=1}}^{{{top}}} \\frac{{i}}{{j+i^j}}"
        yield f"\\int_0^{{{top}}} \\frac{{\\sin(x^x)}}{{\\ln(x+e^x)}} dx"
    for n in range(1, 5):
        yield (
            "\\int_0^1 " * n
            + "e^{\\sin(x y z)} \\cos(e^{x})"
            + "".join(f" d{v}" for v in "xyzw"[:n])
        )
    yield "\\lim_{n \\to \\infty} \\sum_{k=1}^{n} \\frac{1}{k^{1.001}}"
    yield "\\lim_{x \\to 0} \\frac{\\sin(\\tan x) - \\tan(\\sin x)}{x^7}"


def _nested() -> Iterator[str]:
    for depth in (15, 60, 400, 1500):
        yield "{" * depth + "1" + "}" * depth
        yield "(" * depth + "1" + ")" * depth
        yield "\\frac{1}{1+" * depth + "x" + "}" * depth
        yield "\\sqrt{1+" * depth + "x" + "}" * depth
        yield "\\sin(" * depth + "x" + ")" * depth
        yield "\\left|" * depth + "x" + "\\right|" * depth
        yield "x^{" * depth + "x" + "}" * depth
        yield "\\{" * depth + "1" + "\\}" * depth
        yield "\\boxed{" * depth + "1" + "}" * depth
        yield "-" * depth + "1"


def _expansions() -> Iterator[str]:
    for power in (50, 200, 1000, 10**6):
        yield f"(x+y+z+w)^{{{power}}}"
        yield f"(x^2+3x+\\sqrt{{2}})^{{{power}}} - (x+1)^{{{power}}}"
    for factors in (10, 40):
        yield "".join(f"(x+{n}y+z^{n})" for n in range(1, factors))
        yield "+".join(f"\\frac{{1}}{{x^{{{n}}}+y+{n}}}" for n in range(1, factors))
        yield "+".join(f"\\sqrt{{{n * n + 1}}}" for n in range(2, factors))


def _transcendental() -> Iterator[str]:
    for n in (4, 8, 20):
        yield "+".join(f"\\sin^{{{k}}}({k}x)\\cos({k}y)" for k in range(1, n))
        yield "\\cdot ".join(f"\\cos(\\frac{{{k}\\pi}}{{{2 * n + 1}}})" for k in range(1, n))
        yield "\\cdot ".join(f"\\log_{{{k}}}(x^{{{k}}}+{k})" for k in range(2, n))
        yield "+".join(f"\\arctan(\\frac{{x+{k}}}{{\\sqrt{{x}}+{k}}})" for k in range(1, n))
        yield "\\tan(" + "+".join(f"\\arcsin(\\frac{{x}}{{{k}}})" for k in range(1, n)) + ")"


def _long() -> Iterator[str]:
    for size in (1000, 3000, 100_000):
        yield "9" * size
        yield "0." + "3" * size
        yield "+".join("1" for _ in range(size))
        yield ",".join(str(n) for n in range(size // 4))
        yield "x" * size
        yield "\\frac12" * (size // 8)
        yield "-" + " " * size + "3"
        yield "\\begin{pmatrix}" + "&".join("1" for _ in range(size // 4)) + "\\end{pmatrix}"


def _code() -> Iterator[str]:
    call = f"open('{CANARY}','w').close()"
    codes = [
        call,
        f"__import__('os').system('touch {CANARY}')",
        f'exec("{call}")',
        f'eval("{call}")',
    ]
    for code in (*codes, f"(lambda: {call})()"):
        yield code
        yield f"\\text{{{code}}}"
        yield f"1+{code}"
        yield f"x_{{{code}}}"
    yield f"\\input{{{CANARY}}}"
    yield f"\\write18{{touch {CANARY}}}"
    yield f"2*(3)).__class__.__init__.__globals__['__builtins__']['open']('{CANARY}','w')"


def _odd() -> Iterator[str]:
    yield from (
        "\\frac{1}{0}",
        "0^{0}",
        "\\frac{0}{0}",
        "\\infty-\\infty",
        "NaN",
        "nan",
        "inf",
        "\\sqrt{-1}^{i}",
    )
    yield from ("\\log 0", "\\tan\\frac{\\pi}{2}")
    yield from ("\U0001f600", "\x00", "\x1b[31m18", "\u202e81", "٣", "１７", "½")
    yield from ("\\", "{", "}", "$", "$$", "\\(", "\\[")
    yield from ("\\boxed", "%", "\\%", "\\frac{1}{", "^", "_", "&", "#")
    yield from (
        "\\begin{cases} x & y \\\\ z \\end{cases}",
        "x=x=x=x",
        "1<2<3<x<y",
        "x\\in\\emptyset",
    )
    yield from ("\\text{" + "a" * 500 + "}", "1,2,\\ldots,10^{9}")


def _raising() -> Iterator[str]:
    """Yield formulas on which sympy raises once ``i`` is the imaginary unit, or a sum has no value."""
    yield from ("1 \\le i \\le 5", "i<2", "(1,i)", "[i,1]", "\\max(i,j)", "\\min(1,i)", "i < j < k")
    yield from (
        "\\sum_{n=1}^{\\infty} 1",
        "\\sum_{n=1}^{\\infty} n",
        "\\prod_{n=1}^{\\infty} 2",
        "\\int_0^{\\infty} x dx",
    )
    yield from (
        "\\lfloor \\frac{1}{0} \\rfloor",
        "\\lceil \\frac{0}{0} \\rceil",
        "\\frac{1}{0}!",
        "(-1)!",
        "\\binom{1}{\\infty}",
    )
    yield from (
        "\\int_0^{\\infty} e^{-x^{x^{x}}} dx",
        "\\lim_{x \\to 0} \\frac{1}{x}",
        "\\log_1 2",
        "\\log_0 0",
        "0^{-1}",
    )
    yield from (
        "\\sqrt[0]{2}",
        "\\begin{pmatrix}1&2\\\\3\\end{pmatrix}",
        "\\begin{pmatrix}1\\end{pmatrix}^{-1/2}",
    )
    yield from (
        "\\begin{pmatrix}0&0\\\\0&0\\end{pmatrix}^{-1}",
        "\\begin{pmatrix}1&2\\end{pmatrix}\\begin{pmatrix}1&2\\end{pmatrix}",
    )
    yield from (
        "5 \\mod 0",
        "\\gcd(1,x)",
        "\\frac{d}{dx} 3",
        "x \\equiv 1 \\pmod 0",
        "1_1",
        "9_{99}",
        "0:00",
        "\\{x \\mid i < x\\}",
    )


def _prose() -> Iterator[str]:
    yield "\\boxed{17} " * 300
    yield "$" * 4000
    yield "\\boxed{" * 600
    yield "the final answer is " * 200
    yield "$\\boxed{17}$ and " * 200
    yield "answer: " * 400 + "17"
    yield "= " * 2000
    yield "[ " * 1000 + "] " * 1000
    yield "17" * 2000 + " I hope"
    yield "((1+" * 500 + "17"
    yield "\n" * 100_000
    yield "1 " * 2000
    yield "1/" * 2000
    yield "9**" * 1000 + "9"
    yield "18 or 17 or 16"
    yield "\\boxed{18}, \\boxed{17}, \\boxed{16}"
