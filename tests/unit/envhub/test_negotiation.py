"""Two seats divide items of which each knows its own values alone."""

from __future__ import annotations

import re

import numpy as np

from envhub.envs.dialogues.negotiation import Negotiation, NegotiationArgs


def deal(view_text: str) -> tuple[list[int], list[int]]:
    """Return counts and values, as an observation says them."""
    numbers = [int(number) for number in re.findall(r"\d+", view_text.rpartition("You are")[2])]
    return numbers[:3], numbers[3:]


def test_an_accepted_offer_pays_each_by_its_own_values() -> None:
    game = Negotiation(NegotiationArgs())
    first = game.reset(0, "train", 3)
    counts, a_values = deal(first.text)
    assert (first.seat, first.text.startswith("You are A. ")) == ("A", True)
    offer = [counts[0], 0, 0]
    second = game.step("OFFER {} {} {}".format(*offer)).observation
    _, b_values = deal(second.text)
    assert second.seat == "B"
    assert second.text.startswith("OFFER ")
    assert a_values != b_values
    end = game.step("ACCEPT")
    whole = {
        "A": sum(c * v for c, v in zip(counts, a_values, strict=True)),
        "B": sum(c * v for c, v in zip(counts, b_values, strict=True)),
    }
    assert end.done
    assert end.seat_rewards["A"] == counts[0] * a_values[0] / whole["A"]
    assert end.seat_rewards["B"] == 1 - counts[0] * b_values[0] / whole["B"]


def test_impossible_offers_and_early_acceptance_are_not_valid() -> None:
    game = Negotiation(NegotiationArgs())
    game.reset(0, "train", 3)
    assert not game.step("ACCEPT").valid
    assert not game.step("OFFER 9 9 9").valid
    assert game.step("What do you want?").valid
    assert not game.step("ACCEPT").done


def test_no_agreement_in_time_pays_nothing() -> None:
    game = Negotiation(NegotiationArgs(rounds=2))
    game.reset(0, "train", 3)
    steps = [game.step("no") for _ in range(4)]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].seat_rewards == {}


def test_solvers_agree() -> None:
    rng = np.random.default_rng(0)
    shares = []
    for seed in range(40):
        game = Negotiation(NegotiationArgs())
        game.reset(0, "train", seed)
        while not (step := game.step(game.demonstrate(rng, 0.0))).done:
            pass
        shares.append(step.seat_rewards)
    agreed = [share for share in shares if share]
    assert len(agreed) >= 30
    assert all(0 <= value <= 1 for share in agreed for value in share.values())
