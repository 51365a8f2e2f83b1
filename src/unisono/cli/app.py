# SPDX-License-Identifier: Apache-2.0
"""The commands of ``unisono``. Each imports what it needs when it is called, so that ``--help`` stays instant."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from unisono.cli.bench import bench_app
from unisono.cli.checkpoint import app as checkpoint_app
from unisono.cli.data import data_app
from unisono.cli.machines import doctor, join
from unisono.cli.receipt import app as receipt_app
from unisono.cli.receipt import replay

if TYPE_CHECKING:
    from unisono.core.errors import UnisonoError

app = typer.Typer(
    name="unisono",
    help="Train one model on any number of workers and get the same bits.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(bench_app, name="bench")
app.add_typer(checkpoint_app)
app.add_typer(data_app, name="data")
app.add_typer(receipt_app)


def start() -> None:
    """Entry point: whatever goes wrong becomes a message and an exit code of the table in `core.errors`."""
    from unisono.core.errors import InternalError, Interrupted, UnisonoError

    _open_missing_streams()
    arguments = sys.argv[1:]
    try:
        # Help is shown for a bare `unisono` too, but that is not a success.
        code = app(arguments or ["--help"], prog_name="unisono", standalone_mode=False) or (0 if arguments else 2)
        if code == Interrupted.exit_code:  # Ctrl-C while no supervisor was in charge
            raise Interrupted("stopped by Ctrl-C")
        raise SystemExit(code)
    except UnisonoError as error:
        _say_and_leave(error)
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's own
            _say_and_leave(_explain_usage(error))
        traceback.print_exc()
        _say_and_leave(
            InternalError(
                f"{type(error).__name__}: {error}",
                cause="a fault in Unisono itself",
                do="please report it with the lines above",
            )
        )


def _say_and_leave(error: UnisonoError) -> NoReturn:
    print(error, file=sys.stderr)
    raise SystemExit(error.exit_code)


def _explain_usage(error: Any) -> UnisonoError:
    """The parser's complaint in the form of all our errors; a misspelt option gets its suggestion."""
    from unisono.core.errors import UsageError, suggest

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "unisono"
    what, do = error.format_message().rstrip("."), f"see {command} --help"
    if hasattr(error, "possibilities"):  # an option that nobody knows
        known = [name for parameter in context.command.params for name in parameter.opts] if context else []
        hint = suggest(error.option_name, [name for name in known if name.startswith("--")])
        what = f"{command}: there is no option {error.option_name}" + (f"; {hint}" if hint else "")
        if command.endswith(" run"):
            do += "; options of the script itself go behind --: unisono run train.py --workers 4 -- --lr 0.1"
    return UsageError(what, do=do)


def _open_missing_streams() -> None:
    """A closed stdin, stdout or stderr would otherwise lend its number to the next socket or file."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


@app.command()
def run(
    script: Annotated[str | None, typer.Argument(help="The training script.", show_default=False)] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Its own arguments; put -- before options.")] = None,
    workers: Annotated[str | None, typer.Option(help="How many workers: N, or MIN:MAX.", metavar="N")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Models larger than one device: replicas (dp) of several ranks: dp=4,fsdp=2,tp=2,pp=2; auto: what "
            "fits the devices, --workers then being processes altogether.",
            metavar="MESH",
        ),
    ] = None,
    zero: Annotated[
        int | None,
        typer.Option(
            help="With fsdp: how much is given back: 3 (default) after each pass of a block, 2, 1.", metavar="N"
        ),
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload", help="With fsdp: keep the parts in the host's memory.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="With pp: gpipe, 1f1b (default), interleaved or zero-bubble.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="With pp: parts of a microbatch that are under way at once.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Parts a step is cut into; belongs to the job.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per worker (default 1); part of the bits.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random (default 0).")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run (default: script and time).")] = None,
    run_dir: Annotated[str | None, typer.Option(help="Directory of the run (default: runs/NAME).")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    max_restarts: Annotated[int | None, typer.Option(help="Workers that may be replaced (default 10).")] = None,
    rejoin_within: Annotated[
        float | None, typer.Option(help="Seconds to wait for workers when fewer than MIN are left (default 300).")
    ] = None,
    hang_after: Annotated[
        float | None, typer.Option(help="Seconds after which a worker that others wait for has hung (default 60).")
    ] = None,
    grace: Annotated[float | None, typer.Option(help="Seconds to leave in after SIGTERM (default 30).")] = None,
    verify_every: Annotated[
        int | None, typer.Option(help="Steps between comparisons of the workers' weights (default 100, 0: never).")
    ] = None,
    noise_every: Annotated[
        int | None, typer.Option(help="Steps between measurements of the gradient noise (default 50, 0: never).")
    ] = None,
    balance: Annotated[
        bool | None, typer.Option("--balance/--no-balance", help="Give slow workers fewer microbatches (default).")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="Let other machines join: IP, IP:PORT or auto.", metavar="ADDRESS")
    ] = None,
    local: Annotated[
        int | None, typer.Option(help="Workers on this machine (default: MAX, with --listen MIN).")
    ] = None,
    comm: Annotated[
        str | None,
        typer.Option(
            help="How gradients are added: auto (default), direct, ring, tree, double-tree, halving, hierarchical, "
            "backend.",
            metavar="NAME",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="What carries tensors between CPUs: auto (default), mesh, or torch's gloo.", metavar="NAME"),
    ] = None,
    compress: Annotated[
        str | None,
        typer.Option(
            help="Send fewer bytes: fp16, bf16, int8, int4, onebit, topk:0.01, randomk:0.01 or powersgd:4; auto: what "
            "the links call for, measured, so that bits may differ from run to run.",
            metavar="CODEC",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="allreduce (default); local: replicas that meet once a round; ps: parameter servers."),
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="With --strategy local: updates in a round (default 16).", metavar="H")
    ] = None,
    outer: Annotated[
        str | None, typer.Option(help="With --strategy local: average (default), or nesterov (DiLoCo).")
    ] = None,
    fragments: Annotated[
        int | None,
        typer.Option(help="With --strategy local: parts that are exchanged while replicas go on.", metavar="F"),
    ] = None,
    servers: Annotated[
        int | None,
        typer.Option(help="With --strategy ps: parameter servers besides the workers (default 1).", metavar="S"),
    ] = None,
    local_servers: Annotated[
        int | None,
        typer.Option(help="With --listen: of them, those started here (default all).", metavar="N"),
    ] = None,
    staleness: Annotated[
        str | None,
        typer.Option(help="With --strategy ps: steps that workers may be apart: 0 (default), more, or inf."),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option(
            help="With --strategy ps: servers that hold each slice (default 1); without servers, workers.", metavar="N"
        ),
    ] = None,
    delayed: Annotated[
        str | None,
        typer.Option(help="With --staleness: gradients that come late are scaled (scale) or corrected (compensate)."),
    ] = None,
    fresh: Annotated[
        str | None,
        typer.Option(help="With --staleness: workers fetch weights (pull, default), or servers send them (push)."),
    ] = None,
    round_steps: Annotated[
        int | None,
        typer.Option(help="With --staleness: steps after which all meet (default 16).", metavar="N"),
    ] = None,
    plaintext: Annotated[
        bool | None, typer.Option("--plaintext", help="Do not encrypt tensors between machines.")
    ] = None,
    faults: Annotated[str | None, typer.Option(help="A plan of faults to rehearse (TOML).", metavar="FILE")] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(help="How often: 100 (steps), 10m (time, the default) or never.", metavar="WHEN")
    ] = None,
    checkpoint_to: Annotated[
        str | None, typer.Option(help="Where: a directory or URL (default: in the run's directory).", metavar="URL")
    ] = None,
    checkpoint_key: Annotated[
        str | None, typer.Option(help="Encrypt with the keys in this file.", metavar="FILE")
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep, the newest (default 2).", metavar="N")] = None,
    keep_every: Annotated[int | None, typer.Option(help="And those of every K-th step.", metavar="K")] = None,
    keep_best: Annotated[
        str | None, typer.Option(help="And the best: loss:min, accuracy:max:3.", metavar="METRIC")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="auto (default), never, or force: also when what decides the bits has changed."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32 (default), bf16, bf16-all (between layers too), fp16 or fp8; weights stay in fp32.",
            metavar="NAME",
        ),
    ] = None,
    compile_: Annotated[
        str | None,
        typer.Option(
            "--compile",
            help="none (default), blocks (repeated ones, each kind once), whole, or tuned (by measuring; needs "
            "exact=False).",
            metavar="WHAT",
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help="Activations: none (default), selective, full, or auto, by memory.", metavar="HOW"),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(help="End after this step, with weights and result saved.", metavar="STEP")
    ] = None,
    spec: Annotated[Path | None, typer.Option(help="Read these settings from a TOML or JSON file first.")] = None,
) -> None:
    """Run SCRIPT on several workers.

    Options of the script itself go behind --:  unisono run train.py --workers 4 -- --lr 0.1
    """
    from unisono.comm.codecs.spelling import read as read_codec
    from unisono.control.launch import launch
    from unisono.core.spec import read_spec_file

    asked = {
        "script": script, "args": args, "workers": workers, "microbatches": microbatches, "threads": threads,
        "seed": seed, "name": name, "run_dir": run_dir, "device": device, "max_restarts": max_restarts,
        "rejoin_within": rejoin_within, "hang_after": hang_after, "grace": grace, "verify_every": verify_every,
        "balance": balance, "listen": listen, "local": local, "faults": faults, "checkpoint_every": checkpoint_every,
        "checkpoint_to": checkpoint_to, "checkpoint_key": checkpoint_key, "keep": keep, "keep_every": keep_every,
        "keep_best": keep_best, "resume": resume, "stop_after": stop_after, "comm": comm, "backend": backend,
        "compress": compress, "strategy": strategy, "local_steps": local_steps, "outer": outer, "fragments": fragments,
        "servers": servers, "local_servers": local_servers, "staleness": staleness, "copies": copies,
        "delayed": delayed, "fresh": fresh, "round_steps": round_steps, "mesh": mesh, "zero": zero, "offload": offload,
        "schedule": schedule, "chunks": chunks, "plaintext": plaintext, "noise_every": noise_every,
        "precision": precision, "compile": compile_, "recompute": recompute,
    }  # fmt: skip
    values = read_spec_file(spec) if spec else {}
    values |= {key: value for key, value in asked.items() if value is not None and value != []}
    if values.get("compress"):
        read_codec(str(values["compress"]))
    raise SystemExit(launch(values, str(spec) if spec and not script else "unisono run"))


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under runs/.")],
    workers: Annotated[
        str | None, typer.Option(help="How many workers from now on (default: as before).", metavar="N")
    ] = None,
) -> None:
    """Go on with a run that was stopped, killed or preempted, from its last checkpoint.

    The same as starting it again with the same command and --name; the result is that of a run which never stopped.
    """
    from unisono.control.launch import resume as go_on

    raise SystemExit(go_on(run, workers))


@app.command(name="hash")
def hash_(
    paths: Annotated[
        list[Path], typer.Argument(help="A run, a checkpoint or a state-dict file; several are compared.")
    ],
) -> None:
    """Print the hash of the weights of a run, a checkpoint or a state-dict file.

    With several, also say whether they are the same (exit code 0) or not (1), and for runs what may be the reason.
    """
    from unisono.cli.show import compare, weights_hash

    if len(paths) == 1:
        print(weights_hash(paths[0]))
        return
    verdict, same = compare(paths)
    print(verdict)
    raise SystemExit(0 if same else 1)


@app.command()
def show(run: Annotated[str, typer.Argument(help="A run's directory, or its name under runs/.")]) -> None:
    """Print a summary of a finished or running run."""
    from unisono.cli.show import show_run

    show_run(run)


@app.command()
def ps(all_runs: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended.")] = False) -> None:
    """List the runs under runs/ that are running now."""
    from unisono.cli.ps import show_runs

    show_runs(all_runs)


@app.command()
def logs(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under runs/.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    worker: Annotated[int | None, typer.Option(help="Only this worker.", metavar="N")] = None,
) -> None:
    """Print what the workers of a run have printed."""
    from unisono.cli.logs import show_logs

    show_logs(run, follow, worker)


@app.command()
def scale(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under runs/.")],
    workers: Annotated[
        int | None, typer.Argument(help="How many workers it should have.", metavar="N", min=1, show_default=False)
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="With --strategy ps: how many parameter servers.", metavar="S", min=0)
    ] = None,
) -> None:
    """Give a running run more or fewer workers, or parameter servers. An exact result does not change by a bit."""
    from unisono.cli.command import order
    from unisono.core.errors import UsageError

    if workers is None and servers is None:
        raise UsageError("scale to how many?", do=f"unisono scale {run} 4; or unisono scale {run} --servers 2")
    order(run, "scale", workers or 0, servers)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(help="A run's directory, or its name under runs/.")],
    now: Annotated[bool, typer.Option("--now", help="At once, without finishing the step.")] = False,
) -> None:
    """End a running run: after the step in hand, with its weights and result saved."""
    from unisono.cli.command import order, stop_now

    if now:
        stop_now(run)
    else:
        order(run, "stop")


app.command()(join)
app.command()(doctor)
app.command()(replay)
