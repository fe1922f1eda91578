"""Answers from a file: what is read, what is left out, and what is said about lines that cannot be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from checkpoints import ready, saved_picture, says, template, text, tokenizer
from saccade.errors import TrainingError
from saccade.inputs.processor import InputProcessor
from saccade.loading import load_processor, save_processor
from saccade.train.batches import Order, split_validation
from saccade.train.data import Answers, Listed

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    return load_processor(str(ready("llava")))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes lines beside a picture; a line is an object or text."""
    (tmp_path / "images").mkdir()
    saved_picture(tmp_path / "images" / "a.png")

    def lines(*rows: Any, name: str = "answers.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in rows))
        return path

    return lines


def line(n: int = 0, **more: Any) -> dict[str, Any]:
    messages = says({"type": "image", "image": "images/a.png"}, text(f"What {n}?"))
    return {"id": f"q{n}", "messages": messages, "answer": "one two three", "answer_ids": [70 + n, 71, 72], **more}


def test_samples_are_the_processors_prompts_with_the_answers_ids(
    write: Write, processor: InputProcessor, tmp_path: Path
) -> None:
    path = write(line(0), "", line(1, answer_ids=[40, 41]))
    answers = Answers(path, processor)
    assert len(answers.lengths) == 2
    messages = says({"type": "image", "image": str(tmp_path / "images" / "a.png")}, text("What 1?"))
    for index in (1, 0, 1):
        sample = answers.sample(index)
        assert sample is not None
        assert sample.name == f"q{index}"
    assert sample is not None
    assert sample.prompt == processor.prompt(messages)
    assert sample.answer == (40, 41)


def test_lengths_are_those_of_the_prompts_where_the_lines_have_them(write: Write, processor: InputProcessor) -> None:
    known = Answers(write(line(0, prompt_tokens=40), line(1, prompt_tokens=4000), line(2)), processor)
    assert list(known.lengths[:2]) == [43, 4003]
    assert known.lengths[2] > 500, "a picture is taken for so many tokens"


def answers_of(answers: Answers) -> list[tuple[int, ...] | None]:
    read = [answers.sample(index) for index in range(len(answers.lengths))]
    return [sample and sample.answer for sample in read]


def test_the_end_of_an_answer_is_learnt_only_where_it_came_to_one(write: Write, processor: InputProcessor) -> None:
    answers = Answers(write(line(0, finish="eos"), line(1, finish="length")), processor)
    assert answers_of(answers) == [(70, 71, 72, processor.eos_token_ids[0]), (71, 71, 72)]


@pytest.mark.parametrize("more", [{"answer_ids": [70, 99_999]}, {"finish": "eos", "eos_id": 99_999}])
def test_tokens_that_the_target_does_not_have_are_those_of_another(
    write: Write, processor: InputProcessor, more: dict[str, Any]
) -> None:
    path = write(line(0), line(1, **more))
    with pytest.raises(TrainingError, match=r"line 2: it has the token 99999, but the target has \d+; give ans"):
        Answers(path, processor)
    assert len(Answers(path, processor, on_bad_line="skip").lengths) == 1


def several(after: str, *ends: str) -> InputProcessor:
    """Of a target with several end tokens, whose template puts one after the assistant's turns."""
    tok = tokenizer(more=ends)
    source = template("<image>").replace("\n{% endfor %}", after + "\n{% endfor %}")
    config = AutoConfig.from_pretrained(ready("llama"))
    ids = [int(tok.convert_tokens_to_ids(end)) for end in ends]
    return InputProcessor(config, tok, chat_template=source, eos_token_ids=ids)


@pytest.mark.parametrize(
    ("after", "number"),
    [
        ("<turn>", 1),
        ("{% if m['role'] == 'assistant' %}<turn><over>{% else %}<over>{% endif %}", 1),
        ("{% if m['role'] == 'user' %}<turn>{% endif %}", 0),
        ("{% if m['role'] == 'assistant' %}{{ raise_exception('no turns') }}{% endif %}", 0),
    ],
)
def test_of_several_ends_the_one_is_learnt_that_the_template_puts_behind_answers(
    write: Write, after: str, number: int
) -> None:
    made = several(after, "<text>", "<turn>", "<over>")
    row = line(0, finish="eos", messages=says(text("What?")))
    assert answers_of(Answers(write(row), made)) == [(70, 71, 72, made.eos_token_ids[number])]
    named = write({**row, "eos_id": made.eos_token_ids[2]})
    assert answers_of(Answers(named, made)) == [(70, 71, 72, made.eos_token_ids[2])]


def test_an_empty_answer_is_its_end_or_left_out_and_counted(write: Write, processor: InputProcessor) -> None:
    empty = {"answer": "", "answer_ids": []}
    path = write(
        line(0, finish="eos", **empty),
        line(1, finish="visual", **empty),
        line(2, finish="eos", eos_id=60, **empty),
        line(3),
    )
    answers = Answers(path, processor)
    assert answers_of(answers) == [processor.eos_token_ids[:1], (60,), (73, 71, 72)]
    assert answers.bad == {2: "the answer is empty, and the target did not end it there."}


def test_turns_of_a_conversation_are_held_out_together(write: Write, processor: InputProcessor) -> None:
    def turn(number: int, which: int) -> dict[str, Any]:
        later = [{"role": "assistant", "content": "Yes."}, *says(text("And then?"))] * which
        return {**line(number), "messages": [*says(text(f"Question {number // 3}?")), *later]}

    answers = Answers(write(*(turn(n, n % 3) for n in range(120))), processor)
    for seed in range(20):
        apart, chosen = split_validation(answers.conversations, 10, seed)
        assert sorted(apart + chosen) == list(range(120))
        assert 1 <= len(apart) <= 10
        assert {n // 3 for n in apart}.isdisjoint(n // 3 for n in chosen)
    apart, chosen = split_validation([7] * 40, 32, 0)
    assert (len(apart), len(chosen)) == (4, 36), "of one long conversation turns are held out alone"


def test_a_folder_of_answers_says_where_its_media_lie(write: Write, processor: InputProcessor, tmp_path: Path) -> None:
    """Paths may be file: URIs, as for distill."""
    (tmp_path / "out").mkdir()
    saved_picture(tmp_path / "images" / "a b.png")
    sources = ("images/a.png", "file://images/a%20b.png", f"file://{tmp_path}/images/a%20b.png")
    images = ({"type": "image", "image": source} for source in sources)
    lines = (line(number, messages=says(image, text("What?"))) for number, image in enumerate(images))
    path = write(*lines, name="out/answers.jsonl")
    with pytest.raises(TrainingError, match=r"line 1: .*a\.png"):
        Answers(path, processor).sample(0)
    (tmp_path / "out" / "distill.json").write_text(json.dumps({"source": {"media_root": ".."}}))
    assert None not in answers_of(Answers(tmp_path / "out", processor))


def test_short_answers_are_left_out_and_long_ones_cut(write: Write, processor: InputProcessor) -> None:
    path = write(line(0, answer="two words"), line(1))
    answers = Answers(path, processor, min_words=3)
    assert (len(answers.lengths), answers.short) == (1, 1)
    whole = answers.sample(0)
    assert whole is not None
    assert answers_of(Answers(path, processor, min_words=3, max_tokens=len(whole.ids) - 1)) == [whole.answer[:-1]]
    with pytest.raises(TrainingError, match=r"holds no answer to learn from \(2 are shorter than 9 words\)"):
        Answers(path, processor, min_words=9)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "it is not valid JSON"),
        ("[]", "it is not a JSON object"),
        (line(answer_ids=[]), "at least one token id"),
        (line(answer_ids=[True]), "at least one token id"),
        (line(eos_id="</s>"), "eos_id must be a token id"),
        (line(prompt_tokens=0), "prompt_tokens must be a number of tokens"),
        (line(answer=None), "no string named answer"),
        ({"id": "x"}, "no list named messages"),
        (line(messages=[{"role": "user", "content": [{"type": "smell"}]}]), "'smell' is not usable"),
    ],
)
def test_a_bad_line_is_named_at_once_or_skipped(write: Write, processor: InputProcessor, bad: Any, why: str) -> None:
    path = write(line(0), bad, line(1))
    with pytest.raises(TrainingError, match=f"line 2: .*{why}.*--on-bad-line skip"):
        Answers(path, processor)
    answers = Answers(path, processor, on_bad_line="skip")
    assert list(answers.bad) == [2]
    assert [answers.sample(i).name for i in range(len(answers.lengths))] == ["q0", "q1"]  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", ["missing", "placeholder", "long"])
def test_a_line_that_proves_bad_when_it_is_needed_is_named_then(
    write: Write, processor: InputProcessor, bad: str
) -> None:
    image = processor.config.image_token_id
    broken = {
        "missing": line(1, messages=says({"type": "image", "image": "none.png"}, text("?"))),
        "placeholder": line(1, answer_ids=[40, image]),
        "long": line(1, messages=says(text("long " * 90))),
    }[bad]
    path = write(line(0), broken)
    answers = Answers(path, processor, max_tokens=120)
    with pytest.raises(TrainingError, match="line 2: "):
        answers.sample(1)
    lenient = Answers(path, processor, max_tokens=120, on_bad_line="skip")
    assert lenient.sample(1) is None
    assert list(lenient.bad) == [2]
    assert lenient.sample(0) is not None


def test_another_line_or_cut_is_another_fingerprint_and_half_a_line_is_none(
    write: Write, processor: InputProcessor
) -> None:
    path = write(line(0))
    first = Answers(path, processor).fingerprint
    assert Answers(path, processor).fingerprint == first
    assert Answers(path, processor, max_tokens=99).fingerprint != first
    assert Answers(write(line(1)), processor).fingerprint != first
    with path.open("a") as file:
        file.write(json.dumps(line(1))[:40])
    assert len(Answers(path, processor).lengths) == 1


def test_another_picture_under_the_same_name_is_noticed_and_a_copied_folder_is_the_same(
    write: Write, processor: InputProcessor, tmp_path: Path
) -> None:
    frames = {"type": "video", "video": ["images/a.png", "images/b.png"]}
    saved_picture(tmp_path / "images" / "b.png", 1)
    path = write(line(0), line(1, messages=says(frames, text("What?"))))
    first = Answers(path, processor)
    shutil.copytree(tmp_path, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "images" / "a.png", (1, 1))
    copy = Answers(tmp_path / "copy", processor)
    assert (copy.fingerprint, copy.inputs) == (first.fingerprint, first.inputs)
    seen = {first.inputs["media"]}
    for name in ("a.png", "b.png"):
        saved_picture(tmp_path / "images" / name, 7)
        again = Answers(path, processor)
        assert again.fingerprint == first.fingerprint
        seen.add(again.inputs["media"])
    (tmp_path / "images" / "b.png").unlink()
    seen.add(Answers(path, processor).inputs["media"])
    assert len(seen) == 4


def test_other_image_settings_are_noticed(write: Write, processor: InputProcessor, tmp_path: Path) -> None:
    shutil.copytree(ready("llava"), tmp_path / "other")
    place = tmp_path / "other" / "preprocessor_config.json"
    settings = json.loads(place.read_text())
    place.write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    other = load_processor(tmp_path / "other")
    first, again = (Answers(write(line(0)), p).inputs for p in (processor, other))
    assert first["media"] == again["media"]
    assert first["processor"] != again["processor"]
    save_processor(processor, tmp_path / "saved")
    processor.config.save_pretrained(tmp_path / "saved")
    assert load_processor(tmp_path / "saved").digest == processor.digest
    (tmp_path / "saved" / "chat_template.jinja").write_text(template("<image>") + " ")
    assert load_processor(tmp_path / "saved").digest != processor.digest


def test_every_epoch_has_all_samples_once_in_another_order() -> None:
    order = Order([7] * 40, range(40), 4, seed=3)
    epochs = [[order.at(10 * epoch + step) for step in range(10)] for epoch in range(3)]
    assert [sorted(index for batch in epoch for index in batch) for epoch in epochs] == [list(range(40))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [Order([7] * 40, range(40), 4, seed=3).at(step) for step in range(10, 20)] == epochs[1]


def test_samples_in_python_may_not_be_empty(processor: InputProcessor) -> None:
    prompt = processor.prompt(says(text("What?")))
    with pytest.raises(TrainingError, match="training data are empty"):
        Listed([])
    with pytest.raises(TrainingError, match="Sample 1 has an empty answer"):
        Listed([(prompt, [5]), (prompt, [])])
    assert Listed([(prompt, [5])]).fingerprint != Listed([(prompt, [6])]).fingerprint
