"""The command ``sandboxhub``."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from broker.errors import ConfigError, UserError
from broker.runtime import process
from broker.settings.arguments import ArgumentParser, complete, positive
from broker.system import logs
from broker.system.children import hide_memory
from broker.system.entry import enter

if TYPE_CHECKING:
    import ssl

    from broker.runtime.process import Stop

log = logging.getLogger(__name__)

TOKEN_BYTES: Final = 32
EXAMPLES: Final = {
    "sandboxhub": [
        "sandboxhub --n 200",
        "sandboxhub --n 200 --bind 10.0.0.5 --tls-cert hub.pem --tls-key hub.key",
        "sandboxhub --provider podman --token-file hub.token",
    ]
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``sandboxhub``."""
    about = (
        "Serve sandboxes of this host over HTTP to environments on other hosts, as the provider "
        "remote."
    )
    result = ArgumentParser(prog="sandboxhub", description=about)
    text = "sandboxes at once (%(default)s)"
    result.add_argument("--n", type=_count, default=50, metavar="N", help=text)
    text = "namespace, podman or docker (%(default)s)"
    result.add_argument("--provider", default="namespace", metavar="NAME", help=text)
    text = "address to listen at; another than loopback needs --tls-cert (%(default)s)"
    result.add_argument("--bind", default="127.0.0.1", metavar="IP", help=text)
    text = "port to listen at; 0: any (%(default)s)"
    result.add_argument("--port", type=int, default=8460, metavar="PORT", help=text)
    text = "certificate in PEM; clients then use https://"
    result.add_argument("--tls-cert", default="", metavar="FILE", help=text)
    result.add_argument("--tls-key", default="", metavar="FILE", help="its key in PEM")
    text = "allow plain HTTP beyond loopback"
    result.add_argument("--insecure", action="store_true", help=text)
    text = (
        "file with the token that clients have to bring, made with a random one if it is not "
        "there (~/.config/rlearner/sandboxhub.token)"
    )
    result.add_argument("--token-file", type=Path, metavar="FILE", help=text)
    text = "folder whose root file systems clients may name as images (only built digests)"
    result.add_argument(
        "--allow-images", type=Path, action="append", default=[], metavar="FOLDER", help=text
    )
    text = "let clients start sandboxes in this host's network"
    result.add_argument("--allow-host-network", action="store_true", help=text)
    text = "stop the sandboxes of a client that has been silent for so long (%(default)s)"
    result.add_argument("--session-s", type=positive, default=60.0, metavar="SECONDS", help=text)
    logs.add_options(result)
    return complete(result, EXAMPLES)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; a number from 1 on is")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hub and return the exit code."""

    def run() -> int:
        options = parser().parse_args(argv)
        hide_memory()
        return process.main("sandboxhub", lambda stop: serve(options, stop))

    return enter(run)


async def serve(options: argparse.Namespace, stop: Stop) -> None:
    """Serve until the process is asked to stop.

    Raises:
        UserError: if an option is not allowed, or the provider does not work here.
    """
    from rlearner_sandbox.hub.server import HubServer
    from rlearner_sandbox.providers.base import SandboxError, SandboxSpec
    from rlearner_sandbox.providers.registry import make_provider

    tls = _make_tls(options)
    if options.provider == "remote":
        raise ConfigError("--provider", "remote", "a provider of this host")
    try:
        provider = make_provider(options.provider)
        if options.provider == "namespace":
            # Fail at the start if it does not work here, not at the first request.
            sandbox = await provider.start(SandboxSpec())
            await sandbox.stop()
    except (SandboxError, ValueError) as error:
        raise UserError(str(error)) from None
    server = HubServer(
        provider,
        token=_read_token(options.token_file),
        most=options.n,
        image_folders=tuple(folder.resolve() for folder in options.allow_images),
        host_network=options.allow_host_network,
        session_s=options.session_s,
    )
    try:
        try:
            port = await server.start(options.bind, options.port, tls)
        except OSError as error:
            raise UserError(f"--bind {options.bind}, port {options.port}: {error}") from None
        scheme = "https" if tls else "http"
        print(f"sandboxhub listens at {scheme}://{options.bind}:{port}", flush=True)
        await stop.asked.wait()
    finally:
        await server.close()


def _make_tls(options: argparse.Namespace) -> ssl.SSLContext | None:
    from rlearner_text.openai.certificates import server_tls

    if options.tls_cert:
        return server_tls(
            options.tls_cert, options.tls_key, cert_name="--tls-cert", key_name="--tls-key"
        )
    if not _is_loopback(options.bind) and not options.insecure:
        allowed = "a loopback address, or one with --tls-cert and --tls-key (or --insecure)"
        raise ConfigError("--bind", options.bind, allowed)
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        raise ConfigError("--bind", address, "an IP address") from None


def _read_token(file: Path | None) -> str:
    """Return the token of the hub, from a file of this user alone."""
    from broker.settings.secret import SecretRef
    from broker.system.private_files import private_folder, private_write

    if file is None:
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        file = private_folder(Path(config) / "rlearner") / "sandboxhub.token"
    if not file.exists():
        private_write(file, secrets.token_urlsafe(TOKEN_BYTES).encode() + b"\n")
        log.info("wrote a new token to %s", file)
    return SecretRef(file=str(file)).require("--token-file")


if __name__ == "__main__":
    sys.exit(main())
