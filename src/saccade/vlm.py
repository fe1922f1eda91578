"""The public surface: load models, then generate, stream or chat."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

import torch

from saccade import methods
from saccade.chat import Chat
from saccade.draft.heads.head import Head
from saccade.engine import Request, RunningBatch
from saccade.engine.row import plan
from saccade.engine.slots import KV_MEMORY_SHARE
from saccade.errors import InputError, MethodError
from saccade.inputs.families.family import Prompt
from saccade.inputs.media import load_image
from saccade.inputs.processor import (
    InputProcessor,
    Messages,
    Question,
    RowInput,
    is_batch,
    per_row,
    predictions_of,
    seeds_of,
)
from saccade.loading import adapt
from saccade.lora import adapted
from saccade.methods.compositions import Models
from saccade.model_spec import ModelSpec
from saccade.options import MEDIA_BYTES, PREFILL_CHUNK, STORED
from saccade.output import Output
from saccade.resolution import Heads, Resolved, completed, kinds_of, only, read_heads, resolve
from saccade.running_batch import Batch
from saccade.stream import PromptOptions, Stream, split_options
from saccade.target_model.adapter import Target
from saccade.target_model.linear import StepThreads
from saccade.wording import meant, unknown_name

OneQuestion = TypeVar("OneQuestion", bound=str | Messages | Prompt)
Adapters = Mapping[str, str | Path]
PRESENT = ""  # in place of an adapter's name: the one in use


def load(
    target: str | Path | Any,
    drafter: str | Path | Any = None,
    method: str | None = None,
    *,
    assistant_model: str | Path | Any = None,
    heads: Heads = (),
    head: str | None = None,
    adapters: Adapters | None = None,
    dtype: str | torch.dtype = "auto",
    draft_dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    threads: int | None = None,
    exact: bool = False,
    executor: str = "auto",
    weights: str = STORED,
    **options: Any,
) -> VLM:
    """Load a target, the drafter that the method needs, and the method that joins them.

    Args:
        target: checkpoint folder, hub id, a loaded Hugging Face model, a profile of `saccade tune` (a ``.toml`` file,
            whose drafter and method hold where none are given), or ``pocket``, the built-in one. Without drafter and
            method, ``pocket`` brings its draft model and heads; given ones replace them.
        drafter: the same (``pocket``: the built-in draft model), of the target's tokenizer, Gemma 4's assistant, or a
            trained head's folder.
        method: a name of `saccade methods`; by default ``auto`` with a draft model (``chain`` with options that it
            lacks, ``pard`` with one that has a mask token), a head's own method with a head, and without a drafter
            ``mtp`` where the checkpoint has one such layer, else ``suffix``.
        assistant_model: Hugging Face's name for ``drafter``.
        heads: more heads to choose from (see `VLM.using`): folders, or a dictionary of folders by name. A folder
            goes by its own name, a head given as drafter by its kind.
        head: name of the head to use; by default the one of the method's kind.
        adapters: folders or hub ids of PEFT's LoRAs by name, to choose from with `VLM.using`; these add little memory;
            "pocket" for the built-in one, which answers in JSON.
        dtype: of the target: ``auto`` (as stored, but on a CPU float32 for ``pocket`` and where the stored format is
            not faster), a name, or a torch dtype.
        draft_dtype: of drafter and heads; None: as stored (heads: as the target), but float32 for small ones on
            a CPU.
        device_map: of the target, as in `from_pretrained`, or ``tp`` (split over `torchrun`'s processes); by default a
            CUDA GPU if there is one, except for ``pocket``. The drafter follows, loaded models stay where they are.
        threads: CPU threads of this process where the target is on the CPU; None: the idle cores, and for a
            small model as many as each step is fastest with.
        exact: whether greedy answers of all lossless methods are the tokens of plain decoding in exact mode, also in
            16-bit formats (`saccade.target_model.exact`); costs time.
        executor: what runs the decoders (`saccade.target_model.executor`): ``stock`` (transformers' modules), ``lean``,
            ``graphs`` (CUDA graphs), ``openvino`` (CPUs; ``pip install saccade[openvino]``), or ``auto``, the fastest.
        weights: of the target's decoder: ``stored``, or ``int8``, rounded to steps of int8, with which answers are
            other ones, of all methods alike; with openvino, which rounds activations, too, but for near ties.
        options: override the method's defaults, for example ``gamma=7`` (Hugging Face's and vLLM's
            ``num_assistant_tokens`` and ``num_speculative_tokens`` are accepted for it).

    Raises:
        ModelError: a checkpoint is missing, incomplete or unsupported, or cannot be exact, or the tokenizers differ.
        MethodError: unknown method or option, or a drafter that does not fit the method.
        InputError: fewer than one thread.

    >>> vlm = saccade.load("pocket", method="chain", gamma=7)
    >>> vlm.method, vlm.lossless, vlm.options["gamma"]
    ('chain', True, 7)
    """
    for name in options.keys() - methods.known_options():
        if hint := meant(name, load.__annotations__, 0.8):
            raise MethodError(f"saccade.load has no argument {name}{hint}.")
    spec = ModelSpec(
        target,
        only(drafter, assistant_model),
        method,
        heads,
        head,
        adapters or {},
        dtype=dtype,
        draft_dtype=draft_dtype,
        device=device_map,
        threads=threads,
        exact=exact,
        executor=executor,
        weights=weights,
        options=options,
    )
    return check(spec)()


def check(spec: ModelSpec, complete: bool = True) -> Callable[[], VLM]:
    """Report every mistake that shows before weights are read, and return the function that reads them."""
    resolved = resolve(spec, complete)

    def read() -> VLM:
        loaded, counts = resolved.read()
        vlm = VLM.__new__(VLM)
        vlm._assemble(loaded)
        for each in (vlm.target, *vlm.adapters.values()):
            each.threads = StepThreads([] if loaded.spec.exact else counts)
        return vlm

    return read


class VLM:
    """A target model with a method of speculative decoding.

    Args:
        model: a loaded Hugging Face model.
        processor: its `InputProcessor`; None: made from the model's own checkpoint.
        drafter: a loaded Hugging Face model of the same tokenizer, a `Head`, or the folder of one.
        draft_processor: the drafter's; None: made from its checkpoint.
        heads, head, adapters, exact, executor, weights: as in `load`.
        draft_dtype: of heads that are read from their folders, as in `load`.
        method: a name of `saccade methods`.
        options: override the method's defaults.

    Attributes:
        draft_model, draft_processor: the loaded draft model and its `InputProcessor`; None without one.
        heads: the loaded heads by name.
        head: the head that the method drafts with; None for a method without one.
        head_name: its name.
        adapters: the target with each adapter, by name.
        adapter: name of the one in use; None for none.
        method: name of the method.
        options: every option of the method with its value.
        drafts_from_prompts: whether the draft model reads prompts, which an assistant does not.
        lossless: whether outputs are the target's own; the rule decides, whatever the method is called.

    >>> sorted(saccade.load("pocket").heads)
    ['dream', 'eagle2', 'hivis']
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
        adapters: Adapters | None = None,
        draft_dtype: str | torch.dtype | None = None,
        method: str | None = None,
        exact: bool = False,
        executor: str = "auto",
        weights: str = STORED,
        **options: Any,
    ) -> None:
        spec = ModelSpec(
            model,
            drafter,
            method,
            heads,
            head,
            adapters or {},
            draft_dtype=draft_dtype,
            exact=exact,
            executor=executor,
            weights=weights,
            options=options,
        )
        self._assemble(resolve(spec, processor=processor, draft_processor=draft_processor))

    def _assemble(self, models: Resolved) -> None:
        spec = models.spec
        assert spec.method is not None
        self.processor = models.processor
        self.target: Target = adapt(spec.target, spec.exact, executor=spec.executor, weights=spec.weights)
        self.adapters = adapted(self.target, spec.adapters)
        self.adapter: str | None = None
        self._base = self.target
        self.draft_model: Target | None = None
        if spec.drafter is not None:
            self.draft_model = adapt(spec.drafter, drafts=True, executor=spec.executor)
        self.draft_processor = models.draft_processor
        self.heads: dict[str, Head] = read_heads(spec.heads, self.target, spec.draft_dtype)
        model = self.target.model
        special = methods.special_ids(model.config, model.generation_config, self.processor.tokenizer)
        self._parts = Models(self.target, self.draft_model, models.vocabulary, special, self.draft_processor)
        self._compose(spec.method, spec.head, spec.options)

    def _compose(self, method: str, head: str | None, options: Mapping[str, Any]) -> None:
        kinds = kinds_of(self.heads)
        options = completed(method, options, self.draft_model, kinds, head)
        self.method = method
        self._chosen = options
        self.options = methods.options(method, options)
        self.head_name = methods.fit(method, self.options, self.draft_model is not None, kinds, head)
        self.head = None if self.head_name is None else self.heads[self.head_name]
        self.engine = methods.build(method, replace(self._parts, head=self.head), **options)
        self.lossless = methods.is_lossless(self.options)
        by_model = self.engine.drafter is not None and self.engine.drafter.facts.model is not None
        self.drafts_from_prompts = by_model and methods.needs(self.options) == "draft model"

    @overload
    def generate(
        self,
        prompt: Question,
        images: Sequence[Any] = ...,
        videos: Sequence[Any] = ...,
        *,
        prediction: str | None = ...,
        seed: int | None = ...,
        session: RunningBatch | None = ...,
        streamer: Any = ...,
        **options: Unpack[PromptOptions],
    ) -> Output: ...

    @overload
    def generate(
        self,
        prompt: list[OneQuestion],
        images: Sequence[Sequence[Any]] = ...,
        videos: Sequence[Sequence[Any]] = ...,
        *,
        prediction: Sequence[str | None] | None = ...,
        seed: int | Sequence[int] | None = ...,
        session: RunningBatch | None = ...,
        streamer: Any = ...,
        **options: Unpack[PromptOptions],
    ) -> list[Output]: ...

    def generate(
        self,
        prompt: Any,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        prediction: str | Sequence[str | None] | None = None,
        seed: int | Sequence[int] | None = None,
        session: RunningBatch | None = None,
        streamer: Any = None,
        **options: Unpack[PromptOptions],
    ) -> Output | list[Output]:
        """Generate the answer to one prompt, or to each of a batch.

        Args:
            prompt: a string, a conversation (list of messages), or a list of these for a batch.
            images: path, bytes, PIL, numpy or data URI each; for a batch, one list per row.
            videos: likewise: files (needs the ``video`` extra), lists or arrays of frames, which are taken for 24 a
                second, or `saccade.inputs.media.Video` of frames with their times.
            prediction: text that the answer is expected to be or to hold, wrong words and all; for a batch, one or None
                per row. It is drafted from and changes no lossless answer; method ``plain`` does without.
            seed: of the random generators when sampling; row b of a batch gets ``seed + b``, or its own from
                a list. None: drawn from torch's global generator.
            session: KV caches of an earlier turn, whose common prefix is not prefilled again.
            streamer: a Hugging Face `BaseStreamer` (one row only).
            options: of reading (`PromptOptions`): ``num_frames``, ``fps``, ``limits``, ``text_as_text``,
                ``template_options``; and Hugging Face's (`GenerationOptions`): ``generation_config``,
                ``logits_processor``, ``stopping_criteria``, ``prefix_allowed_tokens_fn``, ``max_new_tokens``,
                ``max_length``, ``min_new_tokens``, ``min_length``, ``max_time``, ``stop_strings``, ``do_sample``,
                ``temperature``, ``top_k``, ``top_p``, ``top_h``, ``min_p``, ``typical_p``, ``epsilon_cutoff``,
                ``eta_cutoff``, ``repetition_penalty``, ``encoder_repetition_penalty``, ``no_repeat_ngram_size``,
                ``encoder_no_repeat_ngram_size``, ``bad_words_ids``, ``sequence_bias``, ``suppress_tokens``,
                ``begin_suppress_tokens``, ``forced_bos_token_id``, ``forced_eos_token_id``,
                ``exponential_decay_length_penalty``, ``renormalize_logits``, ``remove_invalid_values``,
                ``bos_token_id``, ``eos_token_id``, ``pad_token_id``.

        Returns:
            An `Output`, or a list of them for a batch.

        Raises:
            InputError: a prompt, a medium or an option cannot be used as it is.

        >>> vlm, picture = saccade.load("pocket"), draw(1, "chart").image
        >>> output = vlm.generate("What does this chart show?", images=[picture], stop_strings=".")
        >>> output.text, output.finish_reason
        ('Four bars.', 'stop')
        """
        rest: dict[str, Any] = {"session": session, "streamer": streamer, **options}
        stream = self.stream(prompt, images, videos, prediction=prediction, seed=seed, **rest)
        outputs = stream.finish()
        return outputs if stream.is_batch else outputs[0]

    def stream(
        self,
        prompt: Question | Sequence[Question],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        prediction: str | Sequence[str | None] | None = None,
        seed: int | Sequence[int] | None = None,
        session: RunningBatch | None = None,
        streamer: Any = None,
        trace: bool = False,
        **options: Unpack[PromptOptions],
    ) -> Stream:
        """Generate step by step: iterate the result, then read its `outputs`.

        Args:
            trace: attach the verified trees to every chunk.
            prompt, images, videos, prediction, seed, session, streamer, options: as of `generate`.

        >>> vlm, picture = saccade.load("pocket"), draw(1, "chart").image
        >>> stream = vlm.stream("What does this chart show?", images=[picture], max_new_tokens=9)
        >>> "".join(chunk.text for chunk in stream), stream.output.stats.new_tokens
        ('Four bars. Orange comes first at six.', 9)
        """
        media, generation = split_options(options)
        batch = is_batch(prompt)
        questions: Any = prompt if batch else [prompt]
        images_of = per_row(images, len(questions), batch, "images")
        videos_of = per_row(videos, len(questions), batch, "videos")
        predictions, seeds = predictions_of(prediction, len(questions), batch), seeds_of(seed, len(questions))
        if streamer is not None and len(questions) > 1:
            raise InputError("A streamer takes one row; leave it out for a batch, or iterate over stream().")
        requests = [
            self.request(RowInput(q, [load_image(x, media.limits) for x in i], v, media, p), s)
            for q, i, v, p, s in zip(questions, images_of, videos_of, predictions, seeds, strict=True)
        ]
        tokenizer = self.processor.tokenizer
        decoding = plan(self.target, [r.prompt for r in requests], tokenizer=tokenizer, **generation)
        run = self.engine.start(requests, decoding, session, trace)
        return Stream(run, tokenizer, batch, streamer, requests)

    def batch(
        self,
        max_rows: int = 8,
        kv_memory: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        media_cache: int = MEDIA_BYTES,
        trace: bool = False,
    ) -> Batch:
        """Open a running batch: requests join and leave between steps, each with its own options.

        Args:
            max_rows: rows that run at once; further requests wait in order.
            kv_memory: bytes of keys and values (see `RunningBatch`); by default half of what is free.
            prefill_chunk: prompt tokens prefilled per step next to the other rows; images are never cut.
            media_cache: bytes of image and video features that are cached by digest.
            trace: attach the verified tree to every chunk.

        >>> with saccade.load("pocket").batch(max_rows=2) as batch:
        ...     tickets = [batch.add("How many shapes?", images=[draw(seed, "scene").image]) for seed in (1, 2, 3)]
        ...     lengths = [len(ticket.result().text) > 0 for ticket in tickets]
        >>> lengths
        [True, True, True]
        """
        if kv_memory is None:
            kv_memory = int(KV_MEMORY_SHARE * self.engine.free_memory())
        sizes = {"kv_memory": kv_memory, "prefill_chunk": prefill_chunk, "media_cache": media_cache}
        running = self.engine.open(max_rows, **sizes)
        running.trace = trace
        return Batch(running, self.request, self.processor.tokenizer)

    def using(
        self, method: str | None = None, *, adapter: str | None = PRESENT, head: str | None = None, **options: Any
    ) -> VLM:
        """Return a `VLM` of the same loaded models with another method or adapter.

        Args:
            method: by default the present one, with its head and options.
            adapter: name of one of `adapters`, or None for none; by default the present one.
            head: name of the head to use; by default the only one of the method's kind, or of several the one
                named like the kind.
            options: override the method's defaults.

        Raises:
            MethodError: unknown method, option or head, or a method whose draft model or head is not loaded.
            InputError: unknown adapter.

        >>> vlm = saccade.load("pocket")
        >>> vlm.using("hivis").method, vlm.using("chain", gamma=3).options["gamma"]
        ('hivis', 3)
        """
        other = copy.copy(self)
        if adapter != PRESENT:
            if adapter is not None and adapter not in self.adapters:
                known = self.adapters or ["none, since none was loaded"]
                raise InputError(f"There is no adapter {unknown_name(adapter, known)}.")
            other.adapter = adapter
            other.target = self._base if adapter is None else self.adapters[adapter]
            other._parts = replace(self._parts, target=other.target)
        if method is None:
            method, head, options = self.method, head or self.head_name, {**self._chosen, **options}
        other._compose(method, head, options)
        return other

    def chat(self, system: str | None = None) -> Chat:
        """Open a conversation whose turns reuse the KV cache of the earlier ones.

        Args:
            system: system message; None for none.

        >>> chat = saccade.load("pocket").chat()
        >>> answer = chat.send("How many bars are there?", images=[draw(1, "chart").image], max_new_tokens=8)
        >>> chat.send("And shapes?", max_new_tokens=8).stats.reused_tokens > 0
        True
        """
        return Chat(partial(self.stream, session=self.engine.open(1)), self.processor, system)

    def request(self, row: RowInput, seed: int) -> Request:
        """Make the engine's request of one row; needs no forward, so that another thread may run one meanwhile."""
        prompt = row.prompt(self.processor)
        prediction: tuple[int, ...] = ()
        if row.prediction:  # a mark of control in it is text, so that none is drafted
            prediction = self.processor.encode(row.prediction, text_as_text=True, add_special_tokens=False)
        return Request(prompt, self._draft_prompt(prompt, row), seed, prediction)

    def _draft_prompt(self, prompt: Prompt, row: RowInput) -> Prompt | None:
        """Prompt of the draft model: text alone without vision, or where another vision tower prepared the media."""
        if self.draft_model is None or self.draft_processor is None or not self.drafts_from_prompts:
            return None
        if not prompt.media:
            return prompt
        signature = self.draft_model.family.signature
        is_made = isinstance(row.question, Prompt)
        if signature is None or (is_made and signature != self.target.family.signature):
            return self.processor.text_only(prompt)
        return prompt if is_made else row.prompt(self.draft_processor)
