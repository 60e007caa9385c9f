"""Generated questions: their answers by hand, what counts as right, and held-out tasks that no
training seed shows.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from broker.errors import ConfigError
from envhub.envs.base import Observation, StepResult
from envhub.envs.text.arithmetic import Arithmetic, ArithmeticArgs, last_number
from envhub.envs.text.constraints import DEMANDS, ConstraintTasks, ConstraintTasksArgs
from envhub.envs.text.generated import GeneratedEnvironment, GeneratedTask, is_held_out
from envhub.envs.text.instructions import FORMS, Instructions, InstructionsArgs, InstructionTask
from envhub.envs.text.programs import ProgramArgs, ProgramTasks, apply_steps, write_program
from envhub.envs.text.word_problems import WordProblems, WordProblemsArgs
from rewardhub.rewards.code import last_block
from rewardhub.rewards.constraints.rows import read_instructions

KINDS: list[tuple[type[GeneratedEnvironment], object]] = [
    (Arithmetic, ArithmeticArgs()),
    (WordProblems, WordProblemsArgs()),
    (Instructions, InstructionsArgs()),
    (ConstraintTasks, ConstraintTasksArgs()),
    (ProgramTasks, ProgramArgs(operations=3)),
]


def step(environment: GeneratedEnvironment, text: str) -> StepResult:
    return environment.step(text)


@pytest.mark.parametrize(("kind", "args"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_no_held_out_task_is_trained_on(kind: type[GeneratedEnvironment], args: object) -> None:
    environment = kind(args)
    count = kind.num_tasks(args, "eval")
    assert count is not None
    held_out = {
        environment.reset(index, "eval", 7) and environment.task.identity for index in range(count)
    }
    assert len(held_out) == count >= 250
    for seed in (0, 1):
        trained = {
            environment.reset(index, "train", seed) and environment.task.identity
            for index in range(2000)
        }
        assert not trained & held_out
    assert kind.num_tasks(args, "train") is None


def test_sums_and_their_mirror_images_are_one_task() -> None:
    environment = Arithmetic(ArithmeticArgs())
    environment.reset(0, "train", 0)
    assert (environment.task.question, environment.reference) == (
        "What is 86 + 67?",
        "153",
    )
    assert environment.task.identity == "67 + 86"
    for operator, expected in (("-", "19"), ("*", "5762")):
        environment = Arithmetic(ArithmeticArgs(operator=operator))
        environment.reset(0, "train", 0)
        assert environment.prompt == f"What is 86 {operator} 67?"
        assert environment.reference == expected
    assert (
        len(re.findall(r"\d{4}", Arithmetic(ArithmeticArgs(digits=4)).reset(1, "train", 0).text))
        == 2
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("85", "85"),
        ("37 + 48 = 85.", "85"),
        ("**85**\n", "85"),
        ("$85!", "85"),
        ("37-48", "48"),
        ("it is -11", "-11"),
        ("1,234", "1234"),
        ("12,34", "34"),
        ("007", "7"),
        ("-0", "0"),
        ("85, not 86", "86"),
        ("3.5", None),
        ("3rd", None),
        ("x2", None),
        ("eighty-five", None),
        ("", None),
        ("9" * 100_000, "9" * 100_000),
    ],
)
def test_the_last_whole_number_counts(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_a_right_number_is_rewarded_and_a_wrong_one_is_still_an_answer() -> None:
    environment = Arithmetic(ArithmeticArgs())
    environment.reset(0, "train", 0)
    results = [step(environment, text) for text in ("153", "86 + 67 = 153", "153 or 154", "none")]
    assert [(one.reward, one.success, one.valid, one.done) for one in results] == [
        (1.0, True, True, True),
        (1.0, True, True, True),
        (0.0, False, True, True),
        (0.0, False, False, True),
    ]


def test_word_problems_add_up() -> None:
    environment, steps = WordProblems(WordProblemsArgs(max_steps=3)), set()
    for index in range(300):
        text = environment.reset(index, "train", 0).text
        amount, *changes = map(int, environment.task.identity.split())
        assert amount + sum(changes) == int(environment.reference) > 0
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        assert numbers == [amount, *map(abs, changes)]
        steps.add(len(changes))
        losing = len(re.findall("gives away|loses|sells", text))
        assert losing == sum(change < 0 for change in changes)
    assert steps == {1, 2, 3}
    with pytest.raises(ValueError, match="min_steps is 3, more than max_steps, which is 2"):
        WordProblemsArgs(min_steps=3)


@pytest.mark.parametrize(
    ("form", "number", "right", "wrong"),
    [
        ("bullets", 2, "- a lake\n\n- two lakes", ["- lake", "- lake\nlakes", "- lake\n" * 3, "-lake\n-lake"]),
        ("numbers", 2, "1. lake\n2. lakes", ["1. lake\n1. lakes", "1. lake", "2. lake\n1. lake", "1) lake\n2) lake"]),
        ("json", 0, '{"topic": "lake", "sentence": "Deep."}', ['{"topic": "lake"}', "lake", "[]", "{" * 9999]),
        ("capitals", 0, "A LAKE IS DEEP", ["A lake IS DEEP", "LAKE"]),
        ("lower", 0, "a lake is deep.", ["A lake is deep.", "lake"]),
        ("sentences", 2, "A lake. It is deep!", ["A lake is deep.", "A lake. It is deep", "A lake. So. Deep."]),
        ("words", 3, "lakes are deep", ["lakes are very deep", "lakes"]),
        ("end", 0, "A lake is deep. That is all.", ["That is all.", "A lake is deep. That is all. Bye"]),
    ],
)  # fmt: skip
def test_each_form_by_hand(form: str, number: int, right: str, wrong: list[str]) -> None:
    environment = Instructions(InstructionsArgs())
    environment.task = InstructionTask("?", "", "", "lake", form, number)
    assert step(environment, right).reward == 1.0
    assert [
        step(environment, text).reward
        for text in (*wrong, right.replace("lake", "sea").replace("LAKE", "SEA"))
    ] == [0.0] * (len(wrong) + 1)


def test_every_form_is_asked_for_and_has_a_right_answer() -> None:
    environment, forms = Instructions(InstructionsArgs()), set()
    for index in range(300):
        text = environment.reset(index, "train", 0).text
        assert isinstance(environment.task, InstructionTask)
        assert f'Use the word "{environment.task.topic}".' in text
        assert "{" not in text
        assert step(environment, environment.reference).reward == 1.0, environment.task
        forms.add(environment.task.form)
    assert forms == set(FORMS)


@pytest.mark.parametrize(
    ("held_out", "problem"), [(True, "all of these are held out"), (False, "none is held out")]
)
def test_arguments_that_leave_one_side_empty_are_refused(held_out: bool, problem: str) -> None:
    only = next(name for name in map(str, range(99)) if is_held_out(name) is held_out)

    class OneTask(Arithmetic):
        @classmethod
        def draw(cls, args: ArithmeticArgs, rng: np.random.Generator) -> GeneratedTask:
            return GeneratedTask("1 + 1?", "2", only)

    with pytest.raises(ConfigError, match=f"more different tasks: {problem}"):
        OneTask.check(ArithmeticArgs())


def test_a_program_and_its_tests_by_hand() -> None:
    steps = (("add", 3), ("multiply by", 2), ("subtract", 5))
    assert write_program(steps).splitlines() == [
        "def f(x):", "    x = x + 3", "    x = x * 2", "    x = x - 5", "    return x",
    ]  # fmt: skip
    assert [apply_steps(steps, value) for value in (0, 1, -3)] == [1, 3, -5]


def test_demonstrated_programs_pass_their_tests_unless_an_operation_is_random() -> None:
    environment = ProgramTasks(ProgramArgs(operations=2))
    rng = np.random.default_rng(0)
    passed = []
    for index in range(200):
        environment.reset(index, "train", 0)
        # 0.6 of the operations as they should be: 0.4 of the programs, with some luck
        noise = 0.4 if index >= 100 else 0.0
        reply = environment.demonstrate(rng, noise)
        program = last_block(reply)
        assert program is not None
        names: dict[str, Any] = {}
        exec(program, names)
        tests = json.loads(environment.reference)
        outputs = [names["f"](*arguments) for arguments in tests["inputs"]]
        passed.append(outputs == tests["outputs"])
        assert environment.step(reply) == StepResult(Observation(""), 0.0, done=True)
    assert all(passed[:100])
    assert 25 < sum(passed[100:]) < 55
    assert not environment.step("x = x + 3").valid


def test_references_of_constraint_tasks_follow_their_rows() -> None:
    environment = ConstraintTasks(ConstraintTasksArgs(max_instructions=3))
    ids = set()
    for index in range(400):
        text = environment.reset(index, "train", 0).text
        row = environment.row
        assert (row["prompt"], environment.prompt) == (text, text)
        instructions = read_instructions(row)
        assert 2 <= len(instructions) <= 4
        for instruction in instructions:
            assert instruction.is_followed(environment.reference), (text, environment.reference)
        ids |= {instruction.key for instruction in instructions}
        assert step(environment, environment.reference).reward == 0.0
    assert ids == {"keywords:existence", *DEMANDS}
