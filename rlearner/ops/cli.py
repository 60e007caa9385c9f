"""Arguments of the commands for a run that exists. Imports nothing heavy."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any

from broker.identity.tokens import INVITED, parse_duration
from broker.runtime.process import Stop, main, unless_stopped
from broker.settings.arguments import add_broker, add_json, count, natural, positive
from broker.system.entry import EXIT_STOPPED
from learner.run_folder import add_broker_options, add_run_options, add_runs_options
from rlearner.ops.log_files import LEVELS, parse_since

Body = Callable[[argparse.Namespace], Coroutine[Any, Any, int]]


def add_parsers(subparsers: Any) -> None:
    """Add all commands of this package."""
    text = "compare tickets, samples log, checkpoints and metrics; exit code 1 if they disagree"
    audit = _add_run_command(subparsers, "audit", text, "auditing:audit_run")
    text = "also compare the messages that `python -m rlearner.audit.tap` recorded"
    audit.add_argument("--tap", metavar="FILE", help=text)
    text = "show the path of one group from its ticket to the step that used it"
    trace = _add_run_command(subparsers, "trace", text, "tracing:trace_run")
    trace.add_argument("group", metavar="GROUP", type=natural, help="number of the ticket")
    text = "show one group's trajectories by turn, with reward, logprob and version"
    show = _add_run_command(subparsers, "show", text, "showing:show_run")
    show.add_argument("group", metavar="GROUP", type=natural, help="number of the ticket")
    show.add_argument(
        "--episode",
        metavar="N",
        type=natural,
        default=None,
        help="only this episode, counted from 0",
    )
    show.add_argument("--tokens", action="store_true", help="one line for each sampled token")
    text = (
        "train again from the archive of a run (samples.keep) and compare; "
        "exit code 1 if anything differs"
    )
    replay = _add_run_command(subparsers, "replay", text, "replaying:replay_run", broker=False)
    text = "start from the checkpoint of this step, which must still exist; 0: from the beginning"
    replay.add_argument(
        "--from", dest="first", metavar="STEP", type=natural, required=True, help=text
    )
    replay.add_argument(
        "--to", dest="last", metavar="STEP", type=natural, required=True, help="last step to train"
    )
    text = "write configuration, metrics and last checkpoint there (RUN-replay-N if overridden)"
    replay.add_argument("--out", metavar="FOLDER", help=text)
    text = "train on the same data with other settings, for example train.lr=1e-5"
    replay.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)
    text = "score the archived groups of a run (samples.keep) with changed rewards; changes nothing"
    rescore = _add_run_command(subparsers, "rescore", text, "rescoring:rescore_run", broker=False)
    text = "write old and new rewards there (RUN-rescored-N.jsonl next to the run's folder)"
    rescore.add_argument("--out", metavar="FILE", help=text)
    text = "processes that score (%(default)s)"
    rescore.add_argument("--workers", type=count, default=2, metavar="N", help=text)
    text = "reward.NAME.ARG=VALUE, reward.NAME.weight=VALUE, or domains.NAME.rewards=[...]"
    rescore.add_argument("overrides", nargs="+", metavar="key=value", help=text)
    text = "write the model of a checkpoint as Hugging Face safetensors, without loading it whole"
    export = _add_run_command(subparsers, "export", text, "exporting:export_run", broker=False)
    export.add_argument(
        "--step", metavar="STEP", type=natural, help="step of the checkpoint (default: the newest)"
    )
    export.add_argument(
        "--out", metavar="FOLDER", help="a new folder (exported/step-STEP in the run's folder)"
    )
    text = "largest file, unless one weight is larger (%(default)s)"
    export.add_argument("--max-shard-gib", metavar="GIB", type=positive, default=5.0, help=text)
    text = "show the state of a run on one screen"
    _add_run_command(subparsers, "status", text, "status:show_status", needed=False)
    text = "name the bottleneck of a run, and predict what changes would bring, from its metrics"
    advise = _add_run_command(subparsers, "advise", text, "advising:advise_run", broker=False)
    text = "predict these changes together, for example servers=8,max_staleness=3"
    advise.add_argument("--simulate", metavar="KEY=VALUE,…", help=text)
    text = (
        "print the logs of a run's processes, merged by time; "
        "of a fleet, the last warnings and where the logs are"
    )
    _add_log_options(_add_run_command(subparsers, "logs", text, "logs:show_logs"))
    text = "compare two runs: settings, versions, code, data, models, final figures"
    _add_run_command(subparsers, "diff", text, "diff:diff_runs", broker=False).add_argument(
        "other", metavar="RUN", help="the run to compare it with"
    )
    text = "draw reward.png, before.gif and after.gif of a run, as `rlearner up` does"
    _add_run_command(subparsers, "draw", text, "drawing:draw_run", broker=False)
    text = "list the runs in a folder: state, steps, size, last change"
    runs = subparsers.add_parser("runs", help=text, description=text)
    add_runs_options(runs)
    runs.set_defaults(run=lambda options: _run_operation("listing:list_runs", options))
    _add_invitations(subparsers)
    _add_api_keys(subparsers)
    texts = {
        "checkpoint-now": "write a checkpoint now instead of at the next scheduled step",
        "eval-now": (
            "evaluate the run's policy now on its held-out tasks; for a checkpoint's: rlearner eval"
        ),
    }
    for name, text in texts.items():
        parser = _add_run_command(subparsers, name, text, "learner_requests:request_now")
        text = "return once the learner has answered"
        parser.add_argument("--no-wait", action="store_true", help=text)
        text = "stop waiting after (%(default)s); the learner goes on"
        parser.add_argument(
            "--timeout", type=positive, default=3600.0, metavar="SECONDS", help=text
        )
    texts = {
        "pause": "take no new work until `rlearner resume`",
        "resume": "continue after a pause",
        "drain": "start no new work, finish work in progress, write a checkpoint",
        "stop": (
            "stop every process of the run; "
            "the learner writes a checkpoint and can be started again"
        ),
    }
    for name, text in texts.items():
        parser = _add_run_command(subparsers, name, text, "control:set_state")
        parser.add_argument("--reason", default="", help="one line for the processes' logs")


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    text = (
        "only these, for example learner, envhub or broker, or the id of a process elsewhere (all)"
    )
    parser.add_argument("roles", nargs="*", default=[], metavar="ROLE", help=text)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with new entries until Ctrl-C"
    )
    text = "only the last N entries (all; 20 with --follow)"
    parser.add_argument("-n", "--lines", type=natural, metavar="N", help=text)
    text = "from this time on: 90s, 10m, 2h or 1d ago, or 14:30, or '2026-11-25 14:30'"
    parser.add_argument("--since", type=_parse_since, default=0.0, metavar="TIME", help=text)
    text = "lowest level shown: DEBUG, INFO, WARNING or ERROR (%(default)s)"
    parser.add_argument(
        "--level",
        type=str.upper,
        choices=LEVELS[:-1],
        default=LEVELS[0],
        metavar="LEVEL",
        help=text,
    )


def _add_invitations(subparsers: Any) -> None:
    """Add the commands for join tokens; they need the broker's keys, so its host and user."""
    commands = {
        "invite": ("write_token", "write a token with which another host or user joins a run"),
        "invited": ("list_tokens", "list the tokens that the broker accepts"),
        "renew": (
            "renew_token",
            "accept a token for longer; its processes need no new file and no restart",
        ),
        "revoke": ("revoke_token", "refuse a token from now on and end its connections"),
    }
    parsers = {}
    for name, (function, text) in commands.items():
        parser = parsers[name] = subparsers.add_parser(name, help=text, description=text)
        add_broker(parser, is_noted=name == "invite")
        add_json(parser)
        body = f"invitations:{function}"
        parser.set_defaults(run=lambda options, body=body: _run_operation(body, options))
    add = parsers["invite"].add_argument
    add(
        "role",
        choices=INVITED,
        help="what the token's processes do; observer: `rlearner exporter`, which only reads",
    )
    add("--run", dest="run_name", metavar="NAME", required=True, help="the run")
    add("--out", metavar="FILE", required=True, help="a new file, which only you can read")
    text = "until the broker refuses it, for example 30m, 24h or 7d (%(default)s)"
    add("--expires", type=_parse_duration, default="24h", metavar="TIME", help=text)
    add("--name", default="", help="by which it can be revoked (generated)")
    text = "from now, for example 30m, 24h or 7d (%(default)s)"
    parsers["renew"].add_argument(
        "--expires", type=_parse_duration, default="24h", metavar="TIME", help=text
    )
    for name in ("renew", "revoke"):
        parsers[name].add_argument("name", metavar="NAME", help="as `rlearner invited` shows it")


def _add_api_keys(subparsers: Any) -> None:
    """Add the commands for keys of the HTTP API; they need no broker."""
    text = "keys for the HTTP API of this user's rollout servers (rollout-server --http)"
    parser = subparsers.add_parser("api-key", help=text, description=text)
    keys = parser.add_subparsers(dest="api_key", required=True, metavar="COMMAND")
    commands = {
        "create": ("create_key", "make a key, which servers that run accept at once"),
        "list": ("list_keys", "list the keys with their limits"),
        "revoke": ("revoke_key", "refuse a key from now on; servers that run notice"),
    }
    parsers = {}
    for name, (function, text) in commands.items():
        parser = parsers[name] = keys.add_parser(name, help=text, description=text)
        add_json(parser)
        body = f"http_keys:{function}"
        parser.set_defaults(run=lambda options, body=body: _run_operation(body, options))
    add = parsers["create"].add_argument
    add("name", metavar="NAME", help="by which logs show it and it can be revoked")
    add(
        "--out",
        metavar="FILE",
        required=True,
        help="a new file for the key, which only you can read",
    )
    text = "until servers refuse it, for example 12h or 90d (%(default)s)"
    add("--expires", type=_parse_duration, default="30d", metavar="TIME", help=text)
    text = "requests per minute to each server (no limit)"
    add("--requests-per-minute", type=count, default=0, metavar="N", help=text)
    text = "tokens of prompts and answers per minute and server (no limit)"
    add("--tokens-per-minute", type=count, default=0, metavar="N", help=text)
    add(
        "--concurrent",
        type=count,
        default=0,
        metavar="N",
        help="requests at once to each server (no limit)",
    )
    parsers["revoke"].add_argument(
        "name", metavar="NAME", help="as `rlearner api-key list` shows it"
    )


def _parse_duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_since(text: str) -> float:
    try:
        return parse_since(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_run_command(
    subparsers: Any,
    name: str,
    text: str,
    body: str,
    *,
    broker: bool = True,
    needed: bool = True,
) -> argparse.ArgumentParser:
    """Add a command for one run; ``needed``: whether it must be named."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=text)
    add_run_options(parser, needed=needed)
    add_json(parser)
    if broker:
        add_broker_options(parser)
    parser.set_defaults(run=lambda options: _run_operation(body, options))
    return parser


def _run_operation(body: str, options: argparse.Namespace) -> int:
    async def work(stop: Stop) -> int:
        # The commands print their results; warnings of the broker's client would stand among them.
        logging.getLogger().setLevel("ERROR")
        module, attribute = body.split(":")
        operation: Body = getattr(import_module(f"rlearner.ops.{module}"), attribute)
        return await unless_stopped(stop, operation(options))

    return main("operator", work, stopped_code=EXIT_STOPPED)
