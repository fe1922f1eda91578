"""Prompts of one model from messages, with the images and videos that fill their placeholders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numpy import integer
from PIL import Image
from torch import Tensor

from saccade.errors import InputError, ModelError, SaccadeError
from saccade.inputs.batching import media_spans, without_media
from saccade.inputs.chat import (
    Controls,
    LiteralText,
    Message,
    Slot,
    as_text,
    check_unicode,
    normalise,
    render,
    with_sources,
)
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Family, Features, Marks
from saccade.inputs.families.other import Unknown
from saccade.inputs.media import LOCAL, SERVER, MediaLimits, Video, load_image, load_video
from saccade.inputs.parts import ProcessorParts, clean_video_settings, load_parts, read_eos, save_parts, settings_digest
from saccade.inputs.prompt import Medium, Prompt


class InputProcessor:
    """Maker of one model's prompts, token for token those of its Hugging Face processor, without torchvision."""

    def __init__(self, parts: ProcessorParts) -> None:
        self.config = parts.config  # the model's Hugging Face configuration
        self.tokenizer = parts.tokenizer  # the model's tokenizer
        self.eos_token_ids: tuple[int, ...] = read_eos(parts)  # ids that end an answer
        self.parts = parts  # everything in the checkpoint besides the weights
        self._family = family_of(parts.config)
        self._words = self._family.words(parts.tokenizer)
        self._known_controls: dict[str | None, Controls] = {}

    @cached_property
    def digest(self) -> str:
        """Hash of image and video settings and chat template."""
        return settings_digest(self.parts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> InputProcessor:
        """Read tokenizer, image and video settings and chat template of a checkpoint."""
        return cls(load_parts(os.fspath(path)))

    @classmethod
    def from_parts(
        cls,
        config: Any,
        tokenizer: Any,
        image_processor: Any = None,
        video_settings: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> InputProcessor:
        """Build from loaded parts."""
        eos = None if eos_token_ids is None else tuple(eos_token_ids)
        return cls(
            ProcessorParts(
                config,
                tokenizer,
                image_processor,
                clean_video_settings(video_settings or {}),
                chat_template,
                eos,
            )
        )

    def prompt(
        self,
        text_or_messages: str | Sequence[Message],
        images: Iterable[Any] = (),
        videos: Iterable[Any] = (),
        *,
        add_generation_prompt: bool = True,
        num_frames: int | None = None,
        fps: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        limits: MediaLimits = LOCAL,
        text_as_text: bool = False,
    ) -> Prompt:
        """Make one row's prompt."""
        sampling = sampling_of(num_frames, fps)
        images, videos = _listed(images, "images"), _listed(videos, "videos")
        messages, slots = self._conversation(text_or_messages, len(images), len(videos))
        check_unicode(messages)
        slots = _fill(slots, images, videos)
        self._refuse(slots)
        slots = load_slots(self._family, self.parts, slots, sampling, limits)
        template = self._template(slots)
        literal = LiteralText(self._controls(template), messages) if text_as_text else None
        if literal is not None:
            messages = literal.mark(messages)
        if template is None:
            given = text_or_messages
            if literal is not None and isinstance(given, str):
                given = literal.mark_text(given)
            text = self._bare(given, slots)
        else:
            if not self._family.reads_images:
                messages = as_text(messages)
            text = render(self.tokenizer, template, messages, add_generation_prompt, template_options or {})
        add_special_tokens = not self._has_special_tokens(text, templated=template is not None)
        if self._family.is_composite:
            return composite_prompt(self.parts, text, slots, add_special_tokens, literal)
        text, media = self._expand(text, slots, sampling)
        if literal is None:
            ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        else:
            ids = literal.encode(text, add_special_tokens)
        prompt = Prompt(tuple(ids), tuple(media))
        media_spans(self.config, prompt)  # raises unless every medium has found its tokens
        return prompt

    def load_media(
        self,
        messages: Sequence[Message],
        limits: MediaLimits = SERVER,
        *,
        num_frames: int | None = None,
        fps: float | None = None,
    ) -> list[dict[str, Any]]:
        """Load the images and videos of messages, beside the thread that runs the batch."""
        sampling = sampling_of(num_frames, fps)
        messages, slots = normalise(messages)
        slots = _fill(slots, [], [])
        self._refuse(slots)
        return with_sources(messages, load_slots(self._family, self.parts, slots, sampling, limits))

    def encode(self, text: str, *, text_as_text: bool = False, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text without chat template and media, which a model continues; arguments as in `prompt`."""
        check_unicode(text)
        if not text_as_text:
            return tuple(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        literal = LiteralText(self._controls(None), text)
        return tuple(literal.encode(literal.mark_text(text), add_special_tokens))

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Text of answer ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def text_only(self, prompt: Prompt) -> Prompt:
        """The prompt for a drafter without vision: one newline for every image or video.

        A medium's placeholders are removed with everything between and around them: row breaks, tile tags, timestamps,
        start and end tokens (the T view of TABED).
        """
        return without_media(self.config, self.tokenizer, prompt)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all files that `load` reads except the configuration, for a model with the same inputs."""
        save_parts(self.parts, Path(folder))

    def colour_scale(self, kind: str) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of the three colours, by which an ``image`` or a ``video`` is scaled."""
        parts = self.parts
        if kind == "video" and self._family.video_defaults is not None:
            settings = {**self._family.video_defaults, **parts.video_settings}
            return settings["image_mean"], settings["image_std"]
        return parts.image_processor.image_mean, parts.image_processor.image_std

    def _conversation(
        self, given: str | Sequence[Message], images: int, videos: int
    ) -> tuple[list[dict[str, Any]], list[Slot]]:
        if not isinstance(given, str):
            return normalise(given)
        parts = [{"type": "image"}] * images + [{"type": "video"}] * videos
        if not self._family.reads_images:
            slots = [Slot("image", None)] * images + [Slot("video", None)] * videos
            return [{"role": "user", "content": given}], slots
        return normalise([{"role": "user", "content": [*parts, {"type": "text", "text": given}]}])

    def _refuse(self, slots: Sequence[Slot]) -> None:
        """Refuse media that this model does not take."""
        family, name = self._family, self._family.name
        if family.is_composite:
            return
        if slots and not family.reads_images:
            raise InputError(f"The model {name} reads text only; leave out the {slots[0].kind}s or load a VLM.")
        if family.video_defaults is None and any(s.kind == "video" for s in slots):
            raise InputError(f"The model {name} takes images but no videos; give single frames as images.")
        if self.parts.image_processor is None and any(s.kind == "image" for s in slots):
            raise ModelError(f"The checkpoint has no image processor; load {name} from a complete checkpoint.")

    def _controls(self, template: str | None) -> Controls:
        """Control tokens of the tokenizer under a template."""
        if template not in self._known_controls:
            composite = self.parts.composite
            words = tuple(str(getattr(composite, f"{kind}_token", None) or "") for kind in ("image", "video"))
            if self._words is not None:
                own = self._words
                openers, closers = self._family.wrappers(own)
                words = (own.image, own.video or "", own.slot, *openers, *closers)
            self._known_controls[template] = Controls(self.tokenizer, template, words)
        return self._known_controls[template]

    def _template(self, slots: Sequence[Slot]) -> str | None:
        """Source of the chat template for a conversation with these media."""
        template = self.parts.chat_template or getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):  # several by name
            template = template.get("default")
        return self._family.chat_template(template, {s.kind for s in slots})

    def _bare(self, given: str | Sequence[Message], slots: Sequence[Slot]) -> str:
        """A string for a model without chat template."""
        if not isinstance(given, str):
            raise InputError(
                "The checkpoint has no chat template, so messages cannot be rendered; give the prompt as a string."
            )
        if self._family.is_composite:
            words = {kind: getattr(self.parts.composite, f"{kind}_token", "") for kind in ("image", "video")}
        elif self._words is None:
            return given
        else:
            words = {"image": self._words.slot, "video": self._words.video or ""}
        return "".join(self._family.raw.format(words[s.kind]) for s in slots) + given

    def _has_special_tokens(self, text: str, *, templated: bool) -> bool:
        """Whether the template wrote the special tokens itself; those of language models are taken to do so always."""
        if not self._family.reads_images:
            return templated
        bos = getattr(self.tokenizer, "bos_token", None)
        return templated and bos is not None and text.startswith(bos)

    def _expand(self, text: str, slots: Sequence[Slot], sampling: Mapping[str, Any]) -> tuple[str, list[Medium]]:
        """Put every medium's tokens in the place of its placeholder."""
        if self._words is None:
            return text, []
        names = {self._words.slot: "image"}
        if self._words.video:
            names[self._words.video] = "video"
        if self._words.image not in names and self._words.image in text:
            raise InputError(f"The text contains the placeholder {self._words.image}; take it out.")
        pieces = re.split("(" + "|".join(re.escape(name) for name in names) + ")", text)
        found = [names[piece] for piece in pieces[1::2]]
        wanted = [slot.kind for slot in slots]
        if sorted(found) != sorted(wanted):
            raise _miscounted(found, wanted, names)
        visuals = Visuals(self.parts, self._family, self._words)
        queues = {
            "image": iter(visuals.images([s.source for s in slots if s.kind == "image"])),
            "video": (visuals.video(s.source, sampling) for s in slots if s.kind == "video"),
        }
        media: list[Medium] = []
        for i, kind in enumerate(found):
            placed = next(queues[kind])
            pieces[2 * i + 1] = placed.text
            media += placed.media
        return "".join(pieces), media


def sampling_of(num_frames: int | None, fps: float | None) -> dict[str, float]:
    """Sampling of videos as given."""
    given = {name: value for name, value in (("num_frames", num_frames), ("fps", fps)) if value is not None}
    if len(given) > 1:
        raise InputError("Both num_frames and fps are given; give one of them.")
    for name, value in given.items():
        if value <= 0:
            raise InputError(f"The option {name} is {value}; give a number above 0.")
    return given


def _listed(given: Iterable[Any], name: str) -> list[Any]:
    if isinstance(given, (str, bytes, os.PathLike, Mapping)) or not isinstance(given, Iterable):
        raise InputError(f"{name.capitalize()} must come as a list, but one {type(given).__name__} was given; wrap it.")
    return list(given)


def _fill(slots: Sequence[Slot], images: list[Any], videos: list[Any]) -> list[Slot]:
    """Fill places without a source of their own from the caller's lists."""
    given = {"image": iter(images), "video": iter(videos)}
    missing = object()
    out = []
    for slot in slots:
        source = slot.source if slot.source is not None else next(given[slot.kind], missing)
        if source is missing:
            raise InputError(
                f"The messages have a place for {'an image' if slot.kind == 'image' else 'a video'} that none was "
                f"given for; pass as many {slot.kind}s as there are places."
            )
        out.append(Slot(slot.kind, source))
    for kind, rest in given.items():
        if left := len(list(rest)):
            raise InputError(
                f"{_counted(left, kind)} more than the messages have places for; add a part of type {kind} for each."
            )
    return out


def _miscounted(found: Sequence[str], wanted: Sequence[str], names: Mapping[str, str]) -> InputError:
    counts = ", ".join(
        f"{found.count(kind)} of {word} for {_counted(wanted.count(kind), kind)}" for word, kind in names.items()
    )
    return InputError(
        f"The rendered prompt has {counts}; take placeholders out of the text, or check that the chat template "
        "writes one for every image and video."
    )


def _counted(n: int, kind: str) -> str:
    return f"{n} {kind}{'' if n == 1 else 's'}"


_TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@dataclass(frozen=True, slots=True)
class Placed:
    """Replacement of one placeholder in the text."""

    text: str  # all placeholders and wrappers
    media: tuple[Medium, ...]  # one medium; for a video that the family takes as images, one per frame


@dataclass(frozen=True, slots=True)
class Visuals:
    """Maker of the media of one row."""

    parts: ProcessorParts  # of the checkpoint
    family: Family  # bound to its configuration
    words: Marks  # the family's placeholders

    def images(self, images: Sequence[Image.Image]) -> list[Placed]:
        """Make all images of the row together, because their number can change what each becomes."""
        return [self._image(f) for f in self.family.prepare_images(self._features, images)]

    def video(self, video: Video, sampling: Mapping[str, Any]) -> Placed:
        """Make one video of its sampled frames."""
        family = self.family
        settings = family.video_settings(self.parts.video_settings, sampling)
        tensors = family.video_tensors(video, settings)
        text = family.expand_video(self.words, tensors, video, settings)
        if family.frames_as_images:
            frames = enumerate(family.medium("image", t) for t in tensors)
            return Placed(text, tuple(replace(medium, frame=(i, len(tensors))) for i, medium in frames))
        return Placed(text, tuple(family.medium("video", t) for t in tensors))

    def _image(self, features: Features) -> Placed:
        tensors = {name: value for name, value in features.items() if name in self.family.visual_keys}
        return Placed(self.family.expand_image(self.words, features), (self.family.medium("image", tensors),))

    def _features(self, given: Any) -> Features:
        """Output of the image processor for images, in the nesting that the family wants."""
        try:
            return dict(self.parts.image_processor(given, return_tensors="pt", **self.family.settings()))
        except (ValueError, ZeroDivisionError, TypeError, OSError) as error:
            if isinstance(error, SaccadeError):
                raise
            sizes = ", ".join(f"{image.width}x{image.height}" for image in _flat(given))
            raise InputError(
                f"The image of {sizes} pixels cannot be prepared for {self.family.name} ({_reason(error)}); scale or "
                "crop it."
            ) from error


def load_slots(
    family: Family, parts: ProcessorParts, slots: Sequence[Slot], sampling: Mapping[str, Any], limits: MediaLimits
) -> list[Slot]:
    """Load the images of a conversation and those frames of its videos that a family uses."""
    if len(slots) > limits.media:
        raise InputError(f"The conversation has {len(slots)} images and videos; at most {limits.media} are accepted.")
    loaded = []
    pixels = 0
    for slot in slots:
        source: Image.Image | Video
        if slot.kind == "image":
            source = load_image(slot.source, limits)
            pixels += source.width * source.height
        else:
            source = sampled_video(family, parts, slot.source, sampling, limits)
            pixels += source.frames.size // 3
        if pixels > limits.total_pixels:
            raise InputError(
                f"The images and sampled frames have more than {limits.total_pixels} pixels together; send fewer or "
                "smaller ones."
            )
        loaded.append(Slot(slot.kind, source))
    return loaded


def sampled_video(
    family: Family, parts: ProcessorParts, source: Any, sampling: Mapping[str, Any], limits: MediaLimits = LOCAL
) -> Video:
    """Load a video with the frames that a family uses; all of them where its own processor samples."""
    if family.is_composite:
        return load_video(source, limits=limits)
    settings = family.video_settings(parts.video_settings, sampling)
    return load_video(source, lambda total, fps: family.sample_frames(total, fps, settings), limits)


def composite_prompt(
    parts: ProcessorParts,
    text: str,
    slots: Sequence[Slot],
    add_special_tokens: bool,
    literal: LiteralText | None = None,
) -> Prompt:
    """One row of a family outside the registry, through its own Hugging Face processor.

    All images and videos of the row become one medium; its tensors are the processor's output besides ids and masks.
    """
    family = family_of(parts.config)
    assert isinstance(family, Unknown)
    if parts.composite is None:
        raise ModelError(f"The family {family.name} is not built in; load its processor from a checkpoint.")
    media = {
        "images": [s.source for s in slots if s.kind == "image"],
        "videos": [s.source.frames for s in slots if s.kind == "video"],
    }
    try:
        processor = parts.composite
        if literal is not None and literal.character in text:
            processor = literal.through(processor)
        made = processor(
            text=[text],
            return_tensors="pt",
            add_special_tokens=add_special_tokens,
            **{kind: given for kind, given in media.items() if given},
        )
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise InputError(
            f"The processor of {family.name} refuses the prompt ({_reason(error)}); check its images."
        ) from error
    ids = tuple(made["input_ids"][0].tolist())
    tensors = {k: v for k, v in made.items() if k not in _TEXT_KEYS and hasattr(v, "shape")}
    return Prompt(ids, (family.whole_medium(ids, tensors),) if tensors else ())


def _flat(images: Any) -> list[Image.Image]:
    return [image for nested in images for image in _flat(nested)] if isinstance(images, list) else [images]


def _reason(error: Exception) -> str:
    """First line of a foreign error, without its full stop."""
    return "".join(str(error).strip().rstrip(".").splitlines()[:1])


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
