# SPDX-License-Identifier: Apache-2.0
"""The documents keep to the code: their scripts run, their tables are complete, their links lead somewhere."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiproc.running import run_python, run_unisono
from unisono.core.errors import EXIT_CODES, UnisonoError

ROOT = Path(__file__).resolve().parents[2]
TRAINING, ERRORS = ROOT / "docs" / "training.md", ROOT / "docs" / "errors.md"
DOCUMENTS = [*sorted(ROOT.glob("README*.md")), ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BEFORE, AFTER = "examples/04_own_loop_before.py", "examples/04_own_loop.py"
MOST_ADDED_LINES = 5

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(path: Path, language: str) -> dict[str, str]:
    """The fenced blocks of one language, by the heading they stand under and their number there."""
    text, found = path.read_text(), {}
    for match in FENCE.finditer(text):
        if match[1] == language:
            heading = re.findall(r"^#+ (.+)$", FENCE.sub("", text[: match.start()]), re.M)[-1]
            names = (heading, *(f"{heading} ({number})" for number in range(2, 100)))
            found[next(name for name in names if name not in found)] = match[2]
    return found


SCRIPTS = blocks(TRAINING, "python")
DATA_SCRIPTS = blocks(ROOT / "docs" / "data.md", "python")
LARGE_BATCH_SCRIPTS = blocks(ROOT / "docs" / "large-batches.md", "python")
LOCAL_SCRIPTS = blocks(ROOT / "docs" / "local-steps.md", "python")
BIG_MODEL_SCRIPTS = blocks(ROOT / "docs" / "big-models.md", "python")
MESH_SCRIPTS = blocks(ROOT / "docs" / "meshes.md", "python")
KEY_VALUE_SCRIPTS = blocks(ROOT / "docs" / "key-values.md", "python")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_in_the_users_guide_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    run_python(SCRIPTS[name], tmp_path, timeout_s=60)


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readme_leads_to_every_guide(readme: str) -> None:
    linked = set(LINK.findall((ROOT / readme).read_text()))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


def test_the_readme_shows_the_same_commands_in_both_languages() -> None:
    commands = [re.findall(r"^unisono [^#\n]*", path.read_text(), re.M) for path in sorted(ROOT.glob("README*.md"))]
    english, chinese = ([line.split("   ")[0].strip() for line in found] for found in commands)
    assert english == chinese
    assert english


@pytest.mark.parametrize("name", LARGE_BATCH_SCRIPTS)
def test_a_script_in_the_guide_to_large_batches_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    run_python(LARGE_BATCH_SCRIPTS[name], tmp_path, timeout_s=60)


@pytest.mark.parametrize("name", LOCAL_SCRIPTS)
def test_a_script_in_the_guide_to_local_steps_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    run_python(LOCAL_SCRIPTS[name], tmp_path, timeout_s=60)


@pytest.mark.parametrize("name", BIG_MODEL_SCRIPTS)
def test_a_script_in_the_guide_to_big_models_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    run_python(BIG_MODEL_SCRIPTS[name], tmp_path, timeout_s=60)


@pytest.mark.parametrize("mesh", ["", "fsdp=2", "tp=2", "pp=2"])
def test_the_script_in_the_guide_to_meshes_runs_on_every_kind_of_them(mesh: str, tmp_path: Path) -> None:
    (script,) = MESH_SCRIPTS.values()
    if mesh:
        run_unisono(script, tmp_path, "--mesh", mesh, workers=None, timeout_s=90)
    else:
        run_python(script, tmp_path, timeout_s=60)


@pytest.mark.parametrize("name", KEY_VALUE_SCRIPTS)
def test_the_scripts_of_the_guide_to_keys_and_values_run_as_they_are(name: str, tmp_path: Path) -> None:
    run_python(KEY_VALUE_SCRIPTS[name], tmp_path, timeout_s=60)


@pytest.mark.parametrize("name", DATA_SCRIPTS)
def test_a_script_in_the_guide_to_data_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DATA_SCRIPTS[name]], cwd=tmp_path, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_the_scripts_of_the_guides_use_every_public_name() -> None:
    import unisono

    guides = (SCRIPTS, LARGE_BATCH_SCRIPTS, LOCAL_SCRIPTS, BIG_MODEL_SCRIPTS, MESH_SCRIPTS, KEY_VALUE_SCRIPTS)
    text = "\n".join(script for guide in guides for script in guide.values())
    in_signatures = {"EpochInfo", "Result", "StepInfo", "UnisonoError"}  # what a script gets, and need not name
    assert [name for name in unisono.__all__ if name not in in_signatures and f"unisono.{name}" not in text] == []


def kinds(root: type[UnisonoError] = UnisonoError) -> Iterator[type[UnisonoError]]:
    yield root
    for child in root.__subclasses__():
        yield from kinds(child)


def rows(path: Path, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head and rule."""
    section = path.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def test_every_error_code_is_listed_once_with_its_exit_code_and_no_other() -> None:
    listed = [(cells[0].strip("`"), int(cells[1])) for cells in rows(ERRORS, "Error codes")]
    assert listed == sorted({(kind.code, kind.exit_code) for kind in kinds()})
    assert all(len(cells) == 5 and all(cells) for cells in rows(ERRORS, "Error codes")), "a cell is empty"
    known = {kind.code for kind in kinds()}
    for path in DOCUMENTS:
        assert set(re.findall(r"UNI-\d+", path.read_text())) <= known, path.name


def test_every_exit_code_is_listed_with_its_meaning_and_no_other() -> None:
    assert {int(code): meaning for code, meaning in rows(ERRORS, "Exit codes")} == EXIT_CODES
    assert {kind.exit_code for kind in kinds()} <= set(EXIT_CODES)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", link):  # another site
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_of(name: str) -> list[str]:
    """The lines of an example below its docstring."""
    text = (ROOT / name).read_text()
    docstring = ast.parse(text).body[0]
    return "\n".join(text.splitlines()[docstring.end_lineno :]).strip("\n").splitlines()


def test_the_difference_in_the_users_guide_is_the_one_between_the_examples_and_five_lines_long() -> None:
    expected = list(difflib.unified_diff(code_of(BEFORE), code_of(AFTER), BEFORE, AFTER, lineterm="", n=1))
    (shown,) = blocks(TRAINING, "diff").values()
    # Editors like to take the blank off an empty line of context.
    assert [line.rstrip() for line in shown.splitlines()] == [line.rstrip() for line in expected]
    added = [line for line in expected[2:] if line.startswith("+") and line != "+"]
    assert 0 < len(added) <= MOST_ADDED_LINES, added


def test_the_readme_tells_a_newcomer_how_to_begin() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
