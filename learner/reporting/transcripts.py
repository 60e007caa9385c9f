"""Renders trajectories as text, for ``rlearner show``, ``evals/`` and the trackers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from broker.settings.schema.model import ModelSection
from rlearner_text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NUMBERS: Final = "tokens are shown by their numbers"


def load_tokenizer(model: ModelSection, folder: Path) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of a run's model and its path, or None and the reason.

    Args:
        folder: of the run; holds the model if the configuration names none.
    """
    path = model.path or folder / "model"
    try:
        if model.path is None and not (folder / "model").is_dir():
            raise ConfigError("model.path", None, f"there is no {folder / 'model'} either")
        return Tokenizer.of_run(path, model), str(path)
    except ConfigError as error:
        return None, f"none, so {NUMBERS}: {error}"


def decode_tokens(ids: Iterable[Any], tokenizer: Tokenizer | None) -> str:
    """Return the text of tokens, including special ones; their numbers without a tokenizer."""
    if tokenizer is None:
        return " ".join(str(int(number)) for number in ids)
    return tokenizer.decode([int(number) for number in ids], skip_special_tokens=False)


def run_decoder(run: wire.RunSpec) -> tuple[Callable[[Iterable[Any]], str], str]:
    """Return what turns a run's tokens into text, and a note if it can only show numbers."""
    try:
        tokenizer = Tokenizer.of_run(run.model_path, RunSettings.of_config(run.config).model)
    except ConfigError as error:
        return partial(decode_tokens, tokenizer=None), f"{NUMBERS}: {error}"
    return partial(decode_tokens, tokenizer=tokenizer), ""


@dataclass(frozen=True)
class Transcript:
    """Text of one trajectory."""

    prompt: str  # everything before the first sampled token
    text: str  # everything after it: responses, and the environment's output between them
    reward: float
    success: bool

    def markdown(self, heading: str) -> str:
        """Format for trackers, with both texts as code, so that their markup is not interpreted."""
        outcome = f"reward {self.reward:g}, {'solved' if self.success else 'not solved'}"
        return (
            f"**{heading}**: {outcome}\n\n{_indent_code(self.prompt)}\n\n{_indent_code(self.text)}"
        )


def _indent_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


class TranscriptFactory:
    """Factory of transcripts; loads the tokenizer when first needed."""

    def __init__(self, model: ModelSection, folder: Path) -> None:
        self._model = model
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        tokenizer, path = load_tokenizer(self._model, self._folder)
        if tokenizer is None:
            log.warning("tokenizer for texts: %s", path)
        return tokenizer

    def of(self, trajectory: wire.Trajectory) -> Transcript:
        """Return the text of a trajectory."""
        ids = trajectory.token_ids.array()
        start = trajectory.turns[0].start if trajectory.turns else len(ids)
        prompt = decode_tokens(ids[:start], self._tokenizer)
        text = decode_tokens(ids[start:], self._tokenizer)
        return Transcript(prompt, text, trajectory.reward, trajectory.success)
