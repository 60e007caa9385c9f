"""The files of one host: units, environments, configuration, and the commands to run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlearner.plan.launches import Launch
from rlearner.units.services import (
    BROKER_NAME,
    JOIN,
    SYSUSERS,
    TARGET,
    TARGET_NAME,
    list_services,
    render_service,
)

PORT: Final = 4222
RENDEZVOUS_PORT: Final = 29400
PROGRAMS: Final = {
    "rollout": "rollout-server",
    "envhub": "envhub",
    "rewardhub": "rewardhub",
    "learner": "rlearner",
}
# The operator's commands run as the user of the units, who owns the accounts and the run's folder.
OPERATOR: Final = (
    "runuser -u rlearner -- env -C /var/lib/rlearner HOME=/var/lib/rlearner {bin}/rlearner"
)
README: Final = "README.md"
# The ranks of a further node have no event loop that could report: they end with node 0's.
FURTHER_NODE: Final = "[Service]\nType=exec\nNotifyAccess=none\nWatchdogSec=0\n"


@dataclass(frozen=True)
class Fleet:
    """Where the processes of a run are.

    Attributes:
        hosts: addresses by name, in the order of the plan; one without an address if there is a
            single host.
        tokens: roles of other hosts than the first.
        config: the run's configuration as YAML.
    """

    run: str
    hosts: dict[str, str]
    tokens: tuple[str, ...]
    config: str
    bin: str

    @property
    def first(self) -> str:
        """Address of the first host, which has the broker; empty if there is no other."""
        if len(self.hosts) == 1:
            return ""
        return next(iter(self.hosts.values()))

    @property
    def broker(self) -> str:
        return f"tls://{_in_url(self.first)}:{PORT}"


def units_of(fleet: Fleet, launches: Sequence[Launch]) -> list[str]:
    """Return the units to enable."""
    return [_unit_name(fleet, launch) for launch in launches]


def host_files(fleet: Fleet, host: str, launches: Sequence[Launch]) -> dict[str, str]:
    """Return the content of each file by its path below the root folder, and the README."""
    system = "etc/systemd/system"
    config = "etc/rlearner"
    files = {f"{system}/{TARGET_NAME}": TARGET, "etc/sysusers.d/rlearner.conf": SYSUSERS}
    names = {_unit_file(launch) for launch in launches}
    files |= {
        f"{system}/{service.name}": render_service(service)
        for service in list_services(fleet.bin)
        if service.name in names
    }
    common = {"RL_RUN": fleet.run}
    if fleet.first:
        common["RL_BROKER"] = fleet.broker
    files[f"{config}/rlearner.env"] = _format_environment(common)
    rank = list(fleet.hosts).index(host)
    for launch in launches:
        unit = _unit_name(fleet, launch)
        if options := _launch_options(fleet, launch, rank):
            files[f"{config}/{unit.removesuffix('.service')}.env"] = _format_environment(
                {"OPTIONS": " ".join(options)}
            )
        # The drop-in gives the unit its token.
        if launch.joins:
            files[f"{system}/{PROGRAMS[launch.role]}@.service.d/join.conf"] = JOIN
        if launch.role == "learner":
            files[f"{config}/{fleet.run}.yaml"] = fleet.config
            if rank:
                files[f"{system}/{unit}.d/node.conf"] = FURTHER_NODE
    return dict(sorted(files.items())) | {README: _write_readme(fleet, host, launches)}


def _unit_file(launch: Launch) -> str:
    return BROKER_NAME if launch.role == "broker" else f"{PROGRAMS[launch.role]}@.service"


def _unit_name(fleet: Fleet, launch: Launch) -> str:
    instance = {"learner": fleet.run, "rollout": launch.gpus}.get(launch.role, "1")
    return _unit_file(launch).replace("@.", f"@{instance}.")


def _launch_options(fleet: Fleet, launch: Launch, rank: int) -> list[str]:
    """Return what the unit's ExecStart does not say."""
    options = list(launch.options)
    # The unit's name gives the GPUs of a rollout server.
    if launch.role == "rollout":
        options = options[2:]
    if launch.role == "broker" and fleet.first:
        options += ["--bind", fleet.first, "--port", str(PORT)]
    if launch.nodes > 1:
        rendezvous = f"{_in_url(fleet.first)}:{RENDEZVOUS_PORT}"
        options += ["--nnodes", str(launch.nodes)]
        options += ["--node-rank", str(rank)]
        options += ["--rendezvous", rendezvous]
    return options


def _format_environment(values: dict[str, str]) -> str:
    return "".join(f'{name}="{value}"\n' for name, value in values.items())


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _write_readme(fleet: Fleet, host: str, launches: Sequence[Launch]) -> str:
    """Return the commands for this host, in the order of their use."""
    operator = OPERATOR.format(bin=fleet.bin)
    units = units_of(fleet, launches)
    is_first = host == next(iter(fleet.hosts))
    parts = [
        f"# Run {fleet.run} on host {host}\n\nBy rlearner units. rlearner is in {fleet.bin}.\n",
        "As root, in this folder:\n",
        "    cp -r etc /\n    systemd-sysusers\n    systemctl daemon-reload\n"
        f"    systemctl enable rlearner.target {' '.join(units)}\n",
    ]
    joining = sorted({launch.role for launch in launches if launch.joins})
    if joining:
        files = " and ".join(f"{PROGRAMS[role]}.token" for role in joining)
        source = next(iter(fleet.hosts))
        parts.append(
            f"Put {files}, which host {source} has written, into /etc/rlearner "
            "(owner root, mode 600).\n"
        )
    parts.append("Then, and after each change of a unit:\n\n    systemctl start rlearner.target\n")
    if is_first and fleet.tokens:
        parts.append("Once the broker runs, write the tokens of the other hosts:\n")
        lines = [
            f"    {operator} invite {role} --run {fleet.run} --broker {fleet.broker} --expires 90d "
            f"--out /var/lib/rlearner/{PROGRAMS[role]}.token\n"
            for role in fleet.tokens
        ]
        further_hosts = ", ".join(list(fleet.hosts)[1:])
        parts.append(
            "".join(lines)
            + "\nand move them to /etc/rlearner of the hosts whose README names them: "
            + f"{further_hosts}.\n"
        )
    if any(launch.nodes > 1 for launch in launches):
        key = "/var/lib/rlearner/.config/rlearner/nodes.key"
        parts.append(
            f"All nodes of the learner have the same {key}; node 0 makes it "
            "(owner rlearner, mode 600).\n"
        )
    if any(launch.role == "learner" for launch in launches):
        parts.append("Relative paths and ~ in the configuration are below /var/lib/rlearner.\n")
    watching = (
        f"Watch and stop:\n\n    systemctl status {' '.join(units)}\n"
        f"    journalctl -f RL_RUN={fleet.run}\n"
        f"    systemctl stop rlearner.target {' '.join(units)}     # drains, and waits for it\n"
    )
    # Only the first host has the broker, and so the accounts.
    if is_first:
        watching += f"    {operator} status {fleet.run}\n"
    return "\n".join([*parts, watching])
