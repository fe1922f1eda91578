"""With which token a target ends its answers, where several could."""

from __future__ import annotations

from typing import Any

from saccade.errors import SaccadeError
from saccade.inputs.processor import InputProcessor


def end_token(processor: InputProcessor) -> int | None:
    """The id that ends an answer: of several the one that the chat template puts behind an assistant's turn.

    Gemma 3 has ids 1 and 106 and ends turns with 106; Llama 3 names 128001 first and ends them with 128009.

    Returns:
        The first of the processor's ids where the template tells nothing; None where it has none.
    """
    known = processor.eos_token_ids
    if len(known) > 1:
        asked: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]
        told = [*asked, {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}]
        try:
            before, whole = (processor.prompt(m, add_generation_prompt=False).ids for m in (asked, told))
        except SaccadeError:
            return known[0]
        for token in whole[len(before) :]:
            if token in known:
                return token
    return known[0] if known else None
