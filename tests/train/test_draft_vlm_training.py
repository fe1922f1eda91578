"""A draft VLM of a small language model: what moves, what it learns, and that the engine takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from commands import Shell
from torch import Tensor
from training_run import closeness
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

import checkpoints
from checkpoints import picture, ready, tokenizer
from saccade import VLM, load
from saccade.errors import InputError, ModelError, TrainingError
from saccade.inputs.families.family import Prompt
from saccade.loading import load_model, load_processor
from saccade.train import Listed, Recipe, Trainer, features, read_recipe
from saccade.train.draft_vlm import DraftVlmLearner, new_draft_vlm


@cache
def checkpoint(name: str) -> Path:
    if name not in ("onevision", "next"):
        return ready(name)
    tok = tokenizer()
    tiles: dict[str, Any] = {"image_grid_pinpoints": [[28, 28], [28, 56], [56, 28]]}
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "patch_size": 7}
    tower |= {"num_attention_heads": 2, "image_size": 28}
    shared = {"image_token_id": tok.convert_tokens_to_ids("<image>"), "tie_word_embeddings": False, **tiles}
    text: dict[str, Any] = checkpoints._text(len(tok))
    config: Any
    images: Any
    if name == "next":
        config = LlavaNextConfig(vision_config=CLIPVisionConfig(**tower), text_config=LlamaConfig(**text), **shared)
        square = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
        images = LlavaNextImageProcessorPil(**square, **tiles)
    else:
        vision, video = SiglipVisionConfig(**tower, vision_use_head=False), tok.convert_tokens_to_ids("<|video_pad|>")
        config = LlavaOnevisionConfig(
            vision_config=vision, text_config=Qwen2Config(**text), video_token_id=video, **shared
        )
        images = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, **tiles)
    words = checkpoints.template("<image>", "<|video_pad|>")
    return checkpoints._save(Path(mkdtemp()), checkpoints._finish(config, 5), tok, images, words)


@cache
def vlm(name: str) -> VLM:
    return load(checkpoint(name), method="plain")


@cache
def source(name: str, count: int = 20) -> Listed:
    """Pictures and answers that end alike; every fifth sample has no picture."""
    processor = vlm(name).processor
    return Listed(
        (
            processor.prompt(f"What {n}?", images=[picture(n)] if n % 5 else []),
            (40 + n % 3, 50, 51, 52, 53)[: 3 + n % 3],
        )
        for n in range(count)
    )


def recipe(lm: str | Path = "2x32", **settings: Any) -> Recipe:
    small = {
        "head.lm": str(lm), "batch_size": 4, "micro_batch": 2, "log_every": 1, "validation_samples": 2,
        "stage1.steps": 4, "stage1.warmup": 0, "stage2.steps": 10, "stage2.warmup": 0, "stage2.rate": 3e-3,
    }  # fmt: skip
    return read_recipe("draft-vlm").with_settings({**small, **settings})


def trainer(name: str, out: Path, chosen: Recipe, **options: Any) -> Trainer:
    own = vlm(name)
    options = {"say": lambda _: None, "measure": closeness, **options}
    return Trainer(own.target, chosen, source(name), out, processor=own.processor, **options)


def losses(out: Path) -> list[float]:
    return [r["loss"] for r in map(json.loads, (out / "log.jsonl").open()) if "loss" in r]


def learner(name: str, chosen: Recipe) -> DraftVlmLearner:
    own = vlm(name)
    return DraftVlmLearner(own.target, own.processor, chosen, source(name))


def part_of(name: str) -> str:
    if "vision_tower" in name:
        return "tower"
    return "language" if "language_model" in name or "lm_head" in name else "projector"


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {part_of(name) for name, weight in before.items() if not torch.equal(weight, after[name])}


def test_the_projector_learns_first_then_the_language_model_and_the_tower_never(tmp_path: Path) -> None:
    name, chosen = "onevision", recipe(ready("llama"), weight_decay=0.1)  # what does not learn does not decay either
    run = trainer(name, tmp_path, chosen)
    weights = run.learner.module.state_dict()
    first = {n: w.clone() for n, w in weights.items()}
    eyes = vlm(name).target.model.state_dict()
    small = load_model(ready("llama")).state_dict()
    for n, w in first.items():
        if part_of(n) == "tower":
            assert torch.equal(w, eyes[n]), n
        elif part_of(n) == "language":
            assert torch.equal(w, small[n.replace("model.language_model.", "model.")]), n
    seen, plain = [], run.train_step

    def step(number: int) -> Any:
        values = plain(number)
        seen.append({n: w.clone() for n, w in weights.items()})
        return values

    run.train_step = step  # type: ignore[method-assign]
    run.run()
    assert moved(first, seen[3]) == {"projector"}
    assert moved(seen[3], seen[-1]) == {"projector", "language"}
    curve = losses(tmp_path)
    assert sum(curve[-4:]) < 0.7 * sum(curve[:4])


def test_the_result_is_a_checkpoint_that_drafts_without_changing_answers(tmp_path: Path) -> None:
    name, chosen = "onevision", recipe(**{"stage1.steps": 1, "stage2.steps": 2, "validation_samples": 1})
    run = trainer(name, tmp_path, chosen, measure=None)
    outcome = run.run()
    assert outcome.head == tmp_path / "draft"
    assert outcome.best is not None
    assert outcome.efficiency is not None
    assert outcome.efficiency >= 1
    drafted = load(checkpoint(name), outcome.head)
    assert drafted.method == "auto"
    assert drafted.draft_model is not None
    last = run.learner.module.state_dict()
    for n, w in drafted.draft_model.model.state_dict().items():
        assert torch.equal(w, last[n]), n
    questions = ["What 1?", "What 7 and what else?"]
    for count in (0, 1, 2):
        shown = [picture(n) for n in range(count)]
        for question in questions:
            plain, fast = (m.generate(question, images=shown, max_new_tokens=12) for m in (vlm(name), drafted))
            assert list(fast.tokens) == list(plain.tokens)
    ours, theirs = (
        m.prompt("What?", images=[picture(3)])
        for m in (vlm(name).processor, drafted.draft_processor)  # type: ignore[union-attr]
    )
    assert ours.ids == theirs.ids
    assert [m.digest for m in ours.media] == [m.digest for m in theirs.media]
    assert load(checkpoint(name), outcome.best).draft_model is not None


def test_a_run_that_ends_in_the_second_stage_goes_on_as_an_unbroken_one(tmp_path: Path) -> None:
    chosen = recipe(**{"checkpoint_every": 1, "validate_every": 6, "stage2.steps": 4, "loss.kl": 0.5})
    trainer("llava", tmp_path / "whole", chosen).run()
    cut = trainer("llava", tmp_path / "cut", chosen)
    plain = cut.train_step
    cut.train_step = lambda step: plain(step) if step < 6 else 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        cut.run()
    lines: list[str] = []
    trainer("llava", tmp_path / "cut", chosen, resume=True, say=lines.append).run()
    assert lines[0] == "going on after step 6 of 8"
    for folder in ("draft", "best"):
        one, other = (load_model(tmp_path / run / folder).state_dict() for run in ("whole", "cut"))
        assert moved(one, other) == set()
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    with pytest.raises(TrainingError, match=r"recipe\.head\.lm is '2x32', here it is '1x32'"):
        trainer("llava", tmp_path / "cut", chosen.with_settings({"head.lm": "1x32"}), resume=True).run()


def test_a_state_is_all_weights_but_the_towers_and_no_other_is_taken() -> None:
    trained, made = learner("llava", recipe(seed=1)), learner("llava", recipe(seed=2))
    state, before = trained.state(), {n: w.clone() for n, w in made.module.state_dict().items()}
    assert {part_of(n) for n in state} == {"projector", "language"}
    eyes = next(n for n in before if part_of(n) == "tower")
    some = next(n for n in state if part_of(n) == "projector")
    for wrong, message in (
        ({n: w for n, w in state.items() if n != some}, f"lacks the weight {some}"),
        ({**state, eyes: before[eyes]}, f"has the weight {eyes}"),
        ({**state, "lm_head.bias": torch.zeros(1)}, r"has the weight lm_head\.bias"),
    ):
        with pytest.raises(TrainingError, match=message):
            made.load_state(wrong)
        assert moved(before, made.module.state_dict()) == set()
    made.load_state(state)
    assert moved(trained.module.state_dict(), made.module.state_dict()) == set()


@pytest.mark.parametrize(("name", "step"), [("llava", 4), ("next", 5), ("onevision", 4)])
def test_the_loss_is_that_of_every_sample_alone(name: str, step: int) -> None:
    made = learner(name, recipe(ready("llama"), **{"loss.kl": 0.5}))
    blind = step == 5  # every third batch, once the language model learns
    batch = made.prepare([0, 1, 2, 3], step)
    assert batch is not None
    assert all(("pixel_values" in part.inputs) != blind for part in batch)
    tally = made.loss(batch, recipe().stages[1])
    target, own = vlm(name).target.model, made.module
    tokens, kl = [], []
    for n in range(4):
        sample = source(name).sample(n)
        seen = vlm(name).processor.text_only(sample.prompt) if blind else sample.prompt
        p = alone(target, sample.prompt, sample.answer).log_softmax(-1)
        q = alone(own, seen, sample.answer).log_softmax(-1)
        tokens += [-q[i, a] for i, a in enumerate(sample.answer)]
        kl += list((p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close(tally.terms["tokens"], torch.stack(tokens).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tally.terms["kl"], torch.stack(kl).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tally.loss, tally.terms["tokens"] + 0.5 * tally.terms["kl"])
    assert tally.kept.tolist() == tally.tried.tolist() == [len(tokens)]


def test_samples_whose_media_do_not_fit_together_are_judged_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, right = learner("llava", recipe(**{"loss.kl": 0.5})), features.forward_inputs

    def two(target: Any, prompts: Any) -> Any:
        if len(prompts) > 2:
            raise InputError("videos of several lengths, say")
        return right(target, prompts)

    whole = made.prepare(range(5), 4)
    monkeypatch.setattr(features, "forward_inputs", two)
    halved = made.prepare(range(5), 4)
    assert whole is not None
    assert halved is not None
    assert [len(part.samples) for part in halved] == [2, 1, 2]
    assert [s for part in halved for s in part.samples] == list(whole[0].samples)
    one, other = (made.loss(batch, recipe().stages[1]) for batch in (whole, halved))
    torch.testing.assert_close(other.terms, one.terms)
    assert other.tried.tolist() == one.tried.tolist()


@torch.no_grad()
def alone(model: Any, prompt: Any, answer: tuple[int, ...]) -> Tensor:
    """``[M, V]`` logits of the answer's tokens, of one sample without padding."""
    media = {name: value for medium in prompt.media for name, value in medium.tensors.items()}
    logits = model(input_ids=torch.tensor([[*prompt.ids, *answer]]), **media).logits[0]
    return logits[len(prompt) - 1 : -1].float()  # type: ignore[no-any-return]


@cache
def near(context: int) -> Path:
    """A language model of a small context."""
    return checkpoints.llama(Path(mkdtemp()), max_position_embeddings=context)


def spread(context: int, lengths: Sequence[int]) -> Listed:
    """Samples without pictures, so many tokens more than a context."""
    return Listed((Prompt((40, 41) * ((context + n) // 2 - 1)), (42, 43)) for n in lengths)


def test_samples_longer_than_the_language_models_context_are_left_out_and_counted() -> None:
    own, messages = vlm("llava"), list[str]()
    data = spread(200, [2, -100, 0, 4])
    made = DraftVlmLearner(own.target, own.processor, recipe(near(200)), data, say=messages.append)
    batch = made.prepare([0, 1, 2, 3], 0)
    assert batch is not None
    assert [s.name for part in batch for s in part.samples] == ["1", "2"]
    assert made.prepare([0, 3], 0) is None
    [words] = messages
    assert words.startswith("Sample 0 has 202 tokens, more than 200")
    made.close()
    assert messages[-1].startswith("2 samples were left out: they are longer than 200 tokens")
    with pytest.raises(
        TrainingError, match=r"context of 200 tokens \(of 2 probed the shortest has 202\).*max_tokens=200"
    ):
        DraftVlmLearner(own.target, own.processor, recipe(near(200)), spread(200, [2, 8]))


@pytest.mark.parametrize(("every", "blind"), [(0, []), (1, [4, 5, 6, 7, 8]), (3, [5, 8])])
def test_batches_of_the_second_stage_alone_are_blind(every: int, blind: list[int]) -> None:
    made = learner("llava", recipe(**{"loss.blind_every": every}))
    batches = {step: made.prepare([1, 2], step) for step in (0, 2, 3, 4, 5, 6, 7, 8)}
    assert [step for step, [part] in batches.items() if "pixel_values" not in part.inputs] == blind


def test_a_language_model_without_the_placeholders_gets_them(tmp_path: Path) -> None:
    own = load(checkpoints.llava(tmp_path / "target", tok=tokenizer(more=["<x>", "<y>"])), method="plain")
    made = new_draft_vlm(own.target, own.processor, str(ready("llama")), 0)
    small = load_model(ready("llama")).get_input_embeddings().weight
    table = made.model.get_input_embeddings().weight
    assert table.shape[0] == own.target.vocab_size == small.shape[0] + 2
    assert torch.equal(table[:-2], small)
    torch.testing.assert_close(table[-1], small.mean(0))


@pytest.mark.parametrize(
    ("lm", "error", "message"),
    [
        ("llama-swapped", ModelError, "has another tokenizer than the target"),
        ("llava-draft", ModelError, "with its own vision tower; give a language model"),
        ("2x33", TrainingError, "cannot be 33 wide"),
    ],
)
def test_language_models_that_cannot_be_are_refused_in_a_sentence(
    lm: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        learner("llava", recipe(ready(lm) if "l" in lm else lm))


def test_what_has_no_draft_vlm_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"for a Qwen2_5_VL.*of the class LlavaForConditionalGeneration or"):
        learner("qwen", recipe())
    for settings in ({"stage2.draft_steps": 3}, {"feature_cache": "memory"}):
        with pytest.raises(TrainingError, match="draft_steps must be 1, feature_cache none"):
            learner("llava", recipe(**settings))
    with pytest.raises(TrainingError, match="name it with --lm"):
        learner("llava", read_recipe("draft-vlm"))
    with pytest.raises(TrainingError, match=r"they are 0\.0, 0\.0 and 3"):
        learner("llava", recipe(**{"loss.tokens": 0.0}))
    with pytest.raises(TrainingError, match="give it with processor="):
        Trainer(vlm("llava").target, recipe(), source("llava"), tmp_path)
    for option, words in (("begin", "does not begin with a head"), ("features", "reads no features of the target")):
        with pytest.raises(TrainingError, match=f"A draft VLM {words}"):
            trainer("llava", tmp_path, recipe(), **{option: tmp_path})


def test_a_step_moves_every_weight_that_learns_and_muon_leaves_tables_to_adamw(tmp_path: Path) -> None:
    run = trainer("llava", tmp_path, recipe(optimiser="muon", precision="bf16"))
    named = dict(run.learner.module.named_parameters())
    before = {n: w.clone() for n, w in named.items()}
    run.train_step(4)
    assert {part_of(n) for n, w in named.items() if torch.equal(w, before[n])} == {"tower"}
    assert {part_of(n) for n, w in named.items() if not w.requires_grad} == {"tower"}
    turned = {id(w) for group in run._optimiser._parts[0].param_groups for w in group["params"]}
    names = {n for n, w in named.items() if id(w) in turned}
    assert "model.multi_modal_projector.linear_1.weight" in names
    assert not any("embed" in n or "lm_head" in n or "vision_tower" in n for n in names)


def test_a_draft_of_a_bfloat16_target_is_one_too_and_ends_answers_alike(tmp_path: Path) -> None:
    own = load(ready("llava"), method="plain", dtype="bfloat16")
    own.target.model.generation_config = GenerationConfig(
        eos_token_id=[9, 7], do_sample=False, temperature=0.5, top_p=0.3
    )
    run = Trainer(
        own.target, recipe(**{"loss.kl": 1.0}), source("llava"), tmp_path, processor=own.processor,
        say=lambda _: None,
    )  # fmt: skip
    assert all(w.dtype is torch.float32 for w in run.learner.module.parameters())
    assert torch.tensor(run.train_step(5)["loss"]).isfinite()
    run.learner.save(tmp_path / "draft")
    assert AutoConfig.from_pretrained(tmp_path / "draft").dtype is torch.bfloat16
    assert load_processor(tmp_path / "draft").eos_token_ids == (9, 7)


def test_the_command_plans_trains_and_says_where_it_is(shell: Shell, data: Path, tmp_path: Path) -> None:
    arguments = ["-t", ready("llava"), "--data", data, "-o", tmp_path / "out"]
    for setting in ("batch_size=4", "stage1.steps=1", "stage2.steps=1", "validation_samples=0"):
        arguments += ["--set", setting]
    plan = shell("train", "draft-vlm", "--lm", "1x32", *arguments, "--plan")
    assert plan.code == 0, plan.err
    assert "stage 1    1 steps, the projector alone" in plan.out
    assert "stage 2    1 steps, projector and language model" in plan.out
    assert "drafter    " in plan.out
    done = shell("train", "draft-vlm", "--lm", "1x32", *arguments)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == str(tmp_path / "out" / "draft")
    assert "--lm is for the recipe draft-vlm" in shell("train", "hivis", "--lm", "1x32", *arguments).complaint
