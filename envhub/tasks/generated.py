"""Writes a set of small terminal tasks: find, count, edit, fix a script, make a test pass.

They need nothing but a shell, so they run on the host's own system (``images: {"*": host}``). Where
a task is about a program, its hook runs it in the agent's sandbox on inputs that the agent has
never seen, and the tests only compare what it printed: nothing that the policy wrote is ever
executed with the rights of the tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

WORDS: Final = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "iris", "jade",
    "kelp", "lotus", "maple", "north", "ocean", "pearl", "quill", "river", "stone", "tulip",
)  # fmt: skip
COLOURS: Final = ("red", "blue", "green", "black", "white", "brown", "grey", "pink")
DOCKERFILE: Final = "FROM debian:12-slim\nWORKDIR /app\nCOPY files/ /app/\n"
COMPARE: Final = """#!/bin/sh
# The answer must be the expected text; blanks at the ends of lines do not count.
reward=0
if [ -f {path} ] && sed 's/[[:space:]]*$//' {path} | cmp -s - /tests/expected.txt; then
  reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
"""
# to find an instruction that no other task has; a set may be larger than there are
MAX_ATTEMPTS: Final = 200
OUTPUT: Final = "/logs/artifacts/output.txt"


@dataclass(frozen=True)
class TaskFiles:
    """The contents of a task.

    Attributes:
        files: of the working folder, by name.
        answer: path of what the tests compare with ``expected``.
        solution: one line that solves it.
        hook: runs the agent's program and writes ``answer``; empty: it writes it itself.
    """

    instruction: str
    files: Mapping[str, str]
    answer: str
    expected: str
    solution: str
    hook: str = ""
    modes: Mapping[str, int] = field(default_factory=dict)


def find_file(rng: random.Random) -> TaskFiles:
    """Make a task: which of several files has a word?"""
    word, *others = rng.sample(WORDS, 6)
    names = [f"{name}.txt" for name in rng.sample(WORDS, 5)]
    holder = rng.randrange(len(names))
    second_words = [*others[1:], others[0]]
    second_words[holder] = word
    files = {
        f"notes/{name}": f"{others[index]}\n{second_words[index]}\n"
        for index, name in enumerate(names)
    }
    instruction = (
        f"Which file in /app/notes has the word {word}? "
        "Write its name, such as stone.txt, to /app/answer.txt."
    )
    solution = f"cd notes && grep -lw {word} * > ../answer.txt"
    return TaskFiles(instruction, files, "/app/answer.txt", f"{names[holder]}\n", solution)


def count_lines(rng: random.Random) -> TaskFiles:
    """Make a task: how many lines of a file have a word?"""
    word, other = rng.sample(WORDS, 2)
    count = rng.randint(3, 40)
    lines = [word] * count + [other] * rng.randint(5, 30)
    rng.shuffle(lines)
    text = "".join(f"{line} {rng.randint(100, 999)}\n" for line in lines)
    instruction = f"How many lines of /app/log.txt have the word {word}? "
    instruction += "Write the number to /app/answer.txt."
    solution = f"grep -cw {word} log.txt > answer.txt"
    return TaskFiles(instruction, {"log.txt": text}, "/app/answer.txt", f"{count}\n", solution)


def edit_file(rng: random.Random) -> TaskFiles:
    """Make a task: replace a word in a file."""
    old, new, *others = rng.sample(COLOURS, 5)
    words = [old] * rng.randint(2, 5) + others
    rng.shuffle(words)
    text = "".join(f"{rng.choice(WORDS)} {word}\n" for word in words)
    instruction = f"In /app/colours.txt, replace every {old} by {new}."
    expected = text.replace(f" {old}\n", f" {new}\n")
    solution = f"sed -i 's/{old}/{new}/' colours.txt"
    return TaskFiles(instruction, {"colours.txt": text}, "/app/colours.txt", expected, solution)


def fix_script(rng: random.Random) -> TaskFiles:
    """Make a task: a script that computes the wrong number."""
    operator, wrong = rng.sample(("+", "-", "*"), 2)
    factor = rng.randint(2, 9)
    inputs = [(rng.randint(10, 99), rng.randint(1, 9)) for _ in range(4)]
    script = f"#!/bin/sh\n# calc.sh A B\necho $(( ($1 {wrong} $2) * {factor} ))\n"
    results = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    expected = "".join(f"{results[operator](a, b) * factor}\n" for a, b in inputs)
    instruction = (
        f"The script /app/calc.sh should print (A {operator} B) * {factor} for its arguments A "
        "and B, but it does not. Fix it."
    )
    calls = "; ".join(f"sh /app/calc.sh {a} {b}" for a, b in inputs)
    return TaskFiles(
        instruction,
        {"calc.sh": script},
        OUTPUT,
        expected=expected,
        solution=f"sed -i 's/$1 [*+-] $2/$1 {operator} $2/' calc.sh",
        hook=f"({calls}) > {OUTPUT} 2>&1",
        modes={"calc.sh": 0o755},
    )


def pass_test(rng: random.Random) -> TaskFiles:
    """Make a task: a library with an error, and a test that shows it."""
    name = rng.choice(WORDS)
    step = rng.randint(2, 20)
    wrong = step + rng.choice((-1, 1, 10))
    inputs = rng.sample(range(100, 1000), 4)
    library = f"{name}() {{\n  echo $(( $1 + {wrong} ))\n}}\n"
    test = (
        f"#!/bin/sh\n# Run: sh test.sh\n. ./lib.sh\n"
        f'[ "$({name} 1)" = {1 + step} ] && [ "$({name} 50)" = {50 + step} ] && echo passed\n'
    )
    instruction = (
        "The test /app/test.sh fails (run sh test.sh in /app). "
        "Correct /app/lib.sh, so that it passes; do not change the test."
    )
    instruction += f" The function is {name}."
    calls = "; ".join(f"sh -c '. ./lib.sh; {name} {number}'" for number in inputs)
    return TaskFiles(
        instruction,
        {"lib.sh": library, "test.sh": test},
        OUTPUT,
        expected="".join(f"{number + step}\n" for number in inputs),
        solution=f"sed -i 's/+ {wrong} /+ {step} /' lib.sh",
        hook=f"cd /app && ({calls}) > {OUTPUT} 2>&1",
    )


KINDS: Final[Mapping[str, Callable[[random.Random], TaskFiles]]] = {
    "find": find_file,
    "count": count_lines,
    "edit": edit_file,
    "script": fix_script,
    "test": pass_test,
}


def write_tasks(
    folder: Path, per_kind: int = 8, seed: int = 0, verifier: str = "separate"
) -> list[Path]:
    """Write ``per_kind`` tasks of each kind into a new folder and return theirs, kinds in turn.

    Args:
        verifier: ``verifier.environment_mode`` of the tasks.

    Raises:
        FileExistsError: if one is there already.
    """
    folders = []
    instructions: set[str] = set()
    for number in range(per_kind):
        for kind, make_task in KINDS.items():
            for attempt in range(MAX_ATTEMPTS):
                task = make_task(random.Random(f"{seed} {kind} {number} {attempt}"))
                # held-out tasks are told apart from others by what the policy reads
                if task.instruction not in instructions:
                    break
            instructions.add(task.instruction)
            folders.append(folder / f"{number:02}-{kind}")
            _write_task(folders[-1], task, verifier)
    return folders


def _write_task(folder: Path, task: TaskFiles, verifier: str) -> None:
    folder.mkdir(parents=True)
    texts = {
        "task.toml": _table_of(folder.name, task.hook, verifier),
        "instruction.md": f"{task.instruction}\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": COMPARE.format(path=task.answer),
        "tests/expected.txt": task.expected,
        "solution/solve.sh": f"#!/bin/sh\n{task.solution}\n",
    }
    texts |= {f"environment/files/{name}": text for name, text in task.files.items()}
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name, mode in {"tests/test.sh": 0o755, "solution/solve.sh": 0o755}.items():
        (folder / name).chmod(mode)
    for name, mode in task.modes.items():
        (folder / "environment/files" / name).chmod(mode)


def _table_of(name: str, hook: str, verifier: str) -> str:
    table = f"""schema_version = "1.4"

[task]
name = "generated/{name}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 5.0
environment_mode = "{verifier}"

[environment]
network_mode = "no-network"
workdir = "/app"
"""
    if hook:
        # of the agent's sandbox, after the agent has ended
        table += f'\n[[verifier.collect]]\ncommand = """{hook}"""\ntimeout_sec = 3.0\n'
    return table
