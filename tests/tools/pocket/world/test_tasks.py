"""Every task of the world: repeatable, talked about in two grammars, and marked rightly."""

import hashlib
import json
import re
from collections import Counter
from random import Random
from statistics import mean

import pytest

from saccade.pocket import WORLD, Sample, draw, score
from saccade.pocket.labels import IMAGE_SIZE
from saccade.pocket.sample import IMAGE_MARK
from saccade.pocket.scoring import chance
from tools.pocket.world import FIRST_TASKS
from tools.pocket.world.pictures import CAPTION_PROMPT

NEW = [task for task in WORLD if task not in FIRST_TASKS]
GRAMMARS = ("dense", "verbose")
SEEDS = range(60)
LONG = ("prose", "report", "album")
"""Tasks whose answers are long on purpose."""


def _fingerprint(task: str, grammar: str) -> str:
    digest = hashlib.sha256()
    for seed in (0, 7, 2**40):
        sample = draw(seed, task, grammar)
        for image in (*sample.images, *(sample.video or ())):
            digest.update(image.tobytes())
        digest.update(json.dumps([sample.turns, sample.question, sample.answer, sample.facts]).encode())
    return digest.hexdigest()[:12]


FINGERPRINTS: dict[str, tuple[str, str]] = {
    "arithmetic": ("947eaa73c7b0", "744b7af62b71"),
    "document": ("bd0692f29f98", "3d2c0f1177ce"),
    "line": ("9c62d11e6265", "0fdbca137510"),
    "caption": ("b073e228cee5", "8b212590d073"),
    "count": ("1f3d3ed40e42", "9bf1ce3f369a"),
    "detail": ("3faacb67b067", "4c768ee19033"),
    "existence": ("b25aa4ae7219", "65e0f632fbfd"),
    "followup": ("2a01b20d653c", "d5a34e4af9e5"),
    "knowledge": ("40b984c9a0c0", "719259559398"),
    "story": ("d5e77d88d836", "921d0bc3b0c6"),
    "difference": ("c45ae96ecb62", "48d399a82df8"),
    "edit": ("2d37365076e5", "45dc74c1b372"),
    "vet": ("2dbd53ebd6a5", "f2923f7519fa"),
    "video": ("da553ec19634", "f6df62e5400e"),
    "video-question": ("825cb26cabcf", "3f7dfdaa1a99"),
    "choice": ("f89496568dee", "259e5b8ab0e2"),
    "album": ("093e33c0f0ec", "349fa156ea69"),
    "long-video": ("9e3ebe73e943", "85a115e52bd9"),
    "prose": ("3beed8fd80c1", "2a82e66b45c1"),
    "report": ("00216f585c6d", "2f8caca2f009"),
}


@pytest.mark.parametrize("task", NEW)
def test_a_seed_gives_the_same_pixels_and_text_everywhere(task: str) -> None:
    assert tuple(_fingerprint(task, grammar) for grammar in GRAMMARS) == FINGERPRINTS[task]


@pytest.fixture(scope="module", params=NEW)
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
            # Yes or no is right half of the time; all else has more than two possible values.
            assert value < (0.65 if fact == "verdict" else 0.45), (samples[0].task, fact, value)


def test_facts_of_a_task_are_of_the_same_kinds_in_every_sample(drawn: dict[str, list[Sample]]) -> None:
    kinds = {tuple(score(s.task, "", s.facts)) for samples in drawn.values() for s in samples}
    assert len(kinds) == 1


def test_corrupted_answers_score_lower(drawn: dict[str, list[Sample]]) -> None:
    """A wrong colour, number, place, name, form or day for every right one costs marks."""
    swaps = (
        ["red", "green", "blue", "yellow", "purple", "orange", "white", "cyan"],
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
        ["Ann", "Bob", "Eva", "Leo", "Mia", "Tom"],
        ["Cairo", "Delhi", "Lima", "Oslo", "Paris", "Rome"],
        ["circle", "square", "triangle", "diamond", "cross", "ring"],
        ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"],
    )
    swap = {word: ring[(i + 1) % len(ring)] for ring in swaps for i, word in enumerate(ring)}
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


def test_questions_vary_and_answers_have_something_to_accept(drawn: dict[str, list[Sample]]) -> None:
    task = drawn["dense"][0].task
    for samples in drawn.values():
        if task != "caption":
            assert len({sample.question for sample in samples}) >= 4
        words = [len(sample.answer.split()) for sample in samples]
        assert mean(words) >= 16
        assert max(words) <= (250 if task in LONG else 130)


def test_pictures_and_frames_are_rgb_of_the_models_size(drawn: dict[str, list[Sample]]) -> None:
    for sample in drawn["dense"][:10]:
        seen = (*sample.images, *(sample.video or ()))
        assert seen
        assert {(image.mode, image.size) for image in seen} == {("RGB", (IMAGE_SIZE, IMAGE_SIZE))}


def test_facts_survive_json(drawn: dict[str, list[Sample]]) -> None:
    for sample in drawn["dense"][:10]:
        again = json.loads(json.dumps(sample.facts))
        assert score(sample.task, sample.answer, again) == score(sample.task, sample.answer, sample.facts)


def test_articles_fit_their_nouns(drawn: dict[str, list[Sample]]) -> None:
    for samples in drawn.values():
        for sample in samples:
            said = " ".join([*(text for turn in sample.turns for text in turn), sample.question, sample.answer])
            assert not re.search(r"\b[Aa] (orange|ant|image)\b|\b[Aa]n (?!orange|ant|image)\w", said), said


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


def test_yes_and_no_are_equally_frequent_and_most_strangers_are_likely() -> None:
    samples = [draw(seed, "existence") for seed in range(400)]
    absent = [sample.facts for sample in samples if not sample.facts["present"]]
    assert 0.43 < len(absent) / 400 < 0.57
    tempting = [f for f in absent if {f["colour"], f["shape"]} & {v for t in f["reason"] for v in t.values()}]
    assert len(tempting) / len(absent) > 0.7


def test_right_letters_are_equally_frequent() -> None:
    tally = Counter(draw(seed, "choice").facts["letter"] for seed in range(200))
    assert set(tally) == set("ABCD")
    assert min(tally.values()) > 200 / 4 * 0.6


def test_every_kind_of_mixed_and_video_question_comes_up() -> None:
    kinds = Counter(draw(seed, "vet").facts["kind"] for seed in range(150))
    assert set(kinds) == {"bars", "above", "cost", "budget", "edge", "trains"}
    ways = Counter(draw(seed, "video-question").facts["kind"] for seed in range(100))
    assert set(ways) == {"order", "first", "way", "count"}


def test_everything_that_a_video_is_said_to_have_is_seen_in_it() -> None:
    for seed in range(100):
        facts = draw(seed, "video").facts
        appearing = {event["thing"] for event in facts["events"] if event["what"] == "appears"}
        assert all(thing["there"] or number in appearing for number, thing in enumerate(facts["things"]))


def test_videos_have_8_to_64_frames_and_every_event_changes_them() -> None:
    for seed in range(40):
        sample = draw(seed, "video")
        frames = [frame.tobytes() for frame in sample.video or ()]
        assert 8 <= len(frames) == sample.facts["frames"] <= 64
        assert len(set(frames)) > len(sample.facts["events"]) - 1


def test_everybody_is_asked_for_captions_in_the_same_words() -> None:
    assert {draw(seed, "caption").question for seed in range(10)} == {CAPTION_PROMPT}


def test_second_turns_tell_the_first_turns_true_answer_in_the_same_grammar() -> None:
    for grammar in GRAMMARS:
        for task in ("followup", "arithmetic", "knowledge"):
            sample = draw(11, task, grammar)
            first = sample.facts["first"]
            before = draw(first["seed"], first["task"], grammar)
            assert sample.turns == ((before.question, before.answer),)
            assert sample.image.tobytes() == before.image.tobytes()
