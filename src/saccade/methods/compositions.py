"""The one composition after every method: any drafter with any tree, rule and pruning; rare ones imported late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from saccade.draft.drafter import Drafter, NullDrafter
from saccade.draft.heads.head import Head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import SPECVLM_TREE, StaticTree, TreePolicy
from saccade.engine import Engine
from saccade.engine.costs import Pacer
from saccade.files import expanded
from saccade.inputs.families import family_of
from saccade.inputs.processor import InputProcessor
from saccade.loading import is_assistant
from saccade.methods.settings import LOSSLESS_RULE, RULES, TREES
from saccade.options import SuffixOptions, options_of
from saccade.target_model.adapter import Target
from saccade.verify.rule import Rule

if TYPE_CHECKING:
    from saccade.draft.earlier_answers import AnswerStore
    from saccade.draft.ensemble.views import Captioner
    from saccade.draft.lookup import PromptLookup
    from saccade.draft.pruning import Pruning

Values = Mapping[str, Any]  # options as `saccade.methods.settings.resolved` returns them


@dataclass(frozen=True, slots=True)
class Models:
    """Parts that a method is composed of, besides its options."""

    target: Target
    draft_model: Target | None = None  # a smaller one
    vocab_size: int | None = None  # tokens that both share; the smaller vocabulary when None
    special_ids: tuple[int, ...] = ()  # tokens that lossy rules never accept loosely
    draft_processor: InputProcessor | None = None  # makes the draft model's prompts, for methods that rewrite them
    head: Head | None = None  # a trained drafter head
    own: dict[str, Head] = field(default_factory=dict)  # those of the target's checkpoint by kind, once read
    stores: dict[tuple[Any, ...], AnswerStore] = field(default_factory=dict)  # those with a file, by it and its limits


def compose(parts: Models, values: Values) -> Engine:
    """Return the engine of resolved options and fitting parts; raises `ValueError` for options that do not combine."""
    if not values:
        return Engine(parts.target)
    return Engine(parts.target, _drafter(parts, values), _rule(values, parts.special_ids), _pacer(parts, values))


def _pacer(parts: Models, values: Values) -> Pacer | None:
    if values.get("tree") != "paced":
        return None
    others = {"draft_with": ("model", *HEAD_KINDS), "rule": (LOSSLESS_RULE,), "lookup_tokens": (0,), "views": ("",)}
    wrong = next((name for name, allowed in others.items() if values.get(name, allowed[0]) not in allowed), None)
    if wrong is not None:
        raise ValueError(
            f"tree=paced may skip drafting at any step, which needs {wrong}={others[wrong][0]}; choose tree=chain"
        )
    one_pass = parts.head is not None and parts.head.drafts_in_one_pass
    return Pacer(values["gamma"], _relative_cost(parts), one_pass=one_pass)


def within_reach(parts: Models, values: Values, chosen: Iterable[str]) -> Values:
    """Return options whose lengths are at most what the head drafts ahead, but for those in ``chosen``."""
    if parts.head is None or parts.head.reach is None or values.get("draft_with") != parts.head.kind:
        return values
    reach, fixed = parts.head.reach, set() if values["tree"] == "paced" else set(chosen)
    lengths = {"gamma", "max_depth", "d_min", "d_max", "ceiling"} - fixed
    return {name: min(value, reach) if name in lengths else value for name, value in values.items()}


def _relative_cost(parts: Models) -> float:
    """Time of a drafter's forward over the target's, guessed from their parameters and layers, whichever is more."""

    def size(modules: Iterable[Any]) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    decoder, depth = size([parts.target.decoder]), len(parts.target.layers)
    if parts.head is not None:
        levels = parts.head.reach or 1
        return max(size([parts.head]) / levels / decoder, parts.head.blocks / depth)
    assert parts.draft_model is not None
    return max(size([parts.draft_model.decoder]) / decoder, len(parts.draft_model.layers) / depth)


def _drafter(parts: Models, values: Values) -> Drafter:
    drafts, vocab_size = values["draft_with"], parts.vocab_size or parts.target.vocab_size
    if drafts == "grammar":
        return NullDrafter()
    if drafts == "lookup":
        return _lookup(values["gamma"], values, parts, parts.target)
    if drafts == "suffix":
        from saccade.draft.earlier_answers import AnswerStore
        from saccade.draft.suffix import SuffixDrafter

        path = expanded(values["store"]) if values["store"] else None
        limits = values["store_mib"] * 2**20, values["max_ngram"]
        store = parts.stores.get((path, *limits)) or AnswerStore(*limits, path, parts.target.vocab_size)
        if path is not None:  # of two stores of a file one would lose what the other has added
            parts.stores[path, *limits] = store
        options = SuffixOptions(**{name: values[name] for name in options_of(SuffixOptions)})
        return SuffixDrafter(options, store, parts.target.device, parts.target.vocab_size)
    policy = tree_policy(values, None if parts.head is None else parts.head.reach)
    if drafts == "model":
        drafter = _by_model(parts, policy, vocab_size, values)
    elif drafts == "pard":
        from saccade.draft.pard import PardDrafter

        assert parts.draft_model is not None
        drafter = PardDrafter(parts.draft_model, policy, vocab_size)
    elif drafts == "self":
        drafter = _by_visual_model(parts.target, policy, vocab_size, values)
    elif drafts == "mtp":
        from saccade.draft.heads.mtp import load_mtp

        if "mtp" not in parts.own:
            parts.own["mtp"] = load_mtp(parts.target)
        drafter = HeadDrafter(parts.own["mtp"], parts.target, policy)
    else:
        assert parts.head is not None
        drafter = HeadDrafter(parts.head, parts.target, policy)
    if not values["lookup_tokens"]:
        return drafter
    from saccade.draft.merged import MergedDrafter

    if values.get("alpha_of") == "accepted":
        raise ValueError("alpha_of=accepted needs the drafter's own tree, so it does not go with copied tokens.")
    copies = _lookup(values["lookup_tokens"], values, parts, drafter.facts.model or parts.target)
    return MergedDrafter(drafter, copies, values["merged_total"])


def _lookup(count: int, values: Values, parts: Models, drafts: Target) -> PromptLookup:
    """Prompt lookup of ``count`` tokens on the device of the model that drafts."""
    from saccade.draft.lookup import PromptLookup

    return PromptLookup(count, values["max_ngram"], drafts.device, parts.target.vocab_size)


def _by_model(parts: Models, policy: TreePolicy, vocab_size: int, values: Values) -> Drafter:
    model, processor = parts.draft_model, parts.draft_processor
    assert model is not None
    if is_assistant(model.config):
        if values["views"] or pruning_of(values).prunes:
            raise ValueError(
                "an assistant has no prompt of its own, so that nothing can be left out of one; choose auto"
            )
        from saccade.draft.assistant import AssistantDrafter

        return AssistantDrafter(model, parts.target, policy)
    if not values["views"]:
        return _by_visual_model(model, policy, vocab_size, values)
    from saccade.draft.ensemble.ensemble import EnsembleDrafter
    from saccade.draft.ensemble.views import make_views
    from saccade.draft.ensemble.weights import make_weighting

    assert processor is not None
    reader = (
        model if family_of(model.config).visual_ids else parts.target
    )  # a blind drafter is given the target's prompt
    if "C" in values["views"] and reader is not model:
        raise ValueError(
            "the draft model is a language model, whose prompts have no pictures to put captions in place of; leave "
            "view C out, or use a draft VLM"
        )
    views = make_views(
        values["views"],
        model,
        processor,
        captioner_of(values["captioner"], model, processor),
        pruning_of(values) if "R" in values["views"] else None,
        reader.config,
    )
    history = values["history"] or None
    weighting = make_weighting(values["weights"], len(views), distance=values["distance"], window=history)
    return EnsembleDrafter(model, policy, views, weighting, vocab_size, values["keep_history"])


def _by_visual_model(model: Target, policy: TreePolicy, vocab_size: int, values: Values) -> Drafter:
    """Drafter of a model with all or part of the visual tokens; the target itself for self-speculation."""
    pruning = pruning_of(values)
    if not pruning.prunes:
        return ModelDrafter(model, policy, vocab_size)
    from saccade.draft.ensemble.ensemble import EnsembleDrafter, Pruned

    return EnsembleDrafter(model, policy, [Pruned(pruning)], vocab_size=vocab_size)


def tree_policy(values: Values, reach: int | None = None) -> TreePolicy:
    """The tree policy that resolved options choose; ``reach``: most levels of the static tree."""
    if values["tree"] == "static":
        return StaticTree([path for path in SPECVLM_TREE if reach is None or len(path) <= reach])
    policy: TreePolicy = TREES[values["tree"]].make(values)
    return policy


def _rule(values: Values, special_ids: tuple[int, ...]) -> Rule | None:
    """Lossy rule of the options; None for the lossless ones, selected by decoding."""
    if values["rule"] == LOSSLESS_RULE:
        return None
    rule: Rule = RULES[values["rule"]].make(values, special_ids=special_ids)
    return rule


def pruning_of(values: Values) -> Pruning:
    """Pruning of the drafter's visual tokens."""
    from saccade.draft.pruning import Pruning

    return Pruning(values["keep_images"], values["keep_videos"], values["keep_by"], values["attention_mass"])


def captioner_of(chosen: Any, model: Target, processor: InputProcessor) -> Captioner | None:
    """Captioner of the option `captioner`; None for the draft model itself."""
    from saccade.draft.ensemble.views import from_checkpoint, from_texts, of_pictures

    if not chosen:
        return None
    if isinstance(chosen, Mapping):
        return from_texts(chosen)
    return of_pictures(processor, from_checkpoint(chosen, model.device) if isinstance(chosen, str) else chosen)
