"""Hugging Face's own assisted generation, as it is and with a drafter that sees the picture."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.pocket_pair import Inputs


@contextmanager
def assistant(draft: Any, inputs: Inputs, *, sees: bool, **settings: Any) -> Iterator[dict[str, Any]]:
    """Arguments of `generate` that make ``draft`` the assistant for one prompt."""
    before = copy.deepcopy(draft.generation_config)
    draft.generation_config.update(**settings)
    if sees:
        draft.generate = _Seeing(draft, inputs)
    try:
        yield {"assistant_model": draft}
    finally:
        draft.generation_config = before
        draft.__dict__.pop("generate", None)


class _Seeing:
    """An assistant's `generate` whose first call of a prompt gets the assistant's own picture features."""

    def __init__(self, draft: Any, inputs: Inputs) -> None:
        self._draft = draft
        self._generate = type(draft).generate
        self._media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}

    def __call__(self, **arguments: Any) -> Any:
        arguments.pop("mm_encoder_outputs", None)  # the target's features, of the target's width
        if arguments.get("past_key_values") is None:
            arguments["generation_config"] = copy.deepcopy(arguments["generation_config"])
            arguments["generation_config"].is_assistant = False  # else the picture is dropped
            arguments |= {k: v.to(self._draft.dtype) if v.is_floating_point() else v for k, v in self._media.items()}
        return self._generate(self._draft, **arguments)
