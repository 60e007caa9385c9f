"""A long and hostile answer costs the code that reads it little time, in every reward and
environment.

Each is called as a worker process would, with answers as long as a policy can write them in a turn
of 32,768 tokens.
"""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any, Final

import pytest

from broker.errors import NotInstalled
from broker.settings.config import DomainSection
from broker.settings.registry import known, resolve
from broker.settings.sections import parse
from envhub.domain import load_domain
from envhub.envs import ENVS
from envhub.envs.base import Environment, StepResult
from rewardhub.rewards import math_extract, math_text
from rewardhub.rewards.base import ResponseFault, Sample, Scored
from rewardhub.rewards.loading import load

LENGTH: Final = 130_000  # characters: four for a token
# of processor time, on a machine that does other things too; a hub allows an episode minutes
MOST_S: Final = 3.0

UNITS: Final = {
    "blanks": " ",
    "lines": "\n",
    "digits": "9",
    "braces": "{",
    "closed braces": "{}",
    "brackets": "[",
    "tags": "<answer>",
    "open tags": "<",
    "calls": "<tool_call>{",
    "boxed": "\\boxed{",
    "backslashes": "\\",
    "quotes": "'\"",
    "fences": "```python\n",
    "fractions": "\\frac{1}{",
    "powers": "9**",
    "factorials": "9!",
    "commas": "1,",
    "parentheses": "(",
    "words": "a ",
    "nulls": "\x00",
    "combining": "e\u0301\u0301",
    "escapes": "\x1b[2J",
    "actions": "<answer>Up</answer>\n",
}
# no text follows the first; the others read all of it
ROW: Final = {
    "instruction_id_list": [
        "keywords:existence", "language:response_language", "length_constraints:number_sentences",
        "detectable_format:json_format", "detectable_format:title",
        "detectable_content:number_placeholders", "change_case:english_lowercase",
    ],
    "kwargs": [
        {"keywords": ["zebra"]}, {"language": "en"}, {"num_sentences": 2, "relation": "at least"},
        {}, {}, {"num_placeholders": 1}, {},
    ],
}  # fmt: skip
REWARDS: Final[dict[str, dict[str, Any]]] = {
    "math_answer": {},
    "verifier": {},
    "instruction_following": {},
    "format": {"pattern": r".*<answer>.*</answer>\s*"},
    "length": {"max_tokens": 10, "cache_tokens": 5},
}


def _hostile(name: str) -> str:
    unit = UNITS[name]
    return unit * (LENGTH // len(unit))


def _sample(response: str) -> Sample:
    return Sample(
        domain="d", task_index=1, prompt="1+1?", response=response, reference="2", reward=0.0, reward_parts={},
        success=False, end="terminated", num_turns=1, num_tokens=9, metrics={}, row=ROW,
    )  # fmt: skip


@pytest.mark.parametrize("name", REWARDS)
async def test_a_reward_reads_hostile_responses_soon(name: str) -> None:
    score: Any = load(name, REWARDS[name])
    for words in UNITS:
        began = time.process_time()
        try:
            found = score(_sample(_hostile(words)))
            found = await found if inspect.isawaitable(found) else found
        except ResponseFault:
            found = 0.0
        assert time.process_time() - began < MOST_S, words
        value = found.value if isinstance(found, Scored) else found
        expected = {"length": -0.8, "format": float(words == "actions")}.get(name, 0.0)
        assert value == expected, words


@pytest.fixture(scope="module", params=known("envs", ENVS))
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    found: type[Environment] = resolve("envs", request.param, ENVS)
    try:
        example = found.example(Path(tmp_path_factory.mktemp("env")))
    except NotInstalled as error:
        pytest.skip(str(error))
    rewards = [] if found.has_reward else [{"name": "math_answer"}]
    seats = dict.fromkeys(found.seats(parse("env_args", example, found.Args)), "actor")
    section = DomainSection(env=request.param, env_args=example, rewards=rewards, seats=seats)
    domain = load_domain("d", section)
    domain.check()
    made: Environment = domain.make()
    return made


async def test_an_environment_answers_hostile_words_soon(environment: Environment) -> None:
    for words in UNITS:
        observation = environment.reset(0, "train", 1)
        _ = await observation if inspect.isawaitable(observation) else observation
        began = time.process_time()
        stepped = environment.step(_hostile(words))
        step = await stepped if inspect.isawaitable(stepped) else stepped
        assert time.process_time() - began < MOST_S, words
        assert isinstance(step, StepResult)
        assert not step.success, words
    closing = environment.close()
    if closing is not None:
        await closing
        assert len(step.observation.text) < 2 * LENGTH, words


LONG = {
    "blanks": " ",
    "lines": "\n",
    "digits": "9",
    "unicode digits": "٣",
    "commas": "1,",
    "braces": "{",
    "minus": "-",
}


@pytest.mark.parametrize("kind", sorted(LONG))
def test_a_long_answer_is_read_in_half_a_second(kind: str) -> None:
    text = LONG[kind] * 30_000
    for read in (
        math_text.has_unit,
        math_text.is_formula,
        math_text.to_latex,
        math_extract.boxed,
        math_text.words,
    ):
        began = time.process_time()
        read(text)
        assert time.process_time() - began < 0.5, read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 km", True),
        ("1,000.5 meters", True),
        ("$ -3%", True),
        (".5kg", True),
        ("5,", False),
        ("5, km", False),
        ("9", False),
    ],
)
def test_units_are_found_as_before(text: str, expected: bool) -> None:
    assert math_text.has_unit(text) is expected
