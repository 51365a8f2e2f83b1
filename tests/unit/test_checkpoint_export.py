# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as one file, and without Unisono at all: stock PyTorch and safetensors read it, in little memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from memory_store import MemoryStore, save
from safetensors.torch import load_file
from torch import Tensor, nn

from unisono.checkpoint import chunks
from unisono.checkpoint.dtypes import TORCH_NAME
from unisono.checkpoint.export import export
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.store import open_store
from unisono.checkpoint.weights import hash_file, hash_state
from unisono.core.errors import CheckpointDamaged, UsageError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE_BYTES", 400)
    monkeypatch.setattr(chunks, "SMALL_BYTES", 100)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))


def state() -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {f"model.{name}": value for name, value in model().state_dict().items()}
    return weights | {"optimizer.0.weight.exp_avg": torch.randn(30, 20), "model.é": torch.zeros(0, 2)}


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("seal", [None, Seal([bytes(32)])], ids=["plain", "sealed"])
def test_the_weights_are_exported_under_the_names_that_the_model_knows(
    tmp_path: Path, name: str, seal: Seal | None
) -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state(), seal=seal)
    seen: list[tuple[int, int]] = []
    count = export(store, saved, tmp_path / name, seal=seal, on_progress=lambda *row: seen.append(row))
    expected = {key.removeprefix("model."): value for key, value in state().items() if key.startswith("model.")}
    assert count == len(expected)
    path = tmp_path / name
    loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert hash_state(loaded) == hash_state(expected) == hash_file(path)
    del loaded["é"]
    model().load_state_dict(loaded)
    assert seen[-1][0] == seen[-1][1] == sum(value.nbytes for value in expected.values())
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_everything_can_be_exported_under_its_full_name(tmp_path: Path, name: str) -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state())
    export(store, saved, tmp_path / name, prefix="")
    assert hash_file(tmp_path / name) == hash_state(state())


def test_every_element_type_can_be_exported(tmp_path: Path) -> None:
    ones = torch.ones(8, 8, dtype=torch.uint8)
    tensors = {name: ones.bool() if name == "bool" else ones.view(getattr(torch, name)) for name in TORCH_NAME.values()}
    store = MemoryStore()
    saved, _ = save(store, 1, tensors)
    for name in ("w.safetensors", "w.pt"):
        export(store, saved, tmp_path / name, prefix="")
        assert hash_file(tmp_path / name) == hash_state(tensors)


def test_the_torch_file_is_a_sound_archive_like_any_other(tmp_path: Path) -> None:
    """Torch does not look at the check sums; unzip and virus scanners do."""
    store = MemoryStore()
    saved, _ = save(store, 1, state())
    path = tmp_path / "w.pt"
    export(store, saved, path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert mapped["0.weight"].equal(state()["model.0.weight"])


@pytest.mark.usefixtures("_small_chunks")
def test_a_damaged_checkpoint_leaves_no_file_behind(tmp_path: Path) -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state())
    key = saved.chunks[saved.tensors["model.2.weight"].pieces[0].chunk].key
    store.objects[key] = store.objects[key][:-1] + b"?"
    (tmp_path / "old.pt").write_bytes(b"what was there before")
    for name in ("w.safetensors", "w.pt", "old.pt"):
        with pytest.raises(CheckpointDamaged):
            export(store, saved, tmp_path / name)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("old.pt", b"what was there before")]


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, {"optimizer.w": torch.ones(1)})
    with pytest.raises(UsageError, match=r"no tensors that begin with 'model\.'") as raised:
        export(store, saved, tmp_path / "w.pt")
    assert "optimizer" in raised.value.do
    with pytest.raises(UsageError, match="what kind of file"):
        export(store, saved, tmp_path / "w.gguf", prefix="")
    with pytest.raises(UsageError, match="cannot write"):
        export(store, saved, tmp_path / "no folder" / "w.pt", prefix="")


_MEASURE = """
import sys
from pathlib import Path
from unisono.checkpoint.export import export
from unisono.checkpoint.listing import newest_good
from unisono.checkpoint.store import open_store
def memory(which):
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[which].split()[0]) * 1024
def go(folder, file):
    store = open_store(folder)
    export(store, newest_good(store), Path(file), prefix="")
go(sys.argv[1] + "/tiny", sys.argv[3] + ".tiny" + Path(sys.argv[3]).suffix)  # so that libraries are loaded
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what is in use now
before = memory("VmRSS")
go(sys.argv[1] + "/" + sys.argv[2], sys.argv[3])
print(memory("VmHWM") - before)
"""


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_exporting_needs_no_more_memory_than_the_largest_tensor(tmp_path: Path, suffix: str) -> None:
    largest = 8 << 20
    tensors = {f"model.{number}": torch.full((largest // 4,), float(number)) for number in range(20)}
    save(open_store(str(tmp_path / "large")), 1, tensors)
    save(open_store(str(tmp_path / "tiny")), 1, {"w": torch.ones(1)})
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), "large", str(tmp_path / f"w{suffix}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert (tmp_path / f"w{suffix}").stat().st_size > 20 * largest
    assert largest / 2 < int(done.stdout) < 3 * largest, "too much, or the measurement does not see it"


@pytest.mark.usefixtures("_small_chunks")
def test_the_document_shows_how_to_open_a_checkpoint_without_unisono(tmp_path: Path) -> None:
    """In ten lines, which run here as they stand, where Unisono cannot be imported."""
    section = DOCUMENT.read_text().split("### Opening it without Unisono\n")[1].split("\n#")[0]
    (script,) = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
    folder = tmp_path / "runs" / "mine" / "checkpoints"
    save(open_store(str(folder)), 5, {})
    saved, _ = save(open_store(str(folder)), 120, state(), {"lr": 0.1})
    assert any(len(tensor.pieces) > 1 for tensor in saved.tensors.values())
    program = f"import sys; sys.modules['unisono'] = None\n{script}\n"
    program += "torch.save(state, 'out.pt'); import json; print(json.dumps(manifest['facts']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"lr": 0.1}
    assert hash_state(torch.load(tmp_path / "out.pt", weights_only=True)) == hash_state(state())
