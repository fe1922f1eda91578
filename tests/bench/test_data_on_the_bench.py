"""Data sets, files of turns and scorers on the bench: what is asked, how it is reported, and that it repeats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_kit import suite
from PIL import Image
from typer.testing import CliRunner, Result

import saccade
from saccade.bench.preparing import prepare
from saccade.bench.questions import gather
from saccade.bench.records import read
from saccade.bench.report.tables import groups
from saccade.bench.runner import Runner
from saccade.bench.scorers import against
from saccade.cli import app, screen
from saccade.errors import SaccadeError
from tools.pocket.files import write_video

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Run `saccade bench` with the tiny pair, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "load_models", lambda *given, **options: vlm)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["bench", "--suite", "quick", "--methods", "chain", *map(str, arguments)])

    return run


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Say one.", "Say two."]},
    {"question_id": 82, "category": "writing", "turns": ["Say three.", "Say four."], "reference": ["3", "4"]},
    {"question_id": 83, "category": "writing", "turns": ["Say five.", "Say six."]},
    {"question_id": 321, "category": "qa", "turns": ["Who?"], "reference": ["Ann", "Bob"]},
]


def test_a_file_of_turns_is_read_by_its_content(tmp_path: Path) -> None:
    path = lines(tmp_path / "question.jsonl", SPEC_BENCH)
    found, missing = gather(suite(tasks=[{"name": "spec", "file": str(path)}]))
    assert not missing
    assert [(q.id, q.task, len(q.turns)) for q in found["spec"]] == [
        ("spec-81", "spec, writing", 2),
        ("spec-82", "spec, writing", 2),  # two of every category
        ("spec-321", "spec, qa", 1),
    ]
    second = found["spec"][1]
    assert [t.reference for t in second.turns] == ["3", "4"]
    assert found["spec"][2].turns[0].reference == ["Ann", "Bob"]
    assert found["spec"][2].turns[0].score is None  # nothing scores Spec-Bench's answers unless it is asked for
    (scored,) = gather(suite(tasks=[{"name": "spec", "file": str(path), "scorer": "match", "turns": 1}]))[0]["spec"][2:]
    assert scored.turns[0].score is not None
    assert scored.turns[0].score("Ann.")["exact"] == 1
    (tmp_path / "images" / "vqa").mkdir(parents=True)
    Image.new("RGB", (32, 32), "red").save(tmp_path / "images" / "vqa" / "a.png")
    row = {"id": "a", "image": "vqa/a.png", "turns": ["What?", "Sure?"], "category": "Lake", "topic": "general vqa"}
    (question,) = gather(suite(tasks=[{"name": "mm", "file": str(lines(tmp_path / "m.jsonl", [row]))}]))[0]["mm"]
    assert (question.id, question.task) == ("mm-a", "mm, general vqa")
    assert question.turns[0].images == (str(tmp_path / "images" / "vqa" / "a.png"),)
    path = lines(tmp_path / "question.jsonl", [*SPEC_BENCH, {"question_id": 5, "turns": "Say."}])
    with pytest.raises(SaccadeError, match=r"question\.jsonl, line 5: expected an object with turns"):
        gather(suite(tasks=[{"file": str(path)}], per_task=9))


def test_turns_of_a_file_are_a_chat_with_the_models_own_answers(vlm: saccade.VLM, tmp_path: Path) -> None:
    path = lines(tmp_path / "question.jsonl", SPEC_BENCH[:1] + SPEC_BENCH[3:])
    run = Runner(prepare(suite(tasks=[{"name": "spec", "file": str(path)}]), vlm), tmp_path / "run").run()
    assert {r.task for r in run.records} == {"spec, writing", "spec, writing, turn 2", "spec, qa"}
    assert [group.name for group in groups(run)][1:] == ["spec, writing", "spec, writing, turn 2", "spec, qa"]
    plain = {r.prompt_id: r for r in run.records if r.method == "plain"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Say one."}]},
        {"role": "assistant", "content": [{"type": "text", "text": plain["spec-81"].text}]},
        {"role": "user", "content": [{"type": "text", "text": "Say two."}]},
    ]
    alone = vlm.using("plain").generate(messages, max_new_tokens=12)
    assert plain["spec-81.2"].tokens == list(alone.tokens)
    assert all(r.equal for r in run.records if r.method == "chain")
    assert all(r.stats["reused_tokens"] > 0 for r in run.records if r.task.endswith("turn 2"))


def test_a_data_set_is_read_scored_and_resumed(invoke: Invoke, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    for colour in ("red", "blue"):
        Image.new("RGB", (32, 32), colour).save(tmp_path / f"{colour}.png")
    rows = [
        {"question": "What colour?", "picture": f"{c}.png", "label": c, "kind": "ab"[c == "red"]}
        for c in ("red", "blue")
    ]
    lines(tmp_path / "mine.jsonl", rows * 2)
    chosen = ["--dataset", "mine.jsonl", "--columns", "images=picture", "--columns", "reference=label"]
    chosen += ["--template", "<image> {question} ({kind})", "--where", "kind=b", "--scorer", "rouge-l", "-n", "6"]
    result = invoke(*chosen, "--out", "first")
    assert result.exit_code == 0, result.output
    first = read(tmp_path / "first")
    assert {(r.prompt_id, r.question, len(r.media)) for r in first.records} == {
        ("mine-0", "What colour? (b)", 1),
        ("mine-1", "What colour? (b)", 1),
    }
    assert all(list(r.scores) == ["rouge-l"] for r in first.records)
    assert "2 answers" not in invoke(*chosen, "--out", "first").output  # it is complete, and nothing runs again
    assert (tmp_path / "first" / "records.jsonl").read_text().count("\n") == 5


@pytest.mark.parametrize(("option", "value"), [("num_frames", 2), ("fps", 1.0)])
def test_a_video_is_sampled_as_its_task_says(vlm: saccade.VLM, tmp_path: Path, option: str, value: Any) -> None:
    pytest.importorskip("av", reason="videos need the video extra")
    frames = [Image.new("RGB", (96, 96), (20 * n, 0, 0)) for n in range(12)]
    write_video(tmp_path / "film.mp4", frames, fps=4)
    row = {"messages": [{"role": "user", "content": [{"type": "video", "video": "film.mp4"}, "What happens?"]}]}
    path = lines(tmp_path / "mine.jsonl", [row])
    prompts = {}
    for name, chosen in (("own", {}), ("few", {option: value})):
        entry = {"name": "films", "file": str(path), **chosen}
        run = Runner(prepare(suite(tasks=[entry], methods=["chain"]), vlm), tmp_path / name).run()
        prompts[name] = run.records[0].stats["prompt_tokens"]
        assert all(r.equal for r in run.records if r.method == "chain")
    assert prompts["few"] < prompts["own"]


def test_a_paper_decides_number_and_length_unless_the_command_line_does(invoke: Invoke, monkeypatch: Any) -> None:
    from saccade.bench import questions
    from saccade.data.reading import RowQuestion

    asked: list[int | None] = []

    def rows(data: Any, limit: int | None = None) -> Any:
        asked.append(limit)
        content = [{"type": "text", "text": "Say."}]
        return iter([RowQuestion(str(n), ([{"role": "user", "content": content}],)) for n in range(min(limit or 0, 2))])

    monkeypatch.setattr(questions, "read", rows)
    shown = invoke("--dataset", "iedit@tabed", "--plan").output
    assert "Prompts: iedit@tabed 2" in shown
    invoke("--dataset", "iedit@tabed", "--plan", "--per-task", "7")
    assert asked == [100, 7]  # not the suite's
    assert "iedit@tabed 2" in invoke("--tasks", "iedit@tabed", "--plan").output
    found = gather(suite(tasks=[{"dataset": "iedit@tabed"}], max_new_tokens=5))[0]["iedit@tabed"][0]
    assert found.options({"max_new_tokens": 5}) == {"max_new_tokens": 128}
    video = gather(suite(tasks=[{"dataset": "vdc@lvspec"}]))[0]["vdc@lvspec"][0]
    assert video.reading == {"num_frames": 64}
    video = gather(suite(tasks=[{"dataset": "vdc@lvspec", "fps": 1.0}]))[0]["vdc@lvspec"][0]
    assert video.reading == {"fps": 1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dataset", "textvq"), "did you mean textvqa?"),
        (("--split", "val"), "need --dataset or --data"),
        (("--dataset", "mmmu", "--tasks", "scene"), "each replace the suite's tasks; give one of them"),
        (("--dataset", "mmmu", "--columns", "image"), "--columns takes PART=COLUMN, not 'image'"),
        (("--dataset", "mmmu", "--columns", "answer=x"), "unknown column 'answer'"),
        (("--dataset", "mmmu", "--scorer", "cider"), "There is no scorer 'cider'; expected one of match, vqa"),
        (("--dataset", "mmmu", "--scorer", "nowhere:f"), "The scorer nowhere:f cannot be imported: No module named"),
        (("--dataset", "mmmu", "--dataset", "mmmu"), "A data set is named twice"),
        (("--data", "x.jsonl", "--template", "{a}"), "--template is for --dataset"),
        (("--data", "x.jsonl"), "Cannot read the prompts in x.jsonl: No such file or directory"),
        (("--dataset", "mmmu", "--num-frames", "4", "--fps", "1"), "num_frames and fps exclude each other"),
    ],
)
def test_contradictions_are_said_before_models_are_loaded(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(screen, "load_models", None)
    assert words in str(invoke(*arguments).exception)


@pytest.mark.parametrize(
    ("scorer", "answer", "reference", "score"),
    [
        ("vqa", "The RED!", ["red"] * 4 + ["blue"] * 6, 1.0),
        ("vqa", "red", ["red"] * 2 + ["blue"] * 8, 0.6),  # two agree: (2 * 1/3 + 8 * 2/3) / 10
        ("vqa", "two", ["2"] * 10, 1.0),
        ("rouge-l", "the cat sat", ["a dog", "the cat was sat"], 6 / 7),
        ("rouge-l", "", "x", 0.0),
        ("choice", "(B) because of A", "B", 1.0),
        ("choice", "The answer is C.", "B", 0.0),
        ("choice", "It is a dog.", "B", 1.0),
        ("choice", "cat or dog", "B", 0.0),
        ("choice", "Answer: B", "B", 1.0),
        ("choice", "I think the answer is B.", "B", 1.0),
        ("choice", "A dog is shown.", "B", 1.0),
        ("choice", "A, not B", "A", 1.0),
        ("choice", "A is right", "A", 1.0),
        ("choice", "B dog", "B", 1.0),
        ("yes-no", "Yes, there is no doubt.", "yes", 1.0),
        ("yes-no", "Perhaps.", "no", 0.0),
        ("anls", "1 May 1990", ["2 may 1990"], 0.9),
        ("anls", "June", ["2 may 1990"], 0.0),
        ("relaxed", "41%", "40", 1.0),
        ("relaxed", "43", "40", 0.0),
        ("relaxed", "Iron", "iron", 1.0),
    ],
)
def test_answers_are_scored_as_their_benchmarks_do(scorer: str, answer: str, reference: Any, score: float) -> None:
    found = against(scorer, reference, ["cat", "dog", "cow"])
    assert found is not None
    assert found(answer)[scorer] == pytest.approx(score)
