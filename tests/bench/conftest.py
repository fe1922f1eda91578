"""A tiny random pair that speaks the pocket world's language, and suites that take a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_kit import suite

import saccade
from saccade.bench import cost
from saccade.bench.preparing import Prepared, prepare
from saccade.bench.report import figures
from saccade.model_spec import ModelSpec
from tools.pocket.accuracy import write_checkpoint
from tools.pocket.models import build
from tools.pocket.recipe import LanguageShape, TowerShape, quick_recipe
from tools.pocket.tokens import train_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "cli"))  # for `commands`
TOWER = TowerShape(layers=1, width=32, mlp=48, heads=2)


@pytest.fixture(autouse=True)
def _hasty_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are measured once each: tests ask what is done with them, not what they are."""
    monkeypatch.setattr(cost, "ROUNDS", 1)
    monkeypatch.setattr(cost, "WARM", 0)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a target and of a drafter that is the target's twin but for some noise."""
    folder = tmp_path_factory.mktemp("pair")
    tokenizer = train_tokenizer(quick_recipe())
    torch.manual_seed(0)
    model = build(LanguageShape(2, width=64, mlp=96), TOWER, vocabulary=448)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "language_model" in name:
                weight.mul_(10)  # sharp, so that answers vary and win by more than rounding
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(1.7)  # or the many visual tokens would drown the words
        model.lm_head.weight.mul_(6)
        model.lm_head.weight[:7] = 0  # special tokens never win against the best of the others
    write_checkpoint(model, tokenizer, folder / "target")
    with torch.no_grad():
        model.lm_head.weight.add_(0.5 * model.lm_head.weight.std() * torch.randn(448, 64))
    write_checkpoint(model, tokenizer, folder / "draft")
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture(scope="session")
def vlm(pair: tuple[str, str]) -> saccade.VLM:
    return saccade.load(*pair, dtype="float32", draft_dtype="float32")


@pytest.fixture
def prepared(vlm: saccade.VLM) -> Callable[..., Prepared]:
    """Makes a prepared suite; keyword arguments as in `suite`."""
    return lambda **changes: prepare(suite(**changes), vlm, ModelSpec("tiny", "tinier"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no figures, which take most of their time."""
    monkeypatch.setattr(figures, "draw", lambda group, prefix: [])
