"""Resolution of a `ModelSpec`: the method and the models that it comes to, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from saccade import cpu, methods
from saccade.draft.assistant import check_assistant
from saccade.files import is_profile
from saccade.inputs.processor import InputProcessor
from saccade.loading import (
    check_checkpoint,
    check_device,
    check_dtype,
    default_device,
    empty_model,
    fastest_dtype,
    is_assistant,
    load_model,
    mask_token,
    mtp_config,
    name_of,
    path_of,
    refuse_assistant,
    shared_vocabulary,
)
from saccade.lora import refuse_apart, with_lora
from saccade.methods import drafters
from saccade.model_spec import ModelSpec
from saccade.profile import with_profile
from saccade.target_model.executor import check_executor
from saccade.target_model.int8 import check_weights
from saccade.target_model.sharding import SHARDED, TENSOR_PARALLEL, check_processes


@dataclass(frozen=True, slots=True)
class Resolved:
    """Models that fit each other and the method."""

    spec: ModelSpec  # with the method, all heads by name, and a draft model or none as its drafter
    processor: InputProcessor  # of the target
    draft_processor: InputProcessor | None = None  # of the draft model; an assistant's is the target's
    vocabulary: int | None = None  # leading ids that target and draft model share

    def read(self) -> tuple[Resolved, list[int]]:
        """Read the weights of models that are folders or hub ids.

        Returns:
            The loaded models, and the numbers of CPU threads between which their steps may choose.
        """
        spec, draft_model = self.spec, None
        model = _model(spec.target, spec.dtype, spec.device)
        counts = cpu.use_threads(spec.threads, model.num_parameters()) if model.device.type == "cpu" else []
        if spec.drafter is not None:
            place = model.get_input_embeddings().weight.device
            draft_model = _model(spec.drafter, spec.draft_dtype or "auto", None if place.type == "cpu" else place)
            if spec.draft_dtype is None:
                draft_model = draft_model.to(fastest_dtype(draft_model))
        return replace(self, spec=replace(spec, target=model, drafter=draft_model)), counts


def resolve(
    spec: ModelSpec,
    complete: bool = True,
    processor: InputProcessor | None = None,
    draft_processor: InputProcessor | None = None,
) -> Resolved:
    """Report every mistake that shows before weights are read.

    Args:
        complete: whether folders must have their weights.
        processor, draft_processor: of models that are loaded; None: made from their checkpoints.
    """
    cpu.check_threads(spec.threads)
    check_executor(spec.executor)
    check_weights(spec.weights)
    if is_profile(spec.target):
        spec = with_profile(spec)
    if not drafters.is_pocket(spec.target):
        if spec.device is None:
            spec = replace(spec, device=default_device())
        if spec.drafter is not None and isinstance(spec.target, (str, Path)):
            check_checkpoint(path_of(spec.target), weights=complete)  # before the drafter's, where both are missing
    named = drafters.named(spec.drafter, spec.heads, complete)
    options = drafters.completed(spec.method, spec.options, spec.drafter, drafters.kinds_of(named), spec.head)
    target, drafter, heads = drafters.with_builtin(spec.target, spec.drafter, spec.method, options, named)
    for dtype in (spec.dtype, spec.draft_dtype or "auto"):
        check_dtype(dtype)
    check_device(spec.device)
    kinds = drafters.kinds_of(heads)
    if not (processor or spec.method or drafter is not None or kinds):  # what the target has chooses the method
        processor = _processor(target, complete)
    method = spec.method or drafters.default(drafter, kinds, spec.head, options, processor and processor.config)
    draft = None if drafters.is_head(drafter) else drafter
    values = methods.options(method, options)
    methods.fit(method, values, draft is not None, kinds, spec.head, has_drafter=drafter is not None)
    adapters = {name: drafters.adapter_folder(folder) for name, folder in spec.adapters.items()}
    spec = replace(spec, target=target, drafter=draft, method=method, heads=heads, adapters=adapters, options=options)
    models = Resolved(spec, processor or _processor(target, complete), draft_processor)
    models = _with_drafter(models, values.get("draft_with"), complete)
    config = models.processor.config
    check_processes(spec.device, config)
    refuse_apart(adapters and spec.device in (TENSOR_PARALLEL, SHARDED))
    for name, folder in adapters.items():
        with_lora(empty_model(config), name, folder)
    return models


def _with_drafter(models: Resolved, drafts: str | None, complete: bool) -> Resolved:
    """Return models with what target and draft model have in common; ``drafts``: what the method drafts with."""
    target, draft, ours = models.spec.target, models.spec.drafter, models.processor
    if drafts == "mtp":
        mtp_config(ours.config, name_of(target))
    elif drafts == "pard":
        mask_token(drafters.config_of(draft))
    if draft is None:
        return models
    config = drafters.config_of(draft)
    if is_assistant(config):
        check_assistant(config, ours.config)
        theirs = ours
    else:
        theirs = models.draft_processor or _processor(draft, complete)
    vocabulary = shared_vocabulary(ours.tokenizer, theirs.tokenizer, (name_of(target), name_of(draft)))
    return replace(models, draft_processor=theirs, vocabulary=vocabulary)


def _processor(source: Any, weights: bool = True) -> InputProcessor:
    if not isinstance(source, (str, Path)):
        return InputProcessor.load(source.config._name_or_path)
    refuse_assistant(check_checkpoint(path_of(source), weights=weights), str(source))
    return InputProcessor.load(path_of(source))


def _model(source: Any, dtype: str | torch.dtype, device_map: Any) -> Any:
    if not isinstance(source, (str, Path)):
        return source
    return load_model(path_of(source), dtype=dtype, device_map=device_map)
