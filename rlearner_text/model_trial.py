"""Tries a model's tokenizer and chat template in a bounded child process before their use.

Both are programs of the model's author: a template can loop for years or allocate all memory, and a
regular expression of tokenizer.json can abort the library. A model that passes is remembered by its
digest.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError, UserError
from broker.system.private_files import private_folder
from rlearner_workers.environment import worker_environment

# Published tokenizers take below 3 s, templates milliseconds.
CPU_S: Final = 20
MEMORY_BYTES: Final = 4 << 30
WITHIN_S: Final = 300.0  # by the clock, on a machine with other work
OUT_OF_MEMORY: Final = 3  # exit codes of the child
PANICKED: Final = 4
MAX_MESSAGE: Final = 300
_TOKENIZER_FILES: Final = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
    "additional_chat_templates/*.jinja",
)
_TEXTS: Final = (
    "The quick brown fox doesn't jump over 12,345 lazy dogs.\n\n  def f(x):\n\treturn x ** 2  # "
    "\u00e9\u4e2d\U0001f600",
    "".join(map(chr, range(1, 0x250))),
    *(character * 5000 for character in "a 1\n."),
    "ab 1," * 1000,
)

log = logging.getLogger(__name__)


def try_model(
    folder: Path, name: str, *, key: str = "model.path", chat_template: str | None = None
) -> None:
    """Check that the tokenizer encodes text and the template renders conversations within limits.

    A tokenizer that cannot be loaded and a template that refuses a conversation pass: they only
    raise exceptions.

    Args:
        name: the value of the setting ``key``, for messages.
        chat_template: replaces the model's own, see ``Tokenizer.load``.

    Raises:
        ConfigError: if it exceeds the limits or crashes.
    """
    passed = _passed_models() / _model_digest(folder, chat_template)
    if passed.exists():
        return
    order = json.dumps({"folder": str(folder), "template": chat_template, "cpu_s": CPU_S})
    command = [sys.executable, "-P", "-m", "rlearner_text.model_trial"]
    environment = worker_environment() | {
        "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)
    }
    try:
        ended_process = subprocess.run(
            command,
            input=order,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WITHIN_S,
        )
        problem = _describe_end(ended_process.returncode, ended_process.stderr)
    except subprocess.TimeoutExpired:
        problem = f"did not end within {WITHIN_S:g} s"
    if problem:
        raise ConfigError(
            key, name, f"its tokenizer or its chat template {problem}, so no process loads it"
        )
    with suppress(OSError):
        passed.touch()


def _describe_end(exit_code: int, output: str) -> str:
    if exit_code == 0:
        return ""
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {CPU_S} s for a short conversation"
    if exit_code == OUT_OF_MEMORY:
        return f"takes more than {MEMORY_BYTES >> 30} GiB for a short conversation"
    last = " ".join((output.strip().splitlines() or [""])[-1].split())[:MAX_MESSAGE]
    return f"crashes (exit code {exit_code}{': ' if last else ''}{last})"


def _passed_models() -> Path:
    """Return the folder with an empty file for each model that passed."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (
        (Path(base) if base.startswith("/") else Path.home() / ".cache")
        / "rlearner"
        / "tried_models"
    )
    try:
        return private_folder(folder)
    except (OSError, UserError):
        return Path("/nonexistent")


def _model_digest(folder: Path, template: str | None) -> str:
    hashed = sha256(repr(template).encode())
    for package in ("tokenizers", "jinja2"):
        hashed.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)}):
        if file.is_file():
            data = file.read_bytes()
            hashed.update(f"{file.relative_to(folder)}\n{len(data)}\n".encode())
            hashed.update(data)
    return hashed.hexdigest()


# -------------------------------------------------------------------------------------------------
# in the child


def _set_limits(cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def _probe_chats() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Return conversations of all shapes that a run renders, with their tools."""
    user = {"role": "user", "content": "question"}
    assistant = {"role": "assistant", "content": "answer"}
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "look", "arguments": {"at": "x"}},
    }
    call_message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "seen", "tool_call_id": "call00000", "name": "look"}
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "look", "description": "d", "parameters": parameters},
        }
    ]
    system = {"role": "system", "content": "be brief"}
    shapes = [[user], [system, user], [user, assistant], [user, assistant] * 8 + [user]]
    return [
        *((chat, []) for chat in shapes),
        ([user], tools),
        ([user, call_message, result, assistant, user], tools),
    ]


def _try_tokenizer(folder: Path, template: str | None) -> None:
    from rlearner_text.tokenizer import Tokenizer

    tokenizer = Tokenizer(folder, str(folder), chat_template=template)
    for text in _TEXTS:
        tokenizer.decode(tokenizer.encode(tokenizer.shield(text)))
    for chat, tools in _probe_chats():
        for is_prompt in (True, False):
            try:
                tokenizer.encode(
                    tokenizer.render_chat(chat, add_generation_prompt=is_prompt, tools=tools)
                )
            except ConfigError as error:
                if isinstance(error.__context__, MemoryError):
                    raise error.__context__ from None


def _run_trial() -> int:
    from rlearner_text.tokenizer import TokenizerError

    order = json.load(sys.stdin)
    _set_limits(order["cpu_s"])
    try:
        _try_tokenizer(Path(order["folder"]), order["template"])
    except MemoryError:
        return OUT_OF_MEMORY
    except TokenizerError as error:
        print(error, file=sys.stderr)
        return PANICKED
    except Exception:  # noqa: BLE001 - who loads it next gets the same exception, and reports it
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(_run_trial())
