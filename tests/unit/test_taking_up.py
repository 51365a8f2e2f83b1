# SPDX-License-Identifier: Apache-2.0
"""Which settings may differ between a checkpoint and the training that takes it up."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.checkpoint.manifest import Manifest
from unisono.core.errors import CheckpointMismatch
from unisono.core.fingerprint import Fingerprint
from unisono.core.spec import JobSpec
from unisono.train.resuming import differences

FINGERPRINT = Fingerprint(torch="2.13", device="cpu", instructions="AVX2", threads=1, deterministic=True, data="9/ab")


def spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"microbatches": 4, "batch_size": 16, "seed": 0, "threads": 1, "exact": True} | changes)


def compared(before: JobSpec, now: JobSpec) -> list[str]:
    facts = {"job": before.model_dump(mode="json"), "fingerprint": FINGERPRINT.model_dump(mode="json")}
    return differences(Manifest(7, 0.0, {}, {}, facts), now, FINGERPRINT, force=False)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {}, []),
        ({"epochs": 1}, {"epochs": 2}, ["epochs 1 -> 2"]),
        ({"mesh": "fsdp=2"}, {}, ["mesh fsdp=2 -> "]),
        ({"recompute": "full"}, {"recompute": "none"}, ["recompute full -> none"]),  # which changes no bit
        ({"recompute": "none", "compile": "blocks"}, {"recompute": "full", "compile": "blocks"}, None),
        ({"compile": "blocks"}, {"recompute": "full"}, None),
        ({"staleness": "inf"}, {"round_steps": 16}, ["staleness inf -> 0; bits depend on who was faster until here"]),
        ({"staleness": "inf"}, {"staleness": "inf", "round_steps": 16, "fresh": "pull"}, []),  # as nobody had to say
        ({"precision": "bf16"}, {}, None),
        ({"batch_size": 32}, {}, None),
    ],
)
def test_what_decides_no_bit_may_differ(before: dict[str, Any], now: dict[str, Any], said: list[str] | None) -> None:
    if said is None:
        with pytest.raises(CheckpointMismatch, match="by another training"):
            compared(spec(**before), spec(**now))
    else:
        assert compared(spec(**before), spec(**now)) == said


def test_a_checkpoint_of_an_earlier_version_differs_in_nothing() -> None:
    """It does not say what did not exist yet."""
    job = spec().model_dump(mode="json")
    for key in ("measured_stages", "round_steps"):
        del job[key]
    facts = {"job": job, "fingerprint": FINGERPRINT.model_dump(mode="json")}
    assert differences(Manifest(7, 0.0, {}, {}, facts), spec(), FINGERPRINT, force=False) == []
