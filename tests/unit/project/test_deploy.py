"""The files of deploy/, Dockerfile and compose.yaml: their commands, ports, codes and users are
those of the code.

`make test-image` builds the images, runs them, and holds the files against published schemas.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.cli import parser as broker_parser
from broker.contract.permissions import JOINING
from broker.contract.streams import GENERATE, STREAMS, WEIGHTSYNC
from broker.settings.runspec import check_settings, load, validate
from broker.system.entry import EXIT_STOPPED, EXIT_USER_ERROR
from broker.telemetry.page_metrics import PAGE_METRICS
from envhub.cli import parser as envhub_parser
from rewardhub.cli import parser as rewardhub_parser
from rlearner.cli import _parse_arguments
from rollout.cli import parser as rollout_parser

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
UID, HEALTH_PORT = 10001, 9464
PARSERS = {
    "broker": broker_parser, "envhub": envhub_parser, "rewardhub": rewardhub_parser, "rollout-server": rollout_parser,
}  # fmt: skip
COMMANDS = {"rollout": "rollout-server", "envhub": "envhub", "rewardhub": "rewardhub"}


def objects(folder: str) -> list[dict[str, Any]]:
    files = sorted((KUBERNETES / folder).glob("*.yaml"))
    read = [one for file in files for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))]
    return [one for one in read if "kind" in one]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        one for one in objects("base") if one["kind"] == kind and one["metadata"]["name"] == name
    ]
    return found


def pods() -> dict[str, dict[str, Any]]:
    """The pod of each role."""
    found = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in objects("base") if "template" in
             one.get("spec", {})}  # fmt: skip
    assert found.keys() == {"learner", *JOINING}
    return found


def compose() -> dict[str, Any]:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    filled = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")
    loaded: dict[str, Any] = yaml.safe_load(filled)
    return loaded


def words(command: str | list[str]) -> list[str]:
    given = shlex.split(command) if isinstance(command, str) else command
    return [one.replace("$(POD_IP)", "10.0.0.9").replace("$(RL_RUN)", "main") for one in given]


def parse(command: list[str]) -> Any:
    """Parse a command line as its program does."""
    try:
        return (
            _parse_arguments(command[1:])
            if command[0] == "rlearner"
            else PARSERS[command[0]]().parse_args(command[1:])
        )
    except SystemExit:
        raise AssertionError(f"{shlex.join(command)}: not a command of {command[0]}") from None


def exporter() -> dict[str, Any]:
    """The pod of the component monitoring."""
    (found,) = [one for one in objects("components/monitoring") if one["kind"] == "Deployment"]
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


def commands() -> Iterator[tuple[str, list[str]]]:
    for role, pod in [*pods().items(), ("exporter", exporter())]:
        for container in pod["containers"]:
            yield f"kubernetes {role}", words(container["args"])
    for name, service in compose()["services"].items():
        if name != "invite":
            yield f"compose {name}", words(service["command"])
        else:
            for line in re.findall(r"rlearner invite[^)\n]*", service["command"][-1]):
                for role in JOINING:
                    yield (
                        f"compose {name}",
                        [one.replace("$role", role).replace("$", "") for one in shlex.split(line)],
                    )


# ------------------------------------------------------------------------------------------------------------
# commands


@pytest.mark.parametrize(
    ("where", "command"), [*commands()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_is_one_of_the_programs(where: str, command: list[str]) -> None:
    options = parse(command)
    if where != "compose invite":
        assert options.metrics_port == HEALTH_PORT


def test_each_role_runs_its_program_and_joins_by_its_own_token() -> None:
    for role, program in COMMANDS.items():
        pod, command = pods()[role], words(pods()[role]["containers"][0]["args"])
        assert command[0] == program
        assert parse(command).join == "/join/token"
        (volume,) = [one for one in pod["volumes"] if one["name"] == "join"]
        assert volume["secret"]["secretName"] == f"{role}-token"
        assert volume["secret"]["defaultMode"] & 0o037 == 0
        (service,) = [
            one
            for name, one in compose()["services"].items()
            if name != "invite" and words(one["command"])[0] == program
        ]
        assert parse(words(service["command"])).join == f"/join/{role}/token"
        tokens = [
            one.partition(":")[0] for one in service["volumes"] if "-token" in one or "keys" in one
        ]
        assert tokens == [f"{role}-token"], "it may see no other token, nor the folder of keys"


def test_a_file_that_names_no_command_is_found() -> None:
    with pytest.raises(AssertionError, match="not a command of envhub"):
        parse(["envhub", "--joint", "x"])


# -------------------------------------------------------------------------------------------------------------
# network


def policies() -> Any:
    spec = importlib.util.spec_from_file_location(
        "network_policies", KUBERNETES / "network_policies.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_network_policies_are_those_of_the_table_of_streams() -> None:
    written = (KUBERNETES / "base" / "network-policies.yaml").read_text(encoding="utf-8")
    assert written == policies().text(), "run python deploy/kubernetes/network_policies.py"


def allowed(source: str, target: str, port: int) -> bool:
    """Whether both ends of a connection allow it, as Kubernetes decides."""

    def covers(selector: dict[str, Any], role: str) -> bool:
        label = "nats" if role == "nats" else "rlearner"
        own = {"app.kubernetes.io/name": label, "app.kubernetes.io/component": role}
        return all(own.get(key) == value for key, value in selector.get("matchLabels", {}).items())

    def lists(role: str, other: str, direction: str, peer: str) -> bool:
        return any(
            port in [one["port"] for one in rule["ports"]]
            and any("podSelector" in one and "namespaceSelector" not in one and covers(one["podSelector"], other)
                    for one in rule[peer])
            for policy in objects("base")
            if policy["kind"] == "NetworkPolicy" and covers(policy["spec"]["podSelector"], role)
            for rule in policy["spec"].get(direction, [])
        )  # fmt: skip

    return lists(source, target, "egress", "to") and lists(target, source, "ingress", "from")


def test_who_may_connect_to_whom() -> None:
    roles = ["learner", "rollout", "envhub", "rewardhub", "operator", "nats"]
    found = {
        (one, other, port)
        for one in roles
        for other in roles
        for port in (4222, 6222, 7000, 7100, 8222, 9464)
        if allowed(one, other, port)
    }
    assert found == {
        *((role, "nats", 4222) for role in roles[:-1]),
        ("nats", "nats", 6222),
        ("envhub", "rollout", 7000),
        ("rollout", "learner", 7100),
    }


def test_the_ports_of_the_policies_are_those_that_processes_use() -> None:
    direct = policies().DIRECT
    bind = parse(words(pods()["rollout"]["containers"][0]["args"])).bind
    assert bind == f"10.0.0.9:{direct[GENERATE.name]}"
    for file in (KUBERNETES / "base" / "run.yaml", KUBERNETES / "example" / "run.yaml"):
        config = load(str(file), ["run.name=main"])
        train = check_settings(config).train
        assert (train.weights_port, train.weights_backend) == (direct[WEIGHTSYNC.name], "curve"), (
            file
        )
        assert config["broker"]["replicas"] == 3, file


# ----------------------------------------------------------------------------------------------------------
# kubernetes


def test_pods_need_nothing_of_the_node() -> None:
    for role, pod in [*pods().items(), ("exporter", exporter())]:
        assert pod["securityContext"]["runAsNonRoot"], role
        assert {pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {
            UID
        }, role
        assert pod["automountServiceAccountToken"] is False, role
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (
                True,
                False,
            ), role
            assert context["capabilities"] == {"drop": ["ALL"]}, role
            assert (
                container["resources"]["limits"]["memory"]
                == container["resources"]["requests"]["memory"]
            ), role
            assert "command" not in container, f"{role}: args keep tini as process 1"
            values = [one.get("value", "") for one in container.get("env", [])]
            assert not [
                value for value in values if value.startswith(("SU", "SO", "-----BEGIN"))
            ], role


def test_probes_ask_the_metrics_port() -> None:
    for role, pod in pods().items():
        (container,) = pod["containers"]
        assert {one["name"]: one["containerPort"] for one in container["ports"]}[
            "metrics"
        ] == HEALTH_PORT
        paths = {
            key: container[f"{key}Probe"]["httpGet"] for key in ("startup", "liveness", "readiness")
        }
        assert {one["port"] for one in paths.values()} == {"metrics"}
        assert [paths[key]["path"] for key in ("startup", "liveness", "readiness")] == [
            "/healthz"
        ] * 2 + ["/readyz"]
        assert parse(words(container["args"])).metrics_bind == "10.0.0.9", (
            f"{role}: the kubelet asks the pod's address"
        )


def test_the_job_goes_on_after_crashes_and_drained_nodes_and_ends_with_2_and_130() -> None:
    job = named("Job", "learner")["spec"]
    disruption, codes = job["podFailurePolicy"]["rules"]
    assert disruption == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert codes["action"] == "FailJob"
    assert codes["onExitCodes"]["values"] == [EXIT_USER_ERROR, EXIT_STOPPED]
    assert codes["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", (
        "Kubernetes requires it for podFailurePolicy"
    )
    assert job["podReplacementPolicy"] == "Failed"


def test_every_deployment_has_a_budget_for_disruptions_of_its_pods() -> None:
    for role in JOINING:
        deployment, budget = (
            named("Deployment", role)["spec"],
            named("PodDisruptionBudget", role)["spec"],
        )
        labels = deployment["template"]["metadata"]["labels"]
        assert deployment["selector"]["matchLabels"] == budget["selector"]["matchLabels"] == labels
        assert labels["app.kubernetes.io/component"] == role
        assert budget["maxUnavailable"] == 1


def test_hubs_follow_queues_that_the_exporter_reports() -> None:
    streams = {one.name: one for one in STREAMS}
    for scaled in objects("components/keda"):
        if scaled["kind"] == "ScaledObject":
            (trigger,) = scaled["spec"]["triggers"]
            found = re.fullmatch(
                r'sum\((\w+)\{run="main", stream="(\w+)"\}\)', trigger["metadata"]["query"]
            )
            assert found is not None
            assert "subject" in PAGE_METRICS[found[1].removeprefix("rlearner_")].labels
            assert streams[found[2]].reads(scaled["spec"]["scaleTargetRef"]["name"])


def test_every_file_of_the_base_is_a_resource() -> None:
    listed = yaml.safe_load(
        (KUBERNETES / "base" / "kustomization.yaml").read_text(encoding="utf-8")
    )
    files = {file.name for file in (KUBERNETES / "base").glob("*.yaml")} - {
        "kustomization.yaml",
        "run.yaml",
    }
    assert files == set(listed["resources"])


# -------------------------------------------------------------------------------------------------------------
# compose


def test_compose_restarts_crashes_and_not_user_errors() -> None:
    services = compose()["services"]
    for name, service in services.items():
        tini = service["entrypoint"]
        codes = [int(tini[place + 1]) for place, one in enumerate(tini) if one == "-e"]
        assert codes == ([] if name == "invite" else [EXIT_USER_ERROR, EXIT_STOPPED]), (
            "others wait for its success"
        )
        assert service["restart"] == "on-failure"
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "environment" not in service or not any(
            "SEED" in key or "TOKEN" in key for key in service["environment"]
        )
    volumes = {one.partition(":")[0] for service in services.values() for one in service["volumes"]}
    assert {one for one in volumes if not one.startswith(".")} == compose()["volumes"].keys()


def test_compose_starts_a_process_once_what_it_needs_is_there() -> None:
    services = compose()["services"]
    waits = {name: one.get("depends_on", {}) for name, one in services.items()}
    assert waits["learner"] == waits["invite"] == {"broker": {"condition": "service_healthy"}}
    joined = {"condition": "service_completed_successfully"}
    assert all(waits[name] == {"invite": joined} for name in ("server", "hub", "rewards"))
    address = services["broker"]["networks"]["run"]["ipv4_address"]
    assert parse(words(services["broker"]["command"])).bind == address
    assert services["learner"]["environment"]["RL_BROKER"] == f"tls://{address}:4222"
    sandbox = yaml.safe_load((ROOT / "compose.sandbox.yaml").read_text(encoding="utf-8"))
    assert sandbox["services"].keys() == {"hub", "rewards"} < services.keys()


def test_the_run_of_compose_is_valid() -> None:
    validate(load(str(ROOT / "deploy" / "containers" / "run.yaml"), ["run.name=main"]))


# --------------------------------------------------------------------------------------------------------------
# images


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_image_has_every_package_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mapped = project["tool"]["setuptools"]["package-dir"]
    packages = {*project["tool"]["importlinter"]["root_packages"], *mapped.values()}
    assert set(re.findall(r"^COPY (\w+) /src/\1$", dockerfile(), re.MULTILINE)) == packages
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in ignored if not line.startswith("#")) == "*"
    files = {"LICENSE", "README.md", "pyproject.toml", "setup.py", "requirements", "deploy"}
    assert {line[1:] for line in ignored if line.startswith("!")} == packages | files | {
        "deploy/containers"
    }


def test_images_are_built_from_a_base_that_the_user_pins() -> None:
    text = dockerfile()
    assert re.findall(r"^ARG BASE.*$", text, re.MULTILINE) == ["ARG BASE"]
    stages = {
        name: image for image, name in re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    }
    assert {stages.pop("wheels")} == {"scratch"}
    assert {image for image in stages.values() if image not in stages} == {"${BASE}"}
    for file in re.findall(r" requirements/([\w-]+\.txt)", text):
        assert (ROOT / "requirements" / file).is_file(), file


def test_every_target_ends_as_a_user_without_privileges() -> None:
    stages = re.split(r"^FROM ", dockerfile(), flags=re.MULTILINE)[1:]
    targets = {re.match(r"\S+ AS (\w+)", one)[1]: one for one in stages}  # type: ignore[index]
    assert {"cpu", "learner", "vllm", "sglang", "hub"} <= targets.keys()
    for name in ("base", "cpu", "learner", "vllm", "sglang", "hub"):
        assert re.findall(r"^USER (\S+)$", targets[name], re.MULTILINE)[-1] == f"{UID}:{UID}", name
        assert name == "base" or "org.opencontainers.image.title" in targets[name], name
    assert f"RL_HEALTH_PORT={HEALTH_PORT}" in targets["base"]
    assert "HEALTHCHECK" in targets["base"]
    assert 'ENTRYPOINT ["/usr/bin/tini", "--"]' in targets["base"]


def test_the_seccomp_profile_allows_what_bubblewrap_needs_and_denies_what_a_sandbox_must_not_reach() -> (
    None
):
    profile = json.loads(
        (ROOT / "deploy" / "containers" / "seccomp.json").read_text(encoding="utf-8")
    )
    (rule,) = profile["syscalls"]
    assert (profile["defaultAction"], rule["action"]) == ("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO")
    assert {"clone", "unshare", "mount", "umount2", "pivot_root", "sethostname"}.isdisjoint(
        rule["names"]
    )
    assert {
        "bpf",
        "keyctl",
        "kexec_load",
        "init_module",
        "ptrace",
        "userfaultfd",
        "open_by_handle_at",
    } <= {*rule["names"]}
    assert rule["names"] == sorted(set(rule["names"]))
