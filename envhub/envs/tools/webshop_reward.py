"""Scores a purchase as WebShop does (Yao et al. 2022, arXiv:2207.01206, section 3 and appendix
A.5).

    score = type · (matched attributes + matched options + [price <= limit]) / (wanted attributes + wanted options + 1)

``type`` is 1 if the article is listed under the same search word, shares two categories, or its
name shares more than a fifth of the wanted one's nouns, else 0.5; it is 0.1 if the names share less
than a tenth of them, 0 if they share none. Attributes and options match if their sets of words are
more than 85 of 100 alike; an attribute also if title, features or description contain it. Two
things differ from the published code: nouns are not tagged by spaCy but given with a generated
product, and for a real one all words of its name except stop words and numbers; colours need not be
reduced to their first word, as sets of words match anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from envhub.envs.tools.webshop_catalogue import ShoppingGoal, ShopProduct

ALIKE: Final = 85.0


def score(product: ShopProduct, goal: ShoppingGoal, chosen_options: Iterable[str]) -> float:
    """Return the score from 0 to 1; ``chosen`` are the option values bought."""
    chosen_options = tuple(chosen_options)
    attributes = sum(_has(product, wanted_value) for wanted_value in goal.attributes)
    options = sum(
        any(alike(value, wanted_value) > ALIKE for value in chosen_options)
        for wanted_value in goal.options
    )
    matched = attributes + options + (product.price <= goal.price_upper)
    return (
        type_score(product, goal.product) * matched / (len(goal.attributes) + len(goal.options) + 1)
    )


def best_score(product: ShopProduct, goal: ShoppingGoal) -> float:
    """Return the score with the best options."""
    return score(product, goal, best_options(product, goal).values())


def best_options(product: ShopProduct, goal: ShoppingGoal) -> dict[str, str]:
    """Return the values to choose by the option's name; a wanted value of two options goes to the
    first.
    """
    best: dict[str, str] = {}
    for wanted_value in goal.options:
        free = [
            (name, value)
            for name, values in product.options.items()
            if name not in best
            for value in values
        ]
        rated = [
            (alike(value, wanted_value), value == wanted_value, name, value) for name, value in free
        ]
        rated = [rating for rating in rated if rating[0] > ALIKE]
        if rated:
            _, _, name, value = max(rated, key=lambda rating: rating[:2])
            best[name] = value
    return best


def type_score(product: ShopProduct, wanted_product: ShopProduct) -> float:
    """Return how well the kind of thing matches: 0, 0.1, 0.5 or 1."""
    shared = (
        len(product.nouns & wanted_product.nouns) / len(wanted_product.nouns)
        if wanted_product.nouns
        else 0.2
    )
    if shared == 0.0:
        return 0.0
    if shared < 0.1:
        return 0.1
    categories = set(_parts(product.category)) & set(_parts(wanted_product.category))
    return (
        1.0
        if product.query == wanted_product.query or len(categories) >= 2 or shared > 0.2
        else 0.5
    )


def _parts(category: str) -> list[str]:
    return [part.strip() for part in category.split("›")]


def _has(product: ShopProduct, attribute: str) -> bool:
    if any(alike(own, attribute) > ALIKE for own in product.attributes):
        return True
    texts = (product.name, " ".join(product.features), product.description)
    return any(attribute in text.lower() for text in texts)


@lru_cache(maxsize=65_536)
def alike(text: str, other_text: str) -> float:
    """Return how alike two texts are as sets of words, 0 to 100: the token set ratio of fuzzy
    matching.

    It is the best of three comparisons: the words in common with each text, those in common first,
    and both texts.
    """
    first = set(text.lower().split())
    second = set(other_text.lower().split())
    common = " ".join(sorted(first & second))
    if common and (first <= second or second <= first):
        return 100.0
    longer = [
        " ".join(filter(None, (common, " ".join(sorted(extra)))))
        for extra in (first - second, second - first)
    ]
    pairs = [longer, [common, longer[0]], [common, longer[1]]] if common else [longer]
    return max(_ratio(*pair) for pair in pairs)


def _ratio(text: str, other_text: str) -> float:
    """Return twice the longest common subsequence's share of both lengths, 0 to 100."""
    if not text or not other_text:
        return 0.0
    row = [0] * (len(other_text) + 1)
    for letter in text:
        previous = 0
        for column, fellow in enumerate(other_text, start=1):
            previous, row[column] = (
                row[column],
                previous + 1 if letter == fellow else max(row[column], row[column - 1]),
            )
    return 200.0 * row[-1] / (len(text) + len(other_text))
