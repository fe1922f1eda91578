"""Of a damaged head folder of any kind, inspecting and loading give the same sentence, and neither takes memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import released_kit
import stacks_kit
from heads_kit import random_head, target
from saccade.checkpoints import inspect_checkpoint, inspecting
from saccade.draft.heads.head import TargetShape
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.store import load_head, read_head, save_head
from saccade.errors import ModelError

HUGE, MOST = 10_000_000, 2_000_000
"""A size that a config.json may ask for, and the numbers that a tensor may have meanwhile."""
_MASKED = {"dflash": {"mask_token": 3}, "dspark": {"mask_token": 3, "rank": 6}, "dflash2": {"mask_token": 3}}


def _ours(kind: str, folder: Path) -> Path:
    save_head(random_head("llava", kind, **_MASKED.get(kind, {})), folder)
    return folder


def _denoiser(kind: str, is_speculator: bool, folder: Path) -> Path:
    """A head that denoises blocks, as z-lab and DeepSpec write it, or as speculators does."""
    head: Any = random_head("llava", kind, **_MASKED[kind])
    parts = {"w1.": "markov_w1.", "w2.": "markov_w2.", "forecast.": "confidence_proj.", "context_norm.": "hidden_norm."}
    parts |= {"stack.": "layers."}
    weights = {}
    for name, weight in head.state_dict().items():
        part = next((part for part in parts if name.startswith(part)), "")
        weights[parts.get(part, "") + name.removeprefix(part)] = weight
    options = head.config.options
    blocks = {"num_hidden_layers": options["blocks"], "block_size": options["block"], "model_type": "qwen3"}
    inner = {name: value for name, value in options.items() if name.startswith(("conv_", "selector_"))}
    inner |= {"mask_token_id": 3, "block_size": options["block"]}
    released_kit.write(folder, head.config, weights, **blocks)
    values = json.loads((folder / "config.json").read_text())
    if is_speculator:
        values = {"transformer_layer_config": values, "speculators_model_type": kind, **inner}
        values["aux_hidden_state_layer_ids"] = list(head.config.layers)
    else:
        names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
        inner["target_layer_ids"] = [layer - 1 for layer in head.config.layers]
        values |= {"architectures": [names[kind]], "is_causal": False, "dflash_config": inner}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


FOLDERS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    **{f"ours {kind}": ("llava", lambda folder, kind=kind: _ours(kind, folder)) for kind in HEAD_KINDS},
    **{
        f"released {case}": (each.name, lambda folder, case=case: released_kit.release(case, folder))
        for case, each in released_kit.CASES.items()
    },
    **{f"released {case}": ("llava", make) for case, make in stacks_kit.CASES.items()},
    **{
        f"released {kind} {'speculators' if spec else 'authors'}": (
            "llava",
            lambda folder, kind=kind, spec=spec: _denoiser(kind, spec, folder),
        )
        for kind in _MASKED
        for spec in (False, True)
    },
}
"""Family of the target and maker of a folder, by name."""

ODD: tuple[Any, ...] = (None, True, -1, 0, 1.5, float("nan"), HUGE, 10**30, "x", [], [-7], ["x"], {"x": 1})
"""Values of JSON, most of which are wrong for any setting."""


class Small(TorchDispatchMode):
    """Refuses every tensor on the CPU that is larger than a folder's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                assert leaf.numel() <= MOST, f"{func} made a tensor of {leaf.numel()} numbers"
        return out


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations of targets, whose folders do not change here, are read once."""
    monkeypatch.setattr(inspecting, "check_checkpoint", checked)


checked = cache(inspecting.check_checkpoint)


@cache
def model_folder(name: str, place: Path) -> Path:
    target(name).model.save_pretrained(place / name)
    return place / name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def said(ask: Callable[[], Any]) -> str:
    """A refusal, raised or returned; empty where there is none."""
    try:
        found = ask()
    except ModelError as problem:
        return str(problem)
    return found if isinstance(found, str) else ""


def check(folder: Path, name: str, models: Path, harm: str, refused: bool | None = None) -> None:
    """Loading for a target, inspecting for the same one and inspecting alone agree; ``refused`` says on what."""
    loading = said(lambda: load_head(folder, target(name)))
    compared = said(lambda: inspect_checkpoint(folder, model_folder(name, models)).problem)
    alone = said(lambda: inspect_checkpoint(folder).problem)
    if loading.endswith("it has no 'saccade_head'."):  # nothing shows any more that it was a head
        assert compared, harm
        return
    assert compared == loading, harm
    assert "\n" not in loading, (harm, loading)
    if loading:
        assert str(folder) in loading, (harm, loading)
    if alone:
        assert loading, (harm, alone)
    if refused is not None:
        assert bool(loading) == refused, (harm, loading)
        assert bool(alone) == refused, (harm, alone)


def weight_file(folder: Path) -> Path:
    (file,) = (file for file in folder.iterdir() if file.suffix != ".json")
    return file


def rewritten(folder: Path, weights: dict[str, Tensor]) -> None:
    file = weight_file(folder)
    (save_file if file.suffix == ".safetensors" else torch.save)(weights, file)


def harmed(weights: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Weights with one harm, and its name: every weight in turn gets the next kind of harm."""
    yield "extra weight", {**weights, "odd.weight": torch.ones(2)}
    yield "no weights", {}
    for place, (name, weight) in enumerate(weights.items()):
        bad = [weight.clone() for _ in range(2)]
        for each, number in zip(bad, (torch.nan, torch.inf), strict=True):
            each.view(-1)[-1] = number if weight.is_floating_point() else HUGE
        kinds: dict[str, Tensor | None] = {
            "missing": None,
            "not a number": bad[0],
            "longer": torch.cat([weight, weight]),
            "infinite": bad[1],
            "a number": weight.flatten()[0].clone(),
            "whole": weight.int(),
            "of eight bits": weight.to(torch.float8_e4m3fn),
        }
        for kind in islice(cycle(kinds), place % len(kinds), place % len(kinds) + 2):
            changed = {**weights, name: kinds[kind]}
            yield f"{name} {kind}", {key: value for key, value in changed.items() if value is not None}


# Of the target; or left out where the target's own, or a bias that may be absent, serves; or cut to what is needed.
_OPEN = ("embed_tokens", "t2d", "inv_freq", "d2t", "lm_head", "bias", "0.1.weight", "token_map")


@pytest.mark.parametrize("case", FOLDERS)
def test_a_weight_that_is_not_as_it_must_be_is_refused_alike(case: str, models: Path, tmp_path: Path) -> None:
    name, make = FOLDERS[case]
    folder = make(tmp_path / "head")
    check(folder, name, models, "as it was", refused=False)
    file = weight_file(folder)
    weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    for harm, changed in harmed(weights):
        rewritten(folder, changed)
        sure = case.startswith("ours") or not any(part in harm for part in _OPEN)
        check(folder, name, models, f"{case}: {harm}", refused=True if sure else None)


@pytest.mark.parametrize("case", ["ours hivis", "released eagle3", "released medusa"])
def test_a_file_cut_anywhere_is_refused_alike(case: str, models: Path, tmp_path: Path) -> None:
    name, make = FOLDERS[case]
    folder = make(tmp_path / "head")
    file = weight_file(folder)
    content = file.read_bytes()
    for length in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        check(folder, name, models, f"{length} bytes", refused=True)


def test_a_weight_that_is_larger_than_its_file_is_refused(models: Path, tmp_path: Path) -> None:
    folder = released_kit.release("eagle3", tmp_path / "head", binary=True)
    file = folder / "pytorch_model.bin"
    check(folder, "llava", models, "as it was", refused=False)
    weights = torch.load(file)
    torch.save({**weights, "fc.weight": torch.ones(1, 1).expand(weights["fc.weight"].shape)}, file)
    check(folder, "llava", models, "one number for all", refused=True)
    torch.save({**weights, "fc.weight": weights["fc.weight"].to_sparse()}, file)
    check(folder, "llava", models, "sparse", refused=True)


def settings(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all settings, of those in tables too."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from settings(value, (*path, key))


def changed(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *others = path
    return {**values, first: changed(values[first], tuple(others), value) if others else value}


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", FOLDERS)
def test_any_value_of_any_setting_is_taken_or_refused_in_a_sentence(case: str, stride: int, tmp_path: Path) -> None:
    name, make = FOLDERS[case]
    folder, shape = make(tmp_path / "head"), TargetShape.of(target(name))
    values = json.loads((folder / "config.json").read_text())
    for path, value in list(product(settings(values), ODD))[::stride]:
        (folder / "config.json").write_text(json.dumps(changed(values, path, value)))
        with Small():
            loading, alone = (
                said(lambda: read_head(folder, shape)),
                said(lambda: read_head(folder, inspecting.described)),
            )
        harm = f"{case}: {'.'.join(path)} = {value!r}"
        assert "\n" not in loading, (harm, loading)
        assert loading or not alone, (harm, alone)
        assert not loading or str(folder) in loading, (harm, loading)


def test_settings_of_our_heads_have_one_type_and_a_range(models: Path, tmp_path: Path) -> None:
    folder = _ours("hivis", tmp_path / "head")
    values = json.loads((folder / "config.json").read_text())
    for name in values:
        for value in ("x", [["x"]], -1.5, {"x": 1}) if name != "target_class" else ((),):
            (folder / "config.json").write_text(json.dumps({**values, name: value}))
            check(folder, "llava", models, f"{name} = {value!r}", refused=True)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"saccade_head":' * 50_000, "{", "\x00", "9" * 5000, '"\\ud800"', ""])
def test_a_configuration_that_is_no_json_is_refused_alike(text: str, models: Path, tmp_path: Path) -> None:
    folder = _ours("hivis", tmp_path / "head")
    (folder / "config.json").write_text(text)
    check(folder, "llava", models, text[:20], refused=True)
