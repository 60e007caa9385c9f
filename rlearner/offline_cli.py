"""The commands ``rlearner sft``, ``dpo``, ``distill`` and ``rm``: offline training."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any, Final

from broker.settings.arguments import add_broker, add_config, add_json

HELP: Final = {
    "sft": "fine-tune a model on conversations",
    "dpo": "train a model on pairs of a chosen and a rejected answer",
    "distill": "train a model to match the token distributions of a teacher",
    "rm": "train a reward model on pairs of a chosen and a rejected answer",
}


def add_parsers(subparsers: Any) -> None:
    """Add ``sft``, ``dpo``, ``distill`` and ``rm``."""
    for name, text in HELP.items():
        parser = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_config(parser, file=name, setting="train.lr=1e-5")
        add_json(parser, "print one JSON object at the end")
        if name == "distill":
            add_broker(parser, text="address of the broker, with distill.served")
        parser.set_defaults(run=run_offline, pipeline=name)


def run_offline(options: argparse.Namespace) -> int:
    """Train and return the exit code.

    Raises:
        UserError: if the configuration or the data cannot be used.
    """
    from broker.settings.runspec import load
    from broker.system import logs
    from broker.system.visible_text import visible_json
    from learner.offline.config import validate_config
    from learner.prepare import generate_name, run_folder
    from rlearner.doctor.preflight import learner_findings, require_installed

    logs.configure()
    logs.identify(role=options.pipeline)
    settings = validate_config(options.pipeline, load(options.config, options.overrides))
    run_name = settings.run.name or generate_name(options.config)
    settings = settings.with_values("run", name=run_name)
    require_installed(learner_findings(settings))
    folder = run_folder(settings.run)
    # Not at the top of the file: it imports torch.
    from learner.offline.run import run_pipeline as train

    try:
        result = train(options.pipeline, settings, getattr(options, "broker", ""))
    except KeyboardInterrupt:
        print(
            f"stopped; rlearner {options.pipeline} with the same settings and run.name={run_name} "
            f"continues from the newest checkpoint in {folder}",
            file=sys.stderr,
        )
        return 130
    logging.getLogger(__name__).debug("done in %.1f s", result.seconds)
    if options.json:
        summary = {
            "run": run_name,
            "checkpoint": str(result.path),
            "steps": result.steps,
            "seconds": round(result.seconds, 1),
            "figures": dict(result.values),
        }
        print(visible_json(summary))
        return 0
    values = "  ".join(
        f"{name} {value:.4g}" for name, value in result.values.items() if name.startswith("eval/")
    )
    seconds = f"{result.seconds:.1f} s"
    print(f"wrote {result.path} after {result.steps} steps in {seconds}  {values}".rstrip())
    return 0
