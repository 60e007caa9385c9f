"""Two processes that broadcast bytes between them for each line on stdin, unrelated to a server."""

from __future__ import annotations

import socket
import subprocess
import sys

import torch
import torch.distributed as dist


class ByteMovers:
    """The two processes of a broadcast of ``size_bytes``."""

    def __init__(self, size_bytes: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "bench.support.update_bare", str(port), str(size_bytes)]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else None,
                bufsize=0,
            )
            for rank in range(2)
        ]
        assert self._processes[0].stdout is not None
        if self._processes[0].stdout.readline() != b"ready\n":
            raise RuntimeError("the processes that move unrelated bytes did not start")

    def move(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def main(port: int, size_bytes: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    buffer = torch.ones(size_bytes, dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    if rank == 0:
        print("ready", flush=True)
    while sys.stdin.readline() == "go\n":
        dist.broadcast(buffer, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
