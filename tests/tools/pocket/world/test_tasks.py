"""Every task of the world: repeatable, talked about in two grammars, and marked rightly."""

import hashlib
import json
import re
import subprocess
import sys
from random import Random
from statistics import mean

import pytest

from saccade.pocket import WORLD, Sample, draw, score
from saccade.pocket.sample import IMAGE_MARK
from saccade.pocket.scoring import chance
from saccade.pocket.words import GOODS, IMAGE_SIZE
from tools.pocket.batches import training_samples

GRAMMARS = ("dense", "verbose")
SEEDS = range(60)


def _fingerprint(task: str, grammar: str) -> str:
    digest = hashlib.sha256()
    for seed in (*range(12), 10**6, 2**47):
        sample = draw(seed, task, grammar)
        for image in (*sample.images, *(sample.video or ())):
            digest.update(image.tobytes())
        digest.update(json.dumps([sample.turns, sample.question, sample.answer, sample.facts]).encode())
        digest.update(sample.labels.astype("<i8").tobytes())
    return digest.hexdigest()[:12]


FINGERPRINTS: dict[str, tuple[str, str]] = {
    "chart": ("a7fb6cc09372", "6b82ac402b00"),
    "receipt": ("3fb2fba965cb", "bd744235bfd3"),
    "scene": ("29eaa691380b", "1e12b0367dc1"),
    "arithmetic": ("7f5d22088f7a", "9e73a8995ff1"),
    "document": ("ac5a69b7aa73", "4b5bd160f6be"),
    "line": ("9ceabbda6dcb", "dfc1b6383def"),
    "caption": ("10437f121e76", "63b0edb838fa"),
    "count": ("51982d40b6bf", "cdbcfffbb307"),
    "detail": ("0fed31925762", "3d3067aea4df"),
    "existence": ("c7b8f42ac3d4", "1a038556f722"),
    "followup": ("cefd24fa8fd2", "c609e6c219b0"),
    "knowledge": ("e27999272fd3", "e4ad445a827e"),
    "story": ("81d536dda5db", "c8b32d6d7578"),
    "difference": ("92544c79c650", "f117f8d3d717"),
    "edit": ("745e8f4f038e", "ed7ef6ce24cb"),
    "vet": ("56b3343c17eb", "7c0ceed9f0c4"),
    "video": ("053ce0a03fa6", "2b0bf22783f2"),
    "video-question": ("2e2e8d97dfcb", "e4f169241675"),
    "choice": ("799cbffa8100", "df4d048288e8"),
    "album": ("714a23ddd408", "356cceaa4157"),
    "long-video": ("5807f6981ad7", "e2c9bdf4a4e1"),
    "prose": ("fb24aa6fb264", "d8be6dd8d2dc"),
    "report": ("9d0e70016bc7", "462222353541"),
}


@pytest.mark.parametrize("task", WORLD)
def test_a_seed_gives_the_same_pixels_and_text_everywhere(task: str) -> None:
    assert tuple(_fingerprint(task, grammar) for grammar in GRAMMARS) == FINGERPRINTS[task]


@pytest.fixture(scope="module", params=WORLD)
def drawn(request: pytest.FixtureRequest) -> dict[str, list[Sample]]:
    return {grammar: [draw(seed, request.param, grammar) for seed in SEEDS] for grammar in GRAMMARS}


def test_perfect_answers_score_one_on_every_fact(drawn: dict[str, list[Sample]]) -> None:
    for samples in drawn.values():
        for sample in samples:
            marks = score(sample.task, sample.answer, sample.facts)
            assert set(marks.values()) == {1.0}, (marks, sample.question, sample.answer)


def test_answers_to_other_samples_score_near_chance(drawn: dict[str, list[Sample]]) -> None:
    for samples in drawn.values():
        for fact, value in chance(samples).items():
            # Yes or no is right half of the time, and so are small counts, and three to six colours of seven.
            assert value < (0.65 if fact in ("verdict", "count", "colour") else 0.45), (samples[0].task, fact, value)


def test_corrupted_answers_score_lower(drawn: dict[str, list[Sample]]) -> None:
    """A wrong colour, number, place, name, form or day for every right one costs marks."""
    swaps = (
        ["red", "green", "blue", "yellow", "purple", "orange", "white", "cyan"],
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
        ["Ann", "Bob", "Eva", "Leo", "Mia", "Tom"],
        ["Cairo", "Delhi", "Lima", "Oslo", "Paris", "Rome"],
        ["circle", "square", "triangle", "diamond", "cross", "ring"],
        ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"],
        [form for good in GOODS for form in (good, good.capitalize())],
    )
    swap = {word: ring[(i + 2) % len(ring)] for ring in swaps for i, word in enumerate(ring)}
    pattern = re.compile(rf"\b({'|'.join(swap)})\b")
    for samples in drawn.values():
        marks, worse = [], []
        for sample in samples:
            wrong = pattern.sub(lambda found: swap[found[0]], sample.answer)
            worse.append(mean(score(sample.task, wrong, sample.facts).values()))
            halves = sample.answer.split(". ")
            half = ". ".join(halves[: len(halves) // 2])
            marks.append(mean(score(sample.task, half, sample.facts).values()))
        assert mean(worse) < 0.75
        assert mean(marks) < 0.9


def test_the_order_of_independent_sentences_is_of_no_matter_to_the_marks(
    drawn: dict[str, list[Sample]],
) -> None:
    for sample in drawn["dense"][:20]:
        parts = [part.rstrip(".") for part in re.split(r"(?<=\.) ", sample.answer)]
        mixed = ". ".join(Random(1).sample(parts, len(parts))) + "."
        marks = score(sample.task, mixed, sample.facts)
        assert {v for k, v in marks.items() if k != "order"} == {1.0}, (marks, mixed)


def test_grammars_share_what_is_seen_and_differ_in_words(drawn: dict[str, list[Sample]]) -> None:
    for dense, verbose in zip(drawn["dense"][:10], drawn["verbose"][:10], strict=True):
        assert [i.tobytes() for i in dense.images] == [i.tobytes() for i in verbose.images]
        assert dense.facts == verbose.facts
        assert dense.answer != verbose.answer


def test_pictures_and_frames_are_rgb_of_the_models_size(drawn: dict[str, list[Sample]]) -> None:
    for sample in drawn["dense"][:10]:
        seen = (*sample.images, *(sample.video or ()))
        assert seen
        assert {(image.mode, image.size) for image in seen} == {("RGB", (IMAGE_SIZE, IMAGE_SIZE))}


def test_facts_survive_json(drawn: dict[str, list[Sample]]) -> None:
    for sample in drawn["dense"][:10]:
        again = json.loads(json.dumps(sample.facts))
        assert score(sample.task, sample.answer, again) == score(sample.task, sample.answer, sample.facts)


@pytest.mark.parametrize(
    ("task", "images", "turns", "marks"),
    [
        ("difference", 2, 0, 0),
        ("edit", 2, 0, 0),
        ("story", 5, 0, 5),
        ("album", 5, 0, 0),
        ("followup", 1, 1, 0),
        ("knowledge", 1, 1, 0),
    ],
)
def test_tasks_have_their_number_of_pictures_and_turns(task: str, images: int, turns: int, marks: int) -> None:
    sample = draw(3, task)
    assert (len(sample.images), len(sample.turns), sample.question.count(IMAGE_MARK)) == (
        images,
        turns,
        marks,
    )


def test_second_turns_tell_the_first_turns_true_answer_in_the_same_grammar() -> None:
    for grammar in GRAMMARS:
        for task in ("followup", "arithmetic", "knowledge"):
            sample = draw(11, task, grammar)
            first = sample.facts["first"]
            before = draw(first["seed"], first["task"], grammar)
            assert sample.turns == ((before.question, before.answer),)
            assert sample.image.tobytes() == before.image.tobytes()


def test_the_training_mixture_draws_what_it_always_drew() -> None:
    samples = training_samples(Random("mixture"), 300, 0.3)
    assert {sample.task for sample in samples} == {name for name, task in WORLD.items() if task.share}
    words = [[sample.task, sample.question, sample.answer, sample.facts] for sample in samples]
    assert hashlib.sha256(json.dumps(words).encode()).hexdigest()[:12] == "cdb82467b763"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="the tasks are chart, receipt, scene"):
        draw(0, "novel")
    with pytest.raises(ValueError, match="it has dense, verbose"):
        draw(0, "scene", "rhyme")


def test_importing_the_world_leaves_torch_alone() -> None:
    # `import saccade` itself may need PyTorch, hence the question what the pocket adds to it.
    code = (
        "import sys, saccade; before = 'torch' in sys.modules\n"
        "import saccade.pocket\n"
        "raise SystemExit(('torch' in sys.modules) != before)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
