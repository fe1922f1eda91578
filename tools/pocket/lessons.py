"""Lessons: auxiliary losses on hidden states, by linear readers that are discarded after training.

Answers are some forty tokens on hundreds of visual tokens, and teach slowly where to look. The lessons add labels:

- comparing, at a third of the depth: at each patch of a later picture or frame, whether it changed and its embedding
  one picture before;
- searching, where an answer begins: the number of things asked for in each of the picture's nine cells, at half the
  depth, and their total, at three quarters;
- watching, at half the depth: at the end of each video frame its event, with colour and form of the shape.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from saccade.pocket.film import DIRECTIONS, WHATS
from saccade.pocket.labels import GRID, PATCH_SIZE
from saccade.pocket.sample import Facts, Sample
from saccade.pocket.shapes import Thing, key
from saccade.pocket.words import COLOURS, COLUMNS, ROWS, SHAPES
from tools.pocket.batches import Batch
from tools.pocket.processor import ASSISTANT, FRAME_TOKENS, IMAGE, NEWLINE, PATCHES, VIDEO


def _changed(pictures: Tensor, across: int) -> Tensor:
    """Cells of pictures `[P, 3, S, S]` that differ from the picture before: `[P - 1, across * across]`."""
    size = GRID * PATCH_SIZE // across
    differs = (pictures[1:] != pictures[:-1]).any(1).float()
    return nn.functional.max_pool2d(differs, size).flatten(1) > 0


def _places(row: Tensor, mark: int, count: int, each: int, between: int) -> Tensor | None:
    """Positions of the patches of adjoining pictures, `[count, each]`; None if there is text between them."""
    at = (row == mark).nonzero()[:, 0]
    starts = at[0] + (each + between) * torch.arange(count)
    places = starts[:, None] + torch.arange(each)
    return places if at[-1] < starts[-1] + each + NEWLINE else None


def pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Pairs of a patch and the same patch one picture before."""
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
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
            places = _places(batch.ids[row], mark, count, each, between)
            if places is not None:
                now, before = places[1:].flatten(), places[:-1].flatten()
                found.append((torch.full_like(now, row), now, before, _changed(shown[mine], across).flatten()))
    if not found:
        return None
    rows, now, before, changed = (torch.cat(part) for part in zip(*found, strict=True))
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
    told = []
    for row, sample in enumerate(samples):
        begins = (ids[row] == ASSISTANT).nonzero()[:, 0].tolist()
        for begin, found in zip(begins, _searched(sample), strict=True):
            if found is not None:
                there = [(thing["row"], thing["column"]) for thing in found]
                many = (min(there.count(place), _CROWD) for place in PLACES)
                told.append([row, begin, *many, min(len(found), _MOST)])
    return torch.tensor(told, dtype=torch.long).reshape(-1, 2 + len(PLACES) + 1)


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
    """Frames that show an event, each with the number of the event."""
    if "spans" in facts:
        return _event_frames_by_span(facts)
    events, frames = facts["events"], facts["frames"]
    told = []
    for frame in range(1, frames):
        before, now = ((frame - back) * len(events) / (frames - 1) for back in (1, 0))
        event = int((before + now) / 2)
        # A move shows in all of its frames; what appears, leaves, grows or shrinks does so at half its time.
        if events[event]["what"] in DIRECTIONS or before < event + 0.5 <= now:
            told.append((frame, event))
    return told


def _event_frames_by_span(facts: Facts) -> list[tuple[int, int]]:
    """The same for a video with known spans; frames are numbered as they are shown."""
    numbers = facts.get("kept") or range(facts["frames"])
    places = {number: place for place, number in enumerate(numbers)}
    told = []
    for event, (start, end) in enumerate(facts["spans"]):
        at_half = start + (end - start + 1) // 2 - 1
        moving = facts["events"][event]["what"] in DIRECTIONS
        told += [(places[frame], event) for frame in (range(start, end) if moving else [at_half])]
    return told


def frame_events(samples: Sequence[Sample], ids: Tensor) -> Tensor:
    """Labels of all frames that show an event: row, position of the frame's last token, event, colour and form."""
    told = []
    for row, sample in enumerate(samples):
        if not sample.video or "events" not in sample.facts:
            continue
        start = int((ids[row] == VIDEO).nonzero()[0, 0])
        for frame, number in _event_frames(sample.facts):
            event = sample.facts["events"][number]
            thing = sample.facts["things"][event["thing"]]
            words = (event["what"], thing["colour"], thing["shape"])
            classes = [kind.index(word) for kind, word in zip(_KINDS, words, strict=True)]
            told.append([row, start + (frame + 1) * FRAME_TOKENS - 1, *classes])
    return torch.tensor(told, dtype=torch.long).reshape(-1, 2 + len(_KINDS))


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
