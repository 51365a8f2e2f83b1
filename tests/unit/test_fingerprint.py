# SPDX-License-Identifier: Apache-2.0
"""The numerics fingerprint: what changed between two runs, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from unisono.core.fingerprint import Fingerprint, explain
from unisono.train import numerics

RECORDED = Fingerprint(torch="2.13", device="cpu", instructions="AVX2", threads=1, deterministic=True, data="9/ab")


ONE_PART: list[tuple[dict[str, Any], str]] = [
    ({"torch": "2.14"}, "torch 2.13 -> 2.14"),
    ({"device": "cuda"}, "device cpu -> cuda"),
    ({"instructions": "AVX512"}, "instructions AVX2 -> AVX512"),
    ({"threads": 4}, "threads 1 -> 4"),
    ({"deterministic": False}, "deterministic True -> False"),
    ({"kernels": "fused AdamW"}, "kernels  -> fused AdamW"),
    ({"data": "9/cd"}, "data 9/ab -> 9/cd"),
]


@pytest.mark.parametrize(
    ("changes", "text"),
    [*ONE_PART, ({}, ""), ({"threads": 2, "torch": "2.14"}, "torch 2.13 -> 2.14, threads 1 -> 2")],
)
def test_what_changed_is_said_in_one_line(changes: dict[str, Any], text: str) -> None:
    assert explain(RECORDED, RECORDED.model_copy(update=changes)) == text


def test_every_part_of_a_fingerprint_is_in_the_table_above() -> None:
    assert {part for changes, _ in ONE_PART for part in changes} == set(Fingerprint.model_fields)


def test_a_fingerprint_survives_being_written_down() -> None:
    assert Fingerprint.model_validate_json(RECORDED.model_dump_json()) == RECORDED


def test_a_part_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValidationError):
        Fingerprint(**RECORDED.model_dump(), moon="full")


def test_this_machine_has_a_fingerprint_that_says_what_decides_bits() -> None:
    device = torch.device("cpu")
    mine = numerics.fingerprint(device, 1, True, (9, 0xAB))
    assert mine == numerics.fingerprint(device, 1, True, (9, 0xAB))
    assert mine.torch == torch.__version__
    assert torch.backends.cpu.get_cpu_capability() in mine.instructions
    assert (
        explain(mine, numerics.fingerprint(device, 2, False, (9, 0xAB)))
        == "threads 1 -> 2, deterministic True -> False"
    )
