"""Methods are data: named settings of the one composition of drafter, tree, rule and pruning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from saccade.draft.heads.registry import HEAD_KINDS, HeadKind
from saccade.errors import MethodError, SaccadeError
from saccade.methods.settings import (
    ALIASES,
    LOSSLESS_RULE,
    RENAMED,
    RULES,
    Needs,
    fit,
    known_options,
    needs,
    renamed,
    resolved,
)
from saccade.wording import meant, unknown_name

if TYPE_CHECKING:
    from saccade.engine import Engine
    from saccade.methods.compositions import Models


@dataclass(frozen=True)
class Method:
    """A named composition."""

    summary: str  # one line
    source: str  # paper and section
    # options other than the defaults (see `saccade.methods.settings.resolved`)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Names and defaults of the options, for the method's own tree, rule and drafter."""
        return resolved("", self.settings, {})

    @property
    def lossless(self) -> bool:
        """Whether its output is the target's own (distribution) under its own rule."""
        return is_lossless(self.options)

    @property
    def needs(self) -> Needs:
        """The drafter that it needs besides the target, unless another is chosen."""
        return needs(self.options)


def is_lossless(values: Mapping[str, Any]) -> bool:
    """Whether resolved options preserve the target's output (distribution)."""
    return RULES[values.get("rule", LOSSLESS_RULE)].lossless


def of_head(kind: str, head: HeadKind) -> Method:
    """The method that drafts with a head of a kind."""
    return Method(head.summary, head.source, {"draft_with": kind, **head.settings})


_PRUNED = {"keep_images": 0.2, "keep_videos": 0.1}

METHODS: dict[str, Method] = {
    "plain": Method(
        "one target pass per token: the baseline, on the same engine",
        source="",
        settings={"draft_with": "none"},
    ),
    "chain": Method("a draft model drafts gamma tokens in a row", source="Leviathan et al. 2023, Algorithm 1"),
    "auto": Method(
        "a chain of as many draft tokens as pay, by measured costs and acceptance; none where none do; model or head",
        source="Leviathan et al. 2023, Section 3.3, with measured costs",
        settings={"tree": "paced"},
    ),
    "pard": Method(
        "a draft model trained with a mask token drafts all gamma tokens in one pass",
        source="An et al. 2025, PARD, Section 3; tree=oneshot grows the likeliest paths instead",
        settings={"draft_with": "pard", "tree=chain": {"gamma": 12}},
    ),
    "static-tree": Method(
        "a draft model fills SpecVLM's tree of 25 nodes over 5 levels",
        source="Ji et al. 2025, SpecVLM; the tree is EAGLE's mc_sim_7b_63",
        settings={"tree": "static"},
    ),
    "dynamic-tree": Method(
        "a draft model grows EAGLE-2's tree: expand the likeliest, keep the likeliest of all",
        source="Li et al. 2024, EAGLE-2, Section 4",
        settings={"tree": "dynamic"},
    ),
    "prompt-lookup": Method(
        "copies what followed the same n-gram earlier; no draft model",
        source="Saxena 2023, prompt lookup decoding",
        settings={"draft_with": "lookup"},
    ),
    "suffix": Method(
        "copies what followed the longest matches in the text and in earlier answers; no draft model",
        source="Oliaro et al. 2024, SuffixDecoding, with acceptance rates as measured",
        settings={"draft_with": "suffix"},
    ),
    "grammar": Method(
        "drafts what a request's grammar forces or its prediction says, as every method but plain does besides",
        source="Zheng et al. 2024, SGLang, Section 4 (jump-forward), as draft trees that the target verifies",
        settings={"draft_with": "grammar"},
    ),
    "lookup-merge": Method(
        "one tree of a draft model's tokens and of tokens copied by prompt lookup",
        source="Saxena 2023 beside a draft model",
        settings={"lookup_tokens": 10},
    ),
    "spd": Method(
        "a draft model of the text alone: a language model, or a VLM with a line break per image",
        source="Gagrani et al. 2024, On Speculative Decoding for Multimodal LLMs",
        settings={"views": "T"},
    ),
    "tabed": Method(
        "an ensemble of views of one draft VLM (M image, T text, C caption, P pooled, R pruned), weighted by success",
        source="TABED, Section 4; views=MTCP is MTCP*; tree=width is Section 6.1's token tree",
        settings=_PRUNED | {"views": "MT"},
    ),
    "specvlm": Method(
        "a draft VLM with a pruned share of the visual tokens fills the static tree",
        source="Ji et al. 2025, SpecVLM; attention of the target's own prefill chooses",
        settings=_PRUNED | {"tree": "static"},
    ),
    "self-spec": Method(
        "the target drafts for itself with a pruned share of the visual tokens",
        source="Ji et al. 2025, SpecVLM, self-speculation; for many visual tokens (videos)",
        settings=_PRUNED | {"draft_with": "self", "tree": "static"},
    ),
    "sage": Method(
        "entropy-shaped trees by a draft VLM with a pruned share of the visual tokens",
        source="SAGE, Sections 3.1 to 3.3 and 5.1; keep_images=1 keep_videos=1 turns pruning off",
        settings=_PRUNED | {"tree": "sage"},
    ),
    **{kind: of_head(kind, head) for kind, head in HEAD_KINDS.items()},
    "mtp": Method(
        "the target's own layer of multi-token prediction drafts, as its checkpoint brings it",
        source="DeepSeek-V3, Section 2.2; tree=dynamic and tree=static are EAGLE-2's and SpecVLM's",
        settings={"draft_with": "mtp", "tree=chain": {"gamma": 2}},
    ),
    "lvspec": Method(
        "LOSSY: strict on visually grounded tokens, loose on the least visual share of the draft tokens",
        source="LVSpec, Section 3; tree=branches is Appendix E; greedy decoding only",
        settings={"rule": "lvspec", "gamma": 10},
    ),
    "fly": Method(
        "LOSSY: forgives a mismatch at high target entropy if the next tokens match (deferred=0: by entropy alone)",
        source="Li et al. 2025, FLy, as in LVSpec's baselines; greedy decoding only",
        settings={"rule": "fly", "gamma": 10},
    ),
    "random-loosening": Method(
        "LOSSY: forgives a random share of the draft tokens; the control for LVSpec",
        source="LVSpec, Figure 7; greedy decoding only",
        settings={"rule": "random", "gamma": 10},
    ),
}


def get(name: str) -> Method:
    """Return the method of a name."""
    if name not in METHODS:
        raise MethodError(f"Unknown method {unknown_name(name, METHODS)} (see `saccade methods`).")
    return METHODS[name]


def options(name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of a method with its value: the given ones, else its defaults."""
    return resolved(name, get(name).settings, chosen)


def check(name: str | None, chosen: Mapping[str, Any]) -> None:
    """Refuse a method that does not exist, and options that it has not, or without a name that no method has."""
    chosen = {option: value for option, value in chosen.items() if option != "head"}  # which is no option
    if name is not None:
        options(name, chosen)
    elif wrong := next((option for option in chosen if option not in known_options()), None):
        if wrong in RENAMED:
            raise MethodError(renamed(wrong))
        hint = meant(wrong, known_options())
        raise MethodError(f"No method has an option {wrong}{hint}; `saccade methods NAME` lists a method's options.")


def build(name: str, parts: Models, **chosen: Any) -> Engine:
    """Return the engine of a method."""
    from saccade.methods.compositions import compose, within_reach

    values = within_reach(parts, options(name, chosen), (ALIASES.get(option, option) for option in chosen))
    kinds = {} if parts.head is None else {parts.head.kind: parts.head.kind}
    fit(name, values, parts.draft_model is not None, kinds, has_processor=parts.draft_processor is not None)
    try:
        return compose(parts, values)
    except SaccadeError as problem:
        raise MethodError(str(problem)) from problem
    except (TypeError, ValueError) as problem:
        raise MethodError(f"The options of method {name} do not go together: {problem}") from problem


def special_ids(config: Any, generation_config: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids of control tokens: those of the configurations, and the tokenizer's, if any."""
    ids: set[int] = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    for part in (config, config.get_text_config(decoder=True), generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(part, name, None)
            ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(sorted(ids))
