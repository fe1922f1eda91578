"""Scores made once all answers are there: by functions of the user, and by a judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from saccade.bench import scorers
from saccade.bench.judge import JudgeModel
from saccade.bench.questions import Question, UserTurn
from saccade.bench.records import MEDIA, SCORES, Key, LineFile, Record, RecordedRun, score_key, scored, stored_scores
from saccade.errors import InputError, SaccadeError

JUDGE = "judge"  # name of a judge's score


def grade(
    run: RecordedRun,
    groups: Mapping[str, Sequence[Question]],
    judge: JudgeModel | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RecordedRun:
    """Complete the scores of a run, and return it with them.

    A score is stored as soon as it is there, so that another attempt asks for nothing twice.
    """
    turns = {q.turn_id(i): turn for group in groups.values() for q in group for i, turn in enumerate(q.turns)}
    stored = stored_scores(run.folder)
    of_users: dict[Key, Record] = {}
    judged: dict[Key, Record] = {}
    for record in run.records:
        turn = turns.get(record.prompt_id)
        if turn is None:
            continue
        if turn.scorer is not None and (key := score_key(turn.scorer, record)) not in stored:
            of_users.setdefault(key, record)
        is_judged = judge is not None and (turn.reference is not None or not judge.needs_reference)
        if is_judged and (key := score_key(JUDGE, record)) not in stored:
            judged.setdefault(key, record)
    if not (of_users or judged):
        return replace(run, records=scored(run.folder, run.records))
    with LineFile(run.folder / SCORES) as file:
        for key, record in of_users.items():
            turn = turns[record.prompt_id]
            assert turn.scorer is not None
            try:
                found = scorers.apply(turn.scorer, scorers.users(turn.scorer), record.text, turn.reference, turn.row)
            except InputError as problem:
                raise SaccadeError(
                    f"On prompt {record.prompt_id}, {str(problem).rstrip('.')}; the answers are on disk, so correct "
                    "the scorer and run the same command again."
                ) from problem
            file.add(_row(key, found))
        if judge is not None and judged:
            for done, (record, reply) in enumerate(_replies(judge, run, list(judged.values()), turns), 1):
                score = judge.score(reply)
                file.add({**_row(score_key(JUDGE, record), {} if score is None else {JUDGE: score}), "reply": reply})
                progress(done, len(judged))
    return replace(run, records=scored(run.folder, run.records))


def _row(key: Key, scores: Mapping[str, float]) -> dict[str, Any]:
    return {"by": key[0], "prompt_id": key[1], "answer": key[2], "scores": dict(scores)}


def _replies(
    judge: JudgeModel, run: RecordedRun, records: Sequence[Record], turns: Mapping[str, UserTurn]
) -> Iterator[tuple[Record, str]]:
    """Yield the judge's replies as they come; after a fault those that are under way, then raise it."""
    client = judge.client()

    def ask(record: Record) -> str:
        turn = turns[record.prompt_id]
        texts = {k: v for k, v in turn.row.items() if isinstance(v, (str, int, float)) and not isinstance(v, bool)}
        right = scorers.listed(turn.reference)
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
