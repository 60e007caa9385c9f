"""Records an agent's calls as samples of exact tokens, joined if one call continues another.

A call whose prompt begins with the exact tokens of an earlier one, including its answer, continues
that sample; any other begins a new one. Agents send texts, and tokenising a text again need not
give the sampled tokens. So if the text of a prompt begins with the text of a sample, the sample's
tokens are used for it, and only the rest is tokenised. If it does not, because the agent dropped a
message, changed an answer, or the template shows an old answer differently, nothing is joined.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.contract import wire
from envhub.servers.turn import SampledTurn
from rlearner_text.tokenizer import Tokenizer


@dataclass
class RecordedSample:
    """One training sequence so far.

    Attributes:
        number: from 0, in the order in which they began.
        text: of the tokens, without the token that closes the last answer; None if it is not known.
        token_ids, loss_mask, logprobs: n values each; the mask is 1 where the policy sampled the
            token from its own distribution, logprobs are 0 elsewhere.
        version_runs: flat pairs (policy_version, number of tokens with mask 1).
        turns: spans of sampled tokens.
    """

    number: int
    text: str | None = None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    loss_mask: bytearray = field(default_factory=bytearray)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    version_runs: list[int] = field(default_factory=list)
    turns: list[wire.Turn] = field(default_factory=list)

    def is_prefix_of(self, prompt: array[int]) -> bool:
        """Return whether a prompt begins with the whole sample."""
        return prompt[: len(self.token_ids)] == self.token_ids

    def append_prompt(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.token_ids.extend(token_ids)
        self.loss_mask += bytes(len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))

    def append_turn(self, sampled: SampledTurn, anchor: str) -> None:
        """Append a sampled turn."""
        start = len(self.token_ids)
        self.token_ids.extend(sampled.token_ids)
        mask = bytes(1 - flag for flag in sampled.reshaped) or b"\1" * len(sampled.token_ids)
        self.loss_mask += mask
        self.logprobs.extend(
            logprob * bit for logprob, bit in zip(sampled.logprobs, mask, strict=True)
        )
        position = 0
        for version, length in zip(
            sampled.version_runs[::2], sampled.version_runs[1::2], strict=True
        ):
            count = mask.count(1, position, position + length)
            position += length
            if self.version_runs and self.version_runs[-2] == version:
                self.version_runs[-1] += count
            elif count:
                self.version_runs += [version, count]
        end = len(self.token_ids)
        reason = sampled.finish_reason
        server = sampled.server
        turn = wire.Turn(
            start=start,
            end=end,
            reward=0.0,
            valid=True,
            finish_reason=reason,
            server=server,
            anchor=anchor,
        )
        self.turns.append(turn)


class EpisodeRecord:
    """All calls of one episode.

    Args:
        tokenizer: of the policy.
        closing: the tokens with which its chat template closes an answer, the last one special;
            empty for plain text.
        ends: tokens at which an answer ends; they are not part of its text.
        shows_anchors: whether a turn's anchor is the text that its call added to the sample.

    Attributes:
        samples: in the order in which they were last extended: the last one ends with the last
            answer.
        num_calls: answered so far.
        last_response: text of the last answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        closing: Sequence[int],
        ends: Sequence[int],
        *,
        shows_anchors: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._shows_anchors = shows_anchors
        self._closing = list(closing)
        self._ends = {*ends, *closing[-1:]}
        self._texts: dict[bytes, str] = {}  # of prompts that were given as text, by their tokens
        self.samples: list[RecordedSample] = []
        self.num_calls = 0
        self.last_response = ""

    def encode_prompt(self, text: str) -> list[int]:
        """Return a prompt's tokens; they begin with those of the longest sample it continues."""
        for sample in sorted(self.samples, key=lambda sample: -len(sample.token_ids)):
            if sample.text is None or not text.startswith(sample.text):
                continue
            suffix_ids = self._tokenizer.encode(text[len(sample.text) :])
            if self._closing and sample.token_ids[-1] == self._closing[-1]:
                if suffix_ids[: len(self._closing)] != self._closing:
                    # the answer was closed, but the prompt continues it
                    continue
                del suffix_ids[: len(self._closing)]
            return self._remember_text([*sample.token_ids, *suffix_ids], text)
        return self._remember_text(self._tokenizer.encode(text), text)

    def _remember_text(self, token_ids: list[int], text: str) -> list[int]:
        self._texts[array("i", token_ids).tobytes()] = text
        return token_ids

    def find_continued(self, prompt: array[int]) -> RecordedSample | None:
        """Return the longest sample that the prompt begins with."""
        prefixes = (sample for sample in self.samples if sample.is_prefix_of(prompt))
        return max(prefixes, key=lambda sample: len(sample.token_ids), default=None)

    def add_turn(self, prompt: array[int], sampled: SampledTurn) -> RecordedSample:
        """Record an answered call and return its sample.

        Of two calls that continue the same sample, only the first is joined to it.
        """
        self.num_calls += 1
        sample = self.find_continued(prompt)
        if sample is None:
            sample = RecordedSample(1 + max((sample.number for sample in self.samples), default=-1))
        else:
            self.samples.remove(sample)
        self.samples.append(sample)
        added = prompt[len(sample.token_ids) :]
        sample.append_prompt(added)
        sample.append_turn(
            sampled, self._tokenizer.decode(added.tolist()) if self._shows_anchors else ""
        )
        prompt_text = self._texts.get(prompt.tobytes())
        sample.text = None
        if prompt_text is not None:
            sample.text = prompt_text + self._answer_text(sampled.token_ids)
        self.last_response = self._tokenizer.decode(sampled.token_ids)
        return sample

    def _answer_text(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        while ids and ids[-1] in self._ends:
            del ids[-1]
        return self._tokenizer.decode(ids, skip_special_tokens=False)
