"""The targets hub and cpu, built here on a Debian of debootstrap and run without privileges."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml
from image_kit import LOCKED, ROOT, VERSION, Containers

from broker.cli import parser as broker_parser
from broker.identity import tokens
from broker.identity.key_folder import KeyFolder
from broker.operations.permissions import show_permissions

MIB = 1 << 20
LAKE = (
    "run.name=lake", "warm_start.steps=10", "warm_start.episodes=64", "eval.tasks=16", "train.groups_per_step=4",
    "checkpoint.every_steps=2", "envhub.n=32",
)  # fmt: skip
LEARNER = ROOT / "deploy" / "kubernetes" / "base" / "learner.yaml"
PROFILE = f"seccomp={ROOT}/deploy/containers/seccomp.json"
IN_SANDBOX = "from rlearner_sandbox import Sandbox; print(Sandbox().run('import os; print(6 * 7, os.getuid())'))"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of the image's user."""
    made = tmp_path / "home"
    made.mkdir(mode=0o700)
    os.chown(made, 10001, 10001)
    tmp_path.chmod(0o755)
    return made


@pytest.mark.parametrize(("target", "most_mib"), [("hub", 900), ("cpu", 2000)])
def test_an_image_is_small_and_runs_as_nobody_special(
    target: str, most_mib: int, containers: Containers, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue(target)
    found = containers.inspect("image", image)
    config = found["Config"]
    assert (config["User"], config["Entrypoint"]) == ("10001:10001", ["/usr/bin/tini", "--"])
    # podman 5 or 4
    health = config.get("Healthcheck") or found.get("Healthcheck") or found.get("HealthCheck")
    assert health["Test"] == ["CMD", "rlearner-healthy"]
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    layers = [
        int(one["size"])
        for one in json.loads(containers.podman("history", "--format", "json", image))
    ]
    print(f"\n{target}: {found['Size'] / MIB:.0f} MiB, layers {[round(one / MIB, 1) for one in layers if one]}, "
          f"built in {containers.seconds[target]:.0f} s")  # fmt: skip
    assert found["Size"] < most_mib * MIB
    assert layers[3] < 20 * MIB, "our own code, below USER, ARG and LABEL"


@pytest.mark.parametrize("target", ["hub", "cpu"])
def test_an_image_holds_no_secret_cache_or_tool_of_its_build(
    target: str, containers: Containers, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue(target)
    find = (
        "find",
        "/",
        "-xdev",
        "-not",
        "-path",
        "/proc/*",
        "-not",
        "-path",
        "/sys/*",
        "-not",
        "-path",
        "/usr/share/python-wheels/*",
    )
    files = containers.podman(
        "run", "--rm", "--user", "0:0", "--entrypoint", find[0], image, *find[1:]
    ).splitlines()
    assert "/opt/rlearner/bin/envhub" in files
    own = [
        one
        for one in files
        if re.search(r"/(tests|bench|runs|\.git|\.venv[^/]*|Makefile)(/|$)", one)
    ]
    assert [one for one in own if re.match(r"/(opt/rlearner/[^l]|src|var/lib/rlearner)", one)] == []
    forbidden = r"^/(pip|wheels|src|dist|build|root/\.cache|run/secrets/.+|var/lib/apt/lists/.+|var/cache/apt/.+)$|"
    forbidden += r"^/(tmp|var/tmp)/.+|\.(key|token|whl)$|/ca\.pem$|/\.env"
    assert [one for one in files if re.search(forbidden, one)] == []
    assert not any(
        re.fullmatch(r"/opt/rlearner/lib/python3\.\d+/site-packages/pip", one) for one in files
    )
    settings = containers.podman(
        "run", "--rm", "--entrypoint", "sh", image, "-c", "cat /etc/pip.conf 2>&1", check=False
    )
    assert settings == "" or "No such file" in settings


def test_a_run_trains_without_root_in_a_read_only_container(
    containers: Containers, cpu: str, home: Path
) -> None:
    up = ("rlearner", "up", "configs/frozenlake.yaml", *LAKE, "train.steps=2", "eval.every_steps=2")
    started = time.monotonic()
    container = containers.start(cpu, *up, options=("-v", f"{home}:/var/lib/rlearner"))
    code, said = containers.ended(container), containers.logs(container)
    print(f"\nlake, 2 steps: {time.monotonic() - started:.0f} s")
    assert code == 0, said
    assert "8 issued = 8 trained + 0 filtered + 0 dropped + 0 dead + 0 open" in said
    run = home / "runs" / "lake"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    assert (run / "checkpoints" / "step-000002").is_dir()
    assert {one.lstat().st_uid for one in home.rglob("*")} == {10001}


def test_sigterm_drains_a_run_and_its_exit_code_comes_through(
    containers: Containers, cpu: str, home: Path
) -> None:
    up = (
        "rlearner",
        "up",
        "configs/frozenlake.yaml",
        *LAKE,
        "train.steps=1000",
        "eval.every_steps=1000",
    )
    container = containers.start(cpu, *up, options=("-v", f"{home}:/var/lib/rlearner"))
    metrics = home / "runs" / "lake" / "metrics.jsonl"
    containers.until(
        lambda: metrics.is_file() and metrics.read_text().count("\n") >= 1, "the first step"
    )
    containers.podman("kill", "--signal", "TERM", container)
    assert containers.ended(container) == 130
    steps = metrics.read_text().count("\n")
    kept = sorted((home / "runs" / "lake" / "checkpoints").glob("step-*"))
    assert kept[-1].name == f"step-{steps:06d}", "the drain writes a checkpoint of the last step"


def test_a_signal_ends_a_process_that_has_not_begun(containers: Containers, cpu: str) -> None:
    container, started = (
        containers.start(cpu, "rlearner", "start", "configs/quickstart.yaml"),
        time.monotonic(),
    )
    containers.podman("kill", "--signal", "TERM", container)
    assert containers.ended(container) in (128 + signal.SIGTERM, 130)
    assert time.monotonic() - started < 8, (
        "process 1 without a handler would ignore it until Docker kills it"
    )


def test_an_error_of_the_user_is_one_line_and_exit_code_2(containers: Containers, hub: str) -> None:
    ended = containers.call(
        "podman", "run", "--rm", *LOCKED, hub, "envhub", "--join", "/join/envhub/token", check=False
    )
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error")]
    assert lines == ["error: --join /join/envhub/token: No such file or directory"]
    compose = ("--entrypoint", '["/usr/bin/tini", "-e", "2", "-e", "130", "--"]')
    # exit code 0
    containers.podman(
        "run", "--rm", *LOCKED, *compose, hub, "envhub", "--join", "/join/envhub/token"
    )


def test_secrets_as_kubernetes_mounts_them_are_used(
    containers: Containers, hub: str, tmp_path: Path
) -> None:
    """Files of root that the pod's group may read: a token as it is, keys after the init container
    has copied them.
    """
    keys, secret = tmp_path / "keys", tmp_path / "secret"
    show_permissions(
        broker_parser().parse_args(["permissions", "--run", "main", "--keys", str(keys)])
    )
    secret.mkdir()
    made = tokens.make_join_token(
        KeyFolder(keys), "nats://10.255.255.1:4222", "envhub", "main", expires_s=600
    )
    tokens.write_token(made, secret / "token")
    for key in (keys / "operator.key", keys / "main" / "learner.key", keys / "main" / "owner.key"):
        (secret / key.name).write_bytes(key.read_bytes())
    for file in secret.iterdir():
        os.chown(file, 0, 10001)
        file.chmod(0o440)
    for folder in (secret, tmp_path):
        folder.chmod(0o755)
    (job,) = [one for one in yaml.safe_load_all(LEARNER.read_text()) if one["kind"] == "Job"]
    (init,) = job["spec"]["template"]["spec"]["initContainers"]
    script = f"{init['args'][-1]}; cd /; exec rlearner invited --broker nats://10.255.255.1:4222"
    options = ("-v", f"{secret}:/secret:ro", "-v", f"{secret}:/join:ro", "-v", "/keys")
    told = ("-e", "RL_RUN=main", "-e", "RL_BROKER_KEYS=/keys/folder")
    listed = containers.call(
        "podman", "run", "--rm", *LOCKED, *options, *told, hub, *init["args"][:-1], script
    )
    assert "0 tokens" in listed.stderr, "it knows the folder, where no token is noted"
    join = ("envhub", "--join", "/join/token", "--insecure", "--connect-deadline", "3")
    joined = containers.call("podman", "run", "--rm", *LOCKED, *options, hub, *join, check=False)
    assert "no broker answered at nats://10.255.255.1:4222" in joined.stderr, "the token was read"


def test_the_health_check_sees_a_process_that_hangs(containers: Containers, cpu: str) -> None:
    container = containers.start(
        cpu, "broker", "serve", "--metrics-port", "9464", options=("-v", "/var/lib/rlearner")
    )
    asked = ("podman", "exec", container, "rlearner-healthy")
    containers.until(
        lambda: containers.call(*asked, "readyz", check=False).returncode == 0,
        "the broker is ready",
    )
    assert containers.call(*asked).stdout.strip() == "ok"
    pids = containers.podman("top", container, "hpid", "args").splitlines()
    (pid,) = [
        int(line.split()[0]) for line in pids if "broker serve" in line and "tini" not in line
    ]
    os.kill(pid, signal.SIGSTOP)
    hung = containers.call(*asked, check=False)
    assert hung.returncode == 1
    assert "http://127.0.0.1:9464/healthz" in hung.stderr
    os.kill(pid, signal.SIGCONT)
    containers.until(
        lambda: containers.call(*asked, check=False).returncode == 0, "it is healthy again"
    )
    containers.podman("kill", "--signal", "TERM", container)
    assert containers.ended(container) == 0


def test_hubs_need_no_torch(containers: Containers, hub: str) -> None:
    code = (
        "import sys, envhub.service, rewardhub.service, rlearner.cli; print('torch' in sys.modules)"
    )
    assert containers.podman("run", "--rm", *LOCKED, hub, "python", "-c", code).strip() == "False"
    missing = containers.call(
        "podman", "run", "--rm", *LOCKED, hub, "python", "-c", "import torch", check=False
    )
    assert "No module named 'torch'" in missing.stderr


def test_the_sandbox_works_with_the_profile_and_an_unmasked_proc_alone(
    containers: Containers, hub: str
) -> None:
    run = ("podman", "run", "--rm", *LOCKED)
    allowed = containers.call(
        *run,
        "--security-opt",
        PROFILE,
        "--security-opt",
        "unmask=ALL",
        hub,
        "python",
        "-c",
        IN_SANDBOX,
    )
    assert "42 10001" in allowed.stdout
    for options in ((), ("--security-opt", PROFILE), ("--security-opt", "unmask=ALL")):
        refused = containers.call(*run, *options, hub, "python", "-c", IN_SANDBOX, check=False)
        assert refused.returncode == 1, options
        assert "NoSandbox: bubblewrap does not work here" in refused.stderr, options
