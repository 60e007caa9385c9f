"""The configuration section ``model``: weights and tokenizer, or a small model to create."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from broker.settings.config import DataPath, ModelPath, Section, Seed


class TinyModel(Section):
    """A small model of a real architecture with random weights and its own tokenizer."""

    harmless = (
        "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
        "vocab", "words", "vocab_size", "max_position_embeddings",
    )  # fmt: skip

    hidden_size: PositiveInt = 128
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 2
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 64
    intermediate_size: PositiveInt = 384
    vocab: Literal["chars", "bpe"] = "chars"
    # texts that become one token each, in addition to the characters
    words: list[str] = Field(default=[])
    vocab_size: PositiveInt = 512  # of a bpe vocabulary
    corpus: DataPath | None = None  # text file to train a bpe vocabulary on
    max_position_embeddings: PositiveInt = 4096


class ModelSection(Section):
    """A Hugging Face folder or hub name, or None for a small model created in the run's folder."""

    harmless = ("path", "dtype", "seed")

    path: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False
    chat_template: ModelPath | None = None  # a Jinja file, or plain; null: the model's own
    seed: Seed = 0
    tiny: TinyModel = TinyModel()


def check_model_path(path: str, key: str = "model.path") -> None:
    """Check that a path is a Hugging Face model: a folder, or a hub name that resolves.

    Raises:
        ConfigError: if it is not; names the key, the path and what is missing.
    """
    from rlearner_text.hub import check_model

    check_model(path, key)
