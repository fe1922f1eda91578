"""Prompts of one model from messages, images and videos."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from saccade.errors import InputError, ModelError
from saccade.inputs.batching import media_spans
from saccade.inputs.chat import Message, Slot, as_text, normalise, render, with_sources
from saccade.inputs.families import family_of
from saccade.inputs.literal import Controls, LiteralText, check_unicode
from saccade.inputs.media import LOCAL, SERVER, MediaLimits
from saccade.inputs.parts import (
    Parts,
    clean_video_settings,
    load_parts,
    read_eos,
    save_parts,
    settings_digest,
)
from saccade.inputs.placeholders import without_media
from saccade.inputs.prompt import Medium, Prompt
from saccade.inputs.visuals import Visuals, composite_prompt, load_slots


class InputProcessor:
    """Maker of one model's prompts, token for token those of its Hugging Face processor, without torchvision."""

    def __init__(self, parts: Parts) -> None:
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
            Parts(
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
