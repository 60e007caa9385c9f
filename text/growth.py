"""A conversation that only ever grows: by exactly the tokens that were sampled, and by the delta of what the user side said.

Nothing that is already there is tokenised again, because text -> tokens is not the inverse of tokens -> text, and a policy must
be trained on the very tokens it sampled. The delta of a user message is what the chat template puts after an assistant turn,
rendered behind a fixed dummy conversation. Templates differ, so ``GrowthRules`` checks once per model and system prompt that
this delta does not depend on what came before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Final

from broker.errors import ConfigError
from text.chat_template import Chat
from text.tokenizer import Tokenizer

_ASKED: Final = ("first probe question", "second probe question", "third probe question")
_ANSWERED: Final = ("first probe answer 11213", "second probe answer 31415")
_DELTAS_KEPT: Final = 4096  # observations repeat; a template takes some 0.1 ms to render
_OPENINGS_KEPT: Final = 256  # the episodes of a group begin with the same words


class GrowthRules:
    """What one model's chat template puts around user messages, for one system prompt.

    Attributes:
        end_of_turn_id: the special token that closes an assistant turn, None when the template uses plain text there.
        stop_token_ids: tokens at which an assistant turn should end: the model's own and ``end_of_turn_id``.

    Raises:
        ConfigError: the template is not prefix-stable for alternating user and assistant turns; names the model.
    """

    def __init__(self, tokenizer: Tokenizer, system_prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._check()
        self.delta = lru_cache(maxsize=_DELTAS_KEPT)(self._delta)
        self._opening = lru_cache(maxsize=_OPENINGS_KEPT)(self._open)

    def start(self, text: str) -> list[int]:
        """Tokens of a conversation that begins with this user message, generation prompt included."""
        return list(self._opening(text))

    def _open(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(self._render([_user(text)])))

    def _delta(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(self._tail(text, self._system)))

    @cached_property
    def end_of_turn(self) -> str:
        """What the template puts after the assistant's words, before anything else is said."""
        rendered = self._render([_user(_ASKED[0]), _assistant(_ANSWERED[0])], prompt=False)
        return _after(rendered, _ANSWERED[0])

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """The tokens that close an assistant turn, up to and with the first special one; empty when it is closed by plain text.

        More than one only where the template puts white space before its special token.
        """
        ids = self._tokenizer.encode(self.end_of_turn)
        special = next((i for i, token in enumerate(ids) if self._is_special(token)), None)
        if special is None or self._tokenizer.decode(ids[:special]).strip():
            return ()
        return tuple(ids[: special + 1])

    @cached_property
    def end_of_turn_id(self) -> int | None:
        return self.closing[-1] if self.closing else None

    def _is_special(self, token: int) -> bool:
        return not self._tokenizer.decode([token]) and bool(self._tokenizer.decode([token], skip_special_tokens=False).strip())

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        own = set(self._tokenizer.eos_token_ids)
        return tuple(sorted(own | ({self.end_of_turn_id} if self.end_of_turn_id is not None else set())))

    def _render(self, messages: Chat, *, prompt: bool = True, system: Chat | None = None) -> str:
        before = self._system if system is None else system
        return self._tokenizer.render_chat([*before, *messages], add_generation_prompt=prompt)

    def _tail(self, text: str, system: Chat) -> str:
        rendered = self._render([_user(_ASKED[0]), _assistant(_ANSWERED[0]), _user(text)], system=system)
        return _after(rendered, _ANSWERED[0])

    def _check(self) -> None:
        first, second, third = _ASKED
        one, two = _ANSWERED
        opening = self._render([_user(first)])
        short = self._render([_user(first), _assistant(one), _user(third)])
        long = self._render([_user(first), _assistant(one), _user(second), _assistant(two), _user(third)])
        for answer, rendered in ((one, short), (one, long), (two, long)):
            if rendered.count(answer) != 1:
                raise self._unstable("it does not show every assistant turn exactly once, unchanged")
        # Equal for most. Some open the turn with more, such as a thinking tag; some put a space before the answer's words.
        if not opening.startswith(_before(short, one).rstrip()):
            raise self._unstable("the beginning of a conversation changes when an answer follows")
        if third not in _after(short, one):
            raise self._unstable("it does not show a user message that follows an answer")
        if _after(short, one) != _after(long, two):
            raise self._unstable("what it puts after an answer depends on the turns before")
        if self._tail(third, self._system) != self._tail(third, []):
            raise self._unstable("it repeats the system message in later turns")

    def _unstable(self, problem: str) -> ConfigError:
        return ConfigError(
            "model.path",
            self._tokenizer.name,
            f"its chat template cannot grow a conversation turn by turn: {problem}; give another template",
        )


@lru_cache(maxsize=64)
def growth_rules(tokenizer: Tokenizer, system_prompt: str = "") -> GrowthRules:
    """The rules for one tokenizer and system prompt, checked once."""
    return GrowthRules(tokenizer, system_prompt)


class Conversation:
    """One conversation in tokens: user side and policy alternate.

    Attributes:
        token_ids: everything so far, n tokens.
        packed: the same as an array of 4-byte integers, for sending.
        loss_mask: n values, 1 where the policy sampled the token.
        logprobs: n values, the sampling logprob where the mask is 1, else 0.
        version_runs: flat pairs (policy_version, number of sampled tokens), in token order; neighbours differ in version.
        spans: (start, end) of each assistant turn's sampled tokens.
    """

    def __init__(self, tokenizer: Tokenizer, system_prompt: str = "") -> None:
        self.rules = growth_rules(tokenizer, system_prompt)
        self.token_ids: list[int] = []
        self.packed = array("i")
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.version_runs: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self._user_spoke = False

    def __len__(self) -> int:
        return len(self.token_ids)

    def observe(self, text: str) -> int:
        """Append a user message and the generation prompt; the number of tokens added.

        An assistant turn that ended without its end-of-turn token gets one, unmasked.

        Raises:
            ValueError: the user spoke last.
        """
        if self._user_spoke:
            raise ValueError("observe() twice without sampled() in between")
        if not self.token_ids:
            added = self.rules.start(text)
        else:
            added = list(self.rules.delta(text))
            if self._turn_is_closed():
                del added[: len(self.rules.closing)]
        self.token_ids += added
        self.packed.extend(added)
        self.loss_mask += [0] * len(added)
        self.logprobs += [0.0] * len(added)
        self._user_spoke = True
        return len(added)

    def cost_of(self, text: str) -> int:
        """Most tokens that ``observe(text)`` would add."""
        return len(self.rules.delta(text)) if self.token_ids else len(self.rules.start(text))

    def sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], version_runs: Sequence[int]) -> None:
        """Append sampled tokens, exactly as they came.

        Called again before the next ``observe`` it continues the same turn (a generation resumed on another server).

        Args:
            token_ids: k sampled tokens.
            logprobs: k values.
            version_runs: flat pairs (policy_version, number of tokens) that add up to k.

        Raises:
            ValueError: nobody asked yet, or the lengths disagree.
        """
        if not self.token_ids:
            raise ValueError("sampled() before observe()")
        ids = list(map(int, token_ids))
        runs = list(map(int, version_runs))
        if len(ids) != len(logprobs) or len(runs) % 2 or sum(runs[1::2]) != len(ids):
            raise ValueError(f"{len(ids)} tokens, {len(logprobs)} logprobs, version_runs {runs}: lengths disagree")
        start = len(self.token_ids)
        if not self._user_spoke:
            start, _ = self.spans.pop()
        self.token_ids += ids
        self.packed.extend(ids)
        self.loss_mask += [1] * len(ids)
        self.logprobs += map(float, logprobs)
        for version, count in zip(runs[::2], runs[1::2], strict=True):
            self._add_run(version, count)
        self.spans.append((start, len(self.token_ids)))
        self._user_spoke = False

    def _add_run(self, version: int, count: int) -> None:
        if self.version_runs and self.version_runs[-2] == version:
            self.version_runs[-1] += count
        elif count:
            self.version_runs += [version, count]

    def _turn_is_closed(self) -> bool:
        start, end = self.spans[-1]
        return end > start and self.token_ids[end - 1] == self.rules.end_of_turn_id


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _after(rendered: str, marker: str) -> str:
    return rendered[rendered.index(marker) + len(marker) :]


def _before(rendered: str, marker: str) -> str:
    return rendered[: rendered.index(marker)]
