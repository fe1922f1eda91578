"""The shipped pair: loads with plain Hugging Face calls, reads pictures, and the draft follows the target."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from saccade.pocket import draft_path, draw, score, target_path
from saccade.pocket.answering import answer
from saccade.pocket.train.batches import pixels, token_batch

FOLDERS = {"target": target_path(), "draft": draft_path()}
HELD_OUT = range(90_000, 90_012)


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    return {
        name: AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
        for name, folder in FOLDERS.items()
    }


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(target_path())


@pytest.fixture(scope="module")
def told(pair: dict[str, Any], processor: Any) -> dict[str, list[list[int]]]:
    return {
        task: answer(pair["target"], processor, [draw(seed, task) for seed in HELD_OUT])
        for task in ("scene", "chart", "receipt")
    }


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_both_folders_together_stay_light() -> None:
    # Every clone and wheel carries them; the limit is the project's, in bytes.
    assert sum(_size(folder) for folder in FOLDERS.values()) <= 33e6


def test_both_models_speak_the_same_tokens() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
        assert (target_path() / name).read_bytes() == (draft_path() / name).read_bytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_generation_is_greedy_by_default_and_knows_where_to_stop(name: str, pair: dict[str, Any]) -> None:
    settings = pair[name].generation_config
    assert settings.do_sample is False
    assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (0, 1, 2)


def test_processor_ids_equal_training_ids(processor: Any) -> None:
    sample = draw(7, "scene")
    content = [{"type": "image", "image": sample.image}, {"type": "text", "text": sample.question}]
    got = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    raw = processor.tokenizer.backend_tokenizer
    ids, _ = token_batch(raw, [sample.question], [[]], with_image=True)
    head = ids[0].tolist()
    assert got["input_ids"][0].tolist() == head[: head.index(processor.tokenizer.eos_token_id)]
    assert torch.equal(got["pixel_values"], pixels([sample.image]))


@pytest.mark.parametrize(
    ("task", "fact"),
    [("scene", "colour"), ("scene", "tally"), ("chart", "value"), ("receipt", "word"), ("receipt", "price")],
)
def test_target_reads_fresh_pictures(
    task: str, fact: str, processor: Any, told: dict[str, list[list[int]]]
) -> None:
    answers = processor.tokenizer.batch_decode(told[task])
    facts = [draw(seed, task).facts for seed in HELD_OUT]
    pairs = zip(answers, facts, facts[1:] + facts[:1], strict=True)
    marks = [(score(task, text, own)[fact], score(task, text, other)[fact]) for text, own, other in pairs]
    accuracy, chance = (mean(column) for column in zip(*marks, strict=True))
    # The model card has gaps from 0.26 (scene colours) to 0.74; twelve pictures leave room for luck.
    assert accuracy > chance + 0.12


@torch.no_grad()
def test_draft_foresees_most_of_the_targets_tokens(
    pair: dict[str, Any], processor: Any, told: dict[str, list[list[int]]]
) -> None:
    right = total = 0
    for task, answers in told.items():
        samples = [draw(seed, task) for seed in HELD_OUT]
        raw = processor.tokenizer.backend_tokenizer
        ids, targets = token_batch(raw, [sample.question for sample in samples], answers, with_image=True)
        images = pixels([sample.image for sample in samples]).bfloat16()
        guesses = pair["draft"](input_ids=ids, pixel_values=images).logits[:, :-1].argmax(-1)
        learnt = targets[:, 1:] >= 0
        right += int((guesses == targets[:, 1:])[learnt].sum())
        total += int(learnt.sum())
    assert right / total > 0.6
