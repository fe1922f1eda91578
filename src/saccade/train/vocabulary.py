"""Draft vocabulary of a head: the tokens that are most frequent in the target's answers (EAGLE-3 as released).

On a vocabulary of 152,000 tokens the LM head costs a drafter of one block more than the block. Tokens that are never
drafted are still emitted where the target wants them; the draft ends there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.draft.heads.eagle import Eagle3
from saccade.target_model.adapter import Target
from saccade.target_model.logit_map import logit_map
from saccade.train.samples import Source


def token_counts(source: Source, vocab_size: int) -> Tensor:
    """``[V]`` how often every token occurs in the answers, end tokens included."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for answer in source.answers():
        ids = torch.tensor(answer, dtype=torch.long)
        counts += torch.bincount(ids[ids < vocab_size], minlength=vocab_size)
    return counts


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """``[size]`` ids of the most frequent tokens, ascending; among equally frequent ones those with smaller ids."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def choose_vocabulary(head: Eagle3, target: Target, source: Source) -> str:
    """Give a new head the answers' most frequent tokens, and the target's rows for them as its first LM head."""
    counts = token_counts(source, target.vocab_size)
    ids = frequent_tokens(counts, len(head.token_ids))
    rows = target.model.get_output_embeddings().weight[ids.to(target.device)].float() * logit_map(target).factor
    head.use_tokens(ids.to(head.token_ids.device), rows.to(head.lm_head.weight.device))
    share = float(counts[ids].sum() / counts.sum().clamp(min=1))
    return (
        f"The head's vocabulary: the {len(ids):,} most frequent of {target.vocab_size:,} tokens, {share:.1%} of the "
        "tokens in the answers."
    )
