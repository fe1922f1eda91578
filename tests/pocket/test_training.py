"""Training: growth keeps the function, batches equal the processor's output, a killed run ends like an unbroken one."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, AutoTokenizer

from saccade.cli import execute
from saccade.errors import TrainingError
from saccade.inputs.processor import InputProcessor
from saccade.pocket import WORLD, Sample, draw, target_path
from tools.pocket import draft, language
from tools.pocket.__main__ import app as workshop
from tools.pocket.alignment import align_projector
from tools.pocket.batches import IGNORED, Batch, batch_of, sorted_batch
from tools.pocket.chat import ASSISTANT, END, IMAGE, VIDEO, prompt_ids
from tools.pocket.draft import _seeing
from tools.pocket.growth import grow
from tools.pocket.loop import _optimisers
from tools.pocket.mixtures import SINGLE_PICTURES
from tools.pocket.models import PocketModel, build, embed
from tools.pocket.processor import wrap, write_processor
from tools.pocket.recipe import LanguageShape, Recipe, Schedule, TowerShape, quick_recipe
from tools.pocket.run import run, run_single
from tools.pocket.tokens import train_tokenizer

TOWER = TowerShape(layers=1, width=32, mlp=48, heads=2)
KINDS = ["scene", "difference", "story", "video", "knowledge"]  # one picture, two, five, a video, two turns


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(quick_recipe())


@pytest.fixture(scope="module")
def processor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    folder = tmp_path_factory.mktemp("processor")
    _tiny().config.save_pretrained(folder)
    write_processor(tokenizer, folder, 2048)
    return InputProcessor.load(str(folder))


def _tiny(layers: int = 2) -> PocketModel:
    torch.manual_seed(0)
    return build(LanguageShape(layers, width=64, mlp=96), TOWER, vocabulary=448).eval()


def _batch(tokenizer: Tokenizer, task: str) -> Batch:
    sample = draw(3, task)
    return batch_of(tokenizer, [sample], [tokenizer.encode(sample.answer).ids])


@torch.no_grad()
def _trained_on(model: PocketModel, batch: Batch) -> torch.Tensor:
    hidden = model.model.language_model(inputs_embeds=embed(model, batch)).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden)
    return logits


@torch.no_grad()
def test_growth_leaves_the_logits_bitwise_alone(tokenizer: Tokenizer) -> None:
    shallow = _tiny()
    deep = grow(shallow, 6).eval()
    batch = _batch(tokenizer, "scene")
    assert deep.config.text_config.num_hidden_layers == 6
    assert torch.equal(_trained_on(shallow, batch), _trained_on(deep, batch))


def test_growth_to_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers can grow to a multiple of 2, not to 5"):
        grow(_tiny(), 5)


@torch.no_grad()
@pytest.mark.parametrize("task", KINDS)
def test_training_forward_equals_the_models_own_on_processed_inputs(
    tokenizer: Tokenizer, processor: InputProcessor, task: str
) -> None:
    model, sample = _tiny(), draw(3, task)
    prompt = processor.prompt(sample.messages())
    ids, _ = prompt_ids(tokenizer, sample)
    assert list(prompt.ids) == ids
    batch = batch_of(tokenizer, [sample], [[]])
    tensors: dict[str, torch.Tensor] = {}
    for media in prompt.media:
        for name, tensor in media.tensors.items():
            tensors[name] = torch.cat([tensors[name], tensor]) if name in tensors else tensor
    if sample.images:
        tensors["batch_num_images"] = torch.tensor([len(sample.images)])
    theirs = model(input_ids=batch.ids[:, : len(ids)], **tensors).logits
    torch.testing.assert_close(_trained_on(model, batch)[:, : len(ids)], theirs)


def test_every_answer_of_a_conversation_is_learnt_and_nothing_else(tokenizer: Tokenizer) -> None:
    sample = draw(3, "knowledge")
    (question, first), *_ = sample.turns
    batch = _batch(tokenizer, "knowledge")
    learnt = batch.targets[0] != IGNORED
    assert batch.targets[0][learnt].tolist() == batch.ids[0][learnt].tolist()
    said = tokenizer.decode(batch.ids[0][learnt].tolist(), skip_special_tokens=False)
    assert said == f"{first}</s>{sample.answer}</s>"
    assert question not in said
    before = (learnt[1:] & ~learnt[:-1]).nonzero().flatten()  # each answer begins after its marker
    assert batch.ids[0][before].tolist() == [ASSISTANT, ASSISTANT]


@pytest.mark.parametrize("task", KINDS)
def test_blind_and_untiled_prompts_hold_fewer_tokens(tokenizer: Tokenizer, task: str) -> None:
    sample = draw(3, task)
    full, blind, untiled = (
        prompt_ids(tokenizer, sample, seeing, tiled)[0]
        for seeing, tiled in ((True, True), (False, True), (True, False))
    )
    assert not {IMAGE, VIDEO} & set(blind)
    lone = len(sample.images) == 1
    assert len(full) - len(untiled) == (136 - 65 if lone else 0)


def test_long_samples_come_in_short_batches() -> None:
    from random import Random

    sizes = {len(sorted_batch(Random(seed), 16, 0.2)) for seed in range(60)}
    assert max(sizes) == 16
    assert min(sizes) < 8


def test_the_rate_warms_up_stays_and_falls() -> None:
    schedule = Schedule(steps=100, batch=1, rate=1.0, warmup=10, final=0.1, decay=0.5)
    assert schedule.rate_at(0) == pytest.approx(0.1)
    assert schedule.rate_at(9) == schedule.rate_at(50) == 1.0
    assert schedule.rate_at(75) == pytest.approx(0.55)
    assert schedule.rate_at(100) == pytest.approx(0.1)


def test_optimisers_are_those_whose_states_checkpoints_hold() -> None:
    named = list(_tiny().named_parameters())
    turned = [p for name, p in named if p.ndim == 2 and "layers." in name]
    others = [p for name, p in named if p.ndim != 2 or "layers." not in name]
    expected: list[torch.optim.Optimizer] = [
        torch.optim.Muon(turned, lr=0.01, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.02, fused=True),
    ]
    made = _optimisers(named, 0.01)
    assert [o.state_dict() for o in made] == [o.state_dict() for o in expected]
    for one, other in zip(made, expected, strict=True):
        pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
        assert all(p is q for p, q in pairs)


def test_chat_template_takes_strings_and_several_turns(tokenizer: Tokenizer) -> None:
    first = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Read the receipt."}]}
    turns = [
        first,
        {"role": "assistant", "content": "Tea costs two."},
        {"role": "user", "content": "And the sum?"},
    ]
    text = wrap(tokenizer, 2048).apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<s><user><image>Read the receipt.<assistant>Tea costs two.</s><user>And the sum?<assistant>"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--single-picture-draft",), "needs the pair whose target it is for: give --from"),
        (("--steps", "follow"), "--steps follow names no stage with its steps; write for example follow=800"),
        (("--steps", "answers=3"), "The stage 'answers' takes no steps; choose from tower, shallow"),
        (
            ("--single-picture-draft", "--from", "pocket", "--until", "refine"),
            "no stage 'refine'; choose from tokenizer, draft, answers, follow, export",
        ),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_it_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit):
        execute(workshop, "tools.pocket", ["train", "--out", str(tmp_path / "run"), "--quick", *options])
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def _train(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.pocket", "train", "--out", str(folder), "--quick"]
    return subprocess.Popen(
        [*command, "--threads", "1", *options],
        text=True,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _kill_at(folder: Path, stage: str) -> None:
    """Start a run and kill it once the stage has left a checkpoint."""
    victim = _train(folder)
    deadline = time.monotonic() + 120
    while not (folder / f"{stage}.checkpoint.pt").exists():
        assert time.monotonic() < deadline, f"no checkpoint of the {stage} stage within two minutes"
        assert victim.poll() is None, f"training ended before its stage {stage}"
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.wait()


def test_a_twice_killed_run_ends_with_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    unbroken = _train(whole)
    unbroken.communicate(timeout=400)
    for stage in ("shallow", "follow"):
        _kill_at(broken, stage)
    finisher = _train(broken)
    printed, _ = finisher.communicate(timeout=400)
    assert finisher.returncode == unbroken.returncode == 0
    assert "[follow] resumed at step" in printed
    assert "[tower] step" not in printed
    for name in ("target", "draft"):
        one, other = (
            AutoModelForImageTextToText.from_pretrained(folder / name).state_dict()
            for folder in (broken, whole)
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert AutoTokenizer.from_pretrained(broken / name).convert_tokens_to_ids("<video>") == VIDEO
        assert "| scene | colour |" in (broken / name / "README.md").read_text()
    assert not list(broken.glob("*.part"))


def test_stage_files_of_another_recipe_are_refused_by_the_name_of_the_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = quick_recipe()
    run(quick, tmp_path, until="tokenizer")
    run(replace(quick, checkpoint_seconds=9.0, evaluation_samples=3), tmp_path, until="tokenizer")
    for other, words in (
        (quick.scaled(2.0), r"tower_schedule\.steps is 4, here it is 8; repeat the command"),
        (quick.scaled(1.0, 3), r"tower_schedule\.batch is 4, here it is 12"),
        (replace(quick, seed=8), r"its seed is 7, here it is 8"),
    ):
        with pytest.raises(TrainingError, match=words):
            run(other, tmp_path, until="tokenizer")
    assert not capsys.readouterr().out
    (tmp_path / "recipe.json").unlink()
    run(quick, tmp_path, until="tokenizer")
    assert "does not tell of which recipe" in capsys.readouterr().out
    with pytest.raises(TrainingError, match="its seed is 7"):
        run(replace(quick, seed=8), tmp_path, until="tokenizer")


def test_a_pair_is_trained_on_from_its_own_weights(tmp_path: Path) -> None:
    quick = quick_recipe()
    run(quick, tmp_path / "first")
    still = replace(quick, refine_schedule=replace(quick.refine_schedule, steps=0))
    run(still, tmp_path / "same", until="answers", pair=tmp_path / "first")
    run(quick, tmp_path / "on", pair=tmp_path / "first")
    first, same, on = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / where).state_dict()
        for where in ("first/target", "same/answering", "on/target")
    )
    assert all(torch.equal(first[key], same[key]) for key in first)
    moved = {key for key in first if not torch.equal(first[key], on[key])}
    assert {key.split(".")[1] for key in moved} >= {"language_model", "multi_modal_projector"}
    assert not any("vision_tower" in key for key in moved)
    cards = [
        (tmp_path / where / "README.md").read_text() for where in ("first/draft", "on/draft", "on/target")
    ]
    assert "- Training: on the target's tower" in cards[0]
    assert cards[1].count("answers of the target (half greedy") == 2
    assert "from those bfloat16 weights 0 min with larger shares" in cards[2]
    assert ["recipe seed 7." in card for card in cards] == [True, False, False]
    asked = [{row[0] for row in torch.load(tmp_path / where / "answers.pt")} for where in ("first", "on")]
    assert asked[0].isdisjoint(asked[1])  # nothing that the pair has seen before
    other = tmp_path / "first" / "draft" / "model.safetensors"
    other.write_bytes(other.read_bytes() + b" ")
    with pytest.raises(TrainingError, match="of another recipe: its from is"):
        run(quick, tmp_path / "on", pair=tmp_path / "first")
    with pytest.raises(
        TrainingError, match=r"holds no pair to train on: there is no target/model\.safetensors"
    ):
        run(quick, tmp_path / "on", pair=tmp_path)
    with pytest.raises(
        TrainingError, match="from a pair has no stage 'tower'; choose from tokenizer, refine"
    ):
        run(quick, tmp_path / "never", until="tower", pair=tmp_path / "first")
    assert not (tmp_path / "never").exists()


def test_a_second_draft_for_a_target_sees_single_pictures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def watched(tokenizer: Tokenizer, samples: list[Sample], *rest: Any, **options: Any) -> Batch:
        for sample in samples:
            assert len(sample.images) == 1
            assert sample.video is None
        shown.extend(sample.task for sample in samples)
        return batch_of(tokenizer, samples, *rest, **options)

    monkeypatch.setattr(draft, "batch_of", watched)
    monkeypatch.setattr(language, "batch_of", watched)
    quick = replace(quick_recipe(), answers=6, vocabulary=1024, tower=Recipe().tower)
    pair = target_path().parent
    run_single(quick, tmp_path, pair)
    assert set(shown) <= set(SINGLE_PICTURES)
    assert {"prose", "scene"} <= set(SINGLE_PICTURES)
    assert not {"video", "long-video", "difference", "story", "album"} & set(SINGLE_PICTURES)
    made, target = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "draft", pair / "target")
    )
    tower = [key for key in made if "vision_tower" in key]
    assert tower
    assert all(torch.equal(made[key], target[key]) for key in tower)
    assert "on single pictures alone" in (tmp_path / "draft" / "README.md").read_text()
    assert not (tmp_path / "target").exists()
    with pytest.raises(TrainingError, match="of another recipe: its from is 'single pictures"):
        run(quick, tmp_path, pair=pair)


@torch.no_grad()
def test_an_aligned_projector_speaks_at_the_volume_of_words(tokenizer: Tokenizer) -> None:
    # A random tower has little to tell: its patches must still come in as loud as words, not fifty times so.
    model = _tiny()
    align_projector(model, tokenizer, seed=0)
    batch = _batch(tokenizer, "chart")
    patches = embed(model, batch)[batch.ids == IMAGE].norm(dim=-1).mean()
    words = model.get_input_embeddings().weight.norm(dim=-1).mean()
    assert 0.2 < patches / words < 2


def test_the_ids_of_an_answer_end_with_the_end_token(tokenizer: Tokenizer) -> None:
    batch = _batch(tokenizer, "scene")
    assert batch.targets[0][batch.targets[0] != IGNORED][-1] == END
    assert set(WORLD) >= set(KINDS)


def test_the_draft_sees_two_batches_in_three_and_none_of_several_pictures() -> None:
    lone, several = [draw(1, "chart"), draw(2, "scene")], [draw(1, "difference"), draw(2, "edit")]
    assert [_seeing(number, lone) for number in range(6)] == [False, True, True] * 2
    assert not any(_seeing(number, several) for number in range(6))
    assert _seeing(1, [*lone, several[0]])
