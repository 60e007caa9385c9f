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


def score(product: ShopProduct, goal: ShoppingGoal, chosen: Iterable[str]) -> float:
    """Return the score from 0 to 1; ``chosen`` are the option values bought."""
    chosen = tuple(chosen)
    attributes = sum(_has(product, wanted) for wanted in goal.attributes)
    options = sum(any(alike(value, wanted) > ALIKE for value in chosen) for wanted in goal.options)
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
    found: dict[str, str] = {}
    for wanted in goal.options:
        free = [
            (name, value)
            for name, values in product.options.items()
            if name not in found
            for value in values
        ]
        rated = [(alike(value, wanted), value == wanted, name, value) for name, value in free]
        rated = [rating for rating in rated if rating[0] > ALIKE]
        if rated:
            _, _, name, value = max(rated, key=lambda rating: rating[:2])
            found[name] = value
    return found


def type_score(product: ShopProduct, wanted: ShopProduct) -> float:
    """Return how well the kind of thing matches: 0, 0.1, 0.5 or 1."""
    shared = len(product.nouns & wanted.nouns) / len(wanted.nouns) if wanted.nouns else 0.2
    if shared == 0.0:
        return 0.0
    if shared < 0.1:
        return 0.1
    categories = set(_parts(product.category)) & set(_parts(wanted.category))
    return 1.0 if product.query == wanted.query or len(categories) >= 2 or shared > 0.2 else 0.5


def _parts(category: str) -> list[str]:
    return [part.strip() for part in category.split("›")]


def _has(product: ShopProduct, wanted: str) -> bool:
    if any(alike(own, wanted) > ALIKE for own in product.attributes):
        return True
    told = (product.name, " ".join(product.features), product.description)
    return any(wanted in text.lower() for text in told)


@lru_cache(maxsize=65_536)
def alike(one: str, other: str) -> float:
    """Return how alike two texts are as sets of words, 0 to 100: the token set ratio of fuzzy
    matching.

    It is the best of three comparisons: the words in common with each text, those in common first,
    and both texts.
    """
    first = set(one.lower().split())
    second = set(other.lower().split())
    both = " ".join(sorted(first & second))
    if both and (first <= second or second <= first):
        return 100.0
    longer = [
        " ".join(filter(None, (both, " ".join(sorted(rest)))))
        for rest in (first - second, second - first)
    ]
    pairs = [longer, [both, longer[0]], [both, longer[1]]] if both else [longer]
    return max(_ratio(*pair) for pair in pairs)


def _ratio(one: str, other: str) -> float:
    """Return twice the longest common subsequence's share of both lengths, 0 to 100."""
    if not one or not other:
        return 0.0
    row = [0] * (len(other) + 1)
    for letter in one:
        before = 0
        for column, fellow in enumerate(other, start=1):
            before, row[column] = (
                row[column],
                before + 1 if letter == fellow else max(row[column], row[column - 1]),
            )
    return 200.0 * row[-1] / (len(one) + len(other))
