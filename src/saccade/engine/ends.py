"""One rule for the ends of answers: end-of-text and stop tokens, stop strings, a minimum of tokens, and grammars.

The table of what happens where two of them meet is in docs/serve.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.generation.stopping_criteria import StopStringCriteria

from saccade.grammar import Rollback


def ends_of(model: Any, tokenizer: Any, requested: Any = None) -> frozenset[int]:
    """Ids that end an answer: those requested, else the generation configuration's and the special ones of others.

    Transformers' `generate` ends at the generation configuration's alone. A model's configuration and its tokenizer may
    name more. The configuration's class may as well, by a default that is a word in a checkpoint's own vocabulary.
    """
    if requested is not None:
        return _ids(requested)
    ends = _ids(model.generation_config.eos_token_id)
    if tokenizer is None:
        return ends
    for part in (model.config, model.config.get_text_config(decoder=True), tokenizer):
        for end in _ids(getattr(part, "eos_token_id", None)):
            if tokenizer.decode([end]) != tokenizer.decode([end], skip_special_tokens=True):
                ends |= {end}
    return ends


def settle(config: Any, ends: frozenset[int], processors: Iterable[Any]) -> None:
    """Give a row's generation configuration its ends, or those of its grammar, which nothing else ends."""
    own = frozenset[int]()
    for processor in processors:
        if isinstance(processor, Rollback):
            own |= processor.ends
            config.stop_strings = None
    config.eos_token_id = sorted(own or ends) or None


def behind(minimum: int, criterion: Any) -> Any:
    """A criterion, which ends nothing up to a number of ids if it is one of stop strings."""
    if not isinstance(criterion, StopStringCriteria):
        return criterion
    return lambda ids, scores: ids.shape[1] > minimum and criterion(ids, scores)


def _ids(value: Any) -> frozenset[int]:
    return frozenset(() if value is None else torch.as_tensor(value).flatten().tolist())
