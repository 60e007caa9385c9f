"""The shell file of each host of a plan. Pure."""

from __future__ import annotations

import shlex
from typing import Final

from rlearner.plan.candidates import Plan
from rlearner.plan.facts import Machine
from rlearner.plan.launches import PROGRAMS, host_launches, joining_roles

CONFIG: Final = "plan.yaml"
BROKER: Final = ' --broker "tls://$HOST0:4222"'
HEAD: Final = """\
here=$(cd "$(dirname "$0")" && pwd)
CONFIG="$here/plan.yaml"
pids=
trap 'kill $pids 2>/dev/null' EXIT
trap 'exit 130' INT TERM
"""
ADDRESS: Final = """\
case "${HOST0:-}" in
    '' | localhost | 127.* | ::1 | '[::1]' | 0.0.0.0)
        echo "HOST0: '${HOST0:-}' is not allowed; \
the address by which all hosts reach host 0, as 10.0.0.1" >&2
        exit 2 ;;
esac
"""
# A token of another broker, or one that has expired or was revoked, is not among those that this
# broker accepts.
TOKEN: Final = """\
token() {
    file="$here/$RUN.$1.token"
    name=$(sed -n 's/.*"name": "\\([^"]*\\)".*/\\1/p' "$file" 2>/dev/null)
    rlearner invited --broker "tls://$HOST0:4222" 2>/dev/null | grep -q "^${name:-?} " && return
    rm -f "$file"
    rlearner invite "$1" --run "$RUN" --expires "${EXPIRES:-24h}" --out "$file" \
--broker "tls://$HOST0:4222" || exit 2
}
"""
COPIED: Final = """\
token() {
    [ -e "$here/$RUN.$1.token" ] && return
    echo "$here/$RUN.$1.token: no such file; \
start host-0.sh, and copy the file that it writes next to itself" >&2
    exit 2
}
"""
# Waits for the broker that the line above started, or for its end.
WAIT_FOR_BROKER: Final = (
    'until rlearner invited --broker "tls://$HOST0:4222" >/dev/null 2>&1; '
    "do kill -0 $! 2>&- || exit 2; sleep 1; done"
)


def host_script(plan: Plan, machine: Machine, host: int, run: str, environments: int) -> str:
    """Return the shell file of one host."""
    head = [f"#!/bin/sh\n# Host {host} of {machine.hosts}. By rlearner plan.\n"]
    if machine.hosts > 1:
        head.append(ADDRESS)
    head += [f"RUN={shlex.quote(run)}\n", HEAD]
    lines = launch_lines(plan, machine, host, environments)
    if any(line.startswith("token ") for line in lines):
        head.append(COPIED if host else TOKEN)
    # The trap ends what runs in the background.
    body = [f'{line} pids="$pids $!"' if line.endswith("&") else line for line in lines]
    # A host without the learner has nothing in the foreground.
    if lines and lines[-1].endswith("&"):
        body.append("wait")
    return "".join(head) + "\n".join(body) + "\n"


def launch_lines(plan: Plan, machine: Machine, host: int, environments: int) -> list[str]:
    """Return the commands of one host, the learner's last; the others end with it.

    ``$CONFIG`` is the configuration, ``$RUN`` the run, ``$HOST0`` the address of the first host,
    needed only where there are several.
    """
    if plan.shared:
        return ['rlearner up "$CONFIG" run.name="$RUN" --share-gpus']
    has_hosts = machine.hosts > 1
    lines = list[str]()
    broker = BROKER * has_hosts
    for launch in host_launches(plan, machine, host, environments):
        login = f' --join "$here/$RUN.{launch.role}.token"' if launch.joins else broker
        options = "".join(f" {option}" for option in launch.options)
        match launch.role:
            case "broker":
                bind = ' --bind "$HOST0" --port 4222' * has_hosts
                lines.append(f"broker serve{bind} &")
                roles = joining_roles(plan, machine)
                lines += [WAIT_FOR_BROKER] * bool(roles) + [f"token {role}" for role in roles]
            case "learner":
                if launch.nodes > 1:
                    options += f" --nnodes {launch.nodes} --node-rank {host}"
                    options += ' --rendezvous "$HOST0":29400'
                lines.append(f'rlearner start "$CONFIG" run.name="$RUN"{options}{broker}')
            case role:
                lines.append(f"{PROGRAMS[role]}{options}{login} &")
    return [f"token {role}" for role in joining_roles(plan, machine, host) if host] + lines
