"""Lessons."""

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
    """Which cells of a picture differ from those of the one before: `[P, 3, S, S]` to `[P - 1, across * across]`."""
    size = GRID * PATCH_SIZE // across
    differs = (pictures[1:] != pictures[:-1]).any(1).float()
    return nn.functional.max_pool2d(differs, size).flatten(1) > 0


def _places(row: Tensor, mark: int, count: int, each: int, between: int) -> Tensor | None:
    """Where the patches of adjoining pictures are in a prompt: `[count, each]`; None if words stand between them."""
    at = (row == mark).nonzero()[:, 0]
    starts = at[0] + (each + between) * torch.arange(count)
    places = starts[:, None] + torch.arange(each)
    return places if at[-1] < starts[-1] + each + NEWLINE else None


def pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Rows, places, places one picture before, and whether the two differ, of all patches that have one before.

    `[n]` each; None where no row has several pictures or frames without words between them.
    """
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
                found.append(
                    (torch.full_like(now, row), now, before, _changed(shown[mine], across).flatten())
                )
    if not found:
        return None
    rows, now, before, changed = (torch.cat(part) for part in zip(*found, strict=True))
    return rows, now, before, changed


class Relating(nn.Module):
    """Reads from hidden states whether a patch has changed and what it showed before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.changed = nn.Linear(width, 1)
        self.before = nn.Linear(width, width)

    def forward(self, hidden: Tensor, seen: Tensor, batch: Batch) -> Tensor:
        """How badly it reads, 0 where there is nothing to compare.

        Args:
            hidden: `[B, N, d]`.
            seen: the input embeddings `[B, N, d]`.
        """
        found = pairs(batch)
        if found is None:
            return hidden.new_zeros(())
        rows, now, before, changed = (part.to(hidden.device) for part in found)
        states = self.norm(hidden[rows, now].float())
        was = seen[rows, before].detach().float()
        scale = was.std().clamp(min=1e-6)
        flags: Tensor = nn.functional.binary_cross_entropy_with_logits(
            self.changed(states)[:, 0], changed.float()
        )
        if not changed.any():
            return flags
        misses: Tensor = (self.before(states[changed]) - (was[changed] - was.mean(0)) / scale).square().mean()
        return flags + misses


PLACES = [(row, column) for row in ROWS for column in COLUMNS]
_CROWD = 3  # so many in one place, or more, are not told apart
_MOST = 8
_TOTAL = 0.3  # what reading the total weighs beside the places


def _asked(sample: Sample) -> list[list[Thing] | None]:
    """What every question of a sample asks for and the picture has; None where it does not ask for things."""
    if "found" in sample.facts:
        return list(sample.facts["found"])
    if sample.task == "count":
        return [sample.facts["counted"]]
    if sample.task == "existence":
        suspect = key(dict(sample.facts))
        return [[thing for thing in sample.facts["reason"] if key(thing) == suspect]]
    return [None] * (len(sample.turns) + 1)


def sought(samples: Sequence[Sample], ids: Tensor) -> Tensor:
    """Of every question that asks for things: its row, where its answer begins, how many each place has, and all have.

    `[Q, 2 + 9 + 1]`.

    Args:
        ids: the samples' conversations, `[B, N]`.
    """
    told = []
    for row, sample in enumerate(samples):
        begins = (ids[row] == ASSISTANT).nonzero()[:, 0].tolist()
        for begin, found in zip(begins, _asked(sample), strict=True):
            if found is not None:
                there = [(thing["row"], thing["column"]) for thing in found]
                many = (min(there.count(place), _CROWD) for place in PLACES)
                told.append([row, begin, *many, min(len(found), _MOST)])
    return torch.tensor(told, dtype=torch.long).reshape(-1, 2 + len(PLACES) + 1)


class Searching(nn.Module):
    """Reads from hidden states how many of what a question asks for each place of a picture has, and all have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.total_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.there = nn.Linear(width, len(PLACES) * (_CROWD + 1))
        self.total = nn.Linear(width, _MOST + 1)

    def forward(self, hidden: Tensor, deeper: Tensor, asked: Tensor) -> Tensor:
        """How badly it reads, 0 where nothing is sought.

        Args:
            hidden, deeper: where places and totals are read, `[B, N, d]`.
            asked: as `sought` gives it.
        """
        if not len(asked):
            return hidden.new_zeros(())
        asked = asked.to(hidden.device)
        rows, begins = asked[:, 0], asked[:, 1]
        places = self.there(self.norm(hidden[rows, begins].float())).view(-1, _CROWD + 1)
        total = self.total(self.total_norm(deeper[rows, begins].float()))
        misses: Tensor = nn.functional.cross_entropy(places, asked[:, 2:-1].flatten())
        return misses + _TOTAL * nn.functional.cross_entropy(total, asked[:, -1])


_KINDS = (list(WHATS), list(COLOURS), list(SHAPES))


def _seen(facts: Facts) -> list[tuple[int, int]]:
    """Frames in which something is seen to happen, each with the number of that event."""
    if "spans" in facts:
        return _spanned(facts)
    events, frames = facts["events"], facts["frames"]
    told = []
    for frame in range(1, frames):
        before, now = ((frame - back) * len(events) / (frames - 1) for back in (1, 0))
        event = int((before + now) / 2)
        # A move is under way all the time; what comes, goes, grows or shrinks does so at half its time.
        if events[event]["what"] in DIRECTIONS or before < event + 0.5 <= now:
            told.append((frame, event))
    return told


def _spanned(facts: Facts) -> list[tuple[int, int]]:
    """The same of a video whose events take known frames, with the frames numbered as they are shown."""
    numbers = facts.get("kept") or range(facts["frames"])
    places = {number: place for place, number in enumerate(numbers)}
    told = []
    for event, (start, end) in enumerate(facts["spans"]):
        at_half = start + (end - start + 1) // 2 - 1
        moving = facts["events"][event]["what"] in DIRECTIONS
        told += [(places[frame], event) for frame in (range(start, end) if moving else [at_half])]
    return told


def happening(samples: Sequence[Sample], ids: Tensor) -> Tensor:
    """Of every frame in which something is seen to happen: row, its last token, what, and the shape's colour and form.

    `[E, 5]`.

    Args:
        ids: the samples' conversations, `[B, N]`.
    """
    told = []
    for row, sample in enumerate(samples):
        if not sample.video or "events" not in sample.facts:
            continue
        start = int((ids[row] == VIDEO).nonzero()[0, 0])
        for frame, number in _seen(sample.facts):
            event = sample.facts["events"][number]
            thing = sample.facts["things"][event["thing"]]
            words = (event["what"], thing["colour"], thing["shape"])
            classes = [kind.index(word) for kind, word in zip(_KINDS, words, strict=True)]
            told.append([row, start + (frame + 1) * FRAME_TOKENS - 1, *classes])
    return torch.tensor(told, dtype=torch.long).reshape(-1, 2 + len(_KINDS))


class Watching(nn.Module):
    """Reads from hidden states what happens in a frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.readers = nn.ModuleList(nn.Linear(width, len(kind)) for kind in _KINDS)

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        """How badly it reads, 0 where nothing happens.

        Args:
            hidden: `[B, N, d]`.
            seen: as `happening` gives it.
        """
        if not len(seen):
            return hidden.new_zeros(())
        seen = seen.to(hidden.device)
        states = self.norm(hidden[seen[:, 0], seen[:, 1]].float())
        misses = [
            nn.functional.cross_entropy(reader(states), classes)
            for reader, classes in zip(self.readers, seen[:, 2:].T, strict=True)
        ]
        return torch.stack(misses).mean()


def taught(batch: Batch, samples: Sequence[Sample]) -> Batch:
    """The batch of those samples with what the lessons ask of it."""
    return replace(batch, sought=sought(samples, batch.ids), happening=happening(samples, batch.ids))


class Lessons(nn.Module):
    """The lessons in comparing, searching and watching, each weighed; its readers are of no use afterwards."""

    def __init__(self, width: int, relating: float, searching: float, watching: float) -> None:
        super().__init__()
        self.relating, self.searching, self.watching = Relating(width), Searching(width), Watching(width)
        self._weights = (relating, searching, watching)

    def forward(self, states: Sequence[Tensor], seen: Tensor, batch: Batch) -> Tensor:
        """How badly all are answered.

        Args:
            states: the hidden states after every layer, `[B, N, d]` each.
            seen: the input embeddings `[B, N, d]`.
        """
        third, half = states[(len(states) - 1) // 3], states[len(states) // 2]
        deeper = states[3 * len(states) // 4]
        assert batch.sought is not None
        assert batch.happening is not None
        relating, searching, watching = self._weights
        total: Tensor = (
            relating * self.relating(third, seen, batch)
            + searching * self.searching(half, deeper, batch.sought)
            + watching * self.watching(half, batch.happening)
        )
        return total
