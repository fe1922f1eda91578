"""Drafters of a VLM by name: draft model, trained heads, and the built-in pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from saccade import methods
from saccade.draft.heads.head import Head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.store import kind_at, kind_in, load_head
from saccade.errors import MethodError
from saccade.loading import check_checkpoint, check_dtype, drafts_by_mtp, drafts_in_parallel, path_of
from saccade.methods.settings import GROUPS
from saccade.target_model.adapter import Target

POCKET = "pocket"


def is_pocket(name: Any) -> bool:
    """Whether a name is the built-in one and not an existing folder."""
    return isinstance(name, str) and name == POCKET and not Path(name).is_dir()


def only(drafter: Any, assistant_model: Any) -> Any:
    """Return the drafter, which Hugging Face calls ``assistant_model``."""
    if drafter is not None and assistant_model is not None:
        raise MethodError("drafter and assistant_model are two names for the same; give one of them.")
    return assistant_model if drafter is None else drafter


def with_builtin(
    target: Any, drafter: Any, method: str | None, options: Mapping[str, Any], heads: Mapping[str, AnyHead]
) -> tuple[Any, Any, dict[str, AnyHead]]:
    """Return target, drafter and heads with folders in place of `pocket`, and with the built-in target's drafters.

    Without a method these are the draft model and every shipped head, except heads whose name or kind is given; with
    a method, the drafter that it needs, if neither drafter nor head is given.
    """
    from saccade.pocket import draft_path, head_path, head_paths, target_path

    named_heads = dict(heads)
    if is_pocket(target):
        target = str(target_path())
        values = None if method is None else methods.options(method, options)
        needs = None if values is None else methods.needs(values)
        if values is None:
            taken = {*heads, *kinds_of(heads).values()}
            named_heads |= {kind: folder for kind, folder in head_paths().items() if kind not in taken}
        elif needs == "head" and drafter is None and not heads:
            named_heads[values["draft_with"]] = head_path(values["draft_with"])
        if drafter is None and needs in (None, "draft model"):
            drafter = POCKET
    return target, str(draft_path()) if is_pocket(drafter) else drafter, named_heads


def adapter_folder(place: str | Path) -> str | Path:
    """Return the folder or hub id of an adapter, which may be the built-in one."""
    from saccade.pocket import adapter_path

    return adapter_path() if is_pocket(place) else place


AnyHead = str | Path | Head
"""A loaded head, or its folder or hub id."""
Heads = AnyHead | Sequence[AnyHead] | Mapping[str, AnyHead]


def is_head(drafter: Any) -> bool:
    """Whether a drafter is a head, or the folder of one."""
    return isinstance(drafter, Head) or kind_in(drafter) is not None


def named(drafter: Any, heads: Heads, weights: bool = True) -> dict[str, AnyHead]:
    """Return all heads by name: a drafter by its kind, a folder by its own name unless another is given.

    ``weights``: whether a draft model's have to be there.
    """
    named_heads: dict[str, AnyHead] = {}
    if is_head(drafter):
        named_heads[kind_of(drafter)] = drafter
    elif isinstance(drafter, (str, Path)) and not is_pocket(drafter):
        check_checkpoint(path_of(drafter), weights=weights)  # or a mistyped head would pass for a draft model
    pairs: list[tuple[str, AnyHead]] = []
    if isinstance(heads, Mapping):
        pairs = list(heads.items())
    else:
        several = [heads] if isinstance(heads, (str, Path, Head)) else heads
        pairs = [
            (head.kind if isinstance(head, Head) else Path(path_of(head)).resolve().name, head) for head in several
        ]
    for name, head in pairs:
        if name in named_heads:
            raise MethodError(
                f"Two heads are named {name!r}; give one of them another name with heads={{NAME: FOLDER}} "
                "(--head NAME=FOLDER on the command line)."
            )
        named_heads[name] = head
    return named_heads


def kind_of(head: AnyHead) -> str:
    """Return the kind of a head, or of the one in a folder."""
    return head.kind if isinstance(head, Head) else kind_at(path_of(head))


def kinds_of(heads: Mapping[str, AnyHead]) -> dict[str, str]:
    """Return name -> kind."""
    return {name: kind_of(head) for name, head in heads.items()}


def read_heads(heads: Mapping[str, AnyHead], target: Target, dtype: str | torch.dtype | None) -> dict[str, Head]:
    """Load heads by name; every folder is read once."""
    checked = check_dtype(dtype or "auto")
    kind = checked if isinstance(checked, torch.dtype) else None

    @cache
    def read(folder: str) -> Head:
        return load_head(folder, target, kind)

    loaded: dict[str, Head] = {}
    for name, head in heads.items():
        if isinstance(head, Head):
            loaded[name] = head
        else:
            path = path_of(head)
            loaded[name] = read(str(Path(path).resolve()) if Path(path).exists() else path)
    return loaded


def config_of(drafter: Any) -> Any:
    """Return the configuration of a loaded model, or of the one in a folder."""
    return check_checkpoint(path_of(drafter), weights=False) if isinstance(drafter, (str, Path)) else drafter.config


def completed(
    method: str | None, options: Mapping[str, Any], drafter: Any, kinds: Mapping[str, str], head: str | None = None
) -> dict[str, Any]:
    """Return a method's options, with the given head as the drafter of a method that paces any (`auto`)."""
    if method is None or "draft_with" in options or methods.get(method).settings.get("tree") != "paced":
        return dict(options)
    kind = kinds.get(head, head) if head is not None else kind_of(drafter) if is_head(drafter) else None
    if kind is None and drafter is None:
        kind = next(iter(kinds.values()), None)
    return {**options, "draft_with": kind} if kind in HEAD_KINDS else dict(options)


def default(
    drafter: Any, kinds: Mapping[str, str], head: str | None = None, options: Iterable[str] = (), config: Any = None
) -> str:
    """Return the default method: the kind of the head, if one is given and no draft model, and `pard` for its drafter.

    ``config``: of the target, whose own layer of multi-token prediction drafts where nothing else is given, except with
    options of prompt lookup alone.
    """
    if head is not None and head in kinds:
        return kinds[head]
    if is_head(drafter):
        return kind_of(drafter)
    if drafter is None and kinds:
        return next(iter(kinds.values()))
    chosen = set(options)
    copies = chosen & {"max_ngram", "max_matching_ngram_size"} and "lookup_tokens" not in chosen
    if drafter is None and config is not None and not copies and drafts_by_mtp(config, config.name_or_path):
        return "mtp"
    changes = {"draft_with", "views", *GROUPS["pruning"]}  # of what the draft model is and reads
    if drafter is not None and not chosen & changes and drafts_in_parallel(config_of(drafter)):
        return "pard"
    return methods.default(drafter is not None, chosen)
