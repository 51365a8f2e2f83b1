# SPDX-License-Identifier: Apache-2.0
"""The commands of ``unisono``. Each imports what it needs when it is called, so that ``--help`` stays instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="unisono",
    help="Train one model on any number of workers and get the same bits.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def start() -> None:
    """Entry point: turns a `UnisonoError` into its message and its exit code."""
    from unisono.core.errors import UnisonoError

    try:
        app()
    except UnisonoError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None


@app.command()
def run(
    script: Annotated[str | None, typer.Argument(help="The training script.", show_default=False)] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments; put -- before options.")] = None,
    workers: Annotated[str | None, typer.Option(help="How many workers: N, or MIN:MAX.", metavar="N")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Parts a step is cut into; belongs to the job.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per worker (default 1); part of the bits.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random (default 0).")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run (default: script and time).")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Directory of the run (default: runs/NAME).")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    spec: Annotated[Path | None, typer.Option(help="Read these settings from a TOML or JSON file first.")] = None,
) -> None:
    """Run SCRIPT on several workers.

    Options of the script itself go behind --:  unisono run train.py --workers 4 -- --lr 0.1
    """
    from unisono.control.launch import launch
    from unisono.core.spec import read_spec_file

    asked = {
        "script": script, "args": args, "workers": workers, "microbatches": microbatches, "threads": threads,
        "seed": seed, "name": name, "run_dir": run_dir, "device": device,
    }  # fmt: skip
    values = read_spec_file(spec) if spec else {}
    values |= {key: value for key, value in asked.items() if value is not None and value != []}
    raise SystemExit(launch(values, str(spec) if spec and not script else "unisono run"))


@app.command(name="hash")
def hash_(path: Annotated[Path, typer.Argument(help="A run, a checkpoint or a state-dict file.")]) -> None:
    """Print the hash of the weights of a run, a checkpoint or a state-dict file."""
    from unisono.cli.show import weights_hash

    print(weights_hash(path))


@app.command()
def show(run: Annotated[str, typer.Argument(help="A run's directory, or its name under runs/.")]) -> None:
    """Print a summary of a finished or running run."""
    from unisono.cli.show import show_run

    show_run(run)
