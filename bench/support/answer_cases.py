"""Answers for ``bench.answers``: adversarial ones, and equal and unequal pairs, from small generators. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Final, NamedTuple

CANARY: Final = "CANARY"  # in an answer: replaced by the path of a file that only executed code would make


class AnswerPair(NamedTuple):
    """A response, its reference, and whether they are equal."""

    response: str
    reference: str
    equal: bool


def adversarial() -> list[str]:
    """Yield responses that are all wrong where 18 is the right answer."""
    formulas = dict.fromkeys(
        [*_huge_numbers(), *_huge_sums(), *_nested(), *_expansions(), *_transcendental(), *_long(), *_code(), *_odd()]
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
    yield from ("5!!!!!!!!", "(((9!)!)!)!", "0.5^{-10^{12}}", "e^{e^{e^{e^{10}}}}", "10^{-10^{10^{10}}}")
    yield from ("(10^{10^{10}})^{0}", "\\pi^{10^{10^{8}}}")


def _huge_sums() -> Iterator[str]:
    for top in ("10^{6}", "10^{9}", "10^{10^{10}}", "\\infty"):
        yield f"\\sum_{{n=1}}^{{{top}}} \\frac{{1}}{{n^2+n!}}"
        yield f"\\sum_{{n=1}}^{{{top}}} \\sin(n^3)"
        yield f"\\prod_{{n=1}}^{{{top}}} (n^2+1)"
        yield f"\\sum_{{i=1}}^{{{top}}} \\sum_{{j=1}}^{{{top}}} \\frac{{i}}{{j+i^j}}"
        yield f"\\int_0^{{{top}}} \\frac{{\\sin(x^x)}}{{\\ln(x+e^x)}} dx"
    for n in range(1, 5):
        yield "\\int_0^1 " * n + "e^{\\sin(x y z)} \\cos(e^{x})" + "".join(f" d{v}" for v in "xyzw"[:n])
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
    codes = [call, f"__import__('os').system('touch {CANARY}')", f'exec("{call}")', f'eval("{call}")']
    for code in (*codes, f"(lambda: {call})()"):
        yield code
        yield f"\\text{{{code}}}"
        yield f"1+{code}"
        yield f"x_{{{code}}}"
    yield f"\\input{{{CANARY}}}"
    yield f"\\write18{{touch {CANARY}}}"
    yield f"2*(3)).__class__.__init__.__globals__['__builtins__']['open']('{CANARY}','w')"


def _odd() -> Iterator[str]:
    yield from ("\\frac{1}{0}", "0^{0}", "\\frac{0}{0}", "\\infty-\\infty", "NaN", "nan", "inf", "\\sqrt{-1}^{i}")
    yield from ("\\log 0", "\\tan\\frac{\\pi}{2}")
    yield from ("\U0001f600", "\x00", "\x1b[31m18", "\u202e81", "٣", "１７", "½")
    yield from ("\\", "{", "}", "$", "$$", "\\(", "\\[")
    yield from ("\\boxed", "%", "\\%", "\\frac{1}{", "^", "_", "&", "#")
    yield from ("\\begin{cases} x & y \\\\ z \\end{cases}", "x=x=x=x", "1<2<3<x<y", "x\\in\\emptyset")
    yield from ("\\text{" + "a" * 500 + "}", "1,2,\\ldots,10^{9}")


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


def pairs() -> list[AnswerPair]:
    """Return responses with equal and unequal references."""
    families = (
        *(_integers, _fractions, _sets, _tuples, _intervals, _polynomials),
        *(_roots, _complex, _percents, _functions, _equations, _words),
    )
    return [pair for family in families for pair in family()]


def _integers() -> Iterator[AnswerPair]:
    for n in (0, 7, 42, 1234, 36000, 1234567, -15):
        forms = [f"#### {n}", f"#### {n:,}", f"#### **{n}**", f"#### {n}.", f"#### {n}.00", f"\\boxed{{{n}}}"]
        forms += [f"It is $\\boxed{{{n}}}$.", f"The answer is {n}."]
        forms += [f"#### {n} apples", f"#### \\boxed{{{n:,}}}", f"\\boxed{{{n}}} as I said: \\boxed{{{n}}}"]
        forms += [f"$x = {n}$", f"#### Step 2: 5 more\n\\boxed{{{n}}}"]
        for form in forms:
            yield AnswerPair(form, f"work\n#### {n:,}", True)
            yield AnswerPair(form, str(n + 1), False)
        yield AnswerPair(f"\\boxed{{{n - 1}}} or \\boxed{{{n}}}", str(n), False)
        yield AnswerPair(f"#### ${abs(n):,}", str(abs(n)), True)
    for n in (2, 5, 10):
        yield AnswerPair(f"#### 2^{n}", str(2**n), True)
        yield AnswerPair(f"#### 2**{n}", f"{2**n}", True)
        yield AnswerPair(f"\\boxed{{{n}!}}", str(n), n == 2)
        yield AnswerPair(f"#### {n}*3", str(3 * n), True)
        yield AnswerPair(f"\\boxed{{\\binom{{{n + 2}}}{{2}}}}", str((n + 2) * (n + 1) // 2), True)
        yield AnswerPair(f"\\boxed{{\\sum_{{i=1}}^{{{n}}} i}}", str(n * (n + 1) // 2), True)
        yield AnswerPair(f"#### 1.5e{n}", str(15 * 10 ** (n - 1)), True)


def _fractions() -> Iterator[AnswerPair]:
    for a, b in ((1, 2), (3, 4), (5, 8), (-7, 20), (9, 5)):
        forms = [f"#### {a}/{b}", f"\\boxed{{\\frac{{{a}}}{{{b}}}}}", f"$\\frac{{{3 * a}}}{{{3 * b}}}$"]
        for form in (*forms, f"#### {a / b:g}", f"\\boxed{{\\dfrac{{{a}}}{{{b}}}}}"):
            yield AnswerPair(form, f"\\frac{{{a}}}{{{b}}}", True)
            yield AnswerPair(form, f"{a / b:g}", True)
            yield AnswerPair(form, f"\\frac{{{a}}}{{{b + 1}}}", False)
    yield AnswerPair("#### 0.3333333", "\\frac{1}{3}", True)
    yield AnswerPair("#### 0.33", "\\frac{1}{3}", False)
    for power in (4, 7, 20):
        yield AnswerPair(f"#### 2e-{power}", f"2 \\cdot 10^{{-{power}}}", True)
        yield AnswerPair(f"\\boxed{{10^{{-{power}}}}}", f"2 \\cdot 10^{{-{power}}}", False)
        yield AnswerPair("#### 0.0", f"10^{{-{power}}}", False)
        yield AnswerPair("#### 0", f"1e-{power}", False)
    yield AnswerPair("\\boxed{3\\frac{1}{2}}", "7/2", True)


def _sets() -> Iterator[AnswerPair]:
    for items in ((2, 3, 5), (100, 200), (-2, 1), (1, 10, 100)):
        reference = ", ".join(f"\\boxed{{{item}}}" for item in items)
        for order in list(permutations(items))[:4]:
            yield AnswerPair(" and ".join(f"\\boxed{{{item}}}" for item in order), reference, True)
            yield AnswerPair(
                " and ".join(f"$\\boxed{{{item}}}$" for item in order), f"\\{{{','.join(map(str, items))}\\}}", True
            )
            yield AnswerPair(
                f"\\boxed{{\\{{{', '.join(map(str, order))}\\}}}}", f"\\{{{', '.join(map(str, items))}\\}}", True
            )
        yield AnswerPair(f"\\boxed{{{items[-1]}}}", reference, False)
        yield AnswerPair(f"\\boxed{{{', '.join(map(str, items[1:]))}}}", reference, False)
        yield AnswerPair(f"\\boxed{{\\{{{', '.join(map(str, (*items, 7)))}\\}}}}", reference, False)
        yield AnswerPair(f"\\boxed{{{''.join(map(str, items))}}}", f"\\{{{','.join(map(str, items))}\\}}", False)


def _tuples() -> Iterator[AnswerPair]:
    for a, b in ((3, 4), (100, 200), (-1, 0), (12, 345)):
        reference = f"({a},{b})"
        forms = [f"#### ({a}, {b})", f"\\boxed{{({a},{b})}}", f"$\\left({a},{b}\\right)$"]
        for form in (*forms, f"The point is \\boxed{{({2 * a}/2, {b})}}."):
            yield AnswerPair(form, reference, True)
            yield AnswerPair(form, f"({b},{a})", False)
            yield AnswerPair(form, f"({a},{b},0)", False)
        yield AnswerPair(f"#### {abs(a)}{abs(b)}", f"({abs(a)},{abs(b)})", False)
        yield AnswerPair(f"#### ({abs(a)},{abs(b):03})", f"{abs(a)}{abs(b):03}", False)


def _intervals() -> Iterator[AnswerPair]:
    for a, b in ((0, 1), (-3, 5), (2, 100)):
        yield AnswerPair(f"\\boxed{{[{a},{b})}}", f"[{a}, {b})", True)
        yield AnswerPair(f"\\boxed{{[{2 * a}/2,{b}]}}", f"[{a},{b}]", True)
        yield AnswerPair(f"\\boxed{{[{a},{b}]}}", f"[{a},{b})", False)
        yield AnswerPair(f"\\boxed{{[{a},{b + 1})}}", f"[{a},{b})", False)
        yield AnswerPair(f"\\boxed{{(-\\infty,{a})\\cup({b},\\infty)}}", f"(-\\infty,{a})\\cup({b},\\infty)", True)
        yield AnswerPair(f"$x > {a}$", f"x > {a}", True)
        yield AnswerPair(f"${a} < x$", f"x > {a}", True)
        yield AnswerPair(f"$x < {a}$", f"x > {a}", False)


def _polynomials() -> Iterator[AnswerPair]:
    for a, b in ((1, 2), (3, 5), (-1, 4), (2, 2)):
        expanded, factored = f"x^2 + {a + b}x + {a * b}", f"(x+{a})(x+{b})".replace("+-", "-")
        for form in (f"#### {expanded}", f"\\boxed{{{factored}}}", f"${factored}$"):
            yield AnswerPair(form, expanded.replace("+ -", "- "), True)
            yield AnswerPair(form, factored, True)
            yield AnswerPair(form, f"x^2 + {a + b + 1}x + {a * b}", False)
    yield AnswerPair("\\boxed{-q+p}", "p - q", True)
    yield AnswerPair("\\boxed{q-p}", "p - q", False)
    yield AnswerPair("\\boxed{x}", "x", True)
    yield AnswerPair("\\boxed{y}", "x", False)


def _roots() -> Iterator[AnswerPair]:
    for a, b in ((2, 2), (3, 5), (10, 3)):
        forms = [f"\\boxed{{\\sqrt{{{a * a * b}}}}}", f"#### {a}\\sqrt{{{b}}}", f"#### {a}*sqrt({b})"]
        for form in (*forms, f"\\boxed{{\\frac{{{a * b}}}{{\\sqrt{{{b}}}}}}}"):
            yield AnswerPair(form, f"{a}\\sqrt{{{b}}}", True)
            yield AnswerPair(form, f"{a}\\sqrt{{{b + 2}}}", False)
    yield AnswerPair("\\boxed{\\sqrt[3]{8}}", "2", True)


def _complex() -> Iterator[AnswerPair]:
    for a, b in ((6, 5), (1, 2), (3, 4)):
        forms = [f"#### {a} - {b}i", f"\\boxed{{{a}-{b}i}}", f"\\boxed{{-{b}i+{a}}}"]
        for form in (*forms, f"$\\frac{{{2 * a}-{2 * b}i}}{{2}}$"):
            yield AnswerPair(form, f"{a} - {b}i", True)
            yield AnswerPair(form, f"{a} + {b}i", False)
        yield AnswerPair(f"\\boxed{{({a}+i)^2}}", f"{a * a - 1}+{2 * a}i", True)
        yield AnswerPair(f"\\boxed{{{b}}}", f"{a} - {b}i", False)


def _percents() -> Iterator[AnswerPair]:
    for n in (5, 25, 50):
        for form in (f"#### {n}%", f"\\boxed{{{n}\\%}}", f"\\boxed{{{n}}}\\%", f"$\\boxed{{{n}\\%}}$"):
            yield AnswerPair(form, f"{n}\\%", True)
            yield AnswerPair(form, f"{n / 100:g}", True)
            yield AnswerPair(form, f"{n + 1}\\%", False)


def _functions() -> Iterator[AnswerPair]:
    equal = (
        ("\\sin\\frac{\\pi}{6}", "1/2"),
        ("\\sin^2 x + \\cos^2 x", "1"),
        ("\\log_2 8", "3"),
        ("\\ln e^2", "2"),
        ("2\\sin x\\cos x", "\\sin(2x)"),
        ("e^{\\ln 5}", "5"),
        ("\\int_0^1 2x dx", "1"),
        ("\\frac{\\pi}{4}", "\\pi/4"),
        ("|{-3}|", "3"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    )
    for formula, reference in equal:
        yield AnswerPair(f"\\boxed{{{formula}}}", reference, True)
        yield AnswerPair(f"$${formula}$$", reference, True)
        matrix = "\\boxed{\\begin{pmatrix}1\\\\3\\end{pmatrix}}"
        yield AnswerPair(f"\\boxed{{{formula}+1}}" if "begin" not in formula else matrix, reference, False)
    yield AnswerPair("#### 2pi", "2\\pi", True)
    yield AnswerPair("#### sin(x)", "\\sin x", True)


def _equations() -> Iterator[AnswerPair]:
    for n in (3, 12, -4):
        yield AnswerPair(f"\\boxed{{x={n}}}", str(n), True)
        yield AnswerPair(f"#### x = {n}", str(n), True)
        yield AnswerPair(f"#### {n}", f"x={n}", True)
        yield AnswerPair(f"\\boxed{{x={n}}}", str(n + 1), False)
        yield AnswerPair(f"\\boxed{{y = 2x + {n}}}".replace("+ -", "- "), f"y={n}+2x", True)
        yield AnswerPair(f"\\boxed{{y = 3x + {n}}}".replace("+ -", "- "), f"y={n}+2x", False)


def _words() -> Iterator[AnswerPair]:
    for word, other in (("yes", "no"), ("left", "right"), ("Mount Everest", "Mont Blanc")):
        forms = [word, f"{word.upper()}.", f"#### **{word}**", f"\\boxed{{\\text{{{word}}}}}"]
        for form in (*forms, f"The answer is {word}."):
            yield AnswerPair(form, word, True)
            yield AnswerPair(form, other, False)
    for letter in "ABCD":
        yield AnswerPair(f"\\boxed{{{letter}}}", letter, True)
        yield AnswerPair(f"#### ({letter})", letter, True)
        yield AnswerPair(f"\\boxed{{\\text{{({letter})}}}}", letter, True)
        yield AnswerPair(f"\\boxed{{{letter}}}", "E", False)
