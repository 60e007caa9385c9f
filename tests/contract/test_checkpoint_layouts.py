"""Checkpoints of some ranks, loaded by others; models that no rank loads whole; a rank killed while
writing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import hf_models
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from backend_kit import kit, make, run
from checkpoint_kit import state_of
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from learner.backends.parts.part_file import part_name
from learner.checkpoints import checkpoint
from learner.config import AlgorithmSection
from rlearner_text.config import ModelSection

LOSSES = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")
EVERY = bool(os.environ.get("RLEARNER_CHECKPOINTS"))  # make test-checkpoints
WRITERS = [("fsdp2", 2)]
READERS = [("torch", 1), ("ddp", 2)]
if EVERY:
    READERS = [("torch", 1), *((name, ranks) for name in ("ddp", "fsdp2") for ranks in (2, 3))]
    READERS += [(f"deepspeed-{stage}", ranks) for stage in (1, 2, 3) for ranks in (2, 3)]
    READERS += [("megatron", 3), ("megatron-tp2", 2), ("megatron-pp2", 2)]
    WRITERS = [
        ("ddp", 4),
        ("fsdp2", 4),
        *((f"deepspeed-{stage}", 4) for stage in (1, 2, 3)),
        ("megatron-tp2", 4),
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.save_model(tmp_path_factory.mktemp("model"), kv_heads=2)


def losses(metrics: list[dict[str, float]]) -> list[list[float]]:
    return [[one[name] for name in LOSSES] for one in metrics]


@pytest.mark.timeout(1200 if EVERY else 120)
@pytest.mark.parametrize(("writer", "ranks"), WRITERS)
def test_any_number_of_ranks_and_any_backend_continues(
    path: str, tmp_path: Path, writer: str, ranks: int
) -> None:
    first = make(writer, path, ranks=ranks)
    try:
        run(first, range(2))
        # Without weights in Hugging Face format: these come from the parts, too.
        written = checkpoint.write_checkpoint(tmp_path, first, {"version": 2}, 1, hf_max_gib=0)
        expected = losses(run(first, range(2, 5)))
        weights = {name: tensor.clone() for name, tensor in first.weights().items()}
    finally:
        first.close()
    made = checkpoint.read_checkpoint(written)
    assert [Path(part.path).name for part in made.parts] == [
        part_name(rank, ranks) for rank in range(ranks)
    ]
    assert not list(written.glob("*.safetensors"))
    sizes = [part.size for part in made.parts]
    assert max(sizes) < 1.2 * sum(sizes) / ranks + 6000  # equal parts, but for the random numbers
    for reader, others in [(writer, ranks), *READERS]:
        again = make(reader, str(written), ranks=others)
        try:
            checkpoint.load_state(made, again)
            found = losses(run(again, range(2, 5)))
            if (reader, others) == (writer, ranks):
                assert found == expected
                assert all(
                    torch.equal(tensor, weights[name]) for name, tensor in again.weights().items()
                )
            np.testing.assert_allclose(
                found, expected, rtol=1e-5, atol=1e-5, err_msg=f"{reader} on {others}"
            )
        finally:
            again.close()


def test_the_first_format_still_loads(path: str, tmp_path: Path) -> None:
    first = make("torch", path)
    run(first, range(2))
    folder = tmp_path / "step-000002"
    first.save(folder)
    state = {
        name: tensor for name, tensor in state_of(first).items() if not name.startswith("model.")
    }
    (folder / "learner").mkdir()
    save_file(state, folder / "learner" / "state.safetensors")
    body = {"format": 1, "step": 2, "epoch": 1, "ledger": {"version": 2}}
    (folder / "learner" / "learner.json").write_text(json.dumps(body))
    made = checkpoint.newest_checkpoint(tmp_path)
    assert made is not None
    again = make("ddp", str(made.path))
    try:
        checkpoint.load_state(made, again)
        found, expected = run(again, range(2, 4)), run(first, range(2, 4))
        np.testing.assert_allclose(losses(found), losses(expected), rtol=1e-5, atol=1e-5)
    finally:
        again.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_parts(path: str, tmp_path: Path) -> None:
    backend = make("ddp", path)
    try:
        run(backend, range(1))
        state = state_of(backend)
        parts = backend.snapshot().write(tmp_path)
    finally:
        backend.close()
    assert len(parts) == 2
    name = "optimizer.exp_avg.model.embed_tokens.weight"
    into = {name: torch.empty(state[name].numel())}
    dcp.load(into, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert state[name].abs().max() > 0
    assert torch.equal(into[name].view_as(state[name]), state[name])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"] if EVERY else ["qwen3"])
@pytest.mark.parametrize("variant", ["fsdp2", "deepspeed-3"] if EVERY else ["fsdp2"])
def test_ranks_that_read_parts_compute_as_the_whole_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, variant: str, name: str
) -> None:
    caplog.set_level(logging.INFO)
    folder = hf_models.make(name, tmp_path)
    ids = np.arange(2, 40)
    expected = hf_models.logprobs(hf_models.load(folder), [2], [int(one) for one in ids[1:]])
    backend = make(variant, str(folder), ranks=2)
    try:
        assert "every rank loads the whole model" not in caplog.text
        torch.testing.assert_close(
            backend.logprobs(ids), expected, rtol=0, atol=0 if variant == "fsdp2" else 1e-6
        )
    finally:
        backend.close()


def test_a_model_that_transformers_converts_is_loaded_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = hf_models.make("mixtral", tmp_path)
    ids = np.arange(2, 30)
    expected = hf_models.logprobs(hf_models.load(folder), [2], [int(one) for one in ids[1:]])
    backend = make("fsdp2", str(folder), ranks=2)
    try:
        line = "every rank loads the whole model: transformers stores its weights under other names"
        assert line in caplog.text
        torch.testing.assert_close(backend.logprobs(ids), expected, rtol=0, atol=1e-6)
        written = checkpoint.write_checkpoint(tmp_path / "checkpoints", backend, {"version": 0}, 1)
    finally:
        backend.close()
    again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).eval()
    torch.testing.assert_close(
        hf_models.logprobs(again, [2], [int(one) for one in ids[1:]]), expected, rtol=0, atol=1e-6
    )


KILLED = """
    import os, signal, sys, threading, time
    from pathlib import Path
    sys.path[:0] = ["tests/kit"]
    from backend_kit import make, run
    from learner.backends import staged_part
    from learner.backends.parts import writing
    from learner.checkpoints import checkpoint

    folder = Path(sys.argv[2])
    backend = make("ddp", sys.argv[1])
    run(backend, range(1))
    checkpoint.write_checkpoint(folder, backend, {"version": 1}, 1)
    run(backend, range(1, 2))
    own = staged_part.write_part

    def slow(path, slices):  # rank 0 is still writing when rank 1 dies
        os.kill(backend._ranks.leader.ranks.processes[0].pid, signal.SIGKILL)
        time.sleep(20)
        return own(path, slices)

    staged_part.write_part = slow
    checkpoint.write_checkpoint(folder, backend, {"version": 2}, 1)
"""


@pytest.mark.timeout(120)
def test_a_rank_killed_while_writing_leaves_the_checkpoint_before(
    path: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), path, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1, ended.stderr
    assert f"ended by {signal.SIGKILL.name}" in ended.stderr
    assert [one.name for one in checkpoint.list_checkpoints(folder)] == ["step-000001"]
    assert list(folder.glob(".step-000002.*"))  # what was half written, under a hidden name
    made = checkpoint.newest_checkpoint(folder)
    assert made is not None
    alone = make("torch", str(made.path))
    checkpoint.load_state(made, alone)
    assert alone.version == 1


@pytest.mark.timeout(120)
def test_a_critic_and_a_reference_next_to_a_divided_policy(path: str, tmp_path: Path) -> None:
    algorithm = AlgorithmSection.model_validate(
        {"adv_estimator": "gae", "critic": {"enabled": True}, "kl_coef": 0.1}
    )
    alone = make("torch", path, algorithm=algorithm, model=ModelSection(dtype="bfloat16"))
    checkpoint.write_checkpoint(tmp_path, alone, {"version": 0}, 1, hf_max_gib=0)
    made = checkpoint.newest_checkpoint(tmp_path)
    assert made is not None
    pair = make(
        "fsdp2",
        str(made.path),
        algorithm=algorithm,
        model=ModelSection(dtype="bfloat16"),
        ref_path=path,
    )
    try:
        checkpoint.load_state(made, pair)
        found, expected = state_of(pair), state_of(alone)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert next(iter(pair.weights().values())).dtype == torch.bfloat16
    finally:
        pair.close()
