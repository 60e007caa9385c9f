from __future__ import annotations

from pathlib import Path

import tokenizers

from rlearner_text.config import TinyModel
from rlearner_text.probe_text import MARGIN, SHORTEST, probe_length, probe_tokens, switch_lengths
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer


def test_switches_of_configurations() -> None:
    assert switch_lengths({"sliding_window": 4096, "max_position_embeddings": 8192}) == (4096,)
    assert switch_lengths({"sliding_window": 4096, "use_sliding_window": False}) == ()
    assert switch_lengths({"sliding_window": None, "max_window_layers": 28}) == ()
    assert switch_lengths({"attention_chunk_size": 8192, "floor_scale": 8192}) == (8192,)
    assert switch_lengths({"mamba_chunk_size": 256, "chunk_size_feed_forward": 9}) == (256,)


def test_original_positions_count_where_frequencies_change() -> None:
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    llama3 = {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    assert switch_lengths({"rope_parameters": longrope}) == (4096,)
    assert switch_lengths(
        {"original_max_position_embeddings": 64, "rope_parameters": {"type": "longrope"}}
    ) == (64,)
    assert switch_lengths({"rope_parameters": {"full_attention": longrope}}) == (4096,)
    assert switch_lengths({"rope_parameters": llama3}) == ()


def test_probe_passes_every_switch_within_the_context() -> None:
    assert probe_length({}, 4096) == SHORTEST
    assert probe_length({}, 64) == 63
    assert probe_length({"sliding_window": 512, "attention_chunk_size": 9000}, 4096) == 512 + MARGIN
    assert probe_length({"sliding_window": 512}, 530) == 529


def test_probe_is_text_of_the_tokenizer(tmp_path: Path) -> None:
    folder = build_tiny(
        tmp_path / "model", TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
    )
    tokenizer = Tokenizer.load(folder)
    ids = probe_tokens(
        tokenizer, {"sliding_window": 300}, vocab_size=tokenizer.vocab_size, max_context=4096
    )
    assert len(ids) == 300 + MARGIN
    assert tokenizer.decode(ids).startswith(
        "The baker counted 2 wooden chairs near the harbour because winter"
    )
    other = probe_tokens(tokenizer, {}, vocab_size=tokenizer.vocab_size, max_context=4096, start=5)
    assert tokenizer.decode(other) != tokenizer.decode(ids[:SHORTEST])
    assert max(probe_tokens(tokenizer, {}, vocab_size=70, max_context=99)) < 70


def test_probe_of_a_tokenizer_without_letters_is_not_all_alike(tmp_path: Path) -> None:
    bpe = tokenizers.models.BPE(vocab={"<unk>": 0, "x": 1}, merges=[], unk_token="<unk>")
    tokenizers.Tokenizer(bpe).save(str(tmp_path / "tokenizer.json"))
    ids = probe_tokens(Tokenizer.load(tmp_path), {}, vocab_size=90, max_context=99)
    assert len(ids) == SHORTEST
    assert len(set(ids)) > 30


def test_probe_without_a_tokenizer() -> None:
    ids = probe_tokens(None, {"sliding_window": 300}, vocab_size=11, max_context=4096)
    assert len(ids) == 300 + MARGIN
    assert set(ids) == set(range(11))
