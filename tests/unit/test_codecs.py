# SPDX-License-Identifier: Apache-2.0
"""Codecs one by one: how far off they are, that no cut shows, that draws repeat, and that bad numbers stay bad."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.comm import tree
from unisono.comm.codecs import parse_codec
from unisono.comm.codecs.bf16 import BFloat16
from unisono.comm.codecs.clip import Clip
from unisono.comm.codecs.fp16 import Float16
from unisono.comm.codecs.int4 import Int4
from unisono.comm.codecs.int8 import Int8
from unisono.comm.codecs.noise import uniform_rows
from unisono.comm.codecs.onebit import OneBit
from unisono.comm.codecs.plain import Plain
from unisono.comm.codecs.powersgd import first_q, orthonormal_, plan
from unisono.comm.codecs.randomk import RandomK
from unisono.comm.codecs.seam import Codec, stride
from unisono.comm.codecs.topk import TopK
from unisono.comm.reducers.compressed import Homes, additions, even_slices
from unisono.core.errors import UsageError

CODECS: list[Codec] = [
    Plain(),
    Float16(),
    BFloat16(),
    Int8(),
    Int8(stochastic=True),
    Int4(),
    Int4(stochastic=True),
    OneBit(),
    TopK(0.01),
    TopK(0.3),
    TopK(0.001),
    RandomK(0.01),
    RandomK(0.25, unbiased=True),
]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
CPU = torch.device("cpu")
SIZES = [0, 1, 2, 3, 127, 128, 255, 257, 1023, 1025, 5000]


def values(length: int, seed: int = 0, heavy: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 7919 + length)
    drawn = torch.randn(length, generator=generator)
    return drawn / torch.rand(length, generator=generator).clamp_min(1e-3) if heavy else drawn


def encoded(codec: Codec, vector: Tensor, seed: int = 0, start: int = 0) -> Tensor:
    code = torch.full((codec.length(vector.numel()),), 0xAA, dtype=torch.uint8)
    codec.encode(vector, code, seed, start)
    return code


def there_and_back(codec: Codec, vector: Tensor, seed: int = 0) -> Tensor:
    back = torch.full_like(vector, 77.0)
    codec.decode(encoded(codec, vector, seed), back, seed)
    return back


def blocks(codec: Codec, vector: Tensor) -> Tensor:
    """(blocks, block), filled up with zeros."""
    missing = -vector.numel() % codec.block
    return torch.cat([vector, vector.new_zeros(missing)]).view(-1, codec.block)


def check_bound(codec: Codec, vector: Tensor, back: Tensor) -> None:
    """The bound that the codec's docstring states."""
    v, e = blocks(codec, vector), blocks(codec, back - vector).abs()
    largest, slack = v.abs().amax(1, keepdim=True), 1e-36
    if isinstance(codec, Plain):
        assert not e.any()
    elif isinstance(codec, Float16):
        assert (e <= (v.abs() * 2.0**-11).clamp_min(2.0**-25)).logical_or(v.abs() > 65504).all()
    elif isinstance(codec, BFloat16):
        assert (e <= v.abs() * 2.0**-8 + slack).all()
    elif isinstance(codec, Int8 | Int4):
        step = largest / (126.9 if isinstance(codec, Int8) else 6.9)
        assert (e <= step * (1.0 if codec.stochastic else 0.5) + slack).all()
    elif isinstance(codec, OneBit):
        bound = v.double().square().sum(1) - v.double().abs().sum(1).square() / codec.block
        assert (e.double().square().sum(1) <= bound + 1e-5 * v.double().square().sum(1) + slack).all()
    elif isinstance(codec, TopK):
        norm = v.double().square().sum(1)
        bound = (1 - codec.kept / codec.block) * norm + (2.0**-8) ** 2 * norm
        assert (e.double().square().sum(1) <= bound * (1 + 1e-6) + slack).all()


@every_codec
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 5), st.sampled_from([1e-30, 1e-3, 1.0, 100.0]), st.booleans())
def test_the_error_keeps_its_bound(codec: Codec, length: int, seed: int, scale: float, heavy: bool) -> None:
    vector = values(length, seed, heavy) * scale
    check_bound(codec, vector, there_and_back(codec, vector, seed))


@every_codec
@pytest.mark.parametrize("length", SIZES)
def test_every_byte_of_the_code_is_written_and_no_more_are_asked_for(codec: Codec, length: int) -> None:
    vector = values(length)
    one, other = (torch.full((codec.length(length),), fill, dtype=torch.uint8) for fill in (0, 255))
    codec.encode(vector, one, 5)
    codec.encode(vector, other, 5)
    assert torch.equal(one, other)
    assert codec.length(0) == 0
    assert codec.length(2 * codec.block) == 2 * codec.length(codec.block)


@every_codec
def test_the_code_of_a_slice_is_the_slice_of_the_code(codec: Codec) -> None:
    vector = values(7 * codec.block * max(1, 700 // codec.block) + 13, heavy=True)
    whole, decoded = encoded(codec, vector, 9), there_and_back(codec, vector, 9)
    rows = -(-vector.numel() // codec.block)
    for parts in (2, 3, 5):
        for part in even_slices(vector.numel(), codec.block, parts):
            mine = encoded(codec, vector[part].clone(), 9, part.start)
            assert torch.equal(mine, whole[codec.length(part.start) : codec.length(part.stop)])
            back = torch.zeros(part.stop - part.start)
            codec.decode(mine, back, 9, part.start)
            assert torch.equal(back, decoded[part])
    assert rows >= 7


@every_codec
def test_a_long_vector_worked_on_in_chunks_shows_no_seam(codec: Codec) -> None:
    border = stride(torch.empty(0), codec.block)
    vector = values(border + 3 * codec.block + 1)
    near = slice(border - codec.block, border + 2 * codec.block)
    back = torch.zeros(3 * codec.block)
    codec.decode(encoded(codec, vector[near].clone(), 3, near.start), back, 3, near.start)
    assert torch.equal(there_and_back(codec, vector, 3)[near], back)


@every_codec
def test_the_same_seed_gives_the_same_code_and_only_draws_care_for_another(codec: Codec) -> None:
    vector = values(5000)
    assert torch.equal(encoded(codec, vector, 1), encoded(codec, vector, 1))
    draws = isinstance(codec, RandomK) or getattr(codec, "stochastic", False)
    assert torch.equal(encoded(codec, vector, 1), encoded(codec, vector, 2)) != draws


@every_codec
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 777, 2600, 2999])
def test_what_is_not_finite_stays_so_and_spoils_its_own_block_only(codec: Codec, bad: float, place: int) -> None:
    vector = values(3000)
    vector[place] = bad
    spoilt = ~there_and_back(codec, vector, 4).isfinite()
    block = place // codec.block
    assert spoilt.any()
    assert not spoilt[: block * codec.block].any()
    assert not spoilt[(block + 1) * codec.block :].any()


@every_codec
def test_bad_numbers_everywhere_do_not_become_good_ones_where_anything_is_said(codec: Codec) -> None:
    vector = torch.full((3000,), torch.nan)
    back = there_and_back(codec, vector)
    said = back[back != 0] if isinstance(codec, TopK | RandomK) else back
    assert len(said)
    assert not said.isfinite().any()


@every_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 1e-38])
def test_zeros_and_the_smallest_numbers_decode_to_next_to_nothing(codec: Codec, value: float) -> None:
    assert there_and_back(codec, torch.full((1500,), value)).abs().max() <= 1e-36


@pytest.mark.parametrize("codec", [Int8(), Int8(stochastic=True), Int4(), Int4(stochastic=True), BFloat16(), TopK(0.5)])
def test_huge_finite_numbers_stay_finite_with_their_sign(codec: Codec) -> None:
    vector = torch.tensor([3.3e38, -3.3e38] * 600)
    back = there_and_back(codec, vector)
    assert back.isfinite().all()
    assert (back * vector.sign() >= 0).all()


def test_fp16_stops_at_its_largest_number_and_leaves_infinity_alone() -> None:
    back = there_and_back(Float16(), torch.tensor([1e6, -1e9, 65504.0, torch.inf, -torch.inf, 1.0]))
    assert back.tolist() == [65504.0, -65504.0, 65504.0, torch.inf, -torch.inf, 1.0]


@pytest.mark.parametrize("codec", [Int8(stochastic=True), Int4(stochastic=True), RandomK(0.25, unbiased=True)])
def test_rounding_at_random_is_right_on_average(codec: Codec) -> None:
    vector, rounds = values(512), 600
    total = sum((there_and_back(codec, vector, seed).double() for seed in range(rounds)), torch.zeros(512).double())
    if isinstance(codec, RandomK):
        deviation = vector.abs() * (codec.block - 1) ** 0.5
    else:  # a step half of the time at most
        steps = vector.view(-1, codec.block).abs().amax(1, keepdim=True) / (127 if isinstance(codec, Int8) else 7)
        deviation = (steps / 2).expand(-1, codec.block).reshape(-1)
    off = (total / rounds - vector) / (deviation / rounds**0.5)
    assert off.abs().max() < 5.0
    assert abs(float(off.mean())) < 0.15


def test_rounding_to_nearest_is_not_right_on_average_so_the_test_above_says_something() -> None:
    vector = values(512)
    assert (there_and_back(Int4(), vector) - vector).abs().mean() > 0.02


def test_draws_of_a_row_and_a_column_are_uniform_and_pairwise_independent() -> None:
    drawn = torch.stack([uniform_rows(seed, 3, 4, 4, CPU).view(-1) for seed in range(4000)])
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert (drawn.mean(0) - 0.5).abs().max() < 0.03
    correlation = torch.corrcoef(drawn.T) - torch.eye(16)
    assert correlation.abs().max() < 0.08


def test_random_k_draws_every_place_of_a_block_and_names_it_without_sending_it() -> None:
    codec = RandomK(0.1)
    hits = sum((there_and_back(codec, torch.ones(1000), seed) for seed in range(300)), torch.zeros(1000))
    assert codec.length(1000) == 200
    assert hits.view(-1, 10).sum(1).tolist() == [300.0] * 100
    assert hits.min() > 5
    assert hits.max() < 65


def test_top_k_keeps_the_largest_of_each_block() -> None:
    vector = values(2048)
    kept = there_and_back(TopK(0.01), vector).view(2, 1024)
    for row, back in zip(vector.view(2, 1024), kept, strict=True):
        assert set(back.nonzero().view(-1).tolist()) == set(row.abs().topk(10).indices.tolist())


# --- clipping


def test_clipping_limits_the_norm_to_the_share_and_leaves_short_vectors_alone() -> None:
    vector = values(10_000)
    long, short = vector.clone(), vector * 1e-4
    Clip(2.0).apply(long, 0.25)
    assert float(long.norm()) == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(long / long.norm(), vector / vector.norm())
    before = short.clone()
    Clip(2.0).apply(short, 0.25)
    assert torch.equal(short, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_clipping_does_not_hide_what_is_not_finite(bad: float) -> None:
    vector = values(5000)
    vector[4321] = bad
    Clip(1.0).apply(vector, 1.0)
    assert not vector.isfinite().all()


# --- low rank


def test_a_plan_of_low_rank_covers_a_bucket_exactly_once() -> None:
    layout = plan([(0, (64, 32)), (2048, (64,)), (2112, (8, 4, 3, 3)), (2400, (3, 5))], 2432, 2)
    pieces = [(m.start, m.start + m.rows * m.columns) for m in layout.matrices] + list(layout.rest)
    assert [m.start for m in layout.matrices] == [0, 2112]
    assert (layout.matrices[1].rows, layout.matrices[1].columns) == (8, 36)
    bounds = sorted(pieces)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == 2432
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))


def test_what_would_not_get_smaller_is_no_matrix() -> None:
    assert plan([(0, (4, 4)), (16, (100, 2)), (216, (7,))], 223, 4).matrices == ()


def test_power_iteration_finds_a_matrix_of_that_rank() -> None:
    layout = plan([(0, (40, 30))], 1200, 3)
    (matrix,) = layout.matrices
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(40, 3, generator=generator) @ torch.randn(3, 30, generator=generator)
    p = gradient @ layout.q_of(matrix, first_q(layout, 5, CPU))
    orthonormal_(p)
    torch.testing.assert_close(p.T @ p, torch.eye(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(p @ (gradient.T @ p).T, gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_orthonormal_basis_of_bad_numbers_is_all_bad(bad: float) -> None:
    p = torch.randn(20, 3)
    p[7, 1] = bad
    orthonormal_(p)
    assert p.isnan().all()


# --- who owns what, and in which order things are added


@given(st.integers(0, 5000), st.sampled_from([1, 100, 256, 1024]), st.integers(1, 9))
def test_homes_and_even_slices_cover_a_vector_in_whole_blocks(elements: int, block: int, count: int) -> None:
    homes = Homes.of(elements, block, count)
    for cut in (even_slices(elements, block, count), [homes.of_range(range(i, i + 1)) for i in range(count)]):
        assert cut[0].start == 0
        assert cut[-1].stop == elements
        assert all(one.stop == other.start for one, other in itertools.pairwise(cut))
        assert all(part.start % block == 0 or part.start == elements for part in cut)
    assert all(homes.of_range(range(i, i + 1)).stop - homes.of_range(range(i, i + 1)).start <= homes.each
               for i in range(count))  # fmt: skip


@given(st.integers(1, 40))
def test_adding_row_by_row_is_the_tree(microbatches: int) -> None:
    """Names instead of numbers: each level holds how its sum came about."""
    leaves = [(i, i + 1) for i in range(microbatches)]
    fold = tree.fold(leaves, microbatches)
    rows = [str(i) for i in range(microbatches)]
    for left, right in fold.merges:
        rows[left] = f"({rows[left]}+{rows[right]})"
    levels: dict[int, str] = {}
    for i, (level, merges) in enumerate(additions(fold, microbatches)):
        levels[level] = str(i)
        for upper in range(level, level - merges, -1):
            levels[upper - 1] = f"({levels[upper - 1]}+{levels[upper]})"
    assert levels[0] == rows[0]


# --- names


@pytest.mark.parametrize(
    ("text", "name", "feedback"),
    [
        ("none", "none", False),
        ("fp16", "fp16", False),
        ("bf16", "bf16", False),
        ("int8", "int8", False),
        ("int8:nearest", "int8", False),
        ("int8:stochastic", "int8:stochastic", False),
        ("int8,feedback", "int8,feedback", True),
        ("int4", "int4", True),
        ("int4:stochastic", "int4:stochastic", False),
        ("onebit", "onebit", True),
        ("topk", "topk:0.01", True),
        ("topk:0.05,nofeedback", "topk:0.05,nofeedback", False),
        ("randomk:0.1", "randomk:0.1", True),
        ("powersgd:2", "powersgd:2", True),
        ("clip:1.5", "clip:1.5", False),
        ("clip:1.5+onebit", "clip:1.5+onebit", True),
        ("clip:2+powersgd", "clip:2+powersgd:4", True),
    ],
)
def test_a_name_gives_the_codec_and_whether_it_wants_feedback(text: str, name: str, feedback: bool) -> None:
    compression = parse_codec(text)
    assert (compression.name, compression.feedback) == (name, feedback)
    assert parse_codec(name) == compression


def test_random_k_without_feedback_is_made_right_on_average() -> None:
    assert parse_codec("randomk:0.1,nofeedback").codec == RandomK(0.1, unbiased=True)
    assert parse_codec("randomk:0.1").codec == RandomK(0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topkk:0.01", "did you mean 'topk'?"),
        ("zip", "known are none, fp16, bf16, int8, int4, onebit, topk, randomk, powersgd, auto, clip"),
        ("topk:2", "a share above 0 and up to 0.5, such as topk:0.01"),
        ("topk:much", "'much' is not a number"),
        ("randomk:0", "out of range"),
        ("powersgd:1.5", "not a whole number"),
        ("int8:up", "int8:nearest or int8:stochastic"),
        ("fp16:3", "takes no value"),
        ("onebit,loud", "options are ,feedback and ,nofeedback"),
        ("clip", "a limit above 0"),
        ("clip:-1+int8", "out of range"),
        ("clip:1+clip:2", "there is no compression 'clip'"),
        ("none,feedback", "no option of none"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_codec(text)
    assert words in str(refused.value)


def test_checking_a_name_does_not_load_torch() -> None:
    program = "import sys\nfrom unisono.comm.codecs.spelling import read\nread('clip:1+topk:0.1')\n"
    done = subprocess.run(
        [sys.executable, "-c", program + "assert 'torch' not in sys.modules"], check=False, timeout=60
    )
    assert done.returncode == 0
