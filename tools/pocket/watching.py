"""A lesson in watching: what happens in every frame of a video, and to which shape.

What a video tells is a few words on hundreds of frames' patches. So while it trains, the language model is also asked
at the end of every frame what has just happened, to a shape of which colour and form, from its hidden states at half
its depth. The linear readers that ask are thrown away afterwards.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.pocket.film import DIRECTIONS, WHATS
from saccade.pocket.sample import Facts, Sample
from saccade.pocket.words import COLOURS, SHAPES
from tools.pocket.chat import FRAME_TOKENS, VIDEO

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
