# SPDX-License-Identifier: Apache-2.0
"""What two hosts must have in common, read on each and compared as a table."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import pytest

from unisono.control.facts import MISSING, compare, facts, version
from unisono.core.errors import DataDiffers, ScriptDiffers, UnisonoError, VersionsDiffer
from unisono.core.script_files import imported_files

NOON = 1_700_000_000.0
SAME = {"python": "3.11.7", "torch": "2.13.0+cpu", "unisono": "0.1.0", "script": "aaaa 4512 1699999820 train.py",
        "module model.py": "cccc 10 1699990000 model.py", "data": "1438/dfcebbe771c6"}  # fmt: skip


def differences(**there: str) -> list[UnisonoError]:
    return compare(SAME, SAME | there, "b", "a", now_s=NOON)


@pytest.mark.parametrize(
    "there",
    [
        pytest.param({}, id="nothing differs"),
        pytest.param({"python": "3.11.9"}, id="a patch of Python"),
        pytest.param({"script": "aaaa 4512 1500000000 other.py"}, id="the same script with another name and age"),
        pytest.param({"colour": "red"}, id="a fact that only a newer version knows"),
        pytest.param({"data": ""}, id="data that one of them has not read yet"),
    ],
)
def test_hosts_that_agree_on_what_matters_may_train_together(there: dict[str, str]) -> None:
    assert differences(**there) == []


@pytest.mark.parametrize(
    ("there", "kind", "what", "do"),
    [
        pytest.param(
            {"torch": "2.12.1+cpu"},
            VersionsDiffer,
            "torch differs: b has 2.13.0+cpu, a has 2.12.1+cpu",
            "on b: pip install torch==2.12.1+cpu, then join again",
            id="torch",
        ),
        pytest.param({"torch": "2.13.0+cu130"}, VersionsDiffer, "torch differs: b has 2.13.0+cpu, a has 2.13.0+cu130",
                     "on b: pip install torch==2.13.0+cu130, then join again", id="another build of torch"),
        pytest.param({"python": "3.12.1"}, VersionsDiffer, "python differs: b has 3.11.7, a has 3.12.1",
                     "on b: use Python 3.12, then join again", id="Python"),
        pytest.param({"unisono": "0.2.0"}, VersionsDiffer, "unisono differs: b has 0.1.0, a has 0.2.0",
                     "on b: pip install unisono==0.2.0, then join again", id="Unisono"),
        pytest.param(
            {"script": "bbbb 4600 1699992800 train.py"},
            ScriptDiffers,
            "train.py differs: b has sha256 aaaa… (4,512 bytes, changed 3:00 min ago), "
            "a has sha256 bbbb… (4,600 bytes, changed 2:00 h ago)",
            "copy train.py from a to b, then join again",
            id="the script",
        ),
        pytest.param(
            {"module model.py": "dddd 11 1699990000 model.py"},
            ScriptDiffers,
            "model.py, which train.py imports, differs: b has sha256 cccc… (10 bytes, changed 2:46 h ago), "
            "a has sha256 dddd… (11 bytes, changed 2:46 h ago)",
            "copy model.py from a to b, then join again",
            id="a file that it imports",
        ),
        pytest.param(
            {"module extra.py": "dddd 11 1699999990 extra.py"},
            ScriptDiffers,
            "extra.py, which train.py imports, differs: b has no such file, "
            "a has sha256 dddd… (11 bytes, changed 10 s ago)",
            "copy extra.py from a to b, then join again",
            id="a file that is missing here",
        ),
        pytest.param(
            {"data": "1500/0123456789ab"},
            DataDiffers,
            "the data differs: b has 1,438 samples with digest dfcebbe771c6, "
            "a has 1,500 samples with digest 0123456789ab",
            "give b the same data as a, in the same order, then join again",
            id="data",
        ),
    ],
)  # fmt: skip
def test_what_differs_is_said_in_one_line_with_both_values(
    there: dict[str, str], kind: type[UnisonoError], what: str, do: str
) -> None:
    (error,) = differences(**there)
    assert (type(error), error.what, error.do) == (kind, what, do)
    assert len(str(error).splitlines()) == 2


def test_every_difference_is_reported_at_once() -> None:
    found = differences(torch="1", python="3.12.0", script="b 1 1 train.py", data="other")
    assert [type(error) for error in found] == [VersionsDiffer, VersionsDiffer, ScriptDiffers, DataDiffers]


def test_a_host_without_a_script_is_not_asked_for_its_modules() -> None:
    without = {key: value for key, value in SAME.items() if key in ("python", "torch", "unisono")}
    assert compare(without, SAME, "b", "a") == []


@pytest.mark.parametrize("nonsense", ["", "x", "a b c d", "a 1 2"])
def test_what_another_version_says_about_a_script_is_not_fatal(nonsense: str) -> None:
    assert differences(script=nonsense) == []


def test_facts_are_read_from_this_host_and_compare_equal_to_themselves(tmp_path: Path) -> None:
    script = tmp_path / "my train.py"
    script.write_text("import model\n")
    (tmp_path / "model.py").write_text("x = 1\n")
    os.utime(script, (NOON, NOON))
    found = facts(str(script))
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found["unisono"] == metadata.version("unisono")
    digest, size, changed_s, name = found["script"].split(" ", 3)
    assert (len(digest), size, changed_s, name) == (12, "13", "1700000000", "my train.py")
    assert set(found) == {"python", "torch", "unisono", "script", "module model.py"}
    assert compare(found, facts(str(script)), "b", "a") == []
    (tmp_path / "model.py").write_text("x = 2\n")
    (changed,) = compare(found, facts(str(script)), "b", "a")
    assert changed.what.startswith("model.py, which my train.py imports, differs: b has sha256 ")


def test_a_package_that_is_not_there_has_a_word_for_it() -> None:
    assert version("no-such-package-as-this") == MISSING


def test_imports_are_followed_through_packages_and_each_other_but_not_into_libraries(tmp_path: Path) -> None:
    texts = {
        "train.py": "import os, torch\nimport parts.model\nfrom tools import *\nimport broken\n",
        "parts/__init__.py": "from . import layers\n",
        "parts/model.py": "from .layers import A\nfrom ..tools import x\ndef late():\n    from parts import hidden\n",
        "parts/layers.py": "import train\n",
        "parts/hidden.py": "",
        "tools.py": "import tools\n",
        "broken.py": "def (\n",
        "unused.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [path.relative_to(tmp_path).as_posix() for path in imported_files(tmp_path / "train.py")]
    assert found == ["broken.py", *sorted(name for name in texts if name.startswith("parts/")), "tools.py"]
