"""Public calls into rows: one prompt or a batch, with the media and the seed of every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy import integer

from saccade.errors import InputError
from saccade.inputs.families import family_of
from saccade.inputs.media import LOCAL, MediaLimits
from saccade.inputs.processor import InputProcessor
from saccade.inputs.prompt import Prompt
from saccade.inputs.visuals import sampled_video

Messages = Sequence[Mapping[str, Any]]
"""One conversation in Hugging Face's or OpenAI's content-list form."""

Question = str | Messages | Prompt
"""Prompt of one row as a caller writes it."""


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row as the caller gave it, images loaded."""

    question: Question  # string, messages or `Prompt`
    images: Sequence[Any]
    videos: Sequence[Any]
    options: Mapping[str, Any]  # of `InputProcessor.prompt`

    def prompt(self, processor: InputProcessor) -> Prompt:
        """Prompt for one model."""
        if isinstance(self.question, Prompt):
            if self.images or self.videos:
                raise InputError("A Prompt holds its media already; leave images and videos out.")
            return self.question
        return processor.prompt(self.question, self.images, self.videos, **self.options)


def is_batch(prompt: Any) -> bool:
    """Whether a prompt is several, each a string, a list of messages or a `Prompt`."""
    if isinstance(prompt, (str, Prompt)):
        return False
    if isinstance(prompt, Sequence) and prompt:
        if isinstance(prompt[0], Mapping):
            return False
        if all(isinstance(p, (str, Prompt)) or (isinstance(p, Sequence) and p) for p in prompt):
            return True
    raise InputError("The prompt must be a string, a list of messages, or a non-empty list of these.")


def per_row(media: Any, rows: int, batch: bool, name: str) -> list[list[Any]]:
    """Every row's list of images or videos."""
    if not batch:
        return [one_or_more(media)]
    if isinstance(media, (list, tuple)) and not media:
        return [[] for _ in range(rows)]
    if (
        not isinstance(media, (list, tuple))
        or len(media) != rows
        or not all(isinstance(m, (list, tuple)) for m in media)
    ):
        raise InputError(f"For a batch of {rows} prompts, {name} must be a list of {rows} lists, one per prompt.")
    return [list(m) for m in media]


def seeds_of(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """Every row's seed: given, counted on from one, or drawn from torch's global generator."""
    if seed is None:
        seed = int(torch.randint(2**31, ()).item())
    seeds = [seed + b for b in range(rows)] if _is_seed(seed) else seed  # type: ignore[operator]
    if not isinstance(seeds, (list, tuple, range)) or not all(_is_seed(s) for s in seeds):
        raise InputError(f"The seed must be a whole number from 0 to 2**63 - 1, or one per prompt, not {seed!r}.")
    if len(seeds) != rows:
        raise InputError(f"There are {rows} prompts but {len(seeds)} seeds; give one seed, or one per prompt.")
    return [int(s) for s in seeds]


def _is_seed(seed: Any) -> bool:
    return isinstance(seed, (int, integer)) and not isinstance(seed, bool) and 0 <= int(seed) < 2**63


def kept_video(
    processor: InputProcessor,
    source: Any,
    num_frames: float | None = None,
    fps: float | None = None,
    limits: MediaLimits = LOCAL,
) -> Any:
    """Load the frames that a prompt with this sampling uses, so that later prompts use the same ones."""
    family = family_of(processor.config)
    given = {name: n for name, n in (("num_frames", num_frames), ("fps", fps)) if n is not None}
    if not family.is_composite and (
        family.video_defaults is None or len(given) > 1 or any(n <= 0 for n in given.values())
    ):
        return source
    return sampled_video(family, processor.parts, source, given, limits)


def one_or_more(media: Any) -> list[Any]:
    """A list of images or videos, or a single one, as a list."""
    return list(media) if isinstance(media, (list, tuple)) else [media]
