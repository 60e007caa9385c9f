"""The reward ``rubric`` against a judge that answers from a script: one call, parts, and answers
that have not the schema.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from judge_endpoint import Endpoint, said, serve_endpoint

from broker.errors import ConfigError
from broker.settings.config import RewardConfig
from rewardhub.reward_processes import RewardProcesses
from rewardhub.rewards import loading
from rewardhub.rewards.base import InvalidRowError, NoScore, Sample, Scored
from rewardhub.rewards.judges.judge_client import UnreadableAnswer
from rewardhub.rewards.judges.rubric import RubricArgs, RubricReward, read_answer
from rewardhub.rewards.judges.rubric_criteria import CriterionSection, make_rubric

CRITERIA = [
    {"name": "true", "text": "All is true.", "weight": 3},
    {"name": "brief", "text": "It is brief."},
]
ANSWER = json.dumps({"reason": "fine", "true": 8, "brief": 4})
URL = "http://127.0.0.1:9/v1"


def sample(response: str = "four", row: dict[str, Any] | None = None) -> Sample:
    return Sample(
        domain="essays", task_index=3, prompt="2 + 2?", response=response, reference="4", reward=0.0,
        reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=4, metrics={},
        row=row or {},
    )  # fmt: skip


async def score(endpoint: Endpoint, *samples: Sample, **args: Any) -> list[Scored]:
    async with serve_endpoint(endpoint) as url:
        reward = RubricReward(RubricArgs.model_validate({"base_url": url, **args}))
        await reward.start()
        try:
            return [await reward.score(each) for each in samples]
        finally:
            await reward.client.close()


async def test_one_call_scores_all_criteria() -> None:
    endpoint = Endpoint(said(f"<think>{{}}</think>Here:\n```json\n{ANSWER}\n```"))
    (scored,) = await score(endpoint, sample("I say {schema}"), criteria=CRITERIA)
    # 3/4 * 8/10 and 1/4 * 4/10
    assert scored.value == pytest.approx({"true": 0.6, "brief": 0.1})
    assert scored.notes == {
        "tokens_in": 100, "tokens_out": 20, "cost": 0.0, "cached": 0.0, "asked": 1.0,
        "truncated": 0.0,
    }  # fmt: skip
    (request,) = endpoint.asked
    assert "response_format" not in request
    question = request["messages"][0]["content"]
    assert "- true (0 to 10): All is true.\n- brief (0 to 10): It is brief.\n" in question
    assert "[Response]\nI say {schema}\n" in question  # the response fills no slot
    assert json.loads(question[question.rindex("\n{") :])["required"] == ["reason", "true", "brief"]


async def test_answer_without_the_schema_is_requested_again() -> None:
    bad = json.dumps({"reason": "x", "true": 11, "brief": 4})
    endpoint = Endpoint(said("I cannot"), said(bad), said(ANSWER))
    (scored,) = await score(endpoint, sample(), criteria=CRITERIA)
    assert scored.notes["asked"] == 3.0
    requests = [message["content"] for message in endpoint.asked[-1]["messages"][2::2]]
    assert requests == [
        "That is no JSON object of the schema: it is not a JSON object. Answer with the object "
        "alone.",
        "That is no JSON object of the schema: 'true' must be from 0 to 10. Answer with the object "
        "alone.",
    ]


async def test_without_an_answer_there_is_no_score() -> None:
    line = (
        r"^domain 'essays', task 3: the judge gave no object of the schema \('brief' is missing\) "
        r"in 3 answers; the last ends '\{\"reason\": \"x\", \"true\": 1\}'$"
    )
    endpoint = Endpoint(said(json.dumps({"reason": "x", "true": 1})))
    with pytest.raises(NoScore, match=line):
        await score(endpoint, sample(), criteria=CRITERIA)


async def test_schema_is_sent_as_response_format_on_demand() -> None:
    endpoint = Endpoint(said(ANSWER))
    await score(endpoint, sample(), criteria=CRITERIA, structured=True)
    form = endpoint.asked[0]["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["strict"] is True
    assert form["json_schema"]["schema"]["properties"]["true"]["maximum"] == 10


async def test_each_row_has_its_criteria() -> None:
    rows: list[dict[str, Any]] = [
        {"rubric": [{"description": "Names a river.", "weight": 5}]},
        {"rubric": json.dumps([{"name": "kind", "text": "It is kind."}])},
    ]
    answers = [said('{"reason": "", "criterion_1": 1}'), said('{"reason": "", "kind": 0}')]
    scores = await score(Endpoint(*answers), *(sample(row=row) for row in rows), high=1)
    assert [scored.value for scored in scores] == [{"criterion_1": 1.0}, {"kind": 0.0}]


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"a": 1}, r"^domain 'essays', task 3: no column 'rubric'; it has a$"),
        ({"rubric": [{"text": ""}]}, r"^domain 'essays', task 3: column 'rubric': criteria.0.text"),
    ],
)
async def test_rows_without_a_rubric(row: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidRowError, match=line):
        await score(Endpoint(said(ANSWER)), sample(row=row))


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"criteria": []}, r"^domains.d.rewards.0.args.criteria: 0 is not allowed; expected 1 to "),
        (
            {"criteria": [*CRITERIA, CRITERIA[0]]},
            r"^domains.d.rewards.0.args.criteria.2.name: 'true' is not allowed; another criterion",
        ),
        (
            {
                "criteria": CRITERIA,
                "answer_schema": {
                    "type": "object",
                    "properties": {"true": {"type": "number", "minimum": 0, "maximum": 1}},
                    "required": ["true"],
                },
            },
            r"^domains.d.rewards.0.args.criteria.1.name: 'brief' is not allowed; the schema has onl",
        ),
        (
            {"criteria": CRITERIA, "answer_schema": {"type": "array"}},
            r"^domains.d.rewards.0.args.answer_schema.type: 'array' is not allowed; expected 'obj",
        ),
        ({"answer_schema": {"type": "object"}}, "answer_schema needs criteria"),
        ({"low": 3, "high": 3}, "high is 3; it must be above low, which is 3"),
        ({"template": "{response} {schema}"}, "it must hold {criteria}"),
        ({"template": "{criteria} {schema}"}, "it must hold {response} or {conversation}"),
    ],
)
def test_contradictions_are_refused_by_check(args: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refusal:
        loading.check("rubric", {"base_url": URL, **args}, "domains.d.rewards.0")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("answer", ["", "{" * 100_000, "{}" * 1000, '{"a":' * 5000, "\x00"])
def test_unreadable_answers_are_refused(answer: str) -> None:
    rubric = make_rubric([CriterionSection(name="true", text="x")], None, 0, 10)
    with pytest.raises(UnreadableAnswer):
        read_answer(answer, rubric)


def test_last_object_of_an_answer_counts() -> None:
    rubric = make_rubric([CriterionSection(name="true", text="x")], None, 0, 10)
    quoted = 'It says {"reason": "", "true": 10}, but {"reason": "no", "true": 1}'
    assert read_answer(quoted, rubric)["true"] == 1


async def test_rubric_and_verifier_score_in_processes_of_their_own() -> None:
    async with serve_endpoint(Endpoint(said(ANSWER), said("Score: 1"))) as url:
        rubric = RewardConfig(name="rubric", args={"base_url": url, "criteria": CRITERIA})
        verifier = RewardConfig(name="verifier", args={"judge": {"base_url": url}})
        hosts = RewardProcesses()
        await hosts.start({"domains.d.rewards.0": rubric, "domains.d.rewards.1": verifier})
        try:
            parts = await hosts.score(rubric, sample())
            by_rules = await hosts.score(verifier, sample("4"))
            other_words = msgspec.structs.replace(sample("the highest one"), reference="Everest")
            by_judge = await hosts.score(verifier, other_words)
        finally:
            await hosts.close()
    assert parts.value == pytest.approx({"true": 0.6, "brief": 0.1})
    assert (by_rules.value, by_rules.notes) == (1.0, {"by_number": 1.0})
    assert by_judge.value == by_judge.notes["by_judge"] == 1.0
