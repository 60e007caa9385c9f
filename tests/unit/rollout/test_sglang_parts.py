"""What the engine ``sglang`` does without a server: bodies and answers, the command line, files and
parts of an update.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from broker.contract import wire
from broker.errors import ConfigError, UserError
from broker.settings.sections import parse
from rollout.config import RolloutSection
from rollout.engines.sglang.args import SGLangArgs
from rollout.engines.sglang.client import (
    SGLangRequestError,
    generate_body,
    read_leg,
    read_scores,
    read_top,
    shift_runs,
    truncate_runs,
)
from rollout.engines.sglang.server_process import (
    data_parallel_copies,
    launch_command,
    server_options,
)
from rollout.engines.sglang.weight_senders import (
    remove_stale_folders,
    split_tensors,
    weights_file_parent,
)


def test_parts_of_an_update() -> None:
    tensors = {
        name: torch.zeros(size) for name, size in (("a", 10), ("b", 10), ("c", 100), ("d", 1))
    }
    assert [list(part) for part in split_tensors(tensors, 80)] == [["a", "b"], ["c"], ["d"]]
    assert list(split_tensors({})) == []


def test_the_file_is_in_memory_where_there_is_room(tmp_path: Path) -> None:
    assert weights_file_parent(str(tmp_path), 1 << 60) == str(tmp_path)
    assert weights_file_parent(None, 1 << 60) is None
    assert weights_file_parent(None, 1000) == "/dev/shm"


def test_what_a_killed_server_left_in_memory_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [
        f"rlearner-weights-{gone.pid}-abc",
        f"rlearner-weights-{os.getpid()}-abc",
        "rlearner-weights-x-abc",
        "other",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    remove_stale_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_without_the_package_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engines.sglang.server_process.find_spec", lambda _: None)
    with pytest.raises(
        UserError,
        match=r"engine sglang needs the package sglang; pip install 'rlearner\[sglang\]', or set the Python",
    ):
        launch_command(SGLangArgs())
    assert launch_command(SGLangArgs(command=["x", "-m", "y"])) == ["x", "-m", "y"]


def test_the_command_line() -> None:
    section = RolloutSection(
        max_running=8, max_context_tokens=1000, prefill_tokens=2048, prefix_cache=False
    )
    args = SGLangArgs(
        tensor_parallel=2,
        mem_fraction_static=0.8,
        flags={"attention-backend": "fa3", "enable-metrics": True, "quiet": False},
    )
    given = server_options(
        "/m", section, args, port=5, dtype="bfloat16", device="cuda", version=-1, copies=2, trust_remote_code=False
    )  # fmt: skip
    assert given == [
        "--model-path=/m", "--host=127.0.0.1", "--port=5", "--dtype=bfloat16", "--context-length=1008",
        "--max-running-requests=8",
        "--chunked-prefill-size=2048", "--tp-size=2", "--dp-size=2", "--weight-version=-1",
        "--sampling-defaults=openai",
        "--grammar-backend=llguidance",
        "--sampling-mask-max-tokens=8192",
        "--log-level=warning",
        "--disable-radix-cache", "--load-format=safetensors",
        "--mem-fraction-static=0.8", "--attention-backend=fa3", "--enable-metrics",
    ]  # fmt: skip


def test_options_that_would_open_the_server_are_refused() -> None:
    for name in ("host", "port", "config", "api-key", "admin-api-key"):
        with pytest.raises(
            ConfigError, match="any option but host, port, config, api-key, admin-api-key"
        ):
            parse("rollout.engine_args", {"flags": {name: "x"}}, SGLangArgs)


def test_copies_of_the_model_by_the_visible_gpus() -> None:
    four = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert data_parallel_copies(SGLangArgs(tensor_parallel=2), "cuda", four, 16) == 2
    assert data_parallel_copies(SGLangArgs(tensor_parallel=4), "cuda", four, 16) == 1
    assert (
        data_parallel_copies(SGLangArgs(tensor_parallel=2, data_parallel=1), "cuda", four, 16) == 1
    )
    with pytest.raises(
        ConfigError,
        match=r"tensor_parallel: 3 is not allowed; a divisor of the model's 16 attention heads",
    ):
        data_parallel_copies(SGLangArgs(tensor_parallel=3), "cuda", four, 16)
    with pytest.raises(
        ConfigError, match="tensor_parallel times data_parallel is 8, and --gpus names 4"
    ):
        data_parallel_copies(SGLangArgs(tensor_parallel=8), "cuda", four, 16)
    with pytest.raises(ConfigError, match="SGLang's update group holds one"):
        data_parallel_copies(SGLangArgs(weights="distributed"), "cuda", four, 16)


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
    assert (leg.token_ids, leg.logprobs, leg.version_runs, leg.reason, leg.spans) == (
        [7, 2],
        [-1.0, -0.5],
        [(3, 2)],
        "stop",
        False,
    )
    assert (leg.prompt_tokens, leg.cached_tokens) == (9, 8)
    told = read_leg(
        reply(
            weight_versions=[
                {"version": "3", "start": 0, "end": 1},
                {"version": "4", "start": 1, "end": 2},
            ]
        ),
        plain,
    )
    assert (told.version_runs, told.spans) == ([(3, 1), (4, 1)], True)
    aborted = read_leg(
        {"meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "3"}}, plain
    )
    assert (aborted.token_ids, aborted.version_runs, aborted.reason) == ([], [], "abort")
    assert read_leg(reply(), wire.SamplingParams(max_tokens=4, temperature=0.0)).logprobs == [
        0.0,
        0.0,
    ]
    nucleus = wire.SamplingParams(max_tokens=4, top_p=0.9)
    assert read_leg(reply(output_token_sampling_logprobs=[-0.9, -0.4]), nucleus).logprobs == [
        -0.9,
        -0.4,
    ]


@pytest.mark.parametrize(
    ("answer", "sampling", "why"),
    [
        ({"text": "hi"}, {}, "has an unknown finish_reason: None"),
        (reply(finish_reason={"type": "gave up"}), {}, "has an unknown finish_reason"),
        (reply(), {"top_p": 0.9}, "does not return logprobs under top_p, top_k or min_p"),
        (reply(weight_version="default"), {}, "has no valid weight version: 'default'"),
        (
            reply(weight_versions=[{"version": "3", "start": 0, "end": 1}]),
            {},
            "do not add up to 2 tokens",
        ),
        (reply(output_token_logprobs=[[float("nan"), 7, None]]), {}, "logits are not finite"),
        (reply(output_token_logprobs=[[None, 7, None]]), {}, "logits are not finite"),
        (
            reply(output_token_sampling_logprobs=[None, -0.1]),
            {"top_p": 0.9},
            "logits are not finite",
        ),
        (reply(output_token_logprobs=[-0.5]), {}, "are not pairs of a logprob and a token"),
    ],
)
def test_answers_that_cannot_be_used(
    answer: dict[str, Any], sampling: dict[str, Any], why: str
) -> None:
    with pytest.raises(SGLangRequestError, match=why):
        read_leg(answer, wire.SamplingParams(max_tokens=4, **sampling))


def test_the_first_token_of_new_weights_is_the_old_ones() -> None:
    assert shift_runs([(3, 5)], 3) == [(3, 5)]
    assert shift_runs([(3, 5), (4, 2)], 3) == [(3, 6), (4, 1)]
    assert shift_runs([(4, 3)], 3) == [(3, 1), (4, 2)]  # none had been taken in
    assert shift_runs([(4, 1)], 3) == [(3, 1)]
    assert shift_runs([(3, 1), (4, 1), (5, 1)], 3) == [(3, 2), (4, 1)]
    assert shift_runs([], 3) == []
    assert truncate_runs([(3, 2), (4, 2)], 3) == [(3, 2), (4, 1)]
    assert truncate_runs([(3, 2), (4, 2)], 0) == []


def test_stop_tokens_that_sglang_does_not_heed_cut_the_output() -> None:
    stops = wire.SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=[7])
    versions = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    leg = read_leg(reply(weight_versions=versions, finish_reason={"type": "length"}), stops)
    assert (leg.token_ids, leg.logprobs, leg.version_runs, leg.reason) == (
        [7],
        [-1.0],
        [(3, 1)],
        "stop",
    )
    assert read_leg(reply(), wire.SamplingParams(max_tokens=4, stop_token_ids=[7])).token_ids == [
        7,
        2,
    ]


def test_reading_scores() -> None:
    meta = {
        "input_token_logprobs": [[None, 5, None], [-2.0, 6, None]],
        "input_top_logprobs": [None, [[-0.1, 9, None], [-2.0, 6, None]]],
    }
    assert read_scores({"meta_info": meta}, 2).tolist() == [-2.0]
    ids, logprobs = read_top({"meta_info": meta}, 2, 2)
    assert (ids.tolist(), logprobs.round(1).tolist()) == ([[9, 6]], [[np.float32(-0.1), -2.0]])
    with pytest.raises(SGLangRequestError, match="logprobs of 2 tokens of a context of 3"):
        read_scores({"meta_info": meta}, 3)
    with pytest.raises(SGLangRequestError, match="the 1 likeliest tokens at each of 1 positions"):
        read_top({"meta_info": meta}, 2, 1)


def test_a_request_that_reshapes_what_it_is_drawn_from() -> None:
    sampling = wire.SamplingParams(
        max_tokens=9, frequency_penalty=0.5, presence_penalty=-1.0, logit_bias={7: -100.0}
    )
    params = generate_body("r", [1], sampling, 9, "w", "start: value")["sampling_params"]
    found = {
        name: params[name]
        for name in ("frequency_penalty", "presence_penalty", "logit_bias", "ebnf")
    }
    assert found == {
        "frequency_penalty": 0.5,
        "presence_penalty": -1.0,
        "logit_bias": {"7": -100.0},
        "ebnf": "start: value",
    }


def test_the_body_of_a_request() -> None:
    assert (
        generate_body("r", [1], wire.SamplingParams(max_tokens=9, top_p=0.9), 7, "w")[
            "sampling_params"
        ]["top_k"]
        == 4096
    )
    assert (
        generate_body("r", [1], wire.SamplingParams(max_tokens=9), 7, "w")["sampling_params"][
            "top_k"
        ]
        == -1
    )
    sampling = wire.SamplingParams(
        max_tokens=9, top_k=3, seed=(1 << 31) + 5, stop=["x"], stop_token_ids=[4]
    )
    assert generate_body("r", [1, 2], sampling, 7, "weights-2") == {
        "rid": "r", "input_ids": [1, 2], "return_logprob": True, "extra_key": "weights-2", "return_sampling_mask": True,
        "sampling_params": {
            "max_new_tokens": 7, "temperature": 1.0, "top_p": 1.0, "top_k": 3, "min_p": 0.0, "ignore_eos": False,
            "skip_special_tokens": False, "stop": ["x"], "stop_token_ids": [4], "sampling_seed": 5,
        },
    }  # fmt: skip
