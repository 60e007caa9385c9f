"""What the engine starts in place of SGLang: a child process that forwards its port to the double
in the test's own process.

Starts in a tenth of a second, for it imports nothing but the standard library. Usage:
sglang_forward.py DOUBLE_PORT --port=N …
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys


async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # one end is gone
    finally:
        writer.close()


async def main(double: int, options: list[str]) -> None:
    port = int(next(one for one in options if one.startswith("--port=")).partition("=")[2])

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", double)
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    print("started with", " ".join(sys.argv[2:]), flush=True)
    if "--crash" in sys.argv:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB")
    ask = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    ask.request("POST", "/_started", json.dumps(sys.argv[2:]))
    assert ask.getresponse().status == 200
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
