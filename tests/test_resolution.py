"""Draft models and heads of a VLM: which one a method drafts with, what is shared, what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import checkpoints
from checkpoints import picture, ready
from saccade import VLM, MethodError, ModelError, hf, load, methods, pocket, resolution
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head, save_head
from saccade.draft.model import ModelDrafter
from saccade.model_spec import ModelSpec

QUESTION = "What is this?"


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def saved(name: str, kind: str, **options: Any) -> Path:
    """The folder of a head with random weights for the tiny LLaVA."""
    torch.manual_seed(sum(map(ord, name)))
    path = Path(_folder().name) / name
    save_head(build_head(HeadConfig.from_target(checkpoints.vlm("llava").target, kind, **options)), path)
    return path


@cache
def with_head(kind: str, method: str | None = None, **options: Any) -> VLM:
    return load(ready("llava"), saved(kind, kind), method, **options)


@cache
def many() -> VLM:
    heads = [saved("hivis", "hivis"), saved("other", "hivis"), saved("blind", "eagle2", text_only=True)]
    return load(ready("llava"), ready("llava-draft"), heads=heads)


@cache
def plain() -> list[int]:
    return list(many().using("plain").generate(QUESTION, [picture()]).tokens)


def test_every_method_finds_its_drafter_and_gives_plain_decoding_s_tokens() -> None:
    assert list(many().heads) == ["hivis", "other", "blind"]
    assert (many().method, many().head_name) == ("auto", None)
    first, second = (many().heads[name].state_dict() for name in ("hivis", "other"))
    assert any(not torch.equal(first[key], second[key]) for key in first), "two heads of a kind differ"
    for method, head, used in (
        ("chain", None, None),
        ("hivis", None, "hivis"),
        ("hivis", "other", "other"),
        ("eagle2", None, "blind"),
    ):
        vlm = many().using(method, head=head)
        assert vlm.head_name == used
        drafter = vlm.engine.drafter
        if used is None:
            assert isinstance(drafter, ModelDrafter)
        else:
            assert isinstance(drafter, HeadDrafter)
            assert drafter.head is vlm.head is many().heads[used]
        output = vlm.generate(QUESTION, [picture()])
        assert output.tokens == plain()
        assert output.stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", ["eagle3", "vispec", "dream", "medusa", "kangaroo"])
def test_a_folder_picks_its_own_method(kind: str) -> None:
    vlm = with_head(kind)
    assert (vlm.method, vlm.lossless) == (kind, True)
    output = vlm.generate(QUESTION, [picture()])
    assert output.tokens == plain()
    assert output.stats.drafted_tokens > 0


def test_options_reach_the_tree() -> None:
    drafter = with_head("hivis").using("hivis", top=3, max_depth=2, total=5).engine.drafter
    assert drafter is not None
    assert (drafter.facts.max_depth, drafter.facts.max_nodes, drafter.facts.max_children) == (2, 6, 3)
    chain = with_head("hivis").using("hivis", tree="chain", gamma=7).engine.drafter
    assert chain is not None
    assert (chain.facts.max_depth, chain.facts.draws) == (7, True)


def test_a_head_needs_no_folder() -> None:
    vlm = load(ready("llava"), method="plain")
    head = load_head(saved("eagle2", "eagle2"), vlm.target)
    assert load(vlm.target.model, head).method == "eagle2"
    assert VLM(vlm.target.model, vlm.processor, drafter=head).generate(QUESTION, [picture()]).tokens == plain()


def test_a_head_s_dtype() -> None:
    def dtype(**options: Any) -> torch.dtype:
        head = load(ready("llava"), saved("hivis", "hivis"), **options).head
        assert head is not None
        return next(head.parameters()).dtype

    assert dtype(dtype="bfloat16") == torch.float32  # a small one on a CPU
    assert dtype(draft_dtype="bfloat16") == torch.bfloat16
    assert with_head("hivis", draft_dtype="bfloat16").generate(QUESTION, [picture()]).tokens == plain()


def test_a_head_drafts_in_generate() -> None:
    model = load(ready("llava"), method="plain").target.model
    head = load_head(saved("hivis", "hivis"), checkpoints.vlm("llava").target)
    ids = torch.tensor([[5, 9, 12, 40, 7]])
    expected = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    counts = []
    for drafter in (head, saved("hivis", "hivis")):
        speculation = hf.speculate(drafter, tree="chain", gamma=3)
        tokens = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, custom_generate=speculation)
        assert tokens.tolist() == expected.tolist()
        counts.append(speculation.outputs[0].stats.accepted_histogram)
    assert speculation.outputs[0].stats.drafted_tokens > 0
    assert counts[0] == counts[1]


def test_nothing_is_loaded_twice() -> None:
    vlm = load(many().target.model, saved("hivis", "hivis"), heads={"again": saved("hivis", "hivis")})
    assert vlm.heads["hivis"] is vlm.heads["again"]
    other = many().using("hivis")
    assert other.target is many().target
    assert other.draft_model is many().draft_model
    assert other.heads is many().heads


@pytest.mark.parametrize(
    ("given", "method", "head"),
    [
        ({"heads": saved}, "hivis", "hivis"),
        ({"heads": lambda *_: {"mine": saved("other", "hivis")}}, "hivis", "mine"),
        ({"drafter": True, "heads": lambda *_: {"b": saved("blind", "eagle2", text_only=True)}}, "hivis", "hivis"),
        ({"drafter": True, "heads": lambda *_: {"b": saved("other", "hivis")}, "head": "b"}, "hivis", "b"),
    ],
)  # fmt: skip
def test_without_a_method_the_head_decides(given: dict[str, Any], method: str, head: str) -> None:
    folder = saved("hivis", "hivis")
    options = {**given, "heads": given["heads"]("hivis", "hivis")}
    drafter = folder if options.pop("drafter", False) else None
    vlm = load(many().target.model, drafter, **options)
    assert (vlm.method, vlm.head_name) == (method, head)


KINDS = {"a": "hivis", "b": "hivis", "text-only": "eagle2", "eagle2": "eagle2", "dream": "dream"}


@pytest.mark.parametrize(
    ("method", "name", "kinds", "message"),
    [
        ("hivis", None, KINDS, r"Method hivis can use several heads \(a, b\); choose one with head=NAME"),
        ("hivis", "eagle2", KINDS, "The head eagle2 is of the kind eagle2, which method hivis cannot use"),
        ("hivis", "c", KINDS, r"No head is named 'c' \(given: a \(hivis\), b \(hivis\), text-only \(eagle2\),"),
        ("hivis", "c", {}, r"No head is named 'c' \(given: none\)"),
        ("hivis", None, {"dream": "dream"}, "a trained hivis head, but only the head dream is given"),
        ("hivis", None, {}, "Method hivis needs a trained hivis head; give its folder.* method suffix"),
        ("chain", "a", KINDS, "Method chain takes no head; leave out head=a"),
    ],
)
def test_what_is_not_clear_is_refused(method: str, name: str | None, kinds: dict[str, str], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        methods.fit(method, methods.options(method, {}), method == "chain", kinds, name)


def test_what_is_wrong_with_heads_is_found_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hivis = saved("hivis", "hivis")
    monkeypatch.setattr("saccade.resolution.load_model", lambda *_, **__: pytest.fail("weights were read"))
    for options, error, message in (
        ({"heads": [hivis, hivis]}, MethodError, "Two heads are named 'hivis'; give one of them another name"),
        ({"drafter": hivis, "heads": [hivis]}, MethodError, "Two heads are named 'hivis'"),
        ({"heads": [ready("llama")]}, ModelError, "is not that of a drafter head"),
        ({"heads": ["nowhere"]}, ModelError, "There is no folder nowhere"),
        ({"heads": [hivis], "head": "x"}, MethodError, "No head is named 'x'"),
        ({"drafter": hivis, "method": "plain"}, MethodError, "Method plain takes no drafter"),
        ({"drafter": hivis, "tree": "bush"}, MethodError, "tree of method hivis must be one of"),
        ({"drafter": hivis, "draft_dtype": "int8"}, ModelError, "dtype 'int8'"),
    ):
        with pytest.raises(error, match=message):
            load(ready("llava"), **options)


def test_a_head_of_another_target_is_refused() -> None:
    with pytest.raises(ModelError, match="made for another target: its model class"):
        load(ready("qwen"), saved("hivis", "hivis"))


# -- the built-in models, by name --------------------------------------------------------------------------


def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """A built-in pair with these heads."""
    monkeypatch.setattr(pocket, "_WEIGHTS", tmp_path)
    for name in (*kinds, "target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")


Given = tuple[str | None, str | None, dict[str, str]]


def meant(given: Given) -> tuple[str, str | None, dict[str, str]]:
    """What the built-in target comes with, beside drafter, method and heads of the user: folders by their own names."""
    own = {"blind": saved("blind", "eagle2", text_only=True), "hivis": saved("hivis", "hivis")}
    drafter, method, heads = given
    drafter = str(own[drafter]) if drafter in own else drafter
    named = resolution.named(drafter, {name: own[head] for name, head in heads.items()})
    found = resolution.with_builtin(ModelSpec("pocket", drafter, method, named))
    drafter = found.drafter and Path(found.drafter).name
    return Path(found.target).name, drafter, {n: Path(str(f)).name for n, f in found.heads.items()}


@pytest.mark.parametrize(
    ("given", "drafter", "heads"),
    [
        ((None, None, {}), "draft", {"dream": "dream", "eagle2": "eagle2"}),
        (("pocket", None, {}), "draft", {"dream": "dream", "eagle2": "eagle2"}),
        ((None, "chain", {}), "draft", {}),
        ((None, "plain", {}), None, {}),
        ((None, "dream", {}), None, {"dream": "dream"}),
        ((None, None, {"x": "blind"}), "draft", {"x": "blind", "dream": "dream"}),
        ((None, None, {"dream": "blind"}), "draft", {"dream": "blind"}),
        ((None, None, {"hivis": "hivis"}), "draft", {"hivis": "hivis", "dream": "dream", "eagle2": "eagle2"}),
        (("blind", None, {}), "blind", {"eagle2": "blind", "dream": "dream"}),
        (("blind", "eagle2", {}), "blind", {"eagle2": "blind"}),
    ],
)
def test_the_built_in_target_brings_its_drafters(
    given: Given, drafter: str | None, heads: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for heads of names and kinds that the user gives: else those would be there and not be the ones measured."""
    shipped(tmp_path, monkeypatch, "dream", "eagle2")
    assert meant(given) == ("target", drafter, heads)


def test_a_shipped_head_never_stands_in_for_one_that_the_user_gives() -> None:
    """Not for a folder that is not there, and not for a head of another kind."""
    blind = saved("blind", "eagle2", text_only=True)
    needs = "needs a trained hivis head, but only"
    for arguments, error, words in (
        ({"heads": {"hivis": "/does/not/exist"}}, ModelError, "There is no folder /does/not/exist"),
        ({"heads": {"hivis": blind}, "head": "hivis", "method": "hivis"}, MethodError, "is of the kind eagle2"),
        ({"heads": [blind], "method": "hivis"}, MethodError, rf"{needs} the head blind \(eagle2\) is given"),
        ({"drafter": blind, "method": "hivis"}, MethodError, f"{needs} the head eagle2 is given"),
        ({"drafter": "pocket", "method": "hivis"}, MethodError, f"{needs} a draft model is given"),
    ):
        with pytest.raises(error, match=words):
            load("pocket", **arguments)


def test_a_head_that_is_not_shipped_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped(tmp_path, monkeypatch, "dream")
    with pytest.raises(ModelError, match=r"No trained hivis head comes .* \(shipped: dream\); train one"):
        load("pocket", method="hivis")
    assert pocket.head_path("dream") == tmp_path / "dream"


def test_the_built_in_draft_model_serves_other_targets_and_a_folder_of_its_name_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drafter = str(pocket.draft_path())
    assert resolution.with_builtin(ModelSpec("some/model", "pocket")) == ModelSpec("some/model", drafter)
    (tmp_path / "pocket").mkdir()
    assert resolution.with_builtin(ModelSpec("pocket", "pocket")) == ModelSpec("pocket", "pocket")


def test_the_built_in_models_load_by_name_and_have_every_shipped_head() -> None:
    vlm = load("pocket", dtype="float32")  # or tokens could tie within rounding
    assert vlm.method == "auto"
    assert list(vlm.heads) == list(pocket.head_paths())
    expected = vlm.using("plain").generate("What does it show?", max_new_tokens=8).tokens
    for method in ("chain", *vlm.heads):
        assert vlm.using(method).generate("What does it show?", max_new_tokens=8).tokens == expected
