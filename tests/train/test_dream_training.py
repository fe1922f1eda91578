"""DREAM's losses against sums written out by hand; what is learnt is what drafting computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_kit import fed, head, listed, lm_head, samples, target

sys.path.append(str(Path(__file__).parents[1] / "draft" / "heads"))

from families import FAMILIES, reset_rope_deltas
from heads_kit import POLICIES, dropped_of, recorded, run_dream
from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Placement
from saccade.train.data import Listed, TrainingSample
from saccade.train.features import calibrate, extract_features
from saccade.train.objectives import dream as dream_module
from saccade.train.objectives.dream import LAYERS, DreamEntries, DreamFeeder, DreamObjective, inner_layer, self_fed

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""float32 sums in another order."""


def own(name: str = "llava", **options: Any) -> Dream:
    made = head(name, "dream", **options)
    assert isinstance(made, Dream)
    return made


def feeder(batch: Dream, name: str = "llava", count: int = 3, layer: str = "entropy", **more: Any) -> DreamFeeder:
    return DreamFeeder(target(name), batch, listed(name, count), objective=DreamObjective(layer=layer), **more)


def entries(batch: Dream, name: str = "llava", count: int = 3, **more: Any) -> DreamEntries:
    batch = fed(feeder(batch, name, count, **more), range(count))
    assert isinstance(batch, DreamEntries)
    return batch


def inputs_of(name: str, sample: TrainingSample) -> dict[str, Tensor]:
    number = int(sample.name)
    return FAMILIES[name].row_inputs(FAMILIES[name].kinds[number % len(FAMILIES[name].kinds)], number)


# --------------------------------------------------------------------------- losses


def later_steps(
    made: Dream, tokens: list[int], embeddings: Tensor, last: Tensor, prompt: int, feeding: str, count: int
) -> list[Tensor]:
    """``[E, d]`` per step by the slowest means: with ``guess`` every place of every step is a sequence of its own."""
    outs = [run_dream(made, tokens, embeddings, last)]
    for step in range(1, count):
        if feeding == "answer":
            fed = last.clone()
            for place, token in enumerate(tokens):
                if token >= prompt:
                    fed[token] = outs[-1][place]
            outs.append(run_dream(made, tokens, embeddings, fed))
            continue
        rows = []
        for place, token in enumerate(tokens):
            fed = last.clone()
            for after in range(1, step + 1):  # guesses of the tokens before, each a step earlier
                if token - after >= 0 and place - after >= 0:
                    fed[token - after] = outs[step - after][place - after]
            upto = slice(0, place + 1)
            rows.append(run_dream(made, tokens[upto], embeddings[upto], fed)[-1])
        outs.append(torch.stack(rows))
    return outs


@pytest.mark.parametrize(("feeding", "steps", "norms"), [("answer", 2, False), ("guess", 2, True), ("guess", 3, False)])
@pytest.mark.parametrize("options", [{}, {"rotary": False, "direct": False, "gate": "tanh"}], ids=["new", "released"])
def test_all_steps_are_their_formulas(feeding: str, steps: int, norms: bool, options: dict[str, Any]) -> None:
    """One sequence at a time, place by place; later steps are fed with earlier ones' outputs."""
    name, made = "llava", own(keep=0.5, **options)
    tally = DreamObjective(feeding=feeding, middle_norms=norms)(made, entries(made), lm_head, steps)
    sums = {"states": 0.0, "middle": 0.0, "distribution": 0.0}
    counts = [0] * steps
    for sample in samples(name, 3):
        finding = calibrate(target(name), sample.prompt, made.pruning)
        [f] = extract_features(target(name), [sample], [finding.layer])
        tokens = [t for t in range(1, len(sample.ids)) if t not in finding.dropped]
        last, middle = f.states[len(target(name).layers)], f.states[finding.layer]
        with torch.no_grad():
            outs = later_steps(made, tokens, f.embeddings[tokens], last, len(sample.prompt), feeding, steps)
            causal = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool).tril()
            begun = made.begin(f.embeddings[None, tokens], Placement(torch.tensor(tokens)[None] - 1, causal))[0]
            for place, token in enumerate(tokens):
                into = token - (len(sample.prompt) - 1)  # the answer
                if not 0 <= into < len(sample.answer):
                    continue
                p = lm_head(last[token]).double().softmax(-1)
                for step, out in enumerate(outs):
                    first = 0 if step == 0 else 2 if feeding == "answer" else step
                    if into >= first:
                        q = lm_head(out[place]).double().softmax(-1)
                        sums["distribution"] += float((p * (p / q).log()).sum())
                        counts[step] += 1
                inner = [x / x.square().mean().sqrt() if norms else x for x in (begun[place], middle[token])]
                for term, guess, true in (("states", outs[0][place], last[token]), ("middle", *inner)):
                    gap = (guess - true).abs()
                    sums[term] += float(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
    for term, value in sums.items():
        assert float(tally.terms[term]) == pytest.approx(value, rel=1e-4)
    expected = 0.2 * sums["states"] + 0.2 * sums["middle"] + sums["distribution"]
    assert float(tally.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert tally.kept.tolist() == tally.tried.tolist() == counts


def test_gradients_of_the_second_step_flow_through_what_it_was_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, batch = own(), entries(own())

    def gradient() -> Tensor:
        loss = DreamObjective(feeding="answer")(made, batch, lm_head, 2).loss
        assert made.last is not None
        [gradients] = torch.autograd.grad(loss, made.last.mlp.down_proj.weight)
        return gradients

    whole = gradient()
    monkeypatch.setattr(dream_module, "self_fed", lambda e, out: self_fed(e, out.detach()))
    cut = gradient()
    assert float((whole - cut).norm() / whole.norm()) > 1e-3


@pytest.mark.parametrize("layer", LAYERS)
def test_inner_states_of_every_choice(layer: str) -> None:
    name, made = "llava", own(keep=1.0)
    batch = entries(made, layer=layer)
    count = len(target(name).layers)
    for row, sample in enumerate(samples(name)):
        size = len(sample.ids) - 1
        if layer == "none":
            assert batch.middle.shape[-1] == 0
            continue
        index = inner_layer(layer, count)
        if layer == "entropy":
            index = calibrate(target(name), sample.prompt, made.pruning).layer
        [f] = extract_features(target(name), [sample], [index])
        torch.testing.assert_close(batch.middle[row, :size], f.states[index][1:], **CLOSE)
    assert [inner_layer(x, 32) for x in LAYERS] == [32, 8, 16, 24, 32]


# --------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm"])
def test_the_calibration_is_that_of_eager_attention(name: str) -> None:
    model = FAMILIES[name].model()
    model.set_attn_implementation("eager")
    made = own(name, keep=0.5)
    for sample in samples(name, 2):
        inputs = inputs_of(name, sample)
        reset_rope_deltas(model)
        with torch.no_grad():
            attentions = model(**inputs, use_cache=False, output_attentions=True).attentions
        entropies = [float(torch.special.entr(a[0].double()).sum(-1).mean()) for a in attentions]
        finding = calibrate(target(name), sample.prompt, made.pruning)
        assert finding.layer == entropies.index(min(entropies)) + 1
        assert set(finding.dropped) == dropped_of(name, inputs, made)
        assert finding.dropped


def test_a_prompt_is_calibrated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated: list[int] = []

    def counted(target: Any, prompt: Any, pruning: Any) -> Any:
        calibrated.append(len(prompt))
        return calibrate(target, prompt, pruning)

    monkeypatch.setattr(dream_module, "calibrate", counted)
    made = feeder(own(keep=0.5))
    for _ in range(2):
        made.features(range(3))
    assert len(calibrated) == 3


# --------------------------------------------------------------------------- entries


def teacher_forced_difference(name: str, **options: Any) -> float:
    """Between logits of training and of step-by-step drafting of the same answer, in standard deviations."""
    case, made = FAMILIES[name], own(name, **options)
    prompt, answer = samples(name, 1)[0].prompt, case.reference("image")[0][:9]
    [output], steps = recorded(name, made, POLICIES["dynamic"], [prompt], len(answer))
    assert output.tokens == answer
    source = Listed([(prompt, answer)])
    batch = fed(DreamFeeder(target(name), made, source, objective=DreamObjective(layer="none")), [0])
    assert isinstance(batch, DreamEntries)
    with torch.no_grad():
        at = Placement(batch.positions, batch.attention_mask)
        begun = made.begin(batch.embeddings, at)
        out = made.finish(begun, batch.features, at, Placement(batch.places, batch.reach))
        logits = target(name).model.get_output_embeddings()(out[0])
    worst = 0.0
    for step in steps:
        if step.emitted[0]:
            place = batch.tokens[0].tolist().index(len(prompt) + len(step.emitted[0]) - 1)
            gap = (step.levels[0][2][0, 0] - logits[place]).abs().max() / logits[place].std()
            worst = max(worst, float(gap))
    assert sum(bool(step.emitted[0]) for step in steps) > 2
    return worst


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {}),
        ("llava", {"keep": 0.25, "cross": 2}),
        ("llava", {"gate": "replace"}),
        ("gemma3", {"initial": False}),
        ("llava", {"rotary": False}),
        ("llava", {"direct": False}),
        ("gemma3", {"gate": "tanh", "rotary": False, "direct": False}),
    ],
    ids=str,
)
def test_teacher_forcing_is_step_by_step_drafting(name: str, options: dict[str, Any]) -> None:
    assert teacher_forced_difference(name, **options) < 1e-4
