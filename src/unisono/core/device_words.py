# SPDX-License-Identifier: Apache-2.0
"""What a GPU achieves and what its memory is used for, in words. For ``unisono show``; knows events alone."""

from __future__ import annotations

from unisono.core.events import DeviceMeasured


def describe_device(measured: DeviceMeasured | None) -> list[tuple[str, str]]:
    """Rows of a summary: speed against the stated peak, and memory by what it is used for; none if nobody measured."""
    if measured is None:
        return []
    speed = f"{measured.samples_per_s:,.1f} samples/s"
    if measured.tokens_per_s is not None:
        speed = f"{measured.tokens_per_s:,.0f} tokens/s"
    if measured.tflops is not None:
        speed += f", {measured.tflops:,.0f} TFLOP/s"
    if measured.mfu is not None:
        speed += f", {measured.mfu:.1%} of the peak ({measured.peak})"
    memory = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in measured.memory.items() if size)
    whose = "" if measured.rank is None else f"rank {measured.rank}, the fullest: "
    return [("device", speed), ("memory", whose + memory)]
