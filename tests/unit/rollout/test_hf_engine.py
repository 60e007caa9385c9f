"""The Hugging Face engine against plain transformers: logprobs, batching, prefixes, new weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hf_models as models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract import wire
from broker.errors import TransferFailed, UserError
from broker.weights.probe import make_probe
from rollout.config import RolloutSection
from rollout.engines.base import NO_VERSION, EngineConfig, GenerationOutput, UpdateMode
from rollout.engines.hf.engine_core import MAX_FAILURES, EngineCore

CLOSE = 1e-4
Open = Callable[..., EngineCore]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def qwen3(folder: Path) -> Path:
    return models.make("qwen3", folder)


@contextmanager
def opened(path: Path, version: int = 0, **section: Any) -> Iterator[EngineCore]:
    settings = {"max_running": 4, "max_context_tokens": 128, "num_threads": 1, **section}
    core = EngineCore(
        EngineConfig(str(path), RolloutSection(**settings), device="cpu", policy_version=version)
    )
    yield core
    core.model.close()


def turn(core: EngineCore, steps: int = 1, now: float = 0.0) -> None:
    for _ in range(steps):
        core.admit(now)
        if core.can_step:
            core.step()


def drained(core: EngineCore, now: float = 0.0) -> dict[str, GenerationOutput]:
    """Run until nothing is left; every answer since the last call."""
    while core.scheduler.num_running + core.scheduler.num_waiting:
        before = (
            core.scheduler.num_running + core.scheduler.num_waiting,
            core.stats().generated_tokens,
            core.stats().prefill_tokens,
        )
        turn(core, now=now)
        after = (
            core.scheduler.num_running + core.scheduler.num_waiting,
            core.stats().generated_tokens,
            core.stats().prefill_tokens,
        )
        assert before != after, "the engine stands still"
    answers = dict(core.outbox)
    core.outbox.clear()
    return answers


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(2, models.VOCAB) for _ in range(length)]


def assert_logprobs(
    model: Any, context: list[int], output: GenerationOutput, temperature: float = 1.0
) -> None:
    expected = models.logprobs(model, context, list(output.token_ids), temperature)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=CLOSE, rtol=0)


# ------------------------------------------------------------------------------------- logprobs and
# batching


@pytest.mark.parametrize("name", models.ARCHITECTURES)
@pytest.mark.parametrize("prefill_tokens", [4096, 7], ids=["whole", "in parts"])
def test_logprobs_are_those_of_a_plain_forward(
    name: str, prefill_tokens: int, folder: Path
) -> None:
    """Nine requests of three turns through four slots, prompts read whole or seven tokens at a
    time.
    """
    path = models.make(name, folder)
    model = models.load(path)
    contexts = {str(i): prompt(3 + 5 * i, seed=i) for i in range(9)}
    temperatures = {str(i): (1.0, 0.6, 1.7)[i % 3] for i in range(9)}
    with opened(path, prefill_tokens=prefill_tokens) as core:
        for round_ in range(3):
            for key, context in contexts.items():
                how = {
                    "seed": int(key),
                    "temperature": temperatures[key],
                    "max_tokens": 3 + int(key) % 4,
                }
                core.submit(
                    models.request(f"{key}-{round_}", context, conversation=key, **how), 0.0
                )
            for request_id, output in drained(core).items():
                key = request_id.partition("-")[0]
                assert output.finish_reason == "length", output.error
                assert output.version_runs == [(0, 3 + int(key) % 4)]
                assert_logprobs(model, contexts[key], output, temperatures[key])
                contexts[key] += [*output.token_ids, *prompt(4, seed=round_)]
        assert core.stats().prefix_hit_tokens > 0


def test_temperature_top_k_and_greedy_logprobs(qwen3: Path) -> None:
    model, context = models.load(qwen3), prompt(10)
    with opened(qwen3) as core:
        core.submit(models.request("k", context, top_k=3, temperature=0.8, seed=1), 0.0)
        core.submit(models.request("greedy", context, temperature=0), 0.0)
        answers = drained(core)
    ids = list(context)
    for token, logprob in zip(answers["k"].token_ids, answers["k"].logprobs, strict=True):
        with torch.no_grad():
            best = (model(torch.tensor([ids])).logits[0, -1] / 0.8).topk(3)
        place = best.indices.tolist().index(token)
        assert abs(float(best.values.log_softmax(-1)[place]) - logprob) < CLOSE
        ids.append(token)
    generated = model.generate(
        torch.tensor([context]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert answers["greedy"].token_ids == generated[0, len(context) :].tolist()
    assert answers["greedy"].logprobs == [0.0] * 8


def test_a_seed_gives_the_same_tokens_alone_and_in_company(qwen3: Path) -> None:
    def run(others: int, **section: Any) -> GenerationOutput:
        with opened(qwen3, **section) as core:
            for i in range(others):
                core.submit(
                    models.request(f"o{i}", prompt(4 + 3 * i, seed=i), seed=i, max_tokens=3 + i),
                    0.0,
                )
                turn(core)
            core.submit(models.request("x", prompt(12), seed=42, max_tokens=20), 0.0)
            return drained(core)["x"]

    alone = run(0)
    assert run(3).token_ids == run(7, prefill_tokens=5).token_ids == alone.token_ids
    with opened(qwen3) as core:
        for name, seed in (("a", 43), ("b", None), ("c", None)):
            core.submit(models.request(name, prompt(12), seed=seed, max_tokens=20), 0.0)
        answers = drained(core)
    assert len({tuple(alone.token_ids), *(tuple(answers[name].token_ids) for name in "abc")}) == 4


def test_going_on_from_a_partial_output_gives_the_same_tokens(qwen3: Path) -> None:
    with opened(qwen3) as core:
        core.submit(models.request("whole", prompt(9), seed=5, max_tokens=12), 0.0)
        whole = list(drained(core)["whole"].token_ids)
        core.submit(models.request("rest", prompt(9) + whole[:5], seed=5, max_tokens=7), 0.0)
        assert drained(core)["rest"].token_ids == whole[5:]


def test_more_requests_than_slots_longest_first(qwen3: Path) -> None:
    with opened(qwen3, max_running=2) as core:
        for i, length in enumerate((2, 9, 4, 7)):
            core.submit(models.request(str(i), prompt(5), max_tokens=length), 0.0)
        turn(core)
        assert {job.request_id for job in core.scheduler.running} == {"1", "3"}
        assert core.stats().waiting == 2
        assert {key: len(output.token_ids) for key, output in drained(core).items()} == {
            "0": 2,
            "1": 9,
            "2": 4,
            "3": 7,
        }


# ---------------------------------------------------------------------------------------------------
# prefixes


def test_an_answer_of_a_later_step_makes_way_and_goes_on_where_it_was(qwen3: Path) -> None:
    context, fields = prompt(9), {"max_tokens": 60, "seed": 3}
    with opened(qwen3, max_running=1, preempt_after_s=1.0) as core:
        core.submit(models.request("whole", context, **fields), 0.0)
        whole = drained(core)["whole"]
        core.submit(models.request("later", context, conversation="c", step=5, **fields), 0.0)
        turn(core, 4)
        core.submit(models.request("needed", prompt(5), max_tokens=3, step=4), 0.5)
        turn(core, now=1.4)
        assert not core.outbox
        answers = drained(core, now=1.5)
        part = answers["later"]
        assert (part.finish_reason, list(part.token_ids)) == ("abort", list(whole.token_ids[:5]))
        assert len(answers["needed"].token_ids) == 3
        rest = models.request(
            "rest", [*context, *part.token_ids], conversation="c", **fields | {"max_tokens": 55}
        )
        core.submit(rest, 2.0)
        end = drained(core, now=2.0)["rest"]
        assert [*part.token_ids, *end.token_ids] == list(whole.token_ids)


def test_a_longer_conversation_runs_only_what_is_new(qwen3: Path) -> None:
    context = prompt(20)
    with opened(qwen3) as core:
        core.submit(models.request("1", context, conversation="c", max_tokens=3), 0.0)
        first = drained(core)["1"]
        context += [*first.token_ids, *prompt(6)]
        read = core.stats().prefill_tokens
        core.submit(models.request("2", context, conversation="c", max_tokens=3), 0.0)
        second = drained(core)["2"]
        assert second.prefix_hit_tokens == 22  # the third sampled token was never run
        assert core.stats().prefill_tokens - read == 7
    assert_logprobs(models.load(qwen3), context, second)


def test_another_conversation_copies_what_a_slot_still_holds(qwen3: Path) -> None:
    with opened(qwen3) as core:
        core.submit(models.request("1", prompt(20), conversation="c"), 0.0)
        drained(core)
        core.submit(models.request("2", prompt(20), conversation="d"), 0.0)
        assert drained(core)["2"].prefix_hit_tokens == 19
        core.submit(models.request("3", [*prompt(20)[:12], *prompt(9)], conversation="e"), 0.0)
        output = drained(core)["3"]
    assert output.prefix_hit_tokens == 12
    assert_logprobs(models.load(qwen3), [*prompt(20)[:12], *prompt(9)], output)


def test_a_beginning_that_prompts_share_is_computed_once(qwen3: Path) -> None:
    system = prompt(30)
    prompts = {str(n): [*system, *prompt(10 + n, seed=n)] for n in range(1, 5)}
    with opened(qwen3) as core:
        for name, context in prompts.items():
            core.submit(models.request(name, context, max_tokens=3), 0.0)
        outputs = drained(core)
        assert [outputs[name].prefix_hit_tokens for name in prompts] == [0, 30, 30, 30]
    model = models.load(qwen3)
    for name, context in prompts.items():
        assert_logprobs(model, context, outputs[name])


def test_a_request_does_not_wait_for_a_small_part_of_its_prompt(qwen3: Path) -> None:
    system = prompt(9)
    with opened(qwen3) as core:
        for n in (1, 2):
            context = [*system, *prompt(20 + n, seed=n)]
            core.submit(models.request(str(n), context, max_tokens=3), 0.0)
        turn(core)
        assert core.stats().generated_tokens == 2
        assert drained(core)["2"].prefix_hit_tokens == 0


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_is_shared_the_logprobs_are_those_of_the_whole_context(
    data: st.DataObject, qwen3: Path
) -> None:
    """Prompts of few pieces, in few slots, with aborts and new weights in between."""
    pieces = [prompt(length, seed=length) for length in (8, 9, 17)]
    contexts: dict[str, list[int]] = {}
    outputs: dict[str, GenerationOutput] = {}
    model = models.load(qwen3)
    tensors = models.changed(model, seed=1)
    with opened(qwen3, max_running=3, prefill_tokens=16) as core:
        for number in range(data.draw(st.integers(2, 9))):
            chosen = data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=4))
            contexts[str(number)] = context = [token for piece in chosen for token in piece]
            conversation = data.draw(st.sampled_from(["a", "b", str(number)]))
            asked = models.request(
                str(number), context, max_tokens=4, seed=number, conversation=conversation
            )
            core.submit(asked, 0.0)
            turn(core, data.draw(st.integers(0, 3)))
            if data.draw(st.integers(0, 5)) == 0:
                core.abort(data.draw(st.sampled_from(sorted(contexts))))
        outputs |= drained(core)
        core.update(tensors, 1, "keep", None)
        for name, context in contexts.items():
            core.submit(models.request(f"{name} again", context, max_tokens=2), 0.0)
        later = drained(core)
    for name, output in outputs.items():
        if len(output.token_ids):  # not aborted before
            assert_logprobs(model, contexts[name], output)
    model.load_state_dict(tensors, strict=False)
    for name, context in contexts.items():
        assert_logprobs(model, context, later[f"{name} again"])


@pytest.mark.parametrize("prefill_tokens", [7, 4096])
def test_a_prompt_that_several_requests_begin_with_is_computed_once(
    prefill_tokens: int, qwen3: Path
) -> None:
    rng = random.Random(5)
    prompt, other = ([rng.randrange(1, models.VOCAB) for _ in range(n)] for n in (20, 23))
    prompts = [prompt, other, prompt, prompt]
    asked = [models.request(str(i), one, max_tokens=6, seed=i) for i, one in enumerate(prompts)]
    with opened(qwen3, prefill_tokens=prefill_tokens) as core:
        for one in asked:
            core.submit(one, 0.0)
        found = drained(core)
        assert [found[str(i)].prefix_hit_tokens for i in range(4)] == [0, 0, 19, 19]
        # all of the first two; of the others only the last token, in a pass that nobody prefills in
        assert core.stats().prefill_tokens <= 20 + 23 + 2 + 4 * 4
        assert core.stats().prefix_hit_tokens == 38
    with opened(qwen3) as alone:
        for i, one in enumerate(asked):
            alone.submit(one, 0.0)
            expected = drained(alone)[str(i)]
            assert (found[str(i)].token_ids, found[str(i)].version_runs) == (
                expected.token_ids,
                expected.version_runs,
            )
            assert found[str(i)].logprobs == pytest.approx(expected.logprobs, abs=CLOSE)


@pytest.mark.parametrize("why", ["abort", "update", "recompute"])
def test_a_request_computes_its_prompt_if_the_one_it_waits_for_cannot(
    why: str, qwen3: Path
) -> None:
    prompt = [random.Random(6).randrange(1, models.VOCAB) for _ in range(30)]
    asked = [models.request(str(i), prompt, max_tokens=4, seed=i) for i in range(2)]
    with opened(qwen3, prefill_tokens=8) as core:
        for one in asked:
            core.submit(one, 0.0)
        turn(core)  # 8 of the first one's 30 tokens
        if why == "abort":
            core.abort("0")
        else:
            core.update(
                core.model.weights(), 1, "recompute" if why == "recompute" else "keep", None
            )
        found = drained(core)
        assert [found[str(i)].prefix_hit_tokens for i in range(2)] == [0, 0]
        assert len(found["1"].token_ids) == 4
    with opened(qwen3) as alone:
        alone.submit(asked[1], 0.0)
        assert drained(alone)["1"].logprobs == pytest.approx(found["1"].logprobs, abs=CLOSE)


def test_no_request_uses_a_prompt_of_older_weights(qwen3: Path) -> None:
    prompt = [random.Random(7).randrange(1, models.VOCAB) for _ in range(20)]
    with opened(qwen3) as core:
        core.submit(models.request("old", prompt, max_tokens=60), 0.0)
        turn(core, 3)
        core.update(core.model.weights(), 1, "keep", None)
        core.submit(models.request("new", prompt, max_tokens=2), 0.0)
        turn(core, 1)
        core.submit(models.request("newer", prompt, max_tokens=2), 0.0)
        found = drained(core)
        assert (found["new"].prefix_hit_tokens, found["newer"].prefix_hit_tokens) == (0, 19)


def test_an_aborted_request_leaves_a_usable_prefix(qwen3: Path) -> None:
    context = prompt(30)
    with opened(qwen3, prefill_tokens=8) as core:
        core.submit(models.request("1", context, conversation="c"), 0.0)
        turn(core, steps=2)  # 16 of 30 tokens are read
        core.abort("1")
        assert core.outbox.pop()[1] == GenerationOutput([], [], [], "abort", 0)
        core.submit(models.request("2", context, conversation="c", seed=1), 0.0)
        output = drained(core)["2"]
    assert output.prefix_hit_tokens == 16
    assert_logprobs(models.load(qwen3), context, output)


# -------------------------------------------------------------------------------------------------
# new weights


def in_flight(core: EngineCore, context: list[int]) -> None:
    core.submit(models.request("x", context, seed=3, max_tokens=10, conversation="c"), 0.0)
    while core.stats().generated_tokens < 4:  # the last of them is not run yet
        turn(core)


def test_recompute_goes_on_as_if_the_new_weights_had_read_everything(qwen3: Path) -> None:
    old, new, context = models.load(qwen3), models.load(qwen3), prompt(11)
    tensors = models.changed(old, seed=1)
    new.load_state_dict(tensors, strict=False)
    with opened(qwen3, prefill_tokens=6) as core:
        in_flight(core, context)
        core.update(tensors, 1, "recompute", None)
        output = drained(core)["x"]
        assert output.version_runs == [(0, 4), (1, 6)]
        expected = torch.cat(
            [
                models.logprobs(old, context, list(output.token_ids[:4])),
                models.logprobs(
                    new, context + list(output.token_ids[:4]), list(output.token_ids[4:])
                ),
            ]
        )
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=CLOSE, rtol=0)
        core.submit(models.request("y", context + list(output.token_ids), conversation="c"), 0.0)
        again = drained(core)["y"]
        # rebuilt from the new weights, so it is kept
        assert again.prefix_hit_tokens == len(context) + 9
    assert_logprobs(new, context + list(output.token_ids), again)


@torch.no_grad()
def test_keep_goes_on_with_the_old_keys_and_values(qwen3: Path) -> None:
    old, new, context = models.load(qwen3), models.load(qwen3), prompt(11)
    tensors = models.changed(old, seed=1)
    new.load_state_dict(tensors, strict=False)
    with opened(qwen3) as core:
        in_flight(core, context)
        core.update(tensors, 1, "keep", None)
        output = drained(core)["x"]
        assert output.version_runs == [(0, 4), (1, 6)]
        sampled = list(output.token_ids)
        cache = old(torch.tensor([context + sampled[:3]]), use_cache=True).past_key_values
        logits = new(torch.tensor([sampled[3:9]]), past_key_values=cache, use_cache=True).logits[0]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sampled[4:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs[4:]), expected, atol=CLOSE, rtol=0)
        core.submit(models.request("y", context + sampled, conversation="c"), 0.0)
        again = drained(core)["y"]
        assert again.prefix_hit_tokens == 0  # its slot holds old keys
    assert_logprobs(new, context + sampled, again)


def test_abort_returns_the_partial_output_and_the_queue_goes_on(qwen3: Path) -> None:
    old, new, context = models.load(qwen3), models.load(qwen3), prompt(11)
    tensors = models.changed(old, seed=1)
    new.load_state_dict(tensors, strict=False)
    with opened(qwen3, max_running=1) as core:
        in_flight(core, context)
        core.submit(models.request("waits", context, seed=9), 0.0)
        core.update(tensors, 1, "abort", None)
        answers = drained(core)
    assert (answers["x"].finish_reason, answers["x"].version_runs) == ("abort", [(0, 4)])
    assert_logprobs(old, context, answers["x"])
    assert answers["waits"].version_runs == [(1, 8)]
    assert_logprobs(new, context, answers["waits"])


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_idle_prefixes_are_never_stale(mode: UpdateMode, qwen3: Path) -> None:
    old, new, context = models.load(qwen3), models.load(qwen3), prompt(20)
    tensors = models.changed(old, seed=2)
    new.load_state_dict(tensors, strict=False)
    with opened(qwen3) as core:
        core.submit(models.request("1", context, conversation="c"), 0.0)
        drained(core)
        core.update(tensors, 1, mode, None)
        core.submit(models.request("2", context, conversation="c", temperature=0.7), 0.0)
        output = drained(core)["2"]
    assert output.prefix_hit_tokens == 0
    assert_logprobs(new, context, output, 0.7)


def test_two_updates_before_the_next_token_leave_no_empty_run(qwen3: Path) -> None:
    tensors = models.changed(models.load(qwen3), seed=1)
    with opened(qwen3) as core:
        in_flight(core, prompt(5))
        core.update(tensors, 1, "keep", None)
        core.update(tensors, 2, "keep", None)
        assert drained(core)["x"].version_runs == [(0, 4), (2, 6)]


def probe_of(model: Any, tolerance: float = 1e-3, shift: float = 0.0) -> wire.Probe:
    ids = prompt(8, seed=77)
    return make_probe(
        ids, models.logprobs(model, ids[:1], ids[1:]).numpy() + shift, tolerance=tolerance
    )


def test_weights_are_served_only_once_their_probe_matched(qwen3: Path) -> None:
    old, new, context = models.load(qwen3), models.load(qwen3), prompt(11)
    tensors = models.changed(old, seed=1)
    new.load_state_dict(tensors, strict=False)
    with opened(qwen3) as core:
        in_flight(core, context)
        core.submit(models.request("late", context, seed=1), 0.0)
        with pytest.raises(TransferFailed, match="loaded incorrectly"):
            core.update(tensors, 1, "recompute", probe_of(old))
        assert core.version == NO_VERSION
        turn(core, steps=3)
        assert not core.can_step
        assert core.outbox == []
        core.update(tensors, 1, "recompute", probe_of(new))
        assert core.version == 1
        answers = drained(core)
    assert answers["x"].version_runs == [(0, 4), (1, 6)]
    assert answers["late"].version_runs == [(1, 8)]
    assert_logprobs(new, context, answers["late"])


def test_an_update_that_does_not_fit_changes_nothing(qwen3: Path) -> None:
    model, context = models.load(qwen3), prompt(9)
    good = models.changed(model, seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    with opened(qwen3) as core:
        for bad, why in (
            (
                {k: v for k, v in good.items() if k != name},
                rf"lacks 1 of \d+ tensors, the first is {name}",
            ),
            ({**good, "extra": torch.zeros(1)}, "has 1 unknown tensors, the first is extra"),
            ({**good, name: torch.zeros(2, 3)}, rf"{name} has shape \(2, 3\)"),
        ):
            with pytest.raises(TransferFailed, match=why):
                core.update(bad, 1, "keep", None)
        assert core.version == 0
        core.submit(models.request("x", context), 0.0)
        assert_logprobs(model, context, drained(core)["x"])


def test_adopting_a_version_keeps_weights_and_prefixes(qwen3: Path) -> None:
    with opened(qwen3, version=NO_VERSION) as core:
        core.submit(models.request("1", prompt(20), conversation="c"), 0.0)
        turn(core)
        assert core.stats().waiting == 1
        core.adopt(7)
        assert drained(core)["1"].version_runs == [(7, 8)]
        core.adopt(8)
        core.submit(models.request("2", prompt(21), conversation="c", min_version=8), 0.0)
        output = drained(core)["2"]
    assert output.version_runs == [(8, 8)]


def test_an_older_version_of_a_new_learner_ends_what_may_not_go_on(qwen3: Path) -> None:
    tensors = models.changed(models.load(qwen3), seed=1)
    with opened(qwen3, version=5) as core:
        core.submit(models.request("new", prompt(5), min_version=5), 0.0)
        core.submit(models.request("old", prompt(5), min_version=2), 0.0)
        turn(core, steps=2)
        core.update(tensors, 3, "keep", None)
        answers = drained(core)
    assert (answers["new"].finish_reason, answers["new"].version_runs) == ("abort", [(5, 2)])
    assert (answers["old"].finish_reason, answers["old"].version_runs) == (
        "length",
        [(5, 2), (3, 6)],
    )


def test_names_of_the_weights_are_the_models_own_with_tied_ones_once(qwen3: Path) -> None:
    with opened(qwen3) as core:
        found = core.model.weights()
    expected = dict(models.load(qwen3).named_parameters())
    assert found.keys() == expected.keys()
    assert "lm_head.weight" not in found
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_probe_logprobs(qwen3: Path) -> None:
    ids = prompt(30)
    with opened(qwen3) as core:
        in_flight(core, prompt(11))
        found = core.model.logprobs(ids)
        assert drained(core)["x"].finish_reason == "length"
    torch.testing.assert_close(
        found, models.logprobs(models.load(qwen3), ids[:1], ids[1:]), atol=CLOSE, rtol=0
    )


# ----------------------------------------------------------------------------------------------------
# failures


def test_a_pass_that_breaks_ends_its_requests_and_no_others(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, context = models.load(qwen3), prompt(9)
    with opened(qwen3, max_running=1) as core:
        forward = core.model.forward
        calls = iter([True, False])

        def breaks_once(*args: Any) -> torch.Tensor:
            if next(calls, False):
                raise RuntimeError("out of memory\nmore")
            return forward(*args)

        monkeypatch.setattr(core.model, "forward", breaks_once)
        core.submit(models.request("1", context, max_tokens=9), 0.0)
        core.submit(models.request("2", context), 0.0)
        answers = drained(core)
        assert answers["1"] == GenerationOutput(error="the forward pass failed: out of memory")
        assert_logprobs(model, context, answers["2"])

        def breaks(*_: Any) -> torch.Tensor:
            raise RuntimeError("device lost")

        monkeypatch.setattr(core.model, "forward", breaks)
        for i in range(MAX_FAILURES):
            core.submit(models.request(f"3{i}", context), 0.0)
        with pytest.raises(RuntimeError, match="device lost"):
            drained(core)


def test_logits_that_are_not_finite_end_the_request_with_an_error_and_leave_nothing_behind(
    qwen3: Path,
) -> None:
    model = models.load(qwen3)
    good = dict(model.named_parameters())
    bad = {name: torch.full_like(t, float("nan")) for name, t in good.items()}
    with opened(qwen3) as core:
        core.update(bad, 1, "keep", None)
        for name in "xy":
            core.submit(models.request(name, prompt(40)), 0.0)
        first = next(iter(good))
        found = f"the model's logits are not finite: the weight {first} holds nan at [0, 0] "
        size = good[first].numel()
        error = f"{found}({size} of its {size} values are not finite)"
        assert drained(core) == {name: GenerationOutput(error=error) for name in "xy"}
        core.update(good, 2, "keep", None)
        # side by side, so that the shorter one's slot is read beyond its end
        for length in (9, 30):
            core.submit(models.request(str(length), prompt(length)), 0.0)
        for name, output in drained(core).items():
            assert_logprobs(model, prompt(int(name)), output)


def test_settings_that_do_not_fit_the_model(qwen3: Path) -> None:
    def refused(match: str, **section: Any) -> None:
        with pytest.raises(UserError, match=match):
            EngineCore(EngineConfig(str(qwen3), RolloutSection(**section), device="cpu"))

    refused(
        r"rollout.max_context_tokens: 300 is not allowed; the model has 256 positions",
        max_context_tokens=300,
    )
    refused(
        r"kv_cache_gib: 1e-05 is not allowed; one slot of",
        max_context_tokens=256,
        engine_args={"kv_cache_gib": 1e-5},
    )
    with opened(
        qwen3,
        max_context_tokens=256,
        max_running=8,
        engine_args={"kv_cache_gib": 3 * 256 * 768 / 2**30},
    ) as core:
        # 2 layers x 2 heads x (24 + 24) x 4 bytes a token
        assert (core.model.num_slots, core.model.max_running) == (3, 3)


def test_paths_that_are_no_model(tmp_path: Path, folder: Path) -> None:
    def refused(path: Path | str, match: str) -> None:
        with pytest.raises(UserError, match=match) as caught:
            EngineCore(EngineConfig(str(path), RolloutSection(max_context_tokens=64), device="cpu"))
        assert "\n" not in str(caught.value)

    refused(tmp_path, "the folder has no config.json")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    refused(tmp_path, "no causal language model could be loaded")
    (tmp_path / "config.json").write_text('{"model_type": "never_heard"}')
    refused(tmp_path, "no causal language model could be loaded")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "no causal language model could be loaded")
    refused(tmp_path / "missing", "missing")


def test_an_architecture_that_slots_cannot_serve_is_refused(tmp_path: Path) -> None:
    """ALiBi reads positions off the attention mask."""
    import transformers

    torch.manual_seed(0)
    transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="engine hf cannot run BloomForCausalLM"):
        EngineCore(EngineConfig(str(tmp_path), RolloutSection(max_context_tokens=64), device="cpu"))


def test_freed_memory_is_kept_where_the_c_library_can() -> None:
    """Passes after the first fault in (almost) no new pages."""
    import platform
    import resource

    from rollout.engines.hf.malloc_settings import keep_freed_memory

    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
    if platform.libc_ver()[0] != "glibc":
        return

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (1, 3, 7, 5):
            del_me = [torch.ones(size << 18) for _ in range(3)]
            del del_me
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # 3 x 7 MiB would be 5,000 every time; what others have freed before may lie so that it takes a
    # few times to find its place.
    assert min(faults() for _ in range(6)) < 100
