"""Device and dtype of the models that rewards compute with, and their attention."""

from __future__ import annotations

from typing import Any

import torch


def choose_device(name: str) -> str:
    """Return the device of a setting ``device``; ``auto`` is cuda if there is a GPU."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(name: str, device: str) -> torch.dtype:
    """Return the dtype of a setting ``dtype``; ``auto`` is bfloat16 on a GPU, else float32."""
    if name == "auto":
        name = "bfloat16" if device.startswith("cuda") else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def keep_softcap(model: Any) -> None:
    """Let a transformers model cap its attention scores if its configuration says so."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        # transformers' SDPA drops the cap without a word
        model.set_attn_implementation("eager")


def pad_rows(
    rows: list[list[int]], pad: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids padded on the right and their mask, (rows, longest), and their lengths."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = (torch.arange(longest, device=device)[None, :] < lengths[:, None]).long()
    return ids, mask, lengths
