from __future__ import annotations

import numpy as np

from rlearner_text.model_noise import noise_limit, noise_problem

EPSILON = 2.0**-23


def drawn(seed: int, scale: np.ndarray | float) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=400) * scale
    return (-3 + noise).astype(np.float32)


def test_noise_of_a_few_tokens_is_no_problem() -> None:
    sensitive = np.full(400, 5e-5)
    sensitive[:3] = 3e-3  # as special tokens of a pretrained model
    samples = [drawn(seed, sensitive) for seed in range(3)]
    for seed in range(10, 30):
        assert noise_problem(samples, drawn(seed, sensitive), epsilon=EPSILON) == ""


def test_differences_beyond_noise_are_named() -> None:
    samples = [drawn(seed, 5e-5) for seed in range(3)]
    other = drawn(9, 5e-5)
    other[200] += 0.01
    assert "differ by up to 0.01" in noise_problem(samples, other, epsilon=EPSILON)
    other[200] = np.nan
    assert "differ by up to nan" in noise_problem(samples, other, epsilon=EPSILON)


def test_stretch_past_a_window_is_judged_alone() -> None:
    scale = np.full(400, 0.2)
    samples = [drawn(seed, scale) for seed in range(3)]
    other = drawn(9, scale)
    other[-40:] += 1.0
    assert noise_problem(samples, other, epsilon=EPSILON) == ""
    assert "at tokens 360 to 400" in noise_problem(samples, other, epsilon=EPSILON, stretches=[360])


def test_limit_follows_the_dtype_where_samples_agree() -> None:
    same = [np.full(5, -10, np.float32)] * 2
    assert noise_limit(same, epsilon=EPSILON) == 2.5 * EPSILON
    assert noise_limit([same[0], same[0] + np.float32(0.1)], epsilon=EPSILON) > 0.3
