"""Heads on disk are loaded whole, for the target that they were made for, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from families import FAMILIES
from heads_kit import DRAFTING, EVERY, POLICIES, random_head, target
from released_kit import drop, edit, same, weighs
from saccade.draft.heads.registry import head_class
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import kind_at, kind_in, load_head, read_config, save_head
from saccade.errors import ModelError
from saccade.resolution import named, read_heads
from saccade.target_model.adapter import Target

pytestmark = pytest.mark.formats


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(random_head("llava", "hivis"), tmp_path / "head")
    return tmp_path / "head"


@pytest.mark.parametrize("kind", EVERY)
def test_a_head_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    options = {"after_image": "visual"} if "after_image" in head_class(kind).defaults else {}
    head = random_head("qwen3_vl", kind, **options)
    save_head(head, tmp_path)
    again = load_head(tmp_path, target("qwen3_vl"))
    same(head, again)
    assert again.config == read_config(tmp_path)
    assert kind_in(tmp_path) == kind_in(str(tmp_path)) == kind
    assert not again.training
    low = load_head(tmp_path, target("qwen3_vl"), torch.bfloat16)
    assert {weight.dtype for weight in low.parameters()} == {torch.bfloat16}


def test_a_small_head_of_a_coarser_target_keeps_its_precision_on_a_cpu(tmp_path: Path) -> None:
    head = random_head("llama", "eagle2")
    save_head(head, tmp_path)
    same(head, load_head(tmp_path, Target(FAMILIES["llama"].model().to(torch.bfloat16))))


def test_only_a_head_s_folder_is_one(tmp_path: Path) -> None:
    assert kind_in(None) is None
    assert kind_in(object()) is None
    assert kind_in(tmp_path) is None
    assert kind_in("some-model") is None
    for text in ("{}", "[]", "nonsense", '{"model_type": "llava"}'):
        (tmp_path / "config.json").write_text(text)
        assert kind_in(tmp_path) is None


def test_a_head_that_is_neither_here_nor_on_the_hub_is_refused() -> None:
    for read in (kind_in, kind_at, read_config):
        with pytest.raises(ModelError, match="no folder someone/some-head here, and the hub could not give it"):
            read("someone/some-head")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub's client has kept of someone's repositories: the files of a head, and a model that is none."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("head", "model"):
        repository = tmp_path / "hub" / f"models--someone--a-{name}"
        (repository / "snapshots" / "0123").mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123")
    save_head(random_head("llava", "hivis"), tmp_path / "hub" / "models--someone--a-head" / "snapshots" / "0123")
    (repository / "snapshots" / "0123" / "config.json").write_text('{"model_type": "llava"}')
    return tmp_path / "hub"


@pytest.mark.usefixtures("hub")
def test_a_head_comes_from_the_hub_as_from_a_folder(folder: Path) -> None:
    assert kind_in("someone/a-head") == kind_at("someone/a-head") == "hivis"
    assert kind_in("someone/a-model") is None
    same(load_head(folder, target("llava")), load_head("someone/a-head", target("llava")))
    heads = read_heads({"ours": "someone/a-head", "again": "someone/a-head"}, target("llava"), None)
    assert heads["ours"] is heads["again"]
    assert list(named(None, "someone/a-head")) == ["a-head"]


def test_a_path_that_does_not_exist_is_not_called_a_folder_without_a_head(tmp_path: Path) -> None:
    for read in (kind_at, lambda folder: load_head(folder, target("llava"))):
        with pytest.raises(ModelError, match=f"There is no folder {tmp_path}/mistyped; give that of a trained head"):
            read(tmp_path / "mistyped")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json, so it holds no drafter head"),
    "another config": (
        lambda d: (d / "config.json").write_text('{"model_type": "x"}'),
        "has no 'saccade_head'",
    ),
    "garbage config": (lambda d: (d / "config.json").write_text("{"), r"config\.json is damaged \(Expecting"),
    "unknown kind": (lambda d: edit(d, saccade_head="eagle9"), "no drafter head of the kind 'eagle9'"),
    "missing field": (lambda d: drop(d, "norm_eps"), "lacks 'norm_eps'"),
    "unknown field": (lambda d: edit(d, colour=1), "has the unknown field 'colour'"),
    "unknown option": (lambda d: edit(d, options={"x": 1}), "takes the options"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
    "damaged weights": (
        lambda d: (d / "model.safetensors").write_bytes(b"x" * 40),
        "weight file .* is damaged",
    ),
    "a weight too few": (
        weighs(lambda w: w.pop("w1.weight")),
        "lacks the weight w1.weight;",
    ),
    "a weight too many": (
        weighs(lambda w: w.update(odd=torch.zeros(1))),
        "has the weight odd, which its kind does not have",
    ),
    "a weight of another shape": (
        weighs(lambda w: w.update({"residuals": torch.zeros(9, 64)})),
        r"residuals .* is \(9, 64\), not \(4, 64\)",
    ),
    "a weight of NaN": (
        weighs(lambda w: w["w1.weight"].fill_(float("nan"))),
        "weight w1.weight .* holds numbers that are not finite, with which it would draft nothing",
    ),
    "an infinite weight": (
        weighs(lambda w: w["residuals"][1, 2].fill_(float("inf"))),
        "weight residuals .* holds numbers that are not finite",
    ),
    "hidden size": (lambda d: edit(d, hidden_size=48), "hidden size is 48 but this target's is 64"),
    "vocabulary": (lambda d: edit(d, vocab_size=7), "vocabulary is 7 but this target's is 192"),
    "layer count": (
        lambda d: edit(d, target_layers=9),
        "number of layers is 9 but this target's is 2",
    ),
    "layer ids": (
        lambda d: edit(d, layers=[3]),
        "reads layer 3 of its target, which has states 0 to 2",
    ),
    "two layers": (lambda d: edit(d, layers=[1, 2]), r"as many layers as it reads \(1\), not 2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_head_is_refused(damage: str, folder: Path) -> None:
    harm, message = DAMAGE[damage]
    load_head(folder, target("llava"))
    harm(folder)
    with pytest.raises(ModelError, match=message):
        load_head(folder, target("llava"))


@pytest.mark.parametrize("kind", [kind for kind in DRAFTING if head_class(kind).defaults])
def test_options_that_a_kind_had_not_yet_take_their_defaults(kind: str, tmp_path: Path) -> None:
    save_head(random_head("llava", kind), tmp_path)
    edit(tmp_path, options={})
    assert load_head(tmp_path, target("llava")).config.options == head_class(kind).defaults


def test_a_head_of_another_family_is_refused(folder: Path) -> None:
    message = "model class is LlavaForConditionalGeneration but this target's is Qwen3VLForConditionalGeneration"
    with pytest.raises(ModelError, match=message):
        load_head(folder, target("qwen3_vl"))
    with pytest.raises(ModelError, match=message):
        HeadDrafter(random_head("llava", "hivis"), target("qwen3_vl"), POLICIES["chain"])
