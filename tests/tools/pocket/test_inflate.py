"""Inflated models compute the small model's function; what does not fit is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
)

from saccade.draft.heads.head import HeadConfig, Placement, build_head
from saccade.draft.heads.registry import head_class
from saccade.draft.heads.store import WEIGHTS, read_config, read_weights, save_head
from saccade.errors import ModelError
from saccade.loading import load_model
from saccade.pocket import draw
from tools.pocket.__main__ import inflate_model
from tools.pocket.accuracy import write_checkpoint
from tools.pocket.batches import batch_of, pixels
from tools.pocket.inflate import SHAPES, Shape, inflate, inflate_head
from tools.pocket.models import build
from tools.pocket.recipe import LanguageShape, TowerShape


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A random model whose logits are as spread as a trained one's."""
    torch.manual_seed(3)
    model = build(LanguageShape(3, width=64, mlp=96), TowerShape(layers=1, width=32, mlp=48, heads=2), 448).eval()
    for parameter in model.model.language_model.parameters():
        parameter.data = (
            torch.randn_like(parameter) * 0.12 if parameter.dim() > 1 else 1 + 0.3 * torch.randn_like(parameter)
        )
    model.lm_head.weight.data = torch.randn_like(model.lm_head.weight) * 0.4
    folder = tmp_path_factory.mktemp("small") / "model"
    write_checkpoint(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def inputs(tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    samples = [draw(seed, "scene") for seed in range(8)]
    answers = [tokenizer.encode(sample.answer).ids for sample in samples]
    seen = pixels([sample.image for sample in samples])
    return {
        "input_ids": batch_of(tokenizer, samples, answers).ids,
        "pixel_values": torch.stack([seen, seen], 1),  # the whole and its one tile: [8, 2, 3, 96, 96]
        "image_sizes": torch.tensor([[96, 96]] * len(samples)),
    }


@torch.no_grad()
def _logits(folder: Path, inputs: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_model(folder, dtype=dtype).eval()  # refuses a folder that lacks weights
    given = {**inputs, "pixel_values": inputs["pixel_values"].to(dtype)}
    logits: torch.Tensor = model(**given).logits.float()
    return logits


@pytest.mark.parametrize("shape", ["256x5x8", pytest.param("1024x7x8", marks=pytest.mark.slow)])
def test_a_thousand_positions_of_a_wide_model_keep_their_argmax(
    small: Path, inputs: dict[str, torch.Tensor], tmp_path: Path, shape: str
) -> None:
    inflate(small, tmp_path / "wide", shape, dtype="float32")
    files = [load_file(path) for path in (tmp_path / "wide").glob("*.safetensors")]
    inner = [w for weights in files for name, w in weights.items() if "language_model" in name and "proj" in name]
    zeros = sum(int((weight == 0).sum()) for weight in inner) / sum(weight.numel() for weight in inner)
    assert zeros < 0.4, "new weights are numbers that the hardware has to multiply"
    here, there = _logits(small, inputs), _logits(tmp_path / "wide", inputs)
    assert here.shape[:2].numel() >= 1000
    assert torch.equal(here.argmax(-1), there.argmax(-1))
    # Sums in another order: some units in the last place (2^-24 each) of logits of a few tens.
    assert (here - there).abs().max() < 2e-4


def test_bfloat16_keeps_nearly_every_argmax_where_scaling_is_by_powers_of_two(
    small: Path, inputs: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    # 64 -> 256 and heads 32 -> 128. Sums may be taken in another order, which moves a tie now and then.
    assert "scaled by powers of two only" in inflate(small, tmp_path / "wide", "256x5x2")
    few = {name: tensor[:2] for name, tensor in inputs.items()}  # not every processor is quick in bfloat16
    here, there = (_logits(folder, few, torch.bfloat16) for folder in (small, tmp_path / "wide"))
    assert (here.argmax(-1) == there.argmax(-1)).float().mean() > 0.99


def test_grouped_heads_keep_the_function(
    small: Path, inputs: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "grouped", Shape(512, 4, 8, 2, 64, 224))
    assert "scaling rounds" in inflate(small, tmp_path / "wide", "grouped", dtype="float32")
    here, there = _logits(small, inputs), _logits(tmp_path / "wide", inputs)
    assert torch.equal(here.argmax(-1), there.argmax(-1))


def test_the_folder_is_whole(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    inflate(small, out, "256x4x8")
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("<image>") == AutoTokenizer.from_pretrained(
        small
    ).convert_tokens_to_ids("<image>")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (small / name).read_bytes()


@pytest.mark.parametrize("shape", ["256x5x8", "128x3x4"])
@pytest.mark.parametrize(("kind", "norms"), [("eagle2", "all"), ("hivis", "block"), ("hivis", "all")])
def test_an_inflated_head_computes_the_small_ones_states(kind: str, norms: str, shape: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    options = {**head_class(kind).defaults, "norms": norms}
    small = HeadConfig(kind, 64, 96, 2, 2, 32, 448, (3,), "Any", 3, steps=4, options=options)
    head = build_head(small).eval()
    for weight in head.parameters():
        weight.data = torch.randn_like(weight) * 0.2 + (weight.dim() == 1)
    save_head(head, tmp_path / "small")
    inflate_head(tmp_path / "small", tmp_path / "wide", shape, dtype=torch.float32)
    config = read_config(tmp_path / "wide")
    wide = build_head(config).eval()
    wide.load_state_dict(read_weights(tmp_path / "wide", [WEIGHTS]))
    features, embeddings = torch.randn(2, 2, 40, 64)
    at = Placement(torch.arange(40)[None], torch.ones(40, 40, dtype=torch.bool).tril()[None])

    def widened(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(states, (0, config.hidden_size - 64))

    for step in (0, 2):
        expected = head(features, embeddings, at, step)
        found = wide(widened(features), widened(embeddings), at, step)
        torch.testing.assert_close(found, widened(expected), atol=2e-5, rtol=1e-4)


def test_a_head_of_another_kind_is_not_inflated(tmp_path: Path) -> None:
    config = HeadConfig("medusa", 64, 96, 2, 2, 32, 448, (3,), "Any", 3, options=dict(head_class("medusa").defaults))
    save_head(build_head(config), tmp_path / "medusa")
    with pytest.raises(ModelError, match="only eagle2 and hivis heads can be inflated"):
        inflate_head(tmp_path / "medusa", tmp_path / "out", "256x5x8")
    with pytest.raises(ModelError, match="only eagle2 and hivis heads can be inflated"):  # before the target is written
        inflate_model("256x5x8", tmp_path / "wide", heads=[tmp_path / "medusa"])
    assert not (tmp_path / "wide").exists()


def test_what_does_not_fit_is_refused_in_a_sentence(small: Path, tmp_path: Path) -> None:
    for like, words in (
        ("tiny", "Unknown shape 'tiny'"),
        ("100x4x3", "not a multiple of 3 heads"),
        ("64x2x2", "does not fit into 2 layers"),
        ("32x4x1", "does not fit into a width of 32"),
        ("96x4x2", "heads of size 48"),
    ):
        with pytest.raises(ModelError, match=words):
            inflate(small, tmp_path / "wide", like)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    with pytest.raises(ModelError, match="is not empty"):
        inflate(small, tmp_path / "full", "128x4x4")
    with pytest.raises(ModelError, match=r"no config\.json"):
        inflate(tmp_path, tmp_path / "wide", "128x4x4")
    with pytest.raises(ModelError, match="Unknown dtype 'int8'"):
        inflate(small, tmp_path / "wide", "128x4x4", dtype="int8")
    config = json.loads((small / "config.json").read_text())
    for changes, words in (
        ({"attention_bias": True}, "biases in its layers"),
        ({"attention_bias": False, "model_type": "gpt2"}, "of type 'gpt2'"),
    ):
        config["text_config"] |= changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=words):
            inflate(tmp_path, tmp_path / "wide", "128x4x4")
