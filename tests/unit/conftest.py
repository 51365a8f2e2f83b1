# SPDX-License-Identifier: Apache-2.0
"""Settings of the unit tests: examples without a time limit of their own, for the machines that run them are shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")
