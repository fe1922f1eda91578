"""The generated world: repeatable, and marked rightly."""

import subprocess
import sys
from itertools import pairwise

import pytest

from saccade.pocket import draw, score
from saccade.pocket.labels import IMAGE_SIZE
from tools.pocket.world import FIRST_TASKS

GRAMMARS = ("dense", "verbose")


@pytest.mark.parametrize("task", FIRST_TASKS)
def test_both_grammars_talk_about_one_picture(task: str) -> None:
    dense, verbose = (draw(5, task, grammar) for grammar in GRAMMARS)
    assert dense.image.tobytes() == verbose.image.tobytes()
    assert dense.facts == verbose.facts
    assert dense.answer != verbose.answer


@pytest.mark.parametrize("task", FIRST_TASKS)
def test_neighbouring_seeds_differ(task: str) -> None:
    assert len({draw(seed, task).image.tobytes() for seed in range(20)}) == 20


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("task", FIRST_TASKS)
def test_the_true_answer_scores_one_and_another_pictures_answer_less(task: str, grammar: str) -> None:
    samples = [draw(seed, task, grammar) for seed in range(200)]
    for sample in samples:
        assert set(score(task, sample.answer, sample.facts).values()) == {1.0}, sample.answer
    for fact in score(task, "", samples[0].facts):
        wrong = [score(task, sample.answer, other.facts)[fact] for sample, other in pairwise(samples)]
        assert sum(wrong) / len(wrong) < 0.6, fact


@pytest.mark.parametrize("task", FIRST_TASKS)
def test_silence_scores_nothing(task: str) -> None:
    assert set(score(task, "", draw(0, task).facts).values()) == {0.0}


def test_one_wrong_value_costs_its_share() -> None:
    facts = {"colours": ["red", "blue", "green"], "values": [3, 5, 1]}
    marks = score("chart", "Red is three. Six for blue. Green comes third at one.", facts)
    assert marks == {"count": 1.0, "colour": 1.0, "value": pytest.approx(2 / 3)}


def test_an_invented_thing_costs_too() -> None:
    facts = {"goods": ["tea", "ham"], "prices": [3, 5], "total": 8}
    marks = score("receipt", "Tea costs three. Ham costs five. Jam costs one. The sum is 8 dollars.", facts)
    assert marks == {"count": 0.0, "word": pytest.approx(2 / 3), "price": pytest.approx(2 / 3), "total": 1.0}


@pytest.mark.parametrize("task", FIRST_TASKS)
def test_pictures_are_rgb_of_the_models_size(task: str) -> None:
    image = draw(1, task).image
    assert (image.mode, image.size) == ("RGB", (IMAGE_SIZE, IMAGE_SIZE))


def test_shapes_keep_their_distance_and_differ() -> None:
    for seed in range(200):
        things = draw(seed, "scene").facts["things"]
        assert 2 <= len(things) <= 5
        assert len({(thing["colour"], thing["shape"]) for thing in things}) == len(things)


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
