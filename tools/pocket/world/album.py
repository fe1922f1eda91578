"""Task `album`: captions of five pictures of any kind.

Drafters are not trained on it. Unlike the fifth caption of a story, an album needs no more than captions of single
pictures, so a target that can caption those answers it well.
"""

import re
from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Media, Task, grammars
from saccade.pocket.scoring import overlap, sentences
from saccade.pocket.words import NUMBERS, joined, sentence, shuffled
from tools.pocket.world import caption

PICTURES = 5


def paint(rng: Random) -> Media:
    """Five pictures as of the task `caption`."""
    drawn = [caption.paint(rng) for _ in range(PICTURES)]
    return Media({"pictures": [picture.facts for picture in drawn]}, tuple(picture.image for picture in drawn))


def _told(rng: Random, number: int, facts: Facts, verbose: bool) -> str:
    kind, of = facts["kind"], facts["of"]
    which = f"picture {NUMBERS[number]}"
    title, parts = caption.title(kind, of), caption.parts(kind, of)
    if verbose:
        return f"This is what we see in {which}: {title} with {joined(parts)}."
    listed = joined(shuffled(rng, parts))
    return sentence(
        rng,
        f"{which}: {title} with {listed}.",
        f"in {which} I see {title}: {listed}.",
        f"{title} with {listed}, that is {which}.",
        f"{listed}: {which}, {title}.",
        f"{which} shows {title}, and in it {listed}.",
    )


def _answer(verbose: bool) -> Any:
    def answer(rng: Random, facts: Facts) -> str:
        return " ".join(_told(rng, i, of, verbose) for i, of in enumerate(facts["pictures"], 1))

    return answer


_WHICH = re.compile(rf"\bpicture ({'|'.join(NUMBERS[1 : PICTURES + 1])})\b")


def _captions(answer: str) -> list[tuple[int, str]]:
    """Number of the picture and caption, of every sentence on one picture."""
    told = []
    for part in sentences(answer):
        which = _WHICH.findall(part)
        if len(which) == 1:
            told.append((NUMBERS.index(which[0]), _WHICH.sub("", part)))
    return told


def mark(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the pictures with the right kind, and of their content."""
    kinds, told, true = [], [], []
    said = _captions(answer)
    pictures = facts["pictures"]
    for number, text in said:
        kind, of = pictures[number - 1]["kind"], pictures[number - 1]["of"]
        kinds += [(number, found) for found in caption.kinds(text)]
        told += [(number, part) for part in caption.content(text, kind, of)]
    for number, facts_ in enumerate(pictures, 1):
        kind, of = facts_["kind"], facts_["of"]
        perfect = f"{caption.title(kind, of)}: {joined(caption.parts(kind, of))}"
        true += [(number, part) for part in caption.content(perfect, kind, of)]
    return {
        "kind": overlap(kinds, [(number, of["kind"]) for number, of in enumerate(pictures, 1)]),
        "content": overlap(told, true),
    }


_QUESTIONS = (
    "Caption every picture, from the first to the last.",
    "Five pictures: what does each of them show?",
    "Tell me what is in these five pictures, in order.",
    "Describe all five pictures, each in a line.",
)
TASK = Task(paint, grammars(_QUESTIONS, _answer(False), _answer(True)), mark, share=0.0, longest=384)
