"""Plus two killed workers: what ``make demo-kill`` runs. The training goes on, and its hash does not change.

python examples/07_killed.py       # not under unisono run: it starts the runs itself

Four workers train 01_digits.py and the plan 07_killed.toml kills two of them; then one worker trains it undisturbed.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
UNISONO = [sys.executable, "-m", "unisono.cli"]
NEXT = """What to try next:
  unisono run examples/01_digits.py --workers 1:4     and kill -9 a worker yourself; unisono ps and show tell the rest
  examples/07_killed.toml                             the plan; docs/faults.md has every kind of fault
  docs/recovery.md                                    what is survived, what is not, and how it works
(the command is {command})"""


def train(name: str, *options: str) -> str:
    """Run the digits with these options and return the name of the run."""
    run_name = f"digits-{name}-{time.strftime('%H%M%S')}"
    shown = " ".join(options).replace(str(EXAMPLES), "examples")
    print(f"\n$ unisono run examples/01_digits.py {shown} --name {run_name}", flush=True)
    command = [*UNISONO, "run", str(EXAMPLES / "01_digits.py"), *options, "--name", run_name]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)
    return run_name


def hash_of(run_name: str) -> str:
    return json.loads((Path("runs") / run_name / "result.json").read_text())["weights_sha256"]


def main() -> None:
    killed = train("killed", "--workers", "1:4", "--faults", str(EXAMPLES / "07_killed.toml"))
    calm = train("calm", "--workers", "1")
    print(f"\n$ unisono show {killed}", flush=True)
    subprocess.run([*UNISONO, "show", killed], check=True)
    print(f"\ntwo of four killed       {hash_of(killed)}\none worker, undisturbed  {hash_of(calm)}")
    if hash_of(killed) != hash_of(calm):
        raise SystemExit("the hashes differ: this should never happen, please report it")
    print("The same model, bit for bit.\n")
    print(NEXT.format(command=Path(sys.executable).with_name("unisono")))


if __name__ == "__main__":
    main()
