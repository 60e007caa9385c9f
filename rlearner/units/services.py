"""systemd units: what they start, as which user, and when they restart. Pure.

``python -m rlearner.units.services`` writes the files of ``static_files`` to ``deploy/systemd``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlearner.units.hardening import COMMON, GPU, NO_GPU, NO_SANDBOX, SANDBOX

BIN: Final = "/opt/rlearner/bin"
FOLDER: Final = Path("deploy/systemd")
TARGET_NAME: Final = "rlearner.target"
BROKER_NAME: Final = "rlearner-broker.service"
USER: Final = "rlearner"

TARGET: Final = """\
[Unit]
Description=rlearner: broker, learners, servers and hubs of this host
After=network-online.target
Wants=network-online.target

[Install]
WantedBy=multi-user.target
"""
SYSUSERS: Final = """\
# /usr/lib/sysusers.d/rlearner.conf: the user of all rlearner units; systemd-sysusers makes it
u rlearner - "rlearner" /var/lib/rlearner
"""
JOIN: Final = """\
# Processes on another host than the broker's join with a token: \
/etc/systemd/system/%p@.service.d/join.conf
# Description: what the journal says when the file is missing
[Unit]
Description=rlearner %p %i, which joins with /etc/rlearner/%p.token
AssertPathExists=/etc/rlearner/%p.token

[Service]
LoadCredential=token:/etc/rlearner/%p.token
Environment="JOIN=--join %d/token"
"""


@dataclass(frozen=True)
class Service:
    """One unit.

    Attributes:
        name: file name.
        about: its Description.
        role: RL_ROLE of its journal entries.
        command: program and arguments.
        stop_s: time to end that a blocked process has; one that drains extends it, see
            ``service_manager``.
        watchdog_s: time without a turn of the event loop after which it is killed and started
            again.
        has_gpu: whether it may use GPUs.
        has_sandbox: whether it starts sandboxed programs.
    """

    name: str
    about: str
    role: str
    command: str
    stop_s: int = 90
    watchdog_s: int = 60
    has_gpu: bool = False
    has_sandbox: bool = False

    @property
    def is_broker(self) -> bool:
        return self.name == BROKER_NAME


def list_services(bin_folder: str = BIN) -> tuple[Service, ...]:
    """Return the units of every role; ``%i`` is a run, a list of GPUs, or any number."""
    learner = f"{bin_folder}/rlearner start /etc/rlearner/%i.yaml run.name=%i $OPTIONS"
    return (
        Service(
            BROKER_NAME,
            "rlearner broker",
            "broker",
            f"{bin_folder}/broker serve --store %S/rlearner/broker $OPTIONS",
        ),
        Service(
            "rlearner@.service",
            "rlearner learner of run %i",
            "learner",
            learner,
            stop_s=300,
            watchdog_s=180,
            has_gpu=True,
            has_sandbox=True,
        ),
        Service(
            "rollout-server@.service",
            "rlearner rollout server on GPUs %i",
            "rollout",
            f"{bin_folder}/rollout-server --gpus %i $JOIN $OPTIONS",
            watchdog_s=120,
            has_gpu=True,
        ),
        Service(
            "envhub@.service",
            "rlearner environment hub %i",
            "envhub",
            f"{bin_folder}/envhub $JOIN $OPTIONS",
            has_sandbox=True,
        ),
        Service(
            "rewardhub@.service",
            "rlearner reward hub %i",
            "rewardhub",
            f"{bin_folder}/rewardhub $JOIN $OPTIONS",
            has_gpu=True,
            has_sandbox=True,
        ),
    )


def render_service(service: Service) -> str:
    """Return the text of a unit."""
    env_file = "%p@%i.env" if "@" in service.name else "%p.env"
    lines = [
        "[Unit]",
        f"Description={service.about}",
        "Wants=network-online.target",
        f"After=network-online.target {'' if service.is_broker else BROKER_NAME}".rstrip(),
        f"PartOf={TARGET_NAME}",
        "# a process that crashes all the time: systemctl reset-failed, once it is fixed",
        "StartLimitIntervalSec=900",
        "StartLimitBurst=20",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={service.command}",
        f"User={USER}",
        "WorkingDirectory=%S/rlearner",
        "StateDirectory=rlearner",
        "StateDirectoryMode=0700",
        "CacheDirectory=rlearner",
        "CacheDirectoryMode=0700",
        "# sockets between processes of this host; it stays while another unit uses it",
        "RuntimeDirectory=rlearner",
        "RuntimeDirectoryMode=0700",
        "RuntimeDirectoryPreserve=yes",
        "Environment=XDG_RUNTIME_DIR=%t/rlearner XDG_CACHE_HOME=%C/rlearner OPTIONS= JOIN=",
        "EnvironmentFile=-/etc/rlearner/rlearner.env",
        f"EnvironmentFile=-/etc/rlearner/{env_file}",
        f"LogExtraFields=RL_ROLE={service.role}",
        *["LogExtraFields=RL_RUN=%i"] * (service.role == "learner"),
        "",
        "# exit 2: the user must act; 130: stopped by the user. Everything else is a crash.",
        "Restart=on-failure",
        "RestartSec=5",
        "RestartPreventExitStatus=2",
        "SuccessExitStatus=130",
        f"WatchdogSec={service.watchdog_s}",
        "# one SIGTERM, to the main process: it drains, and ends its children in order",
        "KillMode=mixed",
        f"TimeoutStopSec={service.stop_s}",
        "# a child out of memory costs its own work only",
        "OOMPolicy=continue",
        "TasksMax=infinity",
        "",
        *COMMON,
        *(SANDBOX if service.has_sandbox else NO_SANDBOX),
        *(GPU if service.has_gpu else NO_GPU),
        "",
        "[Install]",
        f"WantedBy={TARGET_NAME}",
        *["DefaultInstance=1"] * (service.role in ("envhub", "rewardhub")),
    ]
    return "\n".join(lines) + "\n"


def static_files() -> dict[str, str]:
    """Return the files of ``deploy/systemd`` by name."""
    units = {service.name: render_service(service) for service in list_services()}
    return {**units, TARGET_NAME: TARGET, "join.conf": JOIN, "rlearner.sysusers": SYSUSERS}


def main(folder: Path = FOLDER) -> int:
    """Write ``deploy/systemd``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in static_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
