"""Tokens of an episode for a process reward model, and the positions at which its steps are scored.

Each step is followed by a mark, which no text can spell. The rendered conversation is cut at the
marks, and its parts are encoded one after the other, each with the tokens of the model's separator
behind it. So the end of a step is known exactly, whatever the policy writes and its tokens would
merge with. TRL's PRMTrainer encodes steps in this way, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from rewardhub.rewards.base import NoScore, Sample
from rewardhub.rewards.models.episode_text import read_episode
from rewardhub.rewards.models.process_args import ProcessRewardArgs
from rewardhub.rewards.models.step_scores import split_steps
from rewardhub.rewards.thinking import visible_text
from rlearner_text.scored_text import has_chat_template, shield_message
from rlearner_text.special_text import CUT, shield_values
from rlearner_text.thinking import CLOSE, OPEN
from rlearner_text.tokenizer import Tokenizer

# Noncharacters, which Unicode reserves for use inside a program.
MARK: Final = "\U0010fffd"  # behind a step
START: Final = "\U0010fffc"  # in front of the first one
# For a model without a chat template.
TEMPLATE: Final = "{prompt}\n{response}"


@dataclass(frozen=True)
class StepTokens:
    """An episode in tokens.

    Attributes:
        token_ids: at most ``max_length``.
        positions: of those of its steps that fit, in order, the token at which each is scored.
        num_steps: of each turn, the number of its steps, whether they fit or not.
    """

    token_ids: list[int]
    positions: list[int]
    num_steps: list[int]

    @property
    def is_truncated(self) -> bool:
        """Whether some steps do not fit."""
        return len(self.positions) < sum(self.num_steps)

    def divide(self, scores: Sequence[float], missing: float) -> list[list[float]]:
        """Return the scores of each turn's steps.

        Args:
            scores: of the steps that fit.
            missing: score of the others.
        """
        every = [*scores, *[missing] * (sum(self.num_steps) - len(scores))]
        ends = accumulate(self.num_steps)
        return [every[end - count : end] for end, count in zip(ends, self.num_steps, strict=True)]


def encode_steps(tokenizer: Tokenizer, sample: Sample, args: ProcessRewardArgs) -> StepTokens:
    """Return the tokens of an episode with a separator behind each step of the policy's turns.

    Raises:
        NoScore: if its messages are not there, the chat template leaves steps out, or the prompt
            alone is longer than ``max_length``.
        ConfigError: if the chat template rejects the messages.
    """
    episode = read_episode(sample, args.system_prompt)
    messages = [shield_values(_without_marks, message) for message in episode.messages]
    num_steps: list[int] = []
    for index in episode.turns:
        text = visible_text(str(messages[index]["content"]), args.thinking)
        steps = split_steps(text, args.split)
        num_steps.append(len(steps))
        content = args.joiner.join(_mark_step(tokenizer, step) for step in steps)
        messages[index] = {"role": "assistant", "content": content}
    first = messages[episode.turns[0]]
    first["content"] = START + first["content"]
    before, _, after = _render(tokenizer, messages, episode.turns, args).partition(START)
    parts = (before + after).split(MARK)
    where = f"domain {sample.domain!r}, task {sample.task_index}"
    if len(parts) != sum(num_steps) + 1:
        raise NoScore(f"{where}: the model's chat template does not show every step")
    if len(tokenizer.encode(before)) >= args.max_length:
        problem = f"the prompt alone is longer than max_length, {args.max_length} tokens"
        raise NoScore(f"{where}: {problem}")
    token_ids: list[int] = []
    ends: list[int] = []
    separator = tokenizer.encode(args.separator)
    encode = tokenizer.encode
    for part in parts[:-1]:
        token_ids += [*encode(part), *separator]
        ends.append(len(token_ids) - 1)
        encode = tokenizer.encode_continuation
    return StepTokens(
        token_ids[: args.max_length], [end for end in ends if end < args.max_length], num_steps
    )


def _without_marks(text: str) -> str:
    return text.replace(MARK, "").replace(START, "")


def _mark_step(tokenizer: Tokenizer, step: str) -> str:
    """Return a step as plain text, with its mark."""
    text = tokenizer.shield(step)
    for tag in (OPEN, CLOSE):
        # Chat templates look for them, and leave out what stands between.
        text = text.replace(tag, f"{tag[0]}{CUT}{tag[1:]}")
    return text + MARK


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    turns: Sequence[int],
    args: ProcessRewardArgs,
) -> str:
    """Return the text that the model reads, by its chat template or ``args.template``."""
    shielded = [
        message if index in turns else shield_message(tokenizer, message)
        for index, message in enumerate(messages)
    ]
    if args.template is None and has_chat_template(tokenizer):
        return tokenizer.render_chat(shielded, add_generation_prompt=False)
    before, _, after = (args.template or TEMPLATE).partition("{response}")
    contents = [str(message["content"]) for message in shielded]
    first = turns[0]
    prompt = "".join(contents[max(first - 1, 0) : first])
    return before.replace("{prompt}", prompt) + "\n".join(contents[first:]) + after
