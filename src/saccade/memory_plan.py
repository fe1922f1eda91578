"""Memory, disk, tokens and costs of a run by published configurations alone: no weights, no GPU.

`Preset` has the settings for a GPU's memory, `ModelSize` the bytes of a model, `PairSize` those that steps of it and of
its drafter read, and `Lengths` the tokens of the data.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image

from saccade.data.conversations import resolve
from saccade.draft.heads.head import MARK, HeadConfig, TargetShape, check_fit, empty_head
from saccade.draft.heads.published.released import DRAFT_VOCAB
from saccade.draft.heads.registry import HEAD_KINDS, head_class
from saccade.draft.heads.store import layout_of, read_values
from saccade.draft.model import drafts_in_parallel
from saccade.errors import InputError, ModelError
from saccade.inputs.families import family_of
from saccade.inputs.processor import normalise
from saccade.loading import check_checkpoint, check_dtype, empty_model
from saccade.options import make
from saccade.target_model.adapter import Target
from saccade.wording import unknown_name

T = TypeVar("T")

ARITHMETIC, BANDWIDTH = 0.35, 0.6  # shares of a GPU's published arithmetic and bandwidth that are assumed to be used
CONTEXT = 0.6e9  # bytes that a CUDA process takes besides its tensors; an assumption


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings for one GPU."""

    name: str  # as in `names`
    gpu: str  # name of a GPU of that memory
    memory: int  # in GiB
    teraflops: float  # of products in bfloat16, as published
    bandwidth: float  # of its memory in GB a second, as published
    distill: Mapping[str, Any]  # options of `saccade.distill.planning.Options`
    train: Mapping[str, Any]  # settings of every recipe, and tables of further ones by kind

    @property
    def bytes(self) -> float:
        """Bytes of memory for tensors."""
        return self.memory * 2**30 - CONTEXT

    def computing(self, flops: float, read: float = 0.0) -> float:
        """Seconds of so many operations, after so many bytes that are read from memory."""
        return flops / (ARITHMETIC * self.teraflops * 1e12) + read / (BANDWIDTH * self.bandwidth * 1e9)

    def training(self, kind: str) -> dict[str, Any]:
        """Return the settings of a recipe by its kind, named as for `saccade.train.recipe.Recipe.with_settings`."""
        common = {name: value for name, value in self.train.items() if not isinstance(value, Mapping)}
        return {**common, **self.train.get(kind, {})}

    def fits(self, needed: float) -> str:
        """Compare bytes with the memory, in words."""
        there = f"{needed / 1e9:.1f} of {self.bytes / 1e9:.1f} GB"
        return f"{there}, it fits" if needed <= self.bytes else f"{there}, IT DOES NOT FIT"

    def __str__(self) -> str:
        return f"{self.name}: one {self.gpu}, {self.memory} GiB; computed, nothing was run"


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((files("saccade") / "memory_plan.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    return list(_table())


def preset(name: str) -> Preset:
    if name not in _table():
        raise InputError(f"There is no preset {unknown_name(name, names())}.")
    return make(Preset, {"name": name, **_table()[name]}, "memory_plan.toml", error=InputError)


class ModelSize:
    """A model without weights, from its published configuration."""

    def __init__(self, name: str | Path, config: Any = None, dtype: str = "auto") -> None:
        self.name = str(name)
        self._pictures: dict[tuple[int, int], tuple[int, int]] = {}
        config = check_checkpoint(name, weights=False) if config is None else config
        stored = config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
        wanted = check_dtype(dtype)
        self.each = (wanted if isinstance(wanted, torch.dtype) else stored).itemsize
        self.target = Target(empty_model(config), executor="stock")
        model = self.target.model
        self.weights: int = sum(weight.numel() for weight in model.parameters())
        self.lm_head: int = model.get_output_embeddings().weight.numel()
        self.width: int = self.target.text_config.hidden_size

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return self.weights * self.each

    @property
    def entry(self) -> int:
        """Bytes of one entry of the KV cache over all layers."""
        return self.target.entry_bytes // self.target.dtype.itemsize * self.each

    def check_unquantised(self) -> None:
        """Raise `ModelError` for a quantised model, whose bytes its configuration does not say."""
        if getattr(self.target.config, "quantization_config", None) is not None:
            raise ModelError(f"{self.name} is quantised, and its bytes are not known; give the model it was made from.")

    def step(self, tokens: int = 1) -> float:
        """Bytes of weights that a decoding step over some tokens reads; of experts, as many as chance chooses."""
        text = self.target.text_config
        experts, chosen = (next((n for name in names if (n := getattr(text, name, None))), 0) for names in _EXPERTS)
        share = 1.0
        if experts:
            share = 1 - (1 - chosen / experts) ** tokens
        read = float(self.lm_head)
        for layer in self.target.layers:
            for name, weight in layer.named_parameters():
                read += weight.numel() * (share if "experts." in name and "shared" not in name else 1.0)
        return read * self.each

    def picture(self, width: int, height: int) -> tuple[int, int]:
        """Visual tokens and patches of a picture, by the checkpoint's image settings."""
        if (width, height) in self._pictures:
            return self._pictures[width, height]
        family = family_of(self.target.config)
        if not (family.reads_images and family.is_known):
            raise ModelError(f"The pictures of {self.name} cannot be counted, because its family is not built in.")

        def prepared(images: Any) -> Any:
            return dict(self._images(images, return_tensors="pt", **family.image_options))

        (features,) = family.prepare_images(prepared, [Image.new("RGB", (width, height))])
        tensors = {name: value for name, value in features.items() if name in family.visual_keys}
        vision = self.target.config.vision_config
        patch = vision.patch_size[0] if isinstance(vision.patch_size, (list, tuple)) else vision.patch_size
        each = 3 * patch**2 * getattr(vision, "temporal_patch_size", 1)
        counted = family.count("image", tensors), tensors["pixel_values"].numel() // each
        self._pictures[width, height] = counted
        return counted

    @cached_property
    def _images(self) -> Any:
        try:
            return family_of(self.target.config).image_loader.from_pretrained(self.name, config=self.target.config)
        except (OSError, ValueError, ImportError) as problem:
            raise ModelError(
                f"The image settings of {self.name} cannot be read; give a folder that has preprocessor_config.json "
                "beside config.json, or a hub id."
            ) from problem


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts"), ("num_experts_per_tok", "top_k_experts")
"""Names of the number of experts in a layer, and of those that a token chooses."""


@dataclass(frozen=True, slots=True)
class PairSize:
    """A target and a drafter without weights, and what a step of each reads: its time where memory limits it."""

    target: ModelSize
    weights: int  # of the drafter
    step: float  # bytes of weights that a step of the drafter reads
    one_pass: bool  # a step drafts all tokens
    longest: int  # most tokens of a draft

    @classmethod
    def of(cls, target: str, drafter: str) -> PairSize:
        """Return a pair by the configurations in folders or on the hub; a drafter may be a kind of head."""
        size = ModelSize(target)
        size.check_unquantised()
        values = {} if drafter in HEAD_KINDS else read_values(drafter)
        layout = layout_of(drafter, values, shapes=dict)
        kind = layout.kind(values).kind if layout else drafter if drafter in HEAD_KINDS else values.get(MARK)
        if kind is None:  # a head with a Llama's block reads as much as a model of one layer
            model = ModelSize(drafter)
            model.check_unquantised()
            return cls(size, model.weights, model.step(), drafts_in_parallel(model.target.config), 32)
        if MARK in values:
            config = HeadConfig.from_values(values, drafter)
        else:
            nested = {**values, **(values.get("transformer_layer_config") or {})}
            stated = {"own_vocabulary": nested.get(DRAFT_VOCAB), "blocks": nested.get("num_hidden_layers")}
            options = {name: n for name, n in stated.items() if n and name in head_class(kind).defaults}
            config = HeadConfig.from_target(size.target, kind, mlp=nested.get("intermediate_size"), **options)
            config = replace(config, hidden_size=nested.get("hidden_size") or config.hidden_size)
        check_fit(config, TargetShape.of(size.target))
        head = empty_head(config)
        weights = {name: weight.numel() for name, weight in head.named_parameters()}
        read = sum(count for name, count in weights.items() if not name.startswith("embed_tokens"))
        if not head.has_lm_head:
            read += size.lm_head
        step = float(read * size.each)
        if kind == "kangaroo":  # which drafts after the target's first layers
            share = head.layers[0] / len(size.target.layers)
            step += share * (size.step() - size.lm_head * size.each)
        return cls(size, sum(weights.values()), step, head.drafts_in_one_pass, head.reach or 32)

    @property
    def cost(self) -> float:
        """A drafter step as a share of a target step."""
        return self.step / self.target.step()

    def verify_cost(self, tokens: int) -> float:
        """A target pass over some tokens as a share of one over a single token."""
        return self.target.step(tokens) / self.target.step()


LETTERS = 4  # letters per token, about as in English prose
LOOKED_AT = 128  # samples whose pictures are opened, spread evenly over a file
_VIDEO = (500, 2000)  # visual tokens and patches assumed of a video, which is not opened


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a set of samples."""

    samples: int  # number of them
    text: float  # mean tokens of a prompt's text
    visual: float  # mean visual tokens of a prompt
    answer: float  # mean tokens of an answer
    longest: tuple[int, int, int, int]  # text, visual tokens, patches and answer of a long sample
    origin: str  # source of these numbers, in words
    is_assumed: bool = False  # there are no data yet

    @property
    def tokens(self) -> float:
        """Mean tokens of prompt and answer."""
        return self.text + self.visual + self.answer

    def cut(self, most: int) -> Lengths:
        """Return the lengths with answers cut where prompt and answer have more than ``most`` tokens."""
        text, visual, patches, answer = self.longest
        room = max(most - text - visual, 1)
        fits = max(most - self.text - self.visual, 1.0)
        return replace(self, answer=min(self.answer, fits), longest=(text, visual, patches, min(answer, room)))

    def __str__(self) -> str:
        return (
            f"{self.samples} samples of {self.text:.0f} text, {self.visual:.0f} visual and {self.answer:.0f} answer "
            f"tokens on average; {self.origin}"
        )


ASSUMED = (640, 480, 60, 200, 64_000)
"""Without data: width and height of a picture, tokens of a question and of an answer, and number of samples."""


def assumed(size: ModelSize, missing: str) -> Lengths:
    """Return lengths where there are no data yet."""
    width, height, text, answer, samples = ASSUMED
    visual, patches = size.picture(width, height)
    origin = f"assumed, with one {width}x{height} picture each: {missing} is not there yet"
    return Lengths(samples, text, visual, answer, (text, visual, patches, answer), origin, is_assumed=True)


def of_answers(path: Path, media: Path, size: ModelSize) -> Lengths:
    """Return the lengths of a file of `saccade distill`, read once; lines that cannot be read are left out."""
    texts, answers, places, offset = [], [], [], 0
    with path.open("rb") as file:
        for line in file:
            row = _row(line)
            if row is not None:
                texts.append(letters(row["messages"]) // LETTERS)
                answers.append(len(row["answer_ids"]))
                places.append(offset)
            offset += len(line)
        seen = []
        for place in spread(places):
            file.seek(place)
            row = _row(file.readline())
            assert row is not None
            seen.append(pictures(row["messages"], media, size))
    origin = f"pictures of {len(seen)} of them looked at, {LETTERS} letters counted as a token"
    return together(texts, answers, seen, origin)


def together(texts: Sequence[int], answers: Sequence[int], seen: Sequence[tuple[int, int]], origin: str) -> Lengths:
    """Return the lengths of samples: text and answer tokens of all, visual tokens and patches of some."""
    visual, patches = zip(*seen, strict=True) if seen else ((0,), (0,))
    text, per_prompt, answer = (sum(values) / max(len(values), 1) for values in (texts, visual, answers))
    longest = max(texts, default=0), max(visual), max(patches), max(answers, default=0)
    return Lengths(len(texts), text, per_prompt, answer, longest, origin)


def pictures(messages: Sequence[Mapping[str, Any]], media: Path, size: ModelSize) -> tuple[int, int]:
    """Return visual tokens and patches of a prompt; of a picture only the header is read."""
    visual = patches = 0
    for slot in normalise(messages)[1]:
        counted = _VIDEO
        if slot.kind == "image":
            width, height = ASSUMED[:2]
            if isinstance(slot.source, str) and not slot.source.startswith("data:"):
                with suppress(OSError), Image.open(resolve(slot.source, media)) as image:
                    width, height = image.size
            counted = size.picture(width, height)
        visual, patches = visual + counted[0], patches + counted[1]
    return visual, patches


def letters(messages: Iterable[Mapping[str, Any]]) -> int:
    """Return the letters of all texts of a prompt."""
    total = 0
    for message in messages:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        total += sum(len(part.get("text") or "") for part in parts)
    return total


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        usable = isinstance(row["messages"], list) and isinstance(row["answer_ids"], list)
    except (ValueError, KeyError, TypeError):
        return None
    return row if usable else None


def spread(items: Sequence[T]) -> Sequence[T]:
    """Return at most `LOOKED_AT` of these, evenly."""
    return items[:: -(-len(items) // LOOKED_AT) or 1]
