"""The task templates and the task model of the package ``harbor``, unpacked but not installed.

make test-harbor
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from envhub.tasks import config
from envhub.tasks.config import TaskTable
from envhub.tasks.folder import _read_table

HARBOR = os.environ.get("RL_HARBOR", "")
pytestmark = pytest.mark.skipif(not HARBOR, reason="RL_HARBOR names no unpacked package harbor")
TABLES = {
    "Author": "AuthorTable",
    "PackageInfo": "PackageTable",
    "SolutionConfig": "SolutionTable",
    "AgentConfig": "AgentTable",
    "HealthcheckConfig": "HealthcheckTable",
    "TpuSpec": "TpuTable",
    "EnvironmentConfig": "EnvironmentTable",
    "VerifierConfig": "VerifierTable",
    "MCPServerConfig": "McpServerTable",
    "ArtifactConfig": "ArtifactTable",
    "VerifierCollectConfig": "CollectTable",
    "StepConfig": "StepTable",
    "TaskConfig": "TaskTable",
}
# bases of others, and what is not part of a file
INTERNAL = {"NetworkPolicy", "AllowedHostsValidationMixin"}
BASES = {"PhaseNetworkPolicyConfig", "BaselineNetworkPolicyConfig"}


def templates() -> list[Path]:
    return sorted(Path(HARBOR).rglob("task.toml")) if HARBOR else []


@pytest.mark.parametrize("path", templates(), ids=lambda path: path.parent.name)
def test_templates_load(path: Path) -> None:
    assert isinstance(_read_table(path), TaskTable)


def test_there_are_templates() -> None:
    assert len(templates()) >= 5


def test_every_field_of_the_model_is_known() -> None:
    source = Path(HARBOR, "harbor/models/task/config.py").read_text()
    fields: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        own = {
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        for base in bases & set(fields):
            own |= fields[base]
        if own and "Enum" not in bases:
            fields[node.name] = own
    assert set(fields) - INTERNAL - BASES == set(TABLES)
    for name, table in TABLES.items():
        assert fields[name] == set(getattr(config, table).model_fields), name
