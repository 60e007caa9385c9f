"""The number and card games: rules and rewards as published, formulas against Python's own
arithmetic, tasks kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envhub.envs.base import Environment, StepResult
from envhub.envs.games.blackjack import Blackjack, BlackjackArgs, total
from envhub.envs.games.formula import FormulaError, evaluate, reach
from envhub.envs.games.number_line import NumberLine, NumberLineArgs
from envhub.envs.games.points import EZPoints, Points24, Points24Args, PointsArgs


def play(env: Environment, texts: Iterable[str]) -> list[tuple[float, bool, bool]]:
    """(reward, done, valid) of each turn."""
    steps: list[StepResult] = [env.step(text) for text in texts]  # type: ignore[misc]
    return [(step.reward, step.done, step.valid) for step in steps]


def dealt(game: EZPoints, *ranks: int) -> EZPoints:
    game.reset(0, "train", 0)
    game._ranks = ranks
    return game


def walk(start: int, target: int) -> NumberLine:
    env = NumberLine(NumberLineArgs())
    env.reset(0, "train", 0)
    env._position, env._target = start, target
    return env


def test_the_number_line_gives_what_is_published() -> None:
    env = walk(1, 4)
    assert env.text_frame() == "Target: 4\nCurrent: 1"
    assert play(env, ["+", " right ", "-", "?", "+"]) == [
        (0.0, False, True),
        (0.0, False, True),
        (-1.0, False, True),  # away from it
        (-1.0, False, False),  # stood still
        (0.0, False, True),
    ]
    last = env.step("+")
    assert (last.reward, last.done, last.success, last.truncated) == (1.0, True, True, False)


def test_the_number_line_ends_at_its_ends_and_after_ten_turns() -> None:
    env = walk(0, 3)
    steps = [env.step("-") for _ in range(10)]
    assert [step.reward for step in steps] == [-1.0] * 10
    assert env.text_frame() == "Target: 3\nCurrent: 0"
    assert [step.done for step in steps] == [False] * 9 + [True]
    assert (steps[-1].truncated, steps[-1].success) == (True, False)


def test_the_number_line_has_every_task_once() -> None:
    args = NumberLineArgs()
    seen = {}
    for split in ("train", "eval"):
        count = NumberLine.num_tasks(args, split)  # type: ignore[arg-type]
        assert count is not None
        seen[split] = {NumberLine(args).reset(index, split, 0).text for index in range(count)}  # type: ignore[arg-type]
        assert len(seen[split]) == count
    assert (len(seen["train"]), len(seen["eval"])) == (23, 7)
    assert not seen["train"] & seen["eval"]


def test_easy_points_by_hand() -> None:
    env = dealt(EZPoints(PointsArgs()), 5, 7)
    assert env.text_frame() == "Cards: 5 7\nNumbers: 5 7\nTarget: 12\nFormula:"
    assert play(env, ["5", "+", "7"]) == [(0.0, False, True)] * 3
    solved = env.step("=")
    assert (solved.reward, solved.done, solved.success) == (10.0, True, True)
    assert env.text_frame().endswith("Formula: 5 + 7")
    # not all cards
    assert play(dealt(env, 5, 7), ["5", "="]) == [(0.0, False, True), (-1.0, True, True)]
    # a queen counts 10: 20
    assert play(dealt(env, 12, 2), ["10", "*", "2", "="])[-1] == (-1.0, True, True)
    assert play(dealt(env, 6, 6), ["6", "6", "+", "="])[-1] == (-1.0, True, True)


def test_a_unit_that_is_refused_costs_one_and_takes_a_place() -> None:
    env = dealt(EZPoints(PointsArgs()), 5, 7)
    refused = (-1.0, False, False)
    assert play(env, ["5", "5", "8", "-", "12", "٥"]) == [(0.0, False, True)] + [refused] * 5
    assert play(env, ["="]) == [(-1.0, True, True)]  # six places are too long
    step = dealt(env, 5, 7).step("hello")
    assert (step.reward, step.done, step.valid) == refused


def test_a_blank_place_does_not_spoil_a_formula() -> None:
    env = dealt(EZPoints(PointsArgs()), 5, 7)
    assert play(env, ["5", "x", "+", "7", "="])[-1] == (10.0, True, True)


def test_points_to_24_by_hand() -> None:
    env = dealt(Points24(Points24Args()), 3, 3, 8, 8)
    # exact: floating point gives 23.99…
    assert play(env, [*"8/(3-8/3)="])[-1] == (10.0, True, True)
    assert play(dealt(env, 4, 6, 1, 1), [*"4*6="])[-1] == (-1.0, True, True)
    assert play(dealt(env, 4, 6, 1, 1), [*"4*6*1/1="])[-1] == (10.0, True, True)
    long = dealt(env, 4, 6, 1, 1)
    steps = [long.step("(") for _ in range(22)]
    assert [step.reward for step in steps] == [0.0] * 21 + [-1.0]
    assert (steps[-1].done, steps[-1].truncated) == (True, True)


def test_hands_can_be_solved_unless_any_will_do() -> None:
    fair, any_hand = (
        Points24(Points24Args()),
        Points24(Points24Args(solvable=False, faces_as_ten=False)),
    )
    unsolvable = 0
    for index in range(60):
        fair.reset(index, "train", 1)
        assert fair._plan() is not None
        any_hand.reset(index, "train", 1)
        unsolvable += any_hand._plan() is None
        assert all(1 <= number <= 13 for number in any_hand._numbers())
    assert 3 <= unsolvable <= 30  # 1362 of the 1820 hands of ranks 1 to 13 have a solution


def test_the_solver_knows_the_classic_hands() -> None:
    for hand, units in (
        ((3, 3, 8, 8), "8 / ( 3 - 8 / 3 )"),
        ((1, 1, 1, 1), None),
        ((1, 5, 5, 5), "5 * ( 5 - 1 / 5 )"),
    ):
        found = reach(hand, 24, "+-*/")
        assert (
            (found is None)
            if units is None
            else (found is not None and evaluate(found) == evaluate(units.split()) == 24)
        )
    assert reach((5, 7), 12, "+*") == ("5", "+", "7")


def test_whether_a_hand_can_be_solved_is_known_by_brute_force_too() -> None:
    """All orders, operators and brackets, by Python's own fractions."""
    from itertools import combinations_with_replacement, permutations, product

    def brute(hand: tuple[int, ...]) -> bool:
        shapes = (
            "(({}{}{}){}{}){}{}",
            "({}{}({}{}{})){}{}",
            "({}{}{}){}({}{}{})",
            "{}{}(({}{}{}){}{})",
            "{}{}({}{}({}{}{}))",
        )
        for order in set(permutations(hand)):
            for a, b, c in product("+-*/", repeat=3):
                for shape in shapes:
                    try:
                        text = shape.format(
                            *(
                                x
                                for pair in zip(
                                    map("Fraction({})".format, order), (a, b, c, ""), strict=True
                                )
                                for x in pair
                                if x
                            )
                        )
                        if eval(text, {"Fraction": Fraction}) == 24:
                            return True
                    except ZeroDivisionError:
                        continue
        return False

    for hand in list(combinations_with_replacement(range(1, 5), 4))[::5]:
        assert (reach(hand, 24, "+-*/") is not None) is brute(hand), hand


UNITS = st.lists(st.sampled_from([*"1234", *"+-*/()"]), max_size=9)


@given(UNITS)
@settings(max_examples=300, deadline=None)
def test_formulas_are_worth_what_python_says(units: list[str]) -> None:
    import ast

    text = "".join(f"F({unit})" if unit.isdecimal() else unit for unit in units)
    plain = "".join(units)
    apart = all(not (one.isdecimal() and other.isdecimal()) for one, other in pairwise(units))
    # a sign is no unit of ours
    signs = any(
        one in "+-" and (at == 0 or units[at - 1] in "+-*/(") for at, one in enumerate(units)
    )
    try:
        ast.parse(plain, mode="eval")
        wanted = (
            None
            if not apart or signs or "**" in plain or "//" in plain
            else eval(text, {"F": Fraction})
        )
    except (SyntaxError, ZeroDivisionError, TypeError):
        wanted = None
    if isinstance(wanted, Fraction):
        assert evaluate(units) == wanted
    else:
        with pytest.raises(FormulaError):
            evaluate(units)


@pytest.mark.parametrize(
    ("cards", "count"),
    [
        ([1, 13], (21, True)),
        ([1, 1], (12, True)),
        ([1, 6, 10], (17, False)),
        ([10, 12, 2], (22, False)),
        ([5, 6], (11, False)),
    ],
)
def test_cards_count_as_in_blackjack(cards: list[int], count: tuple[int, bool]) -> None:
    assert total(cards) == count


def table(own: list[int], dealer: list[int], draws: list[int], **args: object) -> Blackjack:
    env = Blackjack(BlackjackArgs.model_validate(args))
    env.reset(0, "train", 0)
    env._own, env._dealer = own, dealer
    env._draw = lambda: draws.pop(0)  # type: ignore[method-assign]
    return env


def test_blackjack_by_hand() -> None:
    env = table([1, 6], [13, 4], [5, 3], format_penalty=0.5)
    assert env.text_frame() == "Your hand: A 6 (soft 17)\nDealer shows: K\nDealer's hand: K 4"
    # 12 against 17
    assert play(env, ["double", "hit", "Stand"]) == [
        (-0.5, False, False),
        (0.0, False, True),
        (-1.0, True, True),
    ]
    assert play(table([10, 6], [10, 7], [9]), ["hit"]) == [(-1.0, True, True)]  # 25
    assert play(table([10, 7], [10, 7], []), ["stick"]) == [(0.0, True, True)]
    # the dealer has 26
    assert play(table([10, 7], [10, 6], [10]), ["stand"]) == [(1.0, True, True)]
    assert play(table([1, 13], [10, 9], []), ["stand"])[0][0] == 1.0
    assert play(table([1, 13], [10, 9], [], natural=True), ["stand"])[0][0] == 1.5


def test_the_plain_strategy_of_blackjack_loses_little() -> None:
    """Near the -0.04 to -0.05 a deal of the best one without doubling and splitting; players by
    chance lose about 0.4.
    """
    env, rng = Blackjack(BlackjackArgs()), np.random.default_rng(0)
    won = {0.0: 0.0, 1.0: 0.0}
    for noise in won:
        for index in range(2000):
            env.reset(index, "train", 3)
            while not (step := env.step(env.demonstrate(rng, noise))).done:
                pass
            won[noise] += step.reward / 2000
    assert -0.12 < won[0.0] < 0.04
    assert -0.5 < won[1.0] < -0.3


def test_first_tasks_stay_what_they_are() -> None:
    """Frozen, so that evaluations of different releases can be compared."""
    shown = [
        game.reset(0, "eval", 5).text
        for game in (
            NumberLine(NumberLineArgs()),
            EZPoints(PointsArgs()),
            Blackjack(BlackjackArgs()),
        )
    ]
    assert shown == [
        "Target: 3\nCurrent: 0",
        "Cards: 2 Q\nNumbers: 2 10\nTarget: 12\nFormula:",
        "Your hand: K 9 (19)\nDealer shows: A",
    ]
    assert Points24(Points24Args()).reset(0, "eval", 5).text.startswith("Cards: 7 8 10 5\n")
