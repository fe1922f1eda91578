"""What is written: the target's own answers, for the right questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_lines import asks, rows, shaped, talks

import saccade
from checkpoints import ready, vlm
from saccade.distill import distill, read_answers
from saccade.distill.planning import Options, PlannedQuestion
from saccade.distill.run import QuestionWorker, Setup
from saccade.errors import InputError, MethodError, SaccadeError
from saccade.output import Output

Written = Callable[..., Path]


def run(source: Path, **options: Any) -> Path:
    out = source.parent / options.pop("out", "out")
    target = options.pop("target", vlm("llava", method="plain"))
    distill(target, source, out, **{"max_new_tokens": 8, "batch": 3, "media_root": out.parent / "images", **options})
    return out


def test_answers_are_the_targets_own_one_by_one(written: Written, pictures: Path) -> None:
    source = written(
        *(asks(f"What {'x' * n}?", image, name=f"{image}{n}") for n in range(5) for image in ("a.png", "b.png")),
        asks("No picture?"),
    )
    out = run(source, sampled_share=0.4, temperature=1.5)
    options = Options(sampled_share=0.4, temperature=1.5, max_new_tokens=8)
    answers = read_answers(out)
    assert len(answers) == 11
    assert {a.temperature for a in answers} == {0.0, 1.5}
    target = vlm("llava", method="plain")
    for answer in answers:
        alone = target.generate(
            answer.messages, seed=options.seed_of(answer.id), **options.decoding(answer.temperature > 0)
        )
        assert answer.answer_ids == alone.tokens
        assert answer.prompt_tokens == len(target.processor.prompt(answer.messages))
        assert answer.answer == alone.text == target.processor.decode(answer.answer_ids)
        assert answer.finish == "length"


def test_neither_a_drafter_nor_an_array_changes_an_answer(written: Written, pictures: Path) -> None:
    prompts = [asks("A é?", "a.png", name="a"), talks("b", ("One?", "1"), ("Two?", "2")), asks("C?", name="c")]
    plain = run(written(*prompts), sampled_share=0)
    array = written(json.dumps(prompts, indent=1, ensure_ascii=False), name="array.json")
    drafted = run(array, sampled_share=0, out="drafted", target=vlm("llava", "llava-draft", "chain"))
    assert rows(plain) == rows(drafted)
    assert json.loads((drafted / "distill.json").read_text())["method"]["method"] == "chain"


def test_the_seed_of_a_question_is_its_ids_and_its_draws_are_its_own(written: Written, pictures: Path) -> None:
    lines = [asks(f"What {'x' * n}?", name=f"q{n}") for n in range(6)]
    one = shaped(run(written(*lines), sampled_share=1))
    other = shaped(run(written(*reversed(lines)), sampled_share=1, batch=2, out="other"))
    assert one == other
    assert one != shaped(run(written(*lines), sampled_share=1, seed=1, out="seed"))


def test_histories_hold_the_reference_or_the_targets_own_answers(written: Written, pictures: Path) -> None:
    source = written(talks("x", ("<image>\nOne?", "first"), ("Two?", "second"), ("Three?", "third"), image="a.png"))
    reference, own = shaped(run(source)), shaped(run(source, history="own", out="own"))
    histories = ([m["content"][0].get("text") for m in rows["x/3"]["messages"][1::2]] for rows in (reference, own))
    assert [*histories] == [["first", "second"], [own["x/1"]["answer"], own["x/2"]["answer"]]]
    assert own["x/1"] == reference["x/1"]
    assert own["x/3"]["answer_ids"] != reference["x/3"]["answer_ids"], "the history counts"


def test_the_same_question_is_asked_once(written: Written, pictures: Path) -> None:
    source = written(
        asks("What?", "a.png", name="one"),
        asks("What?", "same.png", name="two"),
        asks("What?", "b.png", name="three"),
        talks("four", ("<image>\nWhat?", "It."), ("Why?", "So."), image="a.png"),
        talks("five", ("<image>\nWhat?", "It."), ("How?", "So."), image="same.png"),
    )
    report = distill(vlm("llava", method="plain"), source, source.parent / "out", media_root=pictures, max_new_tokens=4)
    assert report.duplicates == 3
    assert set(shaped(report.out)) == {"one", "three", "four/2", "five/2"}
    own = shaped(run(source, history="own", out="own"))
    assert own["five/2"]["messages"][1]["content"][0]["text"] == own["one"]["answer"]


def test_ids_are_unique_whatever_the_lines_say(written: Written, pictures: Path) -> None:
    out = run(written(asks("A", name="x"), asks("B", name="x"), asks("C"), asks("D", name="x@2")))
    assert set(shaped(out)) == {"x", "x@2", "line-3", "x@2@4"}
    two = (("One?", "1"), ("Two?", "2"))
    lines = [talks("a", *two), asks("Three?", name="a/1"), asks("Four?", name="b/2"), talks("b", *two[::-1])]
    out = run(written(*lines), out="turns")
    whole = (out / "answers.jsonl").read_bytes()
    assert set(shaped(out)) == {"a/1", "a/2", "a/1@2", "b/2", "b@4/1", "b@4/2"}
    assert shaped(out)["a/1@2"]["messages"][-1]["content"] == [{"type": "text", "text": "Three?"}]
    (out / "answers.jsonl").write_bytes(whole[: len(whole) // 2])
    run(written(*lines), out="turns")
    assert (out / "answers.jsonl").read_bytes() == whole


def test_limit_asks_the_first_questions(written: Written, pictures: Path) -> None:
    source = written(talks("x", ("One?", "1"), ("Two?", "2")), asks("Three?", name="y"), "not read any more")
    assert set(shaped(run(source, limit=3))) == {"x/1", "x/2", "y"}
    assert set(shaped(run(source, limit=1, out="one"))) == {"x/1"}


def test_bad_lines_stop_the_run_or_are_left_out(written: Written, pictures: Path) -> None:
    (pictures / "broken.png").write_bytes(b"no picture")
    lines = [
        asks("Good?", "a.png", name="good"),
        "{",
        asks("Gone?", "gone.png"),
        asks("Broken?", "broken.png"),
        asks("Long " * 400, name="long"),
        asks("Fine?", name="fine"),
        talks("x", ("<image>\nOne?", "1"), ("Two?", "2"), image="broken.png"),
    ]
    for number, reason in {2: "not valid JSON", 3: "gone.png does not exist", 4: "not an image"}.items():
        source = written(lines[0], *[""] * (number - 2), lines[number - 1])
        skip = r"on_bad_line='skip' \(--on-bad-line skip on the command line\)"
        with pytest.raises(SaccadeError, match=f"line {number}.*{reason}.*{skip}"):
            run(source, out=f"stop{number}")
    source = written(*lines[:2], *lines[3:])
    options: dict[str, Any] = {"media_root": pictures, "on_bad_line": "skip", "history": "own"}
    report = distill(vlm("llava", method="plain"), source, source.parent / "out", max_new_tokens=4, **options)
    assert set(shaped(report.out)) == {"good", "fine"}
    assert sorted(p.split(", line ")[1][0] for p in report.problems) == ["2", "3", "4", "6", "6"]
    assert report.failed == 5
    assert any("context is 1024" in p for p in report.problems)
    assert any("earlier turn x/1 is missing" in p for p in report.problems)


def test_a_prompt_set_without_questions_is_refused(written: Written, pictures: Path) -> None:
    with pytest.raises(SaccadeError, match="holds no question"):
        run(written("", " "))
    with pytest.raises(SaccadeError, match=r"holds no question;.*line 1.*not valid JSON"):
        run(written("{"), on_bad_line="skip")
    with pytest.raises(SaccadeError, match="There is no file"):
        run(pictures.parent / "none.jsonl")


def test_the_token_that_ends_an_answer_is_left_out_and_named(written: Written, pictures: Path) -> None:
    source = written(*(asks(f"What {n}?") for n in range(4)))
    long = rows(run(source, sampled_share=0))
    target = saccade.load(ready("llava"), method="plain")
    end = long[0]["answer_ids"][3]
    never = next(n for n in range(90) if not any(n in row["answer_ids"] for row in long))
    target.target.model.generation_config.eos_token_id = [never, end]
    short = {answer.id: answer for answer in read_answers(run(source, sampled_share=0, out="short", target=target))}
    for row in long:
        ids, cut = row["answer_ids"], short[row["id"]]
        ended = end in ids
        assert cut.answer_ids == (ids[: ids.index(end)] if ended else ids)
        assert (cut.finish, cut.eos_id) == (("eos", end) if ended else ("length", None))


def test_an_answer_is_cut_before_a_placeholder_of_an_image(written: Written) -> None:
    target = vlm("llava", method="plain")
    picture = target.target.config.image_token_id
    source = written(asks("?"))
    worker = QuestionWorker(target, Setup(source, source.parent / "out", None, "stop", {}))
    question = PlannedQuestion("x", 1, 0, 0, False, (0, 0))
    line = worker._line(question, [], Output(tokens=[5, 6, picture, 7], finish_reason="eos"))
    assert (line["answer_ids"], line["finish"]) == ([5, 6], "visual")
    assert "eos_id" not in line
    assert line["answer"] == target.processor.decode([5, 6])


def test_wrong_options_are_refused(written: Written, pictures: Path) -> None:
    source = written(asks("?"))
    wrong: dict[str, dict[str, Any]] = {
        "sampled_share must be from 0": {"sampled_share": 1.5},
        r"set sampled_share to 0 \(--sampled-share 0 on the command line\)": {"temperature": 0},
        "batch must be": {"batch": 0},
        "history must be": {"history": "mine"},
        "on_bad_line must be": {"on_bad_line": "maybe"},
        "count is for pocket sources": {"count": 5},
        "unknown key 'share'": {"share": 0.5},
    }
    for words, options in wrong.items():
        with pytest.raises(InputError, match=words):
            run(source, **options)
    with pytest.raises(MethodError, match="is lossy"):
        run(source, target=vlm("llava", "llava-draft", "fly"))
    assert not (source.parent / "out").exists()
