"""Scorers of the user and judges: asked once per distinct answer, after the answers, through faults and stops."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from bench_kit import suite
from PIL import Image

import saccade
from saccade.bench.grading import grade
from saccade.bench.judge import JudgeModel, parse
from saccade.bench.preparing import Prepared, prepare
from saccade.bench.records import SCORES, read
from saccade.bench.runner import Runner
from saccade.cli import bench
from saccade.errors import SaccadeError


class Endpoint:
    """An OpenAI-compatible endpoint on this machine; ``replies`` are given in turn, the last one again and again."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.replies: list[Any] = ["Score: 7"]
        self.lost = 0  # bytes by which every reply is cut short
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                outer.keys.append(self.headers["Authorization"])
                reply = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                status, said = reply if isinstance(reply, tuple) else (200, reply)
                found = {"choices": [{"message": {"content": said}}]} if status == 200 else {"error": {"message": said}}
                content = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content) + outer.lost))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    found = Endpoint()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.time.sleep", lambda seconds: None)
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Two questions with right answers, the first about a picture."""
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    colour = [{"from": "human", "value": "What colour?"}]
    rows = [
        {"id": "a", "image": "a.png", "conversations": colour, "reference": "red"},
        {"id": "b", "messages": [{"role": "user", "content": "Say two."}], "reference": ["two", "2"]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def ready(vlm: saccade.VLM, path: Path, judge: dict[str, Any] | None = None, **task: Any) -> Prepared:
    table = {"judge": judge} if judge else {}
    return prepare(suite(tasks=[{"name": "mine", "file": str(path), "scorer": "", **task}], **table), vlm)


def test_equal_answers_of_several_methods_are_judged_once_and_a_resumed_run_asks_nothing(
    vlm: saccade.VLM, mine: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    prepared = ready(vlm, mine, {"url": endpoint.url, "model": "grader", "concurrency": 1})
    run = Runner(prepared, tmp_path / "run").run()
    assert len(run.records) == 4
    assert len(endpoint.asked) == 2  # the chain's answers are plain decoding's
    assert [r.scores for r in run.records] == [{"judge": 0.7}] * 4
    first = endpoint.asked[0]
    assert (first["model"], first["temperature"]) == ("grader", 0)
    assert "Question: What colour?\nReference answer: red\n" in first["messages"][0]["content"]
    assert "Reference answer: two / 2\n" in endpoint.asked[1]["messages"][0]["content"]
    again = Runner(prepared, tmp_path / "run").run()
    assert len(endpoint.asked) == 2
    assert (
        [r.scores for r in again.records] == [r.scores for r in read(tmp_path / "run").records] == [{"judge": 0.7}] * 4
    )


def test_other_answers_to_a_judged_question_are_judged_each(
    vlm: saccade.VLM, mine: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    judge = {"url": endpoint.url, "model": "grader", "concurrency": 1}
    prepared = ready(vlm, mine, judge)
    run = Runner(prepared, tmp_path / "run").run()
    others = [replace(run.records[0], method=name, text=f"The {name} answer.") for name in ("first", "second")]
    endpoint.replies = ["Score: 1", "Score: 2"]
    graded = grade(replace(run, records=[*run.records, *others]), prepared.questions, JudgeModel(**judge))
    assert [r.scores["judge"] for r in graded.records] == [0.7] * 4 + [0.1, 0.2]


def test_a_judge_that_stops_in_between_is_asked_for_the_rest_only(
    vlm: saccade.VLM, mine: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    prepared = ready(vlm, mine, {"url": endpoint.url, "model": "m", "concurrency": 1, "retries": 1})
    endpoint.replies = ["10", (401, "no such key"), "5"]
    with pytest.raises(
        SaccadeError, match=r"refused the request \(401\): no such key; set its key in the variable OPEN"
    ):
        Runner(prepared, tmp_path / "run").run()
    assert len(read(tmp_path / "run").records) == 4
    run = Runner(prepared, tmp_path / "run").run()
    assert len(endpoint.asked) == 3
    assert sorted(r.scores["judge"] for r in run.records) == [0.5, 0.5, 1.0, 1.0]
    with (tmp_path / "run" / SCORES).open("rb+") as file:  # a kill in the middle of the last line
        file.seek(-9, 2)
        file.truncate()
    Runner(prepared, tmp_path / "run").run()
    assert len(endpoint.asked) == 4


def test_replies_that_are_under_way_at_a_fault_are_kept(
    vlm: saccade.VLM, mine: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    prepared = ready(vlm, mine, {"url": endpoint.url, "model": "m", "concurrency": 2})
    endpoint.replies = [(400, "too long"), "5"]
    with pytest.raises(SaccadeError, match=r"refused the request \(400\): too long\.$"):
        Runner(prepared, tmp_path / "run").run()
    Runner(prepared, tmp_path / "run").run()
    assert len(endpoint.asked) == 3  # both, and the refused one again


def test_passing_faults_are_tried_again_and_then_named(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(judge: JudgeModel) -> str:
        return judge.ask(judge.client(), [{"role": "user", "content": "x"}])

    monkeypatch.setenv("MY_KEY", "secret")
    judge = JudgeModel(endpoint.url, "m", key_env="MY_KEY", retries=3)
    endpoint.replies = [(429, "slow down"), (503, "busy"), "3"]
    assert judge.score(ask(judge)) == pytest.approx(0.3)
    assert endpoint.keys == ["Bearer secret"] * 3
    endpoint.replies = [(500, "broken")]
    with pytest.raises(SaccadeError, match=r"did not answer in 4 attempts: 500 broken; the answers are on disk"):
        ask(judge)
    endpoint.replies, endpoint.lost = ["1"], 9  # the connection ends within the reply
    with pytest.raises(SaccadeError, match=r"did not answer in 4 attempts: "):
        ask(judge)
    gone = JudgeModel("http://127.0.0.1:9/v1", "m", retries=0)
    with pytest.raises(SaccadeError, match=r"did not answer in 1 attempts: .*refused"):
        ask(gone)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("7", 0.7),
        ("{'pred': 'yes', 'score': 4.5}", 0.45),
        ("Of 12 points, I give the rating: 5", 0.5),
        ("<think>3 of 4</think> 8/10", 0.8),
        ("The reference has 3 items.</think> 8", 0.8),  # the template opens the thoughts
        ("<think>The reference has 3 items, and", None),  # cut off at max_tokens
        ("On a scale from 0 to 10, this deserves 8.", 0.8),
        ("Score (0-10): 8.", 0.8),
        ("Out of 10, I give 8.", 0.8),
        ("Score: -1", None),
        ("-2", None),
        ("I cannot say.", None),
        ("100", None),
    ],
)
def test_the_number_of_a_reply_is_found(reply: str, score: float | None) -> None:
    assert JudgeModel("http://x", "m").score(reply) == (None if score is None else pytest.approx(score))
    below_zero = JudgeModel("http://x", "m", low=-1, high=1)
    assert [below_zero.score(reply) for reply in ("Score: -1", "Grade: 1", "-1 to 1: 0.5")] == [0.0, 1.0, 0.75]


def test_a_reply_without_a_number_is_no_score_and_not_asked_for_again(
    vlm: saccade.VLM, mine: Path, endpoint: Endpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.replies = ["Good!"]
    prepared = ready(vlm, mine, {"url": endpoint.url, "model": "m"})
    run = Runner(prepared, tmp_path / "run").run()
    Runner(prepared, tmp_path / "run").run()
    assert len(endpoint.asked) == 2
    assert all(not r.scores for r in run.records)
    bench.run_suite(prepared, tmp_path / "run")
    assert "2 of 2 grades are missing: the judge's replies" in " ".join(capsys.readouterr().err.split())


def test_a_judge_of_pictures_sees_them_and_the_fields_of_the_row(
    vlm: saccade.VLM, mine: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    table = {"url": endpoint.url, "model": "m", "pictures": True, "template": "{id}: {answer} ({low} to {high})"}
    Runner(ready(vlm, mine, {**table, "low": 1, "high": 5, "concurrency": 1}), tmp_path / "run").run()
    picture, text = endpoint.asked[0]["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert text["text"].startswith("a: ")
    assert text["text"].endswith(" (1 to 5)")
    assert endpoint.asked[1]["messages"][0]["content"].startswith("b: ")
    mine.write_text(json.dumps({"messages": [{"role": "user", "content": "Say two."}]}))  # without a right answer
    Runner(ready(vlm, mine, {"url": endpoint.url, "model": "m"}), tmp_path / "open").run()
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"model": "m"}, "url is missing"),
        ({"url": "x", "model": "m"}, "url must begin with http"),
        ({"url": "http://x", "model": "m", "low": 5, "high": 5}, "low must be below high"),
        ({"url": "http://x", "model": "m", "concurrency": 0}, "concurrency must be a whole number of at least 1"),
        ({"url": "http://x", "model": "m", "key": "secret"}, "unknown key 'key'"),
    ],
)
def test_a_wrong_judge_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        parse(table, "judge.toml")


SCORER = """
CALLS = []

def length(answer, reference, row):
    CALLS.append(row["id"])
    return {"short": len(answer) < 1000, "known": reference is not None}

def broken(answer, reference, row):
    return row["grade"]

def large(answer, reference, row):
    return 7
"""


def test_a_scorer_of_the_user_gets_answer_reference_and_row(
    vlm: saccade.VLM, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_scores_a.py").write_text(SCORER)
    prepared = ready(vlm, mine, scorer="my_scores_a:length")
    for _ in range(2):
        run = Runner(prepared, tmp_path / "run").run()
        assert [r.scores for r in run.records] == [{"short": 1.0, "known": 1.0}] * 4
    from my_scores_a import CALLS

    assert sorted(CALLS) == ["a", "b"]


def test_a_fault_of_the_users_scorer_is_its_own_and_loses_no_answer(
    vlm: saccade.VLM, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_scores_b.py").write_text(SCORER)
    for function, words in (
        ("broken", "the scorer my_scores_b:broken failed with KeyError: 'grade'; the answers are on"),
        ("large", "the scorer my_scores_b:large must return numbers from 0 to 1, not 7; the"),
    ):
        with pytest.raises(SaccadeError, match=f"On prompt mine-[ab], {words}"):
            Runner(ready(vlm, mine, scorer=f"my_scores_b:{function}"), tmp_path / function).run()
        assert len(read(tmp_path / function).records) == 4


def test_another_judge_is_another_run_and_another_place_of_it_is_not(
    vlm: saccade.VLM, mine: Path, endpoint: Endpoint, tmp_path: Path
) -> None:
    Runner(ready(vlm, mine, {"url": endpoint.url, "model": "m"}), tmp_path / "run").run()
    Runner(ready(vlm, mine, {"url": f"{endpoint.url}/", "model": "m", "retries": 1}), tmp_path / "run").run()
    assert len(endpoint.asked) == 2
    with pytest.raises(SaccadeError, match=r"configuration differs \(judge.*model"):
        Runner(ready(vlm, mine, {"url": endpoint.url, "model": "other"}), tmp_path / "run").run()
