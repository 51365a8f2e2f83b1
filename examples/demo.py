"""What ``make demo`` runs: a training on two workers, the same on one, and the two hashes side by side."""

import json
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
NEXT = """What to try next:
  unisono run examples/01_digits.py --workers 3      three workers, the same hash
  unisono show {run}      where the time went
  make demo-text                                     a language model on the source of Python itself
  examples/04_own_loop.py                            your own PyTorch loop, five lines changed
(the command is {command})"""


def train(script: str, workers: int) -> tuple[str, Path]:
    """Run an example and return the hash of its weights and its directory."""
    name = f"{Path(script).stem}-demo-{time.strftime('%H%M%S')}-{workers}"
    command = [
        sys.executable,
        "-m",
        "unisono.cli",
        "run",
        str(EXAMPLES / script),
        "--workers",
        str(workers),
        "--name",
        name,
    ]
    print(f"\n$ unisono run examples/{script} --workers {workers}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)
    run_dir = Path("runs") / name
    return json.loads((run_dir / "result.json").read_text())["weights_sha256"], run_dir


def main() -> None:
    script = "02_language_model.py" if "--text" in sys.argv else "01_digits.py"
    (two, run_dir), (one, _) = train(script, 2), train(script, 1)
    print(f"\ntwo workers  {two}\none worker   {one}")
    if one != two:
        raise SystemExit("the hashes differ: this should never happen, please report it")
    print("The same model, bit for bit.\n")
    print(NEXT.format(run=run_dir, command=Path(sys.executable).with_name("unisono")))


if __name__ == "__main__":
    main()
