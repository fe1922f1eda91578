"""The shipped pair loads with plain Hugging Face calls, reads pictures and drafts; marking finds what is read."""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoTokenizer

import saccade
from saccade.pocket import Sample, draft_path, draw, head_paths, score, target_path
from tools.pocket import accuracy as pocket_accuracy

FOLDERS = {"target": target_path(), "draft": draft_path()}
HELD_OUT = range(90_000, 90_008)
READ = [
    ("scene", "colour"),
    ("scene", "tally"),
    *(
        pytest.param(task, fact, marks=pytest.mark.slow)
        for task, fact in [
            ("receipt", "word"),
            ("receipt", "price"),
            ("chart", "value"),
            ("document", "word"),
            ("line", "value"),
            ("caption", "content"),
            ("vet", "result"),
        ]
    ),
]
"""Facts that the target's card has well above chance; eight pictures leave room for luck."""


@pytest.fixture(scope="module")
def vlm() -> saccade.VLM:
    return saccade.load(target_path(), draft_path(), dtype="float32")


@pytest.fixture(scope="module")
def told(vlm: saccade.VLM) -> Callable[[str], list[list[int]]]:
    """Answers to a task's pictures, given once."""
    return cache(lambda task: pocket_accuracy.answer(vlm, [draw(seed, task) for seed in HELD_OUT]))


def test_all_weights_together_stay_light() -> None:
    # Every clone and wheel carries them; the limit is the project's, in bytes.
    folders = [*FOLDERS.values(), *head_paths().values()]
    assert sum((folder / "model.safetensors").stat().st_size for folder in folders) <= 36e6


def test_both_models_speak_the_same_tokens() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
        assert (target_path() / name).read_bytes() == (draft_path() / name).read_bytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_generation_is_greedy_by_default_and_knows_where_to_stop(name: str) -> None:
    settings = AutoModelForImageTextToText.from_pretrained(FOLDERS[name]).generation_config
    assert settings.do_sample is False
    assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (0, 1, 2)


def test_the_tokenizer_loads_by_itself() -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    assert tokenizer.decode(tokenizer("A red circle.").input_ids) == "A red circle."
    assert tokenizer.chat_template


@pytest.mark.parametrize(("task", "fact"), READ)
def test_target_reads_fresh_pictures(
    task: str, fact: str, vlm: saccade.VLM, told: Callable[[str], list[list[int]]]
) -> None:
    answers = vlm.processor.tokenizer.batch_decode(told(task))
    facts = [draw(seed, task).facts for seed in HELD_OUT]
    pairs = zip(answers, facts, facts[1:] + facts[:1], strict=True)
    marks = [(score(task, text, own)[fact], score(task, text, other)[fact]) for text, own, other in pairs]
    accuracy, chance = (mean(column) for column in zip(*marks, strict=True))
    assert accuracy > chance + 0.25


def test_the_draft_foresees_most_of_the_targets_tokens(vlm: saccade.VLM) -> None:
    drafted = total = 0
    for task in ("scene", "chart", "receipt"):
        output = vlm.using("chain").generate(draw(HELD_OUT[0], task).messages())
        drafted += output.marks.count("draft")
        total += len(output.tokens)
    assert drafted / total > 0.5


PER_TASK = 6
TASKS = ("receipt", "scene", "video")


def _seen(sample: Sample) -> bytes:
    return b"".join(picture.tobytes() for picture in (*sample.images, *(sample.video or ())))


def test_a_model_that_reads_its_pictures_is_right_of_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [draw(pocket_accuracy.FIRST_SEED + i, task) for task in TASKS for i in range(PER_TASK)]
    answers = {_seen(sample): sample.answer for sample in drawn}
    asked: list[Sample] = []

    def answer(vlm: Any, samples: Sequence[Sample], **_: Any) -> list[str]:
        asked.extend(samples)
        return [answers[_seen(sample)] for sample in samples]

    monkeypatch.setattr(pocket_accuracy, "answer", answer)
    vlm: Any = SimpleNamespace(processor=SimpleNamespace(tokenizer=SimpleNamespace(batch_decode=list)))
    rows = pocket_accuracy.measure(vlm, TASKS, PER_TASK)
    assert len(asked) == len(TASKS) * (PER_TASK + 2)  # every fourth one again, with another picture
    assert {row.task for row in rows} == set(TASKS)
    for row in rows:
        assert row.accuracy == pytest.approx(1.0)
        assert row.chance < 1
    assert all(row.shuffled < 0.7 for row in rows if row.fact in ("word", "price", "thing", "event"))
