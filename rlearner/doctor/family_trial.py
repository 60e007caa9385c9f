"""Tries a model of an unknown type: a few small layers of its configuration, in a child process.

``rlearner_text.families`` knows most types. For another one engine hf and the learner run a
shrunken copy with random weights before a start, so that what they cannot run is refused then and
not by the first process of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from broker.contract.wire import ACTOR
from broker.errors import ConfigError
from broker.settings.preflight import PreflightFinding
from broker.settings.run_settings import RunSettings
from learner.offline.config import OfflineSettings
from rlearner_text.families import check_served, check_trained, family_of
from rlearner_text.hub import read_json, tokenizer_folder
from rlearner_workers.patience import OutOfTime, output_within

# On the child's own clock, so that a busy machine does not fail the trial.
LIMIT_S: Final = 300.0
CHILD: Final = "rlearner.doctor.family_child"


def family_findings(settings: RunSettings | OfflineSettings) -> list[PreflightFinding]:
    """Look up the model of validated settings, and try it if its type is not in the matrix.

    Returns:
        A warning where no small copy could be made; nothing if it works, or is known to.

    Raises:
        ConfigError: if engine hf or the learner cannot run it.
    """
    model = settings.model
    path = model.path or ""
    if (folder := _model_folder(path)) is None:
        return []
    is_served = isinstance(settings, RunSettings) and _has_own_servers(settings)
    config = read_json(folder / "config.json", path, "model.path", missing_ok=True)
    if (family := family_of(config)) is not None:
        check_trained(family, path, packing=settings.train.packing, lora=settings.train.lora)
        check_served(family if is_served else None)
    if not config or family is not None:
        return []
    roles = ["learner", *["engine"] * is_served]
    name = config.get("model_type")
    answer = run_trial(folder, roles, trust_remote_code=model.trust_remote_code)
    if role := next((role for role in roles if answer.get(role)), ""):
        process = "the learner" if role == "learner" else "engine hf"
        raise ConfigError(
            "model.path", path, f"{process} cannot run a small copy of this {name}: {answer[role]}"
        )
    if problem := answer.get("problem"):
        text = (
            f"{name} is no family that was run, and no small copy of it could be tried: {problem}"
        )
        return [PreflightFinding("models", "model.path", "warning", text)]
    return []


def _has_own_servers(settings: RunSettings) -> bool:
    """Return whether engine hf serves the model of a run with domains."""
    rollout = settings.rollout
    return rollout.engine == "hf" and rollout.policy == ACTOR and bool(settings.domains)


def _model_folder(path: str) -> Path | None:
    """Return the folder with a model's config.json, or None, which other checks report."""
    try:
        return tokenizer_folder(path) if path else None
    except ConfigError:
        return None


def run_trial(folder: Path, roles: list[str], *, trust_remote_code: bool) -> dict[str, str]:
    """Return by role why it cannot run a small copy; under ``problem`` why there is no copy."""
    with tempfile.TemporaryDirectory(prefix="family.") as work:
        order = {
            "folder": str(folder),
            "work": work,
            "roles": roles,
            "trust_remote_code": trust_remote_code,
        }
        command = [sys.executable, "-m", CHILD, json.dumps(order)]
        # No GPU, which may belong to a run; no network, since the trial takes local files only.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        try:
            with subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=work,
            ) as child:
                output = output_within(child, LIMIT_S, "the trial of the model's family")
            answer: dict[str, str] = json.loads(output.strip().splitlines()[-1])
        except OutOfTime as error:
            return {"problem": str(error)}
        except (OSError, ValueError, IndexError):
            return {"problem": "its process ended early"}
    return answer
