# SPDX-License-Identifier: Apache-2.0
"""What a worker finds in its environment."""

from __future__ import annotations

import pytest

from unisono.control.local_workers import worker_environment
from unisono.core.spec import RunSpec


def test_threads_come_from_the_spec_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    environment = worker_environment(RunSpec(threads=3))
    assert {environment[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}


def test_freed_memory_is_kept_unless_the_user_has_settings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    assert int(worker_environment(RunSpec())["MALLOC_TRIM_THRESHOLD_"]) >= 1 << 28
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    assert worker_environment(RunSpec())["MALLOC_TRIM_THRESHOLD_"] == "65536"


def test_ranks_that_share_a_model_give_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    alone, shared = worker_environment(RunSpec()), worker_environment(RunSpec(mesh="fsdp=2"))
    assert int(shared["MALLOC_MMAP_THRESHOLD_"]) < int(alone["MALLOC_MMAP_THRESHOLD_"])
    assert int(shared["MALLOC_TRIM_THRESHOLD_"]) < int(alone["MALLOC_TRIM_THRESHOLD_"])
