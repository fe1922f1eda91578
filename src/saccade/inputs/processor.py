"""Prompts of one model from messages: `InputProcessor.prompt`, which decodes the media that `load_media` has not."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jinja2 import TemplateError
from numpy import floating, integer, ndarray
from PIL import Image
from torch import Tensor

from saccade.errors import InputError, ModelError, SaccadeError, SaccadeWarning
from saccade.inputs.families import Unknown, family_of
from saccade.inputs.families.family import KINDS, Features, Kind, Medium, Prompt
from saccade.inputs.literal_text import Controls, LiteralText
from saccade.inputs.media import LOCAL, MediaLimits, Video, load_image, load_video
from saccade.inputs.media.videos import ASSUMED_FPS
from saccade.options import FrameOptions
from saccade.wording import count, first_line

Message = Mapping[str, Any]
Messages = Sequence[Message]
"""One conversation in Hugging Face's or OpenAI's content-list form."""
Question = str | Messages | Prompt
"""Prompt of one row as a caller writes it."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that every template may get; others must occur in the template itself."""

_SOURCES = ("url", "path", "base64", "data")
_SAMPLING = ("num_frames", "fps")
_NO_MATTER = ("detail", "cache_control")  # for other servers; no answer here depends on them


@dataclass(frozen=True, slots=True)
class MediaOptions(FrameOptions):
    """How the images, videos and texts of a prompt are read; options as of `VLM.generate`."""

    limits: MediaLimits = LOCAL
    text_as_text: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.sampling) > 1:
            raise InputError("Both num_frames and fps are given; give one of them.")
        for name, value in self.sampling.items():
            kinds = (int, integer) if name == "num_frames" else (int, float, integer, floating)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                raise InputError(f"The option {name} is {value!r}; give a number above 0.")

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling of videos, where it is not the checkpoint's own."""
        options = {"num_frames": self.num_frames, "fps": self.fps}
        return {name: value for name, value in options.items() if value is not None}


DEFAULT_MEDIA = MediaOptions()


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for an image or a video in a conversation."""

    kind: Kind
    source: Any  # from the message itself; None when it comes from the list of images or videos
    # of a video alone: its own `num_frames` or `fps`, and None for the other one
    sampling: Mapping[str, Any] = field(default_factory=dict)


class InputProcessor:
    """Maker of one model's prompts, token for token those of its Hugging Face processor, without torchvision."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        image_processor: Any = None,
        video_settings: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        eos_token_ids: int | Sequence[int] | None = None,
        composite: Any = None,
    ) -> None:
        self.config = config  # the model's Hugging Face configuration
        self.tokenizer = tokenizer  # its tokenizer
        self.image_processor = image_processor  # None for language models
        self.video_settings = _video_settings(video_settings or {})  # content of its video configuration file
        self.chat_template = chat_template  # Jinja source, where it is not the tokenizer's own
        self.eos_token_ids = _ids(eos_token_ids) or self._configured_eos()  # ids that end an answer
        self.composite = composite  # its whole Hugging Face processor, for families outside the registry only
        self._family = family_of(config)
        self._placeholders: dict[Kind, str] = self._family.placeholders(tokenizer)
        for kind in KINDS if not self._family.is_known else ():
            self._placeholders[kind] = str(getattr(composite, f"{kind}_token", None) or "")
        slot = self._family.slot
        self._slots = {**self._placeholders, "image": slot} if slot else self._placeholders  # in the chat template
        self._known_controls: dict[str | None, Controls] = {}

    @cached_property
    def digest(self) -> str:
        """Hash of image and video settings and chat template."""
        processors = [getattr(self.composite, f"{kind}_processor", None) for kind in KINDS]
        image, *others = (_plain({} if p is None else p.to_dict()) for p in (self.image_processor, *processors))
        template = self.chat_template or getattr(self.tokenizer, "chat_template", None)
        content = json.dumps([image, _plain(self.video_settings), template, *others], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def prompt(
        self,
        text_or_messages: str | Sequence[Message],
        images: Iterable[Any] = (),
        videos: Iterable[Any] = (),
        options: MediaOptions = DEFAULT_MEDIA,
        *,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """Make one row's prompt."""
        images = _listed(images, "images")
        videos = _listed(videos, "videos")
        conversation = text_or_messages
        if isinstance(conversation, str):
            places = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
            conversation = [{"role": "user", "content": [*places, {"type": "text", "text": conversation}]}]
        messages, slots = normalise(conversation)
        check_unicode([messages, options.template_options])
        slots = self._decoded(_fill(slots, images, videos), options)
        template = self._template(slots, options)
        text, literal = self._rendered(template, messages, options, add_generation_prompt)
        if template is None:
            text = self._bare(text_or_messages, literal, slots)
        elif not self._family.is_known:  # whose placeholders may be unknown
            for fewer in without_each_medium(messages):
                if self._rendered(template, fewer, options, add_generation_prompt)[0] == text:
                    raise self._dropped("The chat template")
        bos = getattr(self.tokenizer, "bos_token", None)
        # the template may write the special tokens itself; those of language models are taken to do so always
        has_special = not self._family.reads_images or (bos is not None and text.startswith(bos))
        add_special_tokens = template is None or not has_special
        if self._family.is_known:
            text, media = self._expand(text, slots, options)
            if literal is None:
                ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            else:
                ids = literal.encode(text, add_special_tokens)
            prompt = Prompt(tuple(ids), tuple(media))
        else:
            prompt = self._composite_prompt(text, slots, add_special_tokens, literal)
        self._check_media(slots, prompt)
        return prompt

    def generation_prompt(self, messages: Sequence[Message], options: MediaOptions) -> str:
        """Text that the chat template writes after the messages for the answer to begin with."""
        if options.template_options.get("add_generation_prompt") is False:
            return ""
        messages, slots = normalise(messages)
        template = self._template(slots, options)
        whole, _ = self._rendered(template, messages, options, add_generation_prompt=True)
        bare, _ = self._rendered(template, messages, options, add_generation_prompt=False)
        shared = os.path.commonprefix((whole, bare))  # noqa: RUF071  (sign by sign, as it says)
        if shared != whole:
            return whole.removeprefix(shared)
        # a template that writes it in any case: what is after the last message
        *before, last = messages
        mark = f"{last['role']} \ufdd0"
        content = [{"type": "text", "text": mark}] if isinstance(last.get("content"), list) else mark
        text = ""
        with suppress(InputError):  # of a template that reads what the message says
            text, _ = self._rendered(template, [*before, {**last, "content": content}], options, True)
        return text.rpartition("\ufdd0")[2]

    def load_media(self, messages: Sequence[Message], options: MediaOptions) -> list[dict[str, Any]]:
        """Load the images and videos of messages, in a thread that does not run the batch."""
        messages, slots = normalise(messages)
        return with_sources(messages, self._decoded(_fill(slots, [], []), options))

    def load_video(self, source: Any, options: MediaOptions) -> Any:
        """Load those frames of a video that prompts with these options use; as it is for a model without videos.

        Of frames that are no file all are used, unless the options name a number or a rate.
        """
        family, asked = self._family, options.sampling
        if family.is_known and family.video_defaults is None:
            return source
        is_list = isinstance(source, (list, tuple, ndarray))
        if is_list and (family.reads_times or "fps" in asked):
            warnings.warn(
                f"The frames of a video have no times, so that {ASSUMED_FPS:g} a second are assumed; give "
                "saccade.inputs.media.Video(frames, fps=...) or Video(frames, times=...).",
                SaccadeWarning,
                stacklevel=2,
            )
        # the processor of another family samples by itself
        if not asked and (is_list or isinstance(source, Video) or not family.is_known):
            return load_video(source, limits=options.limits)
        settings = family.video_settings(self.video_settings, asked)
        return load_video(source, lambda total, fps: family.sample_frames(total, fps, settings), options.limits)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of media that the model takes."""
        family = self._family
        if not family.is_known:
            return tuple(kind for kind in KINDS if getattr(self.composite, f"{kind}_processor", None) is not None)
        taken = {"image": family.reads_images, "video": family.video_defaults is not None}
        return tuple(kind for kind in KINDS if taken[kind])

    def encode(self, text: str, *, text_as_text: bool = False, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text without chat template and media, which a model continues."""
        check_unicode(text)
        if not text_as_text:
            return tuple(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        literal = LiteralText(self._controls(None), [text])
        return tuple(literal.encode(literal.mark_text(text), add_special_tokens))

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Text of answer ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def text_only(self, prompt: Prompt) -> Prompt:
        """The prompt for a drafter without vision: one newline for every image or video (the T view of TABED)."""
        return self._family.without_media(self.tokenizer, prompt)

    def colour_scale(self, kind: str) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of the three colours, by which an ``image`` or a ``video`` is scaled."""
        if kind == "video" and self._family.video_defaults is not None:
            settings = {**self._family.video_defaults, **self.video_settings}
            return settings["image_mean"], settings["image_std"]
        return self.image_processor.image_mean, self.image_processor.image_std

    def _configured_eos(self) -> tuple[int, ...]:
        """Ids that end an answer: the model's configuration's, else the tokenizer's."""
        for owner in (self.config, self.config.get_text_config(decoder=True), self.tokenizer):
            if (ids := _ids(getattr(owner, "eos_token_id", None))) is not None:
                return ids
        return ()

    def _decoded(self, slots: Sequence[Slot], options: MediaOptions) -> list[Slot]:
        """Decode the images of a conversation and the sampled frames of its videos, unless the model takes none."""
        family, limits = self._family, options.limits
        kinds, name = {slot.kind for slot in slots}, family.name
        if slots and not family.reads_images:
            raise InputError(f"The model {name} reads text only; leave out the {slots[0].kind}s or load a VLM.")
        if "video" in kinds and "video" not in self.kinds:
            raise InputError(f"The model {name} takes images but no videos; give single frames as images.")
        if family.is_known and self.image_processor is None and "image" in kinds:
            raise ModelError(f"The checkpoint has no image processor; load {name} from a complete checkpoint.")
        if len(slots) > limits.media:
            raise InputError(
                f"The conversation has {len(slots)} images and videos; at most {limits.media} are accepted."
            )
        loaded = []
        pixels = 0
        for slot in slots:
            if slot.kind == "image":
                source = load_image(slot.source, limits)
                pixels += source.width * source.height
            else:
                source = self.load_video(slot.source, replace(options, **slot.sampling) if slot.sampling else options)
                pixels += source.frames.size // 3
            if pixels > limits.total_pixels:
                raise InputError(
                    f"The images and sampled frames have more than {limits.total_pixels} pixels together; send fewer "
                    "or smaller ones."
                )
            loaded.append(Slot(slot.kind, source))
        return loaded

    def _check_media(self, slots: Sequence[Slot], prompt: Prompt) -> None:
        """Raise unless every medium that was handed in stands in the prompt."""
        self._family.media_spans(prompt)  # raises unless every medium of the prompt has its tokens
        family = self._family
        for kind in {slot.kind for slot in slots}:
            given = sum(slot.kind == kind for slot in slots)
            token = family.visual_ids.get(kind)
            if family.is_known:
                standing = sum(source[0].is_of_video == (kind == "video") for source in prompt.sources)
            elif token is not None:
                standing = prompt.ids.count(token) if prompt.media else 0
            else:  # no more can be seen
                standing = given if prompt.media else 0
            if standing < given:
                raise self._dropped("The processor")

    def _dropped(self, what: str) -> InputError:
        return InputError(
            f"{what} of {self._family.name} drops an image or a video that was handed in; leave it out, or give it in "
            "the last message of the user."
        )

    def _controls(self, template: str | None) -> Controls:
        """Control tokens of the tokenizer under a template."""
        if template not in self._known_controls:
            family = self._family
            words = (*self._placeholders.values(), *self._slots.values(), *family.openers, *family.closers)
            self._known_controls[template] = Controls(self.tokenizer, template, words)
        return self._known_controls[template]

    def _template(self, slots: Sequence[Slot], options: MediaOptions) -> str | None:
        """Chat template of a conversation; None for a model without one."""
        template: Any = self.chat_template or getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):  # several by name
            with_tools = template.get("tool_use") if options.template_options.get("tools") else None
            template = with_tools or template.get("default")
        if any(slot.kind == "video" for slot in slots):
            template = self._family.video_template() or template
        return None if template is None else str(template)

    def _rendered(
        self, template: str | None, messages: Sequence[Message], options: MediaOptions, add_generation_prompt: bool
    ) -> tuple[str, LiteralText | None]:
        """Messages as text by a template, and the encoder of that text where control tokens in messages are text."""
        literal, variables = None, options.template_options
        if options.text_as_text:
            literal = LiteralText(self._controls(template), strings_of([messages, variables]))
            messages, variables = literal.mark(messages), literal.mark_options(variables)
        if template is None:
            return "", literal
        if not self._family.reads_images:
            messages = [as_text(message) for message in messages]
        return render(self.tokenizer, template, messages, add_generation_prompt, variables), literal

    def _bare(self, question: str | Sequence[Message], literal: LiteralText | None, slots: Sequence[Slot]) -> str:
        """A string for a model without chat template."""
        if not isinstance(question, str):
            raise InputError(
                "The checkpoint has no chat template, so messages cannot be rendered; give the prompt as a string."
            )
        text = question if literal is None else literal.mark_text(question)
        return "".join(self._family.raw.format(self._slots[s.kind]) for s in slots) + text

    def _expand(self, text: str, slots: Sequence[Slot], options: MediaOptions) -> tuple[str, list[Medium]]:
        """Put every medium's tokens in the place of its placeholder."""
        family = self._family
        if not family.reads_images:
            return text, []
        names: dict[str, str] = {word: kind for kind, word in self._slots.items()}
        token = self._placeholders["image"]
        if token not in names and token in text:
            raise InputError(f"The text contains the placeholder {token}; take it out.")
        pieces = re.split("(" + "|".join(re.escape(name) for name in names) + ")", text)
        kinds: list[str] = [names[piece] for piece in pieces[1::2]]
        wanted: list[str] = [slot.kind for slot in slots]
        if sorted(kinds) != sorted(wanted):
            counts = ", ".join(
                f"{kinds.count(kind)} of {word} for {count(wanted.count(kind), kind)}" for word, kind in names.items()
            )
            raise InputError(
                f"The rendered prompt has {counts}; take placeholders out of the text, or check that the chat template "
                "writes one for every image and video."
            )
        # all images of a row together, because their number can change what each becomes
        features = iter(family.prepare_images(self._features, [s.source for s in slots if s.kind == "image"]))
        videos = (s.source for s in slots if s.kind == "video")
        media: list[Medium] = []
        for i, kind in enumerate(kinds):
            if kind == "image":
                image = next(features)
                pieces[2 * i + 1] = family.expand_image(token, image)
                tensors = {name: value for name, value in image.items() if name in family.visual_keys}
                media.append(family.medium("image", tensors))
                continue
            video = next(videos)
            settings = family.video_settings(self.video_settings, options.sampling)
            made = family.video_tensors(video, settings)
            word = token if family.frames_as_images else self._placeholders["video"]
            pieces[2 * i + 1] = family.expand_video(word, made, video, settings)
            parts = [family.medium("image" if family.frames_as_images else "video", t) for t in made]
            if family.frames_as_images or len(made) > 1:
                parts = [replace(medium, frame=(n, len(made))) for n, medium in enumerate(parts)]
            media += parts
        return "".join(pieces), media

    def _features(self, images: Any) -> Features:
        """Output of the image processor for images, in the nesting that the family wants."""
        try:
            return dict(self.image_processor(images, return_tensors="pt", **self._family.image_options))
        except (ValueError, ZeroDivisionError, TypeError, OSError) as error:
            if isinstance(error, SaccadeError):
                raise
            sizes = ", ".join(f"{image.width}x{image.height}" for image in _flat(images))
            raise InputError(
                f"The image of {sizes} pixels cannot be prepared for {self._family.name} ({first_line(error)}); scale "
                "or crop it."
            ) from error

    def _composite_prompt(
        self, text: str, slots: Sequence[Slot], add_special_tokens: bool, literal: LiteralText | None
    ) -> Prompt:
        """One row through the processor of a family outside the registry: all its images and videos are one medium."""
        family = self._family
        processor = self.composite
        assert isinstance(family, Unknown)
        if processor is None:
            raise ModelError(f"The family {family.name} is not built in; load its processor from a checkpoint.")
        if literal is not None and literal.character in text:
            processor = literal.through(processor)
        media = {
            "images": [s.source for s in slots if s.kind == "image"],
            "videos": [s.source.frames for s in slots if s.kind == "video"],
        }
        try:
            made = processor(
                text=[text],
                return_tensors="pt",
                add_special_tokens=add_special_tokens,
                **{kind: sources for kind, sources in media.items() if sources},
            )
        except (ValueError, TypeError, KeyError, ImportError, StopIteration) as error:
            raise InputError(
                f"The processor of {family.name} refuses the prompt ({first_line(error)}); check its images."
            ) from error
        ids = tuple(made["input_ids"][0].tolist())
        tensors = family.visual(made)
        return Prompt(ids, (family.whole_medium(ids, tensors),) if tensors else ())


def normalise(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Slot]]:
    """Convert messages to the form of Hugging Face chat templates, with the media taken out.

    Understands content as a string or a list of ``{"type": "text"}``, ``{"type": "image"}`` with ``image``,
    ``url``, ``path`` or ``base64``, ``{"type": "image_url", "image_url": {"url": ...}}``, the same for videos, which
    may have ``num_frames`` or ``fps``, and ``input_text``, ``input_image``.
    """
    if not messages:
        raise InputError("The list of messages is empty; give at least one message with role and content.")
    out: list[dict[str, Any]] = []
    slots: list[Slot] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError('Every message must be a dict with "role" and "content", such as {"role": "user", ...}.')
        content = message.get("content")
        clean = {k: v for k, v in message.items() if v is not None}
        if isinstance(content, (list, tuple)):
            clean["content"] = [_item(item, slots) for item in content]
        elif content is not None and not isinstance(content, str):
            raise InputError(
                f"A message's content is of type {type(content).__name__}; expected a string or a list of parts."
            )
        out.append(clean)
    return out, slots


def with_sources(messages: Sequence[Message], slots: Sequence[Slot]) -> list[dict[str, Any]]:
    """Put the sources of images and videos back into messages from `normalise`."""
    media = iter(slots)

    def part(place: Mapping[str, Any]) -> dict[str, Any]:
        if place["type"] == "text":
            return {**place}
        slot = next(media)
        return {"type": slot.kind, slot.kind: slot.source, **slot.sampling}

    return [
        {**m, "content": [part(place) for place in m["content"]]} if isinstance(m.get("content"), list) else {**m}
        for m in messages
    ]


def without_each_medium(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Messages from `normalise` without their first image or video, without their second, ..."""
    for number, message in enumerate(messages):
        content = message["content"] if isinstance(message.get("content"), list) else []
        for place, part in enumerate(content):
            if part["type"] in KINDS:
                rest = {**message, "content": content[:place] + content[place + 1 :]}
                yield [*messages[:number], rest, *messages[number + 1 :]]


def as_text(message: Message) -> dict[str, Any]:
    """Join a list of text parts into a string, for the templates of language models."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message}
    return {**message, "content": "".join(part["text"] for part in content)}


def render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    options: Mapping[str, Any],
) -> str:
    """Render messages through a chat template.

    Some templates drop content that is a plain string; it is then passed as a list. (Thoughts in earlier answers are
    for the template to drop.)
    """
    for role in (m["role"] for m in messages):
        if role not in ROLES and role not in template:
            raise InputError(f"The chat template knows no role {role!r}; give system, user or assistant messages.")
    texts = [m["content"].split("</think>")[-1].strip() for m in messages if isinstance(m.get("content"), str)]
    listed = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]
    options = {"add_generation_prompt": add_generation_prompt, **options, "chat_template": template}
    first = ""
    failure: Exception | None = None
    for variant in (messages, listed) if texts else (messages,):
        try:
            text: str = tokenizer.apply_chat_template(list(variant), tokenize=False, **options)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            failure = failure or error
            continue
        if all(words in text for words in texts):
            return text
        first = first or text
        failure = None
    if failure is None:
        return first
    raise InputError(
        f"The chat template refuses the messages ({first_line(failure)}); check roles and their order."
    ) from failure


def _item(item: Any, slots: list[Slot]) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(item.get("text"), str):
        return {"type": "text", "text": item["text"]}
    for name in KINDS:
        if kind in (name, f"{name}_url", f"input_{name}"):
            check_fields(item, name)
            slots.append(Slot(name, _source(item, name), sampling_of(item) if name == "video" else {}))
            return {"type": name}
    raise InputError(f"A message part of type {kind!r} is not usable; expected text, image, image_url or video.")


def check_fields(part: Mapping[str, Any], name: str) -> None:
    """Refuse fields of a part with an image or a video that would be ignored, a second source among them."""
    sources = [key for key in (name, f"{name}_url", *_SOURCES) if part.get(key) is not None]
    known = {"type", *_NO_MATTER, *sources[:1], *(_SAMPLING if name == "video" else ())}
    others = [key for key in part if key not in known and part[key] is not None]
    if sources and isinstance(part[sources[0]], Mapping):
        inner = part[sources[0]]
        others += [f"{sources[0]}.{key}" for key in inner if key not in ("url", *_NO_MATTER) and inner[key] is not None]
    if others:
        raise InputError(
            f"A message part of type {part['type']} has {min(others)}, which would be ignored; leave it out."
        )


def sampling_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that a part of type video names itself."""
    sampling = {name: part.get(name) for name in _SAMPLING}
    return sampling if any(value is not None for value in sampling.values()) else {}


def _source(item: Mapping[str, Any], name: str) -> Any:
    for key in (name, f"{name}_url", *_SOURCES):
        value = item.get(key)
        if isinstance(value, Mapping):
            value = value.get("url")
        if value is not None:
            bare = key in ("base64", "data") and isinstance(value, str) and not value.startswith("data:")
            return f"data:{name}/*;base64,{value}" if bare else value
    return None


def check_unicode(messages: Any) -> None:
    """Raise `InputError` for text that UTF-8 cannot represent, which tokenizers refuse with an error of their own."""
    for text in strings_of(messages):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"The text is not valid UTF-8 at character {error.start + 1}; give whole characters."
            ) from None


def strings_of(value: Any) -> Iterator[str]:
    """All strings in nested lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from strings_of(key)
            yield from strings_of(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from strings_of(entry)


_CLASSES = ("image_processor_type", "video_processor_type", "feature_extractor_type", "processor_class")
"""Settings that name classes, which change with the version of transformers and not with behaviour."""


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(int(i) for i in value) if isinstance(value, (list, tuple)) else (int(value),)


def _video_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a video configuration that are not None; SmolVLM has its sampling in a nested part."""
    settings = {k: v for k, v in content.items() if v is not None}
    if sampling := settings.pop("video_sampling", None):
        settings.update(num_frames=sampling["max_frames"], fps=sampling["fps"])
        settings.setdefault("size", sampling["video_size"])
    return settings


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None and name not in _CLASSES}


def _listed(media: Iterable[Any], name: str) -> list[Any]:
    if isinstance(media, (str, bytes, os.PathLike, Mapping)) or not isinstance(media, Iterable):
        raise InputError(f"{name.capitalize()} must come as a list, but one {type(media).__name__} was given; wrap it.")
    return list(media)


def _fill(slots: Sequence[Slot], images: list[Any], videos: list[Any]) -> list[Slot]:
    """Fill places without a source of their own from the caller's lists."""
    rest = {"image": [*images], "video": [*videos]}
    out = []
    for slot in slots:
        if slot.source is None and not rest[slot.kind]:
            raise InputError(
                f"The messages have a place for {'an image' if slot.kind == 'image' else 'a video'} that none was "
                f"given for; pass as many {slot.kind}s as there are places."
            )
        out.append(slot if slot.source is not None else replace(slot, source=rest[slot.kind].pop(0)))
    for kind, left in rest.items():
        if left:
            raise InputError(
                f"{count(len(left), kind)} more than the messages have places for; add a part of type {kind} for each."
            )
    return out


def _flat(images: Any) -> list[Image.Image]:
    return [image for nested in images for image in _flat(nested)] if isinstance(images, list) else [images]


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row of a call, images loaded."""

    question: Question  # string, messages or `Prompt`
    images: Sequence[Any] = ()
    videos: Sequence[Any] = ()
    options: MediaOptions = DEFAULT_MEDIA
    prediction: str = ""  # the answer that the caller expects

    def prompt(self, processor: InputProcessor) -> Prompt:
        """Prompt for one model."""
        if isinstance(self.question, Prompt):
            if self.images or self.videos:
                raise InputError("A Prompt holds its media already; leave images and videos out.")
            return self.question
        return processor.prompt(self.question, self.images, self.videos, self.options)


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
    lists = (list, tuple)
    if isinstance(media, lists) and not media:
        return [[] for _ in range(rows)]
    if not isinstance(media, lists) or len(media) != rows or not all(isinstance(m, lists) for m in media):
        raise InputError(f"For a batch of {rows} prompts, {name} must be a list of {rows} lists, one per prompt.")
    return [list(m) for m in media]


def one_or_more(media: Any) -> list[Any]:
    """A list of images or videos, or a single one, as a list."""
    return list(media) if isinstance(media, (list, tuple)) else [media]


def predictions_of(prediction: str | Sequence[str | None] | None, rows: int, batch: bool) -> list[str]:
    """Every row's prediction, empty without one."""
    texts: Any = [prediction] * rows if prediction is None or not batch else prediction
    fits = isinstance(texts, (list, tuple)) and len(texts) == rows
    if not fits or not all(text is None or isinstance(text, str) for text in texts):
        expected = f"a list of {rows} strings or None, one per prompt" if batch else "a string"
        raise InputError(f"The prediction is the text of the expected answer: {expected}, not {prediction!r:.60}.")
    return [text or "" for text in texts]


def seeds_of(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """Every row's seed: the caller's, counted on from one, or drawn from torch's global generator."""

    def is_seed(value: Any) -> bool:
        return isinstance(value, (int, integer)) and not isinstance(value, bool) and 0 <= int(value) < 2**63

    if seed is None:
        seed = int(torch.randint(2**31, ()).item())
    seeds = [seed + b for b in range(rows)] if is_seed(seed) else seed  # type: ignore[operator]
    if not isinstance(seeds, (list, tuple, range)) or not all(is_seed(s) for s in seeds):
        raise InputError(f"The seed must be a whole number from 0 to 2**63 - 1, or one per prompt, not {seed!r}.")
    if len(seeds) != rows:
        raise InputError(f"There are {rows} prompts but {len(seeds)} seeds; give one seed, or one per prompt.")
    return [int(s) for s in seeds]
