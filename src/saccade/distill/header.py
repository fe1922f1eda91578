"""What `distill.json` says about a run: which target answered what, how, and with which versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from saccade.bench.environment import fingerprint, model_facts
from saccade.distill.folder import SCHEMA
from saccade.distill.options import Options
from saccade.target.adapter import Target
from saccade.vlm import VLM

_POCKET_ONLY = ("count", "first_seed", "grammar")


def header(
    vlm: VLM, prompts: str, source: Mapping[str, Any], options: Options, method_options: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of the file.

    Args:
        prompts: name of the prompt set.
        source: what tells this prompt set from others.
        method_options: those that differ from the method's defaults.
    """
    chosen = asdict(options)
    if "pocket" not in source:
        chosen = {name: value for name, value in chosen.items() if name not in _POCKET_ONLY}
    drafts = vlm.draft_model if vlm.method != "plain" else None
    return {
        "schema": SCHEMA,
        "prompts": prompts,
        "source": dict(source),
        "target": _facts(vlm.target),
        "processor": {"digest": vlm.processor.digest},
        "drafter": None if drafts is None else _facts(drafts),
        "options": {**chosen, "method": vlm.method, "method_options": dict(method_options)},
        "versions": {name: metadata.version(name) for name in ("saccade", "torch", "transformers")},
    }


def _facts(target: Target) -> dict[str, Any]:
    model = target.model
    return {**model_facts(model, str(model.config._name_or_path)), "digest": fingerprint(model)}
