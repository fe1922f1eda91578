"""The probe's statistics are those of eager attention, and the model is as before afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from plain import eager_attentions, plain, prompt, target
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from families import FAMILIES, _text
from saccade.errors import ModelError
from saccade.target_model import stock
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.stock import AttentionProbe, attention_rows

CLOSE = {"rtol": 0.0, "atol": 1e-5}
"""fp32 softmax of scores computed in another order: about 1e-6 per weight, times a sum over a dozen queries."""


def statistics(weights: Tensor, queries: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Column sums ``[K]`` and entropies ``[R]`` of one row's eager attention ``[H, Q, K]``, naively."""
    chosen = weights[:, list(queries)].double()
    entropies = -(chosen * chosen.clamp(min=1e-300).log()).sum(-1)
    return chosen.mean(0).sum(0), entropies.mean(0)


def assert_same(probe: AttentionProbe, attentions: Sequence[Tensor], queries: Sequence[int]) -> None:
    assert len(probe.columns) == len(attentions)
    for layer, weights in zip(probe.columns, attentions, strict=True):
        columns, entropies = statistics(weights[0], queries)
        torch.testing.assert_close(probe.columns[layer][0].double(), columns, **CLOSE)
        torch.testing.assert_close(probe.entropies[layer][0].double(), entropies, **CLOSE)


def other_attention(model: Target) -> set[str]:
    """Implementations of attention outside of the decoder."""
    decoder = {id(m) for m in model.decoder.modules()}
    configs = [m.config for m in model.model.modules() if id(m) not in decoder and hasattr(m, "config")]
    return {config._attn_implementation for config in configs if config is not model.decoder.config}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_statistics_at_prefill_match_eager_attention_and_nothing_else_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are bit for bit those of the stock modules: the same fused kernel gets the same masks."""
    monkeypatch.setattr(stock, "ROWS_AT_ONCE", 5)
    model, case = target(name), FAMILIES[name]
    attentions = eager_attentions(name, case.row_inputs(case.kinds[0], 0))
    with model.stock():
        expected = Context(model, 1).load(0, prompt(name, case.kinds[0])).logits
    assert expected is not None
    count = attentions[0].shape[2]
    for queries in ([count - 1], [0, 3, count - 2, count - 1], None):
        with AttentionProbe(model, queries=queries) as probe:
            assert other_attention(model) == ({"sdpa"} if case.is_visual else set())
            logits = Context(model, 1).load(0, prompt(name, case.kinds[0])).logits
        assert torch.equal(logits, expected)
        assert_same(probe, attentions, range(count) if queries is None else queries)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_models_that_only_run_eagerly_are_probed_too(model_type: str) -> None:
    """Soft-capping (Gemma 2) and attention sinks (gpt-oss) exist in eager attention only."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, **_text(2, head_dim=16, sliding_window=8, num_local_experts=4, attn_logit_softcapping=0.5)
    )
    # Early versions of transformers run Gemma 2 fused by default, without its soft caps.
    model = Target(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    ids = prompt("llama", "text")
    attentions = plain(model.model, {"input_ids": torch.tensor([ids.ids])}, output_attentions=True).attentions
    with AttentionProbe(model, queries=[2, len(ids) - 1]) as probe:
        Context(model, 1).load(0, ids)
    assert_same(probe, attentions, [2, -1])


def implementations(model: Target) -> list[str | None]:
    return [m.config._attn_implementation for m in model.model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "gemma3", "llava_pixtral"])
def test_the_decoder_gets_its_attention_back_even_after_an_exception(name: str) -> None:
    model = target(name)
    before = implementations(model)
    with AttentionProbe(model):
        assert implementations(model) != before
    with pytest.raises(RuntimeError, match="planted"), AttentionProbe(model):
        raise RuntimeError("planted")
    assert implementations(model) == before
    assert len(stock._PROBES) == 0


def test_only_chosen_layers_are_looked_at() -> None:
    model = target("gemma3")
    with AttentionProbe(model, queries=[0], layers=[-1, 0]) as probe:
        Context(model, 1).load(0, prompt("gemma3", "image"))
    assert sorted(probe.columns) == sorted(probe.entropies) == [0, 3]


def test_two_models_are_probed_at_once_but_one_model_only_once() -> None:
    one, other = target("llama"), target("mistral")
    with AttentionProbe(one, queries=[0]) as a, AttentionProbe(other, queries=[0]) as b:
        Context(one, 1).load(0, prompt("llama", "text"))
        assert a.columns
        assert not b.columns
        with pytest.raises(ModelError, match="already being probed"), AttentionProbe(one):
            pass
        Context(other, 1).load(0, prompt("mistral", "text", 1))
    assert a.columns[0].shape != b.columns[0].shape
    assert not [name for name in implementations(one) if str(name).startswith("saccade")]


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="this decoder has layers 0 to 1"):
        AttentionProbe(target("llama"), layers=[2])


def test_attention_code_that_cannot_be_switched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target("llama")
    monkeypatch.setattr(type(model.decoder), "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(ModelError, match="LlamaModel has attention code of its own"), AttentionProbe(model):
        pass


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["causal", "all", "bool", "additive"])
def test_chosen_rows_are_rows_of_the_full_softmax(heads: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator)
    key = torch.randn(2, heads, 5, 8, generator=generator)
    seen = (torch.rand(2, 1, 5, 5, generator=generator) > 0.5) | torch.eye(5, dtype=torch.bool)
    mask = {"bool": seen, "additive": torch.zeros(2, 1, 5, 5).masked_fill(~seen, torch.finfo().min)}.get(kind)
    bias = {"causal": torch.ones(5, 5, dtype=torch.bool).tril(), "all": torch.ones(5, 5, dtype=torch.bool)}
    scores = query @ key.repeat_interleave(4 // heads, 1).transpose(-1, -2) * 0.3
    full = scores.masked_fill(~bias.get(kind, seen), float("-inf")).softmax(-1)
    rows = torch.tensor([3, 0])
    ours = attention_rows(query, key, mask, rows, scale=0.3, causal=kind == "causal")
    torch.testing.assert_close(ours, full[:, :, rows], rtol=0.0, atol=1e-6)


def test_rows_that_share_a_pass_are_refused_under_a_probe() -> None:
    model = target("llama")
    context = Context(model, 2)
    for row in range(2):
        context.cache.reserve(row, 64)
        context.load(row, prompt("llama", "text"))
    with AttentionProbe(model), pytest.raises(ModelError, match="cannot be probed in a packed forward"):
        context.forward([0, 1], torch.tensor([[20], [21]]))
