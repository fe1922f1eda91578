"""Lessons and drills: what helps the target to learn where to look, besides the world's own answers.

Lessons are auxiliary losses on hidden states, by linear readers that are discarded after training.

Answers are some forty tokens on hundreds of visual tokens, and teach slowly where to look. The lessons add labels:

- comparing, at a third of the depth: at each patch of a later picture or frame, whether it changed and its embedding
  one picture before;
- searching, where an answer begins: the number of things asked for in each of the picture's nine cells, at half the
  depth, and their total, at three quarters;
- watching, at half the depth: at the end of each video frame its event, with colour and form of the shape.

Drills are seven short questions on one picture or video, each answered by its verdict alone. An answer of the world
takes forty tokens for one yes, no, total or letter; a drill has seven of them in little more, so that nearly every
token depends on the question. Its questions end in "In short.", so the world's own answers keep their length.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from saccade.pocket.film import DIRECTIONS, WHATS, film
from saccade.pocket.labels import GRID, PATCH_SIZE, no_labels
from saccade.pocket.sample import WORLD, Facts, Sample
from saccade.pocket.shapes import Thing, key, render, scatter
from saccade.pocket.words import BACKGROUNDS, COLOURS, COLUMNS, ROWS, SHAPES, SIZES
from tools.pocket.batches import ASSISTANT, FRAME_TOKENS, IMAGE, NEWLINE, PATCHES, VIDEO, Batch
from tools.pocket.world import scenes, videos


def pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Pairs of a patch and the same patch one picture before: row, positions now and before, whether it changed."""
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    kinds = (
        (batch.pictures, batch.counts, IMAGE, PATCHES, NEWLINE, GRID),
        (batch.frames, batch.lengths, VIDEO, FRAME_TOKENS, 0, GRID // 2),
    )
    for shown, counts, mark, each, between, across in kinds:
        first = 0
        for row, count in enumerate(counts):
            mine, first = slice(first, first + count), first + count
            if count < 2 or shown is None:
                continue
            at = (batch.ids[row] == mark).nonzero()[:, 0]
            starts = at[0] + (each + between) * torch.arange(count)
            if at[-1] >= starts[-1] + each + NEWLINE:
                continue  # there is text between the pictures
            places = starts[:, None] + torch.arange(each)  # [count, each]
            now, before = places[1:].flatten(), places[:-1].flatten()
            differs = (shown[mine][1:] != shown[mine][:-1]).any(1).float()  # [count - 1, S, S]
            changed = nn.functional.max_pool2d(differs, GRID * PATCH_SIZE // across).flatten() > 0
            parts.append((torch.full_like(now, row), now, before, changed))
    if not parts:
        return None
    rows, now, before, changed = (torch.cat(part) for part in zip(*parts, strict=True))
    return rows, now, before, changed


class Relating(nn.Module):
    """Comparing: linear readers of whether a patch has changed, and of its embedding one picture before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.changed = nn.Linear(width, 1)
        self.before = nn.Linear(width, width)

    def forward(self, hidden: Tensor, embeddings: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy of the changes plus squared error of the embeddings; 0 without pairs."""
        found = pairs(batch)
        if found is None:
            return hidden.new_zeros(())
        rows, now, before, changed = (part.to(hidden.device) for part in found)
        states = self.norm(hidden[rows, now].float())
        was = embeddings[rows, before].detach().float()
        scale = was.std().clamp(min=1e-6)
        flags: Tensor = nn.functional.binary_cross_entropy_with_logits(self.changed(states)[:, 0], changed.float())
        if not changed.any():
            return flags
        misses: Tensor = (self.before(states[changed]) - (was[changed] - was.mean(0)) / scale).square().mean()
        return flags + misses


PLACES = [(row, column) for row in ROWS for column in COLUMNS]
_CROWD = 3  # larger counts of one cell share a class
_MOST = 8
_TOTAL = 0.3  # weight of the total relative to the cells


def _searched(sample: Sample) -> list[list[Thing] | None]:
    """For each question of a sample the things it asks for; None if it asks for something else."""
    if "found" in sample.facts:
        return list(sample.facts["found"])
    if sample.task == "count":
        return [sample.facts["counted"]]
    if sample.task == "existence":
        suspect = key(dict(sample.facts))
        return [[thing for thing in sample.facts["reason"] if key(thing) == suspect]]
    return [None] * (len(sample.turns) + 1)


def searches(samples: Sequence[Sample], ids: Tensor) -> Tensor:
    """Labels of all questions that ask for things: row, position of the answer, counts of nine cells, total."""
    labels = []
    for row, sample in enumerate(samples):
        begins = (ids[row] == ASSISTANT).nonzero()[:, 0].tolist()
        for begin, found in zip(begins, _searched(sample), strict=True):
            if found is not None:
                there = [(thing["row"], thing["column"]) for thing in found]
                many = (min(there.count(place), _CROWD) for place in PLACES)
                labels.append([row, begin, *many, min(len(found), _MOST)])
    return torch.tensor(labels, dtype=torch.long).reshape(-1, 2 + len(PLACES) + 1)


class Searching(nn.Module):
    """Searching: linear readers of the number of things in question, per cell of the picture and in all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.total_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.there = nn.Linear(width, len(PLACES) * (_CROWD + 1))
        self.total = nn.Linear(width, _MOST + 1)

    def forward(self, hidden: Tensor, deeper: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of counts and weighted total; 0 without searches."""
        if not len(labels):
            return hidden.new_zeros(())
        labels = labels.to(hidden.device)
        rows, begins = labels[:, 0], labels[:, 1]
        places = self.there(self.norm(hidden[rows, begins].float())).view(-1, _CROWD + 1)
        total = self.total(self.total_norm(deeper[rows, begins].float()))
        misses: Tensor = nn.functional.cross_entropy(places, labels[:, 2:-1].flatten())
        return misses + _TOTAL * nn.functional.cross_entropy(total, labels[:, -1])


_KINDS = (list(WHATS), list(COLOURS), list(SHAPES))


def _event_frames(facts: Facts) -> list[tuple[int, int]]:
    """Frames that show an event, numbered as they are shown, each with the number of the event.

    A move shows in all of its frames; what appears, leaves, grows or shrinks does so at half its time.
    """
    events, frames = facts["events"], facts["frames"]
    moving = [event["what"] in DIRECTIONS for event in events]
    if "spans" in facts:
        places = {number: place for place, number in enumerate(facts.get("kept") or range(frames))}
        spans = [
            range(start, end) if moves else [start + (end - start + 1) // 2 - 1]
            for moves, (start, end) in zip(moving, facts["spans"], strict=True)
        ]
        return [(places[frame], event) for event, span in enumerate(spans) for frame in span]
    shown = []
    for frame in range(1, frames):
        before, now = ((frame - back) * len(events) / (frames - 1) for back in (1, 0))
        event = int((before + now) / 2)
        if moving[event] or before < event + 0.5 <= now:
            shown.append((frame, event))
    return shown


def frame_events(samples: Sequence[Sample], ids: Tensor) -> Tensor:
    """Labels of all frames that show an event: row, position of the frame's last token, event, colour and form."""
    labels = []
    for row, sample in enumerate(samples):
        if not sample.video or "events" not in sample.facts:
            continue
        start = int((ids[row] == VIDEO).nonzero()[0, 0])
        for frame, number in _event_frames(sample.facts):
            event = sample.facts["events"][number]
            thing = sample.facts["things"][event["thing"]]
            words = (event["what"], thing["colour"], thing["shape"])
            classes = [kind.index(word) for kind, word in zip(_KINDS, words, strict=True)]
            labels.append([row, start + (frame + 1) * FRAME_TOKENS - 1, *classes])
    return torch.tensor(labels, dtype=torch.long).reshape(-1, 2 + len(_KINDS))


class Watching(nn.Module):
    """Watching: linear readers of the event that a frame shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.readers = nn.ModuleList(nn.Linear(width, len(kind)) for kind in _KINDS)

    def forward(self, hidden: Tensor, events: Tensor) -> Tensor:
        """Mean cross-entropy of event, colour and form; 0 without events."""
        if not len(events):
            return hidden.new_zeros(())
        events = events.to(hidden.device)
        states = self.norm(hidden[events[:, 0], events[:, 1]].float())
        misses = [
            nn.functional.cross_entropy(reader(states), classes)
            for reader, classes in zip(self.readers, events[:, 2:].T, strict=True)
        ]
        return torch.stack(misses).mean()


def with_lessons(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """The batch of those samples with the labels of the lessons."""
    return replace(batch, searches=searches(samples, batch.ids), frame_events=frame_events(samples, batch.ids))


class Lessons(nn.Module):
    """Weighted sum of the three lessons."""

    def __init__(self, width: int, relating: float, searching: float, watching: float) -> None:
        super().__init__()
        self.relating, self.searching, self.watching = Relating(width), Searching(width), Watching(width)
        self._weights = (relating, searching, watching)

    def forward(self, states: Sequence[Tensor], embeddings: Tensor, batch: Batch) -> Tensor:
        """Weighted loss."""
        third, half = states[(len(states) - 1) // 3], states[len(states) // 2]
        deeper = states[3 * len(states) // 4]
        assert batch.searches is not None
        assert batch.frame_events is not None
        relating, searching, watching = self._weights
        total: Tensor = (
            relating * self.relating(third, embeddings, batch)
            + searching * self.searching(half, deeper, batch.searches)
            + watching * self.watching(half, batch.frame_events)
        )
        return total


# -- drills --

_TURNS = 7
_SHORT = "In short."
_FRAMES = 12  # at most, so that rows of a batch have similar lengths
Turn = tuple[str, str]
Search = tuple[Turn, list[Thing]]  # a turn, and the things that it asks for


def _ask(task: str, rng: Random, facts: dict[str, Any]) -> str:
    questions = WORLD[task].grammars["dense"].questions
    assert callable(questions)
    return f"{questions(rng, facts)} {_SHORT}"


def _is_there(rng: Random, things: list[Thing]) -> Search:
    present, (colour, shape) = scenes.suspected(rng, things)
    facts = {"colour": colour, "shape": shape, "present": present}
    turn = _ask("existence", rng, facts), scenes.verdict(rng, facts)
    return turn, [thing for thing in things if key(thing) == (colour, shape)]


def _how_many(rng: Random, things: list[Thing]) -> Search:
    thing = rng.choice(things)
    kind = {k: thing[k] for k in rng.choice((("colour",), ("shape",), ("size",), ("colour", "shape")))}
    if rng.random() < 0.15:  # perhaps there are none
        kind = {k: rng.choice(list({"colour": COLOURS, "shape": SHAPES, "size": SIZES}[k])) for k in kind}
    counted = [other for other in things if all(other[k] == v for k, v in kind.items())]
    facts = {"asked": kind, "counted": counted}
    return (_ask("count", rng, facts), scenes.total(rng, facts)), counted


def _what_happens(rng: Random, facts: dict[str, Any]) -> Turn:
    question = videos.ask(rng, facts)
    letters = videos.lettered(rng, question) if rng.random() < 0.5 else {}
    known = {**facts, **question, **letters}
    return _ask("video-question", rng, known), videos.conclusion(rng, known)


def _conversation(task: str, facts: Any, turns: list[Turn], **media: Any) -> Sample:
    *before, (question, answer) = turns
    shown = {"images": (), **media}
    return Sample(task, question=question, answer=answer, facts=facts, labels=no_labels(), turns=tuple(before), **shown)


def _film_drill(rng: Random) -> Sample:
    seen = film(rng)
    while len(seen.video or ()) > _FRAMES:
        seen = film(rng)
    turns = [_what_happens(rng, dict(seen.facts)) for _ in range(_TURNS)]
    return _conversation("video-question", seen.facts, turns, video=seen.video, fps=seen.fps)


def _picture_drill(rng: Random) -> Sample:
    few = rng.random() < 0.6
    colours = rng.sample(list(COLOURS), 3) if few else list(COLOURS)
    shapes = rng.sample(SHAPES, 3) if few else list(SHAPES)
    things = scatter(rng, rng.randint(2, 7), colours=colours, shapes=shapes, sizes=SIZES, twins=True)
    kinds: tuple[Callable[[Random, list[Thing]], Search], ...] = (_is_there, _how_many)
    background = rng.choice(list(BACKGROUNDS))
    turns, searches = zip(*(rng.choice(kinds)(rng, things) for _ in range(_TURNS)), strict=True)
    return _conversation(
        "existence", {"things": things, "found": list(searches)}, list(turns), images=(render(background, things),)
    )


def drills(rng: Random, count: int) -> list[Sample]:
    """A batch of `count` drills on shapes, or of half as many on short videos."""
    if rng.random() < 0.3:
        return [_film_drill(rng) for _ in range(max(1, count // 2))]
    return [_picture_drill(rng) for _ in range(count)]
