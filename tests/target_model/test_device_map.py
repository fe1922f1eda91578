"""A model spread over places by `device_map` runs as it is; nothing assumes one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from families import FAMILIES
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.engine import Engine, Request
from saccade.inputs.families import split
from saccade.target_model.adapter import Target

accelerate = pytest.importorskip("accelerate", reason="device_map needs accelerate")


def spread(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The second decoder layer is kept on disk and brought in to run: its weights are on the meta device."""
    prefix = "model.language_model.layers" if hasattr(model.model, "language_model") else "model.layers"
    places = dict.fromkeys((n for n, _ in model.named_children()), "cpu")
    del places["model"]
    parent = prefix.rsplit(".", 1)[0]
    for name, module in model.model.named_children():
        if f"model.{name}" != parent and f"model.{name}" != prefix:
            places[f"model.{name}"] = "cpu"
        elif f"model.{name}" == parent:
            places |= {f"{parent}.{n}": "cpu" for n, _ in module.named_children() if n != "layers"}
    layers = model.get_submodule(prefix)
    places |= {f"{prefix}.{i}": "disk" if i == 1 else "cpu" for i in range(len(layers))}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "gemma3"])
def test_an_offloaded_layer_changes_nothing(name: str, tmp_path: Path) -> None:
    case = FAMILIES[name]
    kind = "image" if "image" in case.kinds else "text"
    requests = [Request(p) for p in split(case.model().config, case.inputs(kind, rows=2))]
    model = spread(case.model(), tmp_path)
    assert any(p.device.type == "meta" for p in model.parameters())
    target = Target(model)
    assert target.device == torch.device("cpu")
    drafter = ModelDrafter(Target(case.draft_model()), DynamicTree(top=3, max_depth=3, total=8))
    outputs = Engine(target, drafter).generate(requests, max_new_tokens=24)
    assert [list(o.tokens) for o in outputs] == case.reference(kind, rows=2)
    assert sum(o.stats.accepted_tokens for o in outputs) > 0
