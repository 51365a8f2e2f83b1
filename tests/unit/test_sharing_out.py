# SPDX-License-Identifier: Apache-2.0
"""The small decisions of a replica with several ranks: who computes which samples, what is one unit, one voice."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from unisono.core.errors import SetupError
from unisono.core.mesh import Mesh
from unisono.parallel.grouped import narrowed, samples_in
from unisono.parallel.units import units
from unisono.train.cutting import decide
from unisono.train.notes import Notes, of_replica
from unisono.train.options import Parallel

Pair = namedtuple("Pair", "inputs targets")


def test_units_are_the_members_of_the_outermost_lists() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(3, 2)
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    model.inner = nn.Module()
    model.inner.more = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert units(model) == ["blocks.0", "blocks.1", "inner.more.0", "inner.more.2"]
    assert units(nn.Linear(2, 2)) == []


def test_batches_of_any_build_are_cut_along_samples() -> None:
    batch = {"a": torch.arange(6), "b": (torch.ones(6, 2), [torch.zeros(6)])}
    part = narrowed(batch, 2, 5)
    assert samples_in(batch) == 6
    assert part["a"].tolist() == [2, 3, 4]
    assert (part["b"][0].shape, part["b"][1][0].shape) == ((3, 2), (3,))
    named = narrowed(Pair(torch.arange(4), torch.arange(4)), 0, 1)
    assert isinstance(named, Pair)
    assert named.targets.tolist() == [0]


@pytest.mark.parametrize("batch", [(torch.ones(3), torch.ones(4)), (), {"text": "abc"}])
def test_a_batch_that_cannot_be_shared_out_is_refused(batch: object) -> None:
    with pytest.raises(SetupError, match="shared out between fsdp ranks"):
        samples_in(batch)


def test_a_replica_speaks_with_its_first_ranks_voice() -> None:
    first = Notes(0.1, 0.2, 0.3, 0.0, 7.0, 1.0, 11.0, 0.0, 3.0, 5.0)
    other = Notes(0.9, 0.9, 0.9, 1.0, 8.0, 0.0, 12.0, 1.0, 0.0, 0.0)
    said = Notes(*of_replica([first, other]))
    assert said[:3] == first[:3]
    assert (said.check, said.change, said.not_saved, said.saved) == (7.0, 1.0, 3.0, 5.0)
    assert (said.stop, said.save) == (1.0, 1.0), "whoever asks is heard"
    assert said.checksum not in (0.0, 11.0, 12.0)
    swapped = Notes(*of_replica([first._replace(checksum=12.0), other._replace(checksum=11.0)]))
    assert swapped.checksum != said.checksum
    assert Notes(*of_replica([first._replace(checksum=0.0), other._replace(checksum=0.0)])).checksum == 0.0


@pytest.mark.parametrize(("fsdp", "chunks"), [(1, 4), (2, 2)])
def test_chunks_are_cut_of_what_one_fsdp_rank_has_of_a_microbatch(fsdp: int, chunks: int) -> None:
    model, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Mesh(fsdp=fsdp, pp=2)
    stages = decide(model, mesh, Parallel(), 4, None).stages
    assert stages is not None
    assert stages.plan.chunks == chunks
    if fsdp > 1:
        with pytest.raises(SetupError, match="2 samples cannot be cut into 4") as caught:
            decide(model, mesh, Parallel(chunks=4), 4, None)
        assert caught.value.cause == "fsdp=2 ranks share a microbatch of 4 samples, 2 for each pipeline"


def test_pipelines_that_gather_parameters_together_must_have_equally_many_samples() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(SetupError, match="fsdp=2 ranks cannot share a microbatch of 5 samples evenly"):
        decide(model, Mesh(fsdp=2, pp=2), Parallel(), 5, None)
    assert decide(model, Mesh(pp=2), Parallel(schedule="gpipe"), 5, None).stages is not None
