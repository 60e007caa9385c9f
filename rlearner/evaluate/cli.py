"""Arguments of ``rlearner eval``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from broker.runtime.process import Stop, main
from broker.settings.arguments import add_config, add_json
from broker.settings.config import UserSettings
from broker.settings.run_settings import stored_value
from broker.system.entry import EXIT_STOPPED


def add_parser(subparsers: Any) -> None:
    """Add ``eval MODEL CONFIG [key=value …]``."""
    text = "measure a model on the held-out tasks of a configuration"
    details = (
        "with the processes, tasks and seeds of a run; set eval.tasks, eval.group_size and "
        "eval.temperature. All tasks of a file: domains.NAME.env_args.eval_path=FILE, or path=FILE "
        "if the model's run has not trained on it."
    )
    parser = subparsers.add_parser("eval", help=text, description=f"{text.capitalize()}, {details}")
    parser.add_argument(
        "model", metavar="MODEL", help="folder or hub name, for example a checkpoint of a run"
    )
    add_config(parser, setting="eval.tasks=512")
    text = "GPUs for generation: 4-7, or 0,2, or cpu, or auto (%(default)s)"
    parser.add_argument("--gpus", default="auto", metavar="LIST", help=text)
    add_json(parser)
    parser.set_defaults(run=run_eval)


def with_own_run_name(config: UserSettings, path: str) -> UserSettings:
    """Return the config with a ``run.name`` of its own, so that no trained run's folder changes."""
    from learner.prepare import name_run
    from learner.run_folder import noted_epoch

    stem = f"eval-{Path(path).stem}"
    config = name_run(config, stem)
    run = config.get("run")
    if not isinstance(run, dict) or not noted_epoch(
        Path(str(stored_value(config, "run", "dir") or "runs")) / str(run["name"])
    ):
        return config
    return name_run({**config, "run": {**run, "name": None}}, f"eval-{run['name']}")


def run_eval(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""

    async def body(stop: Stop) -> None:
        from broker.settings.runspec import check_settings, load
        from rlearner.doctor.preflight import require_fleet
        from rlearner.evaluate.run import evaluate_model
        from rlearner.evaluate.tasks import task_counts, with_whole_files

        config = with_own_run_name(load(arguments.config, arguments.overrides), arguments.config)
        config, files = with_whole_files(config, arguments.overrides, arguments.model)
        settings = check_settings(config)
        num_tasks = task_counts(settings, files)
        settings = settings.with_values("eval", tasks=min(num_tasks.values()))
        await asyncio.to_thread(require_fleet, settings)
        await evaluate_model(
            settings,
            arguments.model,
            stop,
            num_tasks=num_tasks,
            files=files,
            gpus=arguments.gpus,
            as_json=arguments.json,
        )

    return main("eval", body, stopped_code=EXIT_STOPPED)
