"""From a `ModelSpec` to models that fit each other, with every mistake that shows before weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from saccade import cpu, methods
from saccade.draft.heads.head import Head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.store import kind_at, kind_in, load_head
from saccade.draft.model import drafts_in_parallel, mask_token
from saccade.errors import MethodError, ModelError
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
    load_processor,
    name_of,
    path_of,
    refuse_assistant,
)
from saccade.lora import refuse_apart, with_lora
from saccade.methods.settings import GROUPS, WITHOUT_DRAFTER
from saccade.model_spec import ModelSpec
from saccade.target_model.adapter import Target, check_executor
from saccade.target_model.int8 import check_weights
from saccade.target_model.sharding import SHARDED, TENSOR_PARALLEL, check_processes
from saccade.wording import shortened


@dataclass(frozen=True, slots=True)
class Resolved:
    """Models that fit each other and the method."""

    spec: ModelSpec  # with the method, all heads by name, and a draft model or none as its drafter
    processor: InputProcessor  # of the target
    draft_processor: InputProcessor | None = None  # of the draft model; an assistant's is the target's
    vocabulary: int | None = None  # leading ids that target and draft model share

    def read(self) -> tuple[Resolved, list[int]]:
        """Return the models with their weights, and the numbers of CPU threads between which their steps may choose."""
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
    """Return models that fit; ``complete``: whether folders must have their weights; processors as of `VLM`."""
    for role, model in ("target", spec.target), ("drafter", POCKET if spec.drafter is None else spec.drafter):
        is_model = hasattr(model, "config") and not (role == "target" and isinstance(model, Head))
        if not (is_model or isinstance(model, (str, Path))):
            raise ModelError(f"The {role} must be a folder, a hub id or a loaded model, not {shortened(model)}.")
    cpu.check_threads(spec.threads)
    check_executor(spec.executor)
    check_weights(spec.weights)
    if is_profile(spec.target):
        from saccade.profile import with_profile

        spec = with_profile(spec)
    if not is_pocket(spec.target):
        if spec.device is None:
            spec = replace(spec, device=default_device())
        if spec.drafter is not None and isinstance(spec.target, (str, Path)):
            check_checkpoint(path_of(spec.target), weights=complete)  # before the drafter's, where both are missing
    heads = named(spec.drafter, spec.heads, complete)
    options = completed(spec.method, spec.options, spec.drafter, kinds_of(heads), spec.head)
    spec = with_builtin(replace(spec, heads=heads, options=options))
    for dtype in (spec.dtype, spec.draft_dtype or "auto"):
        check_dtype(dtype)
    check_device(spec.device)
    kinds = kinds_of(spec.heads)
    if not (processor or spec.method or spec.drafter is not None or kinds):  # then the target's checkpoint decides
        processor = _processor(spec.target, complete)
    method = spec.method or default(spec.drafter, kinds, spec.head, spec.options, processor and processor.config)
    draft = None if is_head(spec.drafter) else spec.drafter
    values = methods.options(method, spec.options)
    methods.fit(method, values, draft is not None, kinds, spec.head, has_drafter=spec.drafter is not None)
    spec = replace(spec, drafter=draft, method=method)
    models = Resolved(spec, processor or _processor(spec.target, complete), draft_processor)
    models = _with_drafter(models, values.get("draft_with"), complete)
    config = models.processor.config
    check_processes(spec.device, config)
    refuse_apart(spec.adapters and spec.device in (TENSOR_PARALLEL, SHARDED))
    for name, folder in spec.adapters.items():
        with_lora(empty_model(config), name, folder)
    return models


def _with_drafter(models: Resolved, drafts: str | None, complete: bool) -> Resolved:
    """Return models with what target and draft model have in common; ``drafts``: what the method drafts with."""
    target = models.spec.target
    draft = models.spec.drafter
    ours = models.processor
    if drafts == "mtp":
        from saccade.draft.heads.mtp import mtp_config

        mtp_config(ours.config, name_of(target))
    elif drafts == "pard":
        mask_token(config_of(draft))
    if draft is None:
        return models
    config = config_of(draft)
    if is_assistant(config):
        from saccade.draft.assistant import check_assistant

        check_assistant(config, ours.config)
        theirs = ours
    else:
        theirs = models.draft_processor or _processor(draft, complete)
    vocabulary = shared_vocabulary(ours.tokenizer, theirs.tokenizer, (name_of(target), name_of(draft)))
    return replace(models, draft_processor=theirs, vocabulary=vocabulary)


def shared_vocabulary(target: Any, drafter: Any, names: tuple[str, str]) -> int:
    """Return the number of leading ids that both tokenizers share, but for added tokens; drafts consist of these."""
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    shared = min(len(ours), len(theirs))
    added = set(target.get_added_vocab().values()) & set(drafter.get_added_vocab().values())
    compared = ((i, token) for token, i in theirs.items() if i < shared and i not in added)
    differing = [(i, token) for i, token in compared if ours.get(token) != i]
    if differing:
        there, token = min(differing)
        here = f"id {ours[token]}" if token in ours else "no id"
        raise ModelError(
            f"The drafter {names[1]} has another tokenizer than the target {names[0]} (token {token!r} has "
            f"id {there} there and {here} here); give a drafter of the same family."
        )
    return shared


def _processor(source: Any, weights: bool = True) -> InputProcessor:
    if not isinstance(source, (str, Path)):
        return load_processor(source.config._name_or_path)
    refuse_assistant(check_checkpoint(path_of(source), weights=weights), str(source))
    return load_processor(path_of(source))


def _model(source: Any, dtype: str | torch.dtype, device_map: Any) -> Any:
    if not isinstance(source, (str, Path)):
        return source
    return load_model(path_of(source), dtype=dtype, device_map=device_map)


POCKET = "pocket"


def is_pocket(name: Any) -> bool:
    """Whether a name is the built-in one and not an existing folder."""
    return isinstance(name, str) and name == POCKET and not Path(name).is_dir()


def only(drafter: Any, assistant_model: Any) -> Any:
    """Return the drafter, which Hugging Face calls ``assistant_model``."""
    if drafter is not None and assistant_model is not None:
        raise MethodError("drafter and assistant_model are two names for the same; give one of them.")
    return assistant_model if drafter is None else drafter


def with_builtin(spec: ModelSpec) -> ModelSpec:
    """Return a specification with folders in place of `pocket`, and with the built-in drafters that it leaves open."""
    from saccade.pocket import adapter_path, draft_path, head_path, head_paths, target_path

    target = spec.target
    drafter = spec.drafter
    heads = dict(spec.heads)
    if is_pocket(target):
        target = str(target_path())
        values = None if spec.method is None else methods.options(spec.method, spec.options)
        needs = None if values is None else methods.needs(values)
        if values is None:
            taken = {*heads, *kinds_of(heads).values()}
            heads |= {kind: folder for kind, folder in head_paths().items() if kind not in taken}
        elif needs == "head" and drafter is None and not heads:
            heads[values["draft_with"]] = head_path(values["draft_with"])
        if drafter is None and needs in (None, "draft model"):
            drafter = POCKET
    drafter = str(draft_path()) if is_pocket(drafter) else drafter
    adapters = {name: adapter_path() if is_pocket(folder) else folder for name, folder in spec.adapters.items()}
    return replace(spec, target=target, drafter=drafter, heads=heads, adapters=adapters)


AnyHead = str | Path | Head  # a loaded head, or its folder or hub id
Heads = AnyHead | Sequence[AnyHead] | Mapping[str, AnyHead]


def is_head(drafter: Any) -> bool:
    """Whether a drafter is a head, or the folder of one."""
    return isinstance(drafter, Head) or kind_in(drafter) is not None


def named(drafter: Any, heads: Heads, weights: bool = True) -> dict[str, AnyHead]:
    """Return all heads by name; ``weights``: whether those of a draft model have to be there."""
    by_name: dict[str, AnyHead] = {}
    if is_head(drafter):
        by_name[kind_of(drafter)] = drafter
    elif isinstance(drafter, (str, Path)) and not is_pocket(drafter):
        check_checkpoint(path_of(drafter), weights=weights)  # or a mistyped head would pass for a draft model
    pairs: list[tuple[str, AnyHead]] = []
    if isinstance(heads, Mapping):
        pairs = list(heads.items())
    else:
        several = [heads] if isinstance(heads, (str, Path, Head)) else heads or ()
        pairs = [
            (head.kind if isinstance(head, Head) else Path(path_of(head)).resolve().name, head) for head in several
        ]
    for name, head in pairs:
        if name in by_name:
            raise MethodError(
                f"Two heads are named {name!r}; give one of them another name with heads={{NAME: FOLDER}} "
                "(--head NAME=FOLDER on the command line)."
            )
        by_name[name] = head
    return by_name


def kind_of(head: AnyHead) -> str:
    """Return the kind of a head, or of the one in a folder."""
    return head.kind if isinstance(head, Head) else kind_at(path_of(head))


def kinds_of(heads: Mapping[str, AnyHead]) -> dict[str, str]:
    """Return name -> kind."""
    return {name: kind_of(head) for name, head in heads.items()}


def read_heads(heads: Mapping[str, AnyHead], target: Target, dtype: str | torch.dtype | None) -> dict[str, Head]:
    """Load heads by name; every folder is read once."""
    checked = check_dtype(dtype or "auto")
    kind = checked if isinstance(checked, torch.dtype) else None

    @cache
    def read(folder: str) -> Head:
        return load_head(folder, target, kind)

    loaded: dict[str, Head] = {}
    for name, head in heads.items():
        if isinstance(head, Head):
            loaded[name] = head
        else:
            path = path_of(head)
            loaded[name] = read(str(Path(path).resolve()) if Path(path).exists() else path)
    return loaded


def config_of(drafter: Any) -> Any:
    """Return the configuration of a loaded model, or of the one in a folder."""
    return check_checkpoint(path_of(drafter), weights=False) if isinstance(drafter, (str, Path)) else drafter.config


def completed(
    method: str | None, options: Mapping[str, Any], drafter: Any, kinds: Mapping[str, str], head: str | None = None
) -> dict[str, Any]:
    """Return a method's options, with the given head as the drafter of a method that paces any (`auto`)."""
    if method is None or "draft_with" in options or methods.get(method).settings.get("tree") != "paced":
        return dict(options)
    kind = kinds.get(head, head) if head is not None else kind_of(drafter) if is_head(drafter) else None
    if kind is None and drafter is None:
        kind = next(iter(kinds.values()), None)
    return {**options, "draft_with": kind} if kind in HEAD_KINDS else dict(options)


def default(
    drafter: Any, kinds: Mapping[str, str], head: str | None = None, options: Iterable[str] = (), config: Any = None
) -> str:
    """Return the default method, as `saccade.load` describes it; ``config`` is the target's."""
    if head is not None and head in kinds:
        return kinds[head]
    if is_head(drafter):
        return kind_of(drafter)
    if drafter is None and kinds:
        return next(iter(kinds.values()))
    chosen = set(options)
    copies = chosen & {"max_ngram", "max_matching_ngram_size"} and "lookup_tokens" not in chosen
    if drafter is None and config is not None and not copies:
        from saccade.draft.heads.mtp import drafts_by_mtp

        if drafts_by_mtp(config, config.name_or_path):
            return "mtp"
    changes = {"draft_with", "views", *GROUPS["pruning"]}  # of what the draft model is and reads
    if drafter is not None and not chosen & changes and drafts_in_parallel(config_of(drafter)):
        return "pard"
    if drafter is None:
        return WITHOUT_DRAFTER
    return "chain" if chosen & {"draft_with", "tree", "rule", "lookup_tokens", "views"} else "auto"
