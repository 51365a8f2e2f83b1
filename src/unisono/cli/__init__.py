# SPDX-License-Identifier: Apache-2.0
"""The command line: parse, call, print. No logic lives here, and nothing here imports torch."""

from __future__ import annotations


def main() -> None:
    try:
        from unisono.cli.app import start

        start()
    except KeyboardInterrupt:  # so early or so late that there was nothing to stop
        raise SystemExit(130) from None
