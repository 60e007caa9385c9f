"""Reads the catalogue and the goals from WebShop's JSON files.

``setup.sh`` of https://github.com/princeton-nlp/WebShop downloads them. ``items_shuffle*.json`` is
a list of products; ``items_ins_v2*.json`` has each product's attributes and a synthetic instruction
by asin; ``items_human_ins.json`` has lists of instructions that people wrote, by asin. The rules
for prices, options and goals are WebShop's (``web_agent_site/engine``), except that its draws
without a seed (a price between two, a limit above the price) depend on the product here.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from itertools import product as combinations
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.contract import strict
from broker.errors import ConfigError, DataError
from envhub.envs.tools.bm25 import words
from envhub.envs.tools.webshop_catalogue import (
    NO_LIMIT,
    ProductCatalogue,
    ShoppingGoal,
    ShopProduct,
    price_limit,
)

# dollars, of products without one
NO_PRICE: Final = 100.0
# longer ones are not products
MAX_ASIN_CHARS: Final = 10
_COMMA: Final = re.compile(r"\s*,?\s*")
_COLON: Final = re.compile(r"\s*:\s*")
# of a product's options that become synthetic goals; WebShop has no limit
MAX_COMBINATIONS: Final = 64


@lru_cache(maxsize=2)
def load(
    items: str, attributes: str, human: str | None, num_products: int | None
) -> ProductCatalogue:
    """Return the catalogue, with goals from people's instructions or else the synthetic ones.

    Args:
        items: path of ``items_shuffle*.json``.
        attributes: path of ``items_ins_v2*.json``.
        human: path of ``items_human_ins.json``, None for synthetic goals.
        num_products: only the first products; None: all.

    Raises:
        ConfigError: if a file is missing or not readable, or there are no goals.
        DataError: if a product or instruction is malformed; names its place in the file, from 1.
    """
    rows = _read_json("items", items, list[dict[str, Any]])
    attribute_rows = _read_json("attributes", attributes, dict[str, dict[str, Any]])
    human_rows = None
    if human is not None:
        human_rows = _read_json("human", human, dict[str, list[dict[str, Any]]])
    products: dict[str, ShopProduct] = {}
    goals: list[ShoppingGoal] = []
    for number, row in enumerate(rows[:num_products], start=1):
        asin = _text_field(items, number, row, "asin")
        if asin == "nan" or len(asin) > MAX_ASIN_CHARS or asin.lower() in products:
            continue
        attribute_row = attribute_rows.get(asin, {})
        product = _make_product(items, number, row, asin, attribute_row)
        products[product.asin] = product
        if human_rows is None:
            goals += _synthetic_goals(attributes, number, product, attribute_row)
        else:
            rows_of = enumerate(human_rows.get(asin, []), start=1)
            goals += filter(
                None, (_human_goal(str(human), place, product, row) for place, row in rows_of)
            )
    if not goals:
        key = "attributes" if human is None else "human"
        raise ConfigError(key, human or attributes, f"instructions for the products of {items}")
    return ProductCatalogue(list(products.values()), goals)


def _read_json(key: str, path: str, kind: type[Any]) -> Any:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(key, path, "there is no such file")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(key, path, f"WebShop's JSON: {error}") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise DataError(path, _first_bad_row(data)[0], f"not UTF-8: {error.reason}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        number, problem = _first_bad_row(data)
        if problem:
            raise DataError(path, number, f"not JSON: {problem}") from None
        raise ConfigError(key, path, f"WebShop's JSON: {error}") from None


def _first_bad_row(data: bytes) -> tuple[int, str]:
    """Return number (from 1) and problem of a JSON file's first malformed row, if there is one."""
    text = data.decode("utf-8", "surrogateescape").strip()
    at = 1
    number = 0
    while (
        text.startswith(("[", "{"))
        and (at := _skip_separator(_COMMA, text, at)) < len(text)
        and text[at] not in "]}"
    ):
        number += 1
        try:
            value, at = strict.decode_prefix(text, at)
            if isinstance(value, str):  # a key of an object
                value, at = strict.decode_prefix(text, _skip_separator(_COLON, text, at))
        except strict.BadJson as error:
            return number, str(error)
    return number, ""


def _skip_separator(separator: re.Pattern[str], text: str, at: int) -> int:
    match = separator.match(text, at)
    return at if match is None else match.end()


def _make_product(
    path: str, number: int, row: dict[str, Any], asin: str, attribute_row: dict[str, Any]
) -> ShopProduct:
    name = _text_field(path, number, row, "name")
    features = row.get("small_description") or []
    return ShopProduct(
        asin=asin.lower(),
        name=name,
        nouns=frozenset(word for word in words(name) if not any(map(str.isdigit, word))),
        query=_text_field(path, number, row, "query").lower().strip(),
        category=_text_field(path, number, row, "product_category"),
        price=_parse_price(path, number, row, asin),
        options=_parse_options(path, number, row),
        attributes=_text_list(path, number, attribute_row.get("attributes") or [], "attributes"),
        features=_text_list(
            path,
            number,
            features if isinstance(features, list) else [features],
            "small_description",
        ),
        description=str(row.get("full_description") or ""),
    )


def _parse_price(path: str, number: int, row: dict[str, Any], asin: str) -> float:
    """Return the price; within a range it depends on the asin."""
    if not (pricing := row.get("pricing")):
        return NO_PRICE
    try:
        prices = [float(re.sub(r"[^\d.]", "", part)) for part in str(pricing).split("$")[1:3]]
    except ValueError:
        prices = []
    if not prices or not all(map(math.isfinite, prices)):
        raise DataError(
            path, number, f"pricing is {pricing!r}, not dollars such as '$9.99' or '$5 to $8'"
        )
    share = hashlib.blake2b(asin.encode(), digest_size=1).digest()[0] / 255
    return prices[0] + (prices[-1] - prices[0]) * share


def _parse_options(path: str, number: int, row: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    groups = row.get("customization_options") or {}
    if not isinstance(groups, dict):
        raise DataError(
            path, number, f"customization_options is {type(groups).__name__}, not an object"
        )
    options = {}
    for name, values in groups.items():
        if values is None:
            continue
        rows = values if isinstance(values, list) else [None]
        if not all(
            isinstance(value, dict) and isinstance(value.get("value"), str) for value in rows
        ):
            raise DataError(
                path, number, f"customization_options.{name} is not a list of objects with a value"
            )
        options[name.lower()] = tuple(
            value["value"].strip().replace("/", " | ").lower() for value in values
        )
    return options


def _human_goal(
    path: str, place: int, product: ShopProduct, row: dict[str, Any]
) -> ShoppingGoal | None:
    attributes = _text_list(
        path,
        place,
        row.get("instruction_attributes") or [],
        f"{product.asin}: instruction_attributes",
    )
    if not attributes:
        return None
    options = _text_list(
        path, place, row.get("instruction_options") or [], f"{product.asin}: instruction_options"
    )
    return _make_goal(
        product, _text_field(path, place, row, "instruction").strip("."), attributes, options
    )


def _synthetic_goals(
    path: str, number: int, product: ShopProduct, row: dict[str, Any]
) -> Iterator[ShoppingGoal]:
    if not row.get("instruction"):
        return
    attributes = _text_list(
        path,
        number,
        row.get("instruction_attributes") or [],
        f"{product.asin}: instruction_attributes",
    )
    text = _text_field(path, number, row, "instruction")
    names = sorted(product.options)
    for values in islice(
        combinations(*(product.options[name] for name in names)), MAX_COMBINATIONS
    ):
        options = ", and ".join(
            f"{name}: {value}" for name, value in zip(names, values, strict=True)
        )
        yield _make_goal(product, f"{text} with {options}" if options else text, attributes, values)


def _make_goal(
    product: ShopProduct, text: str, attributes: tuple[str, ...], options: tuple[str, ...]
) -> ShoppingGoal:
    limit = price_limit(product.price, f"{product.asin} {text}")
    if limit < NO_LIMIT:
        text += f", and price lower than {limit:.2f} dollars"
    return ShoppingGoal(
        product,
        text,
        tuple(map(str.lower, attributes)),
        options=tuple(map(str.lower, options)),
        price_upper=limit,
    )


def _text_field(path: str, place: int, row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        keys = ", ".join(sorted(row)) or "nothing"
        raise DataError(path, place, f"{key} is {value!r:.80}, not a text; it has {keys}")
    return value


def _text_list(path: str, place: int, value: Any, key: str) -> tuple[str, ...]:
    values = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise DataError(path, place, f"{key} is {value!r:.80}, not a list of texts")
    return tuple(values)
