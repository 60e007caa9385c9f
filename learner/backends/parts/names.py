"""Names of a checkpoint's files, and of the tensors in its parts."""

from __future__ import annotations

from typing import Final

STATE_FOLDER: Final = "learner"  # in a checkpoint: its parts
MODEL_FILE: Final = "model.json"  # in that folder: what the weights are

MODEL: Final = "model."  # then a weight's name in transformers
ADAPTER: Final = "adapter."  # then peft's name of a factor
OPTIMIZER: Final = "optimizer."  # then kind and parameter
CRITIC: Final = "critic."
VERSION: Final = "version"
KL_COEF: Final = "kl_coef"
RNG: Final = "rng."  # then the device's type, and the rank if it is not 0
