"""Arguments of ``rlearner console``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import logging
from typing import Any, Final

from broker.runtime.process import Stop, main
from broker.settings.arguments import add_broker, port
from broker.system import logs

PORT: Final = 8870


def add_parser(commands: Any) -> None:
    text = "show runs in a browser: curves, timeline, processes, trajectories, dead letters"
    parser: argparse.ArgumentParser = commands.add_parser("console", help=text, description=text)
    parser.add_argument(
        "run_name", metavar="RUN", nargs="?", help="run to begin with: its name or its folder"
    )
    parser.add_argument(
        "--dir", default="runs", metavar="FOLDER", help="where runs are kept (%(default)s)"
    )
    add_broker(parser, is_noted=True)
    parser.add_argument(
        "--port", type=port, default=PORT, metavar="N", help="port, 0: any free one (%(default)s)"
    )
    text = "address to listen on; beyond loopback only with TLS (%(default)s)"
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = (
        "allow to pause, resume, drain and stop runs, and to retry and delete dead letters "
        "(read-only)"
    )
    parser.add_argument("--actions", action="store_true", help=text)
    text = (
        "file of mode 0600 with a password, which may be used as often as you like, unlike the link"
    )
    parser.add_argument("--password-file", metavar="FILE", help=text)
    parser.add_argument(
        "--tls-cert", metavar="FILE", help="certificate (PEM), to listen beyond loopback"
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its private key")
    text = (
        "name under which browsers reach it, as in the certificate, instead of the random "
        "one; may be repeated"
    )
    parser.add_argument("--host-name", action="append", metavar="NAME", help=text)
    logs.add_options(parser)
    parser.set_defaults(run=_run_console)


def _run_console(options: argparse.Namespace) -> int:
    async def body(stop: Stop) -> int:
        from rlearner.console.server import serve_console

        logs.apply(options)
        for name in ("uvicorn", "uvicorn.error", "nicegui", "httpx"):
            logging.getLogger(name).setLevel("WARNING")
        # Pages say which broker does not answer.
        logging.getLogger("broker.nats").setLevel("ERROR")
        return await serve_console(options, stop)

    return main("operator", body)
