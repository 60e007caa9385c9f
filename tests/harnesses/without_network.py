"""Runs a command in a network of its own, with loopback only, and counts what would leave it.

    python tests/harnesses/without_network.py FIGURES COMMAND [ARGUMENT ...]

A name server on loopback answers that no name exists and keeps the names; all other addresses lead
to a device that nothing is behind, where packets are counted. After the command the figures that it
wrote to the file FIGURES are printed as one JSON line, with ``requests_outside``,
``attempts_outside`` (names asked for and addresses tried) and the list of both. Needs root; without
it the command runs in the network of the host, and the two figures are null.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Final

DEVICE: Final = "outside0"
OTHER_END: Final = "outside1"
ADDRESS: Final = "10.253.0.1/24"
NAME_SERVER: Final = "127.0.0.1"
INSIDE: Final = "RL_HARNESSES_INSIDE"
ALL_PACKETS: Final = 0x0003  # ETH_P_ALL
OUTGOING: Final = 4  # PACKET_OUTGOING
TCP: Final = 6
UDP: Final = 17


def run_command(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True)


def prepare_network() -> None:
    """Give this network loopback, and a default route to nowhere."""
    run_command("ip", "link", "set", "lo", "up")
    # a cable whose other end nobody listens at; without ARP, packets are sent to it at once
    run_command(
        "ip", "link", "add", DEVICE, "arp", "off", "type", "veth", "peer", "name", OTHER_END
    )
    run_command("ip", "address", "add", ADDRESS, "dev", DEVICE)
    run_command("ip", "link", "set", OTHER_END, "up")
    run_command("ip", "link", "set", DEVICE, "up")
    run_command("ip", "route", "add", "default", "dev", DEVICE)
    with tempfile.NamedTemporaryFile("w", suffix=".conf", delete=False) as file:
        file.write(f"nameserver {NAME_SERVER}\n")
    os.chmod(file.name, 0o644)
    # in a mount namespace of its own
    run_command("mount", "--bind", file.name, os.path.realpath("/etc/resolv.conf"))
    os.unlink(file.name)


def read_name(question: bytes) -> str:
    """Return the name in a DNS question."""
    labels = []
    place = 12
    while place < len(question) and (size := question[place]):
        labels.append(question[place + 1 : place + 1 + size].decode("ascii", "replace"))
        place += size + 1
    return ".".join(labels)


def answer_names(server: socket.socket, names: Counter[str]) -> None:
    """Answer every question with NXDOMAIN, and keep the names."""
    while True:
        question, sender = server.recvfrom(4096)
        names[read_name(question)] += 1
        # an answer to that question, recursion available, no such name
        flags = bytes([0x80 | (question[2] & 0x79), 0x83])
        server.sendto(question[:2] + flags + question[4:6] + bytes(6) + question[12:], sender)


def watch_packets(device: socket.socket, addresses: Counter[str]) -> None:
    """Count the addresses that packets are sent to."""
    while True:
        frame, (_, _, direction, *_) = device.recvfrom(65535)
        packet = frame[14:]
        is_ipv4 = frame[12:14] == b"\x08\x00" and len(packet) >= 24
        if direction != OUTGOING or not is_ipv4 or packet[9] not in (TCP, UDP):
            continue
        start = (packet[0] & 15) * 4
        port = int.from_bytes(packet[start + 2 : start + 4], "big")
        addresses[f"{socket.inet_ntoa(packet[16:20])}:{port}"] += 1


def run_inside(figures_file: Path, command: list[str]) -> int:
    """Run the command in the network that this process is alone in."""
    prepare_network()
    names: Counter[str] = Counter()
    addresses: Counter[str] = Counter()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((NAME_SERVER, 53))
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PACKETS))
    device.bind((DEVICE, 0))
    threading.Thread(target=answer_names, args=(server, names), daemon=True).start()
    threading.Thread(target=watch_packets, args=(device, addresses), daemon=True).start()
    status = subprocess.run(command).returncode
    print_figures(
        figures_file,
        # nothing is behind the device
        requests_outside=0,
        attempts_outside=names.total() + addresses.total(),
        attempted={**names, **addresses},
    )
    return status


def print_figures(file: Path, **added: object) -> None:
    """Print what the command wrote, and what was seen of it."""
    figures = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    print(json.dumps({**figures, **added}), flush=True)


def main() -> int:
    """Run the command."""
    figures_file = Path(sys.argv[1])
    command = sys.argv[2:]
    if os.environ.get(INSIDE):
        return run_inside(figures_file, command)
    figures_file.unlink(missing_ok=True)
    if os.geteuid() == 0:
        again = [sys.executable, *sys.argv]
        env = {**os.environ, INSIDE: "1"}
        return subprocess.run(["unshare", "--net", "--mount", *again], env=env).returncode
    status = subprocess.run(command).returncode
    print_figures(figures_file, requests_outside=None, attempts_outside=None)
    return status


if __name__ == "__main__":
    sys.exit(main())
