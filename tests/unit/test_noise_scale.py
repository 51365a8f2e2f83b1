# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale: right on synthetic gradients whose noise is known, whatever the sizes of microbatches."""

from __future__ import annotations

import math

import pytest
import torch

from unisono.core.errors import SetupError
from unisono.train.noise_scale import LEAST_OBSERVATIONS, NoiseScale, rounded, steps_compared

DIMENSIONS = 40
MEAN = torch.linspace(-1, 1, DIMENSIONS, dtype=torch.float64)
SPREAD = torch.linspace(0.5, 6, DIMENSIONS, dtype=torch.float64)  # of one sample's gradient, by element
SIGNAL, NOISE = float(MEAN.square().sum()), float(SPREAD.square().sum())
SIZES = {
    "equal": [8, 8, 8, 8],
    "two": [16, 16],
    "short last": [10, 10, 10, 2],
    "very unequal": [30, 1, 1, 4, 12],
    "some empty": [9, 0, 7, 0, 4],
    "one each": [1] * 12,
}


def one_step(sizes: list[int], random: torch.Generator) -> tuple[float, list[float], list[float], float]:
    """What a step hands over: gradients of single samples are drawn, and averaged as a training would."""
    total = sum(sizes)
    weighted = []
    for size in sizes:
        samples = MEAN + SPREAD * torch.randn(size, DIMENSIONS, generator=random, dtype=torch.float64)
        weighted.append(samples.sum(0) / total)  # the mean of the microbatch, times its share
    squares = [float(gradient.square().sum()) for gradient in weighted]
    return total, [size / total for size in sizes], squares, float(torch.stack(weighted).sum(0).square().sum())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_noise_and_signal_are_without_bias_for_microbatches_of_any_size(sizes: list[int]) -> None:
    random = torch.Generator().manual_seed(5)
    singles = []
    for _ in range(3000):
        one = NoiseScale(memory=0.0)
        one.observe(*one_step(sizes, random))
        singles.append((one.noise, one.signal))
    found = torch.tensor(singles, dtype=torch.float64)
    error = found.std(0) / math.sqrt(len(found))
    assert abs(float(found[:, 0].mean()) - NOISE) < 4 * float(error[0])
    assert abs(float(found[:, 1].mean()) - SIGNAL) < 4 * float(error[1])
    assert float(error[0]) < 0.02 * NOISE, "the test could not see a bias"


def test_a_naive_weighting_by_equal_sizes_would_be_wrong() -> None:
    """That this test can tell: the estimator that ignores sizes is far off where they differ."""
    random = torch.Generator().manual_seed(6)
    sizes, naive = SIZES["very unequal"], []
    for _ in range(2000):
        samples, weights, squares, square = one_step(sizes, random)
        plain = [value / weight**2 for value, weight in zip(squares, weights, strict=True)]
        small, large = samples / len(sizes), samples
        naive.append((sum(plain) / len(plain) - square) / (1 / small - 1 / large))
    assert sum(naive) / len(naive) > 1.5 * NOISE


def test_averaged_over_steps_the_noise_scale_comes_out() -> None:
    random, found = torch.Generator().manual_seed(7), NoiseScale(memory=0.99)
    for step in range(800):
        found.observe(*one_step(SIZES["short last" if step % 5 == 0 else "equal"], random))
    assert found.samples is not None
    assert found.samples == pytest.approx(NOISE / SIGNAL, rel=0.15)
    assert found.at_least is not None
    assert found.at_least < found.samples
    assert found.signal_error == pytest.approx(abs(found.signal - SIGNAL), abs=4 * found.signal_error)


def test_it_forgets_what_is_long_past() -> None:
    random, found = torch.Generator().manual_seed(8), NoiseScale(memory=0.9)
    for _ in range(200):
        samples, weights, squares, square = one_step(SIZES["equal"], random)
        found.observe(samples, weights, [100 * value for value in squares], 100 * square)
    before = found.noise
    for _ in range(200):
        found.observe(*one_step(SIZES["equal"], random))
    assert before > 50 * NOISE
    assert found.noise == pytest.approx(NOISE, rel=0.3)


def test_a_gradient_that_drowns_in_noise_gives_a_bound_and_no_number() -> None:
    random, found = torch.Generator().manual_seed(9), NoiseScale()
    for _ in range(60):
        weighted = [torch.randn(DIMENSIONS, generator=random, dtype=torch.float64) / 4 for _ in range(4)]
        squares = [float(gradient.square().sum()) for gradient in weighted]
        found.observe(32, [0.25] * 4, squares, float(torch.stack(weighted).sum(0).square().sum()))
    assert found.samples is None
    assert found.at_least is not None
    assert found.at_least > 32
    assert "above" in found.describe(32)


def test_gradients_without_noise_have_a_noise_scale_of_zero() -> None:
    found = NoiseScale()
    for _ in range(10):
        found.observe(40, [0.25] * 4, [0.0625 * 9.0] * 4, 9.0)
    assert found.samples == 0.0
    assert found.describe(40).startswith("gradient noise scale about 0 samples: batches beyond")


def test_steps_that_cannot_say_anything_are_passed_over() -> None:
    found = NoiseScale()
    found.observe(8, [1.0], [2.0], 2.0)
    found.observe(8, [1.0, 0.0], [2.0, 0.0], 2.0)
    found.observe(8, [0.5, 0.5], [math.nan, 1.0], 1.0)
    found.observe(8, [0.5, 0.5], [1.0, 1.0], math.inf)
    assert found == NoiseScale()
    assert (found.noise, found.signal, found.samples, found.at_least, found.describe(8)) == (0.0, 0.0, None, None, "")


def test_nothing_is_said_before_a_few_observations() -> None:
    random, found = torch.Generator().manual_seed(10), NoiseScale()
    for count in range(LEAST_OBSERVATIONS + 1):
        assert bool(found.describe(32)) == (count >= LEAST_OBSERVATIONS)
        found.observe(*one_step(SIZES["one each"], random))


def test_it_goes_on_exactly_from_its_state() -> None:
    random, whole = torch.Generator().manual_seed(11), NoiseScale(memory=0.8)
    steps = [one_step(SIZES["short last"], random) for _ in range(12)]
    for step in steps:
        whole.observe(*step)
    first = NoiseScale(memory=0.8)
    for step in steps[:5]:
        first.observe(*step)
    second = NoiseScale.from_dict(first.as_dict())
    for step in steps[5:]:
        second.observe(*step)
    assert second == whole
    assert NoiseScale.from_dict({}) == NoiseScale()


@pytest.mark.parametrize("data", [{"noise": 1.0}, {"observed": 1.5}, {"noise_sum": "1"}, {"memory": True}])
def test_what_is_no_state_is_refused(data: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not the state of a noise scale"):
        NoiseScale.from_dict(data)


@pytest.mark.parametrize("memory", [-0.1, 1.0, 2.0])
def test_a_memory_that_never_forgets_is_refused(memory: float) -> None:
    with pytest.raises(SetupError, match="memory"):
        NoiseScale(memory=memory)


def known(samples: float) -> NoiseScale:
    """One that has seen many equal steps, and so is sure of its number."""
    found = NoiseScale()
    for _ in range(20):  # noise `samples`, signal 1, four microbatches of 8
        found.observe(32, [0.25] * 4, [0.0625 * (1 + samples / 8)] * 4, 1 + samples / 32)
    return found


@pytest.mark.parametrize(
    ("samples", "batch", "sentence"),
    [
        (
            4096.0,
            256,
            "gradient noise scale about 4,100 samples: batches up to about that size save steps nearly in proportion; "
            "you use 256",
        ),
        (
            93.4,
            1024,
            "gradient noise scale about 93 samples: batches beyond about that size save few steps; you use 1,024",
        ),
    ],
)
def test_it_says_in_one_sentence_what_it_means_for_the_batch(samples: float, batch: int, sentence: str) -> None:
    assert known(samples).describe(batch) == sentence


def test_the_model_of_steps_and_samples_has_its_corner_at_the_noise_scale() -> None:
    assert steps_compared(1000, 10, 20) == pytest.approx((0.505, 1.0099), rel=1e-3)  # far below: half the steps
    assert steps_compared(1000, 500, 1000) == pytest.approx((2 / 3, 4 / 3))
    assert steps_compared(10, 1000, 2000) == pytest.approx((0.995, 1.990), rel=1e-3)  # far above: twice the samples


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.523, "0.52"),
        (9.96, "10"),
        (37.4, "37"),
        (99.6, "100"),
        (4149.0, "4,100"),
        (1.26e7, "13,000,000"),
    ],
)
def test_a_number_is_told_with_two_digits(value: float, text: str) -> None:
    assert rounded(value) == text
