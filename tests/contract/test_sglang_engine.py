"""The engine sglang against the double of SGLang's API: requests, and its child's end."""

# ruff: noqa: F811 - fixtures come by import

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from engine_kit import PROMPT, ask
from sglang_double import Double, double
from sglang_kit import config, engine, logprobs_under, model_path, scaled, server, trained  # noqa: F401 - fixtures among them
from waits import LONG_S

from broker.contract import wire
from broker.errors import UserError
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.hf.model import SlotModel
from rollout.engines.sglang import request_queue
from rollout.engines.sglang.engine import SGLangEngine


@pytest.mark.parametrize(
    "shape",
    [{"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.6}],
)
async def test_logprobs_are_those_of_the_distribution_drawn_from(
    shape: dict[str, float], engine: SGLangEngine, trained: SlotModel
) -> None:
    output = await engine.generate(ask("x", **shape))
    if shape.get("temperature") == 0.0:
        assert list(output.logprobs) == [0.0] * 12
        return
    logits = torch.log_softmax(
        full_logits(trained, [*PROMPT, *output.token_ids]) / shape.get("temperature", 1.0), -1
    )
    kept = logits[len(PROMPT) - 1 : -1]
    if "top_k" in shape:
        kept = kept.masked_fill(kept < kept.topk(5).values[:, -1:], float("-inf")).log_softmax(-1)
    elif "min_p" in shape:
        kept = kept.masked_fill(
            kept.exp() < 0.1 * kept.exp().max(-1, keepdim=True).values, float("-inf")
        ).log_softmax(-1)
    elif "top_p" in shape:
        order = kept.sort(descending=True)
        before = order.values.exp().cumsum(-1) - order.values.exp()
        kept = torch.full_like(kept, float("-inf")).scatter(
            -1, order.indices, order.values.masked_fill(before >= 0.7, float("-inf"))
        )
        kept = kept.log_softmax(-1)
    expected = kept.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert np.abs(expected.numpy() - output.logprobs).max() < 1e-4


@torch.inference_mode()
def full_logits(trained: SlotModel, tokens: list[int]) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    return trained._run(torch.tensor(tokens), positions[None], positions).float()


async def test_the_likeliest_tokens_of_a_context(engine: SGLangEngine, trained: SlotModel) -> None:
    request = wire.GenerateRequest(
        request_id="s", conversation_id="s", token_ids=wire.column(PROMPT, "<i4"), min_version=0, deadline_s=5.0,
        prompt_top_k=3, prompt_logprobs=True,
        sampling=wire.SamplingParams(max_tokens=1),
    )  # fmt: skip
    output = await engine.generate(request)
    expected = trained.score_context(PROMPT, 3)
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    assert (output.top_ids == expected.top_ids).all()
    assert np.abs(output.top_logprobs - expected.top_logprobs).max() < 1e-5
    assert output.prompt_logprobs is not None
    assert np.abs(output.prompt_logprobs - expected.logprobs).max() < 1e-5


async def test_a_stop_string_that_an_update_cuts_in_two_is_found(
    model_path: str, trained: SlotModel
) -> None:
    tokenizer = Tokenizer.load(model_path)
    async with double() as server:
        engine = SGLangEngine(config(model_path, server.command))
        await engine.start()
        free = list((await engine.generate(ask("free", max_tokens=120))).token_ids)
        # so long that the update comes before its end
        stop = tokenizer.decode(free[:90], skip_special_tokens=False)
        running = asyncio.create_task(engine.generate(ask("long", max_tokens=120, stop=[stop])))
        await server.stand(20)
        await engine.update_weights(scaled(trained, 1.0), 1, "recompute", None)
        server.go()
        output = await running
        await engine.close()
    assert (output.finish_reason, list(output.token_ids)) == ("stop", free[:90])
    assert [version for version, _ in output.version_runs] == [0, 1]
    assert sum(count for _, count in output.version_runs) == len(output.logprobs) == 90


async def test_an_abort_that_comes_too_early_is_said_again(
    engine: SGLangEngine, server: Double
) -> None:
    server.deaf = 2
    running = asyncio.create_task(engine.generate(ask("x", max_tokens=120)))
    await server.stand(1)
    engine.abort("x")
    output = await asyncio.wait_for(running, LONG_S)
    assert (output.finish_reason, len(output.token_ids)) == ("abort", 1)


async def test_what_the_server_does_not_return_is_answered_without_it(
    engine: SGLangEngine, server: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "RETURN_WITHIN_S", 0.5)
    server._paused = True  # as if it hung
    output = await asyncio.wait_for(engine.generate(ask("x", deadline_s=0.1)), LONG_S)
    assert (output.finish_reason, list(output.token_ids)) == ("deadline", [])
    server._paused = False


async def test_an_answer_of_another_shape_costs_its_request_alone(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(request_queue, "read_leg", lambda *_: 1 // 0)
        output = await asyncio.wait_for(engine.generate(ask("x")), LONG_S)
    assert (
        output.error
        == "SGLang's answer cannot be read: ZeroDivisionError: integer division or modulo by zero"
    )
    assert len((await engine.generate(ask("y"))).token_ids) == 12
    assert engine.stats().running == 0


async def test_the_longest_go_first_and_no_more_than_fit(
    engine: SGLangEngine, server: Double
) -> None:
    lengths = [10, 20, 5, 15, 30, 25, 35, 40]
    await asyncio.gather(*(engine.generate(ask(f"r{n}", seed=n, max_tokens=n)) for n in lengths))
    sent = [body["sampling_params"]["max_new_tokens"] for body in server.asked("/generate")[1:]]
    assert sorted(sent[:4]) == [5, 10, 15, 20]  # came first and found room
    assert sent[4:] == [40, 35, 30, 25]
    assert engine.stats().generated_tokens == sum(lengths)


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
    assert said.startswith(
        "SGLang cannot start: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB (exit code 1, see "
    )
    assert said.endswith(
        "lower rollout.engine_args.mem_fraction_static, rollout.max_running or max_context_tokens, or raise "
        "tensor_parallel"
    )
    with pytest.raises(UserError, match="cannot start /no/such: No such file"):
        await SGLangEngine(config(model_path, ["/no/such"])).start()


async def test_the_server_refuses_others_and_its_key_is_in_no_command_line(model_path: str) -> None:
    async with double() as server:
        engine = SGLangEngine(config(model_path, server.command))
        await engine.start()
        assert engine._child is not None
        line = psutil.Process(engine._child.pid).cmdline()
        assert "--config" in line
        assert server.key not in " ".join(line)
        port = next(int(one[7:]) for one in line if one.startswith("--port="))
        async with aiohttp.ClientSession() as stranger:
            for path in ("/generate", "/update_weights_from_disk", "/abort_request"):
                async with stranger.post(f"http://127.0.0.1:{port}{path}", json={}) as response:
                    assert response.status == 401
        await engine.close()
