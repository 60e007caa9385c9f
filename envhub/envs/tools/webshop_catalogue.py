"""A web shop's products and customers' goals, and a small catalogue generated from a seed.

``envhub.envs.tools.webshop_files`` makes the same records from the real data set's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product as combinations
from typing import Final

import numpy as np
from numpy.random import Generator

from envhub.envs.tools.bm25 import SearchIndex

PRICE_STEPS: Final = tuple(10.0 * step for step in range(1, 100))  # dollars that a limit may be
NO_LIMIT: Final = 1_000_000.0
# results of a search, as in WebShop
SEARCH_LIMIT: Final = 50


@dataclass(frozen=True)
class ShopProduct:
    """One article.

    Attributes:
        asin: its name in links, in lower case.
        name: the title.
        nouns: words for its kind of thing.
        query: the search word that lists it.
        category: from the widest to the narrowest, separated by ``›``.
        price: dollars.
        options: values by the option's name.
        attributes: its properties, in lower case.
        features: bullet points.
    """

    asin: str
    name: str
    nouns: frozenset[str]
    query: str
    category: str
    price: float
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    features: tuple[str, ...] = ()
    description: str = ""

    @property
    def text(self) -> str:
        """The text that a search uses, as WebShop's index does."""
        options = (f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.name, self.description, *self.features[:1], *options])


@dataclass(frozen=True)
class ShoppingGoal:
    """What a customer wants.

    Attributes:
        product: one that satisfies it.
        instruction: the goal in words.
        price_upper: dollars; ``NO_LIMIT`` for any price.
    """

    product: ShopProduct
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


class ProductCatalogue:
    """Products, their index, and goals in the order of a hash."""

    def __init__(self, products: Sequence[ShopProduct], goals: Iterable[ShoppingGoal]) -> None:
        self.products = tuple(products)
        self.by_asin = {product.asin: product for product in self.products}
        unique = {hashlib.blake2b(goal.instruction.encode()).digest(): goal for goal in goals}
        self.goals = tuple(unique[digest] for digest in sorted(unique))
        self._results: dict[str, tuple[ShopProduct, ...]] = {}

    @cached_property
    def _index(self) -> SearchIndex:
        return SearchIndex([product.text for product in self.products])

    def search(self, query: str) -> tuple[ShopProduct, ...]:
        """Return at most ``SEARCH_LIMIT`` products, best first."""
        if (products := self._results.get(query)) is None:
            # bounds the memory
            if len(self._results) >= 4096:
                self._results.clear()
            products = self._results[query] = tuple(
                self.products[at] for at in self._index.search(query, SEARCH_LIMIT)
            )
        return products


def price_limit(price: float, key: str) -> float:
    """Return a limit above the price: of the next four tens the larger of two, drawn by ``key``."""
    above = [step for step in PRICE_STEPS if step > price][:4]
    if len(above) < 2:
        return NO_LIMIT
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return float(max(np.random.default_rng(seed).choice(above, 2, replace=False)))


COLOURS: Final = ("red", "blue", "green", "black", "white", "pink", "grey", "brown", "gold", "teal")
SIZES: Final = ("small", "medium", "large", "x-large")
LENGTHS: Final = ("3 ft", "6 ft", "10 ft")
PACKS: Final = ("1 pack", "2 pack", "4 pack")
Department = tuple[
    str, tuple[str, ...], tuple[str, ...], Mapping[str, tuple[str, ...]], tuple[int, int]
]
_COLOUR_SIZE: Final = {"color": COLOURS, "size": SIZES}
# the department, its things, their possible attributes, their options, the range of prices in $
DEPARTMENTS: Final[tuple[Department, ...]] = (
    (
        "clothing",
        ("hat", "scarf", "jacket", "sweater", "skirt", "shirt", "dress", "coat"),
        (
            "cotton",
            "wool",
            "washable",
            "waterproof",
            "slim fit",
            "long sleeve",
            "lightweight",
            "quick drying",
        ),
        _COLOUR_SIZE,
        (8, 90),
    ),
    (
        "shoes",
        ("boot", "sandal", "sneaker", "slipper", "loafer"),
        ("leather", "non slip", "rubber sole", "arch support", "memory foam", "breathable"),
        _COLOUR_SIZE,
        (12, 120),
    ),
    (
        "electronics",
        ("cable", "charger", "speaker", "headphone", "keyboard", "camera"),
        (
            "wireless",
            "fast charging",
            "noise cancelling",
            "water resistant",
            "high speed",
            "plug and play",
        ),
        {"color": COLOURS, "length": LENGTHS},
        (6, 150),
    ),
    (
        "home",
        ("lamp", "rug", "pillow", "curtain", "mirror", "shelf"),
        (
            "eco friendly",
            "easy assemble",
            "machine washable",
            "wall mounted",
            "space saving",
            "blackout",
        ),
        _COLOUR_SIZE,
        (10, 140),
    ),
    (
        "beauty",
        ("shampoo", "lotion", "perfume", "lipstick", "serum"),
        (
            "cruelty free",
            "sulfate free",
            "long lasting",
            "fragrance free",
            "natural",
            "paraben free",
        ),
        {"pack": PACKS},
        (5, 60),
    ),
    (
        "grocery",
        ("coffee", "tea", "cookie", "granola", "sauce"),
        ("gluten free", "sugar free", "organic", "low sodium", "non gmo", "keto"),
        {"pack": PACKS},
        (4, 50),
    ),
)


def generate(
    num_products: int,
    seed: int,
    num_attributes: int,
    hidden_attributes: int,
    goal_attributes: int,
    option_values: int = 3,
    departments: Sequence[str] = (),
) -> ProductCatalogue:
    """Return a catalogue and its goals; the same arguments give the same ones.

    Args:
        num_attributes: of each product.
        hidden_attributes: how many of them its title omits; its features list all.
        goal_attributes: how many of a product's attributes a goal requires.
        option_values: of each of a product's options, at most.
        departments: of the shop; empty: all.
    """
    rng = np.random.default_rng([seed, num_products])
    shop_departments = [
        department for department in DEPARTMENTS if not departments or department[0] in departments
    ]
    products = [
        _make_product(
            number,
            rng,
            shop_departments,
            num_attributes=num_attributes,
            hidden=hidden_attributes,
            option_values=option_values,
        )
        for number in range(num_products)
    ]
    return ProductCatalogue(
        products, [goal for product in products for goal in _make_goals(product, goal_attributes)]
    )


def _make_product(
    number: int,
    rng: Generator,
    departments: Sequence[Department],
    num_attributes: int,
    hidden: int,
    option_values: int,
) -> ShopProduct:
    department, things, qualities, options, (low, high) = departments[
        int(rng.integers(len(departments)))
    ]
    thing = str(rng.choice(things))
    product_qualities = [
        str(quality) for quality in rng.choice(qualities, num_attributes, replace=False)
    ]
    title_words = product_qualities[: num_attributes - hidden]
    offered = {
        name: tuple(
            str(v) for v in rng.choice(values, min(option_values, len(values)), replace=False)
        )
        for name, values in options.items()
    }
    return ShopProduct(
        asin=f"b{number:0{3 if number < 1000 else 6}d}",
        name=" ".join([*title_words, thing]),
        nouns=frozenset([thing]),
        query=thing,
        category=f"{department} › {thing}",
        price=float(rng.integers(low, high)),
        options=offered,
        attributes=tuple(product_qualities),
        features=tuple(f"this {thing} is {quality}" for quality in product_qualities),
        description=f"a {thing} from our {department} department",
    )


def _make_goals(product: ShopProduct, num_attributes: int) -> list[ShoppingGoal]:
    # the hidden ones are the last
    attributes = product.attributes[-num_attributes:] if num_attributes else ()
    goals = []
    for values in combinations(*product.options.values()):
        text = f"i need a {product.query}"
        if attributes:
            text += f" that is {' and '.join(attributes)}"
        text += "".join(
            f", {name}: {value}" for name, value in zip(product.options, values, strict=True)
        )
        limit = price_limit(product.price, f"{product.asin} {text}")
        if limit < NO_LIMIT:
            text += f", price lower than {limit:.2f} dollars"
        goals.append(ShoppingGoal(product, text, attributes, values, limit))
    return goals
