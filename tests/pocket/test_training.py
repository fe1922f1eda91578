"""Training: growth keeps the function, batches equal the processor's output, a killed run goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, AutoProcessor

from saccade.pocket import draw
from saccade.pocket.answering import messages
from saccade.pocket.train.alignment import align_projector
from saccade.pocket.train.batches import pixels, token_batch
from saccade.pocket.train.chat import IMAGE, PAD, prompt
from saccade.pocket.train.growth import grow
from saccade.pocket.train.models import build, embed
from saccade.pocket.train.processor import make_processor
from saccade.pocket.train.recipe import LanguageShape, TowerShape, quick_recipe
from saccade.pocket.train.tokens import train_tokenizer

TOWER = TowerShape(layers=1, width=32, mlp=48, heads=2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(quick_recipe())


def _tiny(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    return build(LanguageShape(layers, width=64, mlp=96), TOWER, vocabulary=448).eval()


@torch.no_grad()
def test_growth_leaves_the_logits_bitwise_alone(tokenizer: Tokenizer) -> None:
    shallow = _tiny()
    deep = grow(shallow, 6).eval()
    sample = draw(0, "scene")
    ids, _ = token_batch(tokenizer, [sample.question], [tokenizer.encode(sample.answer).ids], with_image=True)
    inputs = {"input_ids": ids, "pixel_values": pixels([sample.image])}
    assert deep.config.text_config.num_hidden_layers == 6
    assert torch.equal(shallow(**inputs).logits, deep(**inputs).logits)


def test_growth_to_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers can grow to a multiple of 2, not to 5"):
        grow(_tiny(), 5)


@torch.no_grad()
def test_training_forward_equals_hugging_faces(tokenizer: Tokenizer) -> None:
    model = _tiny()
    samples = [draw(seed, "receipt") for seed in range(2)]
    ids, _ = token_batch(tokenizer, [s.question for s in samples], [[], []], with_image=True)
    pictures = pixels([s.image for s in samples])
    hidden = model.model.language_model(inputs_embeds=embed(model, ids, pictures)).last_hidden_state
    expected = model(input_ids=ids, pixel_values=pictures).logits
    assert torch.equal(model.lm_head(hidden), expected)


@pytest.mark.parametrize("task", ["scene", "chart", "receipt"])
def test_processor_gives_the_training_ids_and_pixels(tokenizer: Tokenizer, task: str) -> None:
    processor = make_processor(tokenizer, 2048)
    sample = draw(3, task)
    text = processor.apply_chat_template(messages(sample), add_generation_prompt=True)
    assert text == prompt(sample.question)
    got = processor(text=text, images=sample.image, return_tensors="pt")
    ids, _ = token_batch(tokenizer, [sample.question], [[]], with_image=True)
    head = ids[0][ids[0] != PAD][:-1]  # without the end token of the empty answer
    assert got["input_ids"][0].tolist() == head.tolist()
    assert got["input_ids"][0].tolist().count(processor.tokenizer.bos_token_id) == 1
    assert torch.equal(got["pixel_values"], pixels([sample.image]))


def test_chat_template_takes_strings_and_several_turns(tokenizer: Tokenizer) -> None:
    processor = make_processor(tokenizer, 2048)
    first = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Read the receipt."}]}
    turns = [
        first,
        {"role": "assistant", "content": "Tea costs two."},
        {"role": "user", "content": "And the sum?"},
    ]
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    assert text == (
        "<s><user><image>Read the receipt.<assistant>Tea costs two.</s><user>And the sum?<assistant>"
    )


def _train(folder: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "saccade.pocket.train",
        "--out",
        str(folder),
        "--quick",
        "--threads",
        "1",
    ]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_killed_quick_run_goes_on_and_leaves_a_loadable_pair(tmp_path: Path) -> None:
    victim = _train(tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "shallow.checkpoint.pt").exists():
        assert time.monotonic() < deadline, "no checkpoint of the shallow stage within a minute"
        assert victim.poll() is None, "training ended before its second stage"
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    finisher = _train(tmp_path)
    printed, _ = finisher.communicate(timeout=100)
    assert finisher.returncode == 0
    assert "[shallow] resumed at step" in printed
    assert "[tower] step" not in printed
    for name in ("target", "draft"):
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        assert AutoProcessor.from_pretrained(tmp_path / name).image_token_id == model.config.image_token_index
        assert "| scene | colour |" in (tmp_path / name / "README.md").read_text()
    assert not list(tmp_path.glob("*.part"))


@torch.no_grad()
def test_an_aligned_projector_speaks_at_the_volume_of_words(tokenizer: Tokenizer) -> None:
    # A random tower has little to tell: its patches must still come in as loud as words, not fifty times so.
    model = _tiny()
    align_projector(model, tokenizer, seed=0)
    sample = draw(0, "chart")
    ids, _ = token_batch(tokenizer, [sample.question], [[]], with_image=True)
    inputs = embed(model, ids, pixels([sample.image]))
    patches = inputs[ids == IMAGE].norm(dim=-1).mean()
    words = model.get_input_embeddings().weight.norm(dim=-1).mean()
    assert 0.2 < patches / words < 2
