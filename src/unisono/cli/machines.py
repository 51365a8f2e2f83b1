# SPDX-License-Identifier: Apache-2.0
"""Commands about machines: `unisono join` and `unisono doctor`. Parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT that unisono run --listen printed.")],
    secret: Annotated[str, typer.Option(help="The join secret that it printed.", envvar="UNISONO_JOIN_SECRET")] = "",
    workers: Annotated[
        int | None, typer.Option(help="How many (default: what fits here and the run wants).", metavar="N")
    ] = None,
    own_address: Annotated[
        str | None, typer.Option("--address", help="The IP at which the others reach this machine.", metavar="IP")
    ] = None,
    script: Annotated[str | None, typer.Option(help="Where the run's script is on this machine.")] = None,
    servers: Annotated[
        int,
        typer.Option(help="How many parameter servers, of the run's or more, besides the workers.", metavar="N", min=0),
    ] = 0,
) -> None:
    """Add this machine's workers, and servers, to a run that listens on another one."""
    from unisono.control.agent import join_run
    from unisono.core.errors import UsageError

    if workers is not None and workers < (0 if servers else 1):
        raise UsageError(
            f"--workers {workers}: a machine that joins brings something",
            do="write --workers 1 or more; or --workers 0 --servers 1 for a parameter server alone",
        )
    raise SystemExit(join_run(address, secret, workers, own_address or "", script or "", servers))


def doctor(
    address: Annotated[
        str | None, typer.Argument(help="HOST:PORT of a run on another host, to try the way to it.", show_default=False)
    ] = None,
    secret: Annotated[str, typer.Option(help="Its join secret, to compare both sides.")] = "",
    workers: Annotated[int | None, typer.Option(help="How many you mean to start here.", metavar="N")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads per worker.")] = 1,
) -> None:
    """Check this machine, and with ADDRESS the way to a run on another host. Exit code 1 when something is bad."""
    from unisono.cli.doctor import doctor as examine
    from unisono.control.agent import handshake

    ask = (lambda place: handshake(place, secret)) if secret else None
    raise SystemExit(examine(address, handshake=ask, workers=workers, threads=threads))
