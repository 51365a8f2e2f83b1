# SPDX-License-Identifier: Apache-2.0
"""The mesh of a run: its arithmetic, what it refuses and how, and how it meets --workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.errors import UsageError
from unisono.core.mesh import INNER, Mesh, parse_mesh
from unisono.core.spec import Workers, build_run_spec

sizes = st.integers(1, 5)


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=4", Mesh(dp="4")),
        ("fsdp=2", Mesh(fsdp=2)),
        (" tp = 2 , dp = 2:8 ", Mesh(dp="2:8", tp=2)),
        ("dp=4,fsdp=2,tp=2,pp=3", Mesh(dp="4", fsdp=2, tp=2, pp=3)),
        ("fsdp=1", Mesh()),
    ],
)
def test_a_mesh_is_a_list_of_dimensions_in_any_order(text: str, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh


def test_what_a_rank_alone_has_is_named_by_its_place() -> None:
    assert Mesh().named(0) == ""
    assert [Mesh(tp=2).named(rank) for rank in range(2)] == ["tp-0", "tp-1"]
    mesh = Mesh(pp=2, fsdp=3)
    assert mesh.named(4) == "pp-1,fsdp-1"
    assert len({mesh.named(rank) for rank in range(mesh.ranks)}) == mesh.ranks


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "empty"),
        (",", "empty"),
        ("4", "'4' is no dimension"),
        ("fspd=2", "did you mean 'fsdp'"),
        ("fsdp", "fsdp wants a number"),
        ("fsdp=", "fsdp wants a number"),
        ("fsdp=0", "fsdp wants a number"),
        ("fsdp=-1", "fsdp wants a number"),
        ("fsdp=2.5", "fsdp wants a number"),
        ("fsdp=2:4", "fsdp wants a number"),
        ("dp=0", "dp wants a number of replicas"),
        ("dp=2,dp=2", "dp is given twice"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        parse_mesh(text)
    assert caught.value.do


@given(sizes, sizes, sizes)
def test_ranks_and_places_are_one_to_one(pp: int, fsdp: int, tp: int) -> None:
    mesh = Mesh(pp=pp, fsdp=fsdp, tp=tp)
    places = [mesh.place(rank) for rank in range(mesh.ranks)]
    assert [mesh.rank(place) for place in places] == list(range(pp * fsdp * tp))
    assert len({tuple(place.values()) for place in places}) == mesh.ranks
    for rank in range(mesh.ranks):
        for name in INNER:
            beside = mesh.beside(rank, name)
            assert rank in beside
            assert [mesh.place(other)[name] for other in beside] == list(range(getattr(mesh, name)))
            others = [{k: v for k, v in mesh.place(other).items() if k != name} for other in beside]
            assert all(place == others[0] for place in others)


def test_neighbours_in_rank_share_tensors_first_and_stages_last() -> None:
    mesh = Mesh(pp=2, fsdp=2, tp=2)
    assert mesh.beside(0, "tp") == [0, 1]
    assert mesh.beside(0, "fsdp") == [0, 2]
    assert mesh.beside(0, "pp") == [0, 4]
    with pytest.raises(ValueError, match="not in"):
        mesh.place(8)


def test_the_arithmetic_is_shown() -> None:
    assert Mesh(pp=2, tp=3).arithmetic == "2 (pp) x 3 (tp) = 6"
    assert Mesh().arithmetic == "1"


def test_replicas_are_workers() -> None:
    spec = build_run_spec({"mesh": "dp=2:4,tp=2"}, "test")
    assert (spec.workers, spec.mesh, spec.replica) == (Workers(min=2, max=4), "tp=2", Mesh(tp=2))
    assert build_run_spec({"mesh": "dp=3", "workers": "3"}, "test").workers.max == 3
    assert build_run_spec({"mesh": "fsdp=2", "workers": "3"}, "test").workers.max == 3
    with pytest.raises(UsageError, match="dp=2 replicas and --workers for 3"):
        build_run_spec({"mesh": "dp=2,fsdp=2", "workers": "3"}, "test")


def test_a_spec_with_a_mesh_survives_being_written_down() -> None:
    spec = build_run_spec({"mesh": "dp=2,fsdp=2,pp=2", "zero": 2, "schedule": "gpipe"}, "test")
    assert build_run_spec(spec.model_dump(mode="json"), "again") == spec


@pytest.mark.parametrize(
    ("asked", "word"),
    [({"zero": 2}, "fsdp"), ({"offload": True}, "fsdp"), ({"schedule": "gpipe"}, "pp"), ({"chunks": 4}, "pp")],
)
def test_an_option_for_ranks_that_nobody_has_is_refused(asked: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=f"belongs to {word}"):
        build_run_spec({"mesh": "tp=2", **asked}, "test")
