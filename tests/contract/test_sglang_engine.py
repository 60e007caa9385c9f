"""The engine sglang against the double of SGLang's API: what it sends, versions of tokens, updates in flight, its child's end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_kit import PROMPT, TINY, ask
from safetensors import SafetensorError
from sglang_double import Double, double
from waits import LONG_S, until

from broker import wire
from broker.errors import ConfigError, TransferFailed, UserError
from broker.weights.adapter import Merged, factor_shapes
from broker.weights.probe import make_probe
from rollout.config import RolloutSection
from rollout.engines import sglang_requests, sglang_weights
from rollout.engines.base import NO_VERSION, EngineConfig
from rollout.engines.hf_model import SlotModel
from rollout.engines.sglang import SGLangEngine
from rollout.engines.sglang_api import Refused, as_sampled, first_of, generate_body, read_leg, read_scores, read_top
from rollout.engines.sglang_args import SGLangArgs
from rollout.engines.sglang_child import copies, launcher, options
from rollout.engines.sglang_weights import parted, place, shapes_of, sweep
from text.tiny import build_tiny
from text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("sglang") / "model", TINY))


@pytest.fixture(scope="module")
def trained(model_path: str) -> SlotModel:
    """The model as a trainer holds it."""
    return SlotModel(EngineConfig(model_path, RolloutSection(max_context_tokens=400, max_running=2), device="cpu"))


def config(model_path: str, command: list[str], *, version: int = 0, **args: Any) -> EngineConfig:
    section = RolloutSection(engine="sglang", max_running=4, max_context_tokens=400, engine_args={"command": command, **args})
    return EngineConfig(model_path, section, device="cpu", policy_version=version)


@pytest.fixture
async def server() -> AsyncIterator[Double]:
    async with double() as made:
        yield made


@pytest.fixture
async def engine(server: Double, model_path: str) -> AsyncIterator[SGLangEngine]:
    made = SGLangEngine(config(model_path, server.command))
    await made.start()
    yield made
    await made.close()


def scaled(trained: SlotModel, factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in trained.weights().items()}


def logprobs_under(trained: SlotModel, weights: dict[str, torch.Tensor], tokens: list[int]) -> np.ndarray:
    """By the trainer's model, which keeps its own weights."""
    own = {name: tensor.clone() for name, tensor in trained.weights().items()}
    trained.load_weights(weights)
    try:
        return trained.logprobs(tokens).numpy()
    finally:
        trained.load_weights(own)


# ------------------------------------------------------------------------------------------------------ in flight


@pytest.mark.parametrize(("mode", "spans"), [("keep", True), ("recompute", True), ("keep", False)], ids=["keep", "recompute", "old server"])
async def test_each_token_has_the_version_and_the_logprob_of_the_weights_that_sampled_it(
    mode: Any, spans: bool, model_path: str, trained: SlotModel
) -> None:
    new = scaled(trained, 1.5)
    async with double(spans=spans) as server:
        engine = SGLangEngine(config(model_path, server.command))
        await engine.start()
        running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
        await server.stand(40)
        await engine.update_weights(new, 1, mode, None)
        server.go()
        output = await running
        await engine.close()
    assert (output.error, output.finish_reason, len(output.token_ids)) == ("", "length", 120)
    (first, before), (second, after) = output.version_runs
    assert (first, second, before + after) == (0, 1, 120)
    assert before == 40
    tokens, start = [*PROMPT, *output.token_ids], len(PROMPT) - 1
    old = logprobs_under(trained, scaled(trained, 1.0), tokens)[start:]
    assert np.abs(old[:before] - output.logprobs[:before]).max() < 1e-4
    if mode == "recompute" or not spans:  # kept KV is of the old weights, so only rebuilt KV gives the new ones' own logprobs
        assert np.abs(logprobs_under(trained, new, tokens)[start + before :] - output.logprobs[before:]).max() < 1e-4
    else:
        assert np.abs(old[before:] - output.logprobs[before:]).max() > 1e-2
    paths = [path for path, _ in server.calls]
    assert ("/pause_generation" in paths) == (mode == "keep" and spans)
    assert server.asked("/update_weights_from_disk")[0]["flush_cache"] == (not (mode == "keep" and spans))


async def test_every_token_counts_for_the_weights_that_sampled_it(model_path: str, trained: SlotModel) -> None:
    """SGLang notes the last token of the old weights as the new weights' first."""
    async with double() as server:
        engine = SGLangEngine(config(model_path, server.command))
        await engine.start()
        running = asyncio.create_task(engine.generate(ask("long", max_tokens=60)))
        for version, factor in enumerate((1.5, 0.7, 1.2), 1):
            await server.stand(1 if version == 1 else 9)
            await engine.update_weights(scaled(trained, factor), version, "keep", None)
        server.go()
        output = await running
        await engine.close()
    assert [count for _, count in output.version_runs] == [1, 9, 9, 41]
    assert list(output.version_runs) == server.true_runs[-1]


async def test_abort_returns_what_there_was(engine: SGLangEngine, server: Double, trained: SlotModel) -> None:
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
    await server.stand(30)
    await engine.update_weights(scaled(trained, 1.5), 1, "abort", None)
    output = await running
    assert output.finish_reason == "abort"
    assert len(output.token_ids) == 30
    assert list(output.version_runs) == [(0, len(output.token_ids))]


async def test_no_later_request_finds_what_was_read_by_older_weights(engine: SGLangEngine, server: Double, trained: SlotModel) -> None:
    """The double keeps the old KV through an update in place, as SGLang does: only another name space hides it."""
    prompt = [5 + i % 20 for i in range(100)]
    await engine.generate(ask("first", prompt))
    again = await engine.generate(ask("again", prompt))
    assert again.prefix_hit_tokens == 99
    new = scaled(trained, 1.5)
    await engine.update_weights(new, 1, "keep", None)
    after = await engine.generate(ask("after", prompt))
    assert after.prefix_hit_tokens == 0
    expected = logprobs_under(trained, new, [*prompt, *after.token_ids])[99:]
    assert np.abs(expected - after.logprobs).max() < 1e-4
    assert {body["extra_key"] for body in server.asked("/generate")} == {"first", "weights-0", "weights-1"}


@pytest.mark.parametrize("mode", ["keep", "recompute"])
async def test_weights_that_fail_their_probe_serve_nobody(mode: Any, engine: SGLangEngine, server: Double, trained: SlotModel) -> None:
    probe = make_probe(PROMPT, await engine.logprobs(PROMPT), tolerance=1e-4)
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
    await server.stand(30)
    with pytest.raises(TransferFailed, match="probe"):
        await engine.update_weights(scaled(trained, 2.0), 1, mode, probe)
    assert engine.policy_version == NO_VERSION
    server.go()
    waiting = asyncio.create_task(engine.generate(ask("waits")))
    await asyncio.sleep(0.1)
    assert not running.done()
    assert not waiting.done()
    await engine.update_weights(scaled(trained, 1.0), 2, mode, probe)
    output = await running
    assert [version for version, _ in output.version_runs] == [0, 2]  # nothing by version 1
    assert len(output.token_ids) == 120
    expected = trained.logprobs([*PROMPT, *output.token_ids]).numpy()[len(PROMPT) - 1 :]
    assert np.abs(expected - output.logprobs).max() < 1e-4
    assert list((await waiting).version_runs) == [(2, 12)]


async def test_a_refused_update_is_told_and_the_next_one_serves(engine: SGLangEngine, server: Double, trained: SlotModel) -> None:
    server.refuse = "/update_weights_from_disk"
    with pytest.raises(TransferFailed, match="SGLang answered /update_weights_from_disk with 400: as told refused"):
        await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert engine.policy_version == NO_VERSION
    server.refuse = ""
    await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert list((await engine.generate(ask("x"))).version_runs) == [(1, 12)]
    assert not any(os.path.exists(body["model_path"]) for body in server.asked("/update_weights_from_disk"))  # noqa: ASYNC240


async def test_a_pause_that_is_refused_does_not_last(engine: SGLangEngine, server: Double, trained: SlotModel) -> None:
    server.refuse = "/pause_generation"
    with pytest.raises(TransferFailed, match="/pause_generation"):
        await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert server.asked("/continue_generation")
    assert engine.policy_version == NO_VERSION


async def test_a_version_that_is_not_adopted_is_a_failed_transfer(engine: SGLangEngine, server: Double) -> None:
    server.refuse = "/update_weight_version"
    with pytest.raises(TransferFailed, match="/update_weight_version"):
        await engine.adopt(1)
    assert engine.policy_version == 0


async def test_an_update_that_is_cancelled_leaves_no_version_served(engine: SGLangEngine, server: Double, trained: SlotModel) -> None:
    running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
    await server.stand(30)
    server.hold = asyncio.Event()
    update = asyncio.create_task(engine.update_weights(scaled(trained, 1.5), 1, "keep", None))
    await until(lambda: server.asked("/update_weights_from_disk"))
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert engine.policy_version == NO_VERSION
    server.hold.set()
    await engine.update_weights(scaled(trained, 1.0), 2, "keep", None)
    server.go()
    output = await running
    assert {version for version, _ in output.version_runs} <= {0, 2}
    expected = trained.logprobs([*PROMPT, *output.token_ids]).numpy()[len(PROMPT) - 1 :]
    assert np.abs(expected - output.logprobs).max() < 1e-4


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")]
)
async def test_a_full_disk_is_a_failed_transfer_and_the_old_weights_serve(
    error: Exception, engine: SGLangEngine, trained: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(sglang_weights, "save_file", full)
        with pytest.raises(TransferFailed, match=r"cannot be written for SGLang to read: .*No space left"):
            await engine.update_weights(scaled(trained, 1.5), 1, "keep", None)
    assert not glob(f"/dev/shm/rlearner-weights-{os.getpid()}-*")
    assert list((await engine.generate(ask("x"))).version_runs) == [(0, 12)]


async def test_an_update_that_does_not_fit_changes_nothing(engine: SGLangEngine, trained: SlotModel) -> None:
    good = scaled(trained, 1.0)
    with pytest.raises(TransferFailed, match=r"the update lacks 1 of \d+ tensors, the first is model.norm.weight"):
        await engine.update_weights({name: one for name, one in good.items() if name != "model.norm.weight"}, 1, "keep", None)
    with pytest.raises(TransferFailed, match="brings 1 unknown tensors, the first is extra"):
        await engine.update_weights(good | {"extra": torch.zeros(1)}, 1, "keep", None)
    with pytest.raises(TransferFailed, match=r"model.norm.weight has shape \(3,\), the model wants \(32,\)"):
        await engine.update_weights(good | {"model.norm.weight": torch.zeros(3)}, 1, "keep", None)
    assert engine.policy_version == 0


# ------------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("shape", [{"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.6}])
async def test_logprobs_are_those_of_the_distribution_drawn_from(shape: dict[str, float], engine: SGLangEngine, trained: SlotModel) -> None:
    output = await engine.generate(ask("x", **shape))
    if shape.get("temperature") == 0.0:
        assert list(output.logprobs) == [0.0] * 12
        return
    logits = torch.log_softmax(full_logits(trained, [*PROMPT, *output.token_ids]) / shape.get("temperature", 1.0), -1)
    kept = logits[len(PROMPT) - 1 : -1]
    if "top_k" in shape:
        kept = kept.masked_fill(kept < kept.topk(5).values[:, -1:], float("-inf")).log_softmax(-1)
    elif "min_p" in shape:
        kept = kept.masked_fill(kept.exp() < 0.1 * kept.exp().max(-1, keepdim=True).values, float("-inf")).log_softmax(-1)
    elif "top_p" in shape:
        order = kept.sort(descending=True)
        before = order.values.exp().cumsum(-1) - order.values.exp()
        kept = torch.full_like(kept, float("-inf")).scatter(-1, order.indices, order.values.masked_fill(before >= 0.7, float("-inf")))
        kept = kept.log_softmax(-1)
    expected = kept.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert np.abs(expected.numpy() - output.logprobs).max() < 1e-4


@torch.inference_mode()
def full_logits(trained: SlotModel, tokens: list[int]) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    return trained._run(torch.tensor(tokens), positions[None], positions).float()


async def test_the_likeliest_tokens_of_a_context(engine: SGLangEngine, trained: SlotModel) -> None:
    request = wire.GenerateRequest(
        request_id="s", conversation_id="s", token_ids=wire.column(PROMPT, "<i4"), min_version=0, deadline_s=5.0, prompt_top_k=3,
        sampling=wire.SamplingParams(max_tokens=1),
    )  # fmt: skip
    output = await engine.generate(request)
    ids, logprobs = trained.top_logprobs(PROMPT, 3)
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    assert (output.top_ids == ids).all()
    assert np.abs(output.top_logprobs - logprobs).max() < 1e-5


async def test_a_stop_string_that_an_update_cuts_in_two_is_found(model_path: str, trained: SlotModel) -> None:
    tokenizer = Tokenizer.load(model_path)
    async with double() as server:
        engine = SGLangEngine(config(model_path, server.command))
        await engine.start()
        free = list((await engine.generate(ask("free", max_tokens=120))).token_ids)
        stop = tokenizer.decode(free[:90], skip_special_tokens=False)  # so long that the update comes before its end
        running = asyncio.create_task(engine.generate(ask("long", max_tokens=120, stop=[stop])))
        await server.stand(20)
        await engine.update_weights(scaled(trained, 1.0), 1, "recompute", None)
        server.go()
        output = await running
        await engine.close()
    assert (output.finish_reason, list(output.token_ids)) == ("stop", free[:90])
    assert [version for version, _ in output.version_runs] == [0, 1]
    assert sum(count for _, count in output.version_runs) == len(output.logprobs) == 90


async def test_an_abort_that_comes_too_early_is_said_again(engine: SGLangEngine, server: Double) -> None:
    server.deaf = 2
    running = asyncio.create_task(engine.generate(ask("x", max_tokens=120)))
    await server.stand(1)
    engine.abort("x")
    output = await asyncio.wait_for(running, LONG_S)
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)


async def test_what_the_server_does_not_return_is_answered_without_it(
    engine: SGLangEngine, server: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_requests, "RETURN_WITHIN_S", 0.5)
    server._paused = True  # as if it hung
    output = await asyncio.wait_for(engine.generate(ask("x", deadline_s=0.1)), LONG_S)
    assert (output.finish_reason, list(output.token_ids)) == ("deadline", [])
    server._paused = False


async def test_an_answer_of_another_shape_costs_its_request_alone(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sglang_requests, "read_leg", lambda *_: 1 // 0)
        output = await asyncio.wait_for(engine.generate(ask("x")), LONG_S)
    assert output.error == "SGLang's answer: ZeroDivisionError: integer division or modulo by zero"
    assert len((await engine.generate(ask("y"))).token_ids) == 12
    assert engine.stats().running == 0


async def test_the_longest_go_first_and_no_more_than_fit(engine: SGLangEngine, server: Double) -> None:
    lengths = [10, 20, 5, 15, 30, 25, 35, 40]
    await asyncio.gather(*(engine.generate(ask(f"r{n}", seed=n, max_tokens=n)) for n in lengths))
    sent = [body["sampling_params"]["max_new_tokens"] for body in server.asked("/generate")[1:]]
    assert sorted(sent[:4]) == [5, 10, 15, 20]  # came first and found room
    assert sent[4:] == [40, 35, 30, 25]
    assert engine.stats().generated_tokens == sum(lengths)


# ------------------------------------------------------------------------------------------------ the distributed way


async def test_the_server_is_given_the_model_that_factors_make_of_the_base(engine: SGLangEngine, trained: SlotModel) -> None:
    base = {name: tensor.clone() for name, tensor in trained.weights().items()}
    shapes = factor_shapes(base, ["q_proj", "up_proj"], 2)
    merged = Merged(base, {name: torch.randn(shape.shape) for name, shape in shapes.items()}, ["q_proj", "up_proj"], 0.5)
    expected = logprobs_under(trained, merged.made(), PROMPT)
    assert np.abs(expected - logprobs_under(trained, base, PROMPT)).max() > 1e-2
    await engine.update_weights(merged, 1, "keep", make_probe(PROMPT, expected, tolerance=1e-5))
    assert np.abs(expected - await engine.logprobs(PROMPT)).max() < 1e-5


async def test_weights_over_a_group_that_a_server_in_another_process_joins(model_path: str, trained: SlotModel) -> None:
    command = [sys.executable, str(Path(__file__).with_name("sglang_double.py"))]
    engine = SGLangEngine(config(model_path, command, weights="distributed"))
    await engine.start()
    try:
        for version, factor in ((1, 1.5), (2, 0.5)):  # the group is made once
            new = scaled(trained, factor)
            await engine.update_weights(new, version, "keep", make_probe(PROMPT, logprobs_under(trained, new, PROMPT), tolerance=1e-4))
            output = await engine.generate(ask("x"))
            assert list(output.version_runs) == [(version, 12)]
            expected = logprobs_under(trained, new, [*PROMPT, *output.token_ids])[len(PROMPT) - 1 :]
            assert np.abs(expected - output.logprobs).max() < 1e-4
    finally:
        await engine.close()


def test_parts_of_an_update() -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 10), ("b", 10), ("c", 100), ("d", 1))}
    assert [list(part) for part in parted(tensors, 80)] == [["a", "b"], ["c"], ["d"]]
    assert list(parted({})) == []


def test_the_file_is_in_memory_where_there_is_room(tmp_path: Path) -> None:
    assert place(str(tmp_path), 1 << 60) == str(tmp_path)
    assert place(None, 1 << 60) is None
    assert place(None, 1000) == "/dev/shm"


def test_what_a_killed_server_left_in_memory_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"rlearner-weights-{gone.pid}-abc", f"rlearner-weights-{os.getpid()}-abc", "rlearner-weights-x-abc", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_names_and_shapes_are_those_of_the_trainer(model_path: str, trained: SlotModel) -> None:
    held, settings = shapes_of(model_path, "float32", trust_remote_code=False)
    own = trained.weights()
    assert list(held) == list(own)
    assert all(held[name].is_meta and held[name].shape == own[name].shape and held[name].dtype == own[name].dtype for name in own)
    assert settings.num_attention_heads == 2


# ------------------------------------------------------------------------------------------------------ the child


async def test_the_server_dies_with_one_line_for_everyone(engine: SGLangEngine) -> None:
    assert engine._child is not None
    waiting = asyncio.create_task(engine.generate(ask("x", max_tokens=120)))
    await asyncio.sleep(0.05)
    os.kill(engine._child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"SGLang ended: .*exit code -9, see /.*sglang.log"):
        await asyncio.wait_for(engine.join(), 5)
    with pytest.raises(RuntimeError, match="SGLang"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(RuntimeError, match="stopped"):
        await engine.generate(ask("y"))


async def test_closing_ends_the_child_and_removes_its_log(server: Double, model_path: str) -> None:
    engine = SGLangEngine(config(model_path, server.command))
    await engine.start()
    assert engine._child is not None
    pid, log = engine._child.pid, engine._child.log_path
    assert log.exists()
    await engine.close()
    assert not psutil.pid_exists(pid)
    assert not log.parent.exists()


async def test_a_server_that_cannot_start_says_why(server: Double, model_path: str) -> None:
    engine = SGLangEngine(config(model_path, [*server.command, "--crash"]))
    with pytest.raises(UserError) as caught:
        await engine.start()
    said = str(caught.value)
    assert said.startswith("SGLang cannot start: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB (exit code 1, see ")
    assert said.endswith(
        "lower rollout.engine_args.mem_fraction_static, rollout.max_running or max_context_tokens, or raise tensor_parallel"
    )
    with pytest.raises(UserError, match="cannot start /no/such: No such file"):
        await SGLangEngine(config(model_path, ["/no/such"])).start()


def test_without_the_package_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.sglang_child.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"engine sglang needs the package sglang; pip install 'rlearner\[sglang\]', or name the Python"):
        launcher(SGLangArgs())
    assert launcher(SGLangArgs(command=["x", "-m", "y"])) == ["x", "-m", "y"]


def test_the_command_line() -> None:
    section = RolloutSection(max_running=8, max_context_tokens=1000, prefill_tokens=2048, prefix_cache=False)
    args = SGLangArgs(
        tensor_parallel=2, mem_fraction_static=0.8, flags={"attention-backend": "fa3", "enable-metrics": True, "quiet": False}
    )
    given = options(
        "/m", section, args, port=5, dtype="bfloat16", device="cuda", version=-1, copies=2, trust_remote_code=False
    )  # fmt: skip
    assert given == [
        "--model-path=/m", "--host=127.0.0.1", "--port=5", "--dtype=bfloat16", "--context-length=1008", "--max-running-requests=8",
        "--chunked-prefill-size=2048", "--tp-size=2", "--dp-size=2", "--weight-version=-1", "--sampling-defaults=openai",
        "--sampling-mask-max-tokens=8192",
        "--log-level=warning",
        "--disable-radix-cache", "--mem-fraction-static=0.8", "--attention-backend=fa3", "--enable-metrics",
    ]  # fmt: skip


def test_copies_of_the_model_by_the_visible_gpus() -> None:
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert copies(SGLangArgs(tensor_parallel=2), "cuda", four, 16) == 2
    assert copies(SGLangArgs(tensor_parallel=4), "cuda", four, 16) == 1
    assert copies(SGLangArgs(tensor_parallel=2, data_parallel=1), "cuda", four, 16) == 1
    with pytest.raises(ConfigError, match=r"tensor_parallel: 3 is not allowed; a divisor of the model's 16 attention heads"):
        copies(SGLangArgs(tensor_parallel=3), "cuda", four, 16)
    with pytest.raises(ConfigError, match="tensor_parallel times data_parallel is 8, and --gpus names 4"):
        copies(SGLangArgs(tensor_parallel=8), "cuda", four, 16)
    with pytest.raises(ConfigError, match="SGLang's update group holds one"):
        copies(SGLangArgs(weights="distributed"), "cuda", four, 16)


# ---------------------------------------------------------------------------------------------------- the protocol


def reply(**meta: Any) -> dict[str, Any]:
    given = {
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-1.0, 7, None], [-0.5, 2, None]],
        "weight_version": "3",
    }
    return {"text": "", "output_ids": [7, 2], "meta_info": given | meta}


def test_reading_an_answer() -> None:
    plain = wire.SamplingParams(max_tokens=4)
    leg = read_leg(reply(prompt_tokens=9, cached_tokens=8), plain)
    assert (leg.token_ids, leg.logprobs, leg.version_runs, leg.reason, leg.spans) == ([7, 2], [-1.0, -0.5], [(3, 2)], "stop", False)
    assert (leg.prompt_tokens, leg.cached_tokens) == (9, 8)
    told = read_leg(reply(weight_versions=[{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]), plain)
    assert (told.version_runs, told.spans) == ([(3, 1), (4, 1)], True)
    aborted = read_leg({"meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "3"}}, plain)
    assert (aborted.token_ids, aborted.version_runs, aborted.reason) == ([], [], "abort")
    assert read_leg(reply(), wire.SamplingParams(max_tokens=4, temperature=0.0)).logprobs == [0.0, 0.0]
    nucleus = wire.SamplingParams(max_tokens=4, top_p=0.9)
    assert read_leg(reply(output_token_sampling_logprobs=[-0.9, -0.4]), nucleus).logprobs == [-0.9, -0.4]


@pytest.mark.parametrize(
    ("answer", "sampling", "why"),
    [
        ({"text": "hi"}, {}, "holds no finish_reason that is known: None"),
        (reply(finish_reason={"type": "gave up"}), {}, "holds no finish_reason that is known"),
        (reply(), {"top_p": 0.9}, "does not tell logprobs under top_p, top_k or min_p"),
        (reply(weight_version="default"), {}, "names no weight version: 'default'"),
        (reply(weight_versions=[{"version": "3", "start": 0, "end": 1}]), {}, "do not count the 2 tokens"),
        (reply(output_token_logprobs=[[float("nan"), 7, None]]), {}, "logits are not finite"),
        (reply(output_token_logprobs=[[None, 7, None]]), {}, "logits are not finite"),
        (reply(output_token_sampling_logprobs=[None, -0.1]), {"top_p": 0.9}, "logits are not finite"),
        (reply(output_token_logprobs=[-0.5]), {}, "are not pairs of a logprob and a token"),
    ],
)
def test_answers_that_cannot_be_used(answer: dict[str, Any], sampling: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_leg(answer, wire.SamplingParams(max_tokens=4, **sampling))


def test_the_first_token_of_new_weights_is_the_old_ones() -> None:
    assert as_sampled([(3, 5)], 3) == [(3, 5)]
    assert as_sampled([(3, 5), (4, 2)], 3) == [(3, 6), (4, 1)]
    assert as_sampled([(4, 3)], 3) == [(3, 1), (4, 2)]  # none had been taken in
    assert as_sampled([(4, 1)], 3) == [(3, 1)]
    assert as_sampled([(3, 1), (4, 1), (5, 1)], 3) == [(3, 2), (4, 1)]
    assert as_sampled([], 3) == []
    assert first_of([(3, 2), (4, 2)], 3) == [(3, 2), (4, 1)]
    assert first_of([(3, 2), (4, 2)], 0) == []


def test_stop_tokens_that_sglang_does_not_heed_cut_the_output() -> None:
    stops = wire.SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=[7])
    versions = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    leg = read_leg(reply(weight_versions=versions, finish_reason={"type": "length"}), stops)
    assert (leg.token_ids, leg.logprobs, leg.version_runs, leg.reason) == ([7], [-1.0], [(3, 1)], "stop")
    assert read_leg(reply(), wire.SamplingParams(max_tokens=4, stop_token_ids=[7])).token_ids == [7, 2]


def test_reading_scores() -> None:
    meta = {"input_token_logprobs": [[None, 5, None], [-2.0, 6, None]], "input_top_logprobs": [None, [[-0.1, 9, None], [-2.0, 6, None]]]}
    assert read_scores({"meta_info": meta}, 2).tolist() == [-2.0]
    ids, logprobs = read_top({"meta_info": meta}, 2, 2)
    assert (ids.tolist(), logprobs.round(1).tolist()) == ([[9, 6]], [[np.float32(-0.1), -2.0]])
    with pytest.raises(Refused, match="logprobs of 2 tokens of a context of 3"):
        read_scores({"meta_info": meta}, 3)
    with pytest.raises(Refused, match="the 1 likeliest tokens at each of 1 positions"):
        read_top({"meta_info": meta}, 2, 1)


def test_the_body_of_a_request() -> None:
    assert generate_body("r", [1], wire.SamplingParams(max_tokens=9, top_p=0.9), 7, "w")["sampling_params"]["top_k"] == 4096
    assert generate_body("r", [1], wire.SamplingParams(max_tokens=9), 7, "w")["sampling_params"]["top_k"] == -1
    sampling = wire.SamplingParams(max_tokens=9, top_k=3, seed=(1 << 31) + 5, stop=["x"], stop_token_ids=[4])
    assert generate_body("r", [1, 2], sampling, 7, "weights-2") == {
        "rid": "r", "input_ids": [1, 2], "return_logprob": True, "extra_key": "weights-2", "return_sampling_mask": True,
        "sampling_params": {
            "max_new_tokens": 7, "temperature": 1.0, "top_p": 1.0, "top_k": 3, "min_p": 0.0, "ignore_eos": False,
            "skip_special_tokens": False, "stop": ["x"], "stop_token_ids": [4], "sampling_seed": 5,
        },
    }  # fmt: skip
