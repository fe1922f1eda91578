"""The `custom_generate` callable of a method, and the patch of `GenerationMixin` that hands pixels to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig, GenerationMixin
from transformers.utils.generic import TransformersKwargs

from saccade import methods, resolution
from saccade.draft.drafter import Drafter
from saccade.engine import Engine, Request
from saccade.engine.row import check_options
from saccade.errors import InputError, MethodError, SaccadeError
from saccade.hf.rows import PaddedRows, Recorder, Sheet, fill
from saccade.inputs.families import check, family_of, split
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt
from saccade.methods.compositions import Models
from saccade.output import Output
from saccade.resolution import AnyHead


def speculate(
    drafter: nn.Module | Drafter | str | Path | None = None,
    method: str | None = None,
    *,
    assistant_model: nn.Module | Drafter | str | Path | None = None,
    **options: Any,
) -> Speculation:
    """Return the ``custom_generate`` callable of a method; patches `GenerationMixin` on first use (see `patch`).

    Args:
        drafter: a loaded Hugging Face model of the target's tokenizer (a VLM or a text-only language model), a
            trained `Head` or its folder, a ready-made `Drafter`, or None for a method that needs none.
        method: a name of `saccade methods`, except ``spd`` and ``tabed``; by default ``auto`` with a
            draft model (``chain`` with options that it lacks), a head's own method with a head, and without a drafter
            ``mtp`` where the target's checkpoint has one such layer, else ``suffix``.
        assistant_model: Hugging Face's name for ``drafter``.
        options: override the method's defaults, for example ``gamma=7``, or ``num_assistant_tokens=7``.

    Raises:
        MethodError: the method does not exist, does not go with that drafter or with `generate`, or has no such option.
        ModelError: the folder holds a head of a kind that does not exist, or its configuration was changed.

    >>> model, drafter = (load_model(path) for path in (target_path(), draft_path()))
    >>> ids = torch.tensor([[55, 66, 77]])
    >>> faster = model.generate(ids, custom_generate=saccade.hf.speculate(drafter), max_new_tokens=8)
    >>> torch.equal(faster, model.generate(ids, max_new_tokens=8, do_sample=False))
    True
    """
    return Speculation(resolution.only(drafter, assistant_model), method, **options)


class Speculation:
    """A ``custom_generate`` callable; reuse it between calls, it holds the adapters of its models.

    Besides `generate`'s own arguments it takes ``assistant_inputs=``: the drafter's processor's tensors of the same
    rows, for a drafter whose images have another size or form.

    Attributes:
        outputs: one `Output` per row of the latest call, with statistics.
    """

    # Unpatched, `generate` hands over nothing, which is refused: it drops streamer, tokenizer and pixels for callables.
    __signature__ = inspect.Signature()

    def __init__(self, drafter: nn.Module | Drafter | str | Path | None, method: str | None, **options: Any) -> None:
        kind = resolution.kind_of(drafter) if resolution.is_head(drafter) else None  # type: ignore[arg-type]
        if isinstance(drafter, (str, Path)) and kind is None:
            raise MethodError(
                f"drafter={str(drafter)!r} is not a trained head; give the folder or hub id of one, or a loaded model, "
                f"or name a method: method={str(drafter)!r}."
            )
        model = drafter if isinstance(drafter, nn.Module) and kind is None else None
        is_ready = drafter is not None and model is None and kind is None
        if is_ready and (method is not None or options):
            raise MethodError("A ready-made drafter brings its own settings; leave out method and its options.")
        name = method or kind or resolution.default(model, {}, options=options)
        kinds = {kind: kind} if kind else {}
        options = resolution.completed(name, options, model, kinds)
        if not is_ready:
            values = methods.options(name, options)
            has = drafter is not None
            methods.fit(name, values, model is not None, kinds, has_drafter=has, has_processor=False)
        self._method = None if method is None and drafter is None else name  # None: as the target's checkpoint has it
        self._ready: Drafter | None = drafter if is_ready else None  # type: ignore[assignment]
        self._head: AnyHead | None = drafter if kind else None  # type: ignore[assignment]
        self._draft_model = None if model is None else adapt(model, drafts=True)
        self._options = options
        self._engine: Engine | None = None
        patch()
        self.outputs: list[Output] = []

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        *,
        visuals: Mapping[str, Any] | None = None,
        assistant_inputs: Mapping[str, Any] | None = None,
        streamer: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        """Called by `generate` with everything prepared: ids ``[B, S]``, already repeated for several returns.

        Returns:
            Ids ``[B, S + new]``, or `GenerateDecoderOnlyOutput` if the configuration asks for it.

        Raises:
            InputError: an argument that speculative decoding does not support.
        """
        if visuals is None:
            raise InputError("generate is not patched any more; call saccade.hf.patch() before generate.")
        config = generation_config
        batch = len(input_ids)
        each = config.num_return_sequences or 1
        config.num_return_sequences = 1  # input_ids has their rows already
        check_options(config)
        internals = [n for n in ("output_attentions", "output_hidden_states") if getattr(config, n)]
        if internals and config.return_dict_in_generate:
            raise InputError(
                f"{internals[0]} is not available from speculative decoding, whose forwards hold several tokens and "
                "rejected ones; run the model once over the finished sequence instead."
            )
        engine = self._engine_for(model)
        is_wanted = config.return_dict_in_generate or getattr(past_key_values, "_is_user_defined", False)
        if past_key_values is not None and is_wanted and engine.target.has_states:
            raise InputError(
                "The states of recurrent layers cannot be handed back as past_key_values; leave out the cache and "
                "return_dict_in_generate, or give use_cache=False."
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = split(model.config, {**visuals, "input_ids": input_ids[::each], "attention_mask": mask[::each]})
        draft_prompts = self._draft_prompts(engine, prompts, assistant_inputs)
        seeds = torch.randint(2**62, (batch,)).tolist() if config.do_sample else [0] * batch
        requests = [Request(prompts[b // each], draft_prompts[b // each], seeds[b]) for b in range(batch)]

        scored, raw = (bool(config.return_dict_in_generate and n) for n in (config.output_scores, config.output_logits))
        do_sample = bool(config.do_sample)
        rows = PaddedRows(input_ids, mask, each, logits_processor, stopping_criteria, do_sample, scored)
        recorder = Recorder(engine, config.do_sample, batch) if scored or raw else None
        run = (engine if recorder is None else recorder.engine).start(requests, rows.plans)
        pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        sheet = Sheet(batch, streamer, pad, rows.run_on)
        for step in run.steps:
            if recorder is not None:
                recorder.record(step.tokens)
            sheet.write(step.tokens, step.finished)
        self.outputs = run.outputs
        if streamer is not None:
            streamer.end()

        sequences = torch.cat([input_ids, sheet.tokens.to(input_ids.device)], 1)
        if past_key_values is not None and is_wanted:
            fill(past_key_values, run.batch.context.cache, mask, sequences.shape[1])
        if not config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=recorder.columns(0, sheet.width) if recorder and scored else None,
            logits=recorder.columns(1, sheet.width) if recorder and raw else None,
            past_key_values=past_key_values,
        )

    def _engine_for(self, model: Any) -> Engine:
        if self._engine is not None and self._engine.target.model is model:
            return self._engine
        target = adapt(model)
        if self._ready is not None:
            self._engine = Engine(target, self._ready)
        else:
            special = methods.special_ids(model.config, model.generation_config)
            head = resolution.read_heads({"": self._head}, target, None)[""] if self._head is not None else None
            parts = Models(target, self._draft_model, special_ids=special, head=head)
            name = self._method or resolution.default(None, {}, options=self._options, config=model.config)
            self._engine = methods.build(name, parts, **self._options)
        return self._engine

    def _draft_prompts(
        self, engine: Engine, prompts: Sequence[Prompt], assistant_inputs: Mapping[str, Any] | None
    ) -> Sequence[Prompt | None]:
        drafts = None if engine.drafter is None else engine.drafter.facts.model
        if drafts is None:
            if assistant_inputs is not None:
                raise InputError(
                    "assistant_inputs are for a draft model, which this method does not use; leave them out."
                )
            return [None] * len(prompts)
        if assistant_inputs is not None:
            check(drafts.config, assistant_inputs)
            theirs = split(drafts.config, assistant_inputs)
            if len(theirs) != len(prompts):
                raise InputError(
                    f"assistant_inputs hold {len(theirs)} rows and the inputs {len(prompts)}; give equally many."
                )
            return theirs
        if not any(p.media for p in prompts) or drafts is engine.target:
            return prompts
        if not family_of(drafts.config).visual_ids:
            return [
                Prompt(tuple(t for i, t in enumerate(p.ids) if not any(first <= i < last for first, last in spans)))
                for p in prompts
                for spans in [engine.target.family.media_spans(p)]
            ]
        if family_of(drafts.config).signature != engine.target.family.signature:
            raise InputError(
                "The drafter takes images in another form than the target; pass its own processor's tensors of the "
                "same rows as assistant_inputs."
            )
        return prompts


_PATCHED = "_extract_generation_mode_kwargs"
_stock: Callable[..., dict[str, Any]] | None = None
"""The replaced method; None while nothing is patched."""


def patch() -> None:
    """Let `generate` hand pixels and streamers to a `Speculation`; other calls of `generate` are unchanged.

    `speculate` does this on first use; further calls have no effect.
    """
    global _stock
    if _stock is None:
        _stock = getattr(GenerationMixin, _PATCHED)
        setattr(GenerationMixin, _PATCHED, _hand_over)


def unpatch() -> None:
    """Restore `GenerationMixin`; a `Speculation` is then refused until `patch` is called.

    Raises:
        SaccadeError: another library has patched the same method since.

    >>> saccade.hf.unpatch()
    """
    global _stock
    if _stock is None:
        return
    if getattr(GenerationMixin, _PATCHED) is not _hand_over:
        raise SaccadeError(
            f"GenerationMixin.{_PATCHED} was patched again by another library; undo that patch before this one."
        )
    setattr(GenerationMixin, _PATCHED, _stock)
    _stock = None


@contextmanager
def patched() -> Iterator[None]:
    """Patch `GenerationMixin` within a block, then restore its state before the block.

    >>> with saccade.hf.patched():
    ...     pass  # model.generate(**inputs, custom_generate=...)
    """
    was_patched = _stock is not None
    patch()
    try:
        yield
    finally:
        if not was_patched:
            unpatch()


def _hand_over(
    model: Any, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
) -> dict[str, Any]:
    """`GenerationMixin._extract_generation_mode_kwargs`, the one place that selects the arguments of a callable."""
    if not isinstance(custom_generate, Speculation):
        assert _stock is not None
        return _stock(model, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
    if assistant_model is not None:
        raise InputError("assistant_model does not go with speculate(); give it the drafter: speculate(drafter).")
    if any(kwargs.get(name) is not None for name in ("inputs_embeds", "mm_encoder_outputs")):
        raise InputError(
            "Embeddings as inputs are not supported, since drafters cannot read them; pass ids and pixels."
        )
    past = kwargs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise InputError("past_key_values must be empty, since the whole prompt is prefilled; leave the cache out.")
    _check_inputs(model, kwargs)
    takes = inspect.signature(model.forward).parameters
    keys = family_of(model.config).visual(kwargs)
    visuals = {name: kwargs.pop(name) for name in keys if name in takes}
    taken = {name: kwargs.pop(name, None) for name in ("assistant_inputs", "tokenizer")} | {"streamer": streamer}
    return {"visuals": visuals, **{name: value for name, value in taken.items() if value is not None}}


_READ = ("input_ids", "attention_mask", "past_key_values", "logits_to_keep", "assistant_inputs", "tokenizer")
"""Inputs besides images and videos that are read, or that change nothing."""


def _check_inputs(model: Any, inputs: Mapping[str, Any]) -> None:
    """Raise `InputError` for inputs of the model that would be ignored; `generate` reports those that none takes."""
    check(model.config, inputs)
    present = {name for name, value in inputs.items() if value is not None} - vars(GenerationConfig()).keys()
    family = family_of(model.config)
    read = {*_READ, *family.visual(inputs), family.types}
    takes = {*inspect.signature(model.forward).parameters, *TransformersKwargs.__optional_keys__}
    present.discard("labels")  # for a loss, which `generate` ignores
    for name in sorted(present & takes - read):
        if "token_type_ids" not in name or bool(torch.as_tensor(inputs[name]).any()):  # all zeros: text
            raise InputError(
                f"The input {name} does not reach the model in speculative decoding, which prepares the model's "
                "inputs itself; leave it out, or leave out custom_generate."
            )
