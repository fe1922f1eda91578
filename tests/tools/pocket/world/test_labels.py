"""What the tower learns to name: what belongs together is told in every patch of it."""

import pytest

from saccade.pocket import draw
from saccade.pocket.labels import GRID, LABEL_WORDS, PATCH_SIZE
from saccade.pocket.words import DAYS, NUMBERS, ORDINALS

SEEDS = range(200)


def _named(task: str, seed: int) -> list[tuple[int, int, dict[str, str]]]:
    """(x, y, words by kind) of every patch in which something is named."""
    labels = draw(seed, task).labels
    found = []
    for y in range(GRID):
        for x in range(GRID):
            words = {
                kind: LABEL_WORDS[kind][number - 1]
                for kind, number in zip(LABEL_WORDS, labels[y, x].tolist(), strict=True)
                if number
            }
            found += [(x, y, words)] if words else []
    return found


def test_every_shape_is_named_with_its_place_where_it_is() -> None:
    for seed in SEEDS:
        things = draw(seed, "scene").facts["things"]
        kinds = ("colour", "shape", "size", "row", "column")
        told = {tuple(words[kind] for kind in kinds) for _, _, words in _named("scene", seed)}
        assert told == {tuple(thing[kind] for kind in kinds) for thing in things}
        for x, y, words in _named("scene", seed):
            thing = next(t for t in things if all(t[kind] == words[kind] for kind in kinds))
            assert abs((x + 0.5) * PATCH_SIZE - thing["x"]) < 16
            assert abs((y + 0.5) * PATCH_SIZE - thing["y"]) < 16


def test_a_price_is_named_with_its_item_and_line_on_both_sides_of_the_receipt() -> None:
    for seed in SEEDS:
        facts = draw(seed, "receipt").facts
        ordinals = ORDINALS[: len(facts["goods"])]
        lines = list(zip(facts["goods"], facts["prices"], ordinals, strict=True))
        patches = [(x, w) for x, _, w in _named("receipt", seed) if "word" in w]
        wanted = {(item, NUMBERS[price], ordinal) for item, price, ordinal in lines}
        for side in (range(4), range(6, 8)):
            told = {(w["word"], w["number"], w["ordinal"]) for x, w in patches if x in side}
            assert told == wanted


def test_every_bar_is_named_with_its_value_and_its_number_from_the_left() -> None:
    for seed in SEEDS:
        facts = draw(seed, "chart").facts
        ordinals = ORDINALS[: len(facts["colours"])]
        bars = zip(facts["colours"], facts["values"], ordinals, strict=True)
        told = {(w["colour"], w["number"], w["ordinal"]) for _, _, w in _named("chart", seed)}
        assert told == {(colour, NUMBERS[value], ordinal) for colour, value, ordinal in bars}


@pytest.mark.parametrize("task", ["document", "line"])
def test_a_number_is_named_with_the_word_that_it_belongs_to(task: str) -> None:
    for seed in SEEDS:
        facts = draw(seed, task).facts
        told = {(w.get("word"), w["number"]) for _, _, w in _named(task, seed) if "number" in w}
        if task == "line":
            wanted = set(zip(DAYS, (NUMBERS[value] for value in facts["values"]), strict=True))
        elif facts["kind"] == "trains":
            wanted = set(zip(facts["towns"], (NUMBERS[hour] for hour in facts["hours"]), strict=True))
        else:
            wanted = {(None, NUMBERS[facts["hour"]])}
        assert told == wanted
