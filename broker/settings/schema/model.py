"""The section ``model``: weights and tokenizer, or a small model to create."""

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

    # width of the residual stream
    hidden_size: PositiveInt = 128
    # transformer blocks
    num_layers: PositiveInt = 3
    # query heads of attention
    num_heads: PositiveInt = 2
    # key and value heads; must divide num_heads
    num_kv_heads: PositiveInt = 2
    # width of one head
    head_dim: PositiveInt = 64
    # width of the MLP
    intermediate_size: PositiveInt = 384
    # tokenizer: one token per character, or byte pairs learned from corpus
    vocab: Literal["chars", "bpe"] = "chars"
    # texts that become one token each, in addition to the characters
    words: list[str] = Field(default=[])
    vocab_size: PositiveInt = 512  # of a bpe vocabulary
    corpus: DataPath | None = None  # text file to train a bpe vocabulary on
    # longest sequence of the model
    max_position_embeddings: PositiveInt = 4096


class ModelSection(Section):
    """A Hugging Face folder or hub name, or None for a small model created in the run's folder."""

    harmless = ("path", "dtype", "seed")

    # folder or name on the Hugging Face hub; null: a small model is created
    path: str | None = None
    # of the weights in training
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # run Python files of the model
    trust_remote_code: bool = False
    chat_template: ModelPath | None = None  # a Jinja file, or plain; null: the model's own
    # of the first weights of a small model
    seed: Seed = 0
    tiny: TinyModel = TinyModel()
