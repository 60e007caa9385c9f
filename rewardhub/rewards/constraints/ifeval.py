"""IFEval's 25 kinds of instructions by their ids, with the arguments that its rows give them.

Differences from the published checks, which graders treat as details: keywords are plain texts and
not regular expressions; the language is found without a package (``languages``), and a text without
one does not follow an instruction to use it; sentences and capital words are split by rules of our
own (``counting``).
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator

from broker.contract import strict
from rewardhub.rewards.constraints import counting, languages
from rewardhub.rewards.constraints.kind import (
    ConstraintArgs,
    ConstraintKind,
    Count,
    Letter,
    Ordinal,
    Phrase,
    Phrases,
    Relation,
    compare_count,
)

OPTIONS: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCES: Final = ("```json", "```Json", "```JSON", "```")


class KeywordsArgs(ConstraintArgs):
    keywords: Phrases


class KeywordFrequencyArgs(ConstraintArgs):
    keyword: Phrase
    frequency: Count
    relation: Relation


class ForbiddenWordsArgs(ConstraintArgs):
    forbidden_words: Phrases


class LetterFrequencyArgs(ConstraintArgs):
    letter: Letter
    let_frequency: Count
    let_relation: Relation


class LanguageArgs(ConstraintArgs):
    language: Annotated[str, AfterValidator(languages.language_code)]


class SentencesArgs(ConstraintArgs):
    num_sentences: Count
    relation: Relation


class ParagraphsArgs(ConstraintArgs):
    num_paragraphs: Count


class WordsArgs(ConstraintArgs):
    num_words: Count
    relation: Relation


class FirstWordArgs(ConstraintArgs):
    num_paragraphs: Ordinal
    nth_paragraph: Ordinal
    first_word: Phrase


class PlaceholdersArgs(ConstraintArgs):
    num_placeholders: Count


class PostscriptArgs(ConstraintArgs):
    postscript_marker: Phrase


class BulletsArgs(ConstraintArgs):
    num_bullets: Count


class HighlightsArgs(ConstraintArgs):
    num_highlights: Count


class SectionsArgs(ConstraintArgs):
    section_spliter: Phrase  # spelt as in the rows
    num_sections: Count


class RepeatPromptArgs(ConstraintArgs):
    prompt_to_repeat: Phrase


class EndPhraseArgs(ConstraintArgs):
    end_phrase: Phrase


class CapitalWordsArgs(ConstraintArgs):
    capital_frequency: Count
    capital_relation: Relation


def has_keywords(text: str, args: KeywordsArgs) -> bool:
    """Return whether all keywords occur, also within words, ignoring case."""
    return all(counting.count_phrase(text, word, whole=False) for word in args.keywords)


def has_keyword_frequency(text: str, args: KeywordFrequencyArgs) -> bool:
    """Return whether a keyword occurs often or seldom enough, also within words."""
    count = counting.count_phrase(text, args.keyword, whole=False)
    return compare_count(count, args.relation, args.frequency)


def avoids_words(text: str, args: ForbiddenWordsArgs) -> bool:
    """Return whether none of the words occurs; parts of words do not count."""
    return not any(counting.count_phrase(text, word, whole=True) for word in args.forbidden_words)


def has_letter_frequency(text: str, args: LetterFrequencyArgs) -> bool:
    """Return whether a letter occurs often or seldom enough, ignoring case."""
    count = text.lower().count(args.letter.lower())
    return compare_count(count, args.let_relation, args.let_frequency)


def has_first_word(text: str, args: FirstWordArgs) -> bool:
    """Return whether there are that many paragraphs, and the nth begins with the word."""
    paragraphs = counting.split_paragraphs(text)
    if len(paragraphs) != args.num_paragraphs or args.nth_paragraph > len(paragraphs):
        return False
    word = counting.first_word(paragraphs[args.nth_paragraph - 1])
    return word == counting.first_word(args.first_word)


def has_postscript(text: str, args: PostscriptArgs) -> bool:
    """Return whether the marker occurs, ignoring case; blanks within ``P.S.`` are allowed."""
    patterns = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    marker = args.postscript_marker
    pattern = patterns.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


def has_option(text: str) -> bool:
    """Return whether a text holds one of IFEval's answers."""
    return any(option in text for option in OPTIONS)


def is_json(text: str) -> bool:
    """Return whether a text is JSON, perhaps in a Markdown fence."""
    text = text.strip()
    for fence in _FENCES:
        if text.startswith(fence):
            text = text.removeprefix(fence).removesuffix("```")
            break
    try:
        strict.parse_json(text)
    except strict.BadJson:
        return False
    return True


def has_two_responses(text: str) -> bool:
    """Return whether a text is two different responses with six asterisks between them."""
    parts = counting.split_responses(text)
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def ends_with_phrase(text: str, args: EndPhraseArgs) -> bool:
    """Return whether a text ends with the phrase, ignoring case and quotes around the text."""
    return text.strip().strip('"').lower().endswith(args.end_phrase.lower())


def is_quoted(text: str) -> bool:
    """Return whether a text stands between double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def has_paragraphs(text: str, number: int) -> bool:
    """Return whether a text has that many paragraphs between dividers, none of them blank."""
    paragraphs = counting.split_divided(text)
    return len(paragraphs) == number and all(paragraphs)


# By IFEval's ids.
KINDS: Final[dict[str, ConstraintKind]] = {
    "keywords:existence": ConstraintKind("existence", KeywordsArgs, has_keywords),
    "keywords:frequency": ConstraintKind("frequency", KeywordFrequencyArgs, has_keyword_frequency),
    "keywords:forbidden_words": ConstraintKind("forbidden_words", ForbiddenWordsArgs, avoids_words),
    "keywords:letter_frequency": ConstraintKind(
        "letter_frequency", LetterFrequencyArgs, has_letter_frequency
    ),
    "language:response_language": ConstraintKind(
        "response_language",
        LanguageArgs,
        lambda text, args: languages.find_language(text) == args.language,
    ),
    "length_constraints:number_sentences": ConstraintKind(
        "number_sentences",
        SentencesArgs,
        lambda text, args: compare_count(
            counting.count_sentences(text), args.relation, args.num_sentences
        ),
    ),
    "length_constraints:number_paragraphs": ConstraintKind(
        "number_paragraphs",
        ParagraphsArgs,
        lambda text, args: has_paragraphs(text, args.num_paragraphs),
    ),
    "length_constraints:number_words": ConstraintKind(
        "number_words",
        WordsArgs,
        lambda text, args: compare_count(counting.count_words(text), args.relation, args.num_words),
    ),
    "length_constraints:nth_paragraph_first_word": ConstraintKind(
        "nth_paragraph_first_word", FirstWordArgs, has_first_word
    ),
    "detectable_content:number_placeholders": ConstraintKind(
        "number_placeholders",
        PlaceholdersArgs,
        lambda text, args: counting.count_placeholders(text) >= args.num_placeholders,
    ),
    "detectable_content:postscript": ConstraintKind("postscript", PostscriptArgs, has_postscript),
    "detectable_format:number_bullet_lists": ConstraintKind(
        "number_bullet_lists",
        BulletsArgs,
        lambda text, args: counting.count_bullets(text) == args.num_bullets,
    ),
    "detectable_format:constrained_response": ConstraintKind(
        "constrained_response", ConstraintArgs, lambda text, args: has_option(text)
    ),
    "detectable_format:number_highlighted_sections": ConstraintKind(
        "number_highlighted_sections",
        HighlightsArgs,
        lambda text, args: counting.count_highlights(text) >= args.num_highlights,
    ),
    "detectable_format:multiple_sections": ConstraintKind(
        "multiple_sections",
        SectionsArgs,
        lambda text, args: counting.count_sections(text, args.section_spliter) >= args.num_sections,
    ),
    "detectable_format:json_format": ConstraintKind(
        "json_format", ConstraintArgs, lambda text, args: is_json(text)
    ),
    "detectable_format:title": ConstraintKind(
        "title", ConstraintArgs, lambda text, args: counting.has_title(text)
    ),
    "combination:two_responses": ConstraintKind(
        "two_responses", ConstraintArgs, lambda text, args: has_two_responses(text)
    ),
    "combination:repeat_prompt": ConstraintKind(
        "repeat_prompt",
        RepeatPromptArgs,
        lambda text, args: text.strip().lower().startswith(args.prompt_to_repeat.lower()),
    ),
    "startend:end_checker": ConstraintKind("end_checker", EndPhraseArgs, ends_with_phrase),
    "startend:quotation": ConstraintKind(
        "quotation", ConstraintArgs, lambda text, args: is_quoted(text)
    ),
    "change_case:capital_word_frequency": ConstraintKind(
        "capital_word_frequency",
        CapitalWordsArgs,
        lambda text, args: compare_count(
            counting.count_capital_words(text), args.capital_relation, args.capital_frequency
        ),
    ),
    "change_case:english_capital": ConstraintKind(
        "english_capital",
        ConstraintArgs,
        lambda text, args: text.isupper() and languages.is_english(text),
    ),
    "change_case:english_lowercase": ConstraintKind(
        "english_lowercase",
        ConstraintArgs,
        lambda text, args: text.islower() and languages.is_english(text),
    ),
    "punctuation:no_comma": ConstraintKind(
        "no_comma", ConstraintArgs, lambda text, args: "," not in text
    ),
}
