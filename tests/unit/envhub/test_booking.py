"""A user who wants a table, and an assistant who must ask."""

from __future__ import annotations

import re

import numpy as np
import pytest
from envhub_kit import domain

from broker.settings.config import NoArguments
from envhub.demos import demonstrations
from envhub.envs.dialogues.booking import Booking, BookingArgs, read_facts
from envhub.players.base import PlayerView
from envhub.players.shopper import Shopper


def test_the_assistant_learns_what_it_asks_for() -> None:
    game = Booking(BookingArgs())
    view = game.reset(0, "train", 5)
    facts = read_facts(view.text)
    assert view.seat == "user"
    assert list(facts) == ["people", "day", "hour"]
    user = Shopper(NoArguments())
    user.begin("user", 0)
    words = [user.act(PlayerView(view.text))]
    for question in ("How many people?", "Which day?", "At what hour?"):
        heard = game.step(words[-1]).observation
        assert (heard.seat, heard.text) == ("assistant", words[-1])
        asked = game.step(question).observation
        assert (asked.seat, asked.text) == ("user", question)
        words.append(user.act(PlayerView(asked.text)))
    assert words == [
        "I would like a table.",
        f"The people is {facts['people']}.",
        f"The day is {facts['day']}.",
        f"The hour is {facts['hour']}.",
    ]
    game.step(words[-1])
    end = game.step("BOOK {people} {day} {hour}".format(**facts))
    assert (end.done, end.reward, end.success) == (True, 1.0, True)


def test_a_wrong_booking_and_a_user_who_leaves() -> None:
    game = Booking(BookingArgs())
    game.reset(0, "train", 5)
    game.step("hi")
    wrong = game.step("BOOK 99 friday 19")
    assert (wrong.done, wrong.reward, wrong.success) == (True, 0.0, False)
    game.reset(0, "train", 5)
    left = game.step("BYE")
    assert (left.done, left.success, left.reward) == (True, False, 0.0)


@pytest.mark.parametrize("context", ["full", "steps"])
def test_demonstrations_are_of_the_trained_seat(context: str) -> None:
    talk = domain(
        "booking",
        max_turns=8,
        context=context,
        seats={"user": "shopper", "assistant": "actor"},
    )
    ((conversations, is_solved),) = demonstrations(talk, episodes=1, noise=0.0, seed=0)
    assert is_solved
    replies = [
        message["content"]
        for conversation in conversations
        for message in conversation
        if message["role"] == "assistant"
    ]
    assert replies[:3] == ["How many people?", "Which day?", "At what hour?"]
    assert re.fullmatch(r"BOOK \d+ \w+ \d+", replies[3])
    assert len(conversations) == (4 if context == "steps" else 1)
    first = conversations[0][0]
    assert first == {"role": "user", "content": "I would like a table."}


def test_noise_books_too_early() -> None:
    game = Booking(BookingArgs())
    game.reset(0, "train", 5)
    game.step("I would like a table.")
    assert game.demonstrate(np.random.default_rng(0), 1.0).startswith("BOOK ")
