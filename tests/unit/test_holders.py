"""Who holds what a file holds, in few characters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint.holders import EVERY, HolderSets, files_of, holds, is_text, text_of

RANKS = st.one_of(
    st.sets(st.integers(0, 2000), min_size=1, max_size=40),
    st.builds(lambda first, count, step: set(range(first, first + count * step, step)), *[st.integers(1, 64)] * 3),
)


@given(RANKS, st.sets(st.integers(0, 4200), max_size=8))
def test_the_text_names_these_ranks_and_no_others(ranks: set[int], asked: set[int]) -> None:
    text = text_of(ranks)
    assert is_text(text)
    assert holds(text, asked) == bool(ranks & asked)
    assert {rank for rank in range(4200) if holds(text, [rank])} == ranks


@pytest.mark.parametrize(
    ("ranks", "text"), [(range(1024), "0-1023"), (range(3, 1024, 8), "3-1019:8"), ([5], "5"), ([7, 2], "2,7")]
)
def test_meshes_are_named_shortly(ranks: list[int], text: str) -> None:
    assert text_of(ranks) == text


def test_a_text_that_would_be_too_long_is_for_all() -> None:
    ranks = {number**2 for number in range(10_000)}
    assert text_of(ranks) == EVERY
    assert not is_text("1," * 50_000 + "1")


@pytest.mark.parametrize("text", ["", "-1", "1-", "1-2:0", "1,", "a", "1-2:3:4", "*,1", "9999999999", None, 7])
def test_other_texts_are_refused(text: object) -> None:
    assert not is_text(text)


@given(st.lists(RANKS.map(lambda ranks: tuple(sorted(ranks))), min_size=1, max_size=12))
def test_no_holder_of_a_group_is_lost(holders: list[tuple[int, ...]]) -> None:
    """Neither where there are too many groups for files of their own."""
    sets = HolderSets()
    numbers = sorted(sets.number(each) for each in holders)
    by_item = sets.groups(2, numbers).by_item()
    assert by_item.numbers[:2] == [0, 0]
    assert by_item.ranks[0] == ""
    assert len(by_item.ranks) <= 5
    by_number = {sets.number(each): each for each in holders}
    for number, group in zip(numbers, by_item.numbers[2:], strict=True):
        assert all(holds(by_item.ranks[group], [rank]) for rank in by_number[number])


def test_ranks_need_what_they_wrote_and_what_they_hold_too() -> None:
    writers = {"own-0": 0, "own-1": 1, "all": 0, "pair": 0, "unknown": None}
    holders = {"all": EVERY, "pair": "0,2"}
    assert files_of([1], writers, holders) == ["all", "own-1", "unknown"]
    assert files_of([2, 3], writers, holders) == ["all", "pair", "unknown"]
    assert files_of([0], writers, {}) == ["all", "own-0", "pair", "unknown"]
