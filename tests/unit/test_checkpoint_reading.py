# SPDX-License-Identifier: Apache-2.0
"""Reading: only verified bytes come out, the newest good checkpoint is found, and any ranges can be asked for."""

from __future__ import annotations

import hashlib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_store import MemoryStore, save
from torch import Tensor

from unisono.checkpoint import chunks
from unisono.checkpoint.listing import good_checkpoints, list_checkpoints, newest_good, read_manifest
from unisono.checkpoint.manifest import Manifest, encode_manifest, step_key
from unisono.checkpoint.reading import read_ranges, read_tensors, verify
from unisono.checkpoint.reshard import ChunkRead, Copy, plan_reads
from unisono.checkpoint.stamp import stamp, unstamp
from unisono.core.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNewer,
    StoreFailed,
    UsageError,
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE_BYTES", 400)
    monkeypatch.setattr(chunks, "SMALL_BYTES", 100)


def state(number: float = 0.0) -> dict[str, Tensor]:
    return {
        "model.large": torch.arange(300.0).view(3, 100) + number,
        "model.middle": torch.arange(50.0) - number,
        "model.small": torch.tensor([True, False]),
        "optimizer.step": torch.tensor(number),
        "optimizer.none": torch.zeros(0, 4),
    }


def flip(store: MemoryStore, key: str, at: int = -1) -> None:
    data = bytearray(store.objects[key])
    data[at] ^= 1
    store.objects[key] = bytes(data)


def test_only_the_chunks_of_the_wanted_tensors_are_fetched_and_each_once() -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state())
    store.calls.clear()
    assert [name for name, _ in read_tensors(store, saved, ["model.small", "model.middle"])] == [
        "model.middle",
        "model.small",
    ]
    assert len(store.calls) == 2
    store.calls.clear()
    assert len(list(read_tensors(store, saved))) == len(state())
    assert len(store.calls) == len(saved.chunks)


def test_a_tensor_that_is_not_there_is_named_before_anything_is_read() -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state())
    with pytest.raises(CheckpointMismatch, match=r"no tensor 'model.larg'; did you mean 'model.large'\?"):
        read_tensors(store, saved, ["model.larg"])


@pytest.mark.parametrize("name", state())
def test_a_flipped_bit_anywhere_in_a_chunk_is_found_before_its_tensor_comes_out(name: str) -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state())
    key = saved.chunks[saved.tensors[name].pieces[-1].chunk].key
    for at in range(len(store.objects[key])):
        flip(store, key, at)
        with pytest.raises(CheckpointDamaged, match="its hash is another one"):
            list(read_tensors(store, saved, [name]))
        flip(store, key, at)
    assert verify(store, saved) == []


def test_verify_names_every_damaged_chunk_and_goes_on() -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, state())
    keys = [chunk.key for chunk in saved.chunks.values()]
    assert len(keys) >= 5
    flip(store, keys[0])
    del store.objects[keys[1]]
    store.objects[keys[2]] = store.objects[keys[2]][:-1]
    seen: list[tuple[int, int]] = []
    problems = verify(store, saved, on_progress=lambda done, total: seen.append((done, total)))
    assert [
        re.sub(r"[\d,]+ bytes instead of [\d,]+", "N bytes", problem.what.partition("needs, ")[2])
        for problem in problems
    ] == [
        "is damaged: its hash is another one",
        "is missing",
        "has N bytes",
    ]
    assert seen[-1] == (saved.bytes, saved.bytes)


def test_truth_values_that_are_neither_true_nor_false_are_refused() -> None:
    """Torch would take them and compute nonsense; safetensors does not look."""
    store = MemoryStore()
    saved, _ = save(store, 1, {"mask": torch.tensor([1, 2], dtype=torch.uint8)})
    document = unstamp(encode_manifest(saved), "it")[0]
    (digest,) = saved.chunks
    forged = store.objects[saved.chunks[digest].key].replace(b'"U8"', b'"BOOL"')
    length = int.from_bytes(forged[:8], "little") + 2
    forged = length.to_bytes(8, "little") + forged[8:]
    new = hashlib.sha256(forged).hexdigest()
    store.objects[f"chunks/{new[:2]}/{new}.safetensors"] = forged
    document["chunks"] = {new: {"bytes": len(forged), "stored": len(forged), "sealed": False}}
    document["tensors"]["mask"] = {"dtype": "BOOL", "shape": [2], "pieces": [[new, 0, 2, len(forged) - 2]]}
    store.objects[step_key(1)] = stamp(document)
    with pytest.raises(CheckpointDamaged, match="neither true nor false"):
        list(read_tensors(store, read_manifest(store, 1)))


def spoil_manifest(store: MemoryStore, newest: Manifest) -> None:
    flip(store, step_key(newest.step))


def empty_manifest(store: MemoryStore, newest: Manifest) -> None:
    store.objects[step_key(newest.step)] = b""


def lose_chunk(store: MemoryStore, newest: Manifest) -> None:
    del store.objects[newest.chunks[newest.tensors["model.large"].pieces[0].chunk].key]


def truncate_chunk(store: MemoryStore, newest: Manifest) -> None:
    key = newest.chunks[newest.tensors["model.large"].pieces[0].chunk].key
    store.objects[key] = store.objects[key][:100]


def rename_manifest(store: MemoryStore, newest: Manifest) -> None:
    store.objects[step_key(newest.step)] = store.objects[step_key(10)]


@pytest.mark.parametrize("spoil", [spoil_manifest, empty_manifest, lose_chunk, truncate_chunk, rename_manifest])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(spoil: object) -> None:
    store = MemoryStore()
    for step in (5, 10, 20):
        newest, _ = save(store, step, state(step))
    assert newest_good(store) == newest
    spoil(store, newest)  # type: ignore[operator]
    bad: list[tuple[int, CheckpointDamaged]] = []
    good = newest_good(store, lambda step, error: bad.append((step, error)))
    assert good is not None
    assert good.step == 10
    assert [step for step, _ in bad] == [20]
    assert dict(read_tensors(store, good))["optimizer.step"] == 10
    assert [(row.step, bool(row.problem)) for row in list_checkpoints(store)] == [(5, False), (10, False), (20, True)]


def test_damage_that_only_reading_finds_leads_to_the_next_older_one() -> None:
    store = MemoryStore()
    for step in (5, 10):
        newest, _ = save(store, step, state(step))
    flip(store, newest.chunks[newest.tensors["model.middle"].pieces[0].chunk].key)
    loaded = None
    for manifest in good_checkpoints(store):
        try:
            loaded = manifest.step, dict(read_tensors(store, manifest))
            break
        except CheckpointDamaged:
            continue
    assert loaded is not None
    assert loaded[0] == 5
    assert loaded[1]["optimizer.step"] == 5


def test_no_checkpoint_is_none_but_only_damaged_ones_are_an_error() -> None:
    store = MemoryStore({"steps/notes.txt": b"", "steps/12.json": b"{}"})
    assert newest_good(store) is None
    for step in (1, 2):
        save(store, step, state())
        flip(store, step_key(step))
    with pytest.raises(CheckpointDamaged, match="none of the 2 checkpoints"):
        newest_good(store)


def test_a_checkpoint_of_a_later_version_is_never_passed_over() -> None:
    store = MemoryStore()
    save(store, 1, state())
    newer, _ = save(store, 2, state())
    document = unstamp(encode_manifest(newer), "it")[0]
    store.objects[step_key(2)] = stamp(document | {"version": 2, "tensors": "laid out in another way"})
    with pytest.raises(CheckpointNewer, match="later version"):
        newest_good(store)


def test_a_store_that_does_not_answer_is_no_reason_to_go_back() -> None:
    class Failing(MemoryStore):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key == step_key(2):
                raise StoreFailed("no answer")
            return super().get(key, start, length)

    store = Failing()
    save(store, 1, state())
    save(store, 2, state())
    with pytest.raises(StoreFailed):
        newest_good(store)


def test_a_checkpoint_that_is_pruned_meanwhile_is_passed_over_in_silence() -> None:
    class Pruning(MemoryStore):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            self.objects.pop(step_key(2), None)
            return super().get(key, start, length)

    store = Pruning()
    save(store, 1, state())
    save(store, 2, state())
    bad: list[int] = []
    good = newest_good(store, lambda step, _: bad.append(step))
    assert good is not None
    assert good.step == 1
    assert bad == []


def test_a_step_that_does_not_exist_is_answered_with_those_that_do() -> None:
    store = MemoryStore()
    save(store, 4, {})
    save(store, 8, {})
    with pytest.raises(UsageError, match="no checkpoint of step 5") as raised:
        read_manifest(store, 5)
    assert "4, 8" in raised.value.do


def test_a_summary_tells_what_a_list_shows() -> None:
    store = MemoryStore()
    saved, _ = save(store, 4, state(), {"metrics": {"loss": 0.5, "note": "text", "flag": True}})
    (row,) = list_checkpoints(store)
    assert (row.step, row.tensors, row.bytes, row.sealed) == (4, 5, saved.bytes, False)
    assert row.metrics == {"loss": 0.5}
    assert row.hash == saved.hash


def cuts(count: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Some ranges of a tensor, such as shards have them; they may overlap or be empty."""
    edge = st.integers(0, count)
    return st.lists(st.tuples(edge, edge).map(lambda pair: (min(pair), max(pair))), max_size=4)


@given(cuts(300), cuts(50), cuts(2))
def test_any_ranges_can_be_read_whoever_cut_the_tensors(
    large: list[tuple[int, int]], middle: list[tuple[int, int]], small: list[tuple[int, int]]
) -> None:
    store, tensors = MemoryStore(), state()
    saved, _ = save(store, 1, tensors)
    wanted = {"model.large": large, "model.middle": middle, "model.small": small}
    store.calls.clear()
    found = list(read_ranges(store, saved, wanted))
    assert len(store.calls) == len(plan_reads(saved, wanted)), "each chunk once"
    got: dict[str, list[int]] = {name: [] for name in wanted}
    for name, begin, piece in found:
        assert piece.equal(tensors[name].reshape(-1)[begin : begin + piece.numel()])
        got[name] += range(begin, begin + piece.numel())
    for name, ranges in wanted.items():
        assert sorted(got[name]) == sorted(at for begin, end in ranges for at in range(begin, end))


def test_a_reshard_plan_is_a_table_of_byte_ranges() -> None:
    saved, _ = save(MemoryStore(), 1, {"model.large": torch.arange(150.0)})
    one, other = saved.tensors["model.large"].pieces
    assert (one.begin, one.end, other.begin, other.end) == (0, 75, 75, 150)
    assert plan_reads(saved, {"model.large": [(70, 80)]}) == [
        ChunkRead(one.chunk, (Copy("model.large", 70, 75, one.at + 280, one.at + 300),)),
        ChunkRead(other.chunk, (Copy("model.large", 75, 80, other.at, other.at + 20),)),
    ]


def test_pieces_with_the_same_bytes_are_one_chunk_and_still_two_ranges() -> None:
    store = MemoryStore()
    saved, _ = save(store, 1, {"optimizer.large": torch.zeros(200)})
    assert len(saved.chunks) == 1
    assert len(saved.tensors["optimizer.large"].pieces) == 2
    found = [(begin, piece.numel()) for _, begin, piece in read_ranges(store, saved, {"optimizer.large": [(50, 150)]})]
    assert found == [(50, 50), (100, 50)]


@pytest.mark.parametrize("wanted", [{"model.large": [(0, 301)]}, {"model.large": [(5, 4)]}, {"model.larg": []}])
def test_ranges_that_do_not_exist_are_refused(wanted: dict[str, list[tuple[int, int]]]) -> None:
    saved, _ = save(MemoryStore(), 1, state())
    with pytest.raises(CheckpointMismatch, match="large"):
        plan_reads(saved, wanted)


def test_a_manifest_and_a_chunk_that_contradict_each_other_are_refused() -> None:
    """Each consistent in itself, with the right hash: another place, type or shape than the chunk has."""
    store = MemoryStore()
    saved, _ = save(store, 1, {"m.a": torch.zeros(2, 3), "m.b": torch.ones(2, 3), "n": torch.zeros(90)})
    at = saved.tensors["m.a"].pieces[0].at
    for name, change in (
        ("m.a", {"pieces": [[saved.tensors["m.a"].pieces[0].chunk, 0, 6, at + 4]]}),
        ("m.a", {"dtype": "I32"}),
        ("m.a", {"shape": [3, 2]}),
        ("n", {"shape": [45, 2]}),
    ):
        document = unstamp(encode_manifest(saved), "it")[0]
        document["tensors"][name].update(change)
        store.objects[step_key(1)] = stamp(document)
        forged = read_manifest(store, 1)
        assert len(verify(store, forged)) == 1
        with pytest.raises(CheckpointDamaged, match=f"does not hold what the manifest says of '{name}'"):
            list(read_tensors(store, forged))


def test_a_lie_about_the_size_of_a_tensor_is_an_error_and_not_a_crash() -> None:
    """The manifest is consistent in itself, so only the store and the machine can contradict it."""
    store = MemoryStore()
    saved, _ = save(store, 1, {"w": torch.zeros(3)})
    document = unstamp(encode_manifest(saved), "it")[0]
    (digest,) = document["chunks"]
    huge = 1 << 60
    document["chunks"]["f" * 64] = {"bytes": huge, "stored": huge, "sealed": False}
    document["tensors"]["w"]["shape"] = [huge // 8]
    at = saved.tensors["w"].pieces[0].at
    document["tensors"]["w"]["pieces"] = [[digest, 0, 3, at], ["f" * 64, 3, huge // 8, at]]
    store.objects[step_key(1)] = stamp(document)
    with pytest.raises(CheckpointDamaged, match="no room for the tensor 'w'"):
        list(read_tensors(store, read_manifest(store, 1)))
