# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that does not fit says which tensors do not, and what they may have been called."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.checkpoint.manifest import Manifest, StoredTensor
from unisono.checkpoint.matching import compare, require_match
from unisono.checkpoint.specs import TensorSpec
from unisono.core.errors import CheckpointMismatch

Specs = dict[str, TensorSpec]


def specs(**shapes: tuple[int, ...]) -> Specs:
    return {name.replace("__", "."): TensorSpec("F32", shape) for name, shape in shapes.items()}


def checkpoint(contents: Specs) -> Manifest:
    return Manifest(7, 0.0, {name: StoredTensor(spec, ()) for name, spec in contents.items()}, {})


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        (specs(model__w=(2, 3)), specs(model__w=(2, 3)), []),
        (
            specs(model__w=(2, 3)),
            specs(model__w=(3, 2)),
            [("reshaped", "model.w has the shape [2, 3] here and [3, 2]")],
        ),
        (
            {"model.w": TensorSpec("F32", (2,))},
            {"model.w": TensorSpec("BF16", (2,))},
            [("retyped", "model.w is F32 here and BF16 in the checkpoint")],
        ),
        (specs(model__w=(2,)), specs(), [("missing", "model.w (F32 [2]) is not in the checkpoint")]),
        (specs(), specs(model__w=(2,)), [("unknown", "model.w (F32 [2]) is in the checkpoint and not here")]),
        (
            specs(model__fc__weight=(2,), model__fc__bias=(1,)),
            specs(model__module__fc__weight=(2,), model__module__fc__bias=(1,)),
            [
                ("renamed", "model.fc.bias is not in the checkpoint, which has model.module.fc.bias"),
                ("renamed", "model.fc.weight is not in the checkpoint, which has model.module.fc.weight"),
            ],
        ),
        (
            specs(model__head__weight=(2,)),
            specs(model__heads__weight=(2,)),
            [("renamed", "which has model.heads.weight of the same shape: was it renamed?")],
        ),
        (
            specs(model__head__weight=(2,)),
            specs(model__heads__weight=(3,)),
            [("missing", "model.head.weight"), ("unknown", "model.heads.weight")],
        ),
    ],
    ids=["fits", "reshaped", "retyped", "missing", "unknown", "wrapped", "renamed", "renamed and reshaped"],
)
def test_what_differs_is_said_in_words(here: Specs, there: Specs, expected: list[tuple[str, str]]) -> None:
    found = compare(here, checkpoint(there))
    assert [difference.kind for difference in found] == [kind for kind, _ in expected]
    assert all(words in str(difference) for difference, (_, words) in zip(found, expected, strict=True))


some = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([TensorSpec("F32", (n,)) for n in (1, 2)]))


@given(some, some)
def test_a_checkpoint_fits_exactly_if_nothing_differs(here: Specs, there: Specs) -> None:
    found = compare(here, checkpoint(there))
    assert (found == []) == (here == there)
    assert {d.name for d in found if d.kind in ("missing", "renamed")} == set(here) - set(there)


def test_the_error_names_the_first_tensors_and_counts_the_rest() -> None:
    with pytest.raises(CheckpointMismatch, match="step 7 does not fit") as raised:
        require_match({f"model.{n:02d}": TensorSpec("F32", (1,)) for n in range(30)}, checkpoint({}))
    assert "model.00 (F32 [1]) is not in the checkpoint" in raised.value.cause
    assert "and 22 more" in raised.value.cause
    require_match({}, checkpoint({}))


def test_thousands_of_renamed_tensors_do_not_take_long() -> None:
    here = {f"model.block.{n}.attention.weight": TensorSpec("F32", (1,)) for n in range(5_000)}
    there = {name.replace("block", "layer"): spec for name, spec in here.items()}
    begin = time.process_time()
    assert len(compare(here, checkpoint(there))) >= 5_000
    assert time.process_time() - begin < 3
