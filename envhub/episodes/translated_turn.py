"""One turn of the policy in the tokens of a teacher that has another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from envhub.task import PromptText
from rlearner_text.template_rules import rules_for
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.vocabularies.alignment import spread_logprobs, token_ends


@dataclass(frozen=True, eq=False)
class TranslatedTurn:
    """The only turn of a trajectory, in both tokenizers.

    Attributes:
        token_ids: the policy's, without the token that ended the turn.
        logprobs: of the whole turn, under the policy.
        text_ids: the teacher's tokens of the same text.
        end_ids: the teacher's token that ends a turn, if the policy ended it and there is one.
    """

    turn: wire.Turn
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text_ids: Sequence[int]
    end_ids: Sequence[int]

    @classmethod
    def of(
        cls,
        trajectory: wire.Trajectory,
        prompt: PromptText,
        own_tokenizer: Tokenizer,
        tokenizer: Tokenizer,
    ) -> TranslatedTurn:
        """Translate a trajectory's turn.

        Args:
            own_tokenizer: of the policy.
            tokenizer: of the teacher.
        """
        (turn,) = trajectory.turns
        token_ids = trajectory.token_ids.array()[turn.start : turn.end].tolist()
        is_ended = bool(token_ids) and token_ids[-1] in own_tokenizer.eos_token_ids
        if is_ended:
            token_ids = token_ids[:-1]
        text = own_tokenizer.decode(token_ids, skip_special_tokens=False)
        ending = rules_for(tokenizer, *prompt.opening).ending("user")
        return cls(
            turn,
            token_ids,
            trajectory.logprobs.array()[turn.start : turn.end].tolist(),
            text_ids=tokenizer.encode_continuation(tokenizer.shield(text)),
            end_ids=list(ending)[:1] if is_ended else [],
        )

    def align(
        self,
        logprobs: npt.NDArray[np.float32],
        own_tokenizer: Tokenizer,
        tokenizer: Tokenizer,
    ) -> npt.NDArray[np.float32]:
        """Return the teacher's logprobs in the policy's tokens.

        Args:
            logprobs: of the teacher's context but its first token; the turn comes last.

        Returns:
            (end of the turn - 1,) of each token of the trajectory but its first, 0 before the turn.
        """
        num_text = len(self.text_ids)
        of_turn = logprobs[len(logprobs) - num_text - len(self.end_ids) :].tolist()
        own_logprobs = self.logprobs[: len(self.token_ids)]
        try:
            spread = spread_logprobs(
                token_ends(own_tokenizer, self.token_ids),
                own_logprobs,
                token_ends(tokenizer, self.text_ids),
                of_turn[:num_text],
            )
        except ValueError:
            # Bytes that are no text cannot be aligned; the policy's own words must not fail an
            # episode, so the teacher says nothing about them.
            spread = list(own_logprobs)
        ends = of_turn[num_text:] or self.logprobs[len(self.token_ids) :]
        values = np.zeros(self.turn.end - 1, np.float32)
        values[self.turn.start - 1 :] = [*spread, *ends]
        return values
