"""Upcycled mixtures of experts compute the dense model's function and send tokens to several experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

import saccade
from saccade.errors import ModelError
from saccade.pocket import draw
from tools.pocket.accuracy import write_checkpoint
from tools.pocket.experts import upcycle
from tools.pocket.models import build
from tools.pocket.recipe import LanguageShape, TowerShape


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    torch.manual_seed(3)
    model = build(LanguageShape(2, width=64, mlp=96), TowerShape(layers=1, width=32, mlp=48, heads=2), 448).eval()
    for parameter in model.model.language_model.parameters():
        parameter.data = parameter.data * 6 if parameter.dim() > 1 else parameter.data
    folder = tmp_path_factory.mktemp("dense") / "model"
    write_checkpoint(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def mixture(dense: Path) -> Path:
    folder = dense.parent / "mixture"
    assert "M parameters" in upcycle(dense, folder, 4, 2)
    return folder


@torch.no_grad()
def test_logits_are_the_dense_model_s(dense: Path, mixture: Path) -> None:
    ids = torch.arange(20, 60)[None]
    one, other = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=ids).logits
        for folder in (dense, mixture)
    )
    assert (one - other).abs().max() < 1e-4 * one.abs().max(), "sums of two halves round once more"


@torch.no_grad()
def test_tokens_go_to_different_experts(mixture: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(mixture, dtype=torch.float32).eval()
    routers = [layer.mlp.gate for layer in model.model.language_model.layers]
    sent: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda module, given, out: sent.append(out[-1]))
    model(input_ids=torch.arange(20, 60)[None])
    assert len(sent) == 2
    for chosen in sent:
        counts = torch.bincount(chosen.flatten(), minlength=4)
        assert counts.sum() == 2 * 40
        assert (counts > 0).all()


def test_drafting_for_a_mixture_changes_no_token(dense: Path, mixture: Path) -> None:
    vlm = saccade.load(str(mixture), str(dense), "chain", dtype="float32", draft_dtype="float32")
    question = draw(0, "scene").messages()
    plain = vlm.using("plain").generate(question, max_new_tokens=16)
    for method in ("chain", "sage"):
        drafted = vlm.using(method).generate(question, max_new_tokens=16)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.target_passes < plain.stats.target_passes


def test_what_cannot_be_upcycled_is_refused_in_one_sentence(dense: Path, mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not empty; choose a new folder"):
        upcycle(dense, mixture)
    with pytest.raises(ModelError, match="1 to 2 experts of 2, not to 3"):
        upcycle(dense, tmp_path / "new", 2, 3)
    with pytest.raises(ModelError, match="type 'mixtral'; only a Llama without biases"):
        upcycle(mixture, tmp_path / "new")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        upcycle(tmp_path, tmp_path / "new")
