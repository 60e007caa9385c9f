"""Packed rows: the same numbers as padded ones, for models that allow it; the others are refused or
padded.
"""

import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_backend_kit import VOCAB, backend, gradient, plain_logprobs, sample, samples, save_model

from broker.errors import ConfigError
from learner.algorithm.aggregation import MODES
from learner.algorithm.packing import cut_micro_batches
from learner.backends.models.batch import collate_samples
from learner.backends.models.packed_rows import MAX_LENGTH_RATIO, SharedRow, pack_row
from learner.config import AlgorithmSection, CriticSection, TrainSection
from rlearner_text.config import ModelSection

CPU = torch.device("cpu")
PACKED, PADDED = (
    TrainSection(lr=1e-3, device="cpu", packing=kind) for kind in ("packed", "padded")
)
few = settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
GOOD = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_key_value_heads": 2}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"num_key_value_heads": 4}),
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {"num_key_value_heads": 2}),
}
BAD = {
    "recurrent": (transformers.MambaConfig, transformers.MambaForCausalLM, {"state_size": 4}),
    "alibi": (transformers.BloomConfig, transformers.BloomForCausalLM, {"n_head": 4, "n_layer": 2}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def save(folder, config_class, model_class, more):
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **more}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(folder)
    return str(folder)


def relative(a, b):
    """Rounding in float32 comes to about 1e-6 here, a token in the wrong place to more than 1e-3."""
    return float((a - b).norm() / b.norm())


def accumulated(path, batches, algorithm, train, **rest):
    trainer = backend(path, algorithm=algorithm, train=train, **rest)
    for batch in batches:
        trainer.forward_backward(batch)
    return gradient(trainer)


def test_the_layout_by_hand():
    # 4 and 5 are like each other (5 <= 1.25 * 4), 8 is not; 30 stands alone. Order in the row: 8,
    # 4, 30, 5, 8.
    row = SharedRow.of([np.full(length, number) for number, length in enumerate([8, 4, 30, 5, 8])])
    found = pack_row(row.indices, CPU)
    assert MAX_LENGTH_RATIO == 1.25
    assert found.shapes == ((2, 5), (2, 8), (1, 30))
    # the sequence of 4 with its last token again in its fifth place, then that of 5, those of 8,
    # that of 30
    expected = [8, 9, 10, 11, 11, *range(42, 47), *range(8), *range(47, 55), *range(12, 42)]
    assert found.spread.tolist() == expected
    assert found.gather.tolist() == [
        *range(10, 18),
        *range(4),
        *range(26, 56),
        *range(5, 10),
        *range(18, 26),
    ]
    alone = pack_row([np.arange(3), np.arange(3, 6)], CPU)
    assert (alone.shapes, alone.spread, alone.gather) == (((2, 3),), None, None)


def test_a_shared_row_by_hand():
    # in order: 5 6, 5 6 7, 5 6 9 9, 8; the second adds its 7 to the first, the third its 9 9
    row = SharedRow.of([np.array(ids) for ids in ([5, 6, 9, 9], [8], [5, 6], [5, 6, 7], [5, 6])])
    assert row.token_ids.tolist() == [5, 6, 7, 9, 9, 8]
    assert row.places.tolist() == [0, 1, 2, 2, 3, 0]
    assert [one.tolist() for one in row.indices] == [[0, 1, 3, 4], [5], [0, 1], [0, 1, 2], [0, 1]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12))
def test_a_row_has_every_prefix_once(sequences):
    row = SharedRow.of([np.array(one, np.int32) for one in sequences])
    assert [row.token_ids[where].tolist() for where in row.indices] == sequences
    assert [row.places[where].tolist() for where in row.indices] == [
        list(range(len(one))) for one in sequences
    ]
    assert len(row.token_ids) == len(
        {tuple(one[:n]) for one in sequences for n in range(1, len(one) + 1)}
    )


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12))
def test_a_layout_takes_every_token_there_and_back(sequences):
    row = SharedRow.of([np.array(one) for one in sequences])
    states = torch.randn(1, 2, len(row.token_ids), 3)
    packing = pack_row(row.indices, CPU)
    rows = packing.rows(states)
    assert torch.equal(packing.flat(rows), states[0].transpose(0, 1))
    # (longest, heads, width), by length
    found = [one.transpose(0, 1) for part in rows for one in part]
    for where, one in zip(sorted(row.indices, key=len), found, strict=True):
        assert torch.equal(one[: len(where)], states[0].transpose(0, 1)[torch.from_numpy(where)])


def test_a_packed_batch_by_hand():
    rng = np.random.default_rng(0)
    first, second = sorted((sample(rng, 6), sample(rng, 4)), key=lambda one: one.token_ids[0])
    assert first.token_ids[0] < second.token_ids[0]
    found = collate_samples([first, second], CPU, packed=True)
    ends = [one.num_inputs for one in (first, second)]
    assert found.input_ids.tolist() == [[*first.token_ids[: ends[0]], *second.token_ids[: ends[1]]]]
    assert found.position_ids.tolist() == [[*range(ends[0]), *range(ends[1])]]
    assert found.predictors.tolist() == [*(first.positions - 1), *(ends[0] + second.positions - 1)]
    assert found.sequence.tolist() == [0] * first.num_tokens + [1] * second.num_tokens


def groups(seed, number, size, prompt):
    """Groups whose samples share a prompt, in a random order."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(number):
        shared = rng.integers(1, VOCAB, prompt).astype(np.int32)
        for one in (sample(rng, int(rng.integers(prompt + 2, prompt + 14))) for _ in range(size)):
            one.token_ids[:prompt] = shared
            found.append(one)
    return [found[index] for index in rng.permutation(len(found))]


def test_a_groups_prompt_is_computed_once(path):
    rows, algorithm = groups(0, 3, 4, 9), AlgorithmSection()
    found = collate_samples(rows, CPU, packed=True)
    read = [one.token_ids[: one.num_inputs].tolist() for one in rows]
    distinct = {tuple(one[:n]) for one in read for n in range(1, len(one) + 1)}
    assert found.input_ids.numel() == len(distinct) < 0.6 * sum(map(len, read))
    expected = accumulated(path, [rows], algorithm, PADDED, max_length=50)
    assert relative(accumulated(path, [rows], algorithm, PACKED, max_length=50), expected) < 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_those_of_one_row_at_a_time(path, temperature):
    trainer, rows = backend(path, train=PACKED), samples(1, 20, temperature=temperature)
    with torch.no_grad():
        logprobs, entropies = trainer.policy.score(collate_samples(rows, CPU, packed=True))
        expected = [plain_logprobs(trainer.policy.module, one) for one in rows]
    torch.testing.assert_close(
        logprobs, torch.cat([chosen for chosen, _ in expected]), rtol=0, atol=2e-6
    )
    torch.testing.assert_close(
        entropies, torch.cat([entropy for _, entropy in expected]), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("mode", MODES)
@few
@given(seed=st.integers(0, 99), cuts=st.lists(st.integers(0, 9), max_size=4))
def test_the_gradient_is_the_same_packed_or_padded_however_cut(path, mode, seed, cuts):
    rows, algorithm = samples(seed), AlgorithmSection(loss_agg_mode=mode)
    parts = [rows[a:b] for a, b in itertools.pairwise(sorted({0, 9, *cuts}))]
    expected = accumulated(path, [rows], algorithm, PADDED, max_length=50)
    assert relative(accumulated(path, parts, algorithm, PACKED, max_length=50), expected) < 1e-5


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmSection(pg_variant="gspo", correction="tis", correction_level="sequence"),
        AlgorithmSection(kl_coef=0.2, entropy_coef=0.03, loss_agg_mode="seq-mean-token-mean"),
        AlgorithmSection(correction="decoupled", prox_logp_method="interpolate"),
    ],
    ids=["gspo", "kl_and_entropy", "decoupled"],
)
def test_steps_are_the_same_packed_or_padded(path, tmp_path, algorithm):
    other, found = save_model(tmp_path, seed=1), []
    for train in (PACKED, PADDED):
        trainer = backend(path, algorithm=algorithm, train=train, ref_path=other)
        metrics = []
        for step in range(2):
            for micro in cut_micro_batches(samples(step, 20), 90, packed=train is PACKED):
                trainer.forward_backward(micro)
            metrics.append(trainer.step())
        found.append(metrics)
    for packed, padded in zip(*found, strict=True):
        assert packed.pop("actor/num_padded_tokens") <= packed["actor/num_input_tokens"]
        assert padded.pop("actor/num_padded_tokens") > padded["actor/num_input_tokens"]
        assert packed == pytest.approx(padded, rel=1e-5, abs=1e-6)


def test_the_critic_is_the_same_packed_or_padded(path):
    algorithm = AlgorithmSection(
        adv_estimator="gae", critic=CriticSection(enabled=True, lr=1e-2), num_epochs=2
    )
    values = []
    for train in (PACKED, PADDED):
        trainer = backend(path, algorithm=algorithm, train=train)
        rows = samples(1)
        told = [
            {
                "values": np.zeros(len(one.token_ids), np.float32),
                "returns": one.advantages,
                "proximal_logprobs": one.rollout_logprobs,
            }
            for one in rows
        ]
        trainer.update(
            [
                type(one)(**{**vars(one), **more})
                for one, more in zip(map(_plain, rows), told, strict=True)
            ]
        )
        values.append(np.concatenate([scores.values for scores in trainer.score(rows)]))
    assert np.abs(values[1]).max() > 0.01
    np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-5)


def _plain(one):
    vars(one).pop("positions", None)  # what was cached
    return one


@pytest.mark.parametrize("name", GOOD)
def test_other_architectures_are_exact(tmp_path, name):
    trainer, rows = backend(save(tmp_path, *GOOD[name]), train=PACKED), samples(2, 12)
    with torch.no_grad():
        logprobs, _ = trainer.policy.score(collate_samples(rows, CPU, packed=True))
        expected = torch.cat([plain_logprobs(trainer.policy.module, one)[0] for one in rows])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", BAD)
def test_models_that_are_not_exact_are_refused_or_padded(tmp_path, name, caplog):
    where, rows = save(tmp_path, *BAD[name]), samples(3, 5)
    with pytest.raises(
        ConfigError,
        match=r"train.packing: 'packed' is not allowed; .* is not exact in packed rows \(.*\): auto or padded",
    ):
        backend(where, train=PACKED)
    caplog.set_level("INFO")
    trainer = backend(where, train=TrainSection(lr=1e-3, device="cpu"))
    assert [
        record.getMessage()
        for record in caplog.records
        if "padded, not packed" in record.getMessage()
    ]
    trainer.forward_backward(rows)
    reference = backend(where, train=PADDED)
    reference.forward_backward(rows)
    assert torch.equal(gradient(trainer), gradient(reference))  # nothing is left of the attempt


def test_bfloat16(tmp_path):
    where = save_model(tmp_path, dtype=torch.bfloat16)
    found = [accumulated_masters(where, train) for train in (PACKED, PADDED)]
    assert relative(*found) < 0.02


def accumulated_masters(path, train):
    trainer = backend(path, train=train, model=ModelSection(dtype="bfloat16"))
    trainer.forward_backward(samples(4, 12))
    return torch.cat(
        [master.grad.flatten() for master in trainer.worker.optimizer._masters.values()]
    )
