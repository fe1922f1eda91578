"""The table of methods: the options of each, and the refusal of others."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saccade import MethodError
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import SaccadeError
from saccade.methods import METHODS, is_lossless, options
from saccade.methods.compositions import Models, within_reach
from saccade.methods.registry import check
from saccade.methods.settings import GROUPS, RENAMED, RULES, TREES, about, known_options, table
from saccade.options import check_whole

GROWN = {"tree": "dynamic", "top": 10, "max_depth": 6, "total": 60, "rule": "exact", "lookup_tokens": 0}
LIKELIEST = {"tree": "oneshot", "total": 25, "floor": 0.04, "max_depth": 16, "rule": "exact", "lookup_tokens": 0}
HEADS: dict[str, dict[str, Any]] = {
    "eagle2": GROWN,
    "eagle3": GROWN,
    "peagle": {**LIKELIEST, "max_depth": 8},
    "msd": GROWN,
    "vispec": {**GROWN, "top": 8, "max_depth": 4, "total": 30},
    "hivis": GROWN,
    "dream": {**GROWN, "top": 4, "total": 32},
    "medusa": {"tree": "static", "rule": "exact", "lookup_tokens": 0},
    "hydra": {"tree": "static", "rule": "exact", "lookup_tokens": 0},
    "kangaroo": {"tree": "confident", "gamma": 6, "confidence": 0.6, "rule": "exact", "lookup_tokens": 0},
    "dspark": LIKELIEST,
    "dflash": LIKELIEST,
    "dflash2": LIKELIEST,
}
"""Every kind of head -> the tree that it drafts by default."""


def test_every_kind_of_head_has_the_tree_of_its_paper() -> None:
    defaults = {name: dict(m.options) for name, m in METHODS.items() if m.needs == "head"}
    assert defaults == {name: {"draft_with": name, **values} for name, values in HEADS.items()}
    assert list(defaults) == list(HEAD_KINDS)
    assert options("medusa", {"tree": "dynamic"})["max_depth"] == 5
    assert options("vispec", {"tree": "sage"})["total"] == 64


def test_options_are_of_their_defaults_type() -> None:
    with pytest.raises(MethodError, match=r"^Option top of method vispec must be a whole number, not 'many'\.$"):
        options("vispec", {"top": "many"})
    with pytest.raises(MethodError, match=r"^Option tree of method medusa must be text, not 3\.$"):
        options("medusa", {"tree": 3})
    with pytest.raises(MethodError, match=r"keep_images of method sage must be in the range above 0 to 1, not 2\.$"):
        options("sage", {"keep_images": 2})
    assert options("sage", {"keep_images": 1})["keep_images"] == 1


@pytest.mark.parametrize(
    ("method", "chosen", "message"),
    [
        ("chain", {"width": 3}, "has the option width with tree=width only"),
        ("chain", {"loose_share": 0.5}, "has the option loose_share with rule=lvspec or rule=random only"),
        ("chain", {"tree": "oak"}, "tree of method chain must be one of chain, branches"),
        ("chain", {"gamma": 0}, "gamma of method chain must be at least 1, not 0"),
        ("chain", {"gamma": 2.5}, "gamma of method chain must be a whole number, not 2.5"),
        ("oak", {}, "Unknown method 'oak'; expected one of plain, chain"),
        ("plain", {"gamma": 3}, "Method plain has no option gamma; its options are: none."),
        ("prompt-lookup", {"tree": "sage"}, "has no option tree"),
        ("hivis", {"keep_images": 0.5}, f"has no option keep_images; its options are: draft_with, {', '.join(GROWN)}."),
    ],
)
def test_an_option_that_nothing_would_read_is_refused(method: str, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=re.escape(message)):
        options(method, chosen)


@pytest.mark.parametrize("name", RENAMED)
def test_an_option_s_earlier_name_is_refused_with_its_name_now(name: str) -> None:
    assert RENAMED[name] in known_options()
    for method in ("chain", "suffix", "lvspec", None):
        with pytest.raises(MethodError, match=f"^The option {name} is called {RENAMED[name]} now"):
            check(method, {name: 1})


def test_true_is_no_whole_number() -> None:
    check_whole(1, 1, "count")
    for wrong in (True, 0, 1.0, "1", None):
        with pytest.raises(SaccadeError, match="count must be a whole number"):
            check_whole(wrong, 1, "count")


@pytest.mark.parametrize("name", ["num_assistant_tokens", "num_speculative_tokens"])
def test_names_of_hugging_face_and_vllm_mean_the_same(name: str) -> None:
    assert options("chain", {name: 7}) == options("chain", {"gamma": 7})
    assert options("chain", {"tree": "confident", "assistant_confidence_threshold": 0.5})["confidence"] == 0.5
    with pytest.raises(MethodError, match=f"gamma of method chain is given twice; {name} is another name"):
        options("chain", {"gamma": 7, name: 7})
    with pytest.raises(MethodError, match="has the option gamma with tree=chain or"):
        options("dynamic-tree", {name: 7})


def test_lengths_are_cut_to_what_a_head_drafts_ahead_unless_they_were_chosen() -> None:
    head: Any = SimpleNamespace(kind="medusa", reach=2)
    parts = Models(cast("Any", None), head=head)
    values = {"draft_with": "medusa", "tree": "sage", "total": 64}
    lengths = {"gamma": 5, "max_depth": 6, "d_min": 3, "d_max": 7, "ceiling": 12}
    short = dict.fromkeys(lengths, 2)
    assert within_reach(parts, {**values, **lengths}, ()) == {**values, **short}
    assert within_reach(parts, {**values, **lengths}, ("gamma", "d_max")) == {**values, **short, "gamma": 5, "d_max": 7}
    paced = {**values, "tree": "paced", "gamma": 5}
    assert within_reach(parts, paced, ("gamma",)) == {**paced, "gamma": 2}, "whose pacer chooses the length anyway"
    others = {**values, **lengths, "draft_with": "lookup"}
    assert within_reach(parts, others, ()) == others
    head.reach = None
    assert within_reach(parts, {**values, **lengths}, ()) == {**values, **lengths}


@pytest.mark.parametrize("name", METHODS)
def test_the_rule_alone_decides_whether_a_method_is_lossless(name: str) -> None:
    assert METHODS[name].lossless == (name not in ("lvspec", "fly", "random-loosening"))
    if name == "plain":
        return
    assert not is_lossless(options(name, {"rule": "fly"}))
    assert is_lossless(options(name, {"rule": "exact"}))


@pytest.mark.parametrize("method", [name for name, each in METHODS.items() if not each.lossless])
def test_every_lossy_rule_knows_the_tokens_that_it_never_loosens(method: str) -> None:
    values = METHODS[method].options
    assert RULES[values["rule"]].make(values, special_ids=(1, 2)).special_ids == (1, 2)


def test_every_option_is_listed_with_its_meaning() -> None:
    for name, method in METHODS.items():
        groups = table(method.settings)
        assert {n: d for brings, rows in groups for n, d, _ in rows if not brings} == dict(method.options)
        assert all(option.meaning for _, rows in groups for _, _, option in rows), name
    listed = {n for brings, rows in table(METHODS["chain"].settings) for n, _, _ in rows}
    assert listed == {n for group, rows in GROUPS.items() if group not in ("lookup", "suffix") for n in rows}
    assert all(not (set(TREES[tree].options) & {"tree", "rule"}) for tree in TREES)
    assert all(about(brings) for brings, _ in table(METHODS["chain"].settings) if brings)
