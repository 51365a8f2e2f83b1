# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale: how large a batch is worth it. McCandlish et al., "An Empirical Model of Large-Batch
Training", 2018. Pure numbers: no tensors, no clocks. The loop feeds it; a sentence comes out.

Where a sample's gradient has mean G and covariance Σ, a mean over n samples has an expected square of |G|² + tr Σ / n.
A step has M microbatches of nₘ samples with mean gradients gₘ, N samples in all, and the step's g = Σ nₘ gₘ / N. From
    Σ nₘ |gₘ - g|²  =  Σ nₘ |gₘ|² - N |g|²,    of which the expectation is  (M - 1) tr Σ   (see docs/large-batches.md)
two estimates follow, without bias for any sizes nₘ:
    noise = (Σ nₘ |gₘ|² - N |g|²) / (M - 1)  ≈ tr Σ        signal = |g|² - noise / N  ≈ |G|²
Each is averaged over steps by itself, and the noise scale is noise / signal: a mean of ratios would be far off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from unisono.core.errors import SetupError

LEAST_OBSERVATIONS = 5  # before anything is said
_SURE = 2.0  # standard errors by which the signal must be above zero


@dataclass
class NoiseScale:
    """Feed it with `observe`. `memory` is what is kept of the past at each observation: 0.95 remembers about 20."""

    memory: float = 0.95
    observed: int = 0
    weight: float = 0.0  # of all observations together, the newest being 1
    weight_of_squares: float = 0.0
    noise_sum: float = 0.0
    signal_sum: float = 0.0
    signal_square_sum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise SetupError(f"NoiseScale(memory={self.memory}) never forgets", do="give memory from 0 to below 1")

    def observe(self, samples: float, weights: Sequence[float], squares: Sequence[float], square: float) -> None:
        """One step: its samples, each microbatch's share of them, the squared norm of each microbatch's gradient times
        its share (what is added up over microbatches), and that of their sum. Microbatches without samples have
        weight 0. A step that has fewer than two microbatches, or is not finite, says nothing."""
        full = [(weight, value) for weight, value in zip(weights, squares, strict=True) if weight > 0]
        if len(full) < 2 or not math.isfinite(square) or not all(math.isfinite(value) for _, value in full):
            return
        # nₘ |gₘ|² is N |wₘ gₘ|² / wₘ, as nₘ = N wₘ.
        spread = math.fsum([*(value / weight for weight, value in full), -square])
        noise = samples * spread / (len(full) - 1)
        signal = square - noise / samples
        kept = self.memory
        self.observed += 1
        self.weight = kept * self.weight + 1
        self.weight_of_squares = kept * kept * self.weight_of_squares + 1
        self.noise_sum = kept * self.noise_sum + noise
        self.signal_sum = kept * self.signal_sum + signal
        self.signal_square_sum = kept * self.signal_square_sum + signal * signal

    @property
    def noise(self) -> float:
        """The variance of one sample's gradient, all elements together: tr Σ."""
        return max(0.0, self.noise_sum / self.weight) if self.weight else 0.0

    @property
    def signal(self) -> float:
        """The squared length of the true gradient. Below zero where it drowns in the noise."""
        return self.signal_sum / self.weight if self.weight else 0.0

    @property
    def signal_error(self) -> float:
        """The standard error of `signal`, from how much the observations scatter."""
        share = self.weight_of_squares / self.weight**2 if self.weight else 1.0
        if share >= 1:
            return math.inf
        scatter = max(0.0, self.signal_square_sum / self.weight - self.signal**2) / (1 - share)
        return math.sqrt(scatter * share)

    @property
    def samples(self) -> float | None:
        """The noise scale, or None: too little was observed, or the signal cannot be told from zero."""
        if self.observed < LEAST_OBSERVATIONS or self.signal <= _SURE * self.signal_error:
            return None
        return self.noise / self.signal

    @property
    def at_least(self) -> float | None:
        """A cautious lower bound of it, which exists also where the signal drowns."""
        highest = self.signal + _SURE * self.signal_error
        if self.observed < LEAST_OBSERVATIONS or not highest > 0:
            return None
        return self.noise / highest

    def describe(self, batch_size: int) -> str:
        """What it means for the batch, in one sentence; empty while nothing is known."""
        found, least = self.samples, self.at_least
        if found is not None:
            size = f"gradient noise scale about {rounded(found)} samples"
            if batch_size > found:
                return f"{size}: batches beyond about that size save few steps; you use {batch_size:,}"
            return f"{size}: batches up to about that size save steps nearly in proportion; you use {batch_size:,}"
        if least is not None and least >= 1:
            size = f"gradient noise scale above {rounded(least)} samples, too noisy to say more"
            if batch_size > least:
                return f"{size}; you use {batch_size:,}"
            return f"{size}: batches up to that size save steps nearly in proportion; you use {batch_size:,}"
        return ""

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, float]) -> NoiseScale:
        """Raises ValueError for what is none."""
        fresh = asdict(cls())
        if data.keys() - fresh.keys() or any(type(value) is not type(fresh[name]) for name, value in data.items()):
            raise ValueError(f"{sorted(data)} is not the state of a noise scale")
        return cls(**{**fresh, **data})


def steps_compared(noise_scale: float, batch: float, other: float) -> tuple[float, float]:
    """What `other` as the batch size needs against `batch` for the same loss, by the paper's model: its steps and its
    samples, each as a factor. Steps are as 1 + noise scale / batch, samples as batch + noise scale."""
    return (1 + noise_scale / other) / (1 + noise_scale / batch), (other + noise_scale) / (batch + noise_scale)


def rounded(value: float) -> str:
    """Two digits, which is more than an estimate of noise is good for: ``4,100``, ``37``, ``0.52``."""
    shown = float(f"{value:.1e}") if value > 0 else 0.0
    digits = max(0, 1 - math.floor(math.log10(shown))) if shown else 0
    return f"{shown:,.{digits}f}"
