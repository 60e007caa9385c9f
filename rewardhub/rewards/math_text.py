"""Reads an answer as a number or words, and writes formulas in one form. Pure, in linear time."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

# Characters of a number that is read without the parser.
LONGEST_NUMBER: Final = 60
# Digits grouped by commas ("36,000", "36{,}000"), thin spaces or blanks; a tuple or a set is never
# one number.
_NUMBER: Final = re.compile(
    r"(?P<sign>[-+−]?)\s*(?:\\?[$€£¥])?\s*(?P<sign2>-?)"
    r"(?P<whole>[1-9]\d{0,2}(?:(?:,|\{,\}|\\[,!; ]|[~' \u00a0\u2007\u2009\u202f])\d{3})+"
    r"|\d+)?(?P<part>\.\d+)?"
    r"(?P<power>[eE][-+]?\d{1,2})?\.?\s*(?:\\?[$€£¥])?"
)
_DECIMAL_COMMA: Final = re.compile(r"(-?)(0|[1-9]\d*),(\d{2}|\d{4,}|(?<=0,)\d+)")
# A single letter after a number is a variable, a word is a unit.
_NUMBER_WITH_UNIT: Final = re.compile(
    r"[-+−]?\s*+(?:\\?[$€£¥])?\s*+-?(?:[\d,]*+\.\d++|[\d,]*+(?<=\d))"
    r"(?:\s*%|\s*(?:km|cm|mm|kg|mg|lbs?|oz|ft|hr|ml|mph|m(?=[²³])|°[CF]?)\b[/a-z²³]*"
    r"|\s+(?P<word>[A-Za-z]{3,})[A-Za-z.,/ ]*)",
    re.IGNORECASE,
)
_EMPHASIS: Final = re.compile(r"(?<![\w)}*])(\*{1,3}|_{2,3}|`+)(?=\S)([^*`\n]*?\S)\1(?![\w({*])")
_COMMAND: Final = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}|\\[A-Za-z]+")
TEXT_COMMAND: Final = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf|tt|normal)|textnormal|mbox"
    r"|operatorname)\s*\{([^{}]*)\}"
)
_TRIGONOMETRIC: Final = (
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
)
_COMMANDS: Final = (*_TRIGONOMETRIC, "log", "ln", "exp", "pi")  # written with a backslash in LaTeX
FUNCTIONS: Final = frozenset(
    (*_COMMANDS, "sqrt", "max", "min", "gcd", "lcm", "det", "mod", "infty", "and", "or")
)
_BARE_FUNCTION: Final = re.compile(
    rf"(?<![\\A-Za-z{{])({'|'.join(sorted(_COMMANDS, key=len, reverse=True))})(?![A-Za-z])"
)
_WORD_BEFORE_TERM: Final = re.compile(r"(?<![A-Za-z])([A-Za-z]{2,})\s+(?=[A-Za-z0-9$])")
_POWER: Final = re.compile(r"(?:\*\*|\^)\s*(-?\d+(?:\.\d+)?|\((-?\d+(?:\.\d+)?)\))")
_CHOICE: Final = re.compile(
    r"(?:(?i:option|choice)\s+)?[(\[]?([A-Z])(?:[)\]](?:[\s.,:;].*)?|\s*|[.,:;](?!\w).*"
    r"|[。，、：；）\u3040-\u9fff].*)",
    re.DOTALL,
)
_CHARACTERS: Final = str.maketrans(
    {
        "−": "-", "–": "-", "·": "\\cdot ", "×": "\\times ", "÷": "/", "∞": "\\infty ",
        "π": "\\pi ", "∪": "\\cup ",
        "∩": "\\cap ", "∈": "\\in ", "≡": "\\equiv ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
        "≈": "\\approx ",
        "±": "\\pm ", "°": "^\\circ ", "∅": "\\emptyset ", "½": " \\frac{1}{2}",
        "¼": " \\frac{1}{4}",
        "¾": " \\frac{3}{4}", "⅓": " \\frac{1}{3}", "⅔": " \\frac{2}{3}", "²": "^{2}", "³": "^{3}",
        "⋅": "\\cdot ",
        "\u00a0": " ", "\u2007": " ", "\u2009": " ", "\u200a": " ", "\u202f": " ", "⟨": "(",
        "⟩": ")", "…": "\\ldots ",
    }
)  # fmt: skip
_SPELLINGS: Final = (
    # a comma without its space groups digits
    (re.compile(r",\s*\\!\s*(?=\d{3})|\{,\}(?:\\!)?\s*(?=\d{3})"), ","),
    (re.compile(r"\\left\s*\\?\.|\\right\s*\\?\."), ""),
    (re.compile(r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![A-Za-z])\s*"), ""),
    (
        re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits|boldsymbol|rm|bf)(?![A-Za-z])\s*"),
        "",
    ),
    (re.compile(r"(?<!\\)\\!"), ""),
    (re.compile(r"(?<!\\)\\[,:;> ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|en)space(?![A-Za-z])"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt\s*\{\}\s*\{"), r"\\sqrt{"),
    (re.compile(r"\\leq(?:slant)?(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\geq(?:slant)?(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])|!="), r"\\ne "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:lbrace|lbrack)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace|rbrack)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:lvert|rvert|vert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\\("), ""),
    (re.compile(r"\\\)"), ""),
    (re.compile(r"\s+"), " "),
)


def strip_markup(text: str) -> str:
    """Return a line without Markdown and a final full stop; a ``*`` between factors stays."""
    text = text.strip()
    while (plain := _EMPHASIS.sub(r"\2", text)) != text:
        text = plain
    text = text.strip("*`").strip()
    return text.rstrip(".").rstrip() if not text.endswith("..") else text


def number(text: str) -> tuple[Fraction, bool] | None:
    """Return a plain decimal number and whether it has a decimal point; None for any other text."""
    text = (
        text.strip().removeprefix("$").removesuffix("$") if text.count("$") == 2 else text.strip()
    )
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= LONGEST_NUMBER else None
    if (
        match is None
        or not (match["whole"] or match["part"])
        or (not text.isascii() and _has_other_digits(text))
    ):
        return None
    digits = re.sub(r"\D", "", match["whole"] or "0") + (match["part"] or "")
    value = Fraction(digits + (match["power"] or ""))
    is_negative = "-" in (match["sign"] + match["sign2"]).replace("−", "-")
    return (-value if is_negative else value), match["part"] is not None


def _has_other_digits(text: str) -> bool:
    return any(char.isdigit() and not char.isascii() for char in text)


def decimal_comma(text: str) -> tuple[Fraction, bool] | None:
    """Return the number of a text like ``1000,99`` with a decimal comma; ``2,3`` is a list."""
    match = _DECIMAL_COMMA.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    return number(f"{match[1]}{match[2]}.{match[3]}") if match else None


def same_number(gold: tuple[Fraction, bool], answer: tuple[Fraction, bool], digits: int) -> bool:
    """Return whether numbers are equal: rounded to ``digits`` if one has a point, else exactly."""
    if gold[1] or answer[1]:
        # Rounding turns small numbers into zero, so the difference must also be small relative to
        # the reference.
        near = abs(gold[0] - answer[0]) <= abs(gold[0]) * relative_tolerance(digits)
        return near and round(gold[0], digits) == round(answer[0], digits)
    return gold[0] == answer[0]


def relative_tolerance(digits: int) -> Fraction:
    """Return the allowed relative difference from the reference with ``digits`` decimals."""
    return Fraction(10) ** (2 - digits)


def has_unit(text: str) -> bool:
    """Return whether the text is a number followed by a unit or a few words."""
    match = _NUMBER_WITH_UNIT.fullmatch(text)
    return match is not None and (match["word"] or "") not in FUNCTIONS


def is_formula(text: str) -> bool:
    """Return whether a text can be a formula: its words are functions or products of variables."""
    if not text or has_control_characters(text) or _has_foreign_letters(text):
        return False
    plain = _COMMAND.sub(" ", TEXT_COMMAND.sub(" ", text))
    words = re.findall(r"[A-Za-z]+", plain)
    if any(len(word) > 3 and word not in FUNCTIONS for word in words):
        return False
    if any(match[1] not in FUNCTIONS for match in _WORD_BEFORE_TERM.finditer(plain)):
        return False
    if "\\" in text or len(text.rstrip("!")) == 1:
        return True
    # "no", "left": letters alone are words unless they are one variable.
    is_text = any(len(word) == 3 and word not in FUNCTIONS for word in words)
    return not is_text and re.fullmatch(r"[A-Za-z\s.,'!?]*", text) is None


def _has_foreign_letters(text: str) -> bool:
    """Return whether the text holds letters besides Latin, Greek and symbols such as ℝ."""
    return not text.isascii() and any(
        char.isalpha()
        and not (char.isascii() or "\u0370" <= char <= "\u03ff" or "\u2100" <= char <= "\u214f")
        for char in text
    )


def has_control_characters(text: str) -> bool:
    """Return whether the text holds control characters, which no formula has."""
    return any(ord(char) < 32 and char not in "\t\n\r" for char in text)


def to_latex(text: str) -> str:
    """Return a formula as LaTeX for the parser: powers in braces, functions as commands."""
    if "\\" not in text:
        text = _POWER.sub(lambda match: "^{" + (match[2] or match[1]) + "}", text).replace(
            "**", "^"
        )
        text = re.sub(r"sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
        text = _BARE_FUNCTION.sub(r"\\\1 ", text)
    return re.sub(
        r"√\s*\(([^()]*)\)|√\s*(\w+)", lambda match: "\\sqrt{" + (match[1] or match[2]) + "}", text
    )


def plain_latex(text: str) -> str:
    """Return a formula without dollars, sizes and idle spaces, with one name per relation."""
    text = text.translate(_CHARACTERS)
    text = re.sub(r"(?<!\\)\$", " ", text)
    if "\\begin" not in text:
        text = re.sub(r"\\{2,}(?=[A-Za-z{}])", r"\\", text)  # of a text that was escaped twice
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip()


def canonical(text: str) -> str:
    """Return a formula without idle blanks; equal texts mean the same."""
    text = re.sub(
        r"\\(?:text|mathrm|textbf|mathbf|textnormal)\s*\{\s*([^{}\\]*?)\s*\}", r"{\1}", text
    )
    text = re.sub(r"\s*([{}()\[\]+\-*/^_=<>|&:;])\s*", r"\1", text)
    text = re.sub(r",\s+", ", ", text)
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", text).strip(" .")


def words(text: str) -> str:
    """Return the text as words: without case, markup, extra blanks and punctuation at the ends."""
    text = TEXT_COMMAND.sub(r"\1", text).replace("$", "").replace("\\", "")
    text = " ".join(strip_markup(text).casefold().split())
    return text.strip(" .,:;?\"'()" + ("" if len(text.rstrip("!")) == 1 else "!"))


def choice(text: str) -> str | None:
    """Return the letter of a choice such as ``C``, ``(C)`` or ``C. Paris``; else None."""
    match = _CHOICE.fullmatch(TEXT_COMMAND.sub(r"\1", text).replace("$", "").strip())
    return match[1].upper() if match else None
