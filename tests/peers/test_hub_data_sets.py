"""Data sets by name, with the library itself and a hub on this machine; run by `make test-peers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("datasets", reason="make test-peers installs it")

COMMIT = "0123456789" * 4
API = "/api/datasets/owner/sums"
FILES = "/datasets/owner/sums/resolve/"
SPLITS = {"train": ["1+1?", "2+2?", "3+3?"], "test": ["4+4?"]}
READ = """
import json, sys
from broker.errors import ConfigError
from rlearner_text.rows.reading import read_rows
from rlearner_text.rows.sources import DataSource
source = DataSource(**json.loads(sys.argv[1]))
try:
    print(json.dumps([row for _, row in read_rows(source, "data.train")]))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


class HubHandler(BaseHTTPRequestHandler):
    """Answers what the hub's clients ask about one data set of two files."""

    files: ClassVar[dict[str, bytes]] = {
        f"data/{split}-00000-of-00001.jsonl": "".join(
            json.dumps({"prompt": [{"role": "user", "content": text}], "level": None}) + "\n"
            for text in texts
        ).encode()
        for split, texts in SPLITS.items()
    }

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == API or path.startswith(f"{API}/revision/"):
            names = [{"rfilename": name} for name in self.files]
            self.answer({"id": "owner/sums", "sha": COMMIT, "siblings": names, "tags": []})
        elif path.startswith(f"{API}/tree/"):
            folder = path.removeprefix(f"{API}/tree/{COMMIT}").strip("/")
            entries = [self.entry(name) for name in self.files if name.startswith(folder)]
            data = {"type": "directory", "path": "data", "size": 0, "oid": "0" * 40}
            self.answer(entries if folder else [data, *entries])
        elif path.startswith(FILES) and (name := path[len(FILES) + 41 :]) in self.files:
            self.answer(
                self.files[name],
                {"X-Repo-Commit": COMMIT, "ETag": f'"{zlib.crc32(name.encode())}"'},
            )
        else:
            self.answer({}, {"X-Error-Code": "EntryNotFound"}, status=404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.answer([self.entry(name) for name in self.files if name in body])

    def entry(self, name: str) -> dict[str, Any]:
        size = len(self.files[name])
        return {"type": "file", "path": name, "size": size, "oid": "0" * 40}

    def answer(self, body: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def hub() -> Any:
    with ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.timeout(900)
def test_a_name_with_its_commit(hub: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path)}

    def read(**source: Any) -> Any:
        command = [sys.executable, "-c", READ, json.dumps(source)]
        result = subprocess.run(command, env=environment, capture_output=True, check=True)
        return json.loads(result.stdout)

    def rows(texts: list[str]) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": text}]} for text in texts]

    name = f"owner/sums@{COMMIT}"
    assert read(path=name, split="train") == rows(SPLITS["train"])
    assert read(path=name, split="train", max_rows=2) == rows(SPLITS["train"][:2])
    assert read(path=name, split="test") == rows(SPLITS["test"])
    assert read(path=name).endswith("it has the splits train, test; name one as split")
    environment["HF_HUB_OFFLINE"] = "1"
    assert read(path=name, split="test") == rows(SPLITS["test"])
    del environment["HF_HUB_OFFLINE"]
    assert 'Unknown split "dev"' in read(path=name, split="dev")
    assert read(path="owner/sums").startswith(f"data.train: 'owner/sums' is not allowed; {name}: ")
