"""rlearner start --gpus: a rank for each GPU, and what is refused."""

import os
import subprocess
import sys

import pytest

from broker.errors import ConfigError, UserError
from broker.system import gpus as broker_gpus
from broker.system.devices import host_name
from learner import gpu_selection

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index) printf '0\\n1\\n2\\n3\\n' ;;
  --query-gpu=index,uuid) printf '0, GPU-aa\\n1, GPU-bb\\n2, GPU-cc\\n3, GPU-dd\\n' ;;
  --query-compute-apps=*) cat "$(dirname "$0")/apps" ;;
esac
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Four GPUs; what is written to the file that it returns are their users, as nvidia-smi lists
    them.
    """
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "apps").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    return tmp_path / "apps"


def test_each_gpu_gets_a_rank(machine):
    config = {"train": {"backend": "fsdp2", "lr": 1.0}, "run": {"name": "x"}}
    assert gpu_selection.assign_gpus(config, "1-3", share=False) == {
        "train": {"backend": "fsdp2", "lr": 1.0, "device": "cuda", "ranks": 3},
        "run": {"name": "x"},
    }
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == (
        "1,2,3",
        "PCI_BUS_ID",
    )
    assert broker_gpus.existing() == [0, 1, 2, 3]


def test_cpu_keeps_the_ranks_and_auto_keeps_all(machine):
    assert gpu_selection.assign_gpus({"train": {"ranks": 2}}, "cpu", share=False) == {
        "train": {"ranks": 2, "device": "cpu"}
    }
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert gpu_selection.assign_gpus({"train": {"ranks": 2}}, "auto", share=False) == {
        "train": {"ranks": 2}
    }
    assert gpu_selection.assign_gpus({}, "0", share=False) == {
        "train": {"device": "cuda", "ranks": 1}
    }


def test_what_does_not_fit(machine):
    with pytest.raises(
        UserError, match=r"^--gpus 2-4: GPU 4 not on this machine; it has 0, 1, 2, 3$"
    ):
        gpu_selection.assign_gpus({}, "2-4", share=False)
    with pytest.raises(
        ConfigError,
        match=r"^train.ranks: 2 is not allowed; 4 with --gpus 0-3, or nothing: each GPU gets a rank$",
    ):
        gpu_selection.assign_gpus({"train": {"ranks": 2}}, "0-3", share=False)
    with pytest.raises(
        ConfigError,
        match=r"^train.device: 'cuda:1' is not allowed; cuda with --gpus 0, or nothing$",
    ):
        gpu_selection.assign_gpus({"train": {"device": "cuda:1"}}, "0", share=False)


def test_a_taken_gpu_is_named_with_who_takes_it(machine, monkeypatch):
    monkeypatch.setattr(gpu_selection, "POLL_S", 0.01)
    machine.write_text("GPU-cc, 4711, /usr/bin/python3\nGPU-cc, 4712, python3\nGPU-aa, 1, vllm\n")
    assert gpu_selection.gpu_users() == {
        0: ["pid 1 (vllm)"],
        2: ["pid 4711 (python3)", "pid 4712 (python3)"],
    }
    line = (
        r"^--gpus 1-3: GPU 2 is taken by pid 4711 \(python3\), pid 4712 \(python3\); end that, "
        r"choose others, or add --share-gpus$"
    )
    with pytest.raises(UserError, match=line):
        gpu_selection.refuse_taken([1, 2, 3], "1-3", wait_s=0.02)
    gpu_selection.refuse_taken([1, 3], "1,3", wait_s=0)
    assert gpu_selection.assign_gpus({}, "0", share=True)["train"]["ranks"] == 1
    answers = iter([{2: ["pid 1 (x)"]}, {}])  # one that is about to end
    gpu_selection.refuse_taken([2], "2", lambda: next(answers), wait_s=5)


def test_any_name_of_a_process_that_uses_a_gpu(machine):
    machine.write_bytes(b"GPU-aa, 7, /opt/a,b/tr\xe4ner\nGPU-bb, 8, [Not Found]\nGPU-xx, 9, x\n")
    assert gpu_selection.gpu_users() == {0: ["pid 7 (tr\ufffdner)"], 1: ["pid 8 ([Not Found])"]}


def test_the_command_refuses_in_one_line(tmp_path, machine):
    config = tmp_path / "run.yaml"
    config.write_text("domains: {lake: {env: frozenlake}}\n")
    command = [sys.executable, "-m", "rlearner.cli", "start", str(config), "--gpus"]
    for spec, rest, line in (
        ("0,9", [], "error: --gpus 0,9: GPU 9 not on this machine; it has 0, 1, 2, 3\n"),
        (
            "0-1",
            [],
            "error: train.ranks: 2 is not allowed; 1 with train.backend torch; more with ddp, fsdp2, deepspeed or "
            "megatron\n",
        ),
        (
            "x",
            [],
            "error: --gpus: expected cpu, auto, a list such as 0,2 or a range such as 4-7, got 'x'\n",
        ),
    ):
        done = subprocess.run(
            [*command, spec, *rest], capture_output=True, text=True, check=False, timeout=100
        )
        assert (done.returncode, done.stderr) == (2, line)


def test_shared_gpus_hold_no_weights_that_wait_for_servers(machine):
    machine.write_text("GPU-bb, 4711, /usr/bin/python\n")  # a rollout server
    host = {"weights_backend": "shared", "weights_stripes": "never"}
    assert gpu_selection.assign_gpus({}, "0-1", share=True) == {
        "train": {**host, "device": "cuda", "ranks": 2}
    }
    assert gpu_selection.assign_gpus({}, "auto", share=True) == {"train": host}
    assert gpu_selection.assign_gpus(
        {"train": {"weights_backend": "curve"}}, "auto", share=True
    ) == {"train": {**host, "weights_backend": "curve"}}
    with pytest.raises(
        ConfigError,
        match=r"^train\.weights_stripes: 'always' is not allowed; never with --share-gpus",
    ):
        gpu_selection.assign_gpus({"train": {"weights_stripes": "always"}}, "0", share=True)
    for carrier in ("nccl", "ipc"):
        with pytest.raises(
            ConfigError,
            match=rf"^train.weights_backend: '{carrier}' is not allowed; shared, gloo or",
        ):
            gpu_selection.assign_gpus({"train": {"weights_backend": carrier}}, "0", share=True)


def test_devices_are_those_of_the_ranks(machine):
    assert gpu_selection.shared_devices("cuda", "1-2") == [
        "GPU-bb",
        "GPU-cc",
    ]
    # none is visible
    assert gpu_selection.shared_devices("auto", "auto") == [host_name()]
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    assert gpu_selection.shared_devices("auto", "auto") == ["GPU-dd"]
    assert gpu_selection.shared_devices("cpu", "auto") == [host_name()]
