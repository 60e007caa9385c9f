"""WebShop: find, choose and buy what an instruction asks for (Yao et al. 2022, arXiv:2207.01206).

There are two actions: ``search[words]`` and ``click[text on the page]``. A search shows pages of
results; an article's page has its options, price and four further pages; ``buy now`` ends the
episode with the purchase's score from 0 to 1 (``envhub.envs.tools.webshop_reward``), and 1 is a
success. The shop is a small catalogue made from a seed, or WebShop's data (``items``,
``attributes``, ``human``). For a large one set the domain's ``isolation: thread``, so that a search
does not hold up the hub.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import DataPath, Section
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import tagged
from envhub.envs.tools import webshop_files as files
from envhub.envs.tools import webshop_pages as pages
from envhub.envs.tools.webshop_catalogue import (
    ProductCatalogue,
    ShoppingGoal,
    ShopProduct,
    generate,
)
from envhub.envs.tools.webshop_reward import best_options, best_score, score

_ACTION: Final = re.compile(r"(search|click)\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)
MAX_QUERY_CHARS: Final = 512
DepartmentName = Literal["clothing", "shoes", "electronics", "home", "beauty", "grocery"]


class WebShopArgs(Section):
    """``env_args`` of ``webshop``."""

    harmless = (
        "products", "catalogue_seed", "departments", "product_attributes", "hidden_attributes",
        "option_values", "goal_attributes", "num_products", "eval_goals", "window", "observe",
        "reward", "format_penalty", "answer_tag",
    )  # fmt: skip

    products: Annotated[int, Field(ge=8, le=100_000)] = 500  # of a generated catalogue
    catalogue_seed: Annotated[int, Field(ge=0)] = 0
    departments: tuple[DepartmentName, ...] = ()  # of a generated catalogue; empty: all
    product_attributes: Annotated[int, Field(ge=1, le=5)] = 3  # of a generated product
    hidden_attributes: Annotated[int, Field(ge=0)] = 1  # how many of them are not in its title
    # of each of a generated product's options, at most
    option_values: Annotated[int, Field(ge=1, le=10)] = 3
    goal_attributes: Annotated[int, Field(ge=0)] = 2  # how many of its attributes a goal requires
    items: DataPath | None = None  # WebShop's items_shuffle*.json instead of a generated catalogue
    attributes: DataPath | None = None  # its items_ins_v2*.json
    human: DataPath | None = None  # its items_human_ins.json; None: synthetic instructions
    num_products: PositiveInt | None = None  # only the first ones of ``items``; None: all
    eval_goals: PositiveInt = 500  # held out, at most a quarter of all
    window: Annotated[int, Field(ge=1, le=50)] = 10  # results on a page
    # pages as WebShop's, or in few characters for small models
    observe: Literal["full", "compact"] = "full"
    # of a purchase: its score, or 1 only if that is 1
    reward: Literal["score", "success"] = "score"
    # taken from the reward for text that is not an action on the page
    format_penalty: NonNegativeFloat = 0.0
    # read the action from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False


class WebShop(Environment):
    """One customer at a time."""

    Args = WebShopArgs
    isolation = "none"

    args: WebShopArgs
    goal: ShoppingGoal

    def __init__(self, args: WebShopArgs) -> None:
        super().__init__(args)
        self._view = pages.PageView(args.window)
        self._score = 0.0

    @classmethod
    def check(cls, args: WebShopArgs) -> None:
        if args.items is None:
            for key in ("attributes", "human", "num_products"):
                if getattr(args, key) is not None:
                    raise ConfigError(
                        key, getattr(args, key), "given together with items, WebShop's products"
                    )
        elif args.attributes is None:
            raise ConfigError(
                "attributes", None, "WebShop's items_ins_v2*.json, for items is given"
            )
        for key in ("hidden_attributes", "goal_attributes"):
            if (count := getattr(args, key)) > args.product_attributes:
                raise ConfigError(
                    key, count, f"at most product_attributes, which is {args.product_attributes}"
                )
        # the files may have changed since the last check
        files.load.cache_clear()
        _load_catalogue.cache_clear()
        if len(_load_catalogue(args).goals) < 2:
            key = "items" if args.items else "products"
            raise ConfigError(
                key, args.items or args.products, "a catalogue with two goals or more"
            )

    @classmethod
    def data_files(cls, args: WebShopArgs) -> list[str]:
        return [path for path in (args.items, args.attributes, args.human) if path is not None]

    @classmethod
    def num_tasks(cls, args: WebShopArgs, split: Split) -> int | None:
        return len(_split_goals(args, split))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"products": 60}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Show the task's goal; the seed has no effect."""
        goals = _split_goals(self.args, split)
        self.goal = goals[task_index % len(goals)]
        self._view = pages.PageView(self.args.window)
        self._score = 0.0
        return self._observe()

    def step(self, text: str) -> StepResult:
        match = _ACTION.fullmatch(tagged(text, self.args.answer_tag))
        argument = match[2].strip().lower() if match else ""
        if match and match[1].lower() == "search":
            is_valid = bool(argument) and len(argument) <= MAX_QUERY_CHARS
            if is_valid:
                self._view = pages.PageView(
                    self.args.window, results=_load_catalogue(self.args).search(argument)
                )
        else:
            argument = self._numbered().get(argument, argument)
            is_valid = argument in self._view.clickable()
            if is_valid and argument == pages.BUY:
                return self._buy()
            if is_valid:
                self._click(argument)
        reward = 0.0 if is_valid else -self.args.format_penalty
        return StepResult(self._observe(), reward, False, is_valid, metrics={"score": 0.0})

    def text_frame(self) -> str:
        return pages.full(self._view, self.goal)

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Act as a customer who knows the catalogue; with probability ``noise`` act at random."""
        if rng.random() < noise:
            return self._random_action(rng)
        view = self._view
        goal = self.goal
        product = self._best_result()
        if product is None:
            return f"search[{pages.wish_words(goal)}]"
        if view.product is None:
            page = list(view.results or ()).index(product) // view.window
            if page == view.page:
                return f"click[{self._click_name(product.asin)}]"
            return f"click[{pages.NEXT if page > view.page else pages.PREVIOUS}]"
        if view.product is not product or view.sub_page:
            return f"click[{pages.PREVIOUS}]"
        for name, value in best_options(product, goal).items():
            if view.choices.get(name) != value:
                return f"click[{value}]"
        return f"click[{pages.BUY}]"

    def _best_result(self) -> ShopProduct | None:
        """Return the best article among the results, None if another search is needed."""
        results = self._view.results
        if not results:
            return None
        best = max(results, key=lambda product: best_score(product, self.goal))
        if best_score(best, self.goal) < 1.0 and self.goal.product not in results:
            return None
        return best

    def _random_action(self, rng: np.random.Generator) -> str:
        offered = self._view.clickable()
        if not offered:
            goals = _split_goals(self.args, "train")
            return f"search[{pages.wish_words(goals[int(rng.integers(len(goals)))])}]"
        return f"click[{self._click_name(offered[int(rng.integers(len(offered)))])}]"

    def _numbered(self) -> dict[str, str]:
        """Return the names of results by the numbers that clicks use on compact pages."""
        if self.args.observe == "full" or self._view.product is not None:
            return {}
        products = enumerate(self._view.listed, start=1)
        return {str(number): product.asin for number, product in products}

    def _click_name(self, label: str) -> str:
        """Return how a click names a thing."""
        return next((number for number, asin in self._numbered().items() if asin == label), label)

    def _click(self, label: str) -> None:
        view = self._view
        if label == pages.BACK:
            self._view = pages.PageView(view.window)
        elif view.product is None:
            if label in (pages.NEXT, pages.PREVIOUS):
                view.page += 1 if label == pages.NEXT else -1
            else:
                view.product = _load_catalogue(self.args).by_asin[label]
                view.choices = {}
        elif label == pages.PREVIOUS:
            if view.sub_page:
                view.sub_page = ""
            else:
                view.product = None
        elif label in pages.SUB_PAGES:
            view.sub_page = label
        else:
            names = [name for name, values in view.product.options.items() if label in values]
            # of several options with this value, the first that does not have it yet
            option = next((name for name in names if view.choices.get(name) != label), names[0])
            view.choices[option] = label

    def _buy(self) -> StepResult:
        product = self._view.product
        assert product is not None
        self._score = score(product, self.goal, self._view.choices.values())
        is_success = self._score >= 1.0
        reward = self._score if self.args.reward == "score" else float(is_success)
        return StepResult(
            Observation("", ""), reward, True, True, is_success, metrics={"score": self._score}
        )

    def _observe(self) -> Observation:
        page = pages.full(self._view, self.goal)
        text = page if self.args.observe == "full" else pages.compact(self._view, self.goal)
        return Observation(text, anchor=page)


@lru_cache(maxsize=4)
def _load_catalogue(args: WebShopArgs) -> ProductCatalogue:
    if args.items is None:
        return generate(
            args.products,
            args.catalogue_seed,
            args.product_attributes,
            hidden_attributes=args.hidden_attributes,
            goal_attributes=args.goal_attributes,
            option_values=args.option_values,
            departments=args.departments,
        )
    return files.load(args.items, str(args.attributes), args.human, args.num_products)


@lru_cache(maxsize=8)
def _split_goals(args: WebShopArgs, split: Split) -> tuple[ShoppingGoal, ...]:
    goals = _load_catalogue(args).goals
    num_held_out = max(min(args.eval_goals, len(goals) // 4), 1)
    return goals[:num_held_out] if split == "eval" else goals[num_held_out:]
