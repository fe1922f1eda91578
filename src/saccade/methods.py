"""Methods are data: named compositions of drafter, tree policy and acceptance rule, with their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from saccade import compositions
from saccade.errors import MethodError
from saccade.parts import Parts

if TYPE_CHECKING:
    from saccade.engine import Engine

Needs = Literal["nothing", "draft model", "head"]


@dataclass(frozen=True)
class Method:
    """A named composition.

    Attributes:
        summary: one line for `saccade methods`.
        source: paper and section.
        lossless: whether its output is the target's own (distribution).
        needs: what the user has to give besides the target.
        compose: makes the engine from parts; its keyword arguments are the method's options.
    """

    summary: str
    source: str
    lossless: bool
    needs: Needs
    compose: Callable[..., Engine]

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """Names and defaults that the user may override."""
        parameters = inspect.signature(self.compose).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


METHODS: dict[str, Method] = {
    "plain": Method(
        "one target pass per token: the baseline, on the same engine",
        source="",
        lossless=True,
        needs="nothing",
        compose=compositions.plain,
    ),
    "chain": Method(
        "a draft model guesses gamma tokens in a row",
        source="Leviathan et al. 2023, Algorithm 1",
        lossless=True,
        needs="draft model",
        compose=compositions.chain,
    ),
    "static-tree": Method(
        "a draft model fills SpecVLM's tree of 25 nodes over 5 levels",
        source="Ji et al. 2025, SpecVLM; the tree is EAGLE's mc_sim_7b_63",
        lossless=True,
        needs="draft model",
        compose=compositions.static_tree,
    ),
    "dynamic-tree": Method(
        "a draft model grows EAGLE-2's tree: expand the likeliest, keep the likeliest of all",
        source="Li et al. 2024, EAGLE-2, Section 4",
        lossless=True,
        needs="draft model",
        compose=compositions.dynamic_tree,
    ),
    "prompt-lookup": Method(
        "copies what followed the same n-gram earlier; no draft model",
        source="Saxena 2023, prompt lookup decoding",
        lossless=True,
        needs="nothing",
        compose=compositions.prompt_lookup,
    ),
    "lookup-merge": Method(
        "one tree of what a draft model guesses and of what prompt lookup copies",
        source="Saxena 2023 beside a draft model; tree=chain, static, dynamic or sage, copied=10 tokens at most",
        lossless=True,
        needs="draft model",
        compose=compositions.lookup_merge,
    ),
    "spd": Method(
        "a draft model that reads the words alone: a language model, or a VLM with a line break for every picture",
        source="Gagrani et al. 2024, On Speculative Decoding for Multimodal LLMs",
        lossless=True,
        needs="draft model",
        compose=compositions.spd,
    ),
    "tabed": Method(
        "an ensemble of views of one draft VLM (M picture, T text, C caption, P pooled, R pruned), weighted by success",
        source="TABED, Section 4; views=MTCP is MTCP*; window=0 keeps all of the history; tree=sage, or width=2",
        lossless=True,
        needs="draft model",
        compose=compositions.tabed,
    ),
    "specvlm": Method(
        "a draft VLM that sees a pruned share of the visual tokens fills the static tree",
        source="Ji et al. 2025, SpecVLM; attention of the target's own prefill chooses",
        lossless=True,
        needs="draft model",
        compose=compositions.specvlm,
    ),
    "self-spec": Method(
        "the target drafts for itself with a pruned share of the visual tokens",
        source="Ji et al. 2025, SpecVLM, self-speculation; for many visual tokens (videos)",
        lossless=True,
        needs="nothing",
        compose=compositions.self_spec,
    ),
    "sage": Method(
        "entropy-shaped trees by a draft VLM that sees a pruned share of the visual tokens",
        source="SAGE, Sections 3.1 to 3.3 and 5.1; images=1 videos=1 turns pruning off",
        lossless=True,
        needs="draft model",
        compose=compositions.sage,
    ),
    "eagle2": Method(
        "a trained head guesses the target's next states; EAGLE-2's tree (tree=chain, static or sage: others)",
        source="Li et al. 2024, EAGLE-2; the tree as in HiViS, Section 4",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "eagle2"),
    ),
    "eagle3": Method(
        "a trained head mixes states of three layers, and guesses tokens alone; EAGLE-2's tree",
        source="Li et al. 2025, EAGLE-3, Section 3",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "eagle3"),
    ),
    "msd": Method(
        "EAGLE-2's head, but visual tokens reach it without the target's states",
        source="Lin et al. 2025, MSD, Speculative Decoding Reimagined for Multimodal LLMs; EAGLE-2's tree",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "msd"),
    ),
    "vispec": Method(
        "EAGLE-2's head, which is shown an image as a vector and told another at every later word",
        source="Kang et al. 2025, ViSpec, Section 3; its tree as HiViS, Table 5, reports it",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "vispec", top=8, depth=4, total=30),
    ),
    "hivis": Method(
        "a trained head that is shown no visual tokens, only what the target's states say of them",
        source="HiViS, Section 3 and Algorithm 1; EAGLE-2's tree, top=8 depth=4 total=30 is ViSpec's setting",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "hivis"),
    ),
    "dream": Method(
        "a trained head attends to the target's states of all tokens, and is shown a share of the visual ones",
        source="DREAM, Sections 3.1 and 3.3; EAGLE-2's tree of 4 children, 6 levels and 32 nodes",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "dream", top=4, total=32),
    ),
    "medusa": Method(
        "a trained head guesses every token of a static tree from the target's last state alone",
        source="Cai et al. 2024, Medusa, Section 2.1; the tree is SpecVLM's, tree=dynamic or chain: others",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "medusa", tree="static", depth=5),
    ),
    "hydra": Method(
        "Medusa's guesses, each of which also reads the tokens guessed before it",
        source="Ankner et al. 2024, Hydra, Section 3; the tree is SpecVLM's, tree=dynamic or chain: others",
        lossless=True,
        needs="head",
        compose=partial(compositions.headed, "hydra", tree="static", depth=5),
    ),
    "kangaroo": Method(
        "the target's own first layers and a trained adapter guess a chain, which ends where they are unsure",
        source="Liu et al. 2024, Kangaroo, Section 3; threshold=0 never stops early",
        lossless=True,
        needs="head",
        compose=compositions.kangaroo,
    ),
    "lvspec": Method(
        "LOSSY: strict where the target speaks of what it sees, loose on the least visual share of the guesses",
        source="LVSpec, Section 3; branches=2 is Appendix E, tree=sage grows SAGE's trees; greedy decoding only",
        lossless=False,
        needs="draft model",
        compose=compositions.lvspec,
    ),
    "fly": Method(
        "LOSSY: forgives a mismatch where the target is unsure and the next guesses match (window=0: where unsure)",
        source="Li et al. 2025, FLy, as in LVSpec's baselines; greedy decoding only",
        lossless=False,
        needs="draft model",
        compose=compositions.fly,
    ),
    "random-loosening": Method(
        "LOSSY: forgives a random share of the guesses; the control for LVSpec",
        source="LVSpec, Figure 7; greedy decoding only",
        lossless=False,
        needs="draft model",
        compose=compositions.random_loosening,
    ),
}
"""Every method by name."""


def get(name: str) -> Method:
    """The method of that name.

    Raises:
        MethodError: there is none; the message lists those that exist.
    """
    if name not in METHODS:
        raise MethodError(
            f"Unknown method {name!r}; expected one of {', '.join(METHODS)} (see `saccade methods`)."
        )
    return METHODS[name]


def default(has_draft_model: bool) -> str:
    """The method for a user who names none."""
    return "chain" if has_draft_model else "prompt-lookup"


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise `MethodError` for an option that the method does not have, or for a value of the wrong type."""
    method = get(name)
    unknown = set(options) - set(method.options)
    if unknown:
        known = ", ".join(method.options) or "none"
        raise MethodError(
            f"Method {name} has no option {', '.join(sorted(unknown))}; its options are: {known}."
        )
    for option, value in options.items():
        kind = type(method.options[option])
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise MethodError(f"Option {option} of method {name} must be {_WORDS[kind]}, not {value!r}.")


def build(name: str, parts: Parts, **options: Any) -> Engine:
    """The engine of a method.

    Args:
        options: override the method's defaults.

    Raises:
        MethodError: unknown method or option, a value out of range, or no draft model or head where one is needed.
    """
    method = get(name)
    check_options(name, options)
    if method.needs == "draft model" and parts.draft_model is None:
        raise MethodError(
            f"Method {name} needs a draft model; give one with drafter=... (--drafter on the command line), or use "
            "prompt-lookup, which needs none."
        )
    if method.needs == "head" and parts.head is None:
        raise MethodError(
            f"Method {name} needs a trained head; give its folder with drafter=... (--drafter or --head on the "
            "command line), or use prompt-lookup, which needs none."
        )
    try:
        return method.compose(parts, **options)
    except (TypeError, ValueError) as problem:
        raise MethodError(f"Method {name} cannot be set up like that: {problem}") from problem


def special_ids(config: Any, generation_config: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """Tokens that end or structure a text: of the configurations, and the tokenizer's if it is known."""
    ids: set[int] = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    for part in (config, config.get_text_config(decoder=True), generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(part, name, None)
            ids.update([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(sorted(ids))
