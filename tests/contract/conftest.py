# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread_each() -> Iterator[None]:
    """Ranks are threads here: with more of torch's own each, they would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
