"""Rewards by name, dotted path and file path; what they may take and answer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from broker.errors import ConfigError
from broker.settings import runspec
from broker.settings.config import RewardConfig
from broker.settings.run_settings import RunSettings
from rewardhub import config, protocol
from rewardhub.rewards import REWARDS, base, loading
from rewardhub.rewards.base import InvalidScoreError, ResponseFault, check_scored, check_value
from rewardhub.worker import RewardWorker

HERE = str(Path(__file__).parents[2] / "kit" / "reward_functions.py")


def sample(response: str = "four", prompt: str = "our") -> base.Sample:
    return base.Sample(
        domain="d", task_index=3, prompt=prompt, response=response, reference="", reward=0.5,
        reward_parts={"env": 0.5}, success=True,
        end="length", num_turns=2, num_tokens=9, metrics={"moves": 2.0},
    )  # fmt: skip


def answer(
    name: str, fields: dict[str, Any] | None = None, **args: Any
) -> protocol.ScoreReply | protocol.ScoreFailureReply:
    changed = msgspec.structs.replace(sample(), **(fields or {}))
    asked = protocol.ScoreRequest(f"{HERE}:{name}", args, changed)
    # Through the bytes, as between processes.
    with closing(RewardWorker()) as worker:
        reply = worker.answer(protocol.REQUESTS.decode(msgspec.msgpack.encode(asked)))
    return protocol.REPLIES.decode(msgspec.msgpack.encode(reply))


def test_functions_answer_numbers_or_parts() -> None:
    assert answer("length") == protocol.ScoreReply(4.0)
    assert answer("scaled", factor=2.5, offset=-1) == protocol.ScoreReply(9.0)
    assert answer("parts") == protocol.ScoreReply({"brevity": -4.0, "grounded": 1.0})


def test_functions_of_other_trainers_work_by_path() -> None:
    row = {"prompt": "our", "answer": "our"}
    fields = {"row": row, "response": "your", "reference": "our"}
    assert answer("trl_exact", fields) == protocol.ScoreReply(1.0)
    assert answer("compute_score", fields) == protocol.ScoreReply(0.5, notes={"turns": 2.0})
    assert answer("per_turn") == protocol.ScoreReply([0.0, 1.0])
    failure = answer("trl_exact", {"row": {"solution": "our"}})
    assert isinstance(failure, protocol.ScoreFailureReply)
    assert not failure.retry
    assert failure.detail.endswith(
        "trl_exact: it needs the column 'answer'; the rows of domain 'd' have the columns solution"
    )


def test_coroutines_share_one_loop() -> None:
    asked = protocol.ScoreRequest(f"{HERE}:parts", {}, sample("our", "our"))
    with closing(RewardWorker()) as worker:
        answers = [worker.answer(asked) for _ in range(3)]
    assert answers == [protocol.ScoreReply({"brevity": -3.0, "grounded": 1.0})] * 3


@pytest.mark.parametrize(
    ("name", "detail", "retry"),
    [
        ("raises", "KeyError: 'no such thing' (reward_functions.py:37 in raises)", True),
        ("exits", "SystemExit: 3 (reward_functions.py:41 in exits)", True),
        ("nan", "the reward must be finite, got nan", False),
        ("nothing", "the reward must be a number, got NoneType None", False),
        ("text", "the reward must be a number, got str '1.0'", False),
        ("infinite_part", "part 'bad' must be finite, got inf", False),
    ],
)
def test_what_is_no_number_is_said_plainly(name: str, detail: str, retry: bool) -> None:
    found = answer(name)
    assert isinstance(found, protocol.ScoreFailureReply)
    assert (found.detail, found.retry) == (f"{HERE}:{name}: {detail}", retry)
    assert ("Traceback" in found.trace) == retry  # for the hub's log


def test_values() -> None:
    assert check_value(True, 2) == 1.0
    assert check_value(np.float32(0.5), 2) == 0.5
    assert check_value(np.array(2.0), 2) == 2.0
    assert check_value({"a": 1, "b": np.int64(-2)}, 2) == {"a": 1.0, "b": -2.0}
    assert check_value([1, np.float32(0.5)], 2) == [1.0, 0.5]
    assert check_value(np.array([1.0, 2.0]), 2) == [1.0, 2.0]
    for bad in (
        {},
        {"": 1.0},
        {1: 1.0},
        [1.0],
        np.array([1.0, 2.0, 3.0]),
        ["1", "2"],
        1j,
        "1",
        b"1",
        10**400,
    ):
        with pytest.raises(InvalidScoreError):
            check_value(bad, 2)


def test_a_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(HERE).parent))
    assert loading.load("reward_functions:length", {})(sample()) == 4


def check(values: dict[str, Any]) -> None:
    config.check(RunSettings.of_config(values))


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        (
            {"name": "math_anser"},
            "domains.qa.rewards.0.name: 'math_anser' is not allowed; did you mean 'math_answer'? known: ",
        ),
        (
            {"name": "nowhere/f.py:score"},
            "domains.qa.rewards.0.name: 'nowhere/f.py:score' is not allowed; there is no file nowhere/f.py",
        ),
        (
            {"name": "no_such_pkg:score"},
            "domains.qa.rewards.0.name: 'no_such_pkg:score' is not allowed; there is no module 'no_such_pkg'",
        ),
        (
            {"name": f"{HERE}:absent"},
            f"domains.qa.rewards.0.name: '{HERE}:absent' is not allowed; {HERE} has no 'absent'",
        ),
        (
            {"name": f"{HERE}:two_forms"},
            f"domains.qa.rewards.0.name: '{HERE}:two_forms' is not allowed; a function of (sample, **args), "
            "or TRL's of (completions, prompts=None, **columns), or verl's of (data_source, solution_str, "
            "ground_truth, extra_info=None); two_forms(completions: 'list[str]', solution_str: 'str') -> "
            "'list[float]' has both completions and solution_str",
        ),
        (
            {"name": f"{HERE}:not_callable"},
            f"domains.qa.rewards.0.name: '{HERE}:not_callable' is not allowed; expected a function or a class, found "
            f"an object of type int",
        ),
        (
            {"name": f"{HERE}:NoScore"},
            f"domains.qa.rewards.0.name: '{HERE}:NoScore' is not allowed; class NoScore (reward_functions.py:",
        ),
        (
            {"name": f"{HERE}:scaled"},
            "domains.qa.rewards.0.args: {} is not allowed; scaled(sample: 'Any', *, factor: 'float', offset",
        ),
        (
            {"name": f"{HERE}:length", "args": {"x": 1}},
            "domains.qa.rewards.0.args: {'x': 1} is not allowed; length(sample: 'Any') -> 'int'",
        ),
        (
            {"name": "math_answer", "args": {"corect": 1}},
            "domains.qa.rewards.0.args.corect: 1 is not allowed; unknown key, did you mean "
            "'domains.qa.rewards.0.args.correct'?",
        ),
        (
            {"name": "format", "args": {"pattern": "(a"}},
            "domains.qa.rewards.0.args.pattern: '(a' is not allowed; expected a regular expression: missing ), "
            "unterminated",
        ),
        (
            {"name": "length", "args": {"max_tokens": 10, "cache_tokens": 11}},
            "domains.qa.rewards.0.args: {'max_tokens': 10, 'cache_tokens': 11} is not allowed; expected cache_tokens "
            "up to max_tokens (10)",
        ),
        (
            {"name": "reward_model"},
            "domains.qa.rewards.0.args.path: None is not allowed; it must be given",
        ),
        (
            {"name": "judge", "args": {"base_url": "http://x/v1", "template": "{prompt}"}},
            "domains.qa.rewards.0.args.template: '{prompt}' is not allowed; it must hold {response} or "
            "{conversation}; also allowed: {prompt}",
        ),
        (
            {"name": "math_answer", "args": {"wrong": "x"}},
            "domains.qa.rewards.0.args.wrong: 'x' is not allowed; input should be a valid",
        ),
    ],
)
def test_check_names_key_value_and_what_is_allowed(reward: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check({"domains": {"qa": {"env": "qa", "rewards": [reward]}}})
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_bare_name_is_told_how_it_is_written() -> None:
    line = (
        r"^domains\.qa\.rewards\.0: 'mine\.py:short' is not allowed; write {name: mine\.py:short}$"
    )
    with pytest.raises(ConfigError, match=line):
        runspec.validate(
            {"domains": {"qa": {"env": "qa", "rewards": ["mine.py:short"]}}}, checks=()
        )


def test_check_takes_what_is_right() -> None:
    needed: dict[str, dict[str, Any]] = {
        "format": {"pattern": "a"},
        "length": {"max_tokens": 9, "cache_tokens": 9},
        "judge": {"base_url": "http://127.0.0.1:1/v1"},
        "rubric": {"base_url": "http://127.0.0.1:1/v1"},
        "reward_model": {"path": "no/model-is-looked-for-yet"},
        "process_reward": {"path": "no/model-is-looked-for-yet"},
        "implicit_reward": {"path": "no/model", "reference": "no/other"},
    }
    rewards: list[dict[str, Any]] = [
        {"name": name, "args": needed.get(name, {})} for name in REWARDS
    ]
    rewards += [{"name": f"{HERE}:scaled", "args": {"factor": 2}, "pool": "slow"}]
    check({"domains": {"qa": {"env": "qa", "rewards": rewards}, "lake": {"env": "frozenlake"}}})


def test_a_reward_that_may_outlast_the_hub_is_refused() -> None:
    spec = {
        "domains": {"c": {"env": "qa", "rewards": [{"name": "code", "args": {"timeout_s": 20}}]}},
        "rewardhub": {"timeout_s": 20},
    }
    line = r"^domains\.c\.rewards\.0\.args\.timeout_s: 20\.0 is not allowed; below rewardhub\.timeout_s \(20\), "
    with pytest.raises(ConfigError, match=line):
        check(spec)
    check({**spec, "rewardhub": {"timeout_s": 20.5}})


def test_an_answer_is_too_costly_before_the_hub_gives_up() -> None:
    spec = {
        "domains": {"m": {"env": "qa", "rewards": [{"name": "math_answer", "args": {"cpu_s": 3}}]}},
        "rewardhub": {"timeout_s": 5},
    }
    line = r"^domains\.m\.rewards\.0\.args\.cpu_s: 3\.0 is not allowed; at most half of rewardhub\.timeout_s \(5\), "
    with pytest.raises(ConfigError, match=line):
        check(spec)
    check({**spec, "rewardhub": {"timeout_s": 6}})


def test_a_response_that_takes_too_long_to_match_is_at_fault_itself() -> None:
    score = loading.load("format", {"pattern": "(a|a)*b", "wrong": -1, "cpu_s": 0.2})
    with pytest.raises(ResponseFault, match="too_costly") as caught:
        score(sample("a" * 60))
    assert caught.value.value == -1.0
    assert score(sample("aab")) == 1.0


@pytest.mark.parametrize(
    ("args", "response", "value"),
    [
        ({"pattern": "<a>.*</a>"}, " <a>one\ntwo</a>\n", 1.0),
        ({"pattern": "<a>.*</a>"}, "so <a>x</a>", 0.0),
        ({"pattern": "<a>.*</a>", "where": "anywhere", "correct": 0.5}, "so <a>x</a>!", 0.5),
        ({"pattern": "so", "where": "start", "wrong": -1}, "and so", -1.0),
        ({"pattern": "so", "where": "start"}, "so it is", 1.0),
    ],
)
def test_a_form_that_a_response_has_or_has_not(
    args: dict[str, Any], response: str, value: float
) -> None:
    assert loading.load("format", args)(sample(response)) == value


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (100, -1.0), (5000, -1.0)]
)
def test_soft_overlong_punishment(tokens: int, value: float) -> None:
    score = loading.load("length", {"max_tokens": 100, "cache_tokens": 40})
    assert score(msgspec.structs.replace(sample(), num_tokens=tokens)) == value


def test_notes_go_with_a_value_and_are_numbers_too() -> None:
    assert answer("noted") == protocol.ScoreReply(2.0, notes={"tokens": 7.0})
    assert check_scored(base.Scored({"a": 1, "b": 2}, {"c": np.float32(0.5)}), 1) == base.Scored(
        {"a": 1.0, "b": 2.0}, {"c": 0.5}
    )
    with pytest.raises(InvalidScoreError, match="note 'x' must be finite, got nan"):
        check_scored(base.Scored(1.0, {"x": float("nan")}), 1)


def test_labels_are_short_and_no_two_alike() -> None:
    names = ["math_answer", "a/b.py:brevity", "math_answer", "other:brevity", "math_answer"]
    assert config.reward_labels([RewardConfig(name=n) for n in names]) == [
        "math_answer",
        "brevity",
        "math_answer_2",
        "brevity_2",
        "math_answer_3",
    ]
