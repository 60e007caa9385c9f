"""The units of deploy/systemd: as they are generated, and what must hold of each."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from rlearner.units.services import static_files

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"
UNITS = sorted(name for name in static_files() if name.endswith(".service"))
SANDBOXED = ("rlearner@.service", "envhub@.service", "rewardhub@.service")


def settings(name: str) -> dict[str, list[str]]:
    """Return the values of each key, as systemd reads them."""
    found = defaultdict(list)
    for line in (FOLDER / name).read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def test_the_folder_holds_what_is_generated() -> None:
    there = {file.name: file.read_text() for file in FOLDER.iterdir()}
    assert there == static_files(), "run python -m rlearner.units.services"
    assert UNITS == [
        "envhub@.service",
        "rewardhub@.service",
        "rlearner-broker.service",
        "rlearner@.service",
        "rollout-server@.service",
    ]


@pytest.mark.parametrize("name", UNITS)
def test_a_crash_starts_it_again_and_a_users_error_does_not(name: str) -> None:
    found = settings(name)
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "2",
        "SuccessExitStatus": "130",
        "KillMode": "mixed",  # a second SIGTERM would end a draining process at once
        "OOMPolicy": "continue",
        "User": "rlearner",
        "WantedBy": "rlearner.target",
        "PartOf": "rlearner.target",
    }
    assert {key: found[key] for key in expected} == {
        key: [value] for key, value in expected.items()
    }
    assert 60 <= int(found["WatchdogSec"][0]) <= 180
    assert int(found["TimeoutStopSec"][0]) >= 90


@pytest.mark.parametrize("name", UNITS)
def test_a_sandbox_has_what_it_needs_and_the_others_have_less(name: str) -> None:
    found = settings(name)
    filters = found["SystemCallFilter"]
    # a part of /proc, or the host's name
    hidden = {"ProtectKernelTunables", "ProtectKernelLogs", "ProtectHostname"}
    assert found["NoNewPrivileges"] == ["yes"]
    assert found["CapabilityBoundingSet"] == [""]
    assert "ProcSubset" not in found
    assert "~@resources" not in " ".join(filters)  # ZeroMQ aborts without
    if name in SANDBOXED:
        assert not hidden & found.keys()
        assert set(found["RestrictNamespaces"][0].split()) == {
            "user",
            "mnt",
            "pid",
            "net",
            "ipc",
            "uts",
            "cgroup",
        }
        assert filters == ["@system-service @mount seccomp sethostname"]
    else:
        assert hidden <= found.keys()
        assert found["RestrictNamespaces"] == ["yes"]
        assert filters == ["@system-service", "~@privileged"]


def test_no_unit_holds_a_secret_and_a_token_is_a_credential() -> None:
    join = settings("join.conf")
    assert join["AssertPathExists"] == ["/etc/rlearner/%p.token"]
    assert join["LoadCredential"] == ["token:/etc/rlearner/%p.token"]
    assert join["Environment"] == ['"JOIN=--join %d/token"']
    for name in UNITS:
        has_join = "$JOIN" in settings(name)["ExecStart"][0]
        assert has_join == name.startswith(("envhub", "rewardhub", "rollout"))
