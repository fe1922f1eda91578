"""DREAM's head: the stream of tokens attends to the target's features instead of being fed them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from saccade.draft.heads.block import Block, RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.cross import GATES, CrossBlock
from saccade.draft.heads.head import Head
from saccade.draft.pruning import Pruning
from saccade.errors import ModelError
from saccade.target.cache import RowCache

if TYPE_CHECKING:
    from saccade.draft.heads.dream_session import DreamDraftSession


class Dream(Head):
    """Decoder block, cross-attention block, decoder block (DREAM, Section 3.1).

    The decoder blocks see the embeddings of entries alone. In between every entry attends to the features of ALL
    tokens before its own: the target's, and below the last emitted token the head's own outputs. Visual tokens of
    little weight have no entry (Section 3.3), but their features are attended to. Entries keep the positions that
    they have without this compression.

    Options:
        keep: share of every medium's tokens that have entries, those that the target's last layer attends to most.
        gate: of the cross-attention's residual: ``tanh``, ``open`` or ``replace``, see `CrossBlock`.
        rotary: whether the cross-attention has the rotary positions of the features' tokens.
        direct: whether the feature of the token before its own is added to every entry's stream ahead of the
            cross-attention, through a projection; nothing without cross-attention.
        initial: whether there is a block before the cross-attention (Table 2).
        cross: cross-attention blocks (Table 2).
        final: whether there is a block behind it (Table 2).
    """

    kind: ClassVar[str] = "dream"
    defaults: ClassVar[Mapping[str, Any]] = {
        "keep": 0.75,
        "gate": "open",
        "rotary": True,
        "direct": True,
        "initial": True,
        "cross": 1,
        "final": True,
    }
    former: ClassVar[Mapping[str, Any]] = {"rotary": False, "direct": False}
    default_steps: ClassVar[int] = 2

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        given = config.options
        _check(given)
        self.first = Block(config, 0) if given["initial"] else None
        width, direct = config.hidden_size, given["direct"] and given["cross"]
        self.direct_norm = RMSNorm(width, config.norm_eps) if direct else None
        self.direct = nn.Linear(width, width, bias=False) if direct else None
        self.cross = nn.ModuleList(
            CrossBlock(config, given["gate"], i, given["rotary"]) for i in range(given["cross"])
        )
        self.last = Block(config, int(given["initial"])) if given["final"] else None

    @classmethod
    def session_class(cls) -> type[DreamDraftSession]:
        from saccade.draft.heads.dream_session import DreamDraftSession

        return DreamDraftSession

    @property
    def blocks(self) -> int:
        return sum(block is not None for block in (self.first, self.last))

    @property
    def pruning(self) -> Pruning:
        """Which visual tokens have entries."""
        keep = self.config.options["keep"]
        return Pruning("attention", keep_images=keep, keep_videos=keep, layers=(-1,))

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        allow: Tensor,
        cache: RowCache | None = None,
        step: int | Tensor = 0,
        *,
        reach: Tensor | None = None,
        memory: RowCache | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """As in `Head.forward`, with features of their own number.

        Args:
            features: ``[B, M, d]``; those that are not in the memory yet.
            reach: ``[B or 1, N, F]`` bool; which of the F features each entry attends to, those in the memory first.
                None where each entry comes with the feature of the token before it (M = N): then an entry sees the
                features of those entries that it sees.
            memory: of `new_memory`, told where to write; None when all features are given at once (F = M).
            places: ``[B or 1, M]`` the tokens of the features, which stand side by side. None where each entry comes
                with its own.
        """
        reach = allow if reach is None else reach
        begun = self.begin(embeddings, positions, allow, cache)
        return self.finish(begun, features, positions, allow, reach, cache, memory, places)

    def begin(
        self, embeddings: Tensor, positions: Tensor, allow: Tensor, cache: RowCache | None = None
    ) -> Tensor:
        """``[B, N, d]`` behind the first block, which no feature has reached."""
        if self.first is None:
            return embeddings
        out: Tensor = self.first(embeddings, positions, allow, cache)
        return out

    def finish(
        self,
        begun: Tensor,
        features: Tensor,
        positions: Tensor,
        allow: Tensor,
        reach: Tensor,
        cache: RowCache | None = None,
        memory: RowCache | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """``[B, N, d]`` of `forward`, from what `begin` made of the entries."""
        out = begun
        if self.direct is not None and self.direct_norm is not None:
            out = out + self.direct(self.direct_norm(_latest(features, positions, places)))
        for block in self.cross:
            out = block(out, features, reach, memory, (positions, positions if places is None else places))
        if self.last is not None:
            out = self.last(out, positions, allow, cache)
        return out

    def new_memory(self, rows: int) -> RowCache:
        """An empty cache for the keys and values of features in up to ``rows`` rows."""
        return RowCache([next(self.parameters()).device] * len(self.cross), rows)


def _latest(features: Tensor, positions: Tensor, places: Tensor | None) -> Tensor:
    """``[B, N, d]`` the feature of the token before each entry's own, of features ``[B, M, d]`` at ``places``."""
    if places is None:
        return features
    index = (positions - places[:, :1]).expand(len(features), -1)
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[2]))


def _check(options: Mapping[str, Any]) -> None:
    keep, gate, cross = options["keep"], options["gate"], options["cross"]
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise ModelError(f"keep must be a share above 0 and up to 1, not {keep!r}.")
    if gate not in GATES:
        raise ModelError(f"gate must be one of {', '.join(GATES)}, not {gate!r}.")
    if type(cross) is not int or cross not in (0, 1, 2):
        raise ModelError(f"cross must be 0, 1 or 2 cross-attention blocks, not {cross!r}.")
    for name in ("initial", "final", "rotary", "direct"):
        if not isinstance(options[name], bool):
            raise ModelError(f"{name} must be true or false, not {options[name]!r}.")
    if not (options["initial"] or options["final"]):
        raise ModelError("A dream head needs its initial or its final block; leave out one of them at most.")
