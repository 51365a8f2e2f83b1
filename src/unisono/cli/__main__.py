# SPDX-License-Identifier: Apache-2.0
"""``python -m unisono.cli``: the same as ``unisono``."""

from unisono.cli import main

main()
