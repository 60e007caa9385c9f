"""A tool server over stdio without any package, that misbehaves on demand.

    python raw_tool_server.py [TROUBLE] [FILE]

Tools: ``add`` (a, b), ``echo`` (text), ``env`` (name), ``count`` (calls so far), ``trouble`` (kind).
FILE gets the pids of the server and of a daemon that it leaves behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TOOLS = {
    "add": schema(a=INTEGER, b=INTEGER),
    "echo": schema(text=TEXT),
    "env": schema(name=TEXT),
    "count": schema(),
    "trouble": schema(kind=TEXT),
}


class Server:
    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        self.tools = dict(TOOLS)
        self.calls = 0

    def send(self, message: dict[str, Any]) -> None:
        print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

    def run(self) -> None:
        if self.trouble == "mute":
            time.sleep(600)
        if self.trouble == "dies":
            print("no licence for key", os.environ.get("TOOL_KEY", ""), file=sys.stderr)
            sys.exit(3)
        if self.trouble == "noise":
            print("this is not JSON", flush=True)
        if self.trouble == "bad_schema":
            self.tools["add"] = {"type": "object", "properties": {"a": {"type": "nothing"}}}
        if self.trouble == "other":
            self.tools["later"] = schema()
        for line in sys.stdin:
            message = json.loads(line)
            if "id" in message:
                self.answer(message["id"], message["method"], message.get("params") or {})

    def answer(self, number: int, method: str, params: dict[str, Any]) -> None:
        if method == "initialize":
            result: dict[str, Any] = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
        elif method == "tools/list":
            tools = [
                {"name": name, "description": name, "inputSchema": each}
                for name, each in self.tools.items()
            ]
            result = {"tools": tools}
        elif method == "tools/call":
            text = self.call(number, params["name"], params.get("arguments") or {})
            result = {"content": [{"type": "text", "text": text}]}
        else:
            self.send({"id": number, "error": {"code": -32601, "message": "no such method"}})
            return
        self.send({"id": number, "result": result})

    def call(self, number: int, name: str, arguments: dict[str, Any]) -> str:
        self.calls += 1
        match name:
            case "add":
                return str(arguments["a"] + arguments["b"])
            case "echo":
                return str(arguments["text"])
            case "env":
                return os.environ.get(arguments["name"], "not set")
            case "count":
                return str(self.calls)
            case _:
                return self.misbehave(number, arguments["kind"])

    def misbehave(self, number: int, kind: str) -> str:
        if kind == "die":
            print(f"out of disk for {os.environ.get('TOOL_KEY', '')}", file=sys.stderr, flush=True)
            os._exit(7)
        if kind == "hang":
            time.sleep(600)
        if kind == "change":
            self.tools["later"] = schema()
            self.send({"method": "notifications/tools/list_changed"})
        if kind.startswith("mib:"):
            return "x" * (int(kind[4:]) << 20)
        if kind == "unnamed":
            # an answer without end whose id comes last
            sys.stdout.write('{"result": {"content": [{"type": "text", "text": "')
            sys.stdout.write("y" * (9 << 20))
            sys.stdout.write(f'"}}]}}, "id": {number}, "jsonrpc": "2.0"}}\n')
            sys.stdout.flush()
        return "done"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        daemon = subprocess.Popen(
            ["setsid", "sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        with open(sys.argv[2], "a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {daemon.pid}\n")
    Server(sys.argv[1] if len(sys.argv) > 1 else "").run()
