"""The command ``envhub``: runs a hub; ``demos``, ``render`` and ``retriever`` need no broker."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Final

from broker.settings.arguments import (
    ArgumentParser,
    add_config,
    complete,
    count,
    natural,
    share,
    tokens,
)
from broker.system.children import hide_memory
from broker.system.entry import enter

EPILOG = """also:
  envhub demos CONFIG    write demonstrations of an imperfect solver for a warm start
  envhub render CONFIG   replay recorded actions into a GIF
  envhub retriever FILE  serve the search of a corpus to environments
(each with --help)"""
EXAMPLES: Final = {
    "envhub": [
        "envhub --run quick --n 64",
        "envhub --domains lake",
        "envhub --run quick --metrics-port 9467 --log-format json",
    ],
    "envhub demos": ["envhub demos configs/quickstart.yaml --episodes 100 --out demos.jsonl"],
    "envhub render": [
        "envhub render configs/quickstart.yaml --task-index 0 --seed 1 --actions R,D,R "
        "--out lake.gif"
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS.get(arguments[0]) if arguments else None
    return enter(lambda: _run_hub(arguments) if command is None else command(arguments[1:]))


def parser() -> argparse.ArgumentParser:
    """Return the parser of a hub's options."""
    from broker.runtime import process

    parser = ArgumentParser(prog="envhub", description="Run environments for a run.", epilog=EPILOG)
    parser.add_argument(
        "--n",
        type=count,
        default=None,
        metavar="N",
        help="environments at once (the run's envhub.n)",
    )
    parser.add_argument(
        "--domains", type=tokens, default=[], metavar="A,B", help="which domains to serve (all)"
    )
    process.add_join_options(parser)
    return complete(parser, EXAMPLES)


def _run_hub(arguments: Sequence[str]) -> int:
    from broker.runtime import process
    from envhub.service import serve

    options = parser().parse_args(arguments)
    hide_memory()
    return process.main("envhub", lambda stop: serve(options, stop))


def demos_parser() -> argparse.ArgumentParser:
    """Return the parser of ``envhub demos``."""
    parser = _offline_parser("demos", "Write demonstrations as JSONL conversations.")
    parser.add_argument(
        "--episodes", type=count, required=True, metavar="N", help="how many to write"
    )
    parser.add_argument(
        "--noise",
        type=share,
        default=0.5,
        metavar="X",
        help="share of random actions (%(default)s)",
    )
    against = "write pairs for rlearner dpo: solved with --noise, failed with this noise"
    parser.add_argument("--against", type=share, default=None, metavar="X", help=against)
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL file to write")
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="of tasks and noise (%(default)s)"
    )
    return complete(parser, EXAMPLES)


def _write_demos(arguments: Sequence[str]) -> int:
    from broker.settings.runspec import check_settings, load
    from envhub.demos import write_demonstrations

    args = demos_parser().parse_intermixed_args(arguments)
    settings = check_settings(load(args.config, args.overrides))
    success_rate = write_demonstrations(
        settings,
        args.domain,
        episodes=args.episodes,
        noise=args.noise,
        out=args.out,
        seed=args.seed,
        against=args.against,
    )
    report = {
        "out": args.out,
        "episodes": args.episodes,
        "success_rate": round(success_rate, 4),
    }
    print(json.dumps(report))
    return 0


def render_parser() -> argparse.ArgumentParser:
    """Return the parser of ``envhub render``."""
    parser = _offline_parser("render", "Replay recorded actions into a GIF.")
    parser.add_argument(
        "--task-index", type=natural, required=True, metavar="I", help="which task of the domain"
    )
    parser.add_argument("--seed", type=natural, required=True, metavar="S", help="of the episode")
    parser.add_argument(
        "--split", choices=["train", "eval"], default="eval", help="whose tasks (%(default)s)"
    )
    actions = "texts separated by commas, or a JSON list of them"
    parser.add_argument(
        "--actions", type=_parse_actions, required=True, metavar="R,D,…", help=actions
    )
    parser.add_argument("--title", default="", metavar="TEXT", help="written above each picture")
    parser.add_argument("--out", required=True, metavar="FILE.gif", help="GIF file to write")
    return complete(parser, EXAMPLES)


def _render_gif(arguments: Sequence[str]) -> int:
    from broker.settings.runspec import check_settings, load
    from envhub.episodes.render import write_gif

    args = render_parser().parse_intermixed_args(arguments)
    settings = check_settings(load(args.config, args.overrides))
    frames = write_gif(
        settings,
        args.domain,
        args.task_index,
        seed=args.seed,
        actions=args.actions,
        out=args.out,
        split=args.split,
        title=args.title,
    )
    print(json.dumps({"out": args.out, "frames": frames}))
    return 0


def _offline_parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = ArgumentParser(prog=f"envhub {command}", description=description)
    add_config(parser)
    parser.add_argument(
        "--domain", default=None, metavar="D", help="which domain (the only trained one)"
    )
    return parser


def _parse_actions(text: str) -> list[str]:
    if not text:
        return []
    if not text.lstrip().startswith("["):
        return text.split(",")
    try:
        actions = json.loads(text)
    except ValueError:
        actions = None
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of texts")
    return actions


def _serve_retriever(arguments: Sequence[str]) -> int:
    from envhub.retriever_cli import run_retriever

    return run_retriever(arguments)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demos": _write_demos,
    "render": _render_gif,
    "retriever": _serve_retriever,
}

if __name__ == "__main__":
    sys.exit(main())
