"""Generated instructions that demand a form, checked by rules.

    Write about the river. Use the word "river". Answer in capital letters only.

The reward is 1 if the reply has the form and holds the word. What it says otherwise is not judged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from broker.settings.config import Section
from envhub.envs.text.generated import GeneratedEnvironment, GeneratedTask

TOPICS: Final = (
    "apple", "autumn", "bakery", "beach", "bicycle", "bird", "bread", "bridge", "camera", "castle",
    "cat", "city", "cloud", "coffee", "desert", "doctor", "dog", "dream", "farm", "fire", "fish",
    "flower", "forest", "friend", "garden", "guitar", "harbor", "history", "holiday", "horse",
    "house", "island", "kitchen", "lake", "language", "library", "market", "memory", "moon",
    "morning", "mountain", "music", "night", "ocean", "painting", "park", "piano", "planet", "rain",
    "river", "road", "school", "science", "ship", "snow", "spring", "star", "storm", "summer",
    "sun", "teacher", "theater", "train", "tree", "village", "water", "weather", "wind", "window",
    "winter",
)  # fmt: skip
SENTENCE_END: Final = re.compile(r"[.!?](?=\s|$)")
# of a reply whose form sets no number: a word alone shows no form
MIN_WORDS: Final = 3


class InstructionsArgs(Section):
    """``env_args`` of ``instructions``; it has none."""

    harmless = ()


class InstructionTask(GeneratedTask, frozen=True):
    """An instruction about a topic; ``form`` is a key of ``FORMS``, ``number`` what it counts."""

    topic: str
    form: str
    number: int


class Form:
    """A form: the text that demands it, its check, and a reply that has it.

    Args:
        demand: ends the instruction; ``{number}`` and ``{word}`` are replaced.
        check: whether a stripped reply has the form, given the number and the word.
        example: a reply that has it.
        numbers: what the form may count.
    """

    def __init__(
        self,
        demand: str,
        check: Callable[[str, int, str], bool],
        example: Callable[[int, str], str],
        numbers: tuple[int, ...] = (0,),
    ) -> None:
        self.demand = demand
        self.check = check
        self.example = example
        self.numbers = numbers


def has_list(reply: str, number: int, mark: str) -> bool:
    """Return whether a reply is a list of ``number`` lines that start with the pattern ``mark``."""
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    return len(lines) == number and all(re.fullmatch(rf"{mark} +\S.*", line) for line in lines)


def is_json_object(reply: str) -> bool:
    """Return whether a reply is a JSON object with texts for exactly ``topic`` and ``sentence``."""
    try:
        parsed = json.loads(reply)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(parsed, dict)
        and parsed.keys() == {"topic", "sentence"}
        and all(isinstance(value, str) and value.strip() for value in parsed.values())
    )


def has_words(reply: str) -> bool:
    """Return whether a reply has as many words as its form needs to show."""
    return len(reply.split()) >= MIN_WORDS


FORMS: Final[dict[str, Form]] = {
    "bullets": Form(
        'Answer with exactly {number} bullet points, each on a line that starts with "- ".',
        lambda reply, number, word: has_list(reply, number, "-"),
        lambda number, word: "\n".join([f"- the {word}"] * number),
        (2, 3, 4),
    ),
    "numbers": Form(
        "Answer with a numbered list of exactly {number} lines, "
        'which start with "1. ", "2. " and so on.',
        lambda reply, number, word: (
            has_list(reply, number, r"\d\.")
            and [int(digit) for digit in re.findall(r"^\s*(\d)\.", reply, re.MULTILINE)]
            == list(range(1, number + 1))
        ),
        lambda number, word: "\n".join(f"{index + 1}. the {word}" for index in range(number)),
        (2, 3),
    ),
    "json": Form(
        'Answer with a JSON object with the keys "topic" and "sentence" and nothing else.',
        lambda reply, number, word: is_json_object(reply),
        lambda number, word: json.dumps({"topic": word, "sentence": f"Here is the {word}."}),
    ),
    "capitals": Form(
        "Answer in capital letters only.",
        lambda reply, number, word: has_words(reply) and reply == reply.upper(),
        lambda number, word: f"THIS IS THE {word.upper()}.",
    ),
    "lower": Form(
        "Answer in small letters only, without any capital letter.",
        lambda reply, number, word: has_words(reply) and reply == reply.lower(),
        lambda number, word: f"this is the {word}.",
    ),
    "sentences": Form(
        "Answer with exactly {number} sentences.",
        lambda reply, number, word: (
            len(SENTENCE_END.findall(reply)) == number and reply[-1] in ".!?"
        ),
        lambda number, word: " ".join([f"This is the {word}."] * number),
        (1, 2, 3),
    ),
    "words": Form(
        "Answer with exactly {number} words.",
        lambda reply, number, word: len(reply.split()) == number,
        lambda number, word: " ".join([word] * number),
        (3, 5, 7),
    ),
    "end": Form(
        'End your answer with the words "That is all." and write nothing after them.',
        lambda reply, number, word: (
            reply.endswith("That is all.") and len(reply) > len("That is all.") + len(word)
        ),
        lambda number, word: f"This is the {word}. That is all.",
    ),
}


class Instructions(GeneratedEnvironment):
    """A topic and a form."""

    Args = InstructionsArgs

    @classmethod
    def draw(cls, args: InstructionsArgs, rng: np.random.Generator) -> InstructionTask:
        topic = TOPICS[int(rng.integers(len(TOPICS)))]
        name = list(FORMS)[int(rng.integers(len(FORMS)))]
        form = FORMS[name]
        number = form.numbers[int(rng.integers(len(form.numbers)))]
        demand = form.demand.format(number=number)
        question = f'Write about this topic: {topic}. Use the word "{topic}". {demand}'
        return InstructionTask(
            question,
            reference=form.example(number, topic),
            identity=f"{name} {number} {topic}",
            topic=topic,
            form=name,
            number=number,
        )

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {}

    def is_right(self, text: str) -> bool:
        task = self.task
        reply = text.strip()
        assert isinstance(task, InstructionTask)
        has_topic = re.search(rf"\b{task.topic}", reply, re.IGNORECASE) is not None
        return has_topic and FORMS[task.form].check(reply, task.number, task.topic)
