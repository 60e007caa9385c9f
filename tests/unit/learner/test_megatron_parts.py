"""What of the backend megatron needs neither Megatron nor other processes: whose part is what, in
which order, and what is refused.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config

from broker.errors import ConfigError
from broker.settings.runspec import validate
from learner.backends.megatron.architecture import DecoderArchitecture, architecture_of, check_sizes
from learner.backends.megatron.grid import RankGrid
from learner.backends.megatron.mapping import parts_of, take_share
from learner.backends.megatron.pipeline import StagePipeline, pass_order
from learner.backends.megatron.row_exchange import RowExchange
from learner.backends.megatron.tensor_exchange import TensorExchange
from learner.backends.parts.names import MODEL
from learner.backends.parts.slices import Slice
from learner.backends.parts.slices import copy_slices as stage_slices
from learner.backends.parts.stored import StoredTensors
from learner.backends.parts.writing import write_part
from learner.backends.sent_runs import RunsInOrder
from learner.offline import config as offline
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

LAKE = {
    "env": "frozenlake",
    "group_size": 4,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "deadline_s": 60,
}
SHAPE = DecoderArchitecture(
    num_layers=4, hidden=6, num_heads=4, num_groups=2, head_dim=3, intermediate=10, vocab=7, max_positions=64, eps=1e-6,
    qkv_bias=True, qk_norm=True, tied=False,
)  # fmt: skip


def test_places_by_hand() -> None:
    # 8 ranks, 2 to a layer, 2 stages, so 2 copies: neighbours share layers, halves are stages.
    grids = [RankGrid(8, 2, 2, rank) for rank in range(8)]
    assert [(one.share, one.copy, one.stage) for one in grids] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)
    ]  # fmt: skip
    assert all(one.at(one.share, one.copy, one.stage) == one.rank for one in grids)
    assert grids[0].speakers == [4, 6]


def test_the_order_of_a_pipeline_by_hand() -> None:
    forward, backward = (lambda i: (False, i)), (lambda i: (True, i))
    first = [forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)]
    assert pass_order(3, 0, 2) == first
    assert pass_order(3, 1, 2) == [
        forward(0),
        backward(0),
        forward(1),
        backward(1),
        forward(2),
        backward(2),
    ]
    assert pass_order(1, 0, 4) == [forward(0), backward(0)]
    assert pass_order(0, 0, 2) == []


@given(st.integers(0, 9), st.integers(1, 5))
def test_a_pipeline_never_waits_for_what_comes_later(num: int, num_stages: int) -> None:
    """Between two steps a stage gives away what it made and takes what it needs, and both must be
    met by the neighbours' own exchanges.
    """
    steps = [pass_order(num, stage, num_stages) for stage in range(num_stages)]

    def exchange(stage: int, position: int) -> set[tuple[int, int, bool, int]]:
        """Before a step: (from, to, whether a gradient, which slice)."""
        found = set()
        if position:
            is_backward, index = steps[stage][position - 1]
            found.add((stage, stage - 1 if is_backward else stage + 1, is_backward, index))
        if position < len(steps[stage]):
            is_backward, index = steps[stage][position]
            found.add((stage + 1 if is_backward else stage - 1, stage, is_backward, index))
        return {one for one in found if 0 <= one[0] < num_stages and 0 <= one[1] < num_stages}

    # the exchange that each stage is in; (stage, what it has asked for)
    at, posted, moved = [0] * num_stages, set(), True
    while moved:
        moved = False
        waiting = [stage for stage in range(num_stages) if at[stage] <= len(steps[stage])]
        posted |= {(stage, one) for stage in waiting for one in exchange(stage, at[stage])}
        for stage in waiting:
            if all(
                (one[0], one) in posted and (one[1], one) in posted
                for one in exchange(stage, at[stage])
            ):
                at[stage], moved = at[stage] + 1, True
    assert at == [2 * num + 1] * num_stages
    for stage in range(num_stages):  # never more of them held than there are stages from here on
        held = most = 0
        for is_backward, _ in pass_order(num, stage, num_stages):
            held += -1 if is_backward else 1
            most = max(most, held)
        assert most <= num_stages - stage


def test_a_stage_lets_go_of_what_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StagePipeline,
        "_exchange",
        lambda self, made, to, source, shape: None if source is None else torch.full(shape, 2.0),
    )
    first_but_one = StagePipeline(
        RankGrid(4, 1, 4, 1), SimpleNamespace(pipeline=None), torch.device("cpu"), torch.float32
    )
    weight, sent = torch.ones(3, requires_grad=True), []

    def forward(index: int, entered: torch.Tensor | None) -> torch.Tensor:
        assert entered is not None
        left = entered + entered * weight
        assert all(storage.expired() for storage in sent[:-1])  # the last one is on its way
        sent.append(StorageWeakRef(left.untyped_storage()))
        return left

    first_but_one.run([(5, 3)] * 6, forward, lambda: None)
    assert len(sent) == 6
    assert weight.grad is not None
    # slices, rows, what entered, the slope from behind
    assert weight.grad.tolist() == [6 * 5 * 2.0 * 2.0] * 3


def whole_tensors(shape: DecoderArchitecture) -> dict[str, torch.Tensor]:
    """Each element another number."""
    sizes = {
        "embed_tokens.weight": (shape.vocab, shape.hidden), "lm_head.weight": (shape.vocab, shape.hidden),
        "norm.weight": (shape.hidden,),
        "q_proj.weight": (12, 6), "k_proj.weight": (6, 6), "v_proj.weight": (6, 6), "q_proj.bias": (12,),
        "k_proj.bias": (6,),
        "v_proj.bias": (6,), "o_proj.weight": (6, 12), "q_norm.weight": (3,), "k_norm.weight": (3,),
        "gate_proj.weight": (10, 6),
        "up_proj.weight": (10, 6), "down_proj.weight": (6, 10), "layernorm.weight": (6,),
    }  # fmt: skip
    found, count = {}, 0
    for part in parts_of(shape, 1, 1):
        size = next(size for ending, size in sizes.items() if part.name.endswith(ending))
        number = torch.Size(size).numel()
        found[part.name] = torch.arange(count, count + number).view(size)
        count += number
    return found


def test_heads_and_halves_by_hand() -> None:
    # Two groups of two heads of width 3: rank 1 of 2 has heads 2 and 3, key and value head 1, in
    # this order.
    tensors = whole_tensors(SHAPE)
    place = "model.layers.0.self_attn."
    held = torch.full((12, 6), -1)
    for part in parts_of(SHAPE, 2, 1):
        if part.name.startswith(place) and part.holder.endswith(
            "layers.0.self_attention.linear_qkv.weight"
        ):
            view = part.view(held)
            view.copy_(take_share(tensors[part.name], part.dim, 2, 1).reshape(view.shape))
    q, k, v = (tensors[f"{place}{name}_proj.weight"] for name in "qkv")
    assert torch.equal(held, torch.cat([q[6:], k[3:], v[3:]]))
    held = torch.full((10, 6), -1)
    for part in parts_of(SHAPE, 2, 1):
        if part.holder == "decoder.layers.0.mlp.linear_fc1.weight":
            part.view(held).copy_(take_share(tensors[part.name], part.dim, 2, 1))
    gate, up = (tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(held, torch.cat([gate[5:], up[5:]]))


def test_of_a_vocabulary_that_does_not_divide_the_last_share_is_filled_up() -> None:
    whole = torch.arange(1, 15).view(7, 2)
    assert torch.equal(
        take_share(whole, 0, 2, 1), torch.cat([whole[4:], torch.zeros(1, 2, dtype=torch.long)])
    )
    assert torch.equal(take_share(whole, 0, 5, 4), torch.zeros(2, 2, dtype=torch.long))
    assert torch.equal(take_share(whole.T, 1, 2, 0), whole[:4].T)


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 1, 1), (2, 1, 1), (1, 3, 4), (2, 2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_every_element_has_its_place_and_comes_back(
    tmp_path: Path, tp: int, dp: int, pp: int, *, tied: bool
) -> None:
    shape = DecoderArchitecture(**{**vars(SHAPE), "tied": tied})
    tensors = whole_tensors(shape)
    files = [tmp_path / "whole"]
    write_part(
        files[0],
        stage_slices([Slice.whole(name, tensor) for name, tensor in tensors.items()], 0, 1),
    )
    written, size = [], tp * dp * pp
    for rank in range(size):
        grid = RankGrid(size, tp, pp, rank)
        exchange = TensorExchange(grid, None, parts_of(shape, tp, pp), tensors, torch.device("cpu"))
        holders = holders_of(shape, grid)
        StoredTensors(files).load(exchange.slices(holders))
        padded = (
            {"embedding.word_embeddings.weight", "output_layer.weight"}
            if tp == 2 and grid.share
            else set()
        )
        for name, holder in holders.items():
            # 7 tokens, 4 rows on each of two ranks
            rows = (len(holder) - 1) if name in padded else len(holder)
            assert (holder[:rows] >= 0).all(), name
            assert (holder[rows:] == -1).all(), name
        counts = dict.fromkeys(holders, torch.tensor(rank // size))
        slices = [
            *exchange.slices(holders),
            *(one.below("step.") for one in exchange.slices(counts)),
        ]
        written.append(write_part(tmp_path / str(rank), stage_slices(slices, rank, size)).path)
    stored = StoredTensors(written)
    assert stored.keys() == tensors.keys() | {f"step.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], tensor), name
        assert sum(piece.box.numel for piece in stored.entries[name].pieces) == tensor.numel(), name
        assert stored.entries[f"step.{name}"].shape == ()


class Network:
    """``all_to_all_single`` among threads; a thread's group is its number."""

    def __init__(self, size: int) -> None:
        self._barrier, self._sent = Barrier(size, timeout=20), dict[int, tuple[torch.Tensor, ...]]()

    def exchange(
        self,
        arrived: torch.Tensor,
        sent: torch.Tensor,
        received: list[int],
        sizes: list[int],
        *,
        group: int,
    ) -> None:
        self._sent[group] = sent.split(sizes)
        self._barrier.wait()
        pieces = [self._sent[one][group] for one in sorted(self._sent)]
        self._barrier.wait()
        assert [len(piece) for piece in pieces] == received
        arrived.copy_(torch.cat(pieces))


@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 5, 1), (2, 7, 1)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_send_every_element_once_in_ranges(
    monkeypatch: pytest.MonkeyPatch, tp: int, dp: int, pp: int, *, tied: bool
) -> None:
    """Of six rows for seven copies of two ranks, some copies have one row, and one has none."""
    shape = DecoderArchitecture(**{**vars(SHAPE), "tied": tied})
    tensors, size = whole_tensors(shape), tp * dp * pp
    network = Network(tp)
    monkeypatch.setattr(dist, "all_to_all_single", network.exchange)

    def sent(rank: int) -> dict[str, torch.Tensor]:
        grid = RankGrid(size, tp, pp, rank)
        exchange = TensorExchange(grid, None, parts_of(shape, tp, pp), tensors, torch.device("cpu"))
        holders = holders_of(shape, grid)
        for part in exchange.own:
            view = part.view(holders[part.holder])
            view.copy_(take_share(tensors[part.name], part.dim, tp, grid.share).reshape(view.shape))
        runs = list(
            RowExchange(grid, grid.share).sent_runs(
                one.below(MODEL) for one in exchange.slices(holders)
            )
        )
        planned, in_order = sorted(one.run.key for one in runs if one.run.count), RunsInOrder(runs)
        read = {key: in_order[key].clone() for key in planned}
        in_order.finish()
        assert {one.run.key: one.run.count for one in runs if one.run.count} == {
            k: len(v) for k, v in read.items()
        }
        return read

    found = {name: torch.full((tensor.numel(),), -1) for name, tensor in tensors.items()}
    for first in range(0, size, tp):
        with ThreadPoolExecutor(tp) as pool:
            stripes = list(pool.map(sent, range(first, first + tp)))
        for key, elements in (item for stripe in stripes for item in stripe.items()):
            name, start = key.split("@")
            place = found[name][int(start) : int(start) + len(elements)]
            assert (place == -1).all(), key
            place.copy_(elements)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.flatten()), name


def holders_of(shape: DecoderArchitecture, grid: RankGrid) -> dict[str, torch.Tensor]:
    """Megatron's parameters of a rank."""
    sizes = {"linear_qkv.weight": (24, 6), "linear_qkv.bias": (24,), "linear_fc1.weight": (20, 6)}
    found, tensors = {}, whole_tensors(shape)
    for part in parts_of(shape, grid.tp, grid.pp):
        if part.stage == grid.stage:
            size = list(
                next(
                    (s for end, s in sizes.items() if part.holder.endswith(end)),
                    tensors[part.name].shape,
                )
            )
            if part.dim is not None:
                size[part.dim] = -(-size[part.dim] // grid.tp)
            found[part.holder] = torch.full(size, -1)
    return found


def test_a_tied_embedding_lies_at_both_ends_of_a_pipeline_and_counts_once() -> None:
    tied = DecoderArchitecture(**{**vars(SHAPE), "tied": True})
    assert [(part.holder, part.stage, part.copy) for part in parts_of(tied, 1, 2) if "embed" in part.name] == [
        ("embedding.word_embeddings.weight", 0, False), ("output_layer.weight", 1, True)
    ]  # fmt: skip
    assert not any("lm_head" in part.name for part in parts_of(tied, 1, 1))


SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "intermediate_size": 48,
}
OTHERS = (
    "one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM with train.backend megatron, not "
)
PLAIN = "a plain LlamaForCausalLM with train.backend megatron, not one with {}; fsdp2 takes it"


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (
            AutoConfig.for_model("gpt2", architectures=["GPT2LMHeadModel"]),
            OTHERS + "GPT2LMHeadModel",
        ),
        (AutoConfig.for_model("qwen3_moe"), OTHERS + "Qwen3MoeConfig"),
        (
            LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], attention_bias=True),
            PLAIN.format("attention_bias"),
        ),
        (
            LlamaConfig(
                **SMALL,
                architectures=["LlamaForCausalLM"],
                rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
            ),
            PLAIN.format("rope_type yarn"),
        ),
        (
            Qwen2Config(
                **SMALL,
                architectures=["Qwen2ForCausalLM"],
                use_sliding_window=True,
                max_window_layers=2,
            ),
            PLAIN.format("layers of sliding_attention").replace("Llama", "Qwen2"),
        ),
    ],
)
def test_models_that_it_does_not_know_are_refused(config: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        architecture_of(config, "some/model")
    assert str(caught.value) == f"model.path: 'some/model' is not allowed; {allowed}"


def test_what_a_configuration_says() -> None:
    shape = architecture_of(
        Qwen3Config(**SMALL, head_dim=16, vocab_size=99, architectures=["Qwen3ForCausalLM"]), "x"
    )
    assert (shape.head_dim, shape.num_groups, shape.qk_norm, shape.qkv_bias, shape.vocab) == (
        16,
        2,
        True,
        False,
        99,
    )
    shape = architecture_of(
        Qwen2Config(**SMALL, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True), "x"
    )
    assert (shape.head_dim, shape.qk_norm, shape.qkv_bias, shape.tied) == (8, False, True, True)


@pytest.mark.parametrize(
    ("heads", "tp", "pp", "line"),
    [
        (
            (4, 2),
            4,
            1,
            "train.megatron.tensor_parallel: 4 is not allowed; one of 1, 2: it must divide the model's 2 key-value "
            "heads",
        ),
        (
            (4, 2),
            3,
            1,
            "train.megatron.tensor_parallel: 3 is not allowed; one of 1, 2: it must divide the model's 4 attention "
            "heads",
        ),
        (
            (14, 2),
            4,
            1,
            "train.megatron.tensor_parallel: 4 is not allowed; one of 1, 2: it must divide the model's 14 attention "
            "heads",
        ),
        (
            (4, 2),
            1,
            4,
            "train.megatron.pipeline_parallel: 4 is not allowed; a divisor of the model's 6 layers",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_model(
    heads: tuple[int, int], tp: int, pp: int, line: str
) -> None:
    shape = DecoderArchitecture(
        **{
            **vars(SHAPE),
            "num_heads": heads[0],
            "num_groups": heads[1],
            "num_layers": 6,
            "intermediate": 48,
        }
    )
    with pytest.raises(ConfigError) as caught:
        check_sizes(shape, tp, pp)
    assert str(caught.value) == line


def refused(train: dict[str, object], **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": LAKE}, "train": train, **more})
    return str(caught.value)


def test_ranks_and_options() -> None:
    both = {"tensor_parallel": 2, "pipeline_parallel": 2}
    line = (
        "train.ranks: 6 is not allowed; a multiple of train.megatron.tensor_parallel 2 times "
        "train.megatron.pipeline_parallel 2"
    )
    assert refused({"backend": "megatron", "ranks": 6, "megatron": both}) == line
    train = {"backend": "megatron", "ranks": 8, "megatron": both}
    assert (
        validate({"domains": {"lake": LAKE}, "train": train, "model": {"tiny": {"num_layers": 4}}})[
            "train"
        ]["ranks"]
        == 8
    )
    line = "train.megatron.pipeline_parallel: 2 is not allowed; 1 with train.backend fsdp2; more with megatron"
    assert refused({"backend": "fsdp2", "ranks": 2, "megatron": {"pipeline_parallel": 2}}) == line
    line = "train.lora.dropout: 0.1 is not allowed; 0 with train.backend megatron, whose ranks divide a layer's inputs"
    assert refused({"backend": "megatron", "lora": {"dropout": 0.1}}) == line
    train = {
        "backend": "megatron",
        "activation_offload": True,
        "optimizer_offload": True,
        "compile": True,
    }
    critic = {"adv_estimator": "gae", "critic": {"enabled": True}}
    assert validate({"domains": {"lake": LAKE}, "train": train, "algorithm": critic})["train"][
        "compile"
    ]


def test_a_model_that_is_here_is_looked_at_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = {"backend": "megatron", "ranks": 4, "megatron": {"tensor_parallel": 4}}
    line = "train.megatron.tensor_parallel: 4 is not allowed; one of 1, 2: it must divide the model's {} key-value heads"
    assert refused(
        train, model={"path": None, "tiny": {"num_heads": 4, "num_kv_heads": 2}}
    ) == line.format(2)
    # for its tokenizer
    build_tiny(tmp_path, TinyModel(hidden_size=8, num_layers=1, head_dim=4, intermediate_size=8))
    said = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**said, "architectures": ["LlamaForCausalLM"]})
    )
    assert refused(train, model={"path": str(tmp_path)}) == line.format(2)
    (tmp_path / "config.json").write_text(
        json.dumps({**said, "architectures": ["MistralForCausalLM"]})
    )
    assert (
        refused(train, model={"path": str(tmp_path)})
        == f"model.path: '{tmp_path}' is not allowed; {OTHERS}MistralForCausalLM"
    )


def test_offline_training_has_one_rank(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^train.backend: 'megatron' is not allowed; torch, ddp or fsdp2"
    ):
        offline.validate_config(
            "sft",
            {
                "model": {"path": str(tmp_path)},
                "data": {"train": "x.jsonl"},
                "train": {"backend": "megatron"},
            },
        )
