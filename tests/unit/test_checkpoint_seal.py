# SPDX-License-Identifier: Apache-2.0
"""Encryption at rest: nothing readable is left, keys can change, and a wrong or missing key says so."""

from __future__ import annotations

import base64
import secrets
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, save
from torch import Tensor

from unisono.checkpoint.listing import newest_good, read_manifest
from unisono.checkpoint.manifest import encode_manifest, step_key
from unisono.checkpoint.parts import known_chunks
from unisono.checkpoint.reading import read_tensors, verify
from unisono.checkpoint.resealing import reseal
from unisono.checkpoint.seal import OVERHEAD, VARIABLE, Seal, find_seal
from unisono.checkpoint.stamp import stamp, unstamp
from unisono.core.errors import CheckpointDamaged, UnisonoError, UsageError, WrongKey

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
SECRET = b"the weights of a lifetime.."


def state() -> dict[str, Tensor]:
    return {"model.w": torch.frombuffer(bytearray(SECRET * 50_000), dtype=torch.uint8), "model.b": torch.ones(3)}


def test_a_sealed_checkpoint_comes_back_and_shows_nothing() -> None:
    store, seal = MemoryStore(), Seal([OLD])
    saved, _ = save(store, 1, state(), {"note": "readable"}, seal=seal)
    assert all(key.endswith(".sealed") for key in store.keys("chunks/"))
    assert not any(SECRET in data for data in store.objects.values())
    read = read_manifest(store, 1, seal)
    assert read == saved
    assert read.key_id == seal.key_id
    assert all(tensor.equal(state()[name]) for name, tensor in read_tensors(store, read, seal=seal))
    assert verify(store, read, seal) == []
    assert newest_good(store, seal=seal) == saved


def test_the_same_chunk_is_never_sealed_into_the_same_bytes() -> None:
    seal = Seal([OLD])
    sealed = {b"".join(seal.close([b"chunk"], "0" * 64)) for _ in range(50)}
    assert len(sealed) == 50
    assert {len(data) for data in sealed} == {5 + OVERHEAD}


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_what_was_sealed_in_pieces_opens_as_one(buffers: list[bytes]) -> None:
    seal = Seal([OLD])
    assert seal.open(b"".join(seal.close(buffers, "0" * 64)), "0" * 64, "it") == b"".join(buffers)


def test_every_changed_bit_and_every_other_hash_is_noticed() -> None:
    seal = Seal([OLD])
    sealed = b"".join(seal.close([b"a chunk of eighteen"], "0" * 64))
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CheckpointDamaged, WrongKey)):
            seal.open(bytes(changed), "0" * 64, "it")
    for length in range(len(sealed)):
        with pytest.raises(CheckpointDamaged):
            seal.open(sealed[:length], "0" * 64, "it")
    with pytest.raises(CheckpointDamaged):
        seal.open(sealed, "1" * 64, "another chunk")


def test_a_missing_and_a_wrong_key_each_say_so_in_one_sentence() -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state(), seal=Seal([OLD]))
    with pytest.raises(WrongKey) as missing:
        list(read_tensors(store, saved))
    assert missing.value.what == f"the checkpoint of step 1 in {store.url} is sealed and no key was given"
    with pytest.raises(WrongKey) as wrong:
        read_manifest(store, 1, Seal([NEW]))
    assert wrong.value.what == (
        f"the manifest of step 1 in {store.url} is sealed with key {Seal([OLD]).key_id}, "
        f"and the keys given are {Seal([NEW]).key_id}"
    )


def test_a_wrong_key_is_never_taken_for_damage() -> None:
    """Otherwise a typing error in a key would send a run back to an older checkpoint."""
    store = MemoryStore()
    save(store, 1, state())
    save(store, 2, state(), seal=Seal([OLD]))
    with pytest.raises(WrongKey):
        newest_good(store, seal=Seal([NEW]))


def test_an_old_key_goes_on_opening_what_it_sealed() -> None:
    store = MemoryStore()
    first, _ = save(store, 1, state(), seal=Seal([OLD]))
    both = Seal([NEW, OLD])
    changed = state() | {"model.b": torch.zeros(3)}
    second, parts = save(store, 2, changed, known=known_chunks(first, both), seal=both)
    assert sum(part.chunks_written for part in parts) == 1, "what did not change stays under the old key"
    assert second.key_id == both.key_id
    assert verify(store, second, both) == []
    with pytest.raises(WrongKey):
        verify(store, second, Seal([NEW]))


def test_after_resealing_the_old_key_is_not_needed() -> None:
    store = MemoryStore()
    save(store, 1, state(), seal=Seal([OLD]))
    both = Seal([NEW, OLD])
    sealed, count = reseal(store, read_manifest(store, 1, both), both)
    assert count == len(sealed.chunks) == 2
    only = Seal([NEW])
    assert verify(store, read_manifest(store, 1, only), only) == []
    assert reseal(store, sealed, both)[1] == 0, "nothing is left to do"


def test_resealing_also_seals_what_was_saved_in_the_open() -> None:
    store, seal = MemoryStore(), Seal([NEW])
    plain, _ = save(store, 1, state())
    assert reseal(store, plain, seal)[1] == 2
    read = read_manifest(store, 1, seal)
    assert all(chunk.sealed for chunk in read.chunks.values())
    assert verify(store, read, seal) == []


def test_a_plain_chunk_does_not_count_as_known_once_there_is_a_key() -> None:
    store = MemoryStore()
    plain, _ = save(store, 1, state())
    seal = Seal([OLD])
    sealed, _ = save(store, 2, state(), known=known_chunks(plain, seal), seal=seal)
    assert all(chunk.sealed for chunk in sealed.chunks.values())
    assert known_chunks(sealed, None) == frozenset()
    assert known_chunks(sealed, seal) == frozenset(sealed.chunks)
    assert known_chunks(None, seal) == frozenset()


def test_a_manifest_changed_by_somebody_without_the_key_is_refused() -> None:
    store, seal = MemoryStore(), Seal([OLD])
    saved, _ = save(store, 1, state(), {"lr": 0.1}, seal=seal)
    raw = encode_manifest(saved, seal)
    document = unstamp(raw, "it")[0] | {"facts": {"lr": 100.0}}
    forged = stamp(document, Seal([NEW]))  # with the right hash and the id of the right key
    store.objects[step_key(1)] = forged
    with pytest.raises(CheckpointDamaged, match="without the key"):
        read_manifest(store, 1, seal)
    store.objects[step_key(1)] = stamp(document)
    with pytest.raises(CheckpointDamaged, match="half signed"):
        read_manifest(store, 1, seal)


@pytest.mark.parametrize("form", [bytes.hex, lambda key: base64.b64encode(key).decode()], ids=["hex", "base64"])
def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, form: object) -> None:
    texts = [form(key) for key in (NEW, OLD)]  # type: ignore[operator]
    file = tmp_path / "keys"
    file.write_text(f"# the current one first\n{texts[0]}\n\n  {texts[1]}  \n")
    from_file, from_environment = find_seal(file, {}), find_seal(None, {VARIABLE: ",".join(texts)})
    assert from_file is not None
    assert repr(from_file) == repr(from_environment) == repr(Seal([NEW, OLD]))
    assert find_seal(None, {}) is find_seal(None, {VARIABLE: " "}) is None
    assert repr(find_seal(file, {VARIABLE: texts[1]})) == repr(from_file), "a file that was named wins"


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "abc", "zz" * 32, "00" * 31, "é" * 64, "00" * 32 + "\nabc"], ids=ascii
)
def test_a_key_that_is_none_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UsageError, match="key") as raised:
        find_seal(file)
    assert "abc" not in str(raised.value)
    with pytest.raises(UsageError, match="cannot read the key file"):
        find_seal(tmp_path)
    with pytest.raises(UsageError, match="cannot read the key file"):
        find_seal(tmp_path / "missing")


def test_keys_are_not_shown_in_errors_or_when_printed() -> None:
    key = secrets.token_bytes(32)
    seal = Seal([key])
    store = MemoryStore()
    save(store, 1, state(), seal=Seal([OLD]))
    with pytest.raises(UnisonoError) as raised:
        read_manifest(store, 1, seal)
    for shown in (repr(seal), str(seal), str(raised.value)):
        assert key.hex() not in shown
        assert str(key) not in shown
