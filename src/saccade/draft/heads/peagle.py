"""P-EAGLE's head: EAGLE-3's with masks in place of draft tokens, so that one forward drafts all levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Block, HeadConfig, Placement, Step
from saccade.draft.heads.session import BlockDraft, HeadEntries
from saccade.target_model.adapter import Target
from saccade.tree import Emitted, Rows, at_nodes


class PEagle(Eagle3):
    """Parallel drafting with EAGLE-3's entries (P-EAGLE: Parallel-Drafting EAGLE with Scalable Training).

    The entries of a draft's second token and later ones are masks, all alike but for their positions: ``mask_hidden``
    in place of the target's states, mixed as these are, and ``mask_embedding`` in place of the unknown token's
    embedding. A mask attends to the entries before it, other masks included. So the predictions of a level do not
    depend on the draft tokens above it. Blocks after the first are plain ones.
    """

    kind: ClassVar[str] = "peagle"
    defaults: ClassVar[Mapping[str, Any]] = {
        "own_vocabulary": 0,  # as of `Eagle3`, with the next two
        "residual": ("raw", "normed"),
        "state_norms": ("none", "each", "joint"),
        "blocks": 4,  # decoder blocks, as released
        "text_only": False,  # hide the visual tokens
        # of entries' tokens: what the target's decoder gets, pictures included; the target's embeddings of the token
        # ids, placeholders of pictures included; or embeddings of the head's own of these
        "embedding": ("decoder", "words", "own"),
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("residual", "state_norms", "embedding")
    default_steps: ClassVar[int] = 8
    drafts_in_one_pass = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.blocks = config.options["blocks"]
        self.stack = nn.ModuleList(Block(config, place) for place in range(1, self.blocks))
        self.mask_hidden = nn.Parameter(torch.randn(len(config.layers) * width))
        self.mask_embedding = nn.Parameter(torch.randn(width))
        embedding = config.options["embedding"]
        self.hides_visual = config.options["text_only"]
        self.is_shown_visual = embedding == "decoder" and not self.hides_visual
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if embedding == "own" else None

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        """Predict the states at the entries' own tokens; those of a step above 0 are masks, whatever their inputs."""
        if isinstance(step, Tensor) or step:
            masked = torch.as_tensor(step, device=features.device)[..., None] > 0
            features = torch.where(masked, self.fuse(self.mask_hidden).to(features.dtype), features)
            embeddings = torch.where(masked, self.mask_embedding.to(embeddings.dtype), embeddings)
        out = super().forward(features, embeddings, at)
        for block in self.stack:
            out = block(out, at)
        return out

    def words(self, tokens: Tensor, target: Target, dtype: torch.dtype) -> Tensor:
        if self.embed_tokens is None:
            return super().words(tokens, target, dtype)
        words: Tensor = self.embed_tokens(tokens)
        return words


class PEagleDraft(BlockDraft):
    """The forward over the tokens emitted last ends with masks, as many as there are levels below the first.

    Its outputs at the last token and at the masks are the drafts of all levels; the masks' entries are dropped.
    """

    @classmethod
    def begin(cls, entries: HeadEntries, rows: Rows, new: Emitted, limit: int) -> Self:
        policy, tokens, counts = entries.drafter.policy, entries.emitted(new), [len(each) for each in new]
        levels = max(min(policy.max_depth, limit), 1) if policy.can_sample else policy.max_depth  # as `grow` does
        width, masks = tokens.shape[1], levels - 1
        is_ragged = min(counts) < width
        ends = entries.numbers.get(counts)[:, None] if is_ragged else width
        place = torch.arange(width + masks, device=entries.device)[None]
        hidden: Tensor = entries.head(
            pad(torch.stack(entries.features.latest(rows, width)), (0, 0, 0, masks)),
            pad(entries.words(tokens), (0, 0, 0, masks)),
            entries.place(rows, width + masks, None, None),
            place >= ends,
        )
        entries.commit(rows, counts)
        drafted = at_nodes(hidden, ends - 1 + place[:, :levels]) if is_ragged else hidden[:, width - 1 :]
        return cls(entries.drafter.logits(drafted))
