"""The arguments of every command: each has a word of help, and a value that is none is refused
before anything is asked of a broker.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from importlib import metadata

import pytest

from broker.cli import main as broker
from broker.cli import parser as broker_parser
from broker.errors import UserError
from broker.settings import arguments
from broker.system.locks import lock
from envhub.cli import demos_parser, render_parser
from envhub.cli import main as envhub
from envhub.cli import parser as envhub_parser
from rewardhub.cli import main as rewardhub
from rewardhub.cli import parser as rewardhub_parser
from rlearner.cli import _parse_arguments, make_parser
from rlearner.cli import main as rlearner
from rollout.cli import main as rollout
from rollout.cli import parser as rollout_parser

PARSERS = (
    broker_parser,
    envhub_parser,
    demos_parser,
    render_parser,
    make_parser,
    rewardhub_parser,
    rollout_parser,
)
MAINS = {
    "broker": broker,
    "envhub": envhub,
    "rlearner": rlearner,
    "rewardhub": rewardhub,
    "rollout-server": rollout,
}


def actions(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in {id(one): one for one in action.choices.values()}.values():
                yield from actions(inner)
        else:
            yield f"{parser.prog} {action.option_strings or action.dest}", action


def test_every_argument_says_what_it_is() -> None:
    assert [
        where for parser in PARSERS for where, action in actions(parser()) if not action.help
    ] == []


# Commands that have no --json, and why.
WITHOUT_JSON = {
    "rlearner start": "a process of a run, which logs",
    "rlearner completion": "prints code for a shell",
    "broker permissions": "prints a configuration file of nats-server",
    "envhub": "a process of a run, which logs",
    "envhub demos": "always prints one JSON object",
    "envhub render": "always prints one JSON object",
    "rewardhub": "a process of a run, which logs",
    "rollout-server": "a process of a run, which logs",
    "rlearner exporter": "a process next to a run, which logs",
    "rlearner console": "serves pages",
}


def test_every_command_that_prints_a_result_prints_it_as_json_too() -> None:
    commands = [command for make in PARSERS for command in arguments.commands_of(make())]
    leaves = [
        one
        for one in commands
        if not any(isinstance(a, argparse._SubParsersAction) for a in one._actions)
    ]
    lacking = {
        one.prog
        for one in leaves
        if not any("--json" in action.option_strings for action in one._actions)
    }
    assert lacking == set(WITHOUT_JSON)


def take(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Parse as the program does."""
    if parser.prog == "rlearner":
        _parse_arguments(words)
    elif parser.prog.startswith("envhub "):
        parser.parse_intermixed_args(words)
    else:
        parser.parse_args(words)


def test_every_command_has_examples_that_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for make in PARSERS:
        for command in arguments.commands_of(make()):
            _, found, rest = (command.epilog or "").partition("example")
            lines = [
                line.strip()
                for line in rest.splitlines()[1:]
                if line.startswith(f"  {command.prog}")
            ]
            assert found, f"{command.prog} --help has no example"
            assert lines, f"{command.prog} --help has no example of it"
            for line in lines:
                words = shlex.split(line.partition(" > ")[0], comments=True)
                take(make(), words[len(make().prog.split()) :])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", sorted(MAINS))
def test_every_program_says_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        MAINS[name](["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{name} {metadata.version('rlearner')}\n"


def test_help_shows_the_examples_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rlearner(["status", "--help"])
    assert capsys.readouterr().out.endswith(
        "examples:\n  rlearner status quick\n  rlearner status runs/quick --json\n"
    )


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (arguments.count, {"1": 1, "20": 20}, ("0", "-1", "x", "1.5", "", "²")),
        (arguments.natural, {"0": 0, "3": 3}, ("-1", "", "1e3")),
        (arguments.port, {"0": 0, "65535": 65535}, ("65536", "-1", "http")),
        (arguments.positive, {"0.5": 0.5, "3": 3.0}, ("0", "-1", "inf", "nan", "soon")),
        (arguments.share, {"0": 0.0, "1": 1.0}, ("1.1", "-0.1", "nan", "half")),
        (arguments.names, {"a, b,": ["a", "b"], "": []}, ()),
    ],
)
def test_types_of_arguments(
    kind: object, taken: dict[str, object], refused: tuple[str, ...]
) -> None:
    assert callable(kind)
    assert {text: kind(text) for text in taken} == taken
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


DEAD = ["--broker", "nats://127.0.0.1:9", "--connect-deadline"]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([*DEAD, "-1"], "argument --connect-deadline: '-1' is not allowed; a number above 0"),
        ([*DEAD, "1", "--run", "a.b"], "error: --run: 'a.b' is not allowed; use 1-64 letters"),
        ([*DEAD, "1", "--id", "a b"], "error: --id: 'a b' is not allowed; use 1-64 letters"),
    ],
)
@pytest.mark.parametrize("name", ["envhub", "rewardhub", "rollout-server"])
def test_bad_options_of_all_that_join(
    name: str, command: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _refused(name, command, says, capsys)


@pytest.mark.parametrize(
    ("name", "command", "says"),
    [
        (
            "rollout-server",
            ["--engine", "vlm"],
            "error: rollout.engine: 'vlm' is not allowed; did you mean 'vllm'? known: hf, ",
        ),
        (
            "rollout-server",
            ["max_runing=3"],
            "error: rollout.max_runing: 3 is not allowed; unknown key, did you mean 'rollout.max_",
        ),
        (
            "rollout-server",
            ["max_running=0"],
            "error: rollout.max_running: 0 is not allowed; input should be greater than 0",
        ),
        (
            "rollout-server",
            ["what"],
            "error: override 'what' is not allowed; write key=value, for example max_running=32",
        ),
        (
            "rollout-server",
            ["--model", "/nope", "--policy", "judge"],
            "error: --model: '/nope' is not allowed; no such folder",
        ),
        (
            "rollout-server",
            ["--gpus", "x"],
            "error: --gpus: expected cpu, auto, a list such as 0,2",
        ),
        ("envhub", ["--n", "0"], "argument --n: '0' is not allowed; a whole number of at least 1"),
        (
            "envhub",
            ["--domains", "a.b"],
            "argument --domains: 'a.b' is not allowed; use 1-64 letters",
        ),
        (
            "rewardhub",
            ["--pools", "a", "--rewards", "b"],
            "argument --rewards: not allowed with argument --pools",
        ),
        (
            "rewardhub",
            ["--pools", "a.b"],
            "argument --pools: 'a.b' is not allowed; use 1-64 letters",
        ),
        (
            "broker",
            ["serve", "--store-max-gib", "-1"],
            "argument --store-max-gib: '-1' is not allowed; a number above 0",
        ),
        ("broker", ["dead", "show", "-3"], "dead show"),
        (
            "rlearner",
            ["up"],
            "error: rlearner up: the following arguments are required: CONFIG; see rlearner up --help\n",
        ),
        (
            "rlearner",
            ["doctor", "train.steps=3"],
            "error: expected a YAML file, found 'train.steps=3'; give the file first",
        ),
        (
            "rlearner",
            ["statsu"],
            "error: rlearner: no command 'statsu'; did you mean status? known: up, start, check, ",
        ),
        (
            "broker",
            ["dead", "lst"],
            "error: broker dead: no command 'lst'; did you mean list? known: list, show, ",
        ),
        ("rlearner", ["up", "quickstart", "run.dir=/proc/nope"], "error: /proc/nope/quickstart-"),
        (
            "rlearner",
            ["trace", "run", "x"],
            "argument GROUP: 'x' is not allowed; a whole number of at least 0",
        ),
    ],
)
def test_bad_options_of_one(
    name: str, command: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    joins = [*DEAD, "1"] if name in ("rollout-server", "envhub", "rewardhub") else []
    _refused(name, [*joins, *command], says, capsys)


def _refused(name: str, command: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = MAINS[name](command)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr().err
    assert code == 2
    assert says in said
    assert not says.startswith("argument") or said.count("\n") == 1
    assert "Traceback" not in said
    assert "no broker at" not in said  # nobody was asked


def test_a_lock_has_one_holder(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("lock") / "lock"
    with lock(file, "held"), pytest.raises(UserError, match=r"^held$"):
        lock(file, "held")
    lock(file, "free again").close()
