"""Tests of this project; run ``pytest`` in this folder."""

from pathlib import Path

import numpy as np
import pytest
from environment import Shop, ShopArgs
from reward import careful

from rewardhub.rewards.base import Sample
from rlearner.cli import main
from rlearner_text.tool_calls import ToolCall

FOLDER = Path(__file__).parent


def open_shop(task_index: int = 3, split: str = "train") -> Shop:
    shop = Shop(ShopArgs())
    shop.reset(task_index, split, seed=0)
    return shop


def test_functions_are_described() -> None:
    count, price = Shop.tools(ShopArgs())
    assert count["function"] == {
        "name": "count",
        "description": "Return how many pieces of an item are left.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    }
    assert price["function"]["name"] == "price"


def test_a_call_tells_the_answer() -> None:
    shop = open_shop()
    shown = shop.use([shop.wanted])
    assert (shown.observation.text, shown.done, shown.valid) == (shop.answer, False, True)
    result = shop.step(f" {shop.answer}.")
    assert (result.reward, result.done, result.success) == (1.0, True, True)
    assert result.metrics == {"calls": 1.0, "errors": 0.0}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (ToolCall("steal", {"item": "figs"}), "error: KeyError: 'steal'"),
        (ToolCall("count", {"item": "gold"}), "error: KeyError: 'gold'"),
        (ToolCall("count", {"item": []}), "error: TypeError: "),
        (ToolCall("price", {}), "error: TypeError: "),
    ],
)
def test_wrong_calls_are_told(call: ToolCall, error: str) -> None:
    result = open_shop().use([call])
    assert result.observation.text.startswith(error)
    assert not result.valid
    assert result.metrics == {"calls": 1.0, "errors": 1.0}


def test_words_are_no_answer() -> None:
    result = open_shop().step("many")
    assert (result.reward, result.done, result.valid) == (0.0, False, False)


def test_a_good_player_solves_every_task() -> None:
    for task_index in range(20):
        shop = open_shop(task_index)
        assert shop.demonstrate(np.random.default_rng(0), 0.0) == [shop.wanted]
        shop.use([shop.wanted])
        assert shop.step(shop.demonstrate(np.random.default_rng(0), 0.0)).success


def test_equal_tasks_are_equal_and_splits_are_not() -> None:
    shops = [open_shop(*task) for task in ((1, "train"), (1, "train"), (1, "eval"), (2, "train"))]
    assert shops[0].counts == shops[1].counts
    assert len({str(shop.counts) for shop in shops}) == 3


def test_calls_and_errors_cost() -> None:
    sample = Sample(
        domain="shop",
        task_index=0,
        prompt="",
        response="7",
        reference="",
        reward=1.0,
        reward_parts={},
        success=True,
        end="terminated",
        num_turns=3,
        num_tokens=16,
        metrics={"calls": 2.0, "errors": 1.0},
    )
    assert careful(sample, cost=0.1) == {"calls": -0.2, "errors": -0.1}


def test_the_configuration_is_valid_and_a_trial_episode_is_scored() -> None:
    assert main(["check", str(FOLDER / "@name@.yaml")]) == 0
