"""Speculative decoding inside Hugging Face's own `generate`, with its arguments and its return types.

>>> speculation = saccade.hf.speculate(drafter, method="chain", gamma=5)
>>> model.generate(**inputs, custom_generate=speculation, max_new_tokens=128)

All methods but ``spd`` and ``tabed``: these make the draft model's prompt anew with its processor, which `generate` is
not given; `saccade.load` has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput, GenerationConfig, GenerationMixin
from transformers.utils.generic import TransformersKwargs

from saccade import methods
from saccade.draft.drafter import Drafter
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.engine import Engine, Request
from saccade.engine.generation import Plan, check_options
from saccade.errors import InputError, MethodError
from saccade.hf.record import Recorder, Sheet, fill
from saccade.hf.rows import Rows
from saccade.hf.rows import check as check_method
from saccade.inputs.cutting import VISUAL_KEYS
from saccade.inputs.families import family_of, kind_of, visual_ids
from saccade.inputs.padded import check, media_spans, split
from saccade.inputs.prompt import Prompt
from saccade.loading import adapt
from saccade.methods import drafters
from saccade.methods.compositions import Parts
from saccade.methods.drafters import AnyHead
from saccade.output import Output
from saccade.target.adapter import Target
from saccade.target.positions import TYPES, check_types


def speculate(
    drafter: nn.Module | Drafter | str | Path | None = None, method: str | None = None, **options: Any
) -> Speculation:
    """What to pass to `generate` as ``custom_generate``.

    Args:
        drafter: a loaded Hugging Face model of the target's tokenizer (a VLM or a text-only language model), a
            trained `Head` or its folder, a ready-made `Drafter`, or None for a method that needs none.
        method: a name of `saccade methods`, but not ``spd`` and ``tabed`` (see above); by default ``chain`` with a
            draft model, a head's own method with a head, and ``prompt-lookup`` without.
        options: override the method's defaults, for example ``gamma=7``.

    Raises:
        MethodError: the method does not exist, does not go with that drafter or with `generate`, or has no such option.
        ModelError: the folder holds a head of a kind that does not exist, or its configuration was changed.
    """
    return Speculation(drafter, method, **options)


class Speculation:
    """A ``custom_generate`` callable; keep it between calls, it holds the adapters of its models.

    Besides `generate`'s own arguments it takes ``assistant_inputs=``: what the drafter's own processor made of
    the same rows, for a drafter that sees pictures in another size or form.

    Attributes:
        outputs: one `Output` per row of the latest call, with statistics.
    """

    def __init__(
        self, drafter: nn.Module | Drafter | str | Path | None, method: str | None, **options: Any
    ) -> None:
        kind = drafters.kind_of(drafter) if drafters.is_head(drafter) else None  # type: ignore[arg-type]
        if isinstance(drafter, (str, Path)) and kind is None:
            raise MethodError(
                f"drafter={str(drafter)!r} is no trained head; give the folder or hub id of one, or a loaded model, "
                f"or name a method: method={str(drafter)!r}."
            )
        model = drafter if isinstance(drafter, nn.Module) and kind is None else None
        given = drafter is not None and model is None and kind is None
        if given and (method is not None or options):
            raise MethodError(
                "A ready-made drafter brings its own settings; leave out method and its options."
            )
        self._method = method or kind or methods.default(model is not None)
        if not given:
            check_method(self._method, methods.options(self._method, options), model is not None, kind)
        self._given: Drafter | None = drafter if given else None  # type: ignore[assignment]
        self._head: AnyHead | None = drafter if kind else None  # type: ignore[assignment]
        self._draft_model = None if model is None else adapt(model)
        self._options = options
        self._engine: Engine | None = None
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
        tokenizer: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        """Called by `generate` with everything prepared: ids ``[B, S]``, already repeated for several returns.

        Returns:
            Ids ``[B, S + new]``, or `GenerateDecoderOnlyOutput` if the configuration asks for it.

        Raises:
            InputError: an argument asks for what speculative decoding does not give.
        """
        config, batch = generation_config, len(input_ids)
        each = config.num_return_sequences or 1
        config.num_return_sequences = 1  # their rows are there already
        check_options(config)
        _check_outputs(config)
        engine = self._engine_for(model)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = split(
            model.config, {**(visuals or {}), "input_ids": input_ids[::each], "attention_mask": mask[::each]}
        )
        draft_prompts = self._draft_prompts(engine, prompts, assistant_inputs)
        seeds = torch.randint(2**62, (batch,)).tolist() if config.do_sample else [0] * batch
        requests = [Request(prompts[b // each], draft_prompts[b // each], seeds[b]) for b in range(batch)]

        scored = bool(config.return_dict_in_generate and config.output_scores)
        rows = Rows(input_ids, mask, each, logits_processor, stopping_criteria, scored)
        recorder = Recorder(engine, config.do_sample, batch) if _wants_logits(config) else None
        decoding = Plan(bool(config.do_sample), rows.plans)
        run = (engine if recorder is None else recorder.engine).start(requests, decoding)
        pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        sheet = Sheet(batch, streamer, pad, rows.run_on)
        for step in run.steps:
            if recorder is not None:
                recorder.take(step.tokens)
            sheet.take(step.tokens, step.finished)
        self.outputs = run.outputs
        if streamer is not None:
            streamer.end()

        sequences = torch.cat([input_ids, sheet.tokens.to(input_ids.device)], 1)
        asked = config.return_dict_in_generate or getattr(past_key_values, "_is_user_defined", False)
        if past_key_values is not None and asked:
            fill(past_key_values, run.batch.context.cache, mask, sequences.shape[1])
        if not config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=recorder.scores(sheet.width) if recorder and config.output_scores else None,
            logits=recorder.logits(sheet.width) if recorder and config.output_logits else None,
            past_key_values=past_key_values,
        )

    def _engine_for(self, model: Any) -> Engine:
        if self._engine is None or self._engine.target.model is not model:
            target = adapt(model)
            if self._given is not None:
                self._engine = Engine(target, self._given)
            else:
                special = methods.special_ids(model.config, model.generation_config)
                head = (
                    drafters.read_heads({"": self._head}, target, None)[""]
                    if self._head is not None
                    else None
                )
                parts = Parts(target, self._draft_model, special_ids=special, head=head)
                self._engine = methods.build(self._method, parts, **self._options)
        return self._engine

    def _draft_prompts(
        self, engine: Engine, prompts: Sequence[Prompt], assistant_inputs: Mapping[str, Any] | None
    ) -> Sequence[Prompt | None]:
        drafts = engine.drafter.model if isinstance(engine.drafter, (ModelDrafter, MergedDrafter)) else None
        if drafts is None:
            if assistant_inputs is not None:
                raise InputError(
                    "assistant_inputs are for a draft model, and this method has none; leave them out."
                )
            return [None] * len(prompts)
        if assistant_inputs is not None:
            check(drafts.config, assistant_inputs)
            theirs = split(drafts.config, assistant_inputs)
            if len(theirs) != len(prompts):
                raise InputError(
                    f"assistant_inputs hold {len(theirs)} rows but the inputs {len(prompts)}; give as many."
                )
            return theirs
        if not any(p.media for p in prompts) or drafts is engine.target:
            return prompts
        if not visual_ids(drafts.config):
            return [_without_media(engine.target, p) for p in prompts]
        if _eyes(drafts.config) != _eyes(engine.target.config):
            raise InputError(
                "The drafter sees pictures in another form than the target; pass what the drafter's own processor "
                "makes of the same rows as assistant_inputs."
            )
        return prompts


def _hand_over(
    model: Any,
    custom_generate: Any,
    kwargs: dict[str, Any],
    synced_gpus: Any,
    assistant_model: Any,
    streamer: Any,
) -> Any:
    """`GenerationMixin._extract_generation_mode_kwargs`, the one place where `generate` can be told what to pass on.

    For callables it drops the streamer and the tokenizer, and later it runs the vision tower and drops the pixels,
    which the drafter needs; so for ours all four are taken out here.
    """
    if not isinstance(custom_generate, Speculation):
        return _extract(model, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
    if assistant_model is not None:
        raise InputError(
            "assistant_model does not go with speculate(); give it the drafter: speculate(drafter)."
        )
    if any(kwargs.get(name) is not None for name in ("inputs_embeds", "mm_encoder_outputs")):
        raise InputError(
            "Embeddings as inputs are not supported, a drafter could not read them; pass ids and pixels."
        )
    past = kwargs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise InputError(
            "past_key_values must be empty; the whole prompt is read anew, so leave the cache out."
        )
    _check_inputs(model, kwargs)
    takes = inspect.signature(model.forward).parameters
    taken = {
        "visuals": {name: kwargs.pop(name) for name in VISUAL_KEYS if name in kwargs and name in takes},
        "assistant_inputs": kwargs.pop("assistant_inputs", None),
        "tokenizer": kwargs.pop("tokenizer", None),
        "streamer": streamer,
    }
    return {name: value for name, value in taken.items() if value is not None}


_READ = ("input_ids", "attention_mask", "past_key_values", "logits_to_keep", "assistant_inputs", "tokenizer")
"""Inputs besides pictures that are read, or that change nothing."""

_extract = GenerationMixin._extract_generation_mode_kwargs
GenerationMixin._extract_generation_mode_kwargs = _hand_over


def _check_inputs(model: Any, given: Mapping[str, Any]) -> None:
    """Refuse inputs of the model that would not reach it: it would answer as if they were not there.

    Args:
        given: all keyword arguments; those that no model takes are left to `generate`, which calls them typos.
    """
    check(model.config, given)
    present = {name for name, value in given.items() if value is not None} - vars(GenerationConfig()).keys()
    if present.intersection(VISUAL_KEYS):
        check_types(model)
    family = family_of(model.config)
    read = {*_READ, *VISUAL_KEYS, None if family is None else family.types}
    takes = {*inspect.signature(model.forward).parameters, *TransformersKwargs.__optional_keys__}
    present.discard("labels")  # of which a loss would be made that `generate` does not look at
    if "position_ids" in present and _are_default(given["position_ids"], given):
        present.remove("position_ids")
    for name in sorted(present & takes - read):
        if name not in TYPES or bool(torch.as_tensor(given[name]).any()):  # types of text say nothing
            raise InputError(
                f"The input {name} does not reach the model in speculative decoding, which makes the model's inputs "
                "anew; leave it out, or leave out custom_generate."
            )


def _are_default(positions: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether positions are those that `generate` would make of ids and mask itself."""
    ids = given.get("input_ids")
    if ids is None:
        return False
    mask = given.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    default = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return positions.dim() == 2 and bool(
        (positions.to(default.device) - default == 0).logical_or(mask == 0).all()
    )


def _check_outputs(config: Any) -> None:
    wanted = [n for n in ("output_attentions", "output_hidden_states") if getattr(config, n)]
    if wanted and config.return_dict_in_generate:
        raise InputError(
            f"{wanted[0]} is not available from speculative decoding, whose passes hold several tokens and rejected "
            "guesses; run the model once over the finished sequence instead."
        )


def _wants_logits(config: Any) -> bool:
    return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))


def _eyes(config: Any) -> tuple[Any, ...]:
    """What two models must have in common to read the same ids and pixels."""
    vision = config.vision_config
    sizes = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size")
    return kind_of(config), visual_ids(config), [getattr(vision, s, None) for s in sizes]


def _without_media(target: Target, prompt: Prompt) -> Prompt:
    """The prompt for a drafter without eyes: no placeholders, nor what stands between them."""
    hidden = {i for first, last in media_spans(target.config, prompt) for i in range(first, last)}
    return Prompt(tuple(token for i, token in enumerate(prompt.ids) if i not in hidden))
