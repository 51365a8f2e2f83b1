# SPDX-License-Identifier: Apache-2.0
"""What each codec costs and says: speed on one core, bytes, error, and the whole of a worker's share of a reduction.

python bench/codecs.py        # about a minute; --quick only shows that it works

The floor: a vector of float32 in memory is read at what the row `copy` shows, so no codec can be faster. A code pays
where bytes over the link take longer than encoding and decoding: at 100 Mbit/s (0.0125 GB/s) all of them do, at 10
Gbit/s (1.25 GB/s) only the first ones. PowerSGD has no code of its own: its products are timed, both directions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from measure import describe_setting, note, save, setting, table
from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.feedback import Memory
from unisono.comm.codecs.powersgd import PowerSGD, plan
from unisono.comm.reducers import compressing
from unisono.comm.threads import Hub, ThreadComm
from unisono.core.membership import even

CODECS = (
    "fp16", "bf16", "int8", "int8:stochastic", "int4", "int4:stochastic", "onebit", "topk:0.1", "topk:0.01",
    "topk:0.001", "randomk:0.1", "randomk:0.01", "powersgd:4",
)  # fmt: skip
MICROBATCHES = 4
Row = dict[str, float | str]


def gaussian(elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(0))


def heavy_tailed(elements: int) -> Tensor:
    """Student's t with 3 degrees of freedom, in tensors whose scales are far apart, as gradients of layers are."""
    generator = torch.Generator().manual_seed(1)
    squares = sum(torch.randn(elements, generator=generator).square() for _ in range(3)) / 3
    scale = torch.logspace(-3, 0, 16).repeat_interleave(-(-elements // 16))[:elements]
    return torch.randn(elements, generator=generator) / squares.sqrt() * scale


def matrices(elements: int) -> list[tuple[int, tuple[int, int]]]:
    return [(start, (1024, 1024)) for start in range(0, elements, 1 << 20)]


def best_s(work: Callable[[], object], rounds: int) -> float:
    """Of this thread's processor time: other programs do not show."""
    work()
    taken = []
    for _ in range(rounds):
        started_s = time.thread_time()
        work()
        taken.append(time.thread_time() - started_s)
    return min(taken)


def error(back: Tensor, vector: Tensor) -> float:
    return float((back - vector).double().norm() / vector.double().norm())


def measure_codec(text: str, elements: int, rounds: int) -> Row:
    codec = parse_codec(text).codec
    assert codec is not None
    if isinstance(codec, PowerSGD):  # random matrices have no low rank, so its error here would say nothing
        layout = plan(matrices(elements), elements, codec.rank)
        return {"codec": text, "ratio": elements / (layout.p_elements + layout.q_elements + layout.rest_elements)}
    code, back = torch.zeros(codec.length(elements), dtype=torch.uint8), torch.zeros(elements)
    row: Row = {"codec": text, "ratio": 4 * elements / len(code)}
    for name, vector in (("gaussian", gaussian(elements)), ("heavy_tailed", heavy_tailed(elements))):
        encode_s = best_s(lambda vector=vector: codec.encode(vector, code, 1), rounds)
        decode_s = best_s(lambda: codec.decode(code, back, 1), rounds)
        row[f"{name}_error"] = error(back, vector)
    return row | {"encode_gb_s": 4 * elements / encode_s / 1e9, "decode_gb_s": 4 * elements / decode_s / 1e9}


def measure_reduction(text: str, elements: int, rounds: int) -> Row:
    """All of the arithmetic of a reduction, by one worker that has all microbatches: M leaves and the result."""
    compression = parse_codec(text)
    comm, members = ThreadComm(Hub(), 0), even(1, (0,), MICROBATCHES)
    comm.reconfigure(members)
    shapes = matrices(elements)
    fresh = compressing.fresh(compression, [elements], MICROBATCHES, lambda _: shapes, torch.device("cpu"))
    memory = Memory(fresh)
    reducer = compressing.make(compression, comm, members, 1, memory, lambda _: shapes)
    leaves = [gaussian(elements) for _ in range(MICROBATCHES)]

    def work() -> None:
        memory.begin()
        reducer.begin(0)
        reducer.reduce(leaves, 0)
        reducer.commit()

    seconds = best_s(work, rounds)
    return {"reduction_s_per_gb": seconds / (4 * elements / 1e9) / MICROBATCHES}


def shown(row: Row, name: str, form: str) -> str:
    return f"{row[name]:{form}}" if name in row else "-"


def report(rows: Sequence[Row], copy_gb_s: float, megabytes: float) -> str:
    forms = (("encode_gb_s", ".2f"), ("decode_gb_s", ".2f"), ("ratio", ".1f"), ("gaussian_error", ".4f"),
             ("heavy_tailed_error", ".4f"), ("reduction_s_per_gb", ".2f"))  # fmt: skip
    header = ("codec", "encode GB/s", "decode GB/s", "fewer bytes", "error, gaussian", "error, heavy tails",
              "s a GB of leaves")  # fmt: skip
    body = [[str(row["codec"]), *(shown(row, name, form) for name, form in forms)] for row in rows]
    words = f"""GB of float32 in {megabytes:.0f} MB vectors, one thread; a copy runs at {copy_gb_s:.1f} GB/s. Errors are
norms over norms. The last column is the arithmetic of a whole reduction with everything the codec wants (feedback where
it does), per GB of one microbatch's gradients."""
    return f"{table(header, body)}\n\n{words}"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny vectors: only shows that it works")
    quick = parser.parse_args(arguments).quick
    torch.set_num_threads(1)
    where = setting("codecs.py", arguments)
    elements, rounds = (1 << 20, 2) if quick else (6 << 20, 7)
    vector, other = gaussian(elements), torch.zeros(elements)
    copy_gb_s = 4 * elements / best_s(lambda: other.copy_(vector), rounds) / 1e9
    rows = []
    for text in CODECS:
        note(text)
        rows.append(measure_codec(text, elements, rounds) | measure_reduction(text, elements, 1 + rounds // 3))
    text = f"# Codecs\n\n{describe_setting(where)}\n\n{report(rows, copy_gb_s, 4 * elements / 1e6)}"
    print(text)
    note(f"kept in {save('codecs', {'setting': where, 'copy_gb_s': copy_gb_s, 'codecs': rows}, text, quick)}")


if __name__ == "__main__":
    main(sys.argv[1:])
