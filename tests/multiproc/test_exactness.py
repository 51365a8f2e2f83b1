# SPDX-License-Identifier: Apache-2.0
"""The promise: the same weights, bit for bit, on any number of real worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiproc.running import run_command, run_python, run_unisono

SCRIPT = Path(__file__).with_name("train_model.py")
MICROBATCHES = 8


@pytest.mark.parametrize(
    ("model", "counts"), [("cnn", (1, 2, 3, 4, 5, 8)), ("lm", (2, 5)), ("lstm", (3, 4)), ("mlp", (1, 8))]
)
def test_any_number_of_workers_gives_the_hash_and_losses_of_a_plain_python_run(
    model: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    environment = {"UNISONO_MICROBATCHES": str(MICROBATCHES)}
    alone = run_python(SCRIPT, tmp_path, model, env=environment)
    expected = (alone.weights_sha256, losses(alone), alone.result["metrics"])
    for workers in counts:
        finished = run_unisono(
            SCRIPT, tmp_path, "--microbatches", str(MICROBATCHES), workers=workers, script_args=(model,), timeout_s=120
        )
        assert finished.result["workers"] == workers
        assert (finished.weights_sha256, losses(finished), finished.result["metrics"]) == expected, f"{workers} workers"


def test_without_any_flag_one_to_four_workers_agree_with_plain_python(tmp_path: Path) -> None:
    expected = run_python(SCRIPT, tmp_path, "mlp").weights_sha256
    for workers in (1, 4):
        assert run_unisono(SCRIPT, tmp_path, workers=workers, script_args=("mlp",)).weights_sha256 == expected


def test_another_seed_or_another_m_gives_other_bits(tmp_path: Path) -> None:
    """The hash can tell: it is not the same because nothing can change it."""
    runs = [
        run_unisono(SCRIPT, tmp_path, *options, workers=1, script_args=("mlp",))
        for options in ((), ("--seed", "1"), ("--microbatches", "2"))
    ]
    assert len({finished.weights_sha256 for finished in runs}) == 3
    first, other, _ = (str(finished.run_dir) for finished in runs)
    compared = run_command(tmp_path, "hash", first, other, expect=1).output
    assert "different weights" in compared
    assert "spec: seed 0 -> 1" in compared
    assert "the same weights" in run_command(tmp_path, "hash", first, f"{first}/final.safetensors").output


def losses(finished) -> list[float]:  # type: ignore[no-untyped-def]
    return [event.loss for event in finished.events if event.kind == "step_finished"]
