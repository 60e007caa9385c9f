"""Tokenizes a conversation step by step: appends sampled tokens and deltas of user messages.

Existing tokens are never tokenised again, because text -> tokens is not the inverse of tokens ->
text, and a policy must be trained on the very tokens that it sampled. The delta of a user message
is what the chat template puts after an assistant turn, rendered after a fixed dummy conversation.
Templates differ, so ``rules_for`` checks once per model and system prompt that this delta does not
depend on earlier turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from rlearner_text.template_rules import Examples, Role, Texts, rules_for
from rlearner_text.tokenizer import Tokenizer


class Conversation:
    """One conversation in tokens: user and policy alternate.

    Attributes:
        token_ids: all tokens so far, n.
        loss_mask: n values, 1 if the policy sampled the token.
        logprobs: n values, the sampling logprob if the mask is 1, else 0.
        version_runs: flat pairs (policy_version, number of sampled tokens); adjacent ones differ in
            version.
        spans: (start, end) of each assistant turn's sampled tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_prompt: str = "",
        tools: str = "",
        examples: Examples = (),
    ) -> None:
        self.rules = rules_for(tokenizer, system_prompt, tools, examples)
        self.token_ids = array("i")
        self.loss_mask = bytearray()
        self.logprobs = array("f")
        self.version_runs: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self._user_spoke = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def observe(self, text: Texts, role: Role = "user") -> int:
        """Append a user message or tool results and the prompt; return the number of new tokens.

        An assistant turn that ended without its end-of-turn token gets one, with mask 0.

        Raises:
            ValueError: if the last turn is the user's.
        """
        if self._user_spoke:
            raise ValueError("observe() twice without sampled() in between")
        if not self.token_ids:
            added = self.rules.start(str(text))
        else:
            added = self.rules.delta(text, role)
            start, end = self.spans[-1]
            if end > start and self.rules.is_closed(self.token_ids[end - 1], role):
                added = added[len(self.rules.ending(role)) :]
        self.token_ids.extend(added)
        self.loss_mask += bytes(len(added))
        self.logprobs.frombytes(bytes(self.logprobs.itemsize * len(added)))
        self._user_spoke = True
        return len(added)

    def cost_of(self, text: str, role: Role = "user") -> int:
        """Return the most tokens that ``observe(text, role)`` would add."""
        return len(self.rules.delta(text, role)) if self.token_ids else len(self.rules.start(text))

    def sampled(
        self, token_ids: Sequence[int], logprobs: Sequence[float], version_runs: Sequence[int]
    ) -> None:
        """Append sampled tokens unchanged.

        Another call before the next ``observe`` continues the same turn (a generation resumed on
        another server).

        Args:
            token_ids, logprobs: k values each.
            version_runs: flat pairs (policy_version, number of tokens) that add up to k.

        Raises:
            ValueError: if there is no user message yet, or the lengths disagree.
        """
        if not self.token_ids:
            raise ValueError("sampled() before observe()")
        n = len(token_ids)
        runs = len(version_runs)
        if n != len(logprobs) or (
            version_runs[1] != n if runs == 2 else runs % 2 or sum(version_runs[1::2]) != n
        ):
            counts = f"{n} tokens, {len(logprobs)} logprobs, version_runs {list(version_runs)}"
            raise ValueError(f"{counts}: lengths disagree")
        start = len(self.token_ids)
        if not self._user_spoke:
            start, _ = self.spans.pop()
        self.token_ids.extend(token_ids)
        self.loss_mask += b"\1" * n
        self.logprobs.extend(logprobs)
        for index in range(0, runs, 2):
            self._add_run(version_runs[index], version_runs[index + 1])
        self.spans.append((start, len(self.token_ids)))
        self._user_spoke = False

    def _add_run(self, version: int, count: int) -> None:
        if self.version_runs and self.version_runs[-2] == version:
            self.version_runs[-1] += count
        elif count:
            self.version_runs += [version, count]
