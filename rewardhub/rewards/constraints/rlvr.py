"""The same kinds by the function names of RLVR-IFeval, whose rows hold one instruction each.

Lambert et al., Tulu 3, arXiv 2411.15124; the data set is allenai/RLVR-IFeval. Its instructions
demand exact numbers where IFEval's set bounds, and know ``around``: within a tenth of a number of
words, within one of a number of sentences.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BeforeValidator

from rewardhub.rewards.constraints import counting
from rewardhub.rewards.constraints.ifeval import (
    KINDS,
    FirstWordArgs,
    KeywordsArgs,
    has_first_word,
    has_keywords,
    has_paragraphs,
)
from rewardhub.rewards.constraints.kind import (
    ConstraintArgs,
    ConstraintKind,
    Count,
    Letter,
    Ordinal,
    Phrase,
    Phrases,
    Quantifier,
    compare_count,
)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class KeywordListArgs(ConstraintArgs):
    keyword_list: Phrases


class WordCountArgs(ConstraintArgs):
    word: Phrase
    N: Count


class LetterCountArgs(ConstraintArgs):
    letter: Letter
    N: Count


class NumberArgs(ConstraintArgs):
    N: Count


class QuantityArgs(ConstraintArgs):
    N: Count
    quantifier: Quantifier


class NthParagraphArgs(ConstraintArgs):
    N: Ordinal
    first_word: Phrase
    i: Ordinal


class MarkerArgs(ConstraintArgs):
    postscript_marker: Phrase


class OptionsArgs(ConstraintArgs):
    options: Annotated[Phrases, BeforeValidator(_as_list)]


class SplitterArgs(ConstraintArgs):
    N: Count
    section_splitter: Phrase


class OriginalPromptArgs(ConstraintArgs):
    original_prompt: Phrase


def has_quantity(count: int, args: QuantityArgs, tolerance: int) -> bool:
    """Return whether a count is at least, at most or around the number."""
    return compare_count(count, args.quantifier, args.N, tolerance)


def has_marked_end(text: str, args: MarkerArgs) -> bool:
    """Return whether something follows the marker."""
    _, marker, postscript = text.partition(args.postscript_marker)
    return bool(marker and postscript.strip())


def _has_nth_paragraph(text: str, args: NthParagraphArgs) -> bool:
    words = FirstWordArgs(num_paragraphs=args.N, nth_paragraph=args.i, first_word=args.first_word)
    return has_first_word(text, words)


def _tenth(number: int) -> int:
    return max(round(number * 0.1), 1)


# By the names of RLVR-IFeval's functions.
FUNCTIONS: Final[dict[str, ConstraintKind]] = {
    "verify_keywords": ConstraintKind(
        "existence",
        KeywordListArgs,
        lambda text, args: has_keywords(text, KeywordsArgs(keywords=args.keyword_list)),
    ),
    "verify_keyword_frequency": ConstraintKind(
        "frequency",
        WordCountArgs,
        lambda text, args: counting.count_phrase(text, args.word, whole=True) == args.N,
    ),
    "validate_forbidden_words": KINDS["keywords:forbidden_words"],
    "verify_letter_frequency": ConstraintKind(
        "letter_frequency",
        LetterCountArgs,
        lambda text, args: text.count(args.letter) == args.N,
    ),
    "validate_response_language": KINDS["language:response_language"],
    "verify_paragraph_count": ConstraintKind(
        "number_paragraphs", NumberArgs, lambda text, args: has_paragraphs(text, args.N)
    ),
    "validate_word_constraint": ConstraintKind(
        "number_words",
        QuantityArgs,
        lambda text, args: has_quantity(len(text.split()), args, _tenth(args.N)),
    ),
    "verify_sentence_constraint": ConstraintKind(
        "number_sentences",
        QuantityArgs,
        lambda text, args: has_quantity(counting.count_sentences(text), args, 1),
    ),
    "validate_paragraphs": ConstraintKind(
        "nth_paragraph_first_word", NthParagraphArgs, _has_nth_paragraph
    ),
    "verify_postscript": ConstraintKind("postscript", MarkerArgs, has_marked_end),
    "validate_placeholders": ConstraintKind(
        "number_placeholders",
        NumberArgs,
        lambda text, args: counting.count_placeholders(text) >= args.N,
    ),
    "verify_bullet_points": ConstraintKind(
        "number_bullet_lists",
        NumberArgs,
        lambda text, args: counting.count_bullets(text) == args.N,
    ),
    "validate_title": KINDS["detectable_format:title"],
    "validate_choice": ConstraintKind(
        "constrained_response",
        OptionsArgs,
        lambda text, args: any(option in text for option in args.options),
    ),
    "validate_highlighted_sections": ConstraintKind(
        "number_highlighted_sections",
        NumberArgs,
        lambda text, args: counting.count_highlights(text) >= args.N,
    ),
    "validate_sections": ConstraintKind(
        "multiple_sections",
        SplitterArgs,
        lambda text, args: counting.count_sections(text, args.section_splitter) >= args.N,
    ),
    "validate_json_format": KINDS["detectable_format:json_format"],
    "validate_repeat_prompt": ConstraintKind(
        "repeat_prompt",
        OriginalPromptArgs,
        lambda text, args: text.strip().lower().startswith(args.original_prompt.lower()),
    ),
    "validate_two_responses": KINDS["combination:two_responses"],
    "validate_uppercase": KINDS["change_case:english_capital"],
    "validate_lowercase": KINDS["change_case:english_lowercase"],
    "validate_frequency_capital_words": ConstraintKind(
        "capital_word_frequency",
        QuantityArgs,
        lambda text, args: has_quantity(counting.count_capital_words(text), args, _tenth(args.N)),
    ),
    "validate_end": KINDS["startend:end_checker"],
    "validate_quotation": KINDS["startend:quotation"],
    "validate_no_commas": KINDS["punctuation:no_comma"],
}
