# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, call, print. No logic lives here, and nothing here imports torch."""

from __future__ import annotations


def main() -> None:
    from unisono.cli.app import start

    start()
