# SPDX-License-Identifier: Apache-2.0
"""The key-value store does what those expect who know MXNet's or ps-lite's, with the same bits every time."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from key_values import TIMEOUT_S, served
from ranks import INTERRUPTIBLE
from torch import Tensor, nn

from unisono.comm.asking import HEADER_BYTES
from unisono.parallel.kv import CUT_BYTES, KeyValues, place
from unisono.parallel.kv_shard import OPTIMIZERS, packed

BIG = 400_000  # float32: over a megabyte
every_kind = pytest.mark.parametrize("kind", INTERRUPTIBLE)


# ---- values


@every_kind
def test_every_worker_pulls_what_the_first_one_initialised(kind: str) -> None:
    def use(kv: KeyValues) -> list[Any]:
        kv.init("a", torch.full((2, 3), 1.0 + kv.rank))
        kv.init(7, torch.full((), 5 + kv.rank))
        kv.init("7", torch.full((BIG,), 3.0 + kv.rank))
        return [kv.pull("a").tolist(), kv.pull(7).item(), kv.pull("7").unique().tolist(), kv.pull(7).dtype]

    assert served(kind, 2, 2, use)[:2] == [[[[1.0] * 3] * 2, 5, [3.0], torch.int64]] * 2


@every_kind
@pytest.mark.parametrize("size", [5, BIG])
def test_without_an_optimizer_the_sum_of_all_pushes_becomes_the_value(kind: str, size: int) -> None:
    def use(kv: KeyValues) -> list[float]:
        kv.init("w", torch.full((size,), 100.0))
        seen = []
        for step in range(3):
            kv.push("w", torch.full((size,), float(10**kv.rank * (step + 1))))
            seen += kv.pull("w").unique().tolist()
        return seen

    assert served(kind, 3, 2, use)[:3] == [[111.0, 222.0, 333.0]] * 3


def test_pushes_are_added_up_in_the_order_of_workers_and_not_of_arrival() -> None:
    """In float32 the order shows: (1e8 + 1) - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    pushed = (1e8, 1.0, -1e8)
    for order in ((0, 1, 2), (2, 0, 1), (2, 1, 0), (1, 2, 0)):
        turns = [threading.Event() for _ in range(4)]
        turns[0].set()

        def use(kv: KeyValues, order: tuple[int, ...] = order, turns: list[threading.Event] = turns) -> float:
            kv.init("w", torch.zeros(1))
            mine = order.index(kv.rank)
            assert turns[mine].wait(TIMEOUT_S)
            kv.push("w", torch.tensor([pushed[kv.rank]]))
            turns[mine + 1].set()
            return float(kv.pull("w").item())

        assert served("threads", 3, 1, use)[:3] == [0.0] * 3


def test_a_worker_that_is_a_step_late_does_not_mix_with_the_next_step() -> None:
    pushed_twice = threading.Event()

    def use(kv: KeyValues) -> list[float]:
        kv.init("w", torch.zeros(1))
        if kv.rank == 0:
            kv.push("w", torch.tensor([1.0]))
            kv.push("w", torch.tensor([10.0]))
            pushed_twice.set()
            return [kv.pull("w").item()]
        assert pushed_twice.wait(TIMEOUT_S)
        before = kv.pull("w").item()  # it has pushed nothing yet: nothing to wait for
        kv.push("w", torch.tensor([2.0]))
        first = kv.pull("w").item()
        kv.push("w", torch.tensor([20.0]))
        return [before, first, kv.pull("w").item()]

    assert served("threads", 2, 1, use)[:2] == [[30.0], [0.0, 3.0, 30.0]]


def test_a_value_may_come_from_several_devices_and_go_to_several() -> None:
    def use(kv: KeyValues) -> tuple[Any, ...]:
        kv.init("w", torch.zeros(2))
        kv.push("w", [torch.ones(2), torch.full((2,), 4.0)])
        targets = [torch.zeros(2), torch.zeros(2)]
        assert kv.pull("w", out=targets) is targets
        weight = nn.Parameter(torch.zeros(2))
        kv.pull("w", out=weight)
        return [target.tolist() for target in targets], weight.tolist()

    assert served("threads", 1, 2, use)[0] == ([[5.0, 5.0], [5.0, 5.0]], [5.0, 5.0])


@every_kind
def test_several_keys_may_be_given_at_once_in_any_order(kind: str) -> None:
    def use(kv: KeyValues) -> list[float]:
        kv.init(range(4), [torch.full((3,), float(key)) for key in range(4)])
        keys = [0, 1, 2, 3] if kv.rank else [3, 1, 0, 2]
        found = kv.pushpull(keys, [torch.full((3,), 10.0 * key + kv.rank) for key in keys])
        out = [torch.zeros(3) for _ in keys]
        kv.pull(keys, out=out)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, out, strict=True))
        return sorted(value[0].item() for value in found)

    assert served(kind, 2, 3, use)[:2] == [[1.0, 21.0, 41.0, 61.0]] * 2


@every_kind
def test_nobody_passes_a_barrier_before_all_have_come(kind: str) -> None:
    arrived, seen = [0] * 5, []

    def use(kv: KeyValues) -> None:
        for turn in range(5):
            arrived[turn] += 1
            kv.barrier()
            seen.append(arrived[turn])

    served(kind, 3, 2, use)
    assert seen == [3] * 15


# ---- optimizers


@every_kind
@pytest.mark.parametrize(("name", "arguments"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("AdamW", {"lr": 0.01})])
def test_servers_step_as_the_optimizer_of_torch_does_on_the_sum(
    kind: str, name: str, arguments: dict[str, Any]
) -> None:
    shapes = ((3, 4), (BIG,))
    pushed = [[torch.randn(3, *shape).unbind() for shape in shapes] for _ in range(3)]  # by step, key and worker

    def use(kv: KeyValues) -> list[Tensor]:
        kv.init(["small", "big"], [torch.ones(shape) for shape in shapes])
        kv.set_optimizer(name, **arguments)
        for step in pushed:
            kv.push(["small", "big"], [step[place][kv.rank] for place in range(2)])
        return kv.pull(["small", "big"])  # type: ignore[no-any-return]

    found = served(kind, 3, 2, use)[:3]
    for number, shape in enumerate(shapes):
        weight = nn.Parameter(torch.ones(shape))
        optimizer = OPTIMIZERS[name]([weight], **arguments)
        for step in pushed:
            first, second, third = step[number]
            weight.grad = first + second + third
            optimizer.step()
        torch.testing.assert_close(found[0][number], weight.detach(), rtol=1e-6, atol=1e-6)
        assert all(torch.equal(found[0][number], other[number]) for other in found[1:])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_value_that_is_cut_steps_like_one_that_is_not(name: str) -> None:
    """So each optimizer that servers may run does treat every number by itself."""
    gradients = torch.randn(3, BIG, generator=torch.Generator().manual_seed(0))

    def use(kv: KeyValues) -> Tensor:
        kv.init("w", torch.ones(BIG))
        kv.set_optimizer(name)
        for gradient in gradients:
            kv.push("w", gradient)
        return kv.pull("w")  # type: ignore[no-any-return]

    one, three = (served("threads", 1, servers, use)[0] for servers in (1, 3))
    assert (one != 1).any()
    torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-6)


def test_another_rate_keeps_the_momentum_and_another_optimizer_begins_anew() -> None:
    def use(kv: KeyValues) -> list[float]:
        kv.init("w", torch.zeros(1))
        seen = []
        for name, arguments in (
            ("SGD", {"lr": 1.0, "momentum": 0.5}),
            ("SGD", {"lr": 0.1, "momentum": 0.5}),
            ("RMSprop", {"lr": 0.1, "alpha": 0.0}),
        ):
            kv.set_optimizer(name, **arguments)
            kv.push("w", torch.ones(1))
            seen.append(round(kv.pull("w").item(), 4))
        return seen

    assert served("threads", 1, 1, use)[0] == [-1.0, -1.15, -1.25]


@every_kind
def test_asynchronous_pushes_are_applied_as_they_come(kind: str) -> None:
    """Nobody waits for the others, and nothing is lost."""
    alone = threading.Event()

    def use(kv: KeyValues) -> list[float]:
        kv.init("w", torch.zeros(BIG))
        kv.set_optimizer("SGD", lr=1.0)
        if kv.rank == 0:
            seen = [kv.pushpull("w", torch.ones(BIG)).unique().tolist() for _ in range(3)]
            assert seen == [[-1.0], [-2.0], [-3.0]]
            alone.set()
        assert alone.wait(TIMEOUT_S)
        for _ in range(4):
            kv.push("w", torch.ones(BIG))
        kv.barrier()
        return kv.pull("w").unique().tolist()  # type: ignore[no-any-return]

    assert served(kind, 3, 2, use, "dist_async")[:3] == [[-15.0]] * 3


# ---- rows, places and bytes


@every_kind
@pytest.mark.parametrize("shape", [(10, 3), (50_000, 2, 4), (4, 200_000)])
def test_some_rows_of_a_value_may_be_pulled(kind: str, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    rows = torch.tensor([[3, 0, 3], [shape[0] - 1, 1, 0]])

    def use(kv: KeyValues) -> tuple[Tensor, Tensor]:
        kv.init("w", torch.zeros(shape))
        kv.push("w", value)
        return kv.row_sparse_pull("w", rows), kv.row_sparse_pull("w", rows[0, :0])

    found, nothing = served(kind, 1, 3, use)[0]
    assert torch.equal(found, value[rows])
    assert nothing.shape == (0, *shape[1:])


def test_pulling_rows_moves_those_rows() -> None:
    def use(kv: KeyValues) -> tuple[int, int]:
        kv.init("w", torch.zeros(50_000, 8))
        kv.bytes_sent = kv.bytes_received = 0
        kv.row_sparse_pull("w", torch.tensor([5, 5, 49_999, 7]))
        return kv.bytes_sent, kv.bytes_received

    key = packed("w").numel()
    assert served("threads", 1, 2, use)[0] == (2 * (HEADER_BYTES + key) + 3 * 8, 2 * HEADER_BYTES + 3 * 8 * 4)


def test_bytes_per_server_are_within_a_tenth_of_each_other() -> None:
    sizes = [1 + 977 * n % 90_000 for n in range(60)] + [3_000_000, 1_000_003]

    def use(kv: KeyValues) -> None:
        kv.init([f"layer {n}" for n in range(len(sizes))], [torch.zeros(size) for size in sizes])

    *_, first, second, third = served("threads", 1, 3, use)
    assert first + second + third == 4 * sum(sizes)
    assert max(first, second, third) <= 1.1 * min(first, second, third)


@pytest.mark.parametrize(
    ("shape", "loads", "expected"),
    [
        ((3,), [5, 4, 4], [(1, 0, 3)]),  # small: where is least, the first of equals
        ((), [0, 0], [(0, 0, 1)]),
        ((CUT_BYTES // 4,), [9, 0], [(1, 0, CUT_BYTES // 4)]),  # just not large
        ((400_000,), [9, 0], [(0, 0, 200_000), (1, 200_000, 400_000)]),
        ((400_001,), [0], [(0, 0, 400_001)]),
        ((100, 10_000), [0, 0, 0], [(0, 0, 330_000), (1, 330_000, 660_000), (2, 660_000, 1_000_000)]),  # by rows
        ((3, 200_000), [0, 0], [(0, 0, 300_000), (1, 300_000, 600_000)]),  # too few rows for that
    ],
)
def test_where_a_value_goes(shape: tuple[int, ...], loads: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert [(part.server, part.start, part.stop) for part in place(shape, 4, loads)] == expected
