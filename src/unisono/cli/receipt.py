# SPDX-License-Identifier: Apache-2.0
"""``unisono receipt verify | key`` and ``unisono replay``: what is in a receipt, who signed it, and run it again.

Exit codes: 0 the same (or good), 1 different (or another signer), 2 a wrong command, 32 a damaged receipt.
"""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="receipt",
    help="Check the receipt of a run, and who signed it.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Which = Annotated[str, typer.Argument(help="A receipt.json, a run's directory, or its name under runs/.")]
Key = Annotated[
    str | None,
    typer.Option("--key", help="Public key of the signer: its digits, or a file with them.", metavar="PUBLIC"),
]


@app.command()
def verify(receipt: Which, key: Key = None) -> None:
    """Say whether a receipt is as it was written, and who signed it. Exit code 1: not signed, or by another key."""
    from unisono.control.receipts import describe_signer, open_receipt
    from unisono.core.signing import read_public

    named = read_public(key) if key else None
    path, opened = open_receipt(receipt)
    found, result = opened.receipt, opened.receipt.result
    print(f"{path}: every byte is as it was written, sha256 {opened.sha256}")
    print(f"  run      {found.name}, {result.steps:,} steps, {found.started} to {found.ended}")
    print(f"  weights  sha256 {result.weights_sha256}")
    words, good = describe_signer(opened.signer, named)
    print(f"  {words}")
    raise SystemExit(0 if good else 1)


@app.command()
def key() -> None:
    """Print your public key, for those who check your receipts. It is made if you have none."""
    from unisono.core.errors import UsageError
    from unisono.core.signing import make_key, own_key

    try:
        print((own_key() or make_key()).public.hex())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"there is no signing key that can be used: {why}",
            do="let UNISONO_SIGNING_KEY name a file that can be read, or a place where one can be made",
        ) from None


def replay(
    receipt: Which,
    workers: Annotated[
        str | None, typer.Option(help="On how many workers (default: as before, if they fit here).", metavar="N")
    ] = None,
    run_dir: Annotated[str | None, typer.Option(help="Directory of the new run (default: runs/NAME-replay).")] = None,
    script: Annotated[str | None, typer.Option(help="Where the script is on this machine.", metavar="FILE")] = None,
    key: Key = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run what a receipt asks for that neither you nor --key has signed.")
    ] = False,
) -> None:
    """Run again what a receipt says, and compare the final weights. Exit code 0: the same bits, 1: others.

    What is not as it was (script, modules, data, versions, fingerprint) is said in one line each.
    """
    from unisono.control.replay import prepare
    from unisono.core.signing import read_public

    plan = prepare(receipt, workers, run_dir, script, read_public(key) if key else None, trust)
    for line in plan.lines:
        print(f"differs: {line}", flush=True)
    verdict = plan.run()
    for line in verdict.lines:
        print(line)
    raise SystemExit(verdict.exit_code)
