"""Names of a checkpoint's files, and of the tensors in its parts."""

from __future__ import annotations

from typing import Final

# In a checkpoint: the folder of its parts.
STATE_FOLDER: Final = "learner"
# In that folder: what the weights are.
MODEL_FILE: Final = "model.json"

# Then a weight's name in transformers.
MODEL: Final = "model."
# Then peft's name of a factor.
ADAPTER: Final = "adapter."
# Then kind and parameter.
OPTIMIZER: Final = "optimizer."
CRITIC: Final = "critic."
VERSION: Final = "version"
KL_COEF: Final = "kl_coef"
# Then the device's type, and the rank if it is not 0.
RNG: Final = "rng."
