"""Answers with equal and unequal references for ``bench.answers``, from small generators. Pure.

Each family is a kind with both verdicts. Its docstring says what proves them: exact arithmetic of
Python, which the reward does not use for that kind, or a proof by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import time
from decimal import Decimal
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Final, NamedTuple

PUBLISHED: Final = Path(__file__).with_name("published_answers.jsonl")


class AnswerPair(NamedTuple):
    """A response, its reference, whether they are equal, the kind of both, and what proves the
    verdict.
    """

    response: str
    reference: str
    equal: bool
    kind: str = ""
    proof: str = ""


Family = Callable[[], Iterator[AnswerPair]]


def pairs() -> list[AnswerPair]:
    """Return responses with equal and unequal references, each pair once."""
    from bench.support import answer_structures

    families: list[Family] = [*FAMILIES, *answer_structures.FAMILIES]
    found = [
        pair._replace(kind=family.__name__, proof=" ".join((family.__doc__ or "").split()))
        for family in families
        for pair in family()
    ]
    return list({pair[:2]: pair for pair in [*found, *published()]}.values())


def published() -> Iterator[AnswerPair]:
    """Return pairs of the tests of other graders; verdicts that differ from theirs say why."""
    for line in PUBLISHED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        proof = row.get("why") or f"the verdict of {row['source']}"
        yield AnswerPair(row["response"], row["reference"], row["equal"], row["kind"], proof)


def integers() -> Iterator[AnswerPair]:
    """Python compares the integers that the texts are made from."""
    for n in (0, 7, 42, 1234, 36000, 1234567, -15):
        forms = [
            f"#### {n}",
            f"#### {n:,}",
            f"#### **{n}**",
            f"#### {n}.",
            f"#### {n}.00",
            f"\\boxed{{{n}}}",
        ]
        forms += [f"It is $\\boxed{{{n}}}$.", f"The answer is {n}."]
        forms += [
            f"#### {n} apples",
            f"#### \\boxed{{{n:,}}}",
            f"\\boxed{{{n}}} as I said: \\boxed{{{n}}}",
        ]
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


def fractions() -> Iterator[AnswerPair]:
    """Equal fractions have equal cross products; 1/3 is 0.3333333 within six decimals and not 0.33."""
    for a, b in ((1, 2), (3, 4), (5, 8), (-7, 20), (9, 5)):
        forms = [
            f"#### {a}/{b}",
            f"\\boxed{{\\frac{{{a}}}{{{b}}}}}",
            f"$\\frac{{{3 * a}}}{{{3 * b}}}$",
        ]
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


def sets() -> Iterator[AnswerPair]:
    """Sets are equal if they have the same elements, in any order."""
    for items in ((2, 3, 5), (100, 200), (-2, 1), (1, 10, 100)):
        reference = ", ".join(f"\\boxed{{{item}}}" for item in items)
        for order in list(permutations(items))[:4]:
            yield AnswerPair(" and ".join(f"\\boxed{{{item}}}" for item in order), reference, True)
            yield AnswerPair(
                " and ".join(f"$\\boxed{{{item}}}$" for item in order),
                f"\\{{{','.join(map(str, items))}\\}}",
                True,
            )
            yield AnswerPair(
                f"\\boxed{{\\{{{', '.join(map(str, order))}\\}}}}",
                f"\\{{{', '.join(map(str, items))}\\}}",
                True,
            )
        yield AnswerPair(f"\\boxed{{{items[-1]}}}", reference, False)
        yield AnswerPair(f"\\boxed{{{', '.join(map(str, items[1:]))}}}", reference, False)
        yield AnswerPair(f"\\boxed{{\\{{{', '.join(map(str, (*items, 7)))}\\}}}}", reference, False)
        yield AnswerPair(
            f"\\boxed{{{''.join(map(str, items))}}}", f"\\{{{','.join(map(str, items))}\\}}", False
        )


def tuples() -> Iterator[AnswerPair]:
    """Tuples are equal if they have the same length and equal items in order."""
    for a, b in ((3, 4), (100, 200), (-1, 0), (12, 345)):
        reference = f"({a},{b})"
        forms = [f"#### ({a}, {b})", f"\\boxed{{({a},{b})}}", f"$\\left({a},{b}\\right)$"]
        for form in (*forms, f"The point is \\boxed{{({2 * a}/2, {b})}}."):
            yield AnswerPair(form, reference, True)
            yield AnswerPair(form, f"({b},{a})", False)
            yield AnswerPair(form, f"({a},{b},0)", False)
        yield AnswerPair(f"#### {abs(a)}{abs(b)}", f"({abs(a)},{abs(b)})", False)
        yield AnswerPair(f"#### ({abs(a)},{abs(b):03})", f"{abs(a)}{abs(b):03}", False)


def intervals() -> Iterator[AnswerPair]:
    """Intervals are equal if both ends and both brackets are."""
    for a, b in ((0, 1), (-3, 5), (2, 100)):
        yield AnswerPair(f"\\boxed{{[{a},{b})}}", f"[{a}, {b})", True)
        yield AnswerPair(f"\\boxed{{[{2 * a}/2,{b}]}}", f"[{a},{b}]", True)
        yield AnswerPair(f"\\boxed{{[{a},{b}]}}", f"[{a},{b})", False)
        yield AnswerPair(f"\\boxed{{[{a},{b + 1})}}", f"[{a},{b})", False)
        yield AnswerPair(
            f"\\boxed{{(-\\infty,{a})\\cup({b},\\infty)}}",
            f"(-\\infty,{a})\\cup({b},\\infty)",
            True,
        )
        yield AnswerPair(f"$x > {a}$", f"x > {a}", True)
        yield AnswerPair(f"${a} < x$", f"x > {a}", True)
        yield AnswerPair(f"$x < {a}$", f"x > {a}", False)


def polynomials() -> Iterator[AnswerPair]:
    """(x+a)(x+b) = x^2 + (a+b)x + ab; other coefficients give another polynomial."""
    for a, b in ((1, 2), (3, 5), (-1, 4), (2, 2)):
        expanded = f"x^2 + {a + b}x + {a * b}"
        factored = f"(x+{a})(x+{b})".replace("+-", "-")
        for form in (f"#### {expanded}", f"\\boxed{{{factored}}}", f"${factored}$"):
            yield AnswerPair(form, expanded.replace("+ -", "- "), True)
            yield AnswerPair(form, factored, True)
            yield AnswerPair(form, f"x^2 + {a + b + 1}x + {a * b}", False)
    yield AnswerPair("\\boxed{-q+p}", "p - q", True)
    yield AnswerPair("\\boxed{q-p}", "p - q", False)
    yield AnswerPair("\\boxed{x}", "x", True)
    yield AnswerPair("\\boxed{y}", "x", False)


def roots() -> Iterator[AnswerPair]:
    """a sqrt(b) = sqrt(a^2 b) = ab/sqrt(b), and the root is strictly monotonic."""
    for a, b in ((2, 2), (3, 5), (10, 3)):
        forms = [
            f"\\boxed{{\\sqrt{{{a * a * b}}}}}",
            f"#### {a}\\sqrt{{{b}}}",
            f"#### {a}*sqrt({b})",
        ]
        for form in (*forms, f"\\boxed{{\\frac{{{a * b}}}{{\\sqrt{{{b}}}}}}}"):
            yield AnswerPair(form, f"{a}\\sqrt{{{b}}}", True)
            yield AnswerPair(form, f"{a}\\sqrt{{{b + 2}}}", False)
    yield AnswerPair("\\boxed{\\sqrt[3]{8}}", "2", True)


def complex_numbers() -> Iterator[AnswerPair]:
    """Complex numbers are equal if both parts are; (a+i)^2 = a^2 - 1 + 2ai."""
    for a, b in ((6, 5), (1, 2), (3, 4)):
        forms = [f"#### {a} - {b}i", f"\\boxed{{{a}-{b}i}}", f"\\boxed{{-{b}i+{a}}}"]
        for form in (*forms, f"$\\frac{{{2 * a}-{2 * b}i}}{{2}}$"):
            yield AnswerPair(form, f"{a} - {b}i", True)
            yield AnswerPair(form, f"{a} + {b}i", False)
        yield AnswerPair(f"\\boxed{{({a}+i)^2}}", f"{a * a - 1}+{2 * a}i", True)
        yield AnswerPair(f"\\boxed{{{b}}}", f"{a} - {b}i", False)


def percents() -> Iterator[AnswerPair]:
    """n percent is n/100."""
    for n in (5, 25, 50):
        for form in (
            f"#### {n}%",
            f"\\boxed{{{n}\\%}}",
            f"\\boxed{{{n}}}\\%",
            f"$\\boxed{{{n}\\%}}$",
        ):
            yield AnswerPair(form, f"{n}\\%", True)
            yield AnswerPair(form, f"{n / 100:g}", True)
            yield AnswerPair(form, f"{n + 1}\\%", False)


def functions() -> Iterator[AnswerPair]:
    """Identities of calculus; adding one changes the value."""
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
        yield AnswerPair(
            f"\\boxed{{{formula}+1}}" if "begin" not in formula else matrix, reference, False
        )
    yield AnswerPair("#### 2pi", "2\\pi", True)
    yield AnswerPair("#### sin(x)", "\\sin x", True)


def equations() -> Iterator[AnswerPair]:
    """An equation that names its value has that value."""
    for n in (3, 12, -4):
        yield AnswerPair(f"\\boxed{{x={n}}}", str(n), True)
        yield AnswerPair(f"#### x = {n}", str(n), True)
        yield AnswerPair(f"#### {n}", f"x={n}", True)
        yield AnswerPair(f"\\boxed{{x={n}}}", str(n + 1), False)
        yield AnswerPair(f"\\boxed{{y = 2x + {n}}}".replace("+ -", "- "), f"y={n}+2x", True)
        yield AnswerPair(f"\\boxed{{y = 3x + {n}}}".replace("+ -", "- "), f"y={n}+2x", False)


def words() -> Iterator[AnswerPair]:
    """Words are equal without case and markup."""
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


def powers() -> Iterator[AnswerPair]:
    """Python computes the powers exactly."""
    for base in (2, 3, 7, 10):
        for exponent in (2, 3, 5):
            yield AnswerPair(f"\\boxed{{{base}^{exponent}}}", str(base**exponent), True)
            yield AnswerPair(f"#### {base**exponent}", f"{base}^{{{exponent}}}", True)
            yield AnswerPair(f"\\boxed{{{base}^{exponent}}}", str(base**exponent + 1), False)


def factorials() -> Iterator[AnswerPair]:
    """math.factorial; n! differs from n for n over 2, and x! is another function than x."""
    for n in (3, 4, 5, 7, 10):
        yield AnswerPair(f"\\boxed{{{n}!}}", str(math.factorial(n)), True)
        yield AnswerPair(f"#### {math.factorial(n)}", f"{n}!", True)
        yield AnswerPair(f"\\boxed{{{n}}}", f"{n}!", False)
        yield AnswerPair(f"\\boxed{{{n}!}}", f"{n + 1}!", False)
    for name in "xnm":
        yield AnswerPair(f"\\boxed{{{name}!}}", f"{name}!", True)
        yield AnswerPair(f"\\boxed{{{name}}}", f"{name}!", False)


def binomials() -> Iterator[AnswerPair]:
    """math.comb."""
    for n, k in ((5, 2), (6, 3), (10, 4), (12, 1)):
        for form in (f"\\boxed{{\\binom{{{n}}}{{{k}}}}}", f"$\\dbinom{{{n}}}{{{n - k}}}$"):
            yield AnswerPair(form, str(math.comb(n, k)), True)
            yield AnswerPair(form, str(math.comb(n, k) + n), False)


def logarithms() -> Iterator[AnswerPair]:
    """log_b(b^n) = n, and the logarithm is strictly monotonic."""
    for base in (2, 3, 10):
        for n in (1, 2, 4):
            yield AnswerPair(f"\\boxed{{\\log_{{{base}}} {base**n}}}", str(n), True)
            yield AnswerPair(f"\\boxed{{\\log_{{{base}}} {base**n}}}", str(n + 1), False)
    yield AnswerPair("\\boxed{\\ln e^5}", "5", True)
    yield AnswerPair("\\boxed{2\\ln 3}", "\\ln 9", True)
    yield AnswerPair("\\boxed{2\\ln 3}", "\\ln 6", False)


def trigonometry() -> Iterator[AnswerPair]:
    """Values at multiples of 30 and 45 degrees, and the addition formulas."""
    values = (
        ("\\sin\\frac{\\pi}{6}", "\\frac{1}{2}"),
        ("\\cos\\frac{\\pi}{3}", "0.5"),
        ("\\tan\\frac{\\pi}{4}", "1"),
    )
    more = (
        ("\\sin\\frac{\\pi}{3}", "\\frac{\\sqrt{3}}{2}"),
        ("\\arctan 1", "\\frac{\\pi}{4}"),
        ("\\sec^2 x", "1+\\tan^2 x"),
    )
    for formula, value in values + more:
        yield AnswerPair(f"\\boxed{{{formula}}}", value, True)
        yield AnswerPair(f"\\boxed{{{formula}}}", f"{value} + 1", False)
        yield AnswerPair(f"\\boxed{{{value}}}", formula, True)


def sums() -> Iterator[AnswerPair]:
    """Python adds the terms."""
    for n in (3, 5, 10):
        total = sum(k * k for k in range(1, n + 1))
        yield AnswerPair(f"\\boxed{{\\sum_{{k=1}}^{{{n}}} k^2}}", str(total), True)
        yield AnswerPair(f"\\boxed{{\\sum_{{k=1}}^{{{n}}} k^2}}", str(total - 1), False)
        yield AnswerPair(
            f"\\boxed{{\\prod_{{k=1}}^{{{n}}} k}}", str(math.prod(range(1, n + 1))), True
        )
    yield AnswerPair("\\boxed{\\sum_{n=1}^{\\infty} 1}", "42", False)


def integrals() -> Iterator[AnswerPair]:
    """The integral of x^n from 0 to 1 is 1/(n+1)."""
    for n in (1, 2, 3, 5):
        yield AnswerPair(f"\\boxed{{\\int_0^1 x^{n} dx}}", f"\\frac{{1}}{{{n + 1}}}", True)
        yield AnswerPair(f"\\boxed{{\\int_0^1 x^{n} dx}}", f"\\frac{{1}}{{{n}}}", False)


def absolute_values() -> Iterator[AnswerPair]:
    """Python's abs."""
    for n in (-7, -1, 4):
        for form in (
            f"\\boxed{{|{n}|}}",
            f"$\\left|{n}\\right|$",
            f"\\boxed{{\\lvert {n}\\rvert}}",
        ):
            yield AnswerPair(form, str(abs(n)), True)
            yield AnswerPair(form, str(abs(n) + 1), False)


def mixed_numbers() -> Iterator[AnswerPair]:
    """fractions.Fraction adds the whole and the part."""
    for whole, up, down in ((3, 1, 2), (1, 3, 4), (10, 2, 5), (2, 5, 6)):
        value = whole + Fraction(up, down)
        forms = [
            f"{whole} {up}/{down}",
            f"\\boxed{{{whole}\\frac{{{up}}}{{{down}}}}}",
            f"\\boxed{{{whole} {up}/{down}}}",
        ]
        for form in (*forms, f"#### {whole}\\,\\tfrac{{{up}}}{{{down}}}"):
            yield AnswerPair(form, f"{value.numerator}/{value.denominator}", True)
            yield AnswerPair(form, str(whole), False)
            yield AnswerPair(form, f"{up}/{down}", False)
        yield AnswerPair(
            f"\\boxed{{-{whole}\\frac{{{up}}}{{{down}}}}}",
            f"-{value.numerator}/{value.denominator}",
            True,
        )


def repeating_decimals() -> Iterator[AnswerPair]:
    """fractions.Fraction: the period over as many nines."""
    for head, period in (("", "3"), ("", "4"), ("1", "6"), ("", "142857"), ("58", "3"), ("", "09")):
        scale = 10 ** len(head)
        value = Fraction(int(head or 0), scale) + Fraction(
            int(period), scale * (10 ** len(period) - 1)
        )
        reference = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
        decimal = f"0.{head}\\overline{{{period}}}"
        for form in (
            decimal,
            f"0.{head}({period})",
            f"0.{head}\\bar{{{period}}}",
            f"0.{head}{period * 3}\\ldots",
        ):
            yield AnswerPair(f"\\boxed{{{form}}}", reference, True)
            if len(period) < 6:
                yield AnswerPair(f"\\boxed{{{form}}}", f"0.{head}{period}", False)
        yield AnswerPair(f"\\boxed{{{reference}}}", decimal, True)
        yield AnswerPair(f"\\boxed{{0.{head}{period[:3]}}}", decimal, False)
    yield AnswerPair("\\boxed{0.\\overline{9}}", "1", True)
    yield AnswerPair("\\boxed{0.\\overline{9}}", "0", False)


def bases() -> Iterator[AnswerPair]:
    """int(digits, base); a number without a base is decimal."""
    names = {2: "two", 3: "three", 5: "five", 8: "eight"}
    for digits, base in (("204", 5), ("1011", 2), ("777", 8), ("212", 3)):
        value = int(digits, base)
        for form in (f"{digits}_{base}", f"{digits}_{{{base}}}"):
            yield AnswerPair(f"\\boxed{{{form}}}", f"{digits}_{base}", True)
            yield AnswerPair(f"\\boxed{{{form}}}", f"{digits}_{{{base + 1}}}", False)
            yield AnswerPair(f"\\boxed{{{form}}}", str(value), True)
            yield AnswerPair(f"\\boxed{{{form}}}", digits, False)
        yield AnswerPair(f"\\boxed{{{digits}}}", f"{digits}_{base}", False)
        yield AnswerPair(
            f"\\boxed{{{digits}_{{\\text{{{names[base]}}}}}}}", f"{digits}_{base}", True
        )


def clocks() -> Iterator[AnswerPair]:
    """datetime.time."""
    for moment in (time(6, 0), time(2, 15), time(11, 45)):
        text = f"{moment.hour}:{moment.minute:02}"
        yield AnswerPair(f"\\boxed{{{text}}}", text, True)
        yield AnswerPair(f"\\boxed{{{text}\\text{{ AM}}}}", f"{text} a.m.", True)
        yield AnswerPair(f"\\boxed{{{text}\\text{{ AM}}}}", f"{text} PM", False)
        yield AnswerPair(f"\\boxed{{{moment.hour + 12}:{moment.minute:02}}}", f"{text} PM", True)
        for other in (
            f"{moment.hour + 1}:{moment.minute:02}",
            f"{2 * moment.hour}:{(2 * moment.minute) % 60:02}",
        ):
            yield AnswerPair(f"\\boxed{{{other}}}", text, False)


def ratios() -> Iterator[AnswerPair]:
    """Ratios are equal if their fractions are."""
    for a, b in ((1, 2), (3, 4), (5, 7)):
        yield AnswerPair(f"\\boxed{{{2 * a}:{2 * b}}}", f"{a}:{b}", True)
        yield AnswerPair(f"\\boxed{{{a} : {b}}}", f"{a}:{b}", True)
        yield AnswerPair(f"\\boxed{{\\frac{{{a}}}{{{b}}}}}", f"{a}:{b}", True)
        yield AnswerPair(f"\\boxed{{{b}:{a}}}", f"{a}:{b}", False)
        yield AnswerPair(f"\\boxed{{{a}:{b}:1}}", f"{a}:{b}", False)


def undefined_values() -> Iterator[AnswerPair]:
    """What has no value equals no value; only the same writing is the same answer."""
    for formula, other in (
        ("\\frac{1}{0}", "\\frac{2}{0}"),
        ("\\frac{0}{0}", "\\frac{1}{0}"),
        ("1/0", "3/0"),
    ):
        yield AnswerPair(f"\\boxed{{{formula}}}", formula, True)
        yield AnswerPair(f"\\boxed{{{other}}}", formula, False)
        yield AnswerPair(f"\\boxed{{{formula}}}", "0", False)
        yield AnswerPair(f"\\boxed{{\\lfloor {formula} \\rfloor}}", "42", False)


def digit_groups() -> Iterator[AnswerPair]:
    """Groups of three digits are one number; the last group is another."""
    for n in (1234567, 36000, 10000000):
        for separator in (",", "\u2009", "\u202f", "\u00a0", "\\,", "{,}", "'", " ", ",\\! "):
            text = f"{n:,}".replace(",", separator)
            yield AnswerPair(f"\\boxed{{{text}}}", str(n), True)
            yield AnswerPair(f"\\boxed{{{text}}}", str(n % 1000), False)
    yield AnswerPair("\\boxed{32, 349}", "32349", False)
    yield AnswerPair("\\boxed{1,234, 5}", "5, 1234", True)


def scientific_notation() -> Iterator[AnswerPair]:
    """decimal.Decimal."""
    for text in ("1.5e3", "2e-4", "6.02e5"):
        value, (mantissa, power) = Decimal(text), text.split("e")
        for form in (
            text,
            f"{mantissa} \\times 10^{{{power}}}",
            f"{mantissa}\\cdot 10^{{{power}}}",
        ):
            yield AnswerPair(f"\\boxed{{{form}}}", f"{value:f}", True)
            yield AnswerPair(f"\\boxed{{{form}}}", f"{value * 10:f}", False)


def signs() -> Iterator[AnswerPair]:
    """+n is n, and -n differs from it."""
    for n in (7, 42, 100):
        for form in (f"Therefore the answer is +{n}", f"\\boxed{{+{n}}}", f"#### +{n}"):
            yield AnswerPair(form, f"+{n}", True)
            yield AnswerPair(form, str(n), True)
            yield AnswerPair(form, str(-n), False)
        yield AnswerPair(f"\\boxed{{\u2212{n}}}", str(-n), True)


def approximations() -> Iterator[AnswerPair]:
    """Decimals agree with a fraction if six decimals do."""
    for value, digits in (
        (Fraction(1, 3), "0.333333"),
        (Fraction(2, 7), "0.285714"),
        (Fraction(5, 6), "0.833333"),
    ):
        yield AnswerPair(f"\\boxed{{{digits}}}", f"{value}", True)
        yield AnswerPair(f"\\boxed{{{digits[:4]}}}", f"{value}", False)
        yield AnswerPair(f"\\boxed{{{value} \\approx {digits[:4]}}}", f"{value}", True)
    yield AnswerPair("\\boxed{x \\approx 11}", "11", True)
    yield AnswerPair("\\boxed{16.67}", "16.\\overline{6}", False)


FAMILIES: Final[tuple[Family, ...]] = (
    *(
        integers,
        fractions,
        sets,
        tuples,
        intervals,
        polynomials,
        roots,
        complex_numbers,
        percents,
        functions,
    ),
    *(
        equations,
        words,
        powers,
        factorials,
        binomials,
        logarithms,
        trigonometry,
        sums,
        integrals,
        absolute_values,
    ),
    *(mixed_numbers, repeating_decimals, bases, clocks, ratios, undefined_values, digit_groups),
    *(scientific_notation, signs, approximations),
)
