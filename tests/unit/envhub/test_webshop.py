"""WebShop: actions and pages, the paper's score by hand, the generated catalogue, WebShop's own
files, bad input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.errors import ConfigError, DataError
from envhub.envs.tools import webshop_files as files
from envhub.envs.tools.bm25 import SearchIndex
from envhub.envs.tools.webshop import WebShop, WebShopArgs
from envhub.envs.tools.webshop_catalogue import (
    NO_LIMIT,
    ShoppingGoal,
    ShopProduct,
    generate,
    price_limit,
)
from envhub.envs.tools.webshop_pages import wish
from envhub.envs.tools.webshop_reward import alike, best_options, score, type_score

SHIRT: dict[str, Any] = {
    "asin": "B00SHIRT01",
    "name": "Acme Cotton Shirt for Men",
    "query": "men shirts ",
    "product_category": "Clothing › Men › Shirts",
    "category": "fashion",
    "small_description": ["Machine wash", "Soft"],
    "full_description": "A shirt.",
    "pricing": "$19.99",
    "customization_options": {
        "Color": [{"value": "Navy/White", "image": None}, {"value": "red"}],
        "Size": [{"value": "Large"}],
        "Fit": None,
    },
    "images": ["x.png"],
}
LAMP: dict[str, Any] = {
    **{
        **SHIRT,
        "asin": "B00LAMP",
        "name": "Desk Lamp",
        "query": "lamps",
        "product_category": "Home › Lamps",
        "pricing": "",
    },
    "customization_options": {},
}
ATTRIBUTES: dict[str, Any] = {
    "B00SHIRT01": {
        "attributes": ["machine wash", "cotton"],
        "instruction": "i want a shirt",
        "instruction_attributes": ["machine wash"],
    },
    "B00LAMP": {"attributes": ["dimmable"]},
}
HUMAN: dict[str, Any] = {
    "B00SHIRT01": [
        {
            "asin": "B00SHIRT01",
            "instruction": "i need a washable cotton shirt in red.",
            "instruction_attributes": ["machine wash", "cotton"],
            "instruction_options": ["red"],
        },
        {
            "asin": "B00SHIRT01",
            "instruction": "any shirt",
            "instruction_attributes": [],
            "instruction_options": [],
        },
    ]
}


def product(asin: str = "b1", **changes: Any) -> ShopProduct:
    whole: dict[str, Any] = {
        **{
            "asin": asin,
            "name": "wool hat",
            "nouns": frozenset(["hat"]),
            "query": "hat",
            "category": "clothing › hat",
            "price": 20.0,
        },
        **{
            "options": {"color": ("red", "blue"), "size": ("small", "large")},
            "attributes": ("wool", "washable"),
        },
    }
    return ShopProduct(**{**whole, **changes})


GOAL = ShoppingGoal(
    product(),
    "a washable wool hat, red, large, below 30",
    ("wool", "washable"),
    ("red", "large"),
    30.0,
)


def written(folder: Path, **contents: Any) -> dict[str, str]:
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return {name: str(folder / f"{name}.json") for name in contents}


def test_the_score_is_the_papers_by_hand() -> None:
    """r_type · (attributes + options + price) / (2 + 2 + 1)."""
    assert score(product(), GOAL, ["red", "large"]) == 1.0
    assert score(product(), GOAL, ["red"]) == pytest.approx(4 / 5)
    assert score(product(), GOAL, ["blue", "small"]) == pytest.approx(3 / 5)
    assert score(product(price=31.0), GOAL, ["red", "large"]) == pytest.approx(4 / 5)
    assert score(product(attributes=("wool",), name="hat"), GOAL, ["large"]) == pytest.approx(3 / 5)
    assert score(product(attributes=(), features=("Washable WOOL",)), GOAL, ["red", "large"]) == 1.0
    assert score(product(nouns=frozenset(["scarf"]), query="scarf"), GOAL, ["red", "large"]) == 0.0


def test_the_kind_of_thing_counts_as_in_the_paper() -> None:
    wanted = product(nouns=frozenset("abcdefghijkl"), query="q", category="one › two")
    for shared, other, expected in (
        ("", {"query": "q"}, 0.0),  # no noun in common, whatever else is
        ("a", {"query": "q"}, 0.1),  # a twelfth
        ("ab", {"query": "q"}, 1.0),
        ("ab", {"query": "x", "category": "one › three"}, 0.5),  # a sixth
        ("ab", {"query": "x", "category": "two › one › three"}, 1.0),
        ("abc", {"query": "x", "category": "three"}, 1.0),  # a quarter
    ):
        assert type_score(product(nouns=frozenset(shared or "z"), **other), wanted) == expected


def test_texts_are_alike_as_sets_of_words() -> None:
    """Values of thefuzz.fuzz.token_set_ratio, before it rounds them."""
    assert alike("dark red", "red") == alike("red dark", "Dark  red") == 100.0
    assert alike("black", "blue") == pytest.approx(200 * 2 / 9)
    assert alike("xx-large", "x-large") == pytest.approx(200 * 7 / 15)
    assert alike("long sleeve", "long sleeves") == pytest.approx(200 * 11 / 23)
    assert alike("", "red") == 0.0


def test_the_best_options_are_found() -> None:
    assert best_options(product(), GOAL) == {"color": "red", "size": "large"}
    assert best_options(product(options={"color": ("dark red", "red")}), GOAL) == {"color": "red"}
    assert best_options(product(options={}), GOAL) == {}


def test_a_visit_by_hand() -> None:
    shop = WebShop(WebShopArgs(products=40, window=3, format_penalty=0.25))
    shop.reset(0, "train", 0)
    shop.goal = goal = next(
        goal for goal in generate(40, 0, 3, 1, 2).goals if len(goal.options) == 2
    )
    own = goal.product
    assert shop.text_frame() == f"Instruction: {goal.instruction}\n[search]"
    for text in (
        "",
        "buy",
        "click[buy now]",
        f"click[{own.asin}]",
        "search[]",
        "search[" + "x" * 600 + "]",
        "SEARCH hat",
    ):
        step = shop.step(text)
        assert (step.valid, step.reward, step.done) == (False, -0.25, False)
    found = shop.step(f"Search [ {own.name} ]")
    assert (found.valid, found.reward) == (True, 0.0)
    assert found.observation.text.split("\n")[1:4] == [
        "[back to search]",
        f"page 1 (total results: {len(shop._view.results or ())})",
        "[next >]",
    ]
    assert "[< prev]" in shop.step("click[next >]").observation.text
    shop.step("click[< prev]")
    shop._view.page = list(shop._view.results or ()).index(own) // 3
    page = shop.step(f"click[{own.asin.upper()}]").observation.text.split("\n")
    assert page[1] == "[back to search] [< prev]"
    assert page[4:7] == [own.name, f"price: ${own.price:.2f}", "rating: N.A."]
    assert page[-1] == "[buy now]"
    hidden = own.attributes[-1]
    assert hidden not in own.name
    assert f"this {own.query} is {hidden}" in shop.step("click[features]").observation.text
    assert not shop.step("click[buy now]").valid  # not on that page
    shop.step("click[< prev]")
    chosen = shop.step(f"click[{goal.options[0]}]")
    assert f"[{goal.options[0]}] (chosen)" in chosen.observation.text
    assert chosen.metrics == {"score": 0.0}
    bought = shop.step("click[Buy Now]")
    assert (bought.done, bought.success) == (True, False)
    # all but the second option
    assert bought.reward == bought.metrics["score"] == pytest.approx(4 / 5)


def test_only_a_whole_success_counts_if_that_is_asked() -> None:
    rewards = []
    for how in ("score", "success"):
        shop = WebShop(WebShopArgs.model_validate({"products": 40, "reward": how}))
        shop.reset(0, "train", 0)
        shop.step(shop.demonstrate(np.random.default_rng(0), 0.0))
        shop.step(shop.demonstrate(np.random.default_rng(0), 0.0))
        rewards.append(shop.step("click[buy now]").reward)
    assert 0 < rewards[0] < 1
    assert rewards[1] == 0.0


def test_the_catalogue_is_a_function_of_its_seed_and_its_goals_can_be_satisfied() -> None:
    one, other = generate(80, 7, 3, 1, 2), generate(80, 7, 3, 1, 2)
    assert (one.products, one.goals) == (other.products, other.goals)
    assert generate(80, 8, 3, 1, 2).products != one.products
    assert len({goal.instruction for goal in one.goals}) == len(one.goals) > 500
    for goal in one.goals[:100]:
        assert score(goal.product, goal, goal.options) == 1.0
        assert goal.product in one.search(goal.product.name)


def test_the_first_task_stays_what_it_is() -> None:
    """Frozen, so that evaluations of different releases can be compared."""
    assert WebShop(WebShopArgs()).reset(0, "eval", 1).text.split("\n")[0] == FIRST


FIRST = (
    "Instruction: i need a coat that is lightweight and washable, color: white, size: large, price lower than "
    "80.00 dollars"
)


def test_the_demonstrator_buys_what_is_wanted_without_noise() -> None:
    wins = {0.0: 0, 0.4: 0, 1.0: 0}
    for observe, window in (("full", 10), ("compact", 3)):
        shop, rng = (
            WebShop(
                WebShopArgs.model_validate({"products": 100, "observe": observe, "window": window})
            ),
            np.random.default_rng(0),
        )
        for noise in wins:
            for index in range(20):
                shop.reset(index, "train", 0)
                wins[noise] += any(
                    shop.step(shop.demonstrate(rng, noise)).success for _ in range(12)
                )
    assert wins[0.0] == 40
    assert wins[0.0] > wins[0.4] > wins[1.0]


def test_compact_pages_say_it_in_few_characters() -> None:
    shop = WebShop(
        WebShopArgs(
            products=40,
            product_attributes=1,
            hidden_attributes=0,
            goal_attributes=1,
            window=2,
            observe="compact",
        )
    )
    text = shop.reset(0, "train", 0).text
    assert text == wish(shop.goal)
    found = shop.step(shop.demonstrate(np.random.default_rng(0), 0.0)).observation.text.split("\n")
    assert len(found) == len(shop._view.listed)
    first = shop._view.listed[0]
    assert found[0] == f"1 {first.name} {first.price:g}"
    assert not shop.step(f"click[{len(found) + 1}]").valid
    groups = [" ".join(values) for values in first.options.values()]
    assert shop.step("click[1]").observation.text == ";".join(groups)
    value = next(iter(first.options.values()))[0]
    assert f"*{value} " in shop.step(f"click[{value}]").observation.text
    assert shop.step("click[back to search]").observation.text == wish(shop.goal)


def test_a_price_limit_is_one_of_the_next_four_tens() -> None:
    limits = {price_limit(17.0, f"told {number}") for number in range(60)}
    assert limits == {30.0, 40.0, 50.0}  # the larger one of two of 20, 30, 40, 50
    assert price_limit(17.0, "x") == price_limit(17.0, "x")
    assert price_limit(985.0, "x") == NO_LIMIT


def test_webshops_files_are_read_by_its_rules(tmp_path: Path) -> None:
    paths = written(
        tmp_path,
        items=[SHIRT, {**SHIRT, "asin": "nan"}, SHIRT, LAMP],
        attributes=ATTRIBUTES,
        human=HUMAN,
    )
    synthetic = files.load(paths["items"], paths["attributes"], None, None)
    shirt, lamp = synthetic.products
    assert (shirt.asin, shirt.price, lamp.price) == ("b00shirt01", 19.99, 100.0)
    assert shirt.options == {"color": ("navy | white", "red"), "size": ("large",)}
    assert shirt.nouns == {"acme", "cotton", "shirt", "men"}
    assert (
        shirt.text
        == "Acme Cotton Shirt for Men A shirt. Machine wash color: navy | white, red size: large"
    )
    starts = {goal.instruction.partition(", and price")[0] for goal in synthetic.goals}
    assert starts == {
        "i want a shirt with color: navy | white, and size: large",
        "i want a shirt with color: red, and size: large",
    }
    (goal,) = files.load(paths["items"], paths["attributes"], paths["human"], None).goals
    assert (
        goal.instruction
        == f"i need a washable cotton shirt in red, and price lower than {goal.price_upper:.2f} dollars"
    )
    assert (goal.attributes, goal.options) == (("machine wash", "cotton"), ("red",))
    assert score(shirt, goal, ["red"]) == 1.0
    assert score(lamp, goal, []) == 0.0
    args = WebShopArgs(items=paths["items"], attributes=paths["attributes"])
    WebShop.check(args)
    assert (WebShop.num_tasks(args, "train"), WebShop.num_tasks(args, "eval")) == (1, 1)
    assert WebShop.data_files(args) == [paths["items"], paths["attributes"]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": None}, "items.json:2: name is None, not a text"),
        ({"pricing": "cheap $x"}, "items.json:2: pricing is 'cheap $x'"),
        (
            {"customization_options": {"Color": ["red"]}},
            "items.json:2: customization_options.Color",
        ),
        ({"customization_options": ["red"]}, "items.json:2: customization_options is list"),
        ({"small_description": [1]}, "items.json:2: small_description is [1]"),
    ],
)
def test_malformed_products_are_named_by_file_and_row(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    paths = written(tmp_path, items=[LAMP, {**SHIRT, **change}], attributes=ATTRIBUTES)
    with pytest.raises(DataError) as caught:
        files.load(paths["items"], paths["attributes"], None, None)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("key", "raw", "problem"),
    [
        ("items", b'[{"asin": "a"}, {"asin": "b", "price": NaN}]', ":2: not JSON: it holds NaN"),
        ("items", b' [{"asin": "a"},\n{"asin": "b"},\n{"name": "\\ud83d"}]', ":3: not JSON: it holds half of a "
        "surrogate pair"),
        ("items", b'[{"asin": "a"}, {"asin": "\xff"}]', ":2: not UTF-8: invalid start byte"),
        ("items", b'[{"asin": "a"}, {"asin": 1e999}]', ":2: not JSON: the number 1e999 is too large"),
        ("attributes", b'{"a": {}, "b": {"attributes": [Infinity]}}', ":2: not JSON: it holds Infinity"),
        ("human", b'{"a": [{"x": 1}, -Infinity]}', ":1: not JSON: it holds -Infinity"),
        ("items", b'[{"asin": "a"}, {"asin": [' + b"[" * 100_000, ":2: not JSON: "),
    ],
)  # fmt: skip
def test_what_json_must_not_hold_is_named_by_file_and_row(
    tmp_path: Path, key: str, raw: bytes, problem: str
) -> None:
    paths = written(tmp_path, items=[SHIRT], attributes=ATTRIBUTES, human=HUMAN)
    Path(paths[key]).write_bytes(raw)
    with pytest.raises(DataError) as caught:
        files.load(paths["items"], paths["attributes"], paths["human"], None)
    assert str(caught.value).startswith(f"{paths[key]}{problem}")
    assert "\n" not in str(caught.value)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    paths = written(tmp_path, items=[SHIRT], attributes=ATTRIBUTES, broken="{", other=[1])
    for args, key in (
        ({"human": "x"}, "human"),
        ({"items": paths["items"]}, "attributes"),
        ({"items": "none.json", "attributes": paths["attributes"]}, "items"),
        ({"items": paths["broken"], "attributes": paths["attributes"]}, "items"),
        ({"items": paths["items"], "attributes": paths["other"]}, "attributes"),
        ({"items": paths["items"], "attributes": written(tmp_path, bare={})["bare"]}, "attributes"),
        ({"goal_attributes": 4}, "goal_attributes"),
        ({"hidden_attributes": 2, "product_attributes": 1}, "hidden_attributes"),
    ):
        with pytest.raises(ConfigError) as caught:
            WebShop.check(WebShopArgs.model_validate(args))
        assert caught.value.key == key


def test_a_search_ranks_by_bm25_and_keeps_the_order_of_equals() -> None:
    texts = ["red wool hat", "wool hat", "blue scarf", "wool hat", "the of"]
    index = SearchIndex(texts)
    assert index.search("wool hat", 10) == [1, 3, 0]  # shorter texts first
    assert index.search("red hat", 2) == [0, 1]
    assert index.search("hat", 1) == [1]
    assert index.search("", 3) == index.search("the", 3) == index.search("zebra", 3) == []
    assert SearchIndex([]).search("hat", 3) == SearchIndex(["the"]).search("the", 3) == []


def test_scores_of_a_search_are_those_of_the_formula() -> None:
    """Lucene's BM25 with k1 = 1.5 and b = 0.75, over documents that share one word."""
    import bm25s

    documents = [["hat", "red", "wool"], ["hat"], ["scarf", "hat", "hat"], ["scarf"]]
    scorer = bm25s.BM25()
    scorer.index(documents, show_progress=False)
    mean, idf = 2.0, np.log(1 + (4 - 3 + 0.5) / (3 + 0.5))
    expected = [
        idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * length / mean))
        for count, length in ((1, 3), (1, 1), (2, 3), (0, 1))
    ]
    assert scorer.get_scores(["hat"]) == pytest.approx(expected, rel=1e-5)


def test_a_shop_may_have_some_departments_only() -> None:
    there = generate(60, 0, 1, 0, 1, 2, ("shoes", "beauty"))
    assert {product.category.split(" › ")[0] for product in there.products} == {"shoes", "beauty"}
    assert {len(values) for product in there.products for values in product.options.values()} == {2}
