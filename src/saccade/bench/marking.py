"""Scores made once all answers are there: by functions of the user, and by a judge."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from saccade.bench import scorers
from saccade.bench.judge import Judge
from saccade.bench.records import RESUME, SCORES, Key, Record, Run, score_key, scored, stored_scores
from saccade.bench.turns import Question, Turn
from saccade.errors import InputError, SaccadeError
from saccade.files import writing
from saccade.journal import lock, whole_lines

JUDGE = "judge"
"""Name of a judge's score."""
_MEDIA = "media"


@dataclass(frozen=True, slots=True)
class Open:
    """Records whose answers have no score yet, one of every distinct answer."""

    users: list[Record]  # for the scorers of the user
    judged: list[Record]  # for the judge


def open_answers(run: Run, judge: Judge | None, turns: Mapping[str, Turn]) -> Open:
    """Return the answers that the user's scorers and the judge have not seen."""
    known = set(stored_scores(run.folder))
    users: dict[Key, Record] = {}
    judged: dict[Key, Record] = {}
    for record in run.records:
        turn = turns.get(record.prompt_id)
        if turn is None:
            continue
        if turn.scorer is not None:
            users.setdefault(score_key(turn.scorer, record), record)
        if judge is not None and (turn.reference is not None or not judge.needs_reference):
            judged.setdefault(score_key(JUDGE, record), record)
    return Open(*([r for key, r in found.items() if key not in known] for found in (users, judged)))


def turns_by_id(groups: Mapping[str, Sequence[Question]]) -> dict[str, Turn]:
    """Turns of a run's questions by the ids of their prompts."""
    return {q.turn_id(i): t for group in groups.values() for q in group for i, t in enumerate(q.turns)}


def mark(
    run: Run,
    groups: Mapping[str, Sequence[Question]],
    judge: Judge | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Complete the scores of a run, and return it with them.

    A score is stored as soon as it is there, so that another attempt asks for nothing twice.
    """
    turns = turns_by_id(groups)
    left = open_answers(run, judge, turns)
    if left.users or left.judged:
        with _Scores(run.folder) as scores:
            for record in left.users:
                scores.add(*_by_user(record, turns[record.prompt_id]))
            if left.judged and judge is not None:
                for done, (record, reply) in enumerate(_replies(judge, run, left.judged, turns), 1):
                    score = judge.score(reply)
                    scores.add(score_key(JUDGE, record), {} if score is None else {JUDGE: score}, reply)
                    progress(done, len(left.judged))
    return replace(run, records=scored(run.folder, run.records))


def _by_user(record: Record, turn: Turn) -> tuple[Key, dict[str, float]]:
    assert turn.scorer is not None
    try:
        found = scorers.apply(turn.scorer, scorers.users(turn.scorer), record.text, turn.reference, turn.row)
    except InputError as problem:
        raise SaccadeError(
            f"On prompt {record.prompt_id}, {str(problem).rstrip('.')}; the answers are on disk, so correct the scorer "
            "and run the same command again."
        ) from problem
    return score_key(turn.scorer, record), found


def _replies(
    judge: Judge, run: Run, records: Sequence[Record], turns: Mapping[str, Turn]
) -> Iterator[tuple[Record, str]]:
    """Yield the judge's replies as they come; after a fault those that are under way, then raise it."""

    def ask(record: Record) -> str:
        turn = turns[record.prompt_id]
        texts = {k: v for k, v in turn.row.items() if isinstance(v, (str, int, float)) and not isinstance(v, bool)}
        fields = {**texts, "question": turn.text, "reference": _shown(turn.reference), "answer": record.text}
        pictures = [run.folder / _MEDIA / name for name in record.media]
        return judge.ask(judge.messages(fields, pictures))

    with ThreadPoolExecutor(judge.concurrency, "judge") as pool:
        asked = {pool.submit(ask, record): record for record in records}
        fault: BaseException | None = None
        try:
            for future in as_completed(asked):
                if future.cancelled():
                    continue
                if (problem := future.exception()) is None:
                    yield asked[future], future.result()
                    continue
                fault = fault or problem
                for other in asked:
                    other.cancel()
        finally:
            for future in asked:
                future.cancel()
        if fault is not None:
            raise fault


def _shown(reference: Any) -> str:
    if isinstance(reference, (list, tuple)):
        return " / ".join(dict.fromkeys(map(str, reference)))
    return "" if reference is None else str(reference)


class _Scores:
    """The file of scores, held against other writers."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SCORES

    def __enter__(self) -> _Scores:
        with writing(self._path, advice=RESUME):
            self._file = self._path.open("ab")
        try:
            lock(self._file.fileno())
        except OSError:
            self._file.close()
            raise SaccadeError(f"Another run is writing to {self._path}; wait for it.") from None
        self._file.truncate(whole_lines(self._path))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, key: Key, scores: Mapping[str, float], reply: str | None = None) -> None:
        """Append the scores of an answer."""
        by, prompt, answer = key
        row = {"by": by, "prompt_id": prompt, "answer": answer, "scores": dict(scores)}
        if reply is not None:
            row["reply"] = reply
        with writing(self._path, advice=RESUME):
            self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
