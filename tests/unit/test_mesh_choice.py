# SPDX-License-Identifier: Apache-2.0
"""What --mesh auto picks, as a table: what is needed, what there is, what must come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.comm.tree import landings
from unisono.core.errors import SetupError
from unisono.core.membership import even
from unisono.core.mesh import Mesh
from unisono.core.mesh_choice import Devices, Needs, bytes_of, candidates, choose, devices_of, gradient_copies, held
from unisono.core.spec import Workers, build_run_spec

GB = 10**9
# 16 GB with gradients and two moments; 40 blocks of 0.1 GB, and none outside of them
BILLION = Needs(
    10**9, 4 * GB, 4 * GB, 8 * GB, GB // 10, 0, "AdamW", dtypes={"float32": 4 * GB}, batch_size=64, microbatches=1
)
LAYERLESS = replace(BILLION, unit=0, rest=4 * GB)
FOUR_BLOCKS = replace(BILLION, unit=GB)


@pytest.mark.parametrize(
    ("needs", "devices", "mesh"),
    [
        (BILLION, Devices(8, 24 * GB), "dp=8"),
        (BILLION, Devices(8, 22 * GB), "dp=8"),  # 16 of 16.5
        (BILLION, Devices(8, 21 * GB), "dp=4,fsdp=2"),  # 16 of 15.75; 16 / 2 + 4 x 0.1
        (BILLION, Devices(8, 12 * GB), "dp=4,fsdp=2"),
        (BILLION, Devices(6, 12 * GB), "dp=3,fsdp=2"),
        (BILLION, Devices(3, 12 * GB), "dp=1,fsdp=3"),  # 2 does not divide 3
        (BILLION, Devices(8, 4 * GB), "dp=1,fsdp=8"),
        (BILLION, Devices(1, 24 * GB), "dp=1"),
        (LAYERLESS, Devices(8, 24 * GB), "dp=8"),
        (LAYERLESS, Devices(8, 20 * GB), "dp=4,tp=2"),  # with fsdp alone 16 GB are together at once
        (LAYERLESS, Devices(8, 5 * GB), "dp=1,tp=8"),
        (FOUR_BLOCKS, Devices(8, 9 * GB), "dp=1,fsdp=8"),  # 16 / 8 + 4 of 6.75
        (FOUR_BLOCKS, Devices(8, 6 * GB), "dp=1,fsdp=4,tp=2"),  # 16 / 8 + 4 / 2 of 4.5
        (replace(BILLION, zero=2), Devices(8, 12 * GB), "dp=2,fsdp=4"),  # 16 / 4 + 4 + 0.3
        (replace(BILLION, state=0), Devices(8, 12 * GB), "dp=8"),  # 8 GB of SGD
        (replace(BILLION, microbatches=32), Devices(8, 24 * GB), "dp=4,fsdp=2"),  # 4 a replica: 2 partial sums, 20 GB
        (replace(BILLION, microbatches=None), Devices(1, 24 * GB), None),  # as many by default
        (replace(BILLION, batch_size=8, microbatches=8), Devices(8, 21 * GB), "dp=4,tp=2"),  # 1 sample for fsdp=2
    ],
)
def test_the_first_that_fits_is_chosen(needs: Needs, devices: Devices, mesh: str | None) -> None:
    if mesh is None:
        with pytest.raises(SetupError):
            choose(needs, devices)
    else:
        assert choose(needs, devices).mesh == mesh


def test_the_words_say_what_is_needed_and_what_there_is() -> None:
    choice = choose(replace(BILLION, parameters=1_210_000_000), Devices(4, 12 * GB))
    assert choice.text == (
        "dp=2,fsdp=2: 1.2 B parameters need 16.0 GB with gradients and AdamW's state, a device has 12.0 GB"
    )
    shared = choose(BILLION, Devices(2, 30 * GB, shared=True))
    assert "each of 2 processes has 30.0 GB" in shared.text
    assert "keeps no state" in choose(replace(BILLION, state=0, optimizer="SGD"), Devices(1, 80 * GB)).text
    assert "assumed to be two float32" in choose(replace(BILLION, assumed=True), Devices(1, 80 * GB)).text


def test_where_nothing_fits_the_arithmetic_is_shown() -> None:
    with pytest.raises(SetupError) as caught:
        choose(BILLION, Devices(2, 8 * GB))
    said = str(caught.value)
    for words in (
        "1.0 B parameters need 16.0 GB",
        "no mesh of 2 fits",
        "a device has 8.0 GB",
        "of which 6.0 GB may be used: 25% is left for activations",
        "dp only: 16.0 GB a device",
        "fsdp=2: 8.4 GB a device",
        "a block of 100.0 MB",
    ):
        assert words in said


def test_ranks_that_would_have_no_sample_are_named() -> None:
    with pytest.raises(SetupError, match="a microbatch has 1 samples"):
        choose(replace(BILLION, batch_size=8, microbatches=8), Devices(2, 8 * GB))


def test_offloading_is_not_counted_with() -> None:
    with pytest.raises(SetupError, match="does not count with offloading"):
        choose(replace(BILLION, offload=True), Devices(2, 80 * GB))


@pytest.mark.parametrize(
    ("asked", "mesh"),
    [(Workers(min=4, max=8), "dp=2:4,fsdp=2"), (Workers(min=3, max=8), "dp=2:4,fsdp=2"), (None, "dp=4,fsdp=2")],
)
def test_workers_are_processes_altogether(asked: Workers | None, mesh: str) -> None:
    assert choose(BILLION, Devices(8, 21 * GB), asked).mesh == mesh


def test_gpus_are_taken_all_or_as_many_as_asked_and_memory_of_a_machine_is_shared() -> None:
    eight = replace(BILLION, gpus=(24 * GB,) * 7 + (20 * GB,))
    assert devices_of(eight, 64 * GB, None) == Devices(8, 20 * GB)
    assert devices_of(eight, 64 * GB, Workers(min=2, max=4)) == Devices(4, 20 * GB)
    assert devices_of(BILLION, 64 * GB, Workers(min=4, max=4)) == Devices(4, 16 * GB, shared=True)
    assert devices_of(BILLION, 64 * GB, None) == Devices(1, 64 * GB, shared=True)
    with pytest.raises(SetupError, match="9 processes need 9 GPUs, and there are 8 here"):
        devices_of(eight, 64 * GB, Workers(min=9, max=9))


@pytest.mark.parametrize("count", [1, 2, 6, 8, 16])
def test_every_candidate_multiplies_and_none_is_tried_twice(count: int) -> None:
    found = list(candidates(count))
    assert len(set(found)) == len(found)
    assert found[0] == Mesh()
    assert all(count % mesh.ranks == 0 for mesh in found)
    assert [mesh.tp for mesh in found] == sorted(mesh.tp for mesh in found)


def test_more_ranks_never_need_more_each() -> None:
    for tp in (1, 2):
        needed = [bytes_of(LAYERLESS, Mesh(fsdp=fsdp, tp=tp), 1) for fsdp in (2, 4, 8, 16)]
        assert needed == sorted(needed, reverse=True)


@pytest.mark.parametrize(
    ("mesh", "zero", "gigabytes"),
    [
        (Mesh(), 3, (16, 0)),
        (Mesh(fsdp=2), 3, (8, 0.4)),  # four times a block
        (Mesh(fsdp=2), 2, (8, 4.3)),
        (Mesh(fsdp=2, tp=2), 2, (4, 2.15)),
        (Mesh(fsdp=2, pp=2), 2, (4, 2.3)),  # a stage's weights, and its blocks as large as ever
        (Mesh(pp=4), 3, (4, 0)),
    ],
)
def test_a_rank_holds_its_part_and_what_is_whole_for_a_moment(
    mesh: Mesh, zero: int, gigabytes: tuple[float, float]
) -> None:
    assert held(replace(BILLION, zero=zero), mesh, 1) == pytest.approx([GB * size for size in gigabytes])


@pytest.mark.parametrize("microbatches", range(1, 17))
def test_partial_sums_are_counted_as_the_tree_makes_them(microbatches: int) -> None:
    alone = max(one.level for one in landings(range(microbatches), microbatches)) + 1
    assert gradient_copies(microbatches) == alone
    for members in range(1, microbatches + 1):
        ranges = even(1, tuple(range(members)), microbatches).ranges
        most = max(one.level for mine in ranges for one in landings(mine, microbatches)) + 1
        assert gradient_copies(-(-microbatches // members)) + 1 >= most


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"listen": "auto"}, "--listen do not go together"),
        ({"offload": True}, "--offload do not go together"),
        ({"schedule": "gpipe"}, "it never chooses pp"),
        ({"chunks": 2}, "it never chooses pp"),
        ({"strategy": "ps"}, "--strategy ps do not go together"),
    ],
)
def test_what_auto_cannot_take_into_account_is_refused(asked: dict[str, object], word: str) -> None:
    with pytest.raises(Exception, match=word):
        build_run_spec({"mesh": "auto", **asked}, "test")
    assert build_run_spec({"mesh": "auto", "workers": "4", "zero": 2}, "test").mesh == "auto"
