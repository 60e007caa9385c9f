"""compose.yaml as it stands: a run in six containers on a network of their own, and a hub that is
killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_kit import ROOT, Containers

RUN = """\
inherit: configs/frozenlake.yaml
train: {weights_backend: curve, steps: 6, groups_per_step: 4}
warm_start: {steps: 10, episodes: 64}
eval: {every_steps: 6, tasks: 16, baseline: ""}
checkpoint: {every_steps: 1}
envhub: {n: 32}
"""


class Compose:
    """podman-compose. It starts services in the order that it is told, because podman 4 cannot wait
    for health.
    """

    def __init__(self, containers: Containers, image: str, config: Path) -> None:
        self.containers = containers
        containers.environment |= {"RL_IMAGE": image, "RL_CONFIG": str(config)}
        self.program = Path(os.environ["RL_DEPLOY"]) / "podman-compose"

    def call(self, *words: str) -> str:
        return str(self.containers.call(str(self.program), "--in-pod=0", *words, cwd=ROOT).stdout)

    def up(self, service: str) -> str:
        self.call("up", "--detach", "--no-deps", service)
        return f"rlearner_{service}_1"

    def pid(self, container: str, program: str) -> int:
        """The process of a container as this machine sees it, not that of tini."""
        lines = self.containers.podman("top", container, "hpid", "args").splitlines()[1:]
        found = [int(one.split()[0]) for one in lines if program in one and "tini" not in one]
        return min(found)


@pytest.fixture
def compose(containers: Containers, cpu: str, tmp_path: Path) -> Iterator[Compose]:
    config = tmp_path / "run.yaml"
    config.write_text(RUN)
    config.chmod(0o644)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    made = Compose(containers, cpu, config)
    try:
        yield made
    finally:
        made.call("down", "--volumes")


def test_a_run_trains_and_a_killed_hub_comes_back(
    compose: Compose, containers: Containers, cpu: str
) -> None:
    broker = compose.up("broker")
    healthy = ("podman", "exec", broker, "rlearner-healthy", "readyz")
    containers.until(
        lambda: containers.call(*healthy, check=False).returncode == 0, "the broker is ready"
    )
    invite = compose.up("invite")
    assert containers.ended(invite) == 0, containers.logs(invite)
    containers.podman("start", invite)  # it finds the tokens of the first time, and keeps them
    assert containers.ended(invite) == 0, containers.logs(invite)
    assert len(re.findall(r"^/join/\w+/token: ", containers.logs(invite), re.MULTILINE)) == 3
    server, hub, rewards, learner = (
        compose.up(one) for one in ("server", "hub", "rewards", "learner")
    )
    containers.until(lambda: "step 2 of 6" in containers.logs(learner), "two steps", 200)
    os.kill(compose.pid(hub, "envhub"), signal.SIGKILL)
    assert containers.ended(learner) == 0, containers.logs(learner)
    assert containers.logs(hub).count("joined run main") == 2, "the restart policy started it again"
    for one in (server, hub, rewards):
        assert containers.ended(one, 60) == 0, containers.logs(one)
    audit = (
        "run", "--rm", "--network", "rlearner_run", "-e", "XDG_STATE_HOME=/keys/state", "-v", "rlearner_keys:/keys",
        "-v", "rlearner_runs:/var/lib/rlearner", cpu, "rlearner", "audit", "main",
    )  # fmt: skip
    said = containers.podman(*audit)
    assert said.splitlines()[-1] == "ok"
    assert "6 steps compared" in said
    seen = containers.podman(
        "run",
        "--rm",
        "-v",
        "rlearner_envhub-token:/join/envhub:ro",
        cpu,
        "ls",
        "-l",
        "/join/envhub",
    )
    assert re.search(r"^-rw------- 1 rlearner rlearner .* token$", seen, re.MULTILINE)
    assert not re.search(r"S[UOA][A-Z2-7]{56}", containers.logs(hub) + containers.logs(invite)), (
        "no seed in a log"
    )


def test_compose_follows_the_published_schema() -> None:
    check = [
        str(Path(os.environ["RL_DEPLOY"]) / "check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
    ]
    files = [str(ROOT / "compose.yaml"), str(ROOT / "compose.sandbox.yaml")]
    ended = subprocess.run([*check, *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_a_wrong_compose_file_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((ROOT / "compose.yaml").read_text().replace("read_only: true", "read_only: 3"))
    check = [
        str(Path(os.environ["RL_DEPLOY"]) / "check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
    ]
    assert subprocess.run([*check, str(wrong)], capture_output=True, check=False).returncode == 1
