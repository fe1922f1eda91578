"""Contents of a checkpoint folder: a head with its layout and target, or a model; and whether a target fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from saccade.draft.assistant import compared
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import LARGEST, MARK, Head, TargetShape
from saccade.draft.heads.mtp import drafts_by_mtp, mtp_layers
from saccade.draft.heads.published.released import LAYERS, SPECULATORS, ReleasedLayout, Values, Weights, rope_settings
from saccade.draft.heads.store import layout_of, parsed, read_head
from saccade.draft.model import drafts_in_parallel, mask_token
from saccade.errors import ModelError
from saccade.loading import (
    check_checkpoint,
    file_of,
    is_assistant,
)

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a head with a target."""

    what: str  # is compared
    head: Any
    target: Any
    fits: bool | None  # whether they agree; None where only a person can tell
    note: str = ""  # what follows


@dataclass(slots=True)
class Inspection:
    """What a folder holds."""

    path: str
    holds: str  # `head`, `model`, or `assistant`: a drafter that attends to its target's entries
    layout: str  # `saccade`, another engine's, or `transformers`
    kind: str  # of the head, or the model's class
    facts: Mapping[str, Any]  # name -> value, for a person and for programs
    problem: str | None = None  # why a head cannot be loaded; None if it can
    checks: list[Check] = field(default_factory=list)  # of a head against a target

    @property
    def fits(self) -> bool | None:
        """Whether a head can be loaded for the target; None without one."""
        if not self.checks and self.problem is None:
            return None
        return self.problem is None and all(check.fits is not False for check in self.checks)


def inspect_checkpoint(path: str | Path, target: str | Path | None = None) -> Inspection:
    """Describe a head or a model; no model is run, and of a target only the configuration is read."""
    file = file_of(path, "config.json")
    values = {} if file is None else parsed(file)
    layout = layout_of(path, values)
    if layout is None and MARK not in values:
        inspection = _model(path)
        if inspection.holds == "assistant" and target is not None:
            sides = compared(check_checkpoint(path), check_checkpoint(target))
            inspection.checks = [Check(what, ours, theirs, ours == theirs) for what, (ours, theirs) in sides.items()]
            return inspection
        if target is not None:
            raise ModelError(f"{path} holds no head, so it is not compared with a target; leave --target out.")
        return inspection
    inspection, head = _head(path, values, layout)
    if target is None:
        return inspection
    shape, text = shape_of(target), check_checkpoint(target).get_text_config(decoder=True)
    head = head if layout is None else None  # others' files leave open what follows from the target
    try:
        head, inspection.problem = read_head(path, shape)[0], None
    except ModelError as problem:
        inspection.problem = str(problem)
    if head is not None:
        inspection.checks = list(_checks(head, shape, getattr(text, "rms_norm_eps", None), layout is None))
    return inspection


def shape_of(target: str | Path) -> TargetShape:
    """Return the shape of a target by its configuration alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = check_checkpoint(target)
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            classes = auto._model_mapping[type(config)]
            name = (classes[0] if isinstance(classes, tuple) else classes).__name__
            return TargetShape(name, text.hidden_size, text.vocab_size, text.num_hidden_layers, "mrope_section" in rope)
    raise ModelError(f"{type(config).__name__} is not the configuration of a model that generates text.")


def _model(path: str | Path) -> Inspection:
    try:
        config = check_checkpoint(path)
    except ModelError as problem:
        raise ModelError(f"{path} holds neither a head that is known nor a model: {problem}") from None
    shape, text = shape_of(path), config.get_text_config(decoder=True)
    facts = {
        "model type": config.model_type,
        "reads images": text is not config and not is_assistant(config),
        "hidden size": shape.hidden_size,
        "vocabulary": shape.vocab_size,
        "layers": shape.layers,
        "positions": "M-RoPE" if shape.uses_mrope else "one per token",
        "norms' epsilon": getattr(text, "rms_norm_eps", None),
    }
    if is_assistant(config):
        facts["target's hidden size"] = config.backbone_hidden_size
        return Inspection(str(path), "assistant", "transformers", shape.model_class, facts)
    if drafts_in_parallel(config):
        facts["mask token"] = f"{mask_token(config)}, with which it drafts in one pass by default (method pard)"
    named, stored = mtp_layers(config, path)
    if named:
        usual = ", drafting by default (method mtp)" if drafts_by_mtp(config, path) else ""
        facts["layers of multi-token prediction"] = f"{named}{usual}" if stored else f"{named}, without weights"
    return Inspection(str(path), "model", "transformers", shape.model_class, facts)


def _head(path: str | Path, values: Mapping[str, Any], layout: ReleasedLayout | None) -> tuple[Inspection, Head | None]:
    """Describe a head by its own files, and return it without weights; None if it cannot be loaded."""
    ours, kind = layout is None, str(values.get(MARK) or values.get(SPECULATORS, UNKNOWN))
    inspection = Inspection(str(path), "head", "saccade" if layout is None else layout.title, kind, {})
    named = {} if ours else {"target": _target_named(values)}
    try:
        head, weights = read_head(path, described)
    except ModelError as problem:
        inspection.problem, inspection.facts = str(problem), named
        return inspection, None
    inspection.kind, inspection.facts = head.kind, {**_facts(head, weights), **named}
    return inspection, head


def _table(values: Values, name: str) -> Values:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _target_named(values: Values) -> str:
    """Return the target that a released head names."""
    verifier = _table(_table(values, "speculators_config"), "verifier")
    return str(verifier.get("name_or_path") or values.get("base_model_name_or_path") or UNKNOWN)


_WIDE = re.compile(r"(0\.0\.linear|blocks\.0\.layers\.0|fc)\.weight$")
_LM_HEAD = re.compile(r"(\b0\.[1-9]\d*|hydra_lm_head\.0|lm_heads\.0)\.weight$")
"""Names of weights with a row for every number of a state, or for every token."""


def described(values: Values, weights: Weights) -> TargetShape:
    """Return a target as a released head's files describe it; its depth is the least that they allow."""
    nested = {**values, **_table(values, "transformer_layer_config"), **_table(values, "text_config")}
    hidden = nested.get("target_hidden_size") or nested.get("hidden_size")
    vocabulary = nested.get("vocab_size")
    for key, weight in weights.items():
        if weight.dim() == 2 and _WIDE.search(key):
            hidden = hidden or len(weight)
        if weight.dim() == 2 and _LM_HEAD.search(key):
            vocabulary = vocabulary or len(weight)
    read = [*(values.get(LAYERS) or ()), *(layer + 1 for layer in _table(values, "eagle_config").get(LAYERS) or ())]
    least = max(read, default=8)
    depths = (depth for depth in range(least, least + 3) if len(Eagle3.reads(depth)) == len(read))
    uses_mrope = "mrope_section" in rope_settings(nested)
    vocabulary = min(vocabulary or 1, LARGEST)
    return TargetShape(UNKNOWN, hidden or 1, vocabulary, next(depths, least), uses_mrope)


def _facts(head: Head, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    config = head.config
    dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    is_named = config.target_class != UNKNOWN
    facts: dict[str, Any] = {
        "target class": config.target_class if is_named else None,
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "target layers": config.target_layers if is_named else None,
        "reads layers": list(config.layers) if is_named or config.kind in ("eagle3", "peagle") else ["last"],
        "drafts tokens": config.options.get("own_vocabulary") or config.vocab_size,
        "positions": head.positions,
        "norms' epsilon": config.norm_eps,
        "rotary": dict(config.rope),
        "options": dict(config.options),
        "reach": head.reach,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _checks(drafter: Head, shape: TargetShape, eps: float | None, is_ours: bool) -> Iterator[Check]:
    config = drafter.config
    for what, head, target in (
        ("hidden size", config.hidden_size, shape.hidden_size),
        ("vocabulary", config.vocab_size, shape.vocab_size),
        ("layers", config.target_layers, shape.layers),
        ("model class", config.target_class, shape.model_class),
    ):
        yield Check(what, head, target, head == target)
    positions, expected = drafter.positions, "M-RoPE" if shape.uses_mrope else "one per token"
    if shape.uses_mrope and positions != "target" and not is_ours:
        note = "right only if it was trained so; files with mrope_section are read with the target's positions"
        yield Check("positions", positions, expected, None, note)
    else:
        yield Check("positions", positions, expected, True)
    equal = eps in (None, config.norm_eps)
    note = "" if equal else "heads usually have their target's; a wrong one shows in long answers at most"
    yield Check("norms' epsilon", config.norm_eps, eps, True if equal else None, note)
