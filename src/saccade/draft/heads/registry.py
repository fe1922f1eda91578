"""Every kind of drafter head: its classes by dotted name, its recipe, and the method that drafts with it.

Classes are imported on first use, so that kinds are listed without torch and drafting does not import training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.errors import ModelError, TrainingError
from saccade.wording import unknown_name


@dataclass(frozen=True, slots=True)
class HeadKind:
    """Parts of one kind of head.

    Classes are ``module.Class`` within `saccade.draft.heads` (head, draft, entries) or `saccade.train.objectives`
    (objective, feeder), or ``package.module:Class`` anywhere else.
    """

    head: str  # `saccade.draft.heads.head.Head`
    objective: str  # `saccade.train.objectives.losses.Objective`, a dataclass of the loss's settings
    draft: str = "session.LevelDraft"  # `saccade.draft.heads.session.Draft`: the logits of every level
    entries: str = "session.HeadEntries"  # `saccade.draft.heads.session.HeadEntries`: what it reads of the target
    feeder: str = "entries.Feeder"  # `saccade.train.objectives.entries.Feeder`
    recipe: str = ""  # built-in recipe that the kind is trained with; the one of its own name when empty
    summary: str = ""
    source: str = ""
    settings: Mapping[str, Any] = field(default_factory=lambda: {"tree": "dynamic"})  # of that method
    captured: bool = False  # whether its drafts are one CUDA graph each (`saccade.draft.captured`)


HEAD_KINDS: dict[str, HeadKind] = {
    "eagle2": HeadKind(
        "eagle.Eagle2",
        "heads.Eagle2Objective",
        summary="a trained head drafts from the target's predicted states; EAGLE-2's tree",
        source="Li et al. 2024, EAGLE-2; the tree as in HiViS, Section 4",
        captured=True,
    ),
    "eagle3": HeadKind(
        "eagle.Eagle3",
        "heads.Eagle3Objective",
        summary="a trained head mixes states of three layers and predicts tokens alone; EAGLE-2's tree",
        source="Li et al. 2025, EAGLE-3, Section 3",
        captured=True,
    ),
    "peagle": HeadKind(
        "peagle.PEagle",
        "peagle.PEagleObjective",
        draft="peagle.PEagleDraft",
        summary="EAGLE-3's head, whose masks draft all levels in one forward; the likeliest paths of these",
        source="P-EAGLE: Parallel-Drafting EAGLE with Scalable Training; vllm-project/speculators, models/peagle",
        settings={"tree": "oneshot", "tree=oneshot": {"max_depth": 8}},
    ),
    "msd": HeadKind(
        "eagle.Msd",
        "heads.Eagle2Objective",
        recipe="eagle2",
        summary="EAGLE-2's head, with visual tokens that come without the target's states",
        source="Lin et al. 2025, MSD, Speculative Decoding Reimagined for Multimodal LLMs; EAGLE-2's tree",
        captured=True,
    ),
    "vispec": HeadKind(
        "vispec.ViSpec",
        "heads.Eagle2Objective",
        entries="vispec.ViSpecEntries",
        recipe="eagle2",
        summary="EAGLE-2's head, with each image compressed to one entry and one vector for all later text",
        source="Kang et al. 2025, ViSpec, Section 3; its tree as HiViS, Table 5, reports it",
        settings={"tree": "dynamic", "tree=dynamic": {"top": 8, "max_depth": 4, "total": 30}},
    ),
    "hivis": HeadKind(
        "eagle.HiViS",
        "heads.HiViSObjective",
        summary="a trained head without visual tokens, whose content arrives in the target's states",
        source="HiViS, Section 3 and Algorithm 1; EAGLE-2's tree; top=8 max_depth=4 total=30 is ViSpec's setting",
        captured=True,
    ),
    "dream": HeadKind(
        "dream.Dream",
        "dream.DreamObjective",
        entries="dream.MemoryEntries",
        feeder="dream.DreamFeeder",
        summary="a trained head attends to the target's states of all tokens and keeps a share of the visual ones",
        source="DREAM, Sections 3.1 and 3.3; EAGLE-2's tree of 4 children, 6 levels and 32 nodes",
        settings={"tree": "dynamic", "tree=dynamic": {"top": 4, "total": 32}},
        captured=True,
    ),
    "medusa": HeadKind(
        "medusa.Medusa",
        "heads.AheadObjective",
        draft="medusa.StackDraft",
        summary="a trained head drafts every token of a static tree from the target's last state alone",
        source="Cai et al. 2024, Medusa, Section 2.1; SpecVLM's tree; tree=oneshot grows the likeliest paths instead",
        settings={"tree": "static", "tree=dynamic": {"max_depth": 5}},
    ),
    "hydra": HeadKind(
        "medusa.Hydra",
        "heads.AheadObjective",
        draft="medusa.StackDraft",
        recipe="medusa",
        summary="Medusa's head, with each draft token conditioned on those before it",
        source="Ankner et al. 2024, Hydra, Section 3; the tree is SpecVLM's, tree=dynamic of 5 levels beside it",
        settings={"tree": "static", "tree=dynamic": {"max_depth": 5}},
    ),
    "kangaroo": HeadKind(
        "kangaroo.Kangaroo",
        "heads.KangarooObjective",
        entries="kangaroo.EarlyExitEntries",
        summary="the target's own first layers and a trained adapter draft a chain, up to a token of low confidence",
        source="Liu et al. 2024, Kangaroo, Section 3; confidence=0 never stops early",
        settings={"tree": "confident", "gamma": 6},
    ),
    "dspark": HeadKind(
        "dspark.DSpark",
        "denoising.DFlashObjective",
        draft="dflash.DFlashDraft",
        feeder="denoising.DFlashFeeder",
        recipe="dflash",
        summary="DFlash's head, with each draft token corrected by the one before it, and forecasts of acceptance",
        source="DSpark, as speculators and SpecForge release it",
        settings={"tree": "oneshot", "tree=chain": {"gamma": 7}},
    ),
    "dflash": HeadKind(
        "dflash.DFlash",
        "denoising.DFlashObjective",
        draft="dflash.DFlashDraft",
        feeder="denoising.DFlashFeeder",
        summary="a trained head denoises a block of mask tokens in one pass over the target's states",
        source="Chen et al. 2026, DFlash",
        settings={"tree": "oneshot", "tree=chain": {"gamma": 7}},
    ),
    "dflash2": HeadKind(
        "dflash2.DFlash2",
        "denoising.DFlash2Objective",
        draft="dflash.DFlashDraft",
        feeder="denoising.DFlashFeeder",
        recipe="dflash",
        summary="DFlash's head with convolutions along the block, and candidates chosen by the token before",
        source="DFlash 2, as z-lab and speculators release it",
        settings={"tree": "oneshot", "tree=chain": {"gamma": 7}},
    ),
}
"""Kind -> its parts. Adding a head is one file and one entry here."""


def head_class(kind: str) -> type[Any]:
    """The `Head` of a kind; raises as `part_of`."""
    return part_of(kind, "head")


def part_of(kind: str, part: str) -> type[Any]:
    """The class of a kind's part, a field of `HeadKind`; `ModelError` for other kinds."""
    if kind not in HEAD_KINDS:
        raise ModelError(f"There is no drafter head of the kind {unknown_name(kind, HEAD_KINDS)}.")
    name: str = getattr(HEAD_KINDS[kind], part)
    package = "saccade.draft.heads" if part in ("head", "draft", "entries") else "saccade.train.objectives"
    module, _, attribute = name.partition(":") if ":" in name else f"{package}.{name}".rpartition(".")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]


DRAFT_VLM = "draft-vlm"  # kind of a draft VLM, the one trained drafter that is not a head


def trained_kinds() -> tuple[str, ...]:
    """Kinds that can be trained; each is the name of its built-in recipe, too."""
    return (*HEAD_KINDS, DRAFT_VLM)


def check_recipe(name: str) -> None:
    """Refuse a recipe that is neither built in nor a file."""
    if name not in trained_kinds() and not Path(name).expanduser().is_file():
        raise TrainingError(f"There is no recipe {unknown_name(name, trained_kinds())}, or give a TOML file.")
