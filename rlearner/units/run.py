"""Finds what a host starts, by a plan or without GPUs, and prints or writes its files."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
from pathlib import Path
from typing import Any, Final

from broker.errors import UserError
from broker.settings.config_file import locate
from broker.settings.runspec import check_settings, load
from learner.prepare import to_yaml
from rlearner.plan.changes import changed_keys, nest_keys
from rlearner.plan.launches import Launch, host_launches, joining_roles
from rlearner.plan.plans import make_plans
from rlearner.plan.reader import CHECKS, WorkloadReader
from rlearner.plan.run import machine_of
from rlearner.plan.write import check_folder, merge_sections
from rlearner.units.hidden_paths import check_bin_folder, check_config_paths
from rlearner.units.host_files import README, Fleet, host_files, units_of

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
WITHOUT_GPUS: Final = (
    Launch("broker"),
    Launch("envhub"),
    Launch("rollout", ("--gpus", "cpu")),
    Launch("rewardhub"),
    Launch("learner", ("--gpus", "cpu")),
)


def units_run(options: argparse.Namespace) -> int:
    """Print the files of one host, or write them with ``--write``; return the exit code.

    Raises:
        UserError: if the configuration or a host is wrong, nothing fits, or a file holds something
            else.
    """
    if options.write is not None:
        check_folder(options.write)
    hosts = _parse_hosts(options)
    host = _choose_host(options, hosts)
    fleet, starts = _plan_host(options, hosts, list(hosts).index(host))
    if not starts:
        raise UserError(
            f"--host {host}: the plan starts nothing there; see rlearner plan, which shows its GPUs"
        )
    files = host_files(fleet, host, starts)
    units = units_of(fleet, starts)
    if options.write is not None:
        _write_files(Path(options.write), files)
    if options.json:
        print(
            json.dumps({"host": host, "run": fleet.run, "units": units, "files": files}, indent=1)
        )
    elif options.write is not None:
        print(
            f"wrote {len(files)} files for {', '.join(units)}; next: {Path(options.write) / README}"
        )
    else:
        # Paths are below /, but the README stays where the operator reads it.
        texts = [f"# {'' if name == README else '/'}{name}\n{text}" for name, text in files.items()]
        print("\n".join(texts), end="")
    return 0


def _parse_hosts(options: argparse.Namespace) -> dict[str, str]:
    """Return the address of each host by name, in the plan's order.

    Raises:
        UserError: if a name or an address cannot be used.
    """
    if options.hosts is None:
        return {options.host or "localhost": ""}
    hosts: dict[str, str] = {}
    for word in options.hosts.split(","):
        name, _, address = word.strip().partition("=")
        expected = "NAME=ADDRESS for each host, for example train=10.0.0.1,gen1=10.0.0.2"
        if not NAME.fullmatch(name) or name in hosts:
            raise UserError(f"--hosts: {word!r} is not allowed; {expected}, each name once")
        try:
            ip_address = ipaddress.ip_address(address.strip("[]"))
        except ValueError:
            raise UserError(f"--hosts: {word!r} is not allowed; {expected}") from None
        if ip_address.is_loopback or ip_address.is_unspecified:
            raise UserError(
                f"--hosts: {word!r} is not allowed; "
                f"an address by which the other hosts reach {name}"
            )
        if str(ip_address) in hosts.values():
            raise UserError(f"--hosts: {word!r} is not allowed; another host has this address")
        hosts[name] = str(ip_address)
    if options.gpus is None and len(hosts) > 1:
        raise UserError("--hosts: several hosts need --gpus, for the plan says what runs on which")
    return hosts


def _choose_host(options: argparse.Namespace, hosts: dict[str, str]) -> str:
    if options.host is None and len(hosts) > 1:
        raise UserError(f"--host: which one; --hosts has {', '.join(hosts)}")
    host = str(options.host or next(iter(hosts)))
    if host not in hosts or not NAME.fullmatch(host):
        raise UserError(f"--host: {host!r} is not allowed; one of {', '.join(hosts)}")
    return host


def _plan_host(
    options: argparse.Namespace, hosts: dict[str, str], number: int
) -> tuple[Fleet, list[Launch]]:
    """Return the fleet, and what one of its hosts starts.

    Raises:
        UserError: if the configuration is wrong, or nothing fits.
    """
    config_in_file = load(options.config, options.overrides)
    if options.gpus is None:
        check_settings(config_in_file, checks=CHECKS)
        starts = list(WITHOUT_GPUS)
        tokens = tuple[str, ...]()
        keys = dict[str, Any]()
    else:
        machine = machine_of(options.gpus, options.gpu_memory, len(hosts))
        reader = WorkloadReader(options.config, options.overrides)
        work = reader.read()
        plan = make_plans(work, machine, 1, reader.read)[0]
        starts = host_launches(plan, machine, number, work.demands.environments)
        tokens = tuple(joining_roles(plan, machine))
        keys = changed_keys(plan, work.demands)
    config = merge_sections(config_in_file, nest_keys(keys))
    run = str((config.get("run") or {}).get("name") or _default_run(options.config))
    config = merge_sections(config, {"run": {"name": run}})
    check_settings(config, checks=CHECKS)
    check_config_paths(config)
    return Fleet(run, hosts, tokens, to_yaml(config), _check_bin_folder(options.bin)), starts


def _default_run(config: str) -> str:
    """Return the name of the file: unlike the time, it is the same for every host."""
    stem = Path(locate(config)).stem
    return re.sub(r"[^A-Za-z0-9_-]", "-", Path(config).name if stem == "config" else stem)


def _check_bin_folder(folder: str) -> str:
    """Return --bin.

    Raises:
        UserError: if services cannot reach it.
    """
    if not re.fullmatch(r"/[A-Za-z0-9._/+-]+", folder):
        raise UserError(
            f"--bin: {folder!r} is not allowed; "
            "an absolute path without spaces, as /opt/rlearner/bin"
        )
    check_bin_folder(folder)
    return folder.rstrip("/")


def _write_files(folder: Path, files: dict[str, str]) -> None:
    """Write the files; refuse before writing if one exists with other contents.

    Raises:
        UserError: if one holds something else, or cannot be written.
    """
    try:
        for name, text in files.items():
            file = folder / name
            # All are compared before the first is written.
            if file.exists() and file.read_text(encoding="utf-8") != text:
                raise UserError(
                    f"--write {folder}: {file} holds something else; "
                    "remove it, or name another folder"
                )
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            # The files hold no secret, and every command starts with umask 077.
            file.chmod(0o644)
            for parent in file.relative_to(folder).parents:
                (folder / parent).chmod(0o755)
    except (OSError, UnicodeDecodeError) as error:
        problem: str | None = "it holds a file that is not text"
        if isinstance(error, OSError):
            problem = error.strerror
        raise UserError(
            f"--write {folder}: {problem}; name a new folder, or one that you can write to"
        ) from None
