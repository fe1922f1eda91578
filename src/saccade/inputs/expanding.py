"""The token sequence that stands for one image or video in the text: one place per visual token, and its frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from saccade.errors import ModelError
from saccade.inputs.counting import count, pixtral_grid
from saccade.inputs.families import family_of, kind_of
from saccade.inputs.video import ASSUMED_FPS, Video


@dataclass(frozen=True, slots=True)
class Words:
    """The strings of a family's placeholders and wrappers.

    Attributes:
        image: fills every image token.
        video: fills every video token, or stands for a whole video in the chat template; None without video.
        slot: what the chat template writes for an image (the same as ``image`` but for Gemma 3).
        opener: in front of an image, "" where there is none.
        closer: behind an image.
    """

    image: str
    video: str | None
    slot: str
    opener: str
    closer: str

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> Words | None:
        """Read the strings from the configuration's ids and the tokenizer; None for a text family.

        Raises:
            ModelError: the tokenizer does not know the configuration's image token.
        """
        family, name = family_of(config), kind_of(config)
        if family is None or family.layout == "text":
            return None
        opener = family.openers[0] if family.openers else ""
        closer = family.closers[0] if family.closers else ""
        if name == "gemma3":
            opener, closer = (_string(tokenizer, i) for i in (config.boi_token_index, config.eoi_token_index))
        image = _string(tokenizer, config.image_token_id)
        video = None
        if family.video and family.video.form == "frames":
            video = getattr(tokenizer, "video_token", None) or "<video>"
        elif family.video:
            video = _string(tokenizer, config.video_token_id)
        return cls(image, video, opener if name == "gemma3" else image, opener, closer)


def expand_image(config: Any, words: Words, features: Mapping[str, Any]) -> str:
    """The text of one image.

    Args:
        config: the model's Hugging Face configuration.
        words: the family's placeholders.
        features: what the image processor made of this image alone.
    """
    name = kind_of(config)
    family = family_of(config)
    layout = family.layout if family else "text"
    if layout == "pixtral":
        rows, columns = pixtral_grid(config, features["image_sizes"])
        return "[IMG_BREAK]".join([words.image * columns] * rows) + words.closer
    if layout == "tiles":
        rows, columns = (int(features[k][0][0]) for k in ("rows", "cols"))
        return _tiled(words, rows, columns, count(config, "image", features) // (rows * columns + 1))
    run = words.image * count(config, "image", features)
    if name == "gemma3":
        return f"\n\n{words.opener}{run}{words.closer}\n\n"
    return f"{words.opener}{run}{words.closer}" if layout == "runs" else run


def expand_video(
    config: Any, words: Words, tensors: Sequence[Mapping[str, Any]], video: Video, step: int
) -> str:
    """The text of one video.

    Args:
        config: the model's Hugging Face configuration.
        words: the family's placeholders.
        tensors: of the video, or of its frames where a family takes them as images.
        video: the frames and their times.
        step: frames per temporal patch.
    """
    name = kind_of(config)
    family = family_of(config)
    if family is not None and family.stamps_video:
        total = count(config, "video", tensors[0])
        times = _patch_times(video, step)
        run = (words.video or "") * (total // len(times))
        return "".join(f"<{t:.1f} seconds>{words.opener}{run}{words.closer}" for t in times)
    if name == "internvl":
        frame = expand_image(config, words, tensors[0])
        return "\n".join(f"Frame{i}: {frame}" for i in range(1, len(tensors) + 1))
    if name == "smolvlm":
        frame = expand_image(config, words, {**tensors[0], "rows": [[0]], "cols": [[0]]})
        stamps = ((int(t // 60), int(t % 60)) for t in video.timestamps)
        return (
            f"You are provided the following series of {number_words(len(tensors))} frames from a "
            f"{timedelta(seconds=int(video.duration))} [H:MM:SS] video.\n"
            + "".join(f"\nFrame from {m:02d}:{s:02d}:{frame}" for m, s in stamps)
            + "\n\n"
        )
    return (words.video or "") * count(config, "video", tensors[0])


_SMALL = (
    "zero one two three four five six seven eight nine ten "
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def number_words(n: int) -> str:
    """An integer from 0 to 999 in English, as SmolVLM was trained to read it."""
    small, tens = _SMALL.split(), _TENS.split()
    if n < 20:
        return small[n]
    if n < 100:
        return tens[n // 10 - 2] + (f"-{small[n % 10]}" if n % 10 else "")
    return f"{small[n // 100]} hundred" + (f" and {number_words(n % 100)}" if n % 100 else "")


def _tiled(words: Words, rows: int, columns: int, run: int) -> str:
    """Idefics3: every tile behind its row and column, then the whole image."""
    seen = words.image * run
    whole = f"{words.opener}<global-img>{seen}{words.opener}"
    if not rows and not columns:
        return whole
    lines = (
        "".join(f"{words.opener}<row_{r}_col_{c}>{seen}" for c in range(1, columns + 1))
        for r in range(1, rows + 1)
    )
    return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


def _patch_times(video: Video, step: int) -> list[float]:
    """Seconds in the middle between the first and the last frame of every temporal patch."""
    times = [i / (video.fps or ASSUMED_FPS) for i in video.indices]
    times += times[-1:] * (-len(times) % step)
    return [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]


def _string(tokenizer: Any, token: int) -> str:
    text = tokenizer.convert_ids_to_tokens(int(token)) if 0 <= token < len(tokenizer) else None
    if text is None:
        raise ModelError(
            f"The tokenizer has no token {token}, which the configuration names as a placeholder; use the "
            "tokenizer of this checkpoint."
        )
    return str(text)
