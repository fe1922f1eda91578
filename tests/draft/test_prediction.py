"""Drafts from a prediction: where they begin, how they survive wrong words, when they stay away, and their honesty."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.draft.best_first import Node
from saccade.draft.prediction import LEAST, MOST_NODES, Prediction

VOCAB, END = 1000, 1000


def some_text(seed: int) -> list[int]:
    """Tokens of which some are frequent."""
    random = Random(seed)
    return [int(800 * random.random() ** 2) for _ in range(400)]


TEXT = some_text(0)
FEW = st.lists(st.integers(0, 3), max_size=40)  # few tokens, so that n-grams come back


def prediction(text: Sequence[int] = TEXT, vocab_size: int = VOCAB + 1) -> Prediction:
    return Prediction(text, vocab_size, {END})


def paths(nodes: Sequence[Node]) -> list[tuple[int, ...]]:
    """The path to every node, the empty one first."""
    found: list[tuple[int, ...]] = [()]
    for token, parent, _ in nodes:
        found.append((*found[parent], token))
    return found


def accepted(nodes: Sequence[Node], answer: Sequence[int]) -> list[bool]:
    """Whether each node's path begins the rest of an answer."""
    return [path == tuple(answer[: len(path)]) for path in paths(nodes)[1:]]


def decode(expected: Prediction, answer: Sequence[int]) -> tuple[int, list[tuple[float, bool]]]:
    """Passes of an answer, and probability and outcome of every node."""
    place, passes, outcomes = 0, 0, []
    while place < len(answer):
        nodes = expected.draft(VOCAB)
        outcome = accepted(nodes, answer[place:])
        outcomes += [(node[2], hit) for node, hit in zip(nodes, outcome, strict=True)]
        step = answer[place : place + sum(outcome) + 1]
        expected.observe(step)
        place, passes = place + len(step), passes + 1
    return passes, outcomes


def with_errors(text: Sequence[int], rate: float, seed: int) -> list[int]:
    """A copy in which words of one to three tokens are replaced, left out or added."""
    random, copy, place = Random(seed), list[int](), 0
    while place < len(text):
        word = text[place : place + random.randint(1, 3)]
        place += len(word)
        if random.random() >= rate:
            copy += word
            continue
        kind = random.random()
        copy += word if kind > 0.9 else []
        copy += [random.randrange(VOCAB) for _ in range(random.randint(1, 3))] if kind > 0.1 else []
    return copy


def test_the_draft_begins_with_the_prediction_before_the_first_token() -> None:
    nodes = prediction().draft(VOCAB)
    assert paths(nodes)[-1] == tuple(TEXT[: len(nodes)])
    assert len(nodes) > 8
    assert len(prediction().draft(5)) == 5
    assert not prediction().draft(0)


def test_a_right_prediction_takes_few_passes_and_expects_the_end_behind_it() -> None:
    passes, outcomes = decode(prediction(), [*TEXT, END])
    assert passes == 2 + -(-(len(TEXT) - 1 - 16) // (MOST_NODES + 1)) - 1
    assert all(hit for _, hit in outcomes)


def test_each_of_several_ends_is_expected_behind_the_last_token() -> None:
    expected = Prediction(TEXT, VOCAB + 3, {END, END + 2})
    expected.observe(TEXT)
    nodes = expected.draft(VOCAB)
    assert [(token, parent) for token, parent, _ in nodes] == [(END, 0), (END + 2, 0)]
    assert sum(probability for *_, probability in nodes) <= 1
    silent = Prediction(TEXT, VOCAB)
    silent.observe(TEXT)
    assert not silent.draft(VOCAB)


@pytest.mark.parametrize("wrong", range(5))
@pytest.mark.parametrize("right", range(1, 5))
def test_a_match_survives_a_word_of_some_tokens_that_are_some_others_in_the_answer(wrong: int, right: int) -> None:
    expected = prediction([*TEXT[:60], *range(900, 900 + wrong), *TEXT[60:]])
    expected.observe([*TEXT[:60], *range(950, 950 + right), TEXT[60]])
    assert sum(accepted(expected.draft(VOCAB), TEXT[61:])) > 12


def test_a_draft_behind_a_wrong_token_has_branches_for_the_places_where_the_copy_may_go_on() -> None:
    for wrong in range(1, 3):
        expected = prediction([*TEXT[:60], *range(900, 900 + wrong), *TEXT[60:]])
        expected.observe([*TEXT[:60], 950])
        assert tuple(TEXT[60:62]) in paths(expected.draft(VOCAB))


@pytest.mark.parametrize("missing", range(1, 6))
def test_a_match_survives_words_that_the_answer_leaves_out(missing: int) -> None:
    expected = prediction([*TEXT[:60], *range(900, 900 + missing), *TEXT[60:]])
    expected.observe(TEXT[:61])
    assert sum(accepted(expected.draft(VOCAB), TEXT[61:])) > 16


def test_the_answer_may_leave_the_prediction_and_return_to_any_place_of_it() -> None:
    expected = prediction()
    expected.observe([*range(800, 840), *TEXT[200:203]])
    assert sum(accepted(expected.draft(VOCAB), TEXT[203:])) > 8
    expected.observe([*TEXT[203:220], *range(840, 880), *TEXT[100:103]])
    assert sum(accepted(expected.draft(VOCAB), TEXT[103:])) > 8


def test_a_draft_is_the_longer_the_more_tokens_have_been_right_lately() -> None:
    expected = prediction()
    sizes = [len(expected.draft(VOCAB))]
    for place in range(0, 30, 10):
        expected.observe(TEXT[place : place + 10])
        sizes.append(len(expected.draft(VOCAB)))
    assert sizes == [16, 26, 32, 32]
    expected.observe([*range(900, 905), *TEXT[200:203]])
    assert len(expected.draft(VOCAB)) <= 14


@pytest.mark.parametrize(("rate", "least"), [(0.0, 28), (0.05, 11), (0.15, 4.5)])
def test_tokens_a_pass_by_the_rate_of_wrong_words(rate: float, least: float) -> None:
    passes = sum(decode(prediction(with_errors(TEXT, rate, seed)), [*TEXT, END])[0] for seed in range(5))
    assert 5 * len(TEXT) / passes > least


def test_a_prediction_that_has_nothing_to_do_with_the_answer_is_soon_silent() -> None:
    for seed in range(5):
        expected = prediction()
        nodes = []
        for token in some_text(seed + 1):
            nodes.append(len(expected.draft(VOCAB)))
            expected.observe([token])
        assert sum(nodes[:4]) <= 40
        assert sum(nodes) < 0.3 * len(TEXT)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2])
def test_about_as_many_nodes_are_accepted_as_their_probabilities_say(rate: float) -> None:
    outcomes = []
    for seed in range(10):
        outcomes += decode(prediction(with_errors(TEXT, rate, seed)), [*TEXT, END])[1]
    for low, high in [(0.1, 0.5), (0.5, 0.8), (0.8, 1.0)]:
        some = [outcome for outcome in outcomes if low <= outcome[0] < high]
        expected, hits = (sum(column) / len(some) for column in zip(*some, strict=True))
        assert hits == pytest.approx(expected, abs=0.15)


def test_a_token_is_likelier_where_more_were_right() -> None:
    right, wrong = prediction(), prediction()
    right.observe(TEXT[:200])
    wrong.observe([token if place % 10 else 999 for place, token in enumerate(TEXT[:200])])
    for expected in (right, wrong):
        expected.observe(TEXT[200:215])
    assert right.draft(VOCAB)[9][2] > wrong.draft(VOCAB)[9][2] + 0.2


def test_no_id_beyond_the_vocabulary_is_drafted() -> None:
    expected = Prediction([5, 6, 7, VOCAB + 5, 8], VOCAB, {END})
    assert [token for token, *_ in expected.draft(VOCAB)] == [5, 6, 7]


def test_what_is_beyond_the_most_tokens_is_not_read_and_no_end_is_expected_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saccade.draft.prediction.MOST", 50)
    for size, after in ((50, [END]), (51, [])):
        expected = prediction(TEXT[:size])
        expected.observe(TEXT[:50])
        assert [token for token, *_ in expected.draft(VOCAB)] == after


@settings(max_examples=200, deadline=None)
@given(FEW, FEW, st.integers(0, 40), st.lists(st.integers(1, 6), max_size=40))
def test_drafts_are_trees_of_the_answer_s_tokens_alone(
    text: list[int], answer: list[int], limit: int, steps: list[int]
) -> None:
    expected, together = Prediction(text, 3, {2}), Prediction(text, 3, {2})
    for step in steps:
        expected.observe(answer[:step])
        nodes = expected.draft(limit)
        together.observe(answer[:step])
        answer = answer[step:]
        assert len(set(paths(nodes))) == len(nodes) + 1 <= MOST_NODES + 1
        assert all(len(path) <= limit for path in paths(nodes))
        for number, (token, parent, probability) in enumerate(nodes, 1):
            assert token < 3
            assert parent < number
            assert LEAST <= probability <= (nodes[parent - 1][2] if parent else 1.0) + 1e-9
    assert together.draft(40) == expected.draft(40)
