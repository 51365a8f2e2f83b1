# SPDX-License-Identifier: Apache-2.0
"""The autopilot's decisions, by tables and by any numbers: which algorithm for which size, and who knows what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.autopilot import candidates, predictions
from unisono.comm.autopilot_choice import (
    WITHIN,
    Standing,
    Trial,
    choose,
    contenders,
    expected,
    size_class,
    trial_budget,
    trial_bytes,
    whose_memory,
)
from unisono.comm.autopilot_memory import Memory
from unisono.comm.autopilot_trials import share_a_clock, took
from unisono.comm.links import complete, project, rounds, slowest, spread
from unisono.comm.reducers.cost import Links, uniform
from unisono.core.membership import even

MB = 1 << 20
NAMES = ("direct", "ring", "tree", "halving")
seconds = st.floats(1e-7, 1e3)
tables = st.dictionaries(st.sampled_from(NAMES), seconds, min_size=1)


@st.composite
def decisions(draw: st.DrawFn) -> tuple[int, dict[str, float], list[Trial]]:
    sizes = st.integers(1, 1 << 30)
    trials = st.lists(st.builds(Trial, st.sampled_from(NAMES), sizes, seconds, seconds), max_size=8)
    return draw(sizes), draw(tables), draw(trials)


@given(decisions())
def test_nothing_is_chosen_that_is_predicted_far_behind_the_best(
    given: tuple[int, dict[str, float], list[Trial]],
) -> None:
    count, predicted, trials = given
    choice = choose(count, predicted, trials, "direct")
    is_near = choice.predicted_s <= WITHIN * min(predicted.values())
    assert is_near or choice.name == "direct", "which is always tried, so it may be known better"
    assert choice.predicted_s == predicted[choice.name]
    assert choice.because
    assert choice.because[-1] != "."


@given(decisions(), st.permutations(NAMES))
def test_the_choice_does_not_depend_on_the_order_of_the_candidates(
    given: tuple[int, dict[str, float], list[Trial]], order: list[str]
) -> None:
    count, predicted, trials = given
    shuffled = {name: predicted[name] for name in order if name in predicted}
    assert choose(count, predicted, trials, "direct").name == choose(count, shuffled, trials, "direct").name


@pytest.mark.parametrize(
    ("predicted", "tried", "chosen"),
    [
        ({"direct": 1.0}, {}, "direct"),
        ({"direct": 1.0, "ring": 0.5}, {}, "ring"),
        ({"direct": 1.0, "ring": 0.99}, {}, "direct"),  # not worth changing
        ({"direct": 1.0, "ring": 0.5}, {"direct": 0.4, "ring": 0.6}, "direct"),  # the trial knows better
        ({"direct": 1.0, "tree": 1.0}, {"direct": 1.0, "tree": 0.96}, "direct"),  # that may be noise
        ({"direct": 1.0, "tree": 1.0}, {"direct": 1.0, "tree": 0.94}, "tree"),
        ({"direct": 1.0, "ring": 0.5, "tree": 0.6}, {"ring": 0.9, "tree": 0.7}, "tree"),
        ({"direct": 1.0, "ring": 3.1}, {"direct": 1.0, "ring": 0.1}, "direct"),  # it should not have been tried
        ({"ring": 1.0, "tree": 1.0}, {"ring": 2.0, "tree": 1.5}, "tree"),  # without the usual one
    ],
)
def test_trials_beat_predictions_and_predictions_prune(
    predicted: dict[str, float], tried: dict[str, float], chosen: str
) -> None:
    trials = [Trial(name, MB, taken, predicted[name]) for name, taken in tried.items()]
    assert choose(MB, predicted, trials, "direct").name == chosen


def test_a_prediction_is_corrected_by_the_trials_of_the_nearest_size() -> None:
    trials = [Trial("ring", MB, 2.0, 1.0), Trial("ring", 64 * MB, 5.0, 1.0), Trial("direct", MB, 1.0, 1.0)]
    assert expected("ring", 2 * MB, 10.0, trials) == pytest.approx(20.0)
    assert expected("ring", 32 * MB, 10.0, trials) == pytest.approx(50.0)
    assert expected("tree", MB, 10.0, trials) == pytest.approx(10 * 2**0.5)  # as wrong as the others were at this size
    assert expected("tree", MB, 10.0, []) == 10.0


def test_what_a_trial_says_about_one_candidate_fades_with_the_distance_and_what_it_says_about_all_does_not() -> None:
    """As it was at 1 Gbit: with 1 MB `direct` took longer than predicted, with 64 MB it did not."""
    trials = [Trial("direct", MB, 2.4, 1.0), Trial("tree", MB, 1.0, 1.0)]
    predicted = {"direct": 600.0, "tree": 1000.0}
    assert choose(4 * MB, predicted, trials, "direct").name == "tree"
    assert choose(64 * MB, predicted, trials, "direct").name == "direct"
    slow_links = [Trial("direct", MB, 3.0, 1.0), Trial("tree", MB, 3.0, 1.0)]
    assert expected("direct", 64 * MB, 10.0, slow_links) == pytest.approx(30.0)


def test_the_reason_names_what_decides_and_the_runner_up() -> None:
    trials = [Trial("direct", 1024, 0.002, 0.001), Trial("tree", 1024, 0.0015, 0.001)]
    small = choose(1024, {"direct": 0.001, "tree": 0.001}, trials, "direct", floor_s=0.0009)
    assert small.because == "latency decides: fastest of 2 that were tried, 1.5 ms, direct 2 ms"
    large = choose(64 * MB, {"direct": 1.0, "tree": 9.0}, floor_s=0.0009)
    assert large.because == "bandwidth decides: predicted 1 s, tree 9 s"
    assert choose(1, {"direct": 1.0}).because == "there is no other that may be used here"


@given(st.integers(1, 1 << 40))
def test_sizes_of_one_class_differ_by_less_than_half(count: int) -> None:
    assert size_class(count) <= size_class(count + 1) <= size_class(2 * count)
    if count > 64:
        assert size_class(count) != size_class(int(1.5 * count))


def test_the_usual_one_is_tried_however_slow_it_is_predicted_and_believed_then() -> None:
    predicted = {"direct": 40.0, "halving": 2.0}
    assert contenders(predicted, "direct") == ["halving", "direct"]
    assert choose(MB, predicted, (), "direct").name == "halving"
    tried = [Trial("direct", MB, 1.0, 40.0), Trial("halving", MB, 2.0, 2.0)]
    assert choose(MB, predicted, tried, "direct").name == "direct"
    assert choose(4 * MB, predicted, tried, "direct").name == "direct", "also where nothing could be tried"


def test_contenders_come_with_the_best_first() -> None:
    assert contenders({"a": 2.0, "b": 1.0, "c": 3.1, "d": 3.0}) == ["b", "a", "d"]


def test_trials_of_long_vectors_shrink_until_they_fit() -> None:
    assert trial_bytes([(64 * MB, 4.0), (16 * MB, 1.0), (4 * MB, 0.25)], 2.5) == 16 * MB
    assert trial_bytes([(64 * MB, 4.0), (16 * MB, 1.0)], 0.1) == 16 * MB
    assert trial_budget({"a": 10.0, "b": 1.0}, 0.3, 1.0) == 0.3
    assert trial_budget({"a": 10.0, "b": 1.0}, 0.3, 0.1) == 0.1
    assert trial_budget({"a": 1e-4, "b": 1e-4}, 0.3, 1.0) < 0.1
    assert trial_budget({"a": 1.0}, 0.3, -1.0) == 0.0


@pytest.mark.parametrize(
    ("digests", "holder"),
    [
        ([0, 0, 0], None),  # the first generation
        ([7, 7, 7], 0),
        ([0, 7, 7], 1),  # somebody joined
        ([7, 8, 7], None),  # a trial was interrupted: some know more than others
    ],
)
def test_whoever_joins_is_told_what_the_others_know(digests: list[int], holder: int | None) -> None:
    assert whose_memory([Standing(digest) for digest in digests]) == holder


# --- links


@pytest.mark.parametrize("size", range(1, 18))
def test_in_a_tournament_everybody_meets_everybody_once(size: int) -> None:
    met: set[tuple[int, int]] = set()
    schedule = rounds(size) if size > 1 else []
    for partners in schedule:
        for rank, peer in enumerate(partners):
            if peer is not None:
                assert partners[peer] == rank != peer
                met.add((min(rank, peer), max(rank, peer)))
    assert len(met) == size * (size - 1) // 2
    assert len(schedule) == (0 if size == 1 else size - 1 + size % 2)
    assert len(spread(schedule, 5)) == min(5, len(schedule))


def test_pairs_that_were_not_measured_are_like_others_of_their_hosts() -> None:
    inf = float("inf")
    rows = [[inf, 1.0, 5.0, inf], [inf] * 4, [inf] * 4, [inf] * 4]
    table = complete(rows, ("a", "a", "b", "b"))
    assert table[0][1] == table[1][0] == 1.0
    assert table[1][3] == table[0][2] == 5.0
    assert table[2][3] == 3.0  # nobody on b was measured: the median of all


def two_hosts() -> Links:
    near, far = 1e9, 1e7
    rates = tuple(tuple(near if a // 2 == b // 2 else far for b in range(4)) for a in range(4))
    delays = tuple(tuple(1e-5 if a // 2 == b // 2 else 1e-3 for b in range(4)) for a in range(4))
    return Links(delays, rates, ("a", "a", "b", "b"), 1e-10, 1e-6, (4e8, 4e8, 4e8, 4e8))


def test_links_of_those_who_stay_are_kept_and_newcomers_are_like_their_neighbours() -> None:
    fewer = project(two_hosts(), (0, 1, 2, 3), (0, 2, 3), ("a", "b", "b"))
    assert fewer.latency_s[0][1] == 1e-3
    assert fewer.latency_s[1][2] == 1e-5
    assert fewer.together_bytes_per_s == (8e8, 4e8, 4e8)
    other = project(two_hosts(), (0, 1, 2, 3), (0, 7, 8), ("a", "a", "b"))
    assert other.latency_s[0][1] == 1e-5
    assert other.latency_s[0][2] == 1e-3
    assert other.bytes_per_s[1][2] == pytest.approx(1e7)


def test_the_slowest_link_is_that_of_a_megabyte() -> None:
    links = two_hosts()
    slow = [list(row) for row in links.bytes_per_s]
    slow[1][3] = slow[3][1] = 1e6
    assert slowest(Links(links.latency_s, tuple(map(tuple, slow)), links.hosts)) == (1, 3)


# --- trials


def test_who_comes_late_to_a_trial_is_not_counted_where_clocks_can_be_compared() -> None:
    spans = [(10.0, 13.5), (12.0, 13.0)]  # the second was not let in before
    assert took(spans, one_clock=True) == 1.5
    assert took(spans, one_clock=False) == 3.5
    assert share_a_clock(("a", "a"))
    assert not share_a_clock(("a", "b"))
    assert not share_a_clock(("", "")), "nobody knows where they are"


# --- model and memory


def test_hierarchical_is_a_candidate_only_where_hosts_have_several_workers_and_there_are_more_than_two() -> None:
    membership = even(1, (0, 1, 2, 3), 4)
    assert "hierarchical" in candidates(membership, ("a", "a", "b", "b"), exact=True)
    assert "hierarchical" not in candidates(membership, ("a", "b", "c", "d"), exact=True)
    assert "hierarchical" in candidates(membership, ("a",) * 4, exact=True)
    assert "hierarchical" not in candidates(even(1, (0, 1), 2), ("a",) * 2, exact=True)


def test_exact_mode_offers_only_what_keeps_the_bits() -> None:
    membership = even(1, (0, 1, 2), 4)
    exact, loose = (candidates(membership, ("",) * 3, exact) for exact in (True, False))
    assert {"ring", "backend"} <= set(loose)
    assert not {"ring", "backend"} & set(exact)
    assert "direct" in exact


def test_on_slow_far_links_few_messages_in_a_row_win_for_small_vectors() -> None:
    membership, names = even(1, tuple(range(8)), 8), ["direct", "ring"]
    far = uniform(8, latency_s=20e-3, bytes_per_s=12.5e6)
    small, large = (predictions(names, size, far, membership, False) for size in (1024, 256 * MB))
    assert choose(1024, small).name == "direct"
    assert small["ring"] > 5 * small["direct"]
    assert large["ring"] < 1.2 * large["direct"]


def test_memory_survives_the_journey_and_turns_to_other_members() -> None:
    trials = (Trial("direct", MB, 2.0, 1.0), Trial("hierarchical", MB, 3.0, 1.0))
    memory = Memory((0, 1, 2, 3), two_hosts(), ("ada", "ada", "bob", "bob"), trials, ("a", "a", "b", "b"), (40,))
    again = Memory.from_text(memory.as_text())
    assert again == memory
    assert again.digest == memory.digest
    assert not memory.is_projected
    assert memory.for_members((0, 1, 2, 3), ("a", "a", "b", "b"), lambda *_: 9.0) is memory
    fewer = memory.for_members((0, 1, 2), ("a", "a", "b"), lambda name, *_: 4.0 if name == "direct" else None)
    assert fewer.is_projected
    assert fewer.names == ("ada", "ada", "bob")
    assert fewer.trials == (Trial("direct", MB, 8.0, 4.0),)
