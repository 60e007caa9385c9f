"""Runs the SGLang server as a child process: command line, start, exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from broker.errors import ConfigError, UserError
from broker.system.children import spawn
from broker.system.private_files import private_write
from broker.system.process_tree import kill_tree
from rollout.config import RolloutSection
from rollout.engines.sglang.args import SGLangArgs
from rollout.engines.sglang.client import SERVER_CANDIDATES

HOST: Final = "127.0.0.1"
# SGLang reserves a few positions of its context; none of them is ever reached
SPARE_TOKENS: Final = 8
ENVIRONMENT: Final = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for SPARE_TOKENS
    # logprobs of the sampling distribution, after the temperature
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
}
POLL_S: Final = 0.2
STOP_WITHIN_S: Final = 5.0
TAIL_BYTES: Final = 20_000  # of the log, searched for the reason of an exit
_TELLING: Final = ("error", "exception", "out of memory", "not found", "unrecognized")


def launch_command(args: SGLangArgs) -> list[str]:
    """Return the command that starts the server.

    Raises:
        UserError: if SGLang is not installed.
    """
    if args.command is not None:
        return list(args.command)
    if find_spec("sglang") is None:
        remedy = "rollout.engine_args.command: [/path/to/python, -m, sglang.launch_server]"
        install = "pip install 'rlearner[sglang]', or set the Python of another environment in"
        raise UserError(f"engine sglang needs the package sglang; {install} {remedy}")
    return [sys.executable, "-m", "sglang.launch_server"]


def server_options(
    model_path: str, section: RolloutSection, args: SGLangArgs, *, port: int, dtype: str, device: str, version: int,
    copies: int,
    trust_remote_code: bool,
    has_weights: bool = True, shares_device: bool = False,
) -> list[str]:  # fmt: skip
    """Return the server's options; pure.

    Args:
        version: of the weights in ``model_path``, returned with every token until they change.
        copies: data-parallel copies of the model.
        has_weights: False: the folder has none, and the server starts with random ones.
        shares_device: whether the server must be able to free its memory and fill it again.
    """
    options: dict[str, str | int | float | bool] = {
        "model-path": model_path,
        "host": HOST,
        "port": port,
        "dtype": dtype,
        "context-length": section.max_context_tokens + SPARE_TOKENS,
        "max-running-requests": section.max_running,
        "chunked-prefill-size": section.prefill_tokens,
        "tp-size": args.tensor_parallel,
        "dp-size": copies,
        "weight-version": str(version),
        # the model's generation_config.json must not change the distribution
        "sampling-defaults": "openai",
        "grammar-backend": "llguidance",  # as in engine hf
        "sampling-mask-max-tokens": SERVER_CANDIDATES,
        "log-level": "warning",  # one line per batch and request would fill the disk
        "trust-remote-code": trust_remote_code,
        "disable-radix-cache": not section.prefix_cache,
        "enable-deterministic-inference": args.deterministic,
        "enable-memory-saver": shares_device,
        "enable-weights-cpu-backup": shares_device,
    }
    options["load-format"] = "safetensors" if has_weights else "dummy"
    options |= {"device": "cpu"} if device == "cpu" else {}
    options |= (
        {"mem-fraction-static": args.mem_fraction_static}
        if args.mem_fraction_static is not None
        else {}
    )
    options |= args.flags
    enabled = {name: value for name, value in options.items() if value is not False}
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in enabled.items()
    ]


def data_parallel_copies(
    args: SGLangArgs, device: str, environ: Mapping[str, str], heads: int
) -> int:
    """Return how many copies of the model run on the visible GPUs.

    Raises:
        ConfigError: if the tensor parallel size does not divide heads or GPUs, or too few GPUs are
            visible.
    """
    if heads % args.tensor_parallel:
        allowed = f"a divisor of the model's {heads} attention heads"
        raise ConfigError("rollout.engine_args.tensor_parallel", args.tensor_parallel, allowed)
    num_copies = args.data_parallel or 1
    visible = [
        device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()
    ]
    if device == "cpu" or not visible:
        copies = num_copies
    else:
        if args.tensor_parallel * num_copies > len(visible):
            product = args.tensor_parallel * num_copies
            allowed = (
                f"tensor_parallel times data_parallel is {product}, and --gpus names {len(visible)}"
            )
            raise ConfigError("rollout.engine_args.tensor_parallel", args.tensor_parallel, allowed)
        if args.data_parallel is None and len(visible) % args.tensor_parallel:
            allowed = f"a divisor of the {len(visible)} GPUs that --gpus names"
            raise ConfigError("rollout.engine_args.tensor_parallel", args.tensor_parallel, allowed)
        copies = args.data_parallel or len(visible) // args.tensor_parallel
    if args.weights == "distributed" and copies > 1:
        allowed = f"disk with {copies} copies of the model: SGLang's update group holds one"
        raise ConfigError("rollout.engine_args.weights", args.weights, allowed)
    return copies


def free_port() -> int:
    """Return an unused port on loopback."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class SGLangProcess:
    """The server's process; it exits with this process, along with everything that it started.

    Attributes:
        key: that it requires of every request; it gets it in a private file, as other users see
            command lines.
        keep_log: keep the log after the exit, because an error names its path.
    """

    def __init__(self, command: Sequence[str], on_end: Callable[[str], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rlearner-sglang-"))
        self.log_path = self._folder / "sglang.log"
        self.keep_log = False
        self.key = secrets.token_urlsafe(32)
        keys = self._folder / "keys.yaml"
        private_write(keys, f"api-key: {self.key}\nadmin-api-key: {self.key}\n".encode())
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        with self.log_path.open("wb") as output:
            try:
                environment = {**os.environ, **ENVIRONMENT}
                self._process = spawn(
                    [*command, "--config", str(keys)],
                    output,
                    env=environment,
                    death_signal=signal.SIGKILL,
                )
            except OSError as error:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise UserError(f"cannot start {command[0]}: {error.strerror or error}") from None
        self.pid = self._process.pid
        threading.Thread(target=self._wait, name="sglang-watch", daemon=True).start()

    async def ready(self, healthy: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            UserError: if it exits or takes too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await healthy():
                    if self._process.poll() is not None:
                        raise UserError(f"SGLang cannot start: {self.why()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            limit = f"rollout.engine_args.start_timeout_s={timeout_s:g}"
            raise UserError(f"SGLang was not ready within {limit}, see {self.log_path}") from None

    def why(self) -> str:
        """Return the reason of the exit in one line: the last error in its log, and its exit code."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
            lines = [
                line.strip()
                for line in log.read().decode(errors="replace").splitlines()
                if line.strip()
            ]
        telling = (
            [line for line in lines if any(word in line.lower() for word in _TELLING)]
            or lines
            or ["no output"]
        )
        code = self._process.poll()
        text = f"{telling[-1][-300:]} (exit code {code}, see {self.log_path})"
        if any("out of memory" in line.lower() for line in lines):
            text += "; lower rollout.engine_args.mem_fraction_static, rollout.max_running or max_context_tokens,"
            text += " or raise tensor_parallel"
        return text

    def stop(self) -> None:
        """Stop the server and all its processes; blocks for a few seconds at most."""
        self._on_end = _nobody
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_WITHIN_S)
        kill_tree(self.pid)
        self._process.wait()
        if not self.keep_log:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        self._process.wait()
        try:
            self._loop.call_soon_threadsafe(
                lambda: self._on_end(self.why()) if self._folder.exists() else None
            )
        except RuntimeError:
            return  # the loop is closed


def _nobody(_: str) -> None:
    """Ignore a requested exit."""
