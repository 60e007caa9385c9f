"""A reward model: a sequence classifier with one label, whose output replaces logprobs.

A conversation of n tokens is a sample of n + 1 tokens, of which the last alone is trained: the
position that would predict it, the end of the conversation, is the one that is scored. So slices,
packing and shared prefixes are those of language models.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from broker.errors import ConfigError
from learner.backends.models.attention_trial import trunk_of
from learner.backends.models.auto_classes import (
    CLASSIFIER,
    AutoClass,
    auto_class_of,
    classifier_problem,
    import_auto_class,
)
from learner.backends.models.batch import TokenBatch
from learner.backends.models.language_model import CLASSIFIER_HEAD
from learner.backends.models.lora import LoraAdapters
from learner.backends.models.policy import PolicyModel
from learner.config import LoraSection
from rlearner_text.atomic_folders import atomic_folder
from rlearner_text.config import ModelSection
from rlearner_text.hub import copy_tokenizer, model_folder, read_json

KEY: Final = "model.path"
# Enough to tell one hidden state from another.
_PROBE_TOKENS: Final = 8


class RewardPolicy(PolicyModel):
    """A sequence classifier with the methods of a policy; ``score`` gives its output.

    Raises:
        ConfigError: if its output is more than one linear layer of the last hidden state.
    """

    auto_class: ClassVar[AutoClass] = CLASSIFIER

    def find_head(self) -> nn.Linear:
        """Return the layer from hidden states to the score.

        Raises:
            ConfigError: if the classifier has no linear layer with one output.
        """
        head = getattr(self.module, CLASSIFIER_HEAD, None)
        if isinstance(head, nn.Linear) and head.out_features == 1:
            return head
        allowed = f"{type(self.module).__name__} has no linear layer {CLASSIFIER_HEAD!r} to 1 label"
        raise ConfigError(KEY, self.path, allowed)

    def score(self, batch: TokenBatch, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return the score at each trained token's predecessor, and zeros, (T,) float32 each.

        Args:
            entropy_grad: ignored, because a classifier has no distribution of tokens.
        """
        scores: Tensor = self.within(self._scores, batch)
        return scores, torch.zeros_like(scores)

    def _scores(self, batch: TokenBatch) -> Tensor:
        return self.logits(self.features(batch))[:, 0].float()

    def adapt(self, section: LoraSection, seed: int) -> LoraAdapters:
        """Train adapters of the trunk, and one of the head, whose single row it replaces whole."""
        self.adapters = LoraAdapters(
            self.module, section, seed, self.path, extra_modules=(CLASSIFIER_HEAD,)
        )
        # peft has put another layer in its place.
        self.head = getattr(self.module, CLASSIFIER_HEAD)
        return self.adapters

    @torch.no_grad()
    def probe_head(self) -> bool:
        """Return True; refuse a classifier that computes more than ``head(last hidden state)``."""
        pad = self.module.config.get_text_config().pad_token_id
        ids = [token for token in range(_PROBE_TOKENS + 1) if token != pad]
        inputs = torch.tensor([ids], device=self.device) % self.vocab_size
        inputs_of_head: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(
            lambda _, arguments: inputs_of_head.append(arguments[0])
        )
        try:
            output = self.module(input_ids=inputs, use_cache=False).logits
        finally:
            handle.remove()
        states = trunk_of(self.module)(input_ids=inputs, use_cache=False).last_hidden_state
        # The head may begin with zeros, so its inputs are compared, too.
        is_same = len(inputs_of_head) == 1 and torch.equal(inputs_of_head[0], states)
        if is_same and torch.equal(output, self.head(states)[:, -1]):
            return True
        allowed = (
            f"{type(self.module).__name__} computes more than a linear layer of the last token's "
            "hidden state"
        )
        raise ConfigError(KEY, self.path, allowed)


def make_classifier(path: str, out: Path, section: ModelSection, pad_token_id: int) -> str:
    """Return the folder of a classifier with one label, made of a language model if need be.

    Its head is 0, so that every conversation has the score 0. It is made once: a resumed run has
    it already. A model that is such a classifier is returned as it is.

    Args:
        path: folder or hub name of a language model or a classifier.
        pad_token_id: of its tokenizer, by which transformers finds the end of a padded row.

    Raises:
        ConfigError: if transformers has no classifier of this type, or it has several labels.
    """
    folder = model_folder(path, trust_remote_code=section.trust_remote_code)
    config = read_json(Path(folder) / "config.json", path, KEY)
    if problem := classifier_problem(config):
        raise ConfigError(KEY, path, problem)
    if auto_class_of(config) == CLASSIFIER:
        return path
    if not (out / "config.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        module = _load_with_new_head(folder, path, section)
        module.config.get_text_config().pad_token_id = pad_token_id
        module.config.pad_token_id = pad_token_id
        with atomic_folder(out) as work:
            module.save_pretrained(work)
            copy_tokenizer(path, work)
    return str(out)


def _load_with_new_head(folder: str, path: str, section: ModelSection) -> Any:
    """Return the classifier with the language model's weights and a head of zeros."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # Its report of the missing head would tell people to train it, which is about to happen.
    logging.set_verbosity_error()
    try:
        module, info = import_auto_class(CLASSIFIER).from_pretrained(
            folder,
            num_labels=1,
            dtype=getattr(torch, section.dtype),
            trust_remote_code=section.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        allowed = f"transformers cannot make a classifier of it: {reason}"
        raise ConfigError(KEY, path, allowed) from error
    finally:
        logging.set_verbosity(verbosity)
    own = {f"{CLASSIFIER_HEAD}.weight", f"{CLASSIFIER_HEAD}.bias"}
    if missing := sorted(set(info["missing_keys"]) - own):
        allowed = f"{len(missing)} of its weights are missing, the first is {missing[0]}"
        raise ConfigError(KEY, path, allowed)
    for parameter in getattr(module, CLASSIFIER_HEAD, nn.Identity()).parameters():
        nn.init.zeros_(parameter)
    return module
