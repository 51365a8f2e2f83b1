# SPDX-License-Identifier: Apache-2.0
"""Saving: what went in comes back, what did not change is not written again, and half a save is no checkpoint."""

from __future__ import annotations

import hashlib
import math
import threading
from pathlib import Path

import pytest
import torch
from memory_store import MemoryStore, save
from torch import Tensor, nn

from unisono.checkpoint import chunks
from unisono.checkpoint.chunks import assign, plan_chunks
from unisono.checkpoint.commit import commit
from unisono.checkpoint.dtypes import TORCH_NAME
from unisono.checkpoint.listing import read_manifest
from unisono.checkpoint.parts import Part, clear_parts, known_chunks, put_part, read_parts, write_part
from unisono.checkpoint.reading import read_tensors
from unisono.checkpoint.specs import specs_of
from unisono.checkpoint.store import open_store
from unisono.core.errors import CheckpointDamaged, CheckpointError, Unstorable

State = dict[str, Tensor]


def training_state() -> State:
    """A model and its optimizer after two steps, with one tensor that is cut."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(8, 40)).square().sum().backward()
        optimizer.step()
    state: State = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for (name, _), slots in zip(model.named_parameters(), optimizer.state.values(), strict=True):
        state |= {f"optimizer.{name}.{slot}": tensor for slot, tensor in slots.items()}
    return state


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small model has pieces, groups and tensors of their own."""
    monkeypatch.setattr(chunks, "PIECE_BYTES", 1000)
    monkeypatch.setattr(chunks, "SMALL_BYTES", 100)
    monkeypatch.setattr(chunks, "GROUP_BYTES", 300)


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].contiguous().view(-1).view(torch.uint8).equal(other[name].contiguous().view(-1).view(torch.uint8))
        for name in one
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("writers", [1, 2, 3, 50])
def test_a_state_comes_back_bit_for_bit_whoever_wrote_it(writers: int) -> None:
    state, store = training_state(), MemoryStore()
    facts = {"step": 7, "lr": 0.1, "metrics": {"loss": math.nan}, "own": {"list": [1, None, "é"], "deep": {"a": True}}}
    saved, parts = save(store, 7, state, facts, writers=writers)
    assert len(saved.chunks) > 10
    read = read_manifest(store, 7)
    assert repr(read) == repr(saved)  # not ==, for NaN is not equal to itself
    assert repr(read.facts) == repr(facts), "with the order of their keys"
    assert same(dict(read_tensors(store, read)), state)
    assert saved.hash == save(MemoryStore(), 7, state, facts, writers=1)[0].hash, "the manifest does not know workers"
    assert sum(part.bytes_written for part in parts) == saved.bytes


@pytest.mark.parametrize("name", TORCH_NAME.values())
def test_every_element_type_comes_back(name: str) -> None:
    ones = torch.ones(4, 8, dtype=torch.uint8)
    dtype = getattr(torch, name)
    state = {
        "m.w": ones.bool() if name == "bool" else ones.view(dtype),
        "m.empty": torch.empty(0, 3, dtype=dtype),
        "m.scalar": torch.ones(8, dtype=torch.uint8).view(dtype)[0],
    }
    store = MemoryStore()
    assert same(dict(read_tensors(store, save(store, 0, state)[0])), state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0)[::2],
        torch.ones(2, 2).expand(3, 2, 2),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["transposed", "channels last", "strided", "expanded", "conjugated", "negated"],
)
def test_the_way_a_tensor_lies_in_memory_does_not_count(tensor: Tensor) -> None:
    store = MemoryStore()
    ((_, read),) = read_tensors(store, save(store, 0, {"w": tensor})[0])
    assert read.equal(tensor.resolve_conj().resolve_neg())


def test_a_tensor_above_the_piece_size_is_cut_and_comes_back(tmp_path: Path) -> None:
    large = torch.arange(chunks.PIECE_BYTES // 4 + 5, dtype=torch.int32)
    store = open_store(str(tmp_path))
    saved, _ = save(store, 3, {"model.w": large.view(-1, 3)[: large.numel() // 3]})
    assert len(saved.tensors["model.w"].pieces) == 2
    ((_, read),) = read_tensors(store, saved)
    assert read.equal(large.view(-1, 3)[: large.numel() // 3])


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_is_named_after_the_sha256_of_its_file() -> None:
    store = MemoryStore()
    save(store, 1, training_state())
    keys = store.keys("chunks/")
    assert keys == [
        f"chunks/{digest[:2]}/{digest}.safetensors"
        for digest in sorted(hashlib.sha256(store.objects[key]).hexdigest() for key in keys)
    ]


@pytest.mark.usefixtures("small_chunks")
def test_what_did_not_change_is_not_written_again() -> None:
    store, state = MemoryStore(), training_state()
    first, _ = save(store, 1, state)
    changed = state | {"model.0.weight": state["model.0.weight"] + 1}
    store.calls.clear()
    second, parts = save(store, 2, changed, known=known_chunks(first, None))
    new = set(second.chunks) - set(first.chunks)
    written = {key for call, key in store.calls if call == "put" and key.startswith("chunks/")}
    assert written == {second.chunks[digest].key for digest in new}
    assert sum(part.chunks_written for part in parts) == len(new) == len(first.tensors["model.0.weight"].pieces)
    assert same(dict(read_tensors(store, second)), changed)
    assert same(dict(read_tensors(store, first)), state), "the older checkpoint is still whole"


@pytest.mark.usefixtures("small_chunks")
def test_a_new_tensor_of_the_optimizer_leaves_the_chunks_of_the_model_alone() -> None:
    store, state = MemoryStore(), training_state()
    first, _ = save(store, 1, state)
    second, _ = save(store, 2, state | {"optimizer.0.bias.extra": torch.zeros(3)})
    of_model = [name for name in state if name.startswith("model.")]
    assert [first.tensors[name] for name in of_model] == [second.tensors[name] for name in of_model]


def test_tied_weights_are_stored_once() -> None:
    shared = torch.randn(600, 600)
    store = MemoryStore()
    saved, parts = save(store, 1, {"model.head.weight": shared, "model.embedding.weight": shared.clone()}, writers=1)
    assert len(store.keys("chunks/")) == 1
    assert parts[0].bytes_written == saved.bytes
    assert same(dict(read_tensors(store, saved)), {"model.head.weight": shared, "model.embedding.weight": shared})


def test_no_chunk_is_trusted_because_an_object_of_its_name_is_there() -> None:
    """A save that was killed may have left anything; only a committed manifest makes a chunk known."""
    store, state = MemoryStore(), training_state()
    first, _ = save(store, 1, state)
    for key in store.keys("chunks/"):
        store.objects[key] = b"rubble"
    save(store, 1, state)
    assert same(dict(read_tensors(store, first)), state)


def test_the_values_are_written_from_where_they_lie() -> None:
    """No second copy: the buffers that a store gets are the tensor's own memory."""
    tensor = torch.zeros(chunks.SMALL_BYTES)

    class Looking(MemoryStore):
        def put(self, key: str, data: object) -> None:
            assert isinstance(data, list)
            tensor[0] = 5.0  # seen by the store, since it holds the memory itself
            super().put(key, data)

    store = Looking()
    write_part(store, plan_chunks(specs_of({"w": tensor})), {"w": tensor})
    assert torch.tensor(5.0).view(1).view(torch.uint8).numpy().tobytes() in next(iter(store.objects.values()))


@pytest.mark.usefixtures("small_chunks")
def test_a_checkpoint_is_committed_only_if_the_parts_cover_it() -> None:
    store, state = MemoryStore(), training_state()
    specs = specs_of(state)
    shares = assign(plan_chunks(specs), 3)
    parts = [write_part(store, plans, state) for plans in shares[:2]]
    with pytest.raises(CheckpointError, match="not complete") as raised:
        commit(store, 5, specs, parts, {})
    assert any(part.name in raised.value.cause for part in shares[2][0].slices)
    assert store.keys("steps/") == []


def test_parts_of_another_shape_or_type_do_not_count() -> None:
    store = MemoryStore()
    part = write_part(store, plan_chunks(specs_of({"w": torch.zeros(4)})), {"w": torch.zeros(4)})
    for other in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(CheckpointError, match="not complete"):
            commit(store, 5, specs_of({"w": other}), [part], {})


def test_writers_that_disagree_stop_the_commit() -> None:
    store = MemoryStore()
    specs = specs_of({"w": torch.zeros(4)})
    parts = [write_part(store, plan_chunks(specs), {"w": torch.full((4,), value)}) for value in (0.0, 1.0)]
    with pytest.raises(CheckpointError, match="different bytes"):
        commit(store, 5, specs, parts, {})
    assert commit(store, 5, specs, [parts[0], parts[0]], {}).step == 5


def test_a_chunk_that_vanished_before_the_commit_stops_it() -> None:
    store, state = MemoryStore(), training_state()
    specs = specs_of(state)
    part = write_part(store, plan_chunks(specs), state)
    key = store.keys("chunks/")[0]
    del store.objects[key]
    with pytest.raises(CheckpointError, match=f"{key} is not in"):
        commit(store, 5, specs, [part], {})
    assert store.keys("steps/") == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"optimizer": {"groups": [{"lr": torch.tensor(0.1)}]}}, r"facts.optimizer.groups\[0\].lr is a Tensor"),
        ({"own": {3: "three"}}, "facts.own has the key 3"),
        ({"big": 1 << 5000}, "facts.big is a number"),
        ({"data": b"bytes"}, "facts.data is a bytes"),
    ],
)
def test_a_fact_that_json_would_lose_is_refused_with_its_place(facts: dict[str, object], words: str) -> None:
    with pytest.raises(Unstorable, match=words):
        save(MemoryStore(), 1, {}, facts)


def test_facts_that_are_nested_without_end_are_refused() -> None:
    facts: dict[str, object] = {}
    facts["again"] = facts
    with pytest.raises(Unstorable, match="nested more than 60 deep"):
        save(MemoryStore(), 1, {}, facts)


def test_parts_travel_through_the_store_and_are_cleared() -> None:
    store, state = MemoryStore(), training_state()
    part = write_part(store, plan_chunks(specs_of(state)), state)
    put_part(store, 12, 1, 0, part)
    put_part(store, 12, 1, "worker-3", Part({}))
    put_part(store, 12, 2, 0, Part({}))
    put_part(store, 13, 1, 0, Part({}))
    assert read_parts(store, 12, 1) == {"0": part, "worker-3": Part({})}
    assert read_parts(store, 11, 1) == {}
    clear_parts(store, 12)
    assert store.keys("parts/") == ["parts/000000000013-1/0.json"]


def test_a_damaged_part_is_not_believed() -> None:
    store = MemoryStore()
    put_part(store, 12, 1, 0, Part({}, 5))
    (key,) = store.keys("parts/")
    store.objects[key] = store.objects[key].replace(b"5", b"6")
    with pytest.raises(CheckpointDamaged, match="part"):
        read_parts(store, 12, 1)


@pytest.mark.usefixtures("small_chunks")
def test_progress_is_told_by_bytes_and_may_end_the_work() -> None:
    state, seen = training_state(), list[tuple[int, int]]()

    def stop_halfway(done: int, total: int) -> None:
        seen.append((done, total))
        if done > total / 2:
            raise KeyboardInterrupt

    plans = plan_chunks(specs_of(state))
    with pytest.raises(KeyboardInterrupt):
        write_part(MemoryStore(), plans, state, on_progress=stop_halfway)
    assert 1 < len(seen) < len(plans)
    assert {total for _, total in seen} == {sum(plan.bytes for plan in plans)}


@pytest.mark.usefixtures("small_chunks")
def test_several_threads_may_write_at_once(tmp_path: Path) -> None:
    state, store = training_state(), open_store(str(tmp_path))
    specs = specs_of(state)
    parts: dict[int, Part] = {}
    shares = assign(plan_chunks(specs), 4)
    threads = [
        threading.Thread(target=lambda n=number: parts.update({n: write_part(store, shares[n], state)}))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    saved = commit(store, 1, specs, parts.values(), {})
    assert same(dict(read_tensors(store, saved)), state)


def test_a_tensor_that_changed_its_kind_since_the_plan_is_named() -> None:
    plans = plan_chunks(specs_of({"w": torch.zeros(4)}))
    for tensors in ({"w": torch.zeros(3)}, {"w": torch.zeros(4, dtype=torch.int32)}, {}):
        with pytest.raises(CheckpointError, match="'w'"):
            write_part(MemoryStore(), plans, tensors)
