# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile checkpoints: whatever the bytes are, the answer is the right data or an error in words.

Never another exception, never other values, never code.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore, save
from torch import Tensor

from unisono.checkpoint import chunks
from unisono.checkpoint.difference import Side, diff
from unisono.checkpoint.export import export
from unisono.checkpoint.listing import list_checkpoints, newest_good, read_manifest
from unisono.checkpoint.manifest import step_key
from unisono.checkpoint.parts import Part
from unisono.checkpoint.reading import read_ranges, read_tensors, verify
from unisono.checkpoint.retention import prune
from unisono.checkpoint.seal import Seal
from unisono.checkpoint.stamp import stamp, unstamp
from unisono.core.errors import CheckpointDamaged, UnisonoError

SEAL = Seal([bytes(32)])
TENSORS: dict[str, Tensor] = {
    "model.large": torch.arange(60.0).view(3, 20),
    "model.mask": torch.tensor([True, False, True]),
    "model.none": torch.zeros(0, 4),
    "optimizer.step": torch.tensor(7),
    "optimizer.moment": torch.arange(40, dtype=torch.int16).view(torch.bfloat16),
}
FACTS = {"step": 7, "metrics": {"loss": 0.5}, "cursor": [1, 2, None], "note": "é"}


def make(seal: Seal | None) -> MemoryStore:
    """With pieces, groups and single tensors."""
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(chunks, "PIECE_BYTES", 100)
        context.setattr(chunks, "SMALL_BYTES", 50)
        store = MemoryStore()
        save(store, 7, TENSORS, FACTS, seal=seal)
    return store


STORES = {"plain": (make(None), None), "sealed": (make(SEAL), SEAL)}


def load(store: MemoryStore, seal: Seal | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a start of a run does with a store."""
    list_checkpoints(store)
    manifest = newest_good(store, seal=seal)
    if manifest is None:
        raise CheckpointDamaged("there is none")
    problems = verify(store, manifest, seal)
    if problems:
        raise problems[0]
    ranges = {name: [(0, tensor.spec.count)] for name, tensor in manifest.tensors.items()}
    assert sum(piece.numel() for _, _, piece in read_ranges(store, manifest, ranges, seal)) == sum(
        tensor.spec.count for tensor in manifest.tensors.values()
    )
    return dict(read_tensors(store, manifest, seal=seal)), manifest.facts


def is_right(loaded: tuple[dict[str, Tensor], dict[str, Any]]) -> bool:
    tensors, facts = loaded
    return (
        facts == FACTS
        and tensors.keys() == TENSORS.keys()
        and all(
            tensors[name].dtype == value.dtype
            and tensors[name].shape == value.shape
            and tensors[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))
            for name, value in TENSORS.items()
        )
    )


@pytest.mark.parametrize("kind", STORES)
def test_the_undamaged_checkpoint_is_right(kind: str) -> None:
    store, seal = STORES[kind]
    assert is_right(load(store, seal))


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Of an object's bytes: changed, cut, inserted, repeated, emptied."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "remove", "replace", "repeat"]))
    place, size, junk = draw(st.floats(0, 1)), draw(st.integers(1, 40)), draw(st.binary(min_size=1, max_size=40))
    bit = draw(st.integers(0, 7))

    def mutate(data: bytes) -> bytes:
        at = min(int(place * len(data)), len(data) - 1)
        if kind == "flip":
            return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
        if kind == "cut":
            return data[:at]
        if kind == "insert":
            return data[:at] + junk + data[at:]
        if kind == "remove":
            return data[:at] + data[at + size :]
        if kind == "replace":
            return data[:at] + junk + data[at + len(junk) :]
        return data[: at + size] + data[at:]

    return mutate


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=300)
@given(st.data(), mutations())
def test_any_damage_to_any_object_is_noticed(kind: str, data: st.DataObject, mutate: Callable[[bytes], bytes]) -> None:
    good, seal = STORES[kind]
    key = data.draw(st.sampled_from(sorted(good.objects)))
    changed = mutate(good.objects[key])
    store = MemoryStore(good.objects | {key: changed})
    try:
        loaded = load(store, seal)
    except UnisonoError:
        return
    assert is_right(loaded)
    assert changed == good.objects[key], "damage went unnoticed"


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=20)
@given(st.data(), st.binary(max_size=300))
def test_any_rubbish_in_place_of_an_object_is_noticed(kind: str, data: st.DataObject, rubbish: bytes) -> None:
    good, seal = STORES[kind]
    key = data.draw(st.sampled_from(sorted(good.objects)))
    with pytest.raises(UnisonoError):
        load(MemoryStore(good.objects | {key: rubbish}), seal)


@pytest.mark.parametrize("kind", STORES)
def test_swapped_and_lost_objects_are_noticed(kind: str) -> None:
    good, seal = STORES[kind]
    keys = sorted(good.objects)
    for one in keys:
        without = {key: value for key, value in good.objects.items() if key != one}
        with pytest.raises(UnisonoError):
            load(MemoryStore(without), seal)
        for other in keys:
            if one != other:
                with pytest.raises(UnisonoError):
                    load(MemoryStore(good.objects | {one: good.objects[other]}), seal)


odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 100),
    st.sampled_from([2**31, 2**63, -(2**63), 2**70, 1e400, float("nan"), -0.0, 1.5]),
    st.sampled_from(["", "F32", "I64", "BOOL", "../../etc/passwd", "f" * 64, "model.large", "__metadata__", "\ud800"]),
    st.lists(st.integers(-1, 70), max_size=4),
    st.builds(dict),
    st.builds(lambda: [[]]),
)


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Of everything inside a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, entry in inside for place in places(entry, (*path, key)))]


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=400)
@given(st.data())
def test_a_manifest_that_lies_and_has_the_right_hash_is_refused_or_harmless(kind: str, data: st.DataObject) -> None:
    """Somebody hostile can compute hashes too. What is read then is what the store holds, and never a crash."""
    good, seal = STORES[kind]
    document = copy.deepcopy(unstamp(good.objects[step_key(7)], "it")[0])
    for _ in range(data.draw(st.integers(1, 3))):
        (*path, last) = data.draw(st.sampled_from(places(document)[1:]))
        holder: Any = document
        for key in path:
            holder = holder[key]
        action = data.draw(st.sampled_from(["set", "drop", "add"]))
        if action == "set":
            holder[last] = data.draw(odd_values)
        elif action == "drop":
            del holder[last]
        elif isinstance(holder, dict):
            holder[data.draw(st.sampled_from(["", "extra", "f" * 64, "../x", "\ud800"]))] = data.draw(odd_values)
        else:
            holder.append(data.draw(odd_values))
    store = MemoryStore(good.objects | {step_key(7): stamp(document, seal) if document else b"{}"})
    try:
        tensors, _ = load(store, seal)
    except UnisonoError:
        return
    for name, tensor in tensors.items():  # whatever it calls them, they are the values that lie in the store
        assert any(
            tensor.reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))
            for value in TENSORS.values()
        ), name


@settings(max_examples=200)
@given(st.data())
def test_a_chunk_that_lies_and_has_the_right_hash_is_refused_or_harmless(data: st.DataObject) -> None:
    good, _ = STORES["plain"]
    document = copy.deepcopy(unstamp(good.objects[step_key(7)], "it")[0])
    digest = data.draw(st.sampled_from(sorted(document["chunks"])))
    chunk = data.draw(mutations())(good.objects[f"chunks/{digest[:2]}/{digest}.safetensors"])
    new = hashlib.sha256(chunk).hexdigest()
    text = json.dumps(document).replace(digest, new)
    document = json.loads(text)
    document["chunks"][new] = {"bytes": len(chunk), "stored": len(chunk), "sealed": False}
    key = f"chunks/{new[:2]}/{new}.safetensors"
    store = MemoryStore(good.objects | {key: chunk, step_key(7): stamp(document)})
    try:
        tensors, facts = load(store, None)
    except UnisonoError:
        return
    assert facts == FACTS
    assert {name: (value.dtype, value.shape) for name, value in tensors.items()} == {
        name: (value.dtype, value.shape) for name, value in TENSORS.items()
    }


@given(st.recursive(odd_values, lambda inner: st.dictionaries(st.text(max_size=9), inner, max_size=4)))
def test_any_json_in_place_of_a_part_is_refused_or_a_part(document: object) -> None:
    if not isinstance(document, dict):
        document = {"chunks": document}
    form = {"format": "unisono part", "version": 1, "bytes_written": 0, "chunks_written": 0}
    for whole in (document, form | document):
        try:
            assert isinstance(Part.from_dict(whole), Part)
        except UnisonoError:
            continue


def test_json_that_is_nested_without_end_is_refused() -> None:
    for body in (b'{"a":' * 100_000, b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        digest = hashlib.sha256(body).hexdigest().encode()
        store = MemoryStore({step_key(1): b'{"hash":"' + digest + b'",' + body[1:]})
        with pytest.raises(CheckpointDamaged):
            read_manifest(store, 1)


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self.canary, "w")


def bombs(canary: Path) -> list[bytes]:
    """As torch wrote files once, and as it does now."""
    plain = pickle.dumps(Bomb(canary))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", plain)
        file.writestr("archive/version", "3\n")
    return [plain, archive.getvalue(), b"\x80\x02" + plain]


def test_the_bomb_is_a_real_one(tmp_path: Path) -> None:
    pickle.loads(bombs(tmp_path / "canary")[0])
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", STORES)
def test_a_pickle_bomb_in_any_object_never_goes_off(tmp_path: Path, kind: str) -> None:
    """Also with the right hash and size, and whatever is done with the checkpoint."""
    good, seal = STORES[kind]
    canary = tmp_path / "canary"
    for bomb in bombs(canary):
        for key in good.objects:
            digest = hashlib.sha256(bomb).hexdigest()
            document = copy.deepcopy(unstamp(good.objects[step_key(7)], "it")[0])
            for chunk in document["chunks"]:
                if chunk in key:
                    document = json.loads(json.dumps(document).replace(chunk, digest))
                    document["chunks"][digest] = {"bytes": len(bomb), "stored": len(bomb), "sealed": False}
                    for tensor in document["tensors"].values():
                        for piece in tensor["pieces"]:
                            piece[3] = 8 if piece[0] == digest else piece[3]
            placed = {key: bomb, f"chunks/{digest[:2]}/{digest}.safetensors": bomb}
            for objects in (good.objects | {key: bomb}, good.objects | placed | {step_key(7): stamp(document)}):
                use_in_every_way(MemoryStore(objects), seal, tmp_path / "out")
    assert not canary.exists()


def use_in_every_way(store: MemoryStore, seal: Seal | None, out: Path) -> None:
    def with_manifest(act: Callable[[Any], object]) -> Callable[[], object]:
        return lambda: act(read_manifest(store, 7))

    for act in (
        lambda: load(store, seal),
        with_manifest(lambda manifest: verify(store, manifest, seal)),
        with_manifest(lambda manifest: export(store, manifest, out.with_suffix(".pt"), "", seal=seal)),
        with_manifest(lambda manifest: export(store, manifest, out.with_suffix(".safetensors"), "", seal=seal)),
        with_manifest(lambda manifest: diff(Side(store, manifest, seal), Side(STORES["plain"][0], manifest))),
        lambda: prune(MemoryStore(store.objects), {7}, orphans=True),
    ):
        try:
            act()
        except UnisonoError:
            continue


def test_nothing_in_the_package_can_unpickle() -> None:
    """Torch is asked for files only by `weights`, and only for tensors."""
    package = Path(chunks.__file__).parent
    for path in package.glob("*.py"):
        text = path.read_text()
        assert "import pickle" not in text, path
        assert text.count("torch.load(") == text.count("weights_only=True"), path
