"""Prompts with their media, and the interface of a model family: all that differs between picture and forward pass."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from saccade.errors import InputError, MethodError, ModelError
from saccade.inputs.media import Frames, Video

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")
Tensors = Mapping[str, Tensor]
Features = Mapping[str, Any]
"""Output of an image processor for one image."""
Grid = tuple[int, int, int]
"""Frames (or tiles), rows and columns of a medium's tokens, which come in that order."""

VISUAL_KEYS = (
    "pixel_values",
    "image_sizes",
    "batch_num_images",
    "pixel_attention_mask",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
)
"""Forward arguments that hold images and videos."""

TYPES = {"mm_token_type_ids", "token_type_ids"}  # forward arguments that distinguish image tokens from text
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Medium:
    """One image or one video, ready for one model family."""

    kind: Kind  # which placeholder token it fills
    # forward keyword arguments for this medium alone, batch dimension included (for example `pixel_values` and
    # `image_grid_thw`)
    tensors: Mapping[str, torch.Tensor] = field(compare=False, hash=False)
    n_tokens: int  # number of placeholder tokens in the prompt that it fills
    digest: str  # hash of the content; equal digests mean interchangeable features
    frame: tuple[int, int] | None = None  # index and number of frames

    @property
    def is_of_video(self) -> bool:
        """Whether it is a video or a frame of one."""
        return self.kind == "video" or self.frame is not None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row's prompt for one model."""

    ids: tuple[int, ...]  # token ids, placeholders already expanded to one id per visual token
    # the media in the order in which their placeholders appear in `ids`
    media: tuple[Medium, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sources(self) -> list[tuple[Medium, ...]]:
        """Media by source: the frames of one video together, all others alone."""
        sources: list[tuple[Medium, ...]] = []
        for medium in self.media:
            if medium.frame is not None and medium.frame[0] and sources:
                sources[-1] = (*sources[-1], medium)
            else:
                sources.append((medium,))
        return sources

    def salted(self, salt: str) -> Prompt:
        """The same prompt, whose media share features and captions with those of the same salt alone."""
        return replace(self, media=tuple(replace(m, digest=f"{m.digest}/{salt}") for m in self.media))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash tensors by name, dtype, shape and bytes (BLAKE2b, 32 hex digits).

    ``batch_num_images`` counts as one or several: LLaVA-OneVision tiles an image only when it is alone, how many
    others there are makes no difference, and a conversation that gains an image keeps its earlier ones.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        if name == "batch_num_images":
            tensor = tensor.clamp(max=2)
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class PoolPoint:
    """Module at which the features of square images can be averaged."""

    module: str  # dotted name under the base model
    at_output: bool = False  # whether its output `[n, C, h, w]` is averaged instead of its input `[n, h * w, C]`


class Family(ABC):
    """A model family, bound to one configuration.

    A new family is a registered subclass. It sets the class attributes, implements `count`, and overrides those other
    methods in which it differs from one square of pixels ``pixel_values [1, 3, H, W]`` per image.
    """

    names: ClassVar[Mapping[str, str]] = _NOTHING  # registry keys (`model_type`) -> names for people
    decoders: ClassVar[tuple[str, ...]] = ()  # `model_type` of its language models
    is_tested: ClassVar[bool] = False  # whether the conformance suite covers it; other families are checked at load
    # whether media can be assigned to their placeholders; prompts of other families are made by their own processor
    is_known: ClassVar[bool] = True
    reads_images: ClassVar[bool] = True  # whether it takes images at all
    is_resizable: ClassVar[bool] = False  # whether the number of visual tokens follows from a picture's size
    # whether the tokens of an image, or of a frame, attend to each other in both directions
    bidirectional_images: bool = False
    full_is_causal: ClassVar[bool] = False  # whether they do so in sliding layers alone
    visual_keys: ClassVar[tuple[str, ...]] = VISUAL_KEYS  # forward arguments that hold images and videos
    join_dim: ClassVar[int] = 0  # dimension along which media of one row are concatenated
    padded_keys: ClassVar[tuple[str, ...]] = ()  # forward arguments that are padded with zeros to the largest medium
    openers: ClassVar[tuple[str, ...]] = ()  # wrapper tokens in front of a medium's placeholders
    closers: ClassVar[tuple[str, ...]] = ()  # wrapper tokens after them
    # forward argument that distinguishes image tokens from text, where the model needs it
    types: ClassVar[Literal["mm_token_type_ids", "token_type_ids"] | None] = None
    raw: ClassVar[str] = "{}"  # an image in a prompt without chat template; `{}` is the placeholder
    slot: ClassVar[str | None] = None  # an image in the chat template, where that is not its placeholder
    image_text: ClassVar[str] = "{}"  # an image in the tokenised prompt; `{}` are its placeholders
    # keyword arguments that the composite processor passes to its image processor
    image_options: Mapping[str, Any] = _NOTHING
    # class below transformers.models, whose own `AutoImageProcessor` asks for torchvision in 5.17
    image_processor: ClassVar[str] = "auto.image_processing_auto:AutoImageProcessor"
    whole_tile: ClassVar[int] = 0  # which of an image's tiles shows all of it
    video_defaults: ClassVar[Mapping[str, Any] | None] = None  # the video processor's defaults
    # sampling of files when a checkpoint names neither `num_frames` nor `fps`; transformers itself would then take
    # every frame
    video_sampling: ClassVar[Mapping[str, Any]] = _NOTHING
    frames_as_images: ClassVar[bool] = False  # whether every frame of a video is an image
    reads_times: ClassVar[bool] = False  # whether the model learns when the frames of a video are shown
    stamps_video: ClassVar[bool] = False  # whether every temporal patch follows a text timestamp
    pool_point: ClassVar[PoolPoint | None] = None  # where square features are averaged for fewer visual tokens
    # whether the model removes padding on a grid that it derives from `vision_config.patch_size`
    unpads: ClassVar[bool] = False
    caption_prompt: ClassVar[str | None] = None  # text that a captioner of this family needs with a picture

    def __init__(self, config: Any, name: str) -> None:
        self.config = config  # the model's Hugging Face configuration
        self.name = name  # key in the registry, for messages

    @property
    def visual_ids(self) -> dict[Kind, int]:
        """Ids of the image and video placeholders that the configuration has."""
        ids: dict[Kind, int] = {}
        for kind in KINDS:
            token = getattr(self.config, f"{kind}_token_id", None)
            if self.reads_images and token is not None and token not in ids.values():
                ids[kind] = int(token)
        return ids

    def visual(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The forward arguments among a model's inputs that hold images and videos."""
        return {name: torch.as_tensor(inputs[name]) for name in self.visual_keys if inputs.get(name) is not None}

    @abstractmethod
    def count(self, kind: Kind, tensors: Tensors) -> int:
        """Number of placeholder tokens of one medium."""

    @property
    def image_loader(self) -> Any:
        """Class whose ``from_pretrained`` reads the image settings of a checkpoint."""
        return resolve_name(f"transformers.models.{self.image_processor}")

    def medium(self, kind: Kind, tensors: Tensors) -> Medium:
        """A medium from its forward arguments, counted and hashed."""
        return Medium(kind, tensors, self.count(kind, tensors), digest(tensors))

    def placeholders(self, tokenizer: Any) -> dict[Kind, str]:
        """The placeholders of `visual_ids` as text, or a whole video in the chat template (``frames_as_images``)."""
        words = {kind: token_string(tokenizer, token) for kind, token in self.visual_ids.items()}
        if self.frames_as_images:
            words["video"] = getattr(tokenizer, "video_token", None) or "<video>"
        return words

    def prepare_images(self, run: Callable[[Any], Features], images: Sequence[Any]) -> list[Features]:
        """Prepare all images of one row."""
        return [run([image]) for image in images]

    def expand_image(self, token: str, features: Features) -> str:
        """The text of one image with this placeholder, from the image processor's output."""
        return self.image_text.format(token * self.count("image", features))

    def video_template(self) -> str | None:
        """Chat template that replaces the checkpoint's in a conversation with a video."""
        return None

    @staticmethod
    def sample_frames(total: int, fps: float, settings: Mapping[str, Any]) -> Sequence[int]:
        """Ascending indices of the frames to use of a video with ``total`` frames at ``fps`` frames per second."""
        raise NotImplementedError  # only families with video_defaults are called, and define it

    def video_settings(self, checkpoint: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The family's defaults, overridden by the checkpoint's settings, overridden by the caller's sampling."""
        settings = {**(self.video_defaults or {}), **checkpoint}
        named = {name: settings.pop(name) for name in ("num_frames", "fps") if settings.get(name)}
        if len(self.video_sampling) > 1:  # the family samples by both at once
            return {**settings, **self.video_sampling, **named, **sampling}
        return {**settings, **(sampling or named or self.video_sampling)}

    def video_tensors(self, video: Video, settings: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Forward arguments of a video, or of each of its frames (``frames_as_images``)."""
        raise NotImplementedError  # only families with video_defaults are called, and define it

    def expand_video(self, token: str, tensors: Sequence[Tensors], video: Video, settings: Mapping[str, Any]) -> str:
        """The text of one video with this placeholder (an image's for frames), from the result of `video_tensors`."""
        return token * self.count("video", tensors[0])

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        """Cut the visual tensors of a batch into single images, then single videos, in batch order without padding."""
        if "pixel_values" in tensors:
            yield from self.cut_images(tensors["pixel_values"], tensors, rows)
        for frames in tensors.get("pixel_values_videos", ()):
            yield self.medium("video", {"pixel_values_videos": frames[None]})

    def cut_images(self, pixels: Tensor, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        """As of `cut`, the images alone, whose ``pixel_values`` are ``pixels``."""
        for image in pixels:
            yield self.medium("image", {"pixel_values": image[None]})

    def split(self, rows: Sequence[Sequence[int]], tensors: Tensors) -> list[Prompt]:
        """Prompts of a batch."""
        queues = {"image": list[Medium](), "video": list[Medium]()}
        for medium in self.cut(tensors, rows):
            queues[medium.kind].append(medium)
        prompts = []
        for number, ids in enumerate(rows):
            media: list[tuple[int, Medium]] = []
            for kind, token in self.visual_ids.items():
                places = [i for i, t in enumerate(ids) if t == token]
                filled = 0
                while filled < len(places) and queues[kind]:
                    medium = queues[kind].pop(0)
                    media.append((places[filled], medium))
                    filled += medium.n_tokens
                if filled != len(places):
                    raise mismatch(f"Row {number} has {len(places)} {kind} placeholders but its {kind}s fill {filled}")
            media.sort(key=lambda item: item[0])
            prompts.append(Prompt(tuple(ids), tuple(medium for _, medium in media)))
        for name, queue in queues.items():
            if queue:
                raise mismatch(f"The batch holds {len(queue)} more {name}s than its placeholders ask for")
        return prompts

    def join(self, media: Sequence[Medium]) -> dict[str, Tensor]:
        """Forward arguments of one row with these media in prompt order; none gives ``{}``."""
        names = dict.fromkeys(name for m in media for name in m.tensors)
        return {n: self.join_tensors(n, [m.tensors[n] for m in media if n in m.tensors]) for n in names}

    def join_tensors(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """One forward argument of several media, concatenated and padded where the family pads."""
        if name in self.padded_keys:
            tensors = padded(tensors, self.join_dim)
        elif len({t.shape[: self.join_dim] + t.shape[self.join_dim + 1 :] for t in tensors}) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise InputError(
                f"The media of one prompt have {name} of shapes {shapes}, which do not fit together; give videos "
                "of one length."
            )
        return torch.cat([*tensors], self.join_dim)

    def collate(self, rows: Sequence[Sequence[Medium]]) -> dict[str, Tensor]:
        """Forward arguments of a batch, given the media of every row."""
        return self.join([medium for row in rows for medium in row])

    def tiles(self, medium: Medium) -> int:
        """Number of square grids of features of an image."""
        return medium.tensors["pixel_values"].shape[self.join_dim]

    def grid(self, medium: Medium) -> Grid | None:
        """Grid of a medium's tokens, which one newline or class token may follow; None without a single grid."""
        if medium.kind == "image" and (self.unpads or "pixel_values" not in medium.tensors):
            return None
        frames = self.tiles(medium) if medium.kind == "image" else medium.tensors["pixel_values_videos"].shape[1]
        side = math.isqrt(medium.n_tokens // frames)
        fits = frames * side * side <= medium.n_tokens <= frames * side * side + 1
        return (frames, side, side) if fits else None

    def picture(self, medium: Medium) -> Tensor:
        """Normalised pixels ``[3, H, W]`` of a whole image, or of a video's middle frame."""
        if medium.kind == "video" and "pixel_values_videos" in medium.tensors:
            frames = medium.tensors["pixel_values_videos"][0]  # [T, 3, H, W]
            return frames[len(frames) // 2]
        if not (self.is_known and self.reads_images and "pixel_values" in medium.tensors):
            raise MethodError(
                f"Captions from pictures need a family whose image tensors are known, not {self.name}; let the drafter "
                "caption for itself."
            )
        return medium.tensors["pixel_values"].flatten(0, -4)[self.whole_tile]

    def halved(self, medium: Medium) -> Medium:
        """A medium at half its height and width, rounded up to whole visual tokens; a video keeps its frames.

        Equal to the family's processor at that size, apart from rounding and the processor's lower bound on the size.
        """
        raise InputError(f"Images for {self.name} have a fixed size; only those of Qwen-VL and Pixtral can be halved.")

    # -- prompts -------------------------------------------------------------------------------------------

    @property
    def signature(self) -> tuple[Any, ...] | None:
        """Everything that two models must share to take the same ids and pixels; None for a language model."""
        config = self.config
        if config.model_type == config.get_text_config(decoder=True).model_type:
            return None
        vision = getattr(config, "vision_config", config)
        sizes = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size")
        return self.name, tuple(self.visual_ids.items()), tuple(repr(getattr(vision, size, None)) for size in sizes)

    def type_ids(self, ids: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """The argument `types` ``[1, S]`` of ids, where the family needs it."""
        if self.types is None:
            return {}
        tensor = torch.atleast_2d(torch.as_tensor(ids))
        types = torch.zeros_like(tensor, dtype=torch.long)
        for kind, token in self.visual_ids.items():
            types[tensor == token] = 1 if kind == "image" else 2
        return {self.types: types}

    def arguments(self, prompt: Prompt) -> dict[str, Tensor]:
        """Forward arguments of one row's media and token types."""
        made = self.join(prompt.media) | self.type_ids(prompt.ids)
        return {name: value[:, : len(prompt)] if name in TYPES else value for name, value in made.items()}

    def visual_mask(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Mask of image and video placeholders: bool, of the shape of ``ids`` (``[S]`` for one row)."""
        tensor = torch.as_tensor(ids)
        mask = torch.zeros_like(tensor, dtype=torch.bool)
        for token in self.visual_ids.values():
            mask |= tensor == token
        return mask

    def media_spans(self, prompt: Prompt) -> list[tuple[int, int]]:
        """Spans of a prompt's media in its ids."""
        tokens = self.visual_ids
        places = {kind: [i for i, t in enumerate(prompt.ids) if t == token] for kind, token in tokens.items()}
        used = dict.fromkeys([*places, *(m.kind for m in prompt.media)], 0)
        spans = []
        for medium in prompt.media:
            first = used[medium.kind]
            used[medium.kind] += medium.n_tokens
            mine = places.get(medium.kind, [])[first : used[medium.kind]]
            if len(mine) < medium.n_tokens:
                break
            # the placeholders of an unknown family are unknown
            spans.append((mine[0], mine[-1] + 1) if mine else (0, len(prompt.ids)))
        is_known = all(m.n_tokens for m in prompt.media)
        for kind, filled in used.items():
            count = len(places.get(kind, []))
            if filled > count or (filled < count and is_known):
                raise InputError(
                    f"The prompt has {count} {kind} placeholders but its media fill {filled}; build it with "
                    "InputProcessor.prompt or split."
                )
        return spans

    def without_media(self, tokenizer: Any, prompt: Prompt) -> Prompt:
        """One newline in the place of every medium, the tokens between its placeholders and its wrappers included."""
        newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
        ids: list[int] = []
        end = 0
        for start, stop in self.spans_with_wrappers(tokenizer, prompt):
            ids += [*prompt.ids[end:start], newline]
            end = stop
        return Prompt((*ids, *prompt.ids[end:]))

    def spans_with_wrappers(self, tokenizer: Any, prompt: Prompt) -> list[tuple[int, int]]:
        """Disjoint ``[start, end)`` of every medium with its wrappers, in prompt order."""
        vocabulary = tokenizer.get_vocab()
        openers, closers = (
            {vocabulary[word] for word in side if word in vocabulary} for side in (self.openers, self.closers)
        )
        ids = prompt.ids
        spans = sorted(self.media_spans(prompt))
        out: list[tuple[int, int]] = []
        for n, (start, stop) in enumerate(spans):
            floor = out[-1][1] if out else 0
            ceiling = spans[n + 1][0] if n + 1 < len(spans) else len(ids)
            while start > floor and ids[start - 1] in openers:
                start -= 1
            while stop < ceiling and ids[stop] in closers:
                stop += 1
            if self.stamps_video:
                # the template's own wrappers enclose the first timestamp and the last patch
                opened = sum(i in openers for i in ids[start:stop])
                closed = sum(i in closers for i in ids[start:stop])
                while opened < closed and start > floor:
                    start -= 1
                    opened += ids[start] in openers
            out.append((start, stop))
        return out


def token_string(tokenizer: Any, token: int) -> str:
    """The string of a token id."""
    text = tokenizer.convert_ids_to_tokens(int(token)) if 0 <= token < len(tokenizer) else None
    if text is None:
        raise ModelError(
            f"The tokenizer has no token {token}, which the configuration names as a placeholder; use the "
            "tokenizer of this checkpoint."
        )
    return str(text)


def runs_of(ids: Sequence[int], token: int) -> list[tuple[int, int]]:
    """``[first, last)`` of every unbroken run of one id."""
    runs = ([i for i, _ in run] for same, run in groupby(enumerate(ids), lambda item: item[1] == token) if same)
    return [(run[0], run[-1] + 1) for run in runs]


def need(tensors: Tensors, name: str, pixels: str) -> Tensor:
    """A forward argument that must come with another one."""
    if name not in tensors:
        raise mismatch(f"The batch has {pixels} but no {name}")
    return tensors[name]


def mismatch(problem: str) -> InputError:
    """An error of a batch whose tensors do not belong together."""
    return InputError(f"{problem}; pass all that one call of the model's processor returns.")


def padded(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Pad with zeros at the end of every dimension except ``dim``, up to the largest."""
    largest = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    out = []
    for tensor in tensors:
        room = [0 if d == dim else largest[d] - size for d, size in enumerate(tensor.shape)]
        out.append(functional.pad(tensor, [amount for r in reversed(room) for amount in (0, r)]))
    return out


def side_of(vision: Any) -> int:
    """Patches along one side of the square that a vision tower takes."""
    return int(vision.image_size) // int(vision.patch_size)


def resize_frames(frames: Frames, height: int, width: int, settings: Mapping[str, Any]) -> Frames:
    """``[T, H, W, 3]`` to ``[T, height, width, 3]`` with the filter ``resample``."""
    if frames.shape[1:3] == (height, width):
        return frames
    filter_ = Image.Resampling(int(settings["resample"]))
    return np.stack([np.asarray(Image.fromarray(f).resize((width, height), filter_)) for f in frames])


def normalise(frames: Frames, settings: Mapping[str, Any]) -> Tensor:
    """``[T, H, W, 3]`` uint8 to ``[T, 3, H, W]`` float32."""
    pixels = torch.from_numpy(np.require(frames, requirements=["C", "W"])).permute(0, 3, 1, 2).to(torch.float32)
    if settings.get("do_rescale", True):
        pixels = pixels * float(settings.get("rescale_factor", 1 / 255))
    if settings.get("do_normalize", True):
        mean, std = (torch.tensor(settings[k], dtype=torch.float32).view(3, 1, 1) for k in ("image_mean", "image_std"))
        pixels = (pixels - mean) / std
    return pixels.contiguous()


def resample(pixels: Tensor, height: int, width: int) -> Tensor:
    """``[n, C, H, W]`` to ``[n, C, height, width]``, bicubic and within the range of the old values."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    values = pixels.float()  # half precision has no smoothed resampling on the CPU
    resized = functional.interpolate(values, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(values.amin((-2, -1), True), values.amax((-2, -1), True)).to(pixels.dtype)


def half(side: int) -> int:
    """Half of a side, rounded up."""
    return -(-side // 2)
