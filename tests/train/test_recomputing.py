"""Activations that are computed again: the same weights to the last bit, from less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_draft_vlm_training import recipe as draft_recipe
from test_draft_vlm_training import trainer as draft_trainer
from torch import Tensor
from train_kit import listed, target
from training_run import closeness

from saccade.train import Recipe, Trainer, read_recipe

KINDS: dict[str, dict[str, Any]] = {
    "eagle2": {"stage1.draft_steps": 3},
    "eagle3": {"stage1.draft_steps": 3},
    "hivis": {"stage1.draft_steps": 3, "stage2.steps": 0, "loss.early_stop": False},
    "vispec": {"stage1.draft_steps": 2},
    "dream": {"stage1.draft_steps": 3},
    "dream answer": {"stage1.draft_steps": 3, "loss.feeding": "answer"},
    "medusa": {"stage1.draft_steps": 3},
    "hydra": {"stage1.draft_steps": 3},
    "kangaroo": {},
    "draft": {},
}


def trainer(kind: str, out: Path, **more: Any) -> Trainer:
    settings = {"batch_size": 4, "micro_batch": 2, "validation_samples": 0, "precision": "fp32", "stage1.warmup": 0}
    settings |= {"stage1.steps": 2, **KINDS[kind], **more}
    if kind == "draft":
        return draft_trainer("llava", out, draft_recipe(**{**settings, "stage2.steps": 2}))
    chosen: Recipe = read_recipe(kind.split()[0]).with_settings(settings)
    return Trainer(target("llava"), chosen, listed("llava", 8), out, measure=closeness, say=lambda _: None)


def weights(out: Path) -> dict[str, Tensor]:
    [file] = [out / name / "model.safetensors" for name in ("head", "draft") if (out / name).is_dir()]
    return load_file(file)


def held(run: Trainer, step: int) -> int:
    """Bytes that a step's forward passes keep for the backward pass."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run.train_step(step)
    return total


EACH = [pytest.param(k, marks=[] if k in ("eagle2", "dream", "draft") else [pytest.mark.slow]) for k in KINDS]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", EACH)
def test_a_drafter_learns_the_same_bits_from_recomputed_activations(kind: str, precision: str, tmp_path: Path) -> None:
    for recompute in (False, True):
        trainer(kind, tmp_path / str(recompute), recompute=recompute, precision=precision).run()
    plain, again = weights(tmp_path / "False"), weights(tmp_path / "True")
    assert plain.keys() == again.keys()
    for name, weight in plain.items():
        assert torch.equal(weight, again[name]), name


@pytest.mark.parametrize(
    "kind", ["eagle2", *(pytest.param(k, marks=pytest.mark.slow) for k in ("hivis", "dream", "draft"))]
)
def test_recomputed_activations_are_not_kept(kind: str, tmp_path: Path) -> None:
    plain, again = (held(trainer(kind, tmp_path / str(on), recompute=on), 0) for on in (False, True))
    assert again < 0.7 * plain
