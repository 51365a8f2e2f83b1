# SPDX-License-Identifier: Apache-2.0
"""Every numbered example runs, by plain Python and on workers, and agrees with itself."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from multiproc.running import run_python, run_unisono

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS = {
    "01_digits.py": (),
    "02_language_model.py": ("--steps", "12"),
    "03_own_data.py": (),
    "04_own_loop.py": (),
    "05_stream.py": (),
    "06_mnist.py": (),
    "08_shards.py": (),
    "09_large_batch.py": (),
    "10_slow_network.py": (),
    "12_language_model.py": ("--steps", "8"),
    "14_sparse_embedding.py": (),
}
AT_LEAST = {
    "01_digits.py": 0.975,
    "03_own_data.py": 0.85,
    "04_own_loop.py": 0.85,
    "06_mnist.py": 0.3,
    "08_shards.py": 0.85,
    "09_large_batch.py": 0.95,
    "10_slow_network.py": 0.9,
    "14_sparse_embedding.py": 0.95,
}


def test_every_numbered_example_is_run_here() -> None:
    numbered = {path.name for path in EXAMPLES.glob("[0-9]*.py")}
    assert numbered == {
        *RUNS,
        "04_own_loop_before.py",
        "07_killed.py",
        "11_embedding_table.py",  # it has no hash: test_doors
        "13_hugging_face.py",  # below
    }


@pytest.mark.parametrize("name", sorted(RUNS))
def test_an_example_gives_the_same_hash_by_plain_python_and_on_two_workers(name: str, tmp_path: Path) -> None:
    # No cache and no network: the MNIST example falls back to the built-in digits, and says so.
    environment = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    alone = run_python(EXAMPLES / name, tmp_path, *RUNS[name], env=environment)
    two = run_unisono(EXAMPLES / name, tmp_path, workers=2, script_args=RUNS[name], env=environment)
    assert alone.weights_sha256 == two.weights_sha256
    assert two.result["metrics"] == alone.result["metrics"]
    if name in AT_LEAST:
        assert alone.result["metrics"]["accuracy"] >= AT_LEAST[name]
    if name == "06_mnist.py":
        assert "digits" in alone.output


def test_the_loop_before_runs_and_five_lines_make_it_the_loop_after(tmp_path: Path) -> None:
    assert "accuracy" in run_python(EXAMPLES / "04_own_loop_before.py", tmp_path).output
    before, after = (code_of(EXAMPLES / name) for name in ("04_own_loop_before.py", "04_own_loop.py"))
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 0 < len(added) <= 5, added


def test_two_of_four_workers_are_killed_and_the_hash_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    output = run_python(EXAMPLES / "07_killed.py", tmp_path, timeout_s=150).output
    hashes = re.findall(r"^(?:two of four killed|one worker, undisturbed) +([0-9a-f]{64})$", output, re.M)
    assert len(hashes) == 2
    assert len(set(hashes)) == 1
    for worker in (2, 0):
        assert re.search(rf"planned fault on worker {worker}: kill at", output)
        assert re.search(rf"worker {worker} died: .*; went on with ", output)
    assert "lost or gone" in output, "the timeline is not there"


def code_of(path: Path) -> list[str]:
    """The lines below the module docstring that are not blank."""
    text = path.read_text().split('"""', 2)[2]
    return [line for line in text.splitlines() if line.strip()]


def test_a_hugging_face_model_trains_unmodified_on_workers_and_on_a_mesh(tmp_path: Path) -> None:
    name, asked = EXAMPLES / "13_hugging_face.py", ("--steps", "3")
    alone = run_python(name, tmp_path, *asked)
    two = run_unisono(name, tmp_path, workers=2, script_args=asked)
    mesh = run_unisono(name, tmp_path, "--mesh", "fsdp=2,tp=2", workers=None, script_args=asked, timeout_s=150)
    assert alone.weights_sha256 == two.weights_sha256
    assert "10 layers cut over 2 ranks" in mesh.output
    assert mesh.result["metrics"] == pytest.approx(alone.result["metrics"], rel=0.01)  # with other dropout
