# SPDX-License-Identifier: Apache-2.0
"""How wrong a codec is on the gradients of all workers together, as the guard of ``--compress auto`` takes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import together
from torch import Tensor

from unisono.comm.autopilot_compress import LADDER, RUNGS
from unisono.comm.autopilot_compress_measure import coding_error, coding_paces
from unisono.comm.seam import Comm
from unisono.core.membership import even

M = 5
LENGTH = 60_001  # no whole number of blocks
Make = Callable[[int], Tensor]


def calm(microbatch: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(microbatch))


def off(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def errors_of(make: Make, rung: int) -> list[float | None]:
    members = even(1, (0, 1, 2), M)

    def work(comm: Comm) -> float | None:
        mine = members.ranges[comm.rank]
        return coding_error(comm, LADDER[rung][0], [make(microbatch) for microbatch in mine], [0] * len(mine))

    return together("threads", 3, work, membership=members)


def test_the_error_is_that_of_all_workers_together() -> None:
    def uneven(microbatch: int) -> Tensor:
        return calm(microbatch) * (microbatch + 1)

    codec, said = LADDER[1][0], []
    for microbatch in range(M):
        vector, code = uneven(microbatch), torch.empty(codec.length(LENGTH), dtype=torch.uint8)
        codec.encode(vector, code)
        codec.decode(code, vector)
        said.append(vector)
    whole = torch.cat([uneven(microbatch) for microbatch in range(M)])
    assert errors_of(uneven, 1) == [pytest.approx(off(torch.cat(said), whole), rel=0.02)] * 3


@pytest.mark.parametrize("size", [20.0, 1e3, 1e6])
def test_outliers_do_not_hide_what_happens_to_the_rest(size: float) -> None:
    """They are the norm, almost, and are themselves said well."""

    def spiked(microbatch: int) -> Tensor:
        vector = calm(microbatch)
        vector[::250] = size
        return vector

    for rung, is_good in ((0, True), (1, False), (2, False)):
        errors = errors_of(spiked, rung)
        assert len(set(errors)) == 1
        assert errors[0] is not None
        assert (errors[0] <= RUNGS[rung].bound) == is_good


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_no_scale_of_gradients_is_too_inaccurate_by_itself(scale: float) -> None:
    def scaled(microbatch: int) -> Tensor:
        return calm(microbatch) * scale

    for rung in range(len(RUNGS)):
        error = errors_of(scaled, rung)[0]
        assert error is not None
        assert error <= RUNGS[rung].bound


@pytest.mark.parametrize("scale", [0.0, torch.nan])
def test_zeros_and_what_is_not_finite_teach_nothing_about_codecs(scale: float) -> None:
    for rung in range(len(RUNGS)):
        assert errors_of(lambda microbatch: calm(microbatch) * scale, rung) == [None] * 3


def test_what_overflows_in_a_code_is_infinitely_wrong() -> None:
    def huge(microbatch: int) -> Tensor:
        return calm(microbatch).sign() * torch.finfo(torch.float32).max

    assert errors_of(huge, 0) == [float("inf")] * 3


def test_all_ranks_hear_the_same_times_of_the_slowest() -> None:
    codecs = [codec for codec, _ in LADDER]
    found = together("threads", 3, lambda comm: coding_paces(comm, codecs))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == len(LADDER)
    assert all(0 < seconds < 1e-6 for pace in found[0] for seconds in pace)
