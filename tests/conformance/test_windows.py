"""Every combination of layer types, windows and soft caps that a decoder reads gives the tokens of `generate`."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from transformers import GenerationConfig

import harness
from families import FAMILIES, PAD, _sharpen, perturbed, reference_greedy
from saccade.draft.model import ModelDrafter
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.inputs.families import split
from saccade.loading import adapt
from saccade.target_model.adapter import Target

pytestmark = pytest.mark.executors

NEW = 20
TYPES = {"S": "sliding_attention", "F": "full_attention"}
WINDOWED = ("mistral", "ministral3", "llava_pixtral", "mistral3", "mistral3_ministral3")
MIXED = ("qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "llava_onevision", "internvl", "gemma3")
WINDOWS = (4, 12, 500)
"""Shorter than a draft tree, passed by the answers, and never reached."""
CASES = [
    *((name, "", window, "") for name in WINDOWED for window in (None, *WINDOWS)),
    *((name, "".join(of), window, "") for name in MIXED for of in product("SF", repeat=3) for window in WINDOWS),
    *(
        ("gemma3", "".join(of), 12, cap)
        for of in product("SF", repeat=3)
        for cap in ("final_logit_softcapping", "attn_logit_softcapping")
    ),
]


def model(name: str, **options: Any) -> Any:
    """A family's model of three layers, with other options of its decoder; eager where the scores are capped."""
    built = FAMILIES[name].build(3)
    text = built.config.get_text_config(decoder=True)
    renewed = type(text)(**{**text.to_dict(), "layer_types": None, **options})
    config = renewed if text is built.config else built.config
    if text is not config:
        config.text_config = renewed
    attention = "eager" if "attn_logit_softcapping" in options else "sdpa"
    renewed_model = type(built)._from_config(config, attn_implementation=attention)
    _sharpen(renewed_model)
    renewed_model.generation_config = GenerationConfig(pad_token_id=PAD, do_sample=False)
    return renewed_model.eval()


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize(("name", "types", "window", "cap"), CASES)
def test_tokens_equal_generate_for_every_kind_of_layer(name: str, types: str, window: int | None, cap: str) -> None:
    options: dict[str, Any] = {"sliding_window": window, **({cap: 2.0} if cap else {})}
    if types:
        options |= {"layer_types": [TYPES[t] for t in types], "use_sliding_window": "S" in types}
    if name == "gemma3":
        del options["use_sliding_window"]
    case, own = FAMILIES[name], model(name, **options)
    expected = [reference_greedy(own, case.row_inputs(case.kinds[0], row), NEW)[0] for row in range(2)]
    target, draft = Target(own), Target(perturbed(own, 0.05, 1))
    assert target.is_lean == ("ministral3" not in name and name != "gemma3")
    prompts = split(target.config, case.inputs(case.kinds[0], 2))
    for drafter in (None, ModelDrafter(draft, harness.POLICIES["dynamic"])):
        found = Engine(target, drafter).generate([Request(prompt) for prompt in prompts], max_new_tokens=NEW)
        assert harness.tokens(found) == expected


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_layers_with_and_without_window_run_on_the_lean_decoder(name: str, exact: bool) -> None:
    own = model(name, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert own.config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    expected = reference_greedy(own, FAMILIES[name].row_inputs("text", 0), NEW)
    target = Target(own, exact=exact)
    assert target.is_lean
    prompts = split(target.config, FAMILIES[name].row_inputs("text", 0))
    assert harness.tokens(Engine(target).generate([Request(prompts[0])], max_new_tokens=NEW)) == expected


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_options_that_a_decoder_does_not_read_are_refused_where_they_would_matter(name: str) -> None:
    """Transformers keeps unknown options in the configuration, and its modules ignore them."""
    mixed = model(name, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    with pytest.raises(ModelError, match="cannot be verified on trees"):
        adapt(mixed)
