"""Intervals and flags against published values and against a brute-force count with whole numbers."""

import math
import random

import pytest

from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, log_chance, pooled

HONEST_AT_7_RANKS = [AccuracyCount(correct, 1429) for correct in (1290, 1276, 1301, 1268, 1294, 1283)]


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [  # R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_equals_the_published_values(correct: int, total: int, low: float, high: float) -> None:
    assert AccuracyCount(correct, total).interval() == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("correct", "total"), [(-1, 3), (4, 3), (0, -1)])
def test_impossible_counts_are_refused(correct: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"{correct} correct of {total}"):
        AccuracyCount(correct, total)


def brute_force(part: AccuracyCount, whole: AccuracyCount) -> float:
    """The same probability from binomial coefficients, as exact integers."""
    ways = {
        k: math.comb(whole.correct, k) * math.comb(whole.total - whole.correct, part.total - k)
        for k in range(part.total + 1)
    }
    above = part.correct * whole.total >= whole.correct * part.total
    tail = sum(way for k, way in ways.items() if (k >= part.correct if above else k <= part.correct))
    return min(1.0, 2 * tail / math.comb(whole.total, part.total))


def test_chance_probability_equals_a_count_with_whole_numbers() -> None:
    draw = random.Random(0)
    for _ in range(300):
        part = AccuracyCount(draw.randint(0, n := draw.randint(0, 60)), n)
        rest = AccuracyCount(draw.randint(0, m := draw.randint(0, 200)), m)
        assert math.exp(log_chance(part, part + rest)) == pytest.approx(brute_force(part, part + rest), rel=1e-9)
    part, whole = AccuracyCount(1215, 1429), AccuracyCount(8937, 10000)  # of a test set
    assert math.exp(log_chance(part, whole)) == pytest.approx(brute_force(part, whole), rel=1e-6)


def test_a_bad_rank_does_not_make_the_honest_ones_look_too_good() -> None:
    honest = [AccuracyCount(900, 1000), AccuracyCount(895, 1000), AccuracyCount(910, 1000)]
    bad = AccuracyCount(800, 1000)
    assert math.exp(log_chance(honest[2], pooled([*honest, bad]))) < 0.01 / 4  # at first sight
    assert deviates([*honest, bad]) == [False, False, False, True]


def test_the_order_of_extremes_survives_probabilities_too_small_for_a_float() -> None:
    honest = [AccuracyCount(9000, 10000), AccuracyCount(8990, 10000), AccuracyCount(9010, 10000)]
    whole = pooled([*honest, AccuracyCount(500, 10000)])
    assert math.exp(log_chance(AccuracyCount(500, 10000), whole)) == math.exp(log_chance(honest[2], whole)) == 0.0
    assert deviates([*honest, AccuracyCount(500, 10000)]) == [False, False, False, True]


def test_the_level_is_shared_among_the_ranks() -> None:
    """3 of 3 wrong against 9 of 9 right has probability 2/220 = 0.0091: enough alone, not with a second comparison."""
    counts = [AccuracyCount(0, 3), AccuracyCount(9, 9)]
    assert math.exp(log_chance(counts[0], pooled(counts))) == pytest.approx(2 / 220)
    assert deviates(counts) == [False, False]
    assert deviates(counts, level=0.02) == [True, True]


@pytest.mark.parametrize(
    "counts",
    [
        [],
        [AccuracyCount(7, 10)],
        [AccuracyCount(0, 0)] * 3,
        [AccuracyCount(5000, 5000)] * 2,
        [AccuracyCount(0, 5000), AccuracyCount(0, 1)],
        [AccuracyCount(4000, 5000), AccuracyCount(0, 0)],
    ],
)
def test_degenerate_counts_are_never_flagged(counts: list[AccuracyCount]) -> None:
    assert deviates(counts) == [False] * len(counts)
    assert all(math.isnan(count.accuracy) and count.interval() == (0.0, 1.0) for count in counts if not count.total)


def test_only_the_planted_rank_is_flagged_and_of_two_both_or_none() -> None:
    assert deviates([*HONEST_AT_7_RANKS, AccuracyCount(1280, 1429)]) == [False] * 7
    assert deviates([*HONEST_AT_7_RANKS, AccuracyCount(1180, 1429)]) == [False] * 6 + [True]
    assert deviates([AccuracyCount(900, 1000), AccuracyCount(800, 1000)]) == [True, True]
    assert deviates([AccuracyCount(900, 1000), AccuracyCount(890, 1000)]) == [False, False]
