"""Answers with a structure, and answers in prose, for ``bench.answers``. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.support.answer_pairs import AnswerPair, Family


def _matrix(rows: list[list[str]], environment: str = "pmatrix", *, wide: bool = True) -> str:
    blank = " " if wide else ""
    body = f"{blank}\\\\{blank}".join(f"{blank}&{blank}".join(row) for row in rows)
    return f"\\begin{{{environment}}}{blank}{body}{blank}\\end{{{environment}}}"


def matrices() -> Iterator[AnswerPair]:
    """Matrices are equal if they have the same shape and equal entries; brackets and blanks do not
    matter.
    """
    for rows in (
        [["0", "3"], ["0", "-1"]],
        [["1", "2", "3"], ["4", "5", "6"]],
        [["\\frac{1}{2}", "x"], ["0", "1"]],
    ):
        halves = [[entry.replace("\\frac{1}{2}", "0.5") for entry in row] for row in rows]
        changed = [[*row] for row in rows]
        changed[0][0] = "7"
        for form in (
            _matrix(rows, wide=False),
            _matrix(rows, "bmatrix"),
            _matrix(halves),
            f"A = {_matrix(rows)}",
        ):
            yield AnswerPair(f"\\boxed{{{form}}}", _matrix(rows), True)
            yield AnswerPair(f"\\boxed{{{form}}}", f"${_matrix(rows)}$", True)
            yield AnswerPair(f"\\boxed{{{form}}}", _matrix(changed), False)
        yield AnswerPair(f"\\boxed{{{rows[-1][-1]}}}", _matrix(rows), False)
        yield AnswerPair(f"\\boxed{{{_matrix(rows)}}}", rows[-1][-1], False)
        yield AnswerPair(
            f"\\boxed{{{_matrix([list(column) for column in zip(*rows, strict=True)])}}}",
            _matrix(rows),
            False,
        )
    yield AnswerPair(
        "$\\left[\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right]$",
        _matrix([["1", "2"], ["3", "4"]]),
        True,
    )


def vectors() -> Iterator[AnswerPair]:
    """A column is a tuple of coordinates, and not a row."""
    for a, b in ((1, 2), (-3, 5), (7, 0)):
        column = _matrix([[str(a)], [str(b)]])
        yield AnswerPair(f"\\boxed{{({a}, {b})}}", column, True)
        yield AnswerPair(f"\\boxed{{{column}}}", f"({a},{b})", True)
        yield AnswerPair(f"\\boxed{{{_matrix([[str(a), str(b)]])}}}", column, False)
        yield AnswerPair(f"\\boxed{{({b}, {a})}}", column, False)


def determinants() -> Iterator[AnswerPair]:
    """ad - bc; a determinant is a number and no matrix."""
    for a, b, c, d in ((1, 2, 3, 4), (2, 0, 0, 5)):
        text = _matrix([[str(a), str(b)], [str(c), str(d)]], "vmatrix")
        yield AnswerPair(f"\\boxed{{{text}}}", str(a * d - b * c), True)
        yield AnswerPair(f"\\boxed{{{text}}}", str(a * d + b * c + 1), False)


def matrix_expressions() -> Iterator[AnswerPair]:
    """Sums and multiples are computed entry by entry."""
    one = [["1", "2"], ["3", "4"]]
    two = [["2", "4"], ["6", "8"]]
    yield AnswerPair(f"$2{_matrix(one)}$", f"${_matrix(two)}$", True)
    yield AnswerPair(f"${_matrix(one)} + {_matrix(one)}$", _matrix(two), True)
    yield AnswerPair(f"$3{_matrix(one)}$", f"${_matrix(two)}$", False)
    yield AnswerPair(f"${_matrix(one)} + {_matrix(two)}$", _matrix(two), False)


def cases() -> Iterator[AnswerPair]:
    """Functions by cases are equal if each case is, in any order."""
    head = "\\begin{cases}"
    tail = "\\end{cases}"
    for a, b in (("x", "-x"), ("x^2", "0"), ("1", "2x")):
        reference = f"{head} {a} & x \\ge 0 \\\\ {b} & x < 0 {tail}"
        yield AnswerPair(f"\\boxed{{{head}{a}&x\\geq 0\\\\{b}&x<0{tail}}}", reference, True)
        yield AnswerPair(
            f"\\boxed{{{head}{b}, & \\text{{if }} x<0\\\\{a}, & \\text{{if }} x\\ge 0{tail}}}",
            reference,
            True,
        )
        yield AnswerPair(f"\\boxed{{{head}{a}&x>0\\\\{b}&x<0{tail}}}", reference, False)
        yield AnswerPair(f"\\boxed{{{head}{b}&x\\ge 0\\\\{a}&x<0{tail}}}", reference, False)
        yield AnswerPair(f"\\boxed{{{reference}}}", "0", False)


def systems() -> Iterator[AnswerPair]:
    """Systems are equal if they have the same equations, in any order."""
    for a, b in ((1, 2), (-3, 4)):
        reference = f"\\begin{{aligned}} x &= {a} \\\\ y &= {b} \\end{{aligned}}"
        yield AnswerPair(
            f"\\boxed{{\\begin{{align*}}y&={b}\\\\x&={a}\\end{{align*}}}}", reference, True
        )
        yield AnswerPair(f"\\boxed{{x={a}, y={b}}}", reference, True)
        yield AnswerPair(
            f"\\boxed{{\\begin{{cases}}x={a}\\\\y={b}\\end{{cases}}}}", reference, True
        )
        yield AnswerPair(f"\\boxed{{x={b}, y={a}}}", reference, False)
        yield AnswerPair(f"\\boxed{{{b}}}", reference, False)


def named_values() -> Iterator[AnswerPair]:
    """Values belong to their names."""
    for a, b in ((2, 5), (-1, 3)):
        yield AnswerPair(f"\\boxed{{y={b}, x={a}}}", f"x={a}, y={b}", True)
        yield AnswerPair(f"\\boxed{{{a}, {b}}}", f"x={a}, y={b}", True)
        yield AnswerPair(f"\\boxed{{{b}, {a}}}", f"x={a}, y={b}", False)
        yield AnswerPair(f"\\boxed{{x={b}, y={a}}}", f"x={a}, y={b}", False)
        yield AnswerPair(f"\\boxed{{(x,y)=({a},{b})}}", f"({a},{b})", True)
        yield AnswerPair(f"\\boxed{{x={a}\\text{{ or }}x={b}}}", f"x={b}, x={a}", True)
        yield AnswerPair(f"\\boxed{{({a},{b})}}", f"(p,q)=({b},{a})", False)


def congruences() -> Iterator[AnswerPair]:
    """Residues are equal if the modulus divides their difference."""
    for residue, modulus in ((1, 3), (2, 5), (4, 7)):
        reference = f"n \\equiv {residue} \\pmod {modulus}"
        for value in (residue, residue + modulus, residue - modulus):
            yield AnswerPair(f"\\boxed{{n \\equiv {value} \\pmod{{{modulus}}}}}", reference, True)
            yield AnswerPair(
                f"\\boxed{{n \\equiv {value + 1} \\pmod{{{modulus}}}}}", reference, False
            )
            yield AnswerPair(
                f"\\boxed{{n \\equiv {value} \\pmod{{{modulus + 1}}}}}", reference, False
            )
        yield AnswerPair(f"\\boxed{{{residue} \\pmod{{{modulus}}}}}", reference, True)
        yield AnswerPair(f"\\boxed{{{modulus}}}", reference, False)
        yield AnswerPair(f"\\boxed{{m \\equiv {residue} \\pmod{{{modulus}}}}}", reference, False)


def set_builders() -> Iterator[AnswerPair]:
    """A bound variable may have any name; x > a is the interval from a to infinity."""
    for a in (2, -1, 10):
        reference = f"\\{{x \\mid x > {a}\\}}"
        yield AnswerPair(f"\\boxed{{\\{{x : x > {a}\\}}}}", reference, True)
        yield AnswerPair(f"\\boxed{{\\{{t \\mid t > {a}\\}}}}", reference, True)
        yield AnswerPair(f"\\boxed{{\\{{x \\mid {a} < x\\}}}}", reference, True)
        yield AnswerPair(f"\\boxed{{({a}, \\infty)}}", reference, True)
        yield AnswerPair(f"\\boxed{{\\{{x \\mid x > {a + 1}\\}}}}", reference, False)
        yield AnswerPair(f"\\boxed{{\\{{x \\mid x < {a}\\}}}}", reference, False)
        yield AnswerPair(f"\\boxed{{{a}}}", reference, False)


def inequalities() -> Iterator[AnswerPair]:
    """A chain of inequalities read from the other end says the same."""
    for a, b in ((1, 2), (-3, 5), (0, 10)):
        for low, high, low_back, high_back in (
            ("<", "<", ">", ">"),
            ("\\le", "<", "\\geq", ">"),
            ("<", "\\leq", ">", "\\ge"),
        ):
            reference = f"{a} {low} x {high} {b}"
            yield AnswerPair(f"\\boxed{{{b} {high_back} x {low_back} {a}}}", reference, True)
            yield AnswerPair(f"\\boxed{{{a} {low} x {high} {b}}}", f"${reference}$", True)
            yield AnswerPair(f"\\boxed{{{b + 1} {high_back} x {low_back} {a}}}", reference, False)
            yield AnswerPair(f"\\boxed{{{b} {low} x {high} {a}}}", reference, False)
        yield AnswerPair(f"\\boxed{{-x < {-a}}}", f"x > {a}", True)
        yield AnswerPair(f"\\boxed{{x \\ne {a}}}", f"{a} \\neq x", True)
        yield AnswerPair(f"\\boxed{{x = {a}}}", f"x \\ne {a}", False)


def unions() -> Iterator[AnswerPair]:
    """A union does not depend on the order; an end is in it or not."""
    for a, b in ((0, 1), (-2, 4)):
        reference = f"(-\\infty, {a}) \\cup ({b}, \\infty)"
        yield AnswerPair(f"\\boxed{{({b},\\infty)\\cup(-\\infty,{a})}}", reference, True)
        yield AnswerPair(f"\\boxed{{x \\in (-\\infty,{a})\\cup({b},\\infty)}}", reference, True)
        yield AnswerPair(f"\\boxed{{(-\\infty,{a}]\\cup({b},\\infty)}}", reference, False)
        yield AnswerPair(f"\\boxed{{({b},\\infty)}}", reference, False)
    yield AnswerPair("\\boxed{\\{2,3\\} \\cup \\{1\\}}", "\\{1,2,3\\}", True)
    yield AnswerPair("\\boxed{\\emptyset}", "\\varnothing", True)
    yield AnswerPair("\\boxed{\\{0\\}}", "\\emptyset", False)


def plus_minus() -> Iterator[AnswerPair]:
    """The sign stands for two values."""
    for a, root in (("1", "2"), ("3", "5"), ("-2", "7")):
        both = f"{a}+\\sqrt{{{root}}}, {a}-\\sqrt{{{root}}}"
        yield AnswerPair(f"\\boxed{{{both}}}", f"{a} \\pm \\sqrt{{{root}}}", True)
        yield AnswerPair(f"\\boxed{{{a} \\pm \\sqrt{{{root}}}}}", both, True)
        yield AnswerPair(f"\\boxed{{{a} + \\sqrt{{{root}}}}}", f"{a} \\pm \\sqrt{{{root}}}", False)
    yield AnswerPair("\\boxed{-4, 4}", "\\pm 4", True)
    yield AnswerPair("\\boxed{4}", "\\pm 4", False)


def index_names() -> Iterator[AnswerPair]:
    """The letter i is a variable unless the reference is a complex number."""
    for formula in ("1 \\le i \\le 5", "i < 2", "(1,i)", "\\max(i,j)", "a_i", "i^2 + j^2"):
        yield AnswerPair(f"\\boxed{{{formula}}}", formula, True)
        yield AnswerPair(f"\\boxed{{{formula}}}", f"${formula}$", True)
        yield AnswerPair(f"\\boxed{{{formula}}}", "42", False)
    yield AnswerPair("\\boxed{(i,-i)}", "(i, -i)", True)
    yield AnswerPair("\\boxed{(-i,i)}", "(i, -i)", False)
    yield AnswerPair("\\boxed{i^2}", "-1", False)
    yield AnswerPair("\\boxed{\\sqrt{-1}}", "i", True)


def single_items() -> Iterator[AnswerPair]:
    """Brackets around one value change nothing."""
    for n in (90, 5, -3):
        for form in (
            f"[{n}]",
            f"\\boxed{{[{n}]}}",
            f"\\boxed{{({n})}}",
            f"\\boxed{{\\{{{n}\\}}}}",
            f"The angle is [{n}].",
        ):
            yield AnswerPair(form, str(n), True)
            yield AnswerPair(form, str(n + 30), False)
    yield AnswerPair("[1, 2]", "1", False)


def choices() -> Iterator[AnswerPair]:
    """The letter of a choice."""
    for letter, other in (("C", "D"), ("A", "B"), ("E", "A")):
        forms = [
            f"Answer: {letter}",
            f"The answer is {letter}.",
            f"\\boxed{{\\text{{({letter})}}}}",
            f"({letter}) 42",
        ]
        for form in (
            *forms,
            f"{letter}. it cannot be {other}",
            f"**Answer:** ({letter})",
            f"#### {letter}",
        ):
            yield AnswerPair(form, letter, True)
            yield AnswerPair(form, f"\\text{{({letter})}}", True)
            yield AnswerPair(form, other, False)


def text_commands() -> Iterator[AnswerPair]:
    """A word is the same with and without its command."""
    for word, other in (("even", "odd"), ("Monday", "Tuesday"), ("no solution", "all reals")):
        for form in (
            f"\\boxed{{{word}}}",
            word,
            f"\\boxed{{\\textbf{{{word}}}}}",
            f"The answer is \\text{{{word}}}.",
        ):
            yield AnswerPair(form, f"\\text{{{word}}}", True)
            yield AnswerPair(form, f"\\text{{{other}}}", False)


def thinking() -> Iterator[AnswerPair]:
    """Only what follows the thinking is an answer, and a thinking without end has none."""
    for n in (42, 7):
        for form in (
            f"\\boxed{{{n}}}",
            f"#### {n}",
            f"<answer>{n}</answer>",
            f"The answer is {n}.",
        ):
            yield AnswerPair(
                f"<think>maybe \\boxed{{{n + 1}}}\n#### {n + 1}</think>\n{form}", str(n), True
            )
            yield AnswerPair(
                f"<think>maybe \\boxed{{{n + 1}}}\n#### {n + 1}</think>\n{form}", str(n + 1), False
            )
            yield AnswerPair(f"<think>so {form}", str(n), False)
            yield AnswerPair(f"so {form}</think>I do not know", str(n), False)
            yield AnswerPair(f"so</think>{form}", str(n), True)


def answer_tags() -> Iterator[AnswerPair]:
    """What stands between the last tags is the answer."""
    for n in (42, -5):
        yield AnswerPair(f"<answer>{n}</answer>", str(n), True)
        yield AnswerPair(f"I got {n + 1}. <answer> {n} </answer> It took 3 steps.", str(n), True)
        yield AnswerPair(f"<answer>{n + 1}</answer> <answer>{n}</answer>", str(n), True)
        yield AnswerPair(f"<answer>\\boxed{{{n}}}</answer>", str(n), True)
        yield AnswerPair(f"<answer>{n}</answer>", str(n + 1), False)
        yield AnswerPair(f"<answer>{n + 1}</answer> or {n}", str(n), False)


def statements() -> Iterator[AnswerPair]:
    """What a sentence says that the answer is."""
    for n in (42, 13):
        leads = [
            "The answer is",
            "Therefore, the final answer is:",
            "Answer:",
            "**Final Answer:**",
            "The answer =",
        ]
        for lead in leads:
            yield AnswerPair(f"First 3 + 4 = 7.\n{lead} {n}", str(n), True)
            yield AnswerPair(f"First 3 + 4 = 7.\n{lead} ${n}$. I hope it is correct.", str(n), True)
            yield AnswerPair(f"First 3 + 4 = {n}.\n{lead} {n + 1}", str(n), False)
    yield AnswerPair("Answer: 41 was a guess.\nAnswer: 42", "42", True)
    yield AnswerPair("Answer: 41 was a guess.\nAnswer: 42", "41", False)


def last_values() -> Iterator[AnswerPair]:
    """Without a box or a statement, the last formula or number is the answer."""
    for n in (42, 8):
        for form in (
            f"So it is {n}",
            f"We get 3 and then {n} apples.",
            f"Hence $3 < 4$, so we have $x = {n}$.",
            f"2 + 3 = {n}",
        ):
            yield AnswerPair(form, str(n), True)
            yield AnswerPair(form, str(n + 1), False)
        yield AnswerPair(f"We get {n} and then 3 apples.", str(n), False)
    yield AnswerPair("They meet at 6:00.", "6:00", True)
    yield AnswerPair("They meet at 9:00.", "6:00", False)


def units() -> Iterator[AnswerPair]:
    """A unit on one side only is left out; two different units differ."""
    for n in (5, 12):
        for unit, other in (("cm", "kg"), ("m", "cm"), ("hours", "minutes")):
            yield AnswerPair(f"\\boxed{{{n}\\text{{ {unit}}}}}", str(n), True)
            yield AnswerPair(f"\\boxed{{{n}}}", f"{n}\\text{{ {unit}}}", True)
            yield AnswerPair(f"\\boxed{{{n}\\,\\mathrm{{{unit}}}}}", f"{n}\\text{{ {unit}}}", True)
            yield AnswerPair(f"\\boxed{{{n}\\text{{ {other}}}}}", f"{n}\\text{{ {unit}}}", False)
            yield AnswerPair(f"\\boxed{{{n + 1}\\text{{ {unit}}}}}", f"{n}\\text{{ {unit}}}", False)
        yield AnswerPair(f"\\boxed{{{n}t}}", str(n), False)


def degrees() -> Iterator[AnswerPair]:
    """The sign of degrees is a unit."""
    for n in (45, 90, 120):
        for form in (f"{n}^\\circ", f"{n}^{{\\circ}}", f"{n}°", f"{n}"):
            yield AnswerPair(f"\\boxed{{{form}}}", f"{n}^\\circ", True)
            yield AnswerPair(f"\\boxed{{{form}}}", str(n), True)
            yield AnswerPair(f"\\boxed{{{form}}}", f"{n + 15}^\\circ", False)


def money() -> Iterator[AnswerPair]:
    """The sign of a currency is a unit."""
    for n in (12, 1250):
        for form in (f"\\${n:,}", f"${n:,}.00", f"{n:,} dollars", f"€{n}"):
            yield AnswerPair(f"#### {form}", str(n), True)
            yield AnswerPair(f"#### {form}", str(n * 100), False)


def special_tokens() -> Iterator[AnswerPair]:
    """Tokens that end a turn are no part of an answer."""
    for token in ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>"):
        yield AnswerPair(f"Answer: 42{token}", "42", True)
        yield AnswerPair(f"\\boxed{{42}}{token}", "42", True)
        yield AnswerPair(f"Answer: 43{token}", "42", False)


def sentences() -> Iterator[AnswerPair]:
    """A sentence with one number after the marker is that number; with two it is none."""
    for n in (42, 9):
        yield AnswerPair(f"#### She has {n} apples", str(n), True)
        yield AnswerPair(f"\\boxed{{\\text{{The total is }} {n}}}", str(n), True)
        yield AnswerPair(f"#### She has {n} apples", str(n + 1), False)
        yield AnswerPair(f"#### Ann has {n + 1} apples and Bob has {n} pears", str(n), False)


def solution_lists() -> Iterator[AnswerPair]:
    """Lists of tuples are sets of tuples."""
    for items in (((1, 2), (3, 4)), ((2, 1), (-1, -20))):
        reference = ", ".join(f"({a},{b})" for a, b in items)
        back = [f"({a}, {b})" for a, b in reversed(items)]
        yield AnswerPair(f"\\boxed{{{' , '.join(back)}}}", reference, True)
        yield AnswerPair(f"\\boxed{{{back[0]}\\text{{ and }}{back[1]}}}", reference, True)
        yield AnswerPair(f"$\\boxed{{{back[0]}}}, \\boxed{{{back[1]}}}$", reference, True)
        yield AnswerPair(f"\\boxed{{{back[0]}}}", reference, False)
        yield AnswerPair(
            f"\\boxed{{{', '.join(f'({b},{a})' for a, b in items)}}}", reference, False
        )


FAMILIES: Final[tuple[Family, ...]] = (
    *(
        matrices,
        vectors,
        determinants,
        matrix_expressions,
        cases,
        systems,
        named_values,
        congruences,
        set_builders,
    ),
    *(
        inequalities,
        unions,
        plus_minus,
        index_names,
        single_items,
        choices,
        text_commands,
        thinking,
        answer_tags,
    ),
    *(statements, last_values, units, degrees, money, special_tokens, sentences, solution_lists),
)
