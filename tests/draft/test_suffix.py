"""Suffix decoding: matches of the text and of earlier answers, their trees, and the answers' bounds, keys and file."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import assert_consistent, token_paths

from harness import target
from saccade.draft import suffix
from saccade.draft.earlier_answers import TOKEN_BYTES, AnswerStore
from saccade.draft.lookup import END, IndexedText, tree_of
from saccade.draft.suffix import SuffixDrafter, SuffixSession
from saccade.draft.trees.policy import TopProposer
from saccade.engine import Engine, Request
from saccade.errors import MethodError
from saccade.inputs.families.family import Prompt
from saccade.methods import options
from saccade.methods.compositions import Models, compose
from saccade.options import SuffixOptions
from saccade.tree import DraftTree

FEW = st.lists(st.integers(0, 2), min_size=1, max_size=12)  # few tokens, so that n-grams come back
EAGER = SuffixOptions(min_token_prob=0.01)


def opened(options: SuffixOptions = EAGER, store: AnswerStore | None = None, rows: int = 1) -> SuffixSession:
    nothing: Any = None  # of the target
    return SuffixDrafter(options, store).open(rows, nothing)


def drafted(session: SuffixSession, ids: Sequence[int], key: str | None = "", row: int = 0) -> DraftTree:
    """The tree after a prompt, whose last token is the root."""
    session.begin(row, 0, key)
    session.load(row, Prompt(tuple(ids[:-1])), None)
    return session.propose([row], [[ids[-1]]], TopProposer(), 50)


# --------------------------------------------------------------------------- texts


@settings(max_examples=60, deadline=None)
@given(st.lists(FEW, min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 4), FEW, st.integers(1, 4))
def test_places_are_those_of_a_naive_search_in_the_texts_that_are_left(
    answers: list[list[int]], max_ngram: int, dropped: int, last: list[int], most: int
) -> None:
    text, whole = IndexedText(max_ngram), [token for answer in answers for token in (*answer, END)]
    text.append(whole)
    dropped = min(dropped, len(answers))
    start = sum(len(answer) + 1 for answer in answers[:dropped])
    text.drop(start)
    expected: list[int] = []
    for n in range(min(max_ngram, len(last)), 0, -1):
        places = range(len(whole) - 1, start + n - 1, -1)
        expected = expected or [place for place in places if whole[place - n : place] == last[-n:]][:most]
    assert text.ends(last, most) == expected
    assert [text[place] for place in range(start, len(text))] == whole[start:]


# --------------------------------------------------------------------------- trees


def test_the_longest_match_is_followed_first_and_others_beside_it() -> None:
    tree = drafted(opened(SuffixOptions(max_spec_factor=8)), [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 8, 1, 2, 3, 4])
    assert token_paths(tree, 0)[1] == (5,)
    assert (6,) in token_paths(tree, 0)
    assert_consistent(tree)


def test_a_longer_match_is_followed_further() -> None:
    said = list(range(100, 140))
    sizes = [drafted(opened(), [*said, 7, *said[10 : 10 + known]]).size for known in (1, 2, 4, 8)]
    assert sizes == [1, 5, 9, 17]  # the root, and two tokens per known one; a single one promises too little


def test_what_was_followed_by_too_many_tokens_is_not_drafted() -> None:
    noise = [token for other in range(10, 22) for token in (1, 2, other)]
    assert drafted(opened(), [*noise, 1, 2]).size == 1


def test_a_row_s_bounds_hold() -> None:
    said = list(range(100, 200))
    session = opened(SuffixOptions(gamma=6, total=4))
    assert drafted(session, [*said, *said[10:42]]).size == 5
    deep = opened(SuffixOptions(gamma=3))
    assert drafted(deep, [*said, *said[10:42]]).max_depth == 3
    assert deep.propose([0], [[said[42]]], TopProposer(), 2).max_depth == 2
    assert deep.propose([0], [[said[43]]], TopProposer(), 0).size == 1


def test_trees_of_several_rows_stand_in_one() -> None:
    device = suffix.CPU
    tree = tree_of([[(1, 0), (2, 0), (3, 0), (4, 1)], [(5, 0)], [(6, 0), (7, 0)]], device)
    assert_consistent(tree)
    assert [token_paths(tree, row) for row in range(3)] == [[(), (2,), (3,), (2, 4)], [()], [(), (7,)]]


def test_guesses_that_fail_are_made_no_more_and_return_once_they_hold() -> None:
    session = opened(SuffixOptions())
    said = list(range(100, 130))
    size = drafted(session, [*said, *said[:4]]).size
    assert size > 1
    for _ in range(150):  # what follows is never what followed
        drafted(session, [*said, *said[:4]])
        session.propose([0], [[7]], TopProposer(), 50)
    assert drafted(session, [*said, *said[:4]]).size == 1
    for _ in range(300):
        drafted(session, [*said, *said[:4]])
        session.propose([0], [[said[4]]], TopProposer(), 50)
    assert drafted(session, [*said, *said[:4]]).size == size


def test_what_one_key_s_guesses_come_to_changes_nothing_for_another() -> None:
    session = opened(SuffixOptions())
    said = list(range(100, 130))
    size = drafted(session, [*said, *said[:4]], "mine").size
    for _ in range(150):
        drafted(session, [*said, *said[:4]], "other")
        session.propose([0], [[7]], TopProposer(), 50)
    assert drafted(session, [*said, *said[:4]], "other").size == 1
    assert drafted(session, [*said, *said[:4]], "mine").size == size > 1


def test_rates_of_the_last_keys_alone_are_kept() -> None:
    drafter = SuffixDrafter(EAGER)
    first = drafter.rates("first")
    for number in range(suffix.KEYS - 1):
        drafter.rates(str(number))
    assert drafter.rates("first") is first  # and used last
    for number in range(suffix.KEYS):
        drafter.rates(f"new {number}")
    assert drafter.rates("first") is not first


def test_a_row_that_samples_neither_learns_from_others_nor_teaches_them() -> None:
    """Or its answer would depend on what came before it, whatever its seed."""
    session, said = opened(SuffixOptions()), list(range(100, 130))
    size = drafted(session, [*said, *said[:4]], None).size
    for key in ("", None):
        before = list(session._by.rates(""))
        for _ in range(150):
            drafted(session, [*said, *said[:4]], key)
            session.propose([0], [[7]], TopProposer(), 50)
        assert (session._by.rates("") == before) == (key is None)
    assert drafted(session, [*said, *said[:4]]).size == 1
    assert drafted(session, [*said, *said[:4]], None).size == size


# --------------------------------------------------------------------------- earlier answers


def test_answers_serve_rows_of_their_key_alone_and_none_that_samples() -> None:
    session = opened(rows=2)
    drafted(session, [1, 2, 3], "mine")
    session.end(0, [4, 5, 6, 7, 8])
    seen = {key: token_paths(drafted(session, [1, 2, 3], key, 1), 0)[-1] for key in ("mine", "other", "", None)}
    assert seen == {"mine": (4, 5, 6, 7, 8), "other": (), "": (), None: ()}
    session.end(1, [9, 9, 9])  # of the row that samples
    assert token_paths(drafted(session, [1, 2, 3], "mine"), 0)[-1] == (4, 5, 6, 7, 8)


def test_an_answer_is_kept_with_its_last_step_and_the_end_of_its_prompt() -> None:
    store = AnswerStore(2**20, 3)
    session = opened(store=store)
    drafted(session, range(50))
    session.propose([0], [[60, 61]], TopProposer(), 9)
    session.end(0, [60, 61, 62, 63])
    text = store.texts[""]
    assert text.last(len(text)) == [*range(50 - suffix.CONTEXT, 50), 60, 61, 62, 63, END]


def test_a_row_that_never_began_leaves_nothing() -> None:
    store = AnswerStore(2**20, 3)
    session = opened(store=store)
    drafted(session, [1, 2, 3])
    session.end(0, [])
    session.end(0, [1, 2])
    assert not store.tokens


def test_the_oldest_answers_go_first_and_memory_stays_within_its_bound() -> None:
    most = 4 * 2**20
    tracemalloc.start()
    store = AnswerStore(most, 3)
    before, peak = tracemalloc.get_traced_memory()[0], 0
    for number in range(120):
        store.add(f"{number % 3}", [(number * 100 + place * place) % 50_000 for place in range(100)])
        peak = max(peak, tracemalloc.get_traced_memory()[0] - before)
    tracemalloc.stop()
    assert most // 3 < peak < most
    kept = sum(text.held for text in store.texts.values())
    assert kept == store.tokens == most // TOKEN_BYTES // 101 * 101
    assert [text[text.start] for text in store.texts.values()] == [(120 - kept // 101 + n) * 100 for n in (0, 1, 2)]


def test_an_answer_longer_than_the_store_is_kept_in_part_and_a_store_of_nothing_keeps_none() -> None:
    store = AnswerStore(50 * TOKEN_BYTES, 3)
    store.add("", range(1000))
    assert store.tokens == 50
    none = AnswerStore(0, 3)
    none.add("", range(1000))
    assert (none.tokens, none.texts) == (0, {})


# --------------------------------------------------------------------------- a file of them


def test_answers_outlast_a_restart_by_key(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    session = opened(store=AnswerStore(2**20, 3, path, 99))
    for key in ("", "mine"):
        drafted(session, [1, 2, 3], key)
        session.end(0, [4, 5, 6, 7, 8 + len(key)])
    path.write_text(path.read_text() + '["", [1, 2')  # as a kill leaves it
    for _ in range(2):
        again = opened(store=AnswerStore(2**20, 3, path, 99))
        assert [token_paths(drafted(again, [1, 2, 3], key), 0)[-1][-1:] for key in ("", "mine")] == [(8,), (12,)]
        assert token_paths(drafted(again, [1, 2, 3], "other"), 0)[-1] == ()


def test_the_file_is_bounded_as_the_memory_is(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    store = AnswerStore(300 * TOKEN_BYTES, 3, path, 99)
    for number in range(50):
        store.add("", [number] * 99)
    lines = path.read_text().splitlines()
    assert len(lines) <= 1 + 2 * 3
    assert lines[-1] == f'["",{[49] * 99}]'.replace(" ", "")
    assert not list(tmp_path.glob("*.part"))
    assert AnswerStore(100 * TOKEN_BYTES, 3, path, 99).tokens == 100
    assert len(path.read_text().splitlines()) == 2


def test_nobody_else_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"

    def mode() -> str:
        return f"{path.stat().st_mode & 0o777:o}"

    path.with_name("answers.jsonl.part").touch(0o644)  # as a kill left it
    store = AnswerStore(2**20, 3, path, 99)
    assert mode() == "600"
    path.unlink()
    store.add("", [1, 2])
    assert mode() == "600"
    path.unlink()
    path.write_text('{"suffix store": 1, "vocab_size": 99}\n')  # as an earlier version wrote it
    AnswerStore(2**20, 3, path, 99)
    assert mode() == "600"


def test_a_file_of_something_else_or_of_another_vocabulary_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerStore(2**20, 3, path, 99).add("", [1, 2])
    before = path.read_text()
    with pytest.raises(MethodError, match="no store of suffix decoding for this model"):
        AnswerStore(2**20, 3, path, 100)
    assert path.read_text() == before
    path.write_bytes(b"\xff\xfe letters")
    with pytest.raises(MethodError, match="give another file"):
        AnswerStore(2**20, 3, path, 99)
    with pytest.raises(MethodError, match="give another file"):
        AnswerStore(2**20, 3, tmp_path, 99)


def test_answers_go_on_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    store = AnswerStore(2**20, 3, tmp_path / "folder" / "answers.jsonl", 99)
    (tmp_path / "folder" / "answers.jsonl").unlink()
    (tmp_path / "folder").rmdir()
    store.add("", [1, 2])
    assert store.tokens == 3


# --------------------------------------------------------------------------- in an engine

ASKED = Prompt((1, 20, 21, 22))


def passes(engine: Engine, **options: Any) -> int:
    (output,) = engine.generate([Request(ASKED, **options)], max_new_tokens=30)
    assert output.tokens == plain().generate([Request(ASKED)], max_new_tokens=30)[0].tokens
    return output.stats.target_passes


def plain() -> Engine:
    return Engine(target("llama"))


def test_an_engine_s_batches_share_answers_by_the_salt_of_their_requests() -> None:
    engine = Engine(target("llama"), SuffixDrafter(EAGER))
    first, again = passes(engine, salt="a"), passes(engine, salt="a")
    assert again < first / 2
    assert passes(engine, salt="b") == passes(Engine(target("llama"), SuffixDrafter(EAGER)))


def test_an_answer_that_no_later_request_can_use_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    engine = Engine(target("llama"), SuffixDrafter(EAGER, AnswerStore(2**20, 3, path, 99)))
    engine.generate([Request(ASKED).salted("once", is_last=True)], max_new_tokens=30)
    assert len(path.read_text().splitlines()) == 1
    engine.generate([Request(ASKED).salted("mine")], max_new_tokens=30)
    assert len(path.read_text().splitlines()) == 2


def test_other_options_of_the_method_use_the_same_store_of_a_file(tmp_path: Path) -> None:
    parts, values = Models(target("llama")), {**options("suffix", {}), "store": str(tmp_path / "answers.jsonl")}
    first, second = (compose(parts, {**values, "gamma": gamma}).drafter for gamma in (4, 8))
    assert first.store is second.store  # type: ignore[union-attr]


def test_rows_at_once_learn_from_each_other_s_answers_once_these_are_there() -> None:
    engine = Engine(target("llama"), SuffixDrafter(EAGER))
    batch = engine.open(2)
    engine.generate([Request(ASKED)], max_new_tokens=30, session=batch)
    outputs = engine.generate([Request(ASKED), Request(ASKED)], max_new_tokens=30, session=batch)
    assert outputs[0].tokens == outputs[1].tokens
    assert max(output.stats.target_passes for output in outputs) < 15
