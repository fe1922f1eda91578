"""Log-probabilities of given continuations: prompt and continuation run once, teacher-forced, without drafts."""

from __future__ import annotations

import torch

from saccade.errors import InputError
from saccade.inputs.prompt import Prompt
from saccade.target_model.context import Context
from saccade.vlm import VLM

CHUNK = 1024
"""Tokens of a continuation per pass."""


class Scorer:
    """Scores continuations of prompts by the target alone.

    Prompts that share a beginning, such as the choices of one question, share its prefill, pictures included.
    """

    def __init__(self, vlm: VLM) -> None:
        self._tokenizer = vlm.processor.tokenizer
        self._context = Context(vlm.target, 1)

    @torch.inference_mode()
    def score(self, prompt: Prompt, continuation: str) -> tuple[float, bool]:
        """Score a continuation as an answer to a prompt."""
        ids = self._tokenizer(continuation.lstrip(), add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError("The continuation is empty, so it has no probability; give one of at least one token.")
        context, device = self._context, self._context.target.device
        context.target.check_length(len(prompt) + len(ids))
        first = context.load(0, prompt).logits
        assert first is not None
        losses, hits = [], []
        logits, start = first[None], 0
        while True:
            given = torch.tensor(ids[start : start + len(logits)], device=device)
            losses.append(torch.nn.functional.cross_entropy(logits.float(), given, reduction="sum"))
            hits.append((logits.argmax(-1) == given).all())
            start += len(given)
            if start == len(ids):
                break
            # The last token's own logits are not needed.
            block = ids[start - 1 : min(start - 1 + CHUNK, len(ids) - 1)]
            context.cache.reserve(0, context.lengths[0] + len(block))
            logits = context.forward([0], torch.tensor([block], device=device)).logits[0]
            context.commit([0], [list(range(len(block)))], [block])
        loss, is_greedy = torch.stack(losses).sum(), torch.stack(hits).all()
        return float(loss) / len(ids), bool(is_greedy)
