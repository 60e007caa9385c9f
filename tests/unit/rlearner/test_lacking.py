"""What this machine lacks for a configuration is found before anything starts: packages, programs'
imports, keys, endpoints.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from broker.errors import NotInstalled
from broker.settings.preflight import PreflightFinding
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, load
from envhub import preflight as envhub_looks
from envhub.agents.imports import imported
from rewardhub import preflight as rewardhub_looks
from rlearner.cli import main
from rlearner.doctor import hardware, packages, preflight
from rlearner.doctor.hardware import GpuInfo, TorchBuild
from rollout import preflight as rollout_looks
from rollout.config import RolloutSection

LAKE = "model: {path: null}\ndomains: {lake: {env: frozenlake, max_turns: 2, sampling: {max_tokens: 4}}}\n"


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no optional package were there, whatever this environment has."""
    real = packages.tool_findings
    monkeypatch.setattr(
        packages,
        "tool_findings",
        lambda project, plugins, *, gpus: real(project, plugins, lambda name: None, gpus=gpus),
    )


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("command", ["up", "start"])
def test_a_missing_package_is_said_at_once_with_its_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(LAKE)
    assert main([command, str(file), "trackers.use=[wandb]", f"run.dir={tmp_path}"]) == 2
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert ": " in said[0]
    assert said[0].count("pip install") == 1
    assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]  # nothing was begun


@pytest.mark.usefixtures("without_packages")
def test_check_prints_the_configuration_and_says_what_is_missing_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(LAKE + "trackers: {use: [wandb]}\nrollout: {engine: vllm}\n")
    assert main(["check", str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == (
        "ok; 3 things that it needs are missing on this machine"
    )
    said = {
        line.split(": ")[1]
        for line in printed.err.splitlines()
        if line.startswith("missing here: ")
    }
    assert {"vllm", "wandb"} <= said


def test_a_taken_port_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(LAKE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["up", str(file), f"run.dir={tmp_path}", f"rollout.http_port={port}"]) == 2
    said = (
        f"error: rollout.http_port: port {port} on 127.0.0.1 is already in use -> rollout.http_port=0 # any free "
        f"port, or another number"
    )
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "find_gpus", lambda: ([], ""))
    monkeypatch.setattr(preflight, "existing", lambda: [])
    file = tmp_path / "run.yaml"
    file.write_text(LAKE)
    assert main(["up", str(file), f"run.dir={tmp_path}", "train.device=cuda"]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: GPUs: no NVIDIA GPU on this machine -> ")
    )


def test_on_one_gpu_a_run_starts_unless_it_asks_for_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hardware, "find_gpus", lambda: ([GpuInfo(0, "H100", 81559, 0, "580.65.06", "9.0")], "")
    )
    monkeypatch.setattr(hardware, "find_torch", lambda: TorchBuild("2.13.0", "13.0", "2.27.7"))
    monkeypatch.setattr(preflight, "existing", lambda: [0])
    file = tmp_path / "run.yaml"
    file.write_text(LAKE)

    def missing(*overrides: str) -> list[str]:
        found = preflight.fleet_findings(check_settings(load(str(file), list(overrides))))
        return [one.remedy for one in found if one.status == "missing" and one.name == "weights"]

    assert missing() == missing("train.weights_backend=shared") == []
    assert missing("train.weights_backend=nccl") == ["train.weights_backend=auto"]


def test_the_learner_is_not_asked_for_what_others_need() -> None:
    config = {
        "rollout": {"engine": "no-such"},
        "train": {"backend": "torch"},
        "domains": {"g": {"env": "gem"}},
    }
    assert [
        one.name
        for one in preflight.learner_findings(RunSettings.of_config(config))
        if one.name in ("no-such", "gem")
    ] == []


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(
    ("train", "extra", "key"),
    [
        ({"backend": "deepspeed"}, "deepspeed", "train.backend"),
        ({"backend": "megatron"}, "megatron", "train.backend"),
        ({"backend": "torch", "lora": {"rank": 8}}, "lora", "lora"),
    ],
)
def test_what_trains_and_is_not_installed(train: dict[str, Any], extra: str, key: str) -> None:
    (found,) = [
        one
        for one in preflight.learner_findings(RunSettings.of_config({"train": train}))
        if one.name == extra
    ]
    assert "; required by " in found.found
    assert found.found.endswith(key)
    assert f"[{extra}]'" in found.remedy


def test_the_first_missing_thing_is_refused_in_one_line() -> None:
    fine, missing = (
        PreflightFinding("a", "x", "warning", "odd"),
        PreflightFinding("a", "y", "missing", "none there", "do this"),
    )
    preflight.require_installed([fine])
    with pytest.raises(NotInstalled, match=r"^y: none there -> do this$"):
        preflight.require_installed([fine, missing])


def test_imports_that_a_start_needs() -> None:
    source = (
        "import os, one.two\nfrom three.four import five\nfrom . import six\ntry:\n    import seven\nexcept "
        "ImportError: ...\n"
    )
    assert imported(source + "def f():\n    import eight\n") == ["os", "one", "three"]


def agent(**args: Any) -> RunSettings:
    domain = {"env": "agent", "context": "steps", "env_args": args}
    return RunSettings.of_config({"domains": {"a": domain}})


def test_what_an_agents_program_imports(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "play.py"
    script.write_text("import json\nimport beside\nimport no_such_package.inner\n")
    (found,) = envhub_looks.preflight_findings(agent(command=["python", str(script)]))
    assert found == PreflightFinding(
        "agents", "domains.a.env_args", "missing", f"{script} imports no_such_package, not installed",
        f"{sys.executable} -m pip install no_such_package",
    )  # fmt: skip
    assert [
        one.status
        for one in envhub_looks.preflight_findings(
            agent(command=[sys.executable, "play.py"], cwd=str(tmp_path))
        )
    ] == ["missing"]
    assert [
        one.status for one in envhub_looks.preflight_findings(agent(function=f"{script}:play"))
    ] == ["missing"]
    script.write_text("import json\nimport beside\n")
    assert [
        one.status
        for one in envhub_looks.preflight_findings(agent(command=["python", str(script)]))
    ] == ["ok"]
    script.write_text("import (\n")
    assert [
        one.status
        for one in envhub_looks.preflight_findings(agent(command=["python", str(script)]))
    ] == ["missing"]
    assert (
        envhub_looks.preflight_findings(agent(command=["ls"]))
        == envhub_looks.preflight_findings(
            RunSettings.of_config({"domains": {"d": {"env": "frozenlake"}}})
        )
        == []
    )


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == "Bearer right"
        body = b'{"data": [{"id": "m"}]}' if allowed else b'{"error": {"message": "wrong key"}}'
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def judged(url: str, **args: Any) -> list[tuple[str, str]]:
    rewards = [{"name": "judge", "args": {"base_url": url, **args}}] * 2  # asked once
    found = rewardhub_looks.preflight_findings(
        RunSettings.of_config({"domains": {"d": {"env": "qa", "rewards": rewards}}})
    )
    return [(one.status, one.found) for one in found]


def test_a_judges_key_and_endpoint(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert judged(endpoint, api_key={"env": "JUDGE"}) == [
        (
            "missing",
            "domains.d.rewards.0.args.api_key needs the environment variable JUDGE, which is not set",
        )
    ]
    refused = "does not accept the key in the environment variable OPENAI_API_KEY: the endpoint answered 401: wrong key"
    assert judged(endpoint) == [("missing", f"{endpoint} {refused}")]
    monkeypatch.setenv("JUDGE", "right")
    assert judged(endpoint, api_key={"env": "JUDGE"}) == [("ok", f"{endpoint} answers")]
    ((status, said),) = judged("http://127.0.0.1:9/v1")
    assert (
        status,
        said.startswith("http://127.0.0.1:9/v1/models gave no answer in 1 tries: "),
    ) == ("warning", True)


def test_the_endpoint_of_the_engine_openai_must_be_there(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "right")

    def asked(url: str) -> list[str]:
        section = RolloutSection(engine="openai", policy="judge", engine_args={"base_url": url})
        settings = RunSettings(rollout=section)
        return [one.status for one in rollout_looks.preflight_findings(settings)]

    assert (asked(endpoint), asked("http://127.0.0.1:9/v1")) == (["ok"], ["missing"])
    assert rollout_looks.preflight_findings(RunSettings()) == []
