"""Scores a purchase as WebShop does (Yao et al. 2022, arXiv:2207.01206, section 3, appendix A.5).

    matches = matched attributes + matched options + [price <= limit]
    score = type · matches / (wanted attributes + wanted options + 1)

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


def score(product: ShopProduct, goal: ShoppingGoal, values: Iterable[str]) -> float:
    """Return the score from 0 to 1; ``chosen`` are the option values bought."""
    values = tuple(values)
    attributes = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    options = sum(any(alike(value, option) > ALIKE for value in values) for option in goal.options)
    num_matches = attributes + options + (product.price <= goal.price_upper)
    num_wishes = len(goal.attributes) + len(goal.options) + 1
    return type_score(product, goal.product) * num_matches / num_wishes


def best_score(product: ShopProduct, goal: ShoppingGoal) -> float:
    """Return the score with the best options."""
    return score(product, goal, best_options(product, goal).values())


def best_options(product: ShopProduct, goal: ShoppingGoal) -> dict[str, str]:
    """Return the values to choose by option; a wanted value of two options goes to the first."""
    choices: dict[str, str] = {}
    for option in goal.options:
        free = [
            (name, value)
            for name, values in product.options.items()
            if name not in choices
            for value in values
        ]
        rated = [(alike(value, option), value == option, name, value) for name, value in free]
        rated = [rating for rating in rated if rating[0] > ALIKE]
        if rated:
            _, _, name, value = max(rated, key=lambda rating: rating[:2])
            choices[name] = value
    return choices


def type_score(product: ShopProduct, goal_product: ShopProduct) -> float:
    """Return how well the kind of thing matches: 0, 0.1, 0.5 or 1."""
    shared = 0.2
    if goal_product.nouns:
        shared = len(product.nouns & goal_product.nouns) / len(goal_product.nouns)
    if shared == 0.0:
        return 0.0
    if shared < 0.1:
        return 0.1
    categories = set(_category_parts(product.category)) & set(
        _category_parts(goal_product.category)
    )
    return (
        1.0 if product.query == goal_product.query or len(categories) >= 2 or shared > 0.2 else 0.5
    )


def _category_parts(category: str) -> list[str]:
    return [part.strip() for part in category.split("›")]


def _has_attribute(product: ShopProduct, attribute: str) -> bool:
    if any(alike(own, attribute) > ALIKE for own in product.attributes):
        return True
    texts = (product.name, " ".join(product.features), product.description)
    return any(attribute in text.lower() for text in texts)


# the same words are compared for each of many products
@lru_cache(maxsize=65_536)
def alike(first: str, second: str) -> float:
    """Return how alike two texts are as sets of words, 0 to 100: the token set ratio.

    It is the best of three comparisons: the words in common with each text, those in common first,
    and both texts.
    """
    first_words = set(first.lower().split())
    second_words = set(second.lower().split())
    common = " ".join(sorted(first_words & second_words))
    if common and (first_words <= second_words or second_words <= first_words):
        return 100.0
    longer = [
        " ".join(filter(None, (common, " ".join(sorted(words)))))
        for words in (first_words - second_words, second_words - first_words)
    ]
    pairs = [longer]
    if common:
        pairs += [[common, longer[0]], [common, longer[1]]]
    return max(_subsequence_ratio(*pair) for pair in pairs)


def _subsequence_ratio(first: str, second: str) -> float:
    """Return twice the longest common subsequence's share of both lengths, 0 to 100."""
    if not first or not second:
        return 0.0
    row = [0] * (len(second) + 1)
    for letter in first:
        diagonal = 0
        for column, other_letter in enumerate(second, start=1):
            above = row[column]
            if letter == other_letter:
                row[column] = diagonal + 1
            else:
                row[column] = max(above, row[column - 1])
            diagonal = above
    return 200.0 * row[-1] / (len(first) + len(second))
