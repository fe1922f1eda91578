"""The public surface: load a model, then generate, stream or chat."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from saccade import methods
from saccade.chat import Chat
from saccade.draft.heads.head import Head
from saccade.engine import Request, RunningBatch
from saccade.engine.batch import PREFILL_CHUNK
from saccade.engine.generation import plan
from saccade.errors import InputError
from saccade.inputs.families import visual_ids
from saccade.inputs.media import load_image
from saccade.inputs.processor import InputProcessor
from saccade.inputs.prompt import Prompt
from saccade.inputs.requests import Asked, Question, is_batch, per_row, seeds_of
from saccade.loading import (
    adapt,
    check_checkpoint,
    check_device,
    check_dtype,
    load_model,
    name_of,
    path_of,
    shared_vocabulary,
)
from saccade.loading import draft_dtype as best_draft_dtype
from saccade.methods import drafters
from saccade.methods.compositions import Parts
from saccade.methods.drafters import Heads
from saccade.stream import Stream
from saccade.target.adapter import Target
from saccade.target.media_cache import MEDIA_BYTES
from saccade.tickets import Batch


def load(
    target: str | Path | Any,
    drafter: str | Path | Any = None,
    method: str | None = None,
    *,
    heads: Heads = (),
    head: str | None = None,
    dtype: str | torch.dtype = "auto",
    draft_dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    **options: Any,
) -> VLM:
    """Load a target, a drafter if the method needs one, and the method that joins them.

    Args:
        target: checkpoint folder, hub id, a loaded Hugging Face model, or ``pocket``, the built-in one. It brings what
            the method needs, and its draft model and all its heads when none is named; what is given replaces them.
        drafter: the same (``pocket``: the built-in draft model), of the target's tokenizer, or a trained head's folder.
        method: a name of `saccade methods`; by default ``chain`` with a draft model, a head's own method with a
            head, and ``prompt-lookup`` without a drafter.
        heads: more heads to choose from (see `VLM.using`): folders, or a dictionary of folders by name. A folder
            goes by its own name, a head that was given as drafter by its kind.
        head: the name of the one to use; by default the one of the method's kind.
        dtype: of the target: ``auto`` (as stored), a name, or a torch dtype.
        draft_dtype: of drafter and heads; when None, as stored (heads: as the target), but float32 for small ones on
            a CPU.
        device_map: of the target, as in `from_pretrained`; the drafter goes where the target's embeddings are.
        options: override the method's defaults, for example ``gamma=7``.

    Raises:
        ModelError: a checkpoint is missing, incomplete or unsupported, or the tokenizers differ.
        MethodError: unknown method or option.
    """
    target, drafter, given = drafters.with_builtin(
        target, drafter, method, options, drafters.named(drafter, heads)
    )
    kinds = drafters.kinds_of(given)
    name = method or drafters.default_method(drafter, kinds, head)
    # All that can be wrong is found before gigabytes of weights are read.
    drafters.check(name, methods.options(name, options), drafter, kinds, head)
    check_device(device_map)
    for kind in (dtype, draft_dtype or "auto"):
        check_dtype(kind)
    processor = _processor(target)
    drafting = None if drafters.is_head(drafter) else drafter
    draft_processor = None if drafting is None else _processor(drafting)
    if draft_processor is not None:
        shared_vocabulary(
            processor.tokenizer, draft_processor.tokenizer, (name_of(target), name_of(drafting))
        )
    model = _model(target, dtype, device_map)
    if drafting is not None:
        place = model.get_input_embeddings().weight.device
        drafting = _model(drafting, draft_dtype or "auto", None if place.type == "cpu" else place)
        if draft_dtype is None:
            drafting = drafting.to(best_draft_dtype(drafting))
    return VLM(
        model,
        processor,
        drafter=drafting,
        draft_processor=draft_processor,
        heads=given,
        head=head,
        draft_dtype=draft_dtype,
        method=name,
        **options,
    )


class VLM:
    """A target model that answers speculatively.

    Args:
        model: a loaded Hugging Face model.
        processor: its `InputProcessor`; made from the model's own checkpoint when None.
        drafter: a loaded Hugging Face model of the same tokenizer, a `Head`, or the folder of one.
        draft_processor: the drafter's; made from its checkpoint when None.
        heads, head: see `load`.
        draft_dtype: of heads that are read from their folders; see `load`.
        method: a name of `saccade methods`.
        options: override the method's defaults.

    Attributes:
        draft_model: the loaded draft model; None without one.
        heads: the loaded heads by name.
        head: the one of them that the method uses; None when it needs none.
        head_name: its name.
        method: name of the method.
        options: every option of the method with its value.
        lossless: whether answers are the target's own; the rule decides, whatever the method is called.
    """

    def __init__(
        self,
        model: Any,
        processor: InputProcessor | None = None,
        *,
        drafter: Any = None,
        draft_processor: InputProcessor | None = None,
        heads: Heads = (),
        head: str | None = None,
        draft_dtype: str | torch.dtype | None = None,
        method: str | None = None,
        **options: Any,
    ) -> None:
        self.processor = processor or InputProcessor.load(model.config._name_or_path)
        self.target: Target = adapt(model)
        self.draft_model: Target | None = None
        self._draft_processor: InputProcessor | None = None
        vocabulary: int | None = None
        given = drafters.named(drafter, heads)
        if drafter is not None and not drafters.is_head(drafter):
            self.draft_model = adapt(drafter)
            self._draft_processor = draft_processor or InputProcessor.load(drafter.config._name_or_path)
            vocabulary = shared_vocabulary(
                self.processor.tokenizer, self._draft_processor.tokenizer, (name_of(model), name_of(drafter))
            )
        self.heads: dict[str, Head] = drafters.read_heads(given, self.target, draft_dtype)
        special = methods.special_ids(model.config, model.generation_config, self.processor.tokenizer)
        self._parts = Parts(self.target, self.draft_model, vocabulary, special, self._draft_processor)
        default = drafters.default_method(drafter, drafters.kinds_of(given), head)
        self._compose(method or default, head, options)

    def _compose(self, method: str, head: str | None, options: Mapping[str, Any]) -> None:
        values = methods.options(method, options)
        kinds = drafters.kinds_of(self.heads)
        self.head_name = drafters.choose(method, values.get("draft_with"), kinds, head)
        self.head = None if self.head_name is None else self.heads[self.head_name]
        parts = replace(self._parts, head=self.head)
        self.engine = methods.build(method, parts, **options)
        self.method = method
        self.options = values
        self.lossless = methods.is_lossless(values)

    def generate(
        self,
        prompt: Question | Sequence[Question],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        seed: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Answer one question, or several as one batch.

        Args:
            prompt: a string, a conversation (list of messages), or a list of these for a batch.
            images: path, bytes, PIL, numpy or data URI each; for a batch, one list per row.
            videos: likewise: files (needs the ``video`` extra) or frames.
            seed: of the random generators when sampling; row b of a batch gets ``seed + b``, or its own from
                a list. None takes one from torch's global generator.
            options: `GenerationConfig` options (``max_new_tokens``, ``do_sample``, ``temperature``, ...),
                ``generation_config``, ``logits_processor``, ``stopping_criteria``, ``streamer``.

        Returns:
            An `Output`, or a list of them for a batch.

        Raises:
            InputError: something asked cannot be used as it is.
        """
        stream = self.stream(prompt, images, videos, seed=seed, **options)
        for _ in stream:
            pass
        return stream.outputs if stream.is_batch else stream.outputs[0]

    def stream(
        self,
        prompt: Question | Sequence[Question],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        seed: int | Sequence[int] | None = None,
        session: RunningBatch | None = None,
        streamer: Any = None,
        trace: bool = False,
        num_frames: int | None = None,
        fps: float | None = None,
        **options: Any,
    ) -> Stream:
        """Like `generate`, token by token: iterate the result, then read its `outputs`.

        Args:
            session: caches of an earlier turn (see `chat`), from which only what is new is prefilled.
            streamer: a Hugging Face `BaseStreamer` (one row only).
            trace: let every chunk carry the trees that were verified.
            num_frames: frames taken of a video file, instead of the checkpoint's own setting.
            fps: frames a second taken of a video file, likewise.
        """
        batch = is_batch(prompt)
        questions: Sequence[Question] = prompt if batch else [prompt]  # type: ignore[list-item,assignment]
        images_of, videos_of = (
            per_row(m, len(questions), batch, n) for m, n in ((images, "images"), (videos, "videos"))
        )
        if streamer is not None and len(questions) > 1:
            raise InputError("A streamer takes one row; leave it out for a batch, or iterate over stream().")
        seeds = seeds_of(seed, len(questions))
        sampling = {"num_frames": num_frames, "fps": fps}
        requests = [
            self._request(Asked(q, [load_image(x) for x in i], v, sampling), s)
            for q, i, v, s in zip(questions, images_of, videos_of, seeds, strict=True)
        ]
        decoding = plan(
            self.target, [r.prompt for r in requests], tokenizer=self.processor.tokenizer, **options
        )
        run = self.engine.start(requests, decoding, session, trace)
        return Stream(run, self.processor.tokenizer, batch, streamer, requests)

    def batch(
        self,
        max_rows: int = 8,
        kv_memory: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        media_cache: int = MEDIA_BYTES,
        trace: bool = False,
    ) -> Batch:
        """A running batch: requests join and leave between steps, each with its own options.

        Args:
            max_rows: requests that run at once; further ones wait in order.
            kv_memory: bytes of keys and values of target and draft model; by default half of what is free.
            prefill_chunk: prompt tokens that a step reads beside the others' answers; images are never cut.
            media_cache: bytes of features of pictures and videos that are kept by digest.
            trace: let every chunk carry the tree that was verified.
        """
        return Batch(self, max_rows, kv_memory, prefill_chunk, media_cache, trace)

    def using(self, method: str, *, head: str | None = None, **options: Any) -> VLM:
        """The same loaded models with another method.

        Args:
            head: the name of the head to use; by default the only one of the method's kind, or of several the one
                that is called like the kind.

        Raises:
            MethodError: unknown method, option or head, or the method needs a drafter and none is loaded.
        """
        other = copy.copy(self)
        other._compose(method, head, options)
        return other

    def chat(self, system: str | None = None) -> Chat:
        """A conversation whose turns reuse the KV cache of the earlier ones."""
        return Chat(self, system)

    def _request(self, asked: Asked, seed: int) -> Request:
        prompt = asked.prompt(self.processor)
        return Request(prompt, self._draft_prompt(prompt, asked), seed)

    def _draft_prompt(self, prompt: Prompt, asked: Asked) -> Prompt | None:
        """The question as the draft model sees it; text only when it has no eyes, or others for a ready prompt."""
        if self.draft_model is None or self._draft_processor is None:
            return None
        if methods.needs(self.options) != "draft model":
            return None
        if not prompt.media:
            return prompt
        if isinstance(asked.question, Prompt):
            alike = _eyes(self.target) == _eyes(self.draft_model)
            return prompt if alike else self.processor.text_only(prompt)
        if _eyes(self.draft_model) is None:
            return self.processor.text_only(prompt)
        return asked.prompt(self._draft_processor)


def _eyes(model: Target) -> Any:
    """What decides how a model takes a prepared image; None for a language model."""
    config = model.config
    if config.model_type == model.text_config.model_type:
        return None
    vision = getattr(config, "vision_config", config)
    sizes = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size")
    return config.model_type, visual_ids(config), [getattr(vision, name, None) for name in sizes]


def _processor(given: Any) -> InputProcessor:
    if not isinstance(given, (str, Path)):
        return InputProcessor.load(given.config._name_or_path)
    check_checkpoint(path_of(given))
    return InputProcessor.load(path_of(given))


def _model(given: Any, dtype: str | torch.dtype, device_map: Any) -> Any:
    if not isinstance(given, (str, Path)):
        return given
    return load_model(path_of(given), dtype=dtype, device_map=device_map)
