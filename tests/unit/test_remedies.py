# SPDX-License-Identifier: Apache-2.0
"""What is said when a device's memory is not enough: by what holds it, which remedies, in which order, saving how much;
with made-up numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unisono.core.mesh import Mesh
from unisono.core.mesh_choice import Needs
from unisono.core.spec import Workers
from unisono.train.memory import Activations, Setting, Usage
from unisono.train.remedies import INSIDE, STATE, explain, remedies

GB = 10**9
ESTIMATED = Activations(none=60 * GB, selective=30 * GB, full=5 * GB, scores=2 * GB)
# 64 GB with gradients and two moments; blocks of 1 GB, and none outside of them
NEEDS = Needs(4 * 10**9, 16 * GB, 16 * GB, 32 * GB, GB, 0, "AdamW", batch_size=64, microbatches=1)
SMALL = replace(NEEDS, weights=5 * GB, gradients=5 * GB, state=10 * GB, unit=0)
BUSY = Usage(5 * GB, 5 * GB, 10 * GB, 60 * GB, 1 * GB, 80 * GB)  # activations
FULL = Usage(16 * GB, 16 * GB, 32 * GB, 10 * GB, 1 * GB, 80 * GB)  # the optimizer's state
LARGER = (Mesh(fsdp=2), Mesh(fsdp=4), Mesh(fsdp=8), Mesh(tp=2), Mesh(pp=2))


def setting(needs: Needs = NEEDS, recompute: str = "none", precision: str = "bf16", **more: Any) -> Setting:
    return Setting(needs, recompute, precision, more.pop("estimated", ESTIMATED), **more)


def words(usage: Usage, of: Setting) -> list[str]:
    return [f"{remedy.text}: {remedy.saves / GB:.1f}" for remedy in remedies(usage, of)]


@pytest.mark.parametrize(
    ("usage", "of", "expected"),
    [
        (  # activations, on one rank
            BUSY,
            setting(SMALL, precision="fp32"),
            [
                '--precision bf16 (or Trainer(precision="bf16")): 30.0',
                "--microbatches 2 (this changes the bits): 30.0",
                "--recompute selective: 29.0",
                "--recompute full: 53.2",
            ],
        ),
        (  # the scores of a large vocabulary
            BUSY,
            setting(SMALL, estimated=Activations(10 * GB, 5 * GB, 1 * GB, 30 * GB)),
            [
                "unisono.nn.LinearCrossEntropy for the output layer: 40.5",
                "--microbatches 2 (this changes the bits): 30.0",
                "--recompute selective: 7.5",
                "--recompute full: 13.5",
            ],
        ),
        (  # a fourth partial sum would take most of what a smaller microbatch gives
            replace(BUSY, activations=30 * GB),
            setting(replace(SMALL, microbatches=8), estimated=None),
            ["--microbatches 16 (this changes the bits): 5.0"],
        ),
        (  # the optimizer's state, and devices for it: a half is enough
            FULL,
            setting(larger=LARGER, devices=8, workers=Workers(min=4, max=4), recompute="full"),
            [
                "--mesh dp=4,fsdp=2: 33.0",  # 32 less of the state, 4 more while a block is whole, 5 of the samples
                "--mesh dp=4,pp=2: 32.0",
                "--mesh dp=4,tp=2: 32.0",
                "--mesh dp=4,fsdp=2 --offload: 60.0",
                "unisono.nn.LinearCrossEntropy for the output layer: 2.6",  # blocks that are recomputed leave it most
                "--microbatches 2 (this changes the bits): 5.0",
            ],
        ),
        (  # on devices half as large, an eighth
            replace(FULL, capacity=20 * GB),
            setting(larger=LARGER, devices=8, workers=Workers(min=4, max=4), recompute="full"),
            [
                "--mesh dp=1,fsdp=8: 60.8",
                "--mesh dp=4,pp=2: 32.0",
                "--mesh dp=4,tp=2: 32.0",
                "--mesh dp=1,fsdp=8 --offload: 60.0",
                "unisono.nn.LinearCrossEntropy for the output layer: 2.6",  # blocks that are recomputed leave it most
                "--microbatches 2 (this changes the bits): 5.0",
            ],
        ),
        (  # one device: what it would take
            FULL,
            setting(larger=LARGER[:1], recompute="full"),
            [
                "--mesh dp=1,fsdp=2 (on 2 GPUs; there is 1 here): 33.0",
                "--mesh dp=1,fsdp=2 --offload (on 2 GPUs; there is 1 here): 60.0",
                "unisono.nn.LinearCrossEntropy for the output layer: 2.6",  # blocks that are recomputed leave it most
                "--microbatches 2 (this changes the bits): 5.0",
            ],
        ),
        (  # a mesh already: whole weights come first, for they are paid for with the least
            replace(FULL, activations=28 * GB),
            setting(
                replace(NEEDS, zero=2),
                mesh=Mesh(fsdp=2),
                larger=(Mesh(fsdp=4),),
                devices=4,
                workers=Workers(min=2, max=2),
            ),
            [
                "--zero 3: 15.0",  # 16 + 3 blocks become 4 blocks
                "--mesh dp=1,fsdp=4: 20.5",  # 32 become 16, and 9 of activations 4.5
                "--offload: 32.0",
                "--microbatches 2 (this changes the bits): 4.5",
                "--recompute selective: 4.4",
                "--recompute full: 8.0",
            ],
        ),
        (  # nothing left to share
            FULL,
            setting(replace(NEEDS, batch_size=2, offload=True), mesh=Mesh(fsdp=2), estimated=None),
            [],
        ),
        (FULL, setting(replace(NEEDS, batch_size=2), mesh=Mesh(fsdp=2), estimated=None), ["--offload: 32.0"]),
    ],
)
def test_what_holds_most_decides_the_remedies_and_their_price_the_order(
    usage: Usage, of: Setting, expected: list[str]
) -> None:
    assert words(usage, of) == expected


def test_every_remedy_says_what_it_takes_away_of() -> None:
    found = remedies(FULL, setting(precision="fp32", larger=LARGER, devices=8))
    inside = [remedy.text.split()[0] for remedy in found if remedy.of == INSIDE]
    assert inside == ["--precision", "--microbatches", "--recompute", "--recompute"]
    assert [remedy.text for remedy in found if remedy.of == (*STATE, *INSIDE)] == ["--mesh dp=1,fsdp=2"]
    assert {remedy.of for remedy in found} == {INSIDE, (*STATE, *INSIDE), STATE}


def test_the_three_cheapest_remedies_are_named_with_what_they_save() -> None:
    error = explain(BUSY, setting(SMALL, precision="fp32"), "Tried to allocate 3.07 GiB")
    assert error.what == "the device is out of memory, most of which holds activations (60.0 GB of 80.0 GB)"
    assert "parameters 5.0 GB, gradients 5.0 GB, optimizer 10.0 GB, activations 60.0 GB" in error.cause
    lines = error.do.splitlines()
    assert len(lines) == 3
    assert lines[0] == '--precision bf16 (or Trainer(precision="bf16")): saves about 30.0 GB, and is faster'
    assert lines[1].startswith("--microbatches 2 (this changes the bits): saves about 30.0 GB, and costs about 2% of")
    assert lines[2].startswith("--recompute selective: saves about 29.0 GB, and costs about 5% of the time")
    assert error.where == "Tried to allocate 3.07 GiB"


def test_where_the_state_holds_most_three_ways_to_share_it_are_named_with_what_they_save() -> None:
    error = explain(FULL, setting(larger=LARGER, devices=8, precision="fp32"), "")
    assert "most of which holds optimizer (32.0 GB of 80.0 GB)" in error.what
    lines = error.do.splitlines()
    named = [line.split(": saves about ")[0] for line in lines]
    assert named == ["--mesh dp=1,fsdp=2", "--mesh dp=1,pp=2", "--mesh dp=1,tp=2"]
    assert lines[0].endswith("saves about 33.0 GB, for weights and gradients that are exchanged in every microbatch")
    assert lines[1].endswith("for a bubble of about 20% of the time")


def test_without_any_remedy_left_the_model_or_the_device_is_the_wrong_size() -> None:
    found = setting(replace(SMALL, microbatches=64), estimated=None)
    assert remedies(BUSY, found) == []
    assert "a device with more memory" in explain(BUSY, found, "").do
