# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale of a training under way: fed from its steps, kept in its state, told as an event."""

from __future__ import annotations

from unisono.core import events
from unisono.parallel.strategy import Reduced
from unisono.train.noise_scale import NoiseScale
from unisono.train.state import TrainState


def observe_noise(state: TrainState, batch_size: int, reduced: Reduced, samples: int) -> list[events.Event]:
    """Of the step that was just done, where it was measured; returns what is to be told of it."""
    if not reduced.squares:
        return []
    noise = NoiseScale.from_dict(state.noise)
    noise.observe(samples, reduced.weights, reduced.squares, reduced.square)
    state.noise = noise.as_dict()
    text = noise.describe(batch_size)
    found = events.NoiseScale(
        step=state.step,
        samples=noise.samples,
        noise=noise.noise,
        signal=noise.signal,
        batch_size=batch_size,
        text=text,
    )
    return [found] if text else []
