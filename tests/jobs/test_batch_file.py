"""Jobs on tiny models: answers, bad items, other forms, and what a resume keeps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from checkpoints import picture, saved_picture, vlm
from saccade.engine.step import StepRunner
from saccade.errors import InputError, KilledError, SaccadeError
from saccade.inputs.processor import InputProcessor
from saccade.jobs import batch_file
from saccade.jobs.job import seed_of
from saccade.jobs.running import PlainForm
from saccade.resumable import Journal, Report
from saccade.serve.models import Planner

LLAVA = {"name": "llava", "method": "plain"}


def model(**changes: Any) -> Any:
    return vlm(**{**LLAVA, **changes})


def records(out: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five pictures, one of them broken."""
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for shade, name in enumerate(("a", "b", "sub/c", "sub/d")):
        saved_picture(folder / f"{name}.png", shade)
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def run(source: Path, out: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"prompt": "What is {name}?", "max_new_tokens": 5, "max_rows": 2, "workers": 2}
    target = changes.pop("target", None) or model()
    return batch_file(target, source, out, **{**options, **changes})


def test_every_picture_gets_the_answer_of_generate_and_a_broken_one_its_reason(photos: Path, tmp_path: Path) -> None:
    seen = list[Report]()
    kept = tmp_path / "out.jsonl.journal" / "records.jsonl"

    def progress(found: Report) -> None:
        seen.append(found)
        if found.done:  # every record can be read at once
            assert [bool(json.loads(line)["record"]) for line in kept.open()] == [True] * found.done

    report = run(photos, tmp_path / "out.jsonl", progress=progress)
    found = records(tmp_path / "out.jsonl")
    assert list(found) == ["a.png", "b.png", "broken.png", "sub/c.png", "sub/d.png"], "in the order of the input"
    for shade, name in enumerate(("a.png", "b.png", "sub/c.png", "sub/d.png")):
        expected = model().generate(f"What is {Path(name).name}?", [picture(shade)], max_new_tokens=5)
        assert found[name] == {
            "id": name,
            "text": expected.text,
            "finish_reason": "length",
            "prompt_tokens": expected.stats.prompt_tokens,
            "completion_tokens": 5,
            "method": "plain",
            "lossless": True,
        }
    assert found["broken.png"].keys() == {"id", "error"}
    assert found["broken.png"]["error"].endswith("give one of PNG, JPEG, WEBP, GIF, BMP, TIFF.")
    assert (report.answered, report.failed, report.there, report.tokens) == (4, 1, 0, 20)
    assert [p.done for p in seen] == [0, 1, 2, 3, 4, 5]
    assert seen[-1].items == 5


def test_speculation_sampling_systems_and_groups_are_those_of_generate(photos: Path, tmp_path: Path) -> None:
    chain = vlm("llava", "llava-draft")
    (photos / "broken.png").unlink()
    sampling = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 6}
    options = {"system": "Be brief.", "images_per_row": 2, "seed": 3, **sampling}
    run(photos, tmp_path / "out.jsonl", target=chain, **options)
    found = records(tmp_path / "out.jsonl")
    assert [row["files"] for row in found.values()] == [["a.png", "b.png"], ["sub/c.png", "sub/d.png"]]
    parts: list[Any] = [{"type": "image", "image": picture(shade)} for shade in (2, 3)]
    parts.append({"type": "text", "text": "What is c.png?"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    expected = chain.generate(messages, seed=seed_of(3, "sub/c.png"), **sampling)  # type: ignore[arg-type]
    assert found["sub/c.png"]["text"] == expected.text
    assert found["sub/c.png"]["seed"] == seed_of(3, "sub/c.png")
    assert found["sub/c.png"]["method"] == "chain"


def test_a_row_may_have_a_prediction_which_is_a_text(tmp_path: Path) -> None:
    source, chain = tmp_path / "rows.jsonl", vlm("llava", "llava-draft")
    rows = [{"id": str(number), "prediction": text} for number, text in enumerate(("A cat.", None, 3))]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(source, tmp_path / "out.jsonl", target=chain, prompt="What?")
    found = records(tmp_path / "out.jsonl")
    expected = chain.using("plain").generate("What?", max_new_tokens=5).text
    assert [found[name].get("text") for name in "012"] == [expected, expected, None]
    assert "The prediction is the text of the expected answer: a string, not 3." in found["2"]["error"]


def test_openais_prediction_is_counted_in_the_usage_of_a_row(tmp_path: Path) -> None:
    source, chain = tmp_path / "rows.jsonl", vlm("llava", "llava-draft")
    expected = chain.generate("What?", max_new_tokens=40).text
    body = {"messages": [{"role": "user", "content": "What?"}], "max_tokens": 40}
    body["prediction"] = {"type": "content", "content": [{"type": "text", "text": expected}]}
    source.write_text(json.dumps({"custom_id": "one", "body": body}) + "\n")
    run(source, tmp_path / "out.jsonl", target=chain, prompt=None, max_new_tokens=None)
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20


def test_openai_requests_are_answered_in_openais_form(tmp_path: Path) -> None:
    saved_picture(tmp_path / "a.png")
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What?"}]
    body = {"model": "any", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    chat = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        {"custom_id": "one", **chat, "body": body},
        {"custom_id": "two", **chat, "body": {**body, "n": 2, "temperature": 1.0, "seed": 5, "logprobs": True}},
        {"custom_id": "raw", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Tell", "max_tokens": 3}},
        {"custom_id": "wrong", **chat, "body": {**body, "max_tokens": 0}},
        {"custom_id": "stream", **chat, "body": {**body, "stream": True}},
        {"custom_id": "else", "method": "POST", "url": "/v1/embeddings", "body": body},
        {"custom_id": "own", **chat, "body": {**body, "speculation": "off"}},
        {"custom_id": "beside", **chat, "body": body, "prediction": {"type": "content", "content": "A"}},
        {"custom_id": "one", **chat, "body": body},
        {**chat, "body": body},
    ]
    source = tmp_path / "requests.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run(source, tmp_path / "out.jsonl", prompt=None, max_new_tokens=None)
    assert report.errors == tmp_path / "out.errors.jsonl"
    answers, errors = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (report.out, report.errors)
    )
    assert [row["custom_id"] for row in answers + errors] == [line.get("custom_id") for line in lines]
    assert (report.answered, report.failed) == (3, 7)
    assert [(row["response"], row["error"]["code"]) for row in errors[-2:]] == [
        (None, "duplicate_custom_id"),
        (None, "missing_required_parameter"),
    ]
    found = {row["custom_id"]: row for row in answers + errors[:-2]}
    answer = found["one"]["response"]
    assert (answer["status_code"], found["one"]["error"]) == (200, None)
    expected = model().generate("What?", [picture()], max_new_tokens=4)
    choice = answer["body"]["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert (choice["finish_reason"], answer["body"]["object"]) == ("length", "chat.completion")
    assert answer["body"]["usage"]["completion_tokens"] == 4
    assert answer["body"]["model"] == "any"
    assert answer["body"]["saccade"] == {"method": "plain", "lossless": True}
    ChatCompletion.model_validate(answer["body"], strict=True)
    assert report.tokens == 4 + 2 * 4 + 3, "answers of one request that end in one step are one record"
    two = found["two"]["response"]["body"]["choices"]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 4}
    for index in (0, 1):
        text = model().generate("What?", [picture()], seed=5 + index, **sampling).text
        assert two[index]["message"]["content"] == text
        assert len(two[index]["logprobs"]["content"]) == 4
    assert found["raw"]["response"]["body"]["object"] == "text_completion"
    for name, words in {
        "wrong": "The field max_tokens is wrong",
        "stream": "leave out stream",
        "else": "Expected POST to /v1/chat/completions or /v1/completions, not POST /v1/embeddings",
        "own": "A job has one method",
        "beside": "Prediction beside the body has no effect; move it into the body",
    }.items():
        response = found[name]["response"]
        assert response["status_code"] == 400
        assert words in response["body"]["error"]["message"]
    with pytest.raises(InputError, match="bring their own options; leave out temperature"):
        run(source, tmp_path / "other.jsonl", prompt=None, temperature=0.5)


def test_a_request_that_fails_by_no_fault_of_its_own_has_another_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> Any:
        raise KilledError("The process that decodes a video was killed; try again.")

    monkeypatch.setattr(InputProcessor, "load_media", killed)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    source = tmp_path / "requests.jsonl"
    source.write_text(json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}))
    run(source, tmp_path / "out.jsonl", prompt=None, max_new_tokens=None)
    (line,) = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    response = json.loads(line)["response"]
    assert response["status_code"] == 500
    assert response["body"]["error"]["type"] == "server_error"
    assert "was killed; try again" in response["body"]["error"]["message"]


def test_calls_are_calls_in_batches_too(tmp_path: Path) -> None:
    wash = {"type": "function", "function": {"name": "wash"}}
    body = {"messages": [{"role": "user", "content": "Wash."}], "tools": [wash], "max_tokens": 90, "temperature": 0}
    body |= {"tool_choice": "required", "parallel_tool_calls": False}
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "one", "url": "/v1/chat/completions", "body": body}))
    for name in ("first.jsonl", "second.jsonl"):
        run(tmp_path / "in.jsonl", tmp_path / name, prompt=None, max_new_tokens=None)
    first, second = ((tmp_path / name).read_text() for name in ("first.jsonl", "second.jsonl"))
    answers = [ChatCompletion.model_validate(json.loads(text)["response"]["body"]) for text in (first, second)]
    calls = [answer.choices[0].message.tool_calls for answer in answers]
    assert calls[0] == calls[1], "their ids, too"
    assert [(call.function.name, call.function.arguments) for call in calls[0] or ()] == [("wash", "{}")]


def test_videos_have_the_frames_of_generate(tmp_path: Path) -> None:
    frames = [picture(shade) for shade in range(6)]
    frames[0].save(tmp_path / "v.gif", save_all=True, append_images=frames[1:], duration=100)
    part = {"type": "video_url", "video_url": {"url": "v.gif"}}
    rows = [
        {"id": "row", "prompt": "What?", "video": "v.gif"},
        {"id": "messages", "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    qwen = vlm("qwen", "qwen-draft")
    run(tmp_path / "rows.jsonl", tmp_path / "out.jsonl", prompt=None, target=qwen, num_frames=4)
    expected = qwen.generate("What?", videos=[tmp_path / "v.gif"], num_frames=4, max_new_tokens=5)
    found = records(tmp_path / "out.jsonl")
    assert {row["text"] for row in found.values()} == {expected.text}
    assert {row["prompt_tokens"] for row in found.values()} == {expected.stats.prompt_tokens}


def test_what_the_model_cannot_take_is_a_record(tmp_path: Path) -> None:
    rows = [
        {"id": "long", "prompt": "x" * 2000},
        {"id": "fine", "prompt": "Tell"},
        {"id": "place", "prompt": "What is <image>?"},
        {"id": "none", "prompt": "What?", "image": "no.png"},
        {"id": "folder", "prompt": "What?", "image": "."},
        {"id": "video", "prompt": "What?", "video": "v.mp4"},
        {"id": "role", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "no row",
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = run(source, tmp_path / "out.jsonl", prompt=None)
    found = records(tmp_path / "out.jsonl")
    assert found["fine"]["text"] == model().generate("Tell", max_new_tokens=5).text
    for name, words in {
        "long": "context is 1024",
        "place": "take placeholders out",
        "none": "does not exist",
        "folder": "is a directory",
        "video": "takes images but no videos",
        "rows.jsonl:8": "Expected a JSON object",
    }.items():
        assert words in found[name]["error"]
    for row in found.values():
        if "error" in row:
            assert row["error"].endswith(".")
            assert "\n" not in row["error"]
            assert row["error"][0].isupper()
    assert report.failed == 7


def test_a_resume_does_what_is_missing_changed_or_to_be_tried_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, prepared = tmp_path / "out.jsonl", list[str]()
    stock = PlainForm.prepare

    def counted(self: Any, item: Any) -> Any:
        prepared.append(item.id)
        return stock(self, item)

    monkeypatch.setattr(PlainForm, "prepare", counted)

    def answered(**changes: Any) -> list[str]:
        prepared.clear()
        run(photos, out, **changes)
        return sorted(prepared)

    assert answered(limit=2) == ["a.png", "b.png"]
    assert list(records(out)) == ["a.png", "b.png"]
    assert answered() == ["broken.png", "sub/c.png", "sub/d.png"]
    whole = out.read_bytes()
    assert answered() == []
    assert out.read_bytes() == whole
    assert answered(retry_failed=True) == ["broken.png"]
    assert out.read_bytes() == whole
    saved_picture(photos / "broken.png", 4)
    saved_picture(photos / "new.png", 5)
    (photos / "a.png").unlink()
    assert answered() == ["broken.png", "new.png"], "their files are new"
    assert list(records(out)) == ["b.png", "broken.png", "new.png", "sub/c.png", "sub/d.png"]
    assert not any("error" in row for row in records(out).values())
    out.unlink()
    assert answered() == [], "the journal has them"
    assert len(records(out)) == 5


def test_a_line_of_the_journal_without_a_part_is_named_as_damaged(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(photos, out, limit=2)
    journal = tmp_path / "out.jsonl.journal" / "records.jsonl"
    first, *others = journal.read_text().splitlines()
    row = json.loads(first)
    damaged = [{**row, "record": None}, {**row, "record": "text"}]
    for harmed in (*({k: v for k, v in row.items() if k != part} for part in row), *damaged):
        journal.write_text("\n".join([json.dumps(harmed), *others]) + "\n")
        with pytest.raises(SaccadeError, match=r"records\.jsonl, line 1 is damaged; delete it to continue"):
            run(photos, out)


def test_other_options_are_refused_by_the_name_of_what_differs(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(photos, out)
    before = out.read_bytes()
    for words, changes in {
        r"another max_new_tokens \(5 there, 6 now\)": {"max_new_tokens": 6},
        r"another prompt \('What is \{name\}\?' there, 'Why\?' now\)": {"prompt": "Why?"},
        r"another shard \('1/1' there, '1/2' now\)": {"shard": "1/2"},
        "another do_sample": {"do_sample": True, "temperature": 0.5},
        r"another method \('plain' there, 'prompt-lookup' now\)": {"target": model(method="prompt-lookup")},
        r"another target's digest": {"target": model(name="llava-draft")},
    }.items():
        with pytest.raises(SaccadeError, match=words):
            run(photos, out, **changes)
    with pytest.raises(SaccadeError, match="another input"):
        run(photos / "sub", out)
    assert out.read_bytes() == before


def test_an_output_of_something_else_is_never_overwritten_and_never_an_input(photos: Path, tmp_path: Path) -> None:
    """Nor is the journal, which a glob finds when the job is resumed."""
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"id": "q", "title": "Snow"}\n')
    with pytest.raises(SaccadeError, match=r"mine\.jsonl exists without mine\.jsonl\.journal"):
        run(photos, mine)
    with pytest.raises(SaccadeError, match="is a folder; give the name of a file"):
        run(photos, photos)
    out = photos / "out.jsonl"
    for _ in range(2):
        assert run(tmp_path / "**" / "*.jsonl", out, prompt="What is it?").items == 1
    assert list(records(out)) == ["q"]
    assert mine.read_text() == '{"id": "q", "title": "Snow"}\n'


def test_wrong_options_are_no_fault_of_every_item(photos: Path, tmp_path: Path) -> None:
    for words, changes in {
        "max_new_tokens must be": {"max_new_tokens": 0},
        "max_rows must be": {"max_rows": 0},
        "workers must be": {"workers": 0},
        "num_frames is 0": {"num_frames": 0},
        "Both num_frames and fps": {"num_frames": 2, "fps": 1.0},
        "Unknown generation option nonsense": {"nonsense": 1},
        "The prompt names": {"prompt": "{title}"},
    }.items():
        with pytest.raises(SaccadeError, match=words):
            run(photos, tmp_path / "out.jsonl", **changes)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_failed_step_costs_no_neighbour_its_answer(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails whenever the row of one picture is in it; the others are repeated alone."""
    run(photos, tmp_path / "whole.jsonl")
    stock = StepRunner.run
    poisonous = model().processor.prompt("What is b.png?", [picture(1)]).media[0].digest

    def failing(self: StepRunner, *args: Any) -> Any:
        if any(poisonous in [m.digest for m in row.request.prompt.media] for row in self._state.active):
            raise RuntimeError("bad kernel\nwith details")
        return stock(self, *args)

    monkeypatch.setattr(StepRunner, "run", failing)
    report = run(photos, tmp_path / "out.jsonl", max_rows=4)
    whole, found = records(tmp_path / "whole.jsonl"), records(tmp_path / "out.jsonl")
    assert found["b.png"] == {"id": "b.png", "error": "It failed with RuntimeError: bad kernel with details."}
    assert {n: r for n, r in found.items() if n != "b.png"} == {n: r for n, r in whole.items() if n != "b.png"}
    assert report.failed == 2


def test_requests_are_planned_again_after_a_failed_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, stock, planned = tmp_path / "rows.jsonl", StepRunner.run, list[Any]()
    body = {"messages": [{"role": "user", "content": "Tell"}], "max_tokens": 32, "logprobs": True}
    source.write_text("".join(json.dumps({"custom_id": name, "body": body}) + "\n" for name in "ab"))
    whole, steps, plan = tmp_path / "whole.jsonl", iter(range(99)), Planner.plan

    def counted(self: Planner, *args: Any) -> Any:
        planned.append(args)
        return plan(self, *args)

    monkeypatch.setattr(Planner, "plan", counted)
    run(source, whole, prompt=None)
    assert len(planned) == 2

    def failing(self: StepRunner, *args: Any) -> Any:
        result = stock(self, *args)
        if len(self._state.active) == 2 and next(steps) == 2:  # the second row may come later
            raise RuntimeError("bad kernel")
        return result

    monkeypatch.setattr(StepRunner, "run", failing)
    run(source, tmp_path / "out.jsonl", prompt=None)
    assert len(planned) == 2 + 4
    logged = []
    for path in (whole, tmp_path / "out.jsonl"):
        choices = [json.loads(line)["response"]["body"]["choices"][0] for line in path.open()]
        logged.append([entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]])
    assert logged[0] == pytest.approx(logged[1], abs=1e-5), "alone, sums are rounded in another order"


def test_a_write_that_takes_a_part_of_the_lines_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, stock, rows = (
        Journal(tmp_path / "run", {}, ("run.json", "lines.jsonl"), ()),
        os.write,
        [{"a": "b" * 9}] * 2,
    )
    monkeypatch.setattr(os, "write", lambda file, data: stock(file, data[:7]))
    with journal:
        journal.append(rows)
    assert [row for *_, row in journal.rows()] == rows


def test_ctrl_c_and_a_full_disk_leave_whole_records(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, stock = tmp_path / "out.jsonl", os.write
    run(photos, tmp_path / "whole.jsonl")
    for size, problem in ((100, KeyboardInterrupt), (500, OSError(28, "No space left on device"))):

        def torn(file: int, data: Any, problem: Any = problem, size: int = size) -> int:
            if os.fstat(file).st_size > size:
                stock(file, bytes(data)[:7])
                raise problem
            return stock(file, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", torn)
            with pytest.raises((KeyboardInterrupt, SaccadeError)):
                run(photos, out)
        lines = (tmp_path / "out.jsonl.journal" / "records.jsonl").read_bytes()
        assert lines.endswith(b"}\n")
        assert not out.exists()
    run(photos, out)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_utf8_are_answered_and_resumed(photos: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(photos) + b"-\xe9"))
    photos.rename(folder)
    (folder / "a.png").rename(folder / os.fsdecode(b"caf\xe9.png"))
    out = tmp_path / "out.jsonl"
    assert run(folder, out, prompt="What is it?").failed == 1
    answers = records(out)
    names = [os.fsencode(name) for name in answers]
    assert names == [b"b.png", b"broken.png", b"caf\xe9.png", b"sub/c.png", b"sub/d.png"]
    expected = model().generate("What is it?", [picture(0)], max_new_tokens=5)
    assert answers[os.fsdecode(b"caf\xe9.png")]["text"] == expected.text
    assert run(folder, out, prompt="What is it?").there == 5
