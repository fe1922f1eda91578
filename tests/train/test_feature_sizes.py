"""Memory of a training run: features that the head reads, and logits of a bounded number of positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_kit import head, listed, lm_head, samples, target

from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Head
from saccade.errors import TrainingError
from saccade.train import Recipe, Stage, Trainer
from saccade.train.feature_cache import FeatureCache
from saccade.train.objectives import losses
from saccade.train.objectives.dream import DreamFeeder, DreamObjective
from saccade.train.objectives.entries import Feeder
from saccade.train.plan import plan_of
from saccade.train.recipe import objective_of

KINDS = ("eagle2", "eagle3", "msd", "vispec", "hivis", "dream", "medusa", "hydra", "kangaroo")


def feeder(own: Head, name: str = "llava") -> Feeder:
    source = listed(name, 3)
    if isinstance(own, Dream):
        return DreamFeeder(target(name), own, source, objective=DreamObjective())
    return Feeder(target(name), own, source)


def judged(own: Head, given: Feeder, lm_head: Any, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    entries = given.entries(range(3))
    assert entries is not None
    loss = objective_of(own.kind)()(own, entries, lm_head, steps).loss
    own.zero_grad()
    loss.backward()
    return loss.detach(), {n: w.grad.clone() for n, w in own.named_parameters() if w.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Up to the order of float32 sums, which is a millionth of a gradient's norm."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def steps_of(kind: str) -> int:
    return 1 if kind == "kangaroo" else 2


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_cache_leaves_out_is_never_read(kind: str, where: str, tmp_path: Path) -> None:
    own = head("llava", kind)
    given = feeder(own)
    plain = judged(own, given, lm_head, steps_of(kind))
    given.cache = FeatureCache(target("llava"), 1e9, tmp_path if where == "disk" else None, "x", needed=given.needed)
    given.entries(range(3))
    given.cache.flush()
    cached = judged(own, given, lm_head, steps_of(kind))
    torch.testing.assert_close(cached[0], plain[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(cached[1], plain[1])


def test_a_state_that_is_read_and_not_kept_is_noticed() -> None:
    own = head("llava", "eagle2")
    given = feeder(own)
    plain = judged(own, given, lm_head, 2)
    hivis = feeder(head("llava", "hivis"))
    given.cache = FeatureCache(target("llava"), 1e9, needed=hivis.needed)
    given.entries(range(3))
    assert not torch.allclose(judged(own, given, lm_head, 2)[0], plain[0], rtol=1e-4)


def test_hivis_keeps_the_states_of_text_and_nothing_of_pictures() -> None:
    given = feeder(head("llava", "hivis"))
    features = given.features(range(3))
    cache = FeatureCache(target("llava"), 1e9, needed=given.needed)
    whole = FeatureCache(target("llava"), 1e9)
    width = target("llava").text_config.hidden_size * features[0].embeddings.element_size()
    pictured = next(f for f in features if f.visual.any())
    text, tokens = int((~pictured.visual).sum()), len(pictured.ids)
    marks = tokens * (8 + 1) + 8 * len(pictured.stops)  # ids, answer, stops
    assert cache.bytes_of(pictured) == (text - 1) * width + marks  # the last token's state says nothing
    assert whole.bytes_of(pictured) == (tokens + tokens - text) * width + marks


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_chunks_give_the_same_loss_and_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = head("llava", kind)
    given = feeder(own)
    whole = judged(own, given, lm_head, steps_of(kind))
    monkeypatch.setattr(losses, "LOGITS", 2 * target("llava").vocab_size)
    cut = judged(own, given, lm_head, steps_of(kind))
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(cut[1], whole[1])


SHARING = ("hivis", "eagle2", "msd", "vispec", "medusa", "hydra")
"""Kinds whose heads read the target's last layer, and nothing that depends on the head."""


def trained(kind: str, out: Path, features: Path | None, where: str = "disk", **head: Any) -> dict[str, Tensor]:
    sizes = {"batch_size": 4, "micro_batch": 2, "validation_samples": 0}
    recipe = Recipe(kind=kind, stages=(Stage(3, 1e-3),), head=head, feature_cache=where, **sizes)
    trainer = Trainer(target("llava"), recipe, listed("llava", 6), out, features=features, say=lambda _: None)
    trainer.run()
    return dict(trainer.learner.module.state_dict())


def test_heads_of_the_same_layers_share_a_cache_and_train_as_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {kind: trained(kind, tmp_path / f"{kind}-alone", None) for kind in SHARING}
    expected["blind"] = trained("eagle2", tmp_path / "blind-alone", None, text_only=True)
    shared = tmp_path / "states"
    found = {"hivis": trained("hivis", tmp_path / "hivis", shared)}  # which reads least
    monkeypatch.setattr(Feeder, "_read", lambda *_: pytest.fail("the target ran again"))
    found.update({kind: trained(kind, tmp_path / kind, shared) for kind in SHARING[1:]})
    found["blind"] = trained("eagle2", tmp_path / "blind", shared, text_only=True)
    for kind, weights in expected.items():
        assert all(torch.equal(weights[name], weight) for name, weight in found[kind].items()), kind
    assert not (tmp_path / "hivis" / "features").exists()


def test_heads_that_read_otherwise_get_features_of_their_own_and_leave_the_others(tmp_path: Path) -> None:
    shared = tmp_path / "states"
    alone: dict[str, dict[str, Any]] = {
        "eagle2": {},
        "eagle3": {},
        "kangaroo": {},
        "dream": {},
        "dream-whole": {"keep": 1.0},
    }
    for number, (name, options) in enumerate(alone.items(), 1):
        kind = name.partition("-")[0]
        own = trained(kind, tmp_path / name, shared, **options)
        assert len(list(shared.iterdir())) == number
        expected = trained(kind, tmp_path / f"{name}-alone", None, **options)
        assert all(torch.equal(expected[key], weight) for key, weight in own.items()), name


def test_a_draft_vlm_shares_no_features(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="A draft VLM reads no features of the target; leave out --features"):
        trained("draft-vlm", tmp_path, tmp_path / "states", "none")


class Largest(TorchDispatchMode):
    """Remembers the most logits that one tensor held."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        weight = target("llava").model.get_output_embeddings().weight
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == len(weight):
            self.rows = max(self.rows, len(out) if out.data_ptr() != weight.data_ptr() else 0)
        return out


@pytest.mark.parametrize("kind", ["hivis", "dream", "medusa"])
def test_no_more_places_than_a_chunk_s_have_logits_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = head("llava", kind)
    given = feeder(own)
    monkeypatch.setattr(losses, "LOGITS", 3 * target("llava").vocab_size)
    with Largest() as largest:
        judged(own, given, lm_head, 2)
    assert largest.rows == 3
    assert sum(len(s.answer) for s in samples("llava", 3)) > 3


@pytest.mark.parametrize("where", ["none", "memory", "disk"])
def test_a_plan_counts_what_features_take(where: str, tmp_path: Path) -> None:
    recipe = Recipe(kind="hivis", stages=(Stage(4, 1e-3),), batch_size=4, validation_samples=0, cache_gb=1e-6)
    trainer = Trainer(target("llava"), recipe, listed("llava", 12), tmp_path, say=str)
    plan = plan_of(trainer, (where, 1e3))
    given = feeder(head("llava", "hivis"))
    cache = FeatureCache(target("llava"), 1e9, needed=given.needed)
    each = [cache.bytes_of(f) for f in given.features(range(3))]
    assert 12 * min(each) / 2 < plan.cache < 12 * max(each) * 2
    [line] = [line for line in str(plan).splitlines() if line.startswith("features")]
    assert "bytes a sample" in line
    expected = {
        "none": "not cached (feature_cache=none)",
        "memory": "cached in memory",
        "disk": "cached on disk",
    }
    assert expected[where] in line
    assert ("room for" in line) == (where != "none")
