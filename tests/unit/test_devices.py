# SPDX-License-Identifier: Apache-2.0
"""Which device a rank computes on, and what is said where there are not enough."""

from __future__ import annotations

import pytest
import torch

from unisono.core.errors import SetupError
from unisono.core.mesh import Mesh
from unisono.train.numerics import choose_device, require_gpus


@pytest.mark.parametrize(
    ("count", "workers", "mesh", "what", "do"),
    [
        (1, 2, Mesh(fsdp=4), "--mesh dp=2,fsdp=4 needs 2 x 4 = 8 GPUs, and there is 1 here", "use a smaller mesh"),
        (6, 2, Mesh(fsdp=2, tp=2), "dp=2,fsdp=2,tp=2 needs 2 x 2 x 2 = 8 GPUs, and there are 6", "--mesh dp=1,fsdp=2"),
        (0, 1, Mesh(pp=2), "--mesh dp=1,pp=2 needs 1 x 2 = 2 GPUs, and there are 0 here", "--device cpu"),
        (2, 4, Mesh(), "4 workers need 4 GPUs, and there are 2 here", "use --workers 2, or --device cpu"),
    ],
)
def test_too_few_are_said_with_the_arithmetic(count: int, workers: int, mesh: Mesh, what: str, do: str) -> None:
    with pytest.raises(SetupError) as caught:
        require_gpus(count, workers, mesh)
    assert what in caught.value.what
    assert do in caught.value.do


def test_enough_are_enough() -> None:
    require_gpus(8, 2, Mesh(fsdp=2, tp=2))
    require_gpus(1, 1, Mesh())


def test_on_cpus_there_is_no_limit() -> None:
    assert choose_device("cpu", 63, 16, Mesh(fsdp=4)) == torch.device("cpu")


def test_gpus_that_are_asked_for_and_not_there_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0, 2, Mesh(fsdp=4)) == torch.device("cpu")
    with pytest.raises(SetupError, match="2 x 4 = 8 GPUs, and there are 0 here"):
        choose_device("cuda", 0, 2, Mesh(fsdp=4))
