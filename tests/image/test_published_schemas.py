"""deploy/kubernetes and deploy/skypilot against published schemas, rendered by kubectl's own
kustomize.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from image_kit import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
CUSTOM = ("keda.sh/v1alpha1", "monitoring.coreos.com/v1", "cert-manager.io/v1")


def tool(name: str, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(os.environ["RL_DEPLOY"]) / name), *words]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, check=False
    )


def rendered(folder: str) -> list[dict[str, Any]]:
    ended = tool("kubectl", "kustomize", str(KUBERNETES / folder))
    assert ended.returncode == 0, ended.stderr
    return list(yaml.safe_load_all(ended.stdout))


def validate(objects: list[dict[str, Any]], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    return tool("kubernetes-validate", "--strict", str(file))


def validate_custom(objects: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    script = (Path(__file__).parent / "published_schemas.mjs").read_text(encoding="utf-8")
    return subprocess.run(
        ["node", "--input-type=module", "--eval", script], cwd=Path(os.environ["RL_DEPLOY"]).parent,
        input=json.dumps(objects), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("folder", ["base", "example"])
def test_everything_kustomize_renders_is_valid(folder: str, tmp_path: Path) -> None:
    objects = rendered(folder)
    plain = [one for one in objects if one["apiVersion"] not in CUSTOM]
    ended = validate(plain, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count("passed for resource") == len(plain) >= 19
    custom = [one for one in objects if one["apiVersion"] in CUSTOM]
    found = validate_custom(custom)
    assert found.returncode == 0, found.stdout
    kinds = sorted(one["kind"] for one in custom)
    assert kinds == ([] if folder == "base" else ["PodMonitor", "ScaledObject", "ScaledObject"])
    assert {one["metadata"].get("namespace", "rlearner") for one in objects} == {"rlearner"}


def test_the_certificates_of_nats_are_valid() -> None:
    objects = list(yaml.safe_load_all((KUBERNETES / "nats" / "certificate.yaml").read_text()))
    found = validate_custom(objects)
    assert found.stdout.splitlines() == [
        f"{one['kind']} {one['metadata']['name']}: ok" for one in objects
    ]


def test_a_wrong_object_is_found(tmp_path: Path) -> None:
    (job,) = [one for one in rendered("base") if one["kind"] == "Job"]
    job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] = ["two"]
    assert validate([job], tmp_path).returncode == 1
    (scaled, _) = [one for one in rendered("example") if one["kind"] == "ScaledObject"]
    scaled["spec"]["maxReplicaCount"] = "many"
    assert "maxReplicaCount must be integer" in validate_custom([scaled]).stdout


def test_the_components_change_what_they_say() -> None:
    objects = {(one["kind"], one["metadata"]["name"]): one for one in rendered("example")}
    kinds = ("Job", "Deployment")
    pods = {
        name: one["spec"]["template"]["spec"]
        for (kind, name), one in objects.items()
        if kind in kinds
    }
    gpus = {
        name
        for name, pod in pods.items()
        if pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == 1
    }
    assert gpus == {"learner", "rollout"}
    sandboxed = {
        name
        for name, pod in pods.items()
        if pod["containers"][0]["securityContext"].get("procMount")
    }
    assert (
        sandboxed
        == {"envhub", "rewardhub"}
        == {name for name, pod in pods.items() if pod.get("hostUsers") is False}
    )
    assert "--engine=vllm" in pods["rollout"]["containers"][0]["args"]
    assert {pod["containers"][0]["image"].split(":")[0] for pod in pods.values()} == {
        "registry.example.com/rlearner"
    }
    assert "configs/frozenlake.yaml" in objects["ConfigMap", "run"]["data"]["run.yaml"]


def test_skypilot_takes_its_example(tmp_path: Path) -> None:
    code = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1])\n"
    code += "print(task.name, [*task.resources][0].job_recovery)"
    environment = os.environ | {
        "HOME": str(tmp_path),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "HF_TOKEN": "x",
    }
    python = os.environ["RL_SKYPILOT_PYTHON"]
    file = ROOT / "deploy" / "skypilot" / "run.yaml"
    ended = subprocess.run(
        [python, "-c", code, str(file)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.startswith("rlearner {")
    assert (
        "'max_restarts_on_errors': 0, 'recover_on_exit_codes': [1, 134, 137, 139]" in ended.stdout
    )
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(file.read_text().replace("use_spot", "use_spots"))
    refused = subprocess.run(
        [python, "-c", code, str(wrong)], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "use_spots" in refused.stderr
