"""The command ``rlearner``. Commands import their heavy dependencies only when they run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from broker.runtime.process import add_metrics_options
from broker.settings.arguments import (
    ArgumentParser,
    add_broker,
    add_config,
    add_json,
    complete,
    positive,
)
from broker.system import logs
from broker.system.entry import EXIT_STOPPED, enter
from broker.system.visible_text import visible_json
from learner.nodes import start as nodes
from rlearner import offline_cli as pipelines_cli
from rlearner.console import cli as console_cli
from rlearner.data import cli as data_cli
from rlearner.doctor import cli as doctor_cli
from rlearner.evaluate import cli as eval_cli
from rlearner.examples import EXAMPLES
from rlearner.exporter import cli as exporter_cli
from rlearner.new import cli as new_cli
from rlearner.ops import cli as ops_cli
from rlearner.plan import cli as plan_cli
from rlearner.tasks import cli as tasks_cli
from rlearner.units import cli as units_cli
from rlearner.up import cli as up_cli

if TYPE_CHECKING:
    from broker.settings.preflight import PreflightFinding
    from broker.settings.run_settings import RunSettings

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""

    def run() -> int:
        options = _parse_arguments(list(sys.argv[1:] if argv is None else argv))
        return int(options.run(options))

    return enter(run)


def _parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser()
    options, extra = parser.parse_known_args(arguments)
    # argparse does not continue a list of positional arguments (key=value, ROLE) after an option.
    if extra:
        target = next((name for name in ("overrides", "roles") if hasattr(options, name)), None)
        if target is None or any(argument.startswith("-") for argument in extra):
            parser.error(f"unrecognized arguments: {' '.join(extra)}")
        setattr(options, target, [*getattr(options, target), *extra])
    return options


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    text = "Reinforcement learning for language models, on message queues."
    parser = ArgumentParser(prog="rlearner", description=text)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up_cli.add_parser(commands)
    start = _add_config_parser(
        commands, "start", "run the learner; the other processes join by themselves"
    )
    add_broker(start)
    text = "give up if no broker answers in time (never)"
    start.add_argument("--connect-deadline", metavar="SECONDS", type=positive, help=text)
    add_metrics_options(start)
    logs.add_options(start)
    text = "take the run over from a learner that is still alive, which then exits"
    start.add_argument("--take-over", action="store_true", help=text)
    up_cli.add_force(start)
    text = "if the broker has lost its store, count the open tickets as dead and continue"
    start.add_argument("--rebase", action="store_true", help=text)
    text = "GPUs, one rank each: 0-3, or 0,2, or cpu, or auto (%(default)s)"
    start.add_argument("--gpus", default="auto", metavar="LIST", help=text)
    up_cli.add_share_gpus(start)
    nodes.add_options(start)
    start.set_defaults(run=_start_learner)
    text = "validate a configuration, try your own code once, and sum it up"
    check = _add_config_parser(commands, "check", text)
    text = "do not run and score a trial episode with your own code"
    check.add_argument("--no-trial", action="store_true", help=text)
    check.add_argument("--all", action="store_true", help="print every setting, as YAML")
    add_json(check, "print one JSON object: config, notes, and what this machine lacks as findings")
    check.set_defaults(run=_check_config)
    _add_settings_parser(commands)
    new_cli.add_parser(commands)
    data_cli.add_parser(commands)
    tasks_cli.add_parser(commands)
    doctor_cli.add_parser(commands)
    plan_cli.add_parser(commands)
    units_cli.add_parser(commands)
    pipelines_cli.add_parsers(commands)
    eval_cli.add_parser(commands)
    ops_cli.add_parsers(commands)
    console_cli.add_parser(commands)
    exporter_cli.add_parser(commands)
    completion = commands.add_parser(
        "completion", help="print the shell code that completes these commands"
    )
    shells = ["bash", "zsh", "fish"]
    completion.add_argument(
        "shell", nargs="?", default="bash", choices=shells, help="which shell (%(default)s)"
    )
    completion.set_defaults(run=_print_completion)
    return complete(parser, EXAMPLES)


def _add_settings_parser(commands: Any) -> None:
    text = "print what settings mean, with their defaults and the values that they take"
    settings = commands.add_parser("settings", help=text, description=text)
    text = "only those with this word in their name or meaning; names of TRL and verl work, too"
    settings.add_argument("word", nargs="?", default="", metavar="WORD", help=text)
    add_json(settings)
    settings.set_defaults(run=_list_settings)


def _list_settings(options: argparse.Namespace) -> int:
    from rlearner.ops.settings_list import list_settings

    return list_settings(options)


def _print_completion(options: argparse.Namespace) -> int:
    from broker.settings.completion import shell_code

    print(shell_code(options.shell))
    return 0


def _add_config_parser(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    add_config(parser)
    return parser


def _start_learner(options: argparse.Namespace) -> int:
    from broker.runtime import process
    from broker.settings.runspec import check_settings, load
    from learner.gpu_selection import assign_gpus, forget_gpus, shared_devices
    from learner.nodes.layout import lay_out
    from learner.nodes.placement import Placement, find_placement
    from learner.prepare import exit_code, name_run, run_folder
    from rlearner.doctor.preflight import format_finding, learner_findings, require_installed
    from rlearner.doctor.references import reference_findings

    def load_settings(placement: Placement | None) -> tuple[RunSettings, int]:
        """Return the settings, and the ranks of this node if there are several nodes."""
        has_size = placement is not None and placement.size is not None
        config = forget_gpus(load(options.config, options.overrides), options, has_size=has_size)
        config = name_run(config, options.config)
        num_here = 0
        if placement is None:
            config = assign_gpus(config, options.gpus, share=options.share_gpus)
        else:
            config, num_here = lay_out(config, placement, options.gpus, share=options.share_gpus)
        settings = check_settings(config)
        require_installed(learner_findings(settings))
        return settings, num_here

    def shared_here(settings: RunSettings) -> list[str]:
        if not options.share_gpus:
            return []
        return shared_devices(settings.train.device, options.gpus)

    placement = find_placement(options.nnodes, options.node_rank, options.rendezvous, os.environ)
    # Other nodes than the first have no event loop: their ranks follow those of the first.
    if placement is not None and not placement.leads:
        settings, num_here = load_settings(placement)
        return nodes.join_rank_0(placement, settings, num_here, options, shared_here(settings))

    async def body(stop: process.Stop) -> int:
        logs.apply(options)
        process.serve_metrics(options, stop)
        settings, num_here = await asyncio.to_thread(load_settings, placement)
        for finding in await asyncio.to_thread(reference_findings, settings):
            log.warning("%s", format_finding(finding))
        if placement is None:
            return await train(settings, stop, shared_here(settings))
        gathered = nodes.gather_nodes(
            placement,
            settings,
            num_here,
            options=options,
            stop=stop,
            shared=shared_here(settings),
        )
        async with gathered as outcome:
            outcome.code = await train(settings, stop, outcome.shared)
            return outcome.code

    async def train(settings: RunSettings, stop: process.Stop, shared: list[str]) -> int:
        from learner.service import serve_learner
        from rlearner.ops.continue_line import continue_line_at_exit
        from rlearner.ops.folder_cleanup import removed_on_failure

        with (
            # The line reads the folder, so it is printed before a failed start removes that.
            contextlib.suppress(process.Stopped),
            removed_on_failure(run_folder(settings.run)),
            continue_line_at_exit(settings, options.broker),
        ):
            await serve_learner(
                settings,
                options.broker,
                stop,
                connect_deadline_s=options.connect_deadline,
                rebase=options.rebase,
                take_over=options.take_over,
                force=options.force,
                shared=shared,
            )
        return exit_code(settings)

    return process.main("learner", body, stopped_code=EXIT_STOPPED)


def _check_config(options: argparse.Namespace) -> int:
    from broker.settings.config import RunSection
    from broker.settings.runspec import check_settings, load
    from learner.prepare import generate_name, run_folder, to_yaml
    from learner.resume_checks import check_continuing
    from rlearner.doctor.preflight import fleet_findings, learner_findings
    from rlearner.doctor.trial import try_own_code
    from rlearner.ops import settings_summary

    config = load(options.config, options.overrides)
    is_run = "domains" in config or "data" not in config
    if not is_run:  # offline training
        from learner.offline import config as offline

        pipeline = offline.pipeline_of(config)
        offline_settings = offline.validate_config(pipeline, config)
        run = offline_settings.run
        checked = offline_settings.to_plain()
        findings = learner_findings(offline_settings)
        notes = []
    else:
        settings = check_settings(config)
        run = settings.run
        checked = settings.to_plain()
        if not options.no_trial:
            asyncio.run(try_own_code(settings))
        notes = _run_notes(settings)
        findings = fleet_findings(settings)
    name = run.name or generate_name(options.config)
    run_folder(RunSection(name=name, dir=run.dir))  # fails where no folder can be created
    if is_run:
        check_continuing(settings.with_values("run", name=name), force=False)
        summary = settings_summary.summarize_run(settings, name)
    else:
        summary = settings_summary.summarize_offline(offline_settings, pipeline, name)
    if options.json:
        rows = [asdict(finding) for finding in findings]
        print(visible_json({"config": checked, "notes": list(notes), "findings": rows}))
        return 0
    if options.all:
        print(to_yaml(checked), end="")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    num_missing = _print_findings(findings)
    if not options.all:
        print(*summary, settings_summary.format_end(num_missing), sep="\n")
    return 0


def _run_notes(settings: RunSettings) -> list[str]:
    """Return what ``check`` says of timeouts, sizes, and sampling that the model has of its own."""
    from broker.settings import timeouts
    from learner.credit import capacity
    from rlearner_text.model_checks import sampling_note

    own_sampling = sampling_note(settings.model, settings.domains)
    notes = [timeouts.note(settings), *capacity.capacity_notes(settings)]
    return [*notes, own_sampling] if own_sampling else notes


def _print_findings(findings: Sequence[PreflightFinding]) -> int:
    """Print what a configuration needs and this machine lacks; return how much is missing.

    It is not an error: the processes may run on other machines.
    """
    from rlearner.doctor.preflight import format_finding

    for finding in findings:
        kind = "missing here" if finding.status == "missing" else "warning"
        print(f"{kind}: {format_finding(finding)}", file=sys.stderr)
    sys.stderr.flush()
    return sum(finding.status == "missing" for finding in findings)


if __name__ == "__main__":
    sys.exit(main())
