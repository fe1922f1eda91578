"""What a training run draws never changes: pixels, words, facts, labels and the mixture, by hash."""

import hashlib
import json
from random import Random

import pytest

from saccade.pocket import WORLD, Sample, draw
from tools.pocket.batches import training_samples


def _hash(samples: list[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        said = [sample.task, sample.question, sample.answer, sample.facts]
        digest.update(json.dumps(said, sort_keys=True).encode())
        for image in (*sample.images, *(sample.video or ())):
            digest.update(image.tobytes())
        digest.update(sample.labels.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize(
    ("task", "grammar", "expected"),
    [
        ("scene", "dense", "ffdb6af1059be146"),
        ("scene", "verbose", "00ab83f1c993113c"),
        ("chart", "dense", "2e830a1932662873"),
        ("chart", "verbose", "34182f80c2cba4aa"),
        ("receipt", "dense", "1a68fb77da53663d"),
        ("receipt", "verbose", "2bb98f43450558c4"),
    ],
)
def test_the_first_tasks_draw_what_they_always_drew(task: str, grammar: str, expected: str) -> None:
    assert _hash([draw(seed, task, grammar) for seed in (*range(12), 10**6, 2**47)]) == expected


def test_the_training_mixture_draws_what_it_always_drew() -> None:
    samples = training_samples(Random("mixture"), 300, 0.3)
    assert {sample.task for sample in samples} == {name for name, task in WORLD.items() if task.share}
    assert _hash(samples) == "25b63b8badb2c82b"
