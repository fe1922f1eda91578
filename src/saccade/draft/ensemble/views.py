"""Views: forms in which one draft model gets a prompt (TABED, Lee et al. 2026, Sections 4.1, 6.1 and I.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade.draft.ensemble.captions import Caption, Captioner, OwnCaptions
from saccade.draft.ensemble.pooled import pooled
from saccade.draft.ensemble.view import PlainView, View
from saccade.draft.model import ModelDraftSession
from saccade.draft.pruning import Pruning, positions_to_drop, request_attention
from saccade.errors import MethodError
from saccade.inputs.placeholders import without_media
from saccade.inputs.processor import InputProcessor
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.target.prefill import PrefillResult


def make_views(
    names: str,
    model: Target,
    processor: InputProcessor,
    captioner: Captioner | None = None,
    pruning: Pruning | None = None,
    config: Any = None,
) -> list[View]:
    """Make the views of one draft model from their letters, as in ``MTCP``."""
    config, tokenizer = config or processor.config, processor.tokenizer
    makers: dict[str, Callable[[], View]] = {
        "M": Multimodal,
        "T": lambda: TextOnly(config, tokenizer),
        "C": lambda: Caption(config, tokenizer, captioner or OwnCaptions(model, processor), model.device),
        "P": lambda: pooled(model),
        "R": lambda: Pruned(pruning),
    }
    if not names or len(set(names)) < len(names) or not set(names) <= set(makers):
        raise MethodError(f"The views {names!r} must be one or more letters of {''.join(makers)}, each at most once.")
    return [makers[name]() for name in names]


class Multimodal(PlainView):
    """M: the prompt unchanged."""

    name = "M"

    def read(self, prompt: Prompt) -> Prompt:
        return prompt


class TextOnly(PlainView):
    """T: one newline in place of every image or video (Gagrani et al. 2024)."""

    name = "T"

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def read(self, prompt: Prompt) -> Prompt:
        if not prompt.media:
            return prompt
        return without_media(self._config, self._tokenizer, prompt)


class Pruned:
    """R: visual tokens pruned by the target's attention, at their original positions (SpecVLM, Ji et al. 2025)."""

    name = "R"
    seconds = 0.0

    def __init__(self, pruning: Pruning | None = None) -> None:
        self._pruning = pruning or Pruning()

    @property
    def early(self) -> bool:
        return not self._pruning.needs_attention

    def open(self, target: Context) -> None:
        request_attention(self._pruning, target)

    def read(self, prompt: Prompt) -> Prompt:
        return prompt

    def load(
        self, own: ModelDraftSession, row: int, prompt: Prompt, target: Context, prefill: PrefillResult | None
    ) -> None:
        dropped = positions_to_drop(own, row, prompt, self._pruning, target, prefill)
        own.load_pruned(row, prompt, dropped)
