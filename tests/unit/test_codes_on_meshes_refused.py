# SPDX-License-Identifier: Apache-2.0
"""What codes cannot do between replicas of several ranks, refused with a reason and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.core.errors import SetupError
from unisono.core.spec import build_run_spec
from unisono.train.replica import refuse_codes


@pytest.mark.parametrize(
    ("asked", "shared", "what", "cause", "do"),
    [
        ({"mesh": "fsdp=2"}, [], "--mesh fsdp=2 and one replica", "between replicas", "--mesh dp=2,fsdp=2"),
        ({"mesh": "dp=1,tp=2"}, [], "--mesh tp=2 and one replica", "as they are", "dp=1:2"),
        ({"mesh": "dp=2,pp=2"}, ["head.weight"], "several stages share", "head.weight", "do not tie"),
    ],
)
def test_it_is_refused_with_cause_and_cure(
    asked: dict[str, Any], shared: list[str], what: str, cause: str, do: str
) -> None:
    with pytest.raises(SetupError) as refused:
        refuse_codes(build_run_spec({**asked, "compress": "int8"}, "test"), shared)
    error = refused.value
    assert what in error.what
    assert cause in error.cause
    assert do in error.do
    refuse_codes(build_run_spec(asked, "test"), shared)
    refuse_codes(build_run_spec({**asked, "compress": "none"}, "test"), shared)


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2", "dp=1:2,tp=2"])
def test_codes_are_taken_where_there_may_be_several_replicas(mesh: str) -> None:
    refuse_codes(build_run_spec({"mesh": mesh, "compress": "int8"}, "test"))
