# SPDX-License-Identifier: Apache-2.0
"""Random state: a pure function of its place, and the same initial weights whatever a script imports first."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.core import seeds
from unisono.core.seeds import apply, derive, seed_now_and_on_import


@pytest.fixture(autouse=True)
def _give_the_generators_back() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


places = st.tuples(
    st.integers(0, 10**6), st.sampled_from(["epoch", "forward", "fetch"]), st.lists(st.integers(0, 99), max_size=3)
)


@given(st.lists(places, min_size=2, max_size=20, unique_by=str))
def test_every_place_has_a_seed_of_its_own(some: list[tuple[int, str, list[int]]]) -> None:
    values = [derive(seed, purpose, *place) for seed, purpose, place in some]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)
    assert values == [derive(seed, purpose, *place) for seed, purpose, place in some]


def test_every_argument_of_a_seed_counts() -> None:
    around = [
        derive(0, "forward", 1, 2),
        derive(1, "forward", 1, 2),
        derive(0, "fetch", 1, 2),
        derive(0, "forward", 2, 1),
        derive(0, "forward", 12),
        derive(0, "forward", 1),
        derive(0, "forward"),
    ]
    assert len(set(around)) == len(around)


def test_seeds_are_the_same_in_every_version() -> None:
    assert derive(0, "forward", 1, 2) == 3777932557494964758
    assert derive(7, "epoch", 0) == 8869322496163259494


@pytest.mark.parametrize("value", [0, 1, -1, 2**32, 2**63 - 1, 2**64, 10**30])
def test_applying_a_seed_puts_every_generator_into_its_state(value: int) -> None:
    apply(value)
    first = draw()
    assert draw() != first
    apply(value)
    assert draw() == first
    apply(value + 1)
    assert draw() != first


@pytest.mark.parametrize(("text", "value"), [(None, 0), ("0", 0), ("41", 41)])
def test_the_seed_of_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, text: str | None, value: int) -> None:
    monkeypatch.delenv(seeds.ENVIRONMENT, raising=False)
    if text is not None:
        monkeypatch.setenv(seeds.ENVIRONMENT, text)
    assert seeds.from_environment() == value


def test_when_everything_is_loaded_nothing_stands_in_the_way_of_imports() -> None:
    seed_now_and_on_import(5)
    seed_now_and_on_import(6)
    assert [finder for finder in sys.meta_path if type(finder).__module__ == seeds.__name__] == []
    first = draw()
    apply(6)
    assert draw() == first


def started(program: str, **environment: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if key != seeds.ENVIRONMENT}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_a_library_that_is_loaded_late_is_seeded_all_the_same() -> None:
    show = "; print(numpy.random.random(3), random.random())"
    processes = [
        started("import random, numpy, unisono" + show),
        started("import random, unisono, numpy" + show),
        started("import random, unisono, numpy" + show, UNISONO_SEED="1"),
        started("import random, unisono; unisono.seed(1); import numpy" + show),
    ]
    early, late, other, asked_for = map(printed, processes)
    assert early == late != other
    assert other == asked_for


def test_asking_whether_a_library_is_installed_does_not_cost_its_seed() -> None:
    """`importlib.util.find_spec("torch")` is how many packages ask."""
    show = "; import numpy; print(numpy.random.random(3))"
    asked = "import unisono, importlib.util as u; assert u.find_spec('numpy') and u.find_spec('numpy')"
    assert printed(started(asked + show)) == printed(started("import unisono" + show))


def test_a_library_that_is_not_installed_is_still_not_there() -> None:
    program = "import sys, unisono\nsys.path[:] = []\ntry:\n    import torch\nexcept ImportError:\n    print('none')"
    assert printed(started(program)) == "none\n"


def test_initial_weights_are_the_same_whichever_is_imported_first() -> None:
    show = "; print(torch.nn.Linear(3, 2).weight.tolist(), torch.initial_seed())"
    processes = [started("import unisono, torch" + show), started("import torch, unisono" + show)]
    ours, theirs = map(printed, processes)
    assert ours == theirs
    assert ours.endswith(" 0\n")
    apply(0)
    assert ours.startswith(str(torch.nn.Linear(3, 2).weight.tolist()))
