"""A model folder's tokenizer and end tokens, read without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from broker.errors import UserError


def load_tokenizer(path: str) -> Any:
    """The fast tokenizer of a folder or hub name, a ``tokenizers.Tokenizer``.

    Raises:
        UserError: there is none.
    """
    try:
        if Path(path).is_dir():
            return Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        return Tokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"model path {path!r}: no tokenizer.json could be loaded: {str(error).splitlines()[0]}") from error


def end_token_ids(path: str, tokenizer: Any) -> list[int]:
    """The end tokens that a model folder names, in order: its generation configuration's, else the model's, else the tokenizer's."""
    for name in ("generation_config.json", "config.json"):
        ids = _json(path, name).get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    token = _json(path, "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    known = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return [] if known is None else [known]


def _json(path: str, name: str) -> dict[str, Any]:
    file = Path(path) / name
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file}: no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


class StopStrings:
    """Whether the newest token completed one of a request's stop strings.

    Only the tail of the output is decoded: a string that ends with the newest token cannot begin further back than
    ``window`` tokens, at one byte a token and four bytes a character, with room for tokens that print nothing.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [s for s in stops if s]
        self._window = 8 + max((len(s.encode()) for s in self._stops), default=0)

    def hit(self, output: Sequence[int]) -> bool:
        """``output`` is all that was sampled so far, the newest token last."""
        text = self._tokenizer.decode(list(output[-self._window :]), skip_special_tokens=False)
        return any(stop in text for stop in self._stops)
