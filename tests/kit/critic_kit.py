"""Steps of a policy and its critic, on samples whose returns a value can learn."""

from dataclasses import replace

import numpy as np
import pytest
from backend_kit import kit
from checkpoint_kit import state_of

from learner.config import AlgorithmSection

NAMES = (
    "actor/kl_loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/grad_norm",
    "critic/vpred_mean",
    "critic/vf_explained_var",
)
PPO = AlgorithmSection.model_validate(
    {
        "adv_estimator": "gae",
        "critic": {"enabled": True, "lr": 1e-2},
        "num_minibatches": 2,
        "kl_coef": 0.2,
    }
)


def steps(backend, seeds):
    """One whole step for each seed, on samples valued by the critic; the metrics."""
    found = []
    for seed in seeds:
        rows = kit.samples(seed, 14)
        values = [one.values for one in backend.score(rows)]
        columns = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        for row, column, value in zip(rows, columns, values, strict=True):
            column[row.positions] = value
        returns = [
            np.where(row.loss_mask, np.sin(row.token_ids), 0).astype(np.float32) for row in rows
        ]
        samples = [
            replace(row, values=v, returns=r)
            for row, v, r in zip(rows, columns, returns, strict=True)
        ]
        found.append(backend.update(samples))
    return found


def whole(backend):
    """Copies of weights, moments, and the critic's."""
    return {
        name: tensor for name, tensor in state_of(backend).items() if not name.startswith("rng.")
    }


def agree(found, expected):
    for one, wanted in zip(found, expected, strict=True):
        for name in NAMES:
            assert one[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
