"""Makes the probe of an offer: logprobs of ordinary text, which servers compute again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from broker.contract import wire
from broker.errors import NotFinite, UserError
from broker.weights import fp8
from broker.weights.finite import first_non_finite
from broker.weights.probe import make_probe
from learner.backends.base import Backend
from rlearner_text.config import ModelSection
from rlearner_text.hub import model_folder
from rlearner_text.probe_text import probe_tokens
from rlearner_text.tokenizer import Tokenizer

# Without a tokenizer there is no text; any tokens show whether weights are the same.
RANDOM_TOKENS: Final = 64
# Largest difference between two correct computations of one logprob, in nats: kernels sum in
# different orders. It does not follow what two ways of computing differ by here, because that is
# also how a fault of this process looks.
TOLERANCE: Final = {"float32": 5e-3, "bfloat16": 0.25, "float16": 0.05}


def read_probe_ids(
    path: str, model: ModelSection, *, vocab_size: int, max_context: int
) -> list[int]:
    """Return ids of ordinary text, past every window and switch within the run's context.

    Args:
        path: of the model.
        vocab_size: rows of its embedding.
        max_context: rollout.max_context_tokens.
    """
    from transformers import AutoConfig

    trusted = model.trust_remote_code
    folder = model_folder(path, trust_remote_code=trusted)
    config = (
        AutoConfig.from_pretrained(folder, trust_remote_code=trusted).get_text_config().to_dict()
    )
    try:
        tokenizer: Tokenizer | None = Tokenizer.load(path, trust_remote_code=trusted)
    except UserError:
        tokenizer = None
    return probe_tokens(tokenizer, config, vocab_size=vocab_size, max_context=max_context)


class WeightProbe:
    """Makes the probes of a backend's weights, all of the same tokens.

    Args:
        dtype: of the backend's weights.
        converted: into which they are converted on the wire and in engines; None: unchanged.
        token_ids: of the text; fewer than two: random ones.
        exact: servers must compute the same bits.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: str,
        converted: Sequence[str | None] = (),
        token_ids: Sequence[int] = (),
        *,
        exact: bool = False,
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        kinds = {dtype, *(kind or dtype for kind in converted)} - {fp8.NAME}
        # Between two ways of computing.
        self.rounding = max(TOLERANCE[kind] for kind in kinds)
        self._tolerance = 0.0 if exact else self.rounding
        self._token_ids = list(token_ids)
        if len(self._token_ids) < 2:
            self._token_ids = (
                np.random.default_rng(0).integers(0, backend.vocab_size, RANDOM_TOKENS).tolist()
            )

    def make(self) -> wire.Probe:
        """Return the tokens, their logprobs under the current weights, and the tolerance.

        Raises:
            NotFinite: if a logprob is NaN or infinite; names the weight that is.
        """
        logprobs = self._backend.logprobs(self._token_ids)
        if len(broken := (~logprobs.isfinite()).nonzero()):
            raise NotFinite(self._describe(int(broken[0]) + 1, float(logprobs[broken[0]])))
        return make_probe(self._token_ids, logprobs, tolerance=self._tolerance)

    def _describe(self, token: int, logprob: float) -> str:
        """Describe why the model computes a logprob that is not finite."""
        if problem := first_non_finite(self._backend.weights()):
            return (
                f"the weight {problem}; lower train.lr, and start the run again, which resumes it"
            )
        text = (
            f"the logprob of token {token} of the probe is {logprob} "
            "although all weights are finite"
        )
        if self._dtype == "float32":
            return text
        return f"{text}: what the model computes does not fit {self._dtype}; use float32"
