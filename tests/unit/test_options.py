# SPDX-License-Identifier: Apache-2.0
"""What a user can ask of a training: clipping and early stopping, as tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unisono.core.errors import SetupError, UnisonoError
from unisono.train.options import Clip, EarlyStop, Parallel

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("options", "history", "stops"),
    [
        pytest.param({"patience": 2}, [], False, id="nothing yet"),
        pytest.param({"patience": 1}, [1.0], False, id="the first value is the best so far"),
        pytest.param({"patience": 2}, [3, 2, 1], False, id="always better"),
        pytest.param({"patience": 2}, [1, 2], False, id="worse once"),
        pytest.param({"patience": 2}, [1, 2, 3], True, id="worse twice"),
        pytest.param({"patience": 2}, [1, 1, 1], True, id="equal is not better"),
        pytest.param({"patience": 2}, [3, 4, 2, 4], False, id="an improvement starts the count again"),
        pytest.param({"patience": 2}, [3, 4, 2, 4, 3], True, id="better than before but not than the best"),
        pytest.param({"patience": 2, "min_delta": 0.5}, [3, 2.9, 2.8], True, id="too little at a time"),
        pytest.param({"patience": 2, "min_delta": 0.5}, [3, 2.75, 2.4], False, id="enough against the best"),
        pytest.param({"patience": 2, "mode": "max"}, [1, 2, 3], False, id="max: always better"),
        pytest.param({"patience": 2, "mode": "max"}, [3, 2, 1], True, id="max: worse twice"),
        pytest.param({"patience": 2, "mode": "max", "min_delta": 0.1}, [0.5, 0.55, 0.59], True, id="max: too little"),
        pytest.param({"patience": 2, "mode": "max"}, [-3, -2, -1], False, id="max: below zero"),
        pytest.param({"patience": 3}, [NAN, NAN, NAN], True, id="nothing but NaN"),
        pytest.param({"patience": 3}, [NAN, NAN, 5.0], False, id="a first number after NaN is an improvement"),
        pytest.param({"patience": 2}, [1, NAN, NAN], True, id="NaN is never better"),
        pytest.param({"patience": 2}, [2, NAN, 1], False, id="NaN in between"),
        pytest.param({"patience": 2, "mode": "max"}, [1, NAN, NAN], True, id="max: NaN is never better"),
        pytest.param({"patience": 2}, [INF, 3], False, id="finite is better than infinite"),
        pytest.param({"patience": 2}, [INF, INF, INF], True, id="infinite again is not better"),
        pytest.param({"patience": 2, "mode": "max"}, [INF, 1, 2], True, id="max: nothing is better than infinite"),
        pytest.param({"patience": 2}, [-INF, 1, 2], True, id="nothing is better than minus infinite"),
    ],
)
def test_training_stops_after_so_many_evaluations_without_improvement(
    options: dict[str, Any], history: list[float], stops: bool
) -> None:
    assert EarlyStop(**options).should_stop(history) is stops


@pytest.mark.parametrize(
    "options",
    [{"mode": "lowest"}, {"mode": "MAX"}, {"patience": 0}, {"patience": -1}, {"min_delta": -0.1}, {"min_delta": NAN}],
    ids=str,
)
def test_early_stopping_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SetupError):
        EarlyStop(**options)


@pytest.mark.parametrize("limit", [0, 0.0, -1, -INF, NAN])
@pytest.mark.parametrize("kind", ["norm", "value"])
def test_a_clip_that_leaves_nothing_is_refused(kind: str, limit: float) -> None:
    with pytest.raises(SetupError, match=rf"Clip\({kind}=") as caught:
        Clip(**{kind: limit})
    assert (caught.value.code, caught.value.exit_code) == ("UNI-1201", 11)


@pytest.mark.parametrize(
    ("clip", "text"),
    [
        (Clip(norm=1.0), "norm=1"),
        (Clip(value=0.5), "value=0.5"),
        (Clip(norm=2.5, value=1e-3), "norm=2.5, value=0.001"),
    ],
)
def test_a_clip_is_written_into_the_spec_like_this(clip: Clip, text: str) -> None:
    assert str(clip) == text


def test_a_clip_without_a_limit_is_refused() -> None:
    with pytest.raises(SetupError, match="clips nothing"):
        Clip()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "dp=4"}, "each replica is one rank"),
        ({"mesh": "fsdp"}, "fsdp wants a number"),
        ({"cost": "time", "boundaries": ("blocks.1",)}, "boundaries are given"),
    ],
)
def test_ways_to_share_a_model_that_cannot_take_effect_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnisonoError, match=words):
        Parallel(**options)
