"""Renders a web shop's pages as text and lists what can be clicked on them.

``full`` has a line for each thing that WebShop's pages show, clickable texts in brackets; the
instruction is on every page. ``compact`` shows what is needed in few characters, for small models:
the wish in a line on the search page, then results as ``number name price``, then an article's
options, the chosen ones after ``*``. There a click names a result by its number on the page, and
buttons are not listed, but work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from envhub.envs.tools.webshop_catalogue import NO_LIMIT, ShoppingGoal, ShopProduct

BACK: Final = "back to search"
NEXT: Final = "next >"
PREVIOUS: Final = "< prev"
BUY: Final = "buy now"
SUB_PAGES: Final = ("description", "features", "reviews", "attributes")
# the files have no reviews that a shop could show
NO_RATING: Final = "N.A."


@dataclass
class PageView:
    """Where a customer is.

    Attributes:
        results: of the last search; None before the first one and after a step back to the search.
        page: of the results, from 0.
        product: the article whose page is open, if any.
        choices: option values by the option's name.
        sub_page: the open one of ``SUB_PAGES``, if any.
    """

    window: int
    results: Sequence[ShopProduct] | None = None
    page: int = 0
    product: ShopProduct | None = None
    choices: dict[str, str] = field(default_factory=dict)
    sub_page: str = ""

    @property
    def listed(self) -> Sequence[ShopProduct]:
        """The results on this page."""
        return (self.results or ())[self.page * self.window : (self.page + 1) * self.window]

    @property
    def has_next(self) -> bool:
        """Whether there is a page of results after this one."""
        return (self.page + 1) * self.window < len(self.results or ())

    def clickable(self) -> list[str]:
        """Return what a click may name now."""
        if self.results is None:
            return []
        if self.product is None:
            turns = [PREVIOUS] * (self.page > 0) + [NEXT] * self.has_next
            return [BACK, *turns, *(product.asin for product in self.listed)]
        if self.sub_page:
            return [BACK, PREVIOUS]
        values = [value for group in self.product.options.values() for value in group]
        return [BACK, PREVIOUS, *SUB_PAGES, *values, BUY]


def full(view: PageView, goal: ShoppingGoal) -> str:
    """Return the page with all that WebShop shows."""
    return "\n".join([f"Instruction: {goal.instruction}", *_full_lines(view)])


def _full_lines(view: PageView) -> list[str]:
    if view.results is None:
        return ["[search]"]
    if view.product is None:
        head = [f"[{BACK}]", f"page {view.page + 1} (total results: {len(view.results)})"]
        head += [f"[{PREVIOUS}]"] * (view.page > 0) + [f"[{NEXT}]"] * view.has_next
        return head + [
            f"[{product.asin}] {product.name} ${product.price:.2f}" for product in view.listed
        ]
    head = [f"[{BACK}] [{PREVIOUS}]"]
    if view.sub_page:
        return head + _sub_page(view.product, view.sub_page)
    options = [
        f"{name}: {_format_values(values, view.choices.get(name))}"
        for name, values in view.product.options.items()
    ]
    details = [view.product.name, f"price: ${view.product.price:.2f}", f"rating: {NO_RATING}"]
    return head + options + details + [" ".join(f"[{name}]" for name in SUB_PAGES), f"[{BUY}]"]


def _format_values(values: Sequence[str], choice: str | None) -> str:
    return " ".join(f"[{value}] (chosen)" if value == choice else f"[{value}]" for value in values)


def _sub_page(product: ShopProduct, name: str) -> list[str]:
    sections: Mapping[str, Sequence[str]] = {
        "description": [product.description],
        "features": product.features,
        "reviews": ["there are no reviews"],
        "attributes": [*product.attributes, product.category, product.query],
    }
    return list(sections[name])


def wish_words(goal: ShoppingGoal) -> str:
    """Return the words to search for."""
    return " ".join([*goal.attributes, goal.product.query])


def wish(goal: ShoppingGoal) -> str:
    """Return the goal in few characters: kind and attributes; options; limit in dollars."""
    parts = [wish_words(goal), *goal.options]
    if goal.price_upper < NO_LIMIT:
        parts.append(f"<{goal.price_upper:.0f}")
    return ";".join(parts)


def compact(view: PageView, goal: ShoppingGoal) -> str:
    """Return the page in few characters; the wish only before the first search."""
    if view.results is None:
        return wish(goal)
    if view.product is None:
        rows = (
            f"{number} {product.name} {product.price:g}"
            for number, product in enumerate(view.listed, start=1)
        )
        return "\n".join(rows) or "nothing"
    if view.sub_page:
        return "\n".join(_sub_page(view.product, view.sub_page))
    options = view.product.options
    choices = view.choices
    return ";".join(
        " ".join(f"*{value}" if value == choices.get(name) else value for value in options[name])
        for name in options
    )
