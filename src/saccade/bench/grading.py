"""Scores made once all answers are there: by functions of the user, and by a judge."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from saccade.bench import scorers
from saccade.bench.judge import Judge
from saccade.bench.questions import Question, Turn
from saccade.bench.records import MEDIA, RESUME, SCORES, Key, Record, Run, score_key, scored, stored_scores
from saccade.errors import InputError, SaccadeError
from saccade.files import writing
from saccade.resumable import lock, whole_lines

JUDGE = "judge"
"""Name of a judge's score."""


def grade(
    run: Run,
    groups: Mapping[str, Sequence[Question]],
    judge: Judge | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Complete the scores of a run, and return it with them.

    A score is stored as soon as it is there, so that another attempt asks for nothing twice.
    """
    turns = {q.turn_id(i): turn for group in groups.values() for q in group for i, turn in enumerate(q.turns)}
    stored = stored_scores(run.folder)
    of_users: dict[Key, Record] = {}
    judged: dict[Key, Record] = {}
    for record in run.records:
        turn = turns.get(record.prompt_id)
        if turn is not None and turn.scorer is not None:
            of_users.setdefault(score_key(turn.scorer, record), record)
        if turn is not None and judge is not None and (turn.reference is not None or not judge.needs_reference):
            judged.setdefault(score_key(JUDGE, record), record)
    of_users, judged = ({k: r for k, r in found.items() if k not in stored} for found in (of_users, judged))
    if of_users or judged:
        with _appending(run.folder / SCORES) as add:
            for key, record in of_users.items():
                add(key, _by_user(record, turns[record.prompt_id]))
            if judge is not None and judged:
                replies = _replies(judge, run, list(judged.values()), turns)
                for done, (record, reply) in enumerate(replies, 1):
                    score = judge.score(reply)
                    add(score_key(JUDGE, record), {} if score is None else {JUDGE: score}, reply)
                    progress(done, len(judged))
    return replace(run, records=scored(run.folder, run.records))


def _by_user(record: Record, turn: Turn) -> dict[str, float]:
    assert turn.scorer is not None
    try:
        return scorers.apply(turn.scorer, scorers.users(turn.scorer), record.text, turn.reference, turn.row)
    except InputError as problem:
        raise SaccadeError(
            f"On prompt {record.prompt_id}, {str(problem).rstrip('.')}; the answers are on disk, so correct the scorer "
            "and run the same command again."
        ) from problem


def _replies(
    judge: Judge, run: Run, records: Sequence[Record], turns: Mapping[str, Turn]
) -> Iterator[tuple[Record, str]]:
    """Yield the judge's replies as they come; after a fault those that are under way, then raise it."""
    client = judge.client()

    def ask(record: Record) -> str:
        turn = turns[record.prompt_id]
        texts = {k: v for k, v in turn.row.items() if isinstance(v, (str, int, float)) and not isinstance(v, bool)}
        right = turn.reference if isinstance(turn.reference, (list, tuple)) else [turn.reference]
        reference = " / ".join(dict.fromkeys(str(one) for one in right if one is not None))
        fields = {**texts, "question": turn.text, "reference": reference, "answer": record.text}
        return judge.ask(client, judge.messages(fields, [run.folder / MEDIA / name for name in record.media]))

    with ThreadPoolExecutor(judge.concurrency, "judge") as pool:
        requests = {pool.submit(ask, record): record for record in records}
        fault: BaseException | None = None
        try:
            for future in as_completed(requests):
                if future.cancelled():
                    continue
                if (problem := future.exception()) is None:
                    yield requests[future], future.result()
                    continue
                fault = fault or problem
                for other in requests:
                    other.cancel()
        finally:
            for future in requests:
                future.cancel()
        if fault is not None:
            raise fault


@contextmanager
def _appending(path: Path) -> Iterator[Callable[..., None]]:
    """Hold the file of scores against other writers; yield a function that appends those of an answer."""
    with writing(path, advice=RESUME):
        file = path.open("ab")
    with file:
        try:
            lock(file.fileno())
        except OSError:
            raise SaccadeError(f"Another run is writing to {path}; wait for it.") from None
        file.truncate(whole_lines(path))

        def add(key: Key, scores: Mapping[str, float], reply: str | None = None) -> None:
            row: dict[str, Any] = {"by": key[0], "prompt_id": key[1], "answer": key[2], "scores": dict(scores)}
            if reply is not None:
                row["reply"] = reply
            with writing(path, advice=RESUME):
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

        yield add
