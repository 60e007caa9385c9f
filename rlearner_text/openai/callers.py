"""Finds who calls the HTTP API by the key, and counts what each call uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rlearner_text.openai import api_keys
from rlearner_text.openai.answer_store import MOST_BYTES, AnswerStore
from rlearner_text.openai.backends import ApiBackend, GenerateHandler, ServedModel, SingleKeyBackend
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.named_keys import DEFAULT, KeyStore, LiveKeys
from rlearner_text.openai.quotas import KeyUsage
from rlearner_text.tokenizer import Tokenizer

KEPT_BYTES: Final = MOST_BYTES // 4  # of the answers of one named key


@dataclass(frozen=True)
class Caller:
    """Who sends a request.

    Attributes:
        name: of the key, for the access log.
        usage: counts against the limits of the key; None: there are none.
    """

    name: str
    backend: ApiBackend
    usage: KeyUsage | None = None


class Call:
    """One request of a caller, and the tokens it has used."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.prompt_tokens = 0
        self.output_tokens = 0

    def begin(self) -> None:
        """Count the request.

        Raises:
            HttpError: with status 429, if a limit of the key is reached.
        """
        if self.caller.usage is not None:
            self.caller.usage.begin(time.monotonic())

    def end(self) -> None:
        """Count the end of a request that has begun."""
        if self.caller.usage is not None:
            self.caller.usage.end()

    def reserve(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take the tokens of the prompts, and the most that may be sampled, from the key's limit.

        Raises:
            HttpError: with status 429, if the limit is reached.
        """
        if self.caller.usage is not None:
            self.caller.usage.reserve(prompt_tokens + output_tokens, time.monotonic())
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens

    def settle(self, output_tokens: int) -> None:
        """Return what was reserved beyond ``output_tokens``."""
        if self.caller.usage is not None:
            self.caller.usage.give_back(self.output_tokens - output_tokens, time.monotonic())
        self.output_tokens = output_tokens


class CallerDirectory:
    """Finds the caller of a request by its key: the one without name, or a named one.

    Earlier answers, which the Responses API refers to, are kept apart for each key.
    """

    def __init__(
        self,
        handle: GenerateHandler,
        tokenizer: Tokenizer,
        served_model: ServedModel,
        key: str,
        key_store: KeyStore | None,
    ) -> None:
        self._create_backend: Callable[[int], SingleKeyBackend] = lambda most_bytes: (
            SingleKeyBackend(handle, tokenizer, served_model, AnswerStore(most_bytes))
        )
        self._key, self._default = key, Caller(DEFAULT, self._create_backend(MOST_BYTES))
        self._live = None if key_store is None else LiveKeys(key_store)
        self._callers: dict[str, Caller] = {}  # by the hash of the key
        self._num_changes = 0

    def find(self, header: str | None) -> Caller | None:
        """Return who sent an Authorization header; None if the key is missing or wrong.

        Raises:
            HttpError: with status 401, if the key has expired.
        """
        if api_keys.matches(header, self._key):
            return self._default
        if self._live is None or (token := api_keys.bearer(header)) is None:
            return None
        key = self._live.find(token)
        if self._live.changes != self._num_changes:
            self._num_changes = self._live.changes
            live_digests = set(self._live.keys)
            self._callers = {
                d: caller
                for d, caller in self._callers.items()
                if caller.usage and caller.usage.key in live_digests
            }
        if key is None:
            return None
        if key.expired(time.time()):
            expiry = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(key.expires_at))
            raise HttpError(
                401, f"the API key {key.name} expired at {expiry}", code="expired_api_key"
            )
        if key.sha256 not in self._callers:
            self._callers[key.sha256] = Caller(
                key.name, self._create_backend(KEPT_BYTES), KeyUsage(key, time.monotonic())
            )
        return self._callers[key.sha256]
