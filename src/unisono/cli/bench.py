# SPDX-License-Identifier: Apache-2.0
"""``unisono bench``: measure a user's own machines. So far one subject, ``comm``: links and all-reduce algorithms.

It starts a run like any other, on a script of Unisono's own, so that workers of several hosts meet and are guarded as
in a training. Prints tables, writes a plot into the run's directory. What is measured is in `train.bench_comm`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.core import events
from unisono.core.comm_words import slowest_of
from unisono.core.errors import UsageError
from unisono.core.progress import Progress
from unisono.core.run_dir import RunDir

bench_app = typer.Typer(
    help="Measure your own machines.",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
SCRIPT = Path(__file__).parents[1] / "train" / "built_in" / "bench_comm.py"
_LARGEST = 1 << 26


@bench_app.callback()
def bench() -> None:
    """Measure your own machines."""


@bench_app.command()
def comm(
    workers: Annotated[
        int | None, typer.Option(help="How many, on all hosts together (default: one per core here).", metavar="N")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Let other machines take part: IP, IP:PORT or auto.", metavar="ADDRESS")
    ] = None,
    local: Annotated[
        int | None, typer.Option(help="Workers on this machine (default: all, with --listen 1).", metavar="N")
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="Take part in a measurement that listens there.", metavar="HOST:PORT")
    ] = None,
    secret: Annotated[str, typer.Option(help="Its join secret.", envvar="UNISONO_JOIN_SECRET")] = "",
    own_address: Annotated[
        str, typer.Option("--address", help="With --join: the IP at which the others reach this machine.", metavar="IP")
    ] = "",
    seconds: Annotated[float, typer.Option(help="Time for all algorithms and sizes.", min=1)] = 40.0,
    largest: Annotated[int, typer.Option(help="The largest vector in MB.", min=1)] = _LARGEST >> 20,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    backend: Annotated[str, typer.Option(help="What carries tensors between CPUs: auto, mesh or gloo.")] = "auto",
    run_dir: Annotated[str | None, typer.Option(help="Directory for plot and numbers (default: runs/NAME).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON instead of tables.")] = False,
) -> None:
    """Bandwidth and latency of every pair of workers, and the time of every all-reduce algorithm by size.

    One machine:   unisono bench comm --workers 4

    Several:       unisono bench comm --workers 4 --listen auto, then on the others the line that it prints

    In a minute it names the slowest link, and which algorithm is the fastest for which size.
    """
    if join is not None:
        for option, given in (("--listen", listen), ("--local", local), ("--run-dir", run_dir), ("--json", as_json)):
            if given:
                raise UsageError(f"{option} belongs to the machine that listens, not to the one that joins")
        _join(join, secret, workers, own_address)
    if secret or own_address:
        raise UsageError("--secret and --address are for machines that join", do="add --join HOST:PORT")
    count = workers if workers is not None else max(2, os.cpu_count() or 2)
    if count < 2:
        raise UsageError(f"--workers {count}: a worker alone has no links to measure", do="write --workers 2 or more")
    settings = json.dumps({"seconds": seconds, "most_bytes": largest << 20})
    values = {
        "script": str(SCRIPT), "args": [settings], "workers": str(count), "device": device, "max_restarts": 0,
        "resume": "never", "rejoin_within": 10.0 if not listen else 300.0, "balance": False, "backend": backend,
    }  # fmt: skip
    if listen:
        values |= {"listen": listen, "local": local or 1}
    elif local is not None:
        raise UsageError("--local is for measurements of several machines", do="add --listen auto, or leave it out")
    if run_dir:
        values["run_dir"] = run_dir
    raise SystemExit(_measure(values, as_json))


def _join(address: str, secret: str, workers: int | None, own_address: str) -> None:
    from unisono.control.agent import join_run

    raise SystemExit(join_run(address, secret, workers or 1, own_address, str(SCRIPT)))


class _Watch(Progress):
    """What a person sees of the measuring; keeps the result."""

    result: dict[str, Any] | None = None

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.RunFinished):
            self.result = event.result
        elif isinstance(event, events.Notice) and event.code == "bench":
            self._line(event.text)
        elif isinstance(event, events.Notice) and event.code == "listening":
            self._line("on the others: " + event.text.replace("unisono join ", "unisono bench comm --join ", 1))
        elif isinstance(event, events.Notice) and event.code in ("no-receipt", "signing-key", "receipt-unsigned"):
            return  # a measurement needs none
        else:
            super().handle(event)


def _measure(values: dict[str, Any], as_json: bool) -> int:
    from unisono.control.comm_report import FILE_NAME, series_of_report, summary, write_plot
    from unisono.control.launch import launch

    seen: list[_Watch] = []

    def watch(run_dir: RunDir) -> _Watch:
        seen.append(_Watch(run_dir))
        return seen[-1]

    code = launch(values, "unisono bench comm", watch)
    if code or not seen or seen[-1].result is None:
        return code
    report, place = seen[-1].result["comm"], seen[-1].run_dir.path
    slow = report["slowest"]
    slow_link = f"slowest link: {slowest_of(slow['workers'], slow['hosts'], slow['latency_s'], slow['bytes_per_s'])}"
    title = f"all-reduce between {len(report['workers'])} workers"
    plot = write_plot(place / FILE_NAME, series_of_report(report), title, slow_link)
    if as_json:
        print(json.dumps(report | {"plot": str(plot)}, indent=2))
    else:
        print("\n".join(["", *summary(report), "", f"plot     {plot}", f"numbers  {seen[-1].run_dir.result}"]))
    return 0
