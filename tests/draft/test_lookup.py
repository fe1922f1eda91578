"""Prompt lookup copies what a naive search of the whole text finds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import assert_consistent, token_paths

from saccade.draft.lookup import PromptLookup
from saccade.draft.trees.policy import TopProposer
from saccade.inputs.families.family import Prompt

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)  # few tokens, so that n-grams come back

NO_TARGET: Any = None  # lookup reads nothing of the target


def naive_guess(ids: list[int], gamma: int, max_ngram: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest last n-gram that has one, token by token, so that
    what is copied may be copied again."""
    for n in range(min(max_ngram, len(ids)), 0, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                text = list(ids)
                for _ in range(gamma):
                    text.append(text[len(text) - len(ids) + end])
                return text[len(ids) :]
    return []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(IDS, min_size=2, max_size=2),
    st.lists(st.lists(IDS, min_size=2, max_size=2), max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_guesses_are_those_of_a_naive_search(
    prompts: list[list[int]], blocks: list[list[list[int]]], gamma: int, max_ngram: int
) -> None:
    session = PromptLookup(gamma, max_ngram).open(2, NO_TARGET)
    texts = [list(p) for p in prompts]
    for row, ids in enumerate(prompts):
        session.load(row, Prompt(tuple(ids)), None)
    for block in blocks:
        tree = session.propose([0, 1], block, TopProposer(), gamma)
        assert_consistent(tree)
        for row in range(2):
            texts[row] += block[row]
            guess = naive_guess(texts[row], gamma, max_ngram)
            assert token_paths(tree, row)[-1] == tuple(guess)
            assert int(tree.tokens[row, 0]) == texts[row][-1]


@pytest.mark.parametrize("pattern", [[7], [5, 6], [1, 2, 3, 4, 5]])
def test_text_that_repeats_is_guessed_to_repeat_on(pattern: list[int]) -> None:
    text = pattern * 60
    session = PromptLookup(10, 3).open(1, NO_TARGET)
    session.load(0, Prompt(tuple(text[:40])), None)
    tree = session.propose([0], [text[40:41]], TopProposer(), 10)
    assert tree.tokens[0, 1:].tolist() == text[41:51]


def test_rows_that_take_no_part_leave_the_others_their_own_texts() -> None:
    session = PromptLookup(3, 2).open(3, NO_TARGET)
    for row, ids in enumerate([(5, 6, 5, 6), (1, 2, 1, 2), (3, 4, 3, 4)]):
        session.load(row, Prompt(ids), None)
    session.forget(0)
    tree = session.propose([2, 1], [[3], [1]], TopProposer(), 3)
    assert token_paths(tree, 0)[-1] == (4, 3, 4)
    assert token_paths(tree, 1)[-1] == (2, 1, 2)
    tree = session.propose([1], [[2]], TopProposer(), 3)
    assert token_paths(tree, 0)[-1] == (1, 2, 1)


def test_a_guess_ends_where_the_row_has_no_room() -> None:
    session = PromptLookup(5, 2).open(1, NO_TARGET)
    session.load(0, Prompt((1, 2, 1, 2)), None)
    assert token_paths(session.propose([0], [[1]], TopProposer(), 2), 0)[-1] == (2, 1)
    assert session.propose([0], [[2]], TopProposer(), 0).size == 1


def test_a_row_that_is_loaded_again_forgets_its_text() -> None:
    session = PromptLookup(3, 2).open(1, NO_TARGET)
    session.load(0, Prompt((1, 2, 3)), None)
    session.load(0, Prompt((4, 5)), None)
    assert session.propose([0], [[1]], TopProposer(), 3).size == 1


@pytest.mark.parametrize("options", [{"gamma": 0}, {"max_ngram": 0}])
def test_lookup_of_nothing_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="gamma and max_ngram of at least 1"):
        PromptLookup(**options)
