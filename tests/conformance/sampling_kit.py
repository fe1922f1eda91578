"""A model of five tokens whose continuations can all be enumerated, and what engines sample from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from enumeration import Process, exact, histogram, p_value
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.generation import logits_process as hf

from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.output import Output

LIKELY = 1e-5
"""Seeds are fixed, so a right implementation passes always; it would need another seed in one of a hundred thousand
cases after a change of the order in which random numbers are drawn."""
UNLIKELY = 1e-9
"""A planted mistake has to fall below this."""

SMALL, NEW = 5, 4
"""Tokens of the model, and of an answer."""
PROMPT = [1, 3, 2, 4, 1, 3]
ROWS = 256
"""Answers of a sample: enough that settings are told apart (`test_the_histogram_tells_settings_apart`)."""


def small_hybrid(seed: int) -> Qwen3_5ForCausalLM:
    """A gated delta net and an attending layer over the same tokens."""
    config = Qwen3_5TextConfig(
        vocab_size=SMALL,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _spread(Qwen3_5ForCausalLM, config, seed)


def small_model(seed: int, vocab: int = SMALL, layers: int = 1) -> LlamaForCausalLM:
    """One layer or more over a handful of tokens, with logits that differ by about one."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _spread(LlamaForCausalLM, config, seed)


def _spread(kind: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.4)
        model.generation_config.eos_token_id = None
    return model.eval()


def processed(**options: Any) -> Process:
    processors = hf.LogitsProcessorList()
    if "repetition_penalty" in options:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "temperature" in options:
        processors.append(hf.TemperatureLogitsWarper(options["temperature"]))
    if options.get("top_k"):
        processors.append(hf.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        processors.append(hf.TopPLogitsWarper(options["top_p"]))
    return lambda ids, logits: processors(ids, logits)


OPTIONS: dict[str, dict[str, Any]] = {
    "as_it_is": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.6},
    "top_p": {"top_k": 0, "temperature": 1.3, "top_p": 0.8},
    "top_k": {"top_k": 3},
    "repetition_penalty": {"top_k": 0, "repetition_penalty": 1.6, "temperature": 0.8},
}


def sampled(engine: Engine, **options: Any) -> list[Output]:
    """`ROWS` answers to `PROMPT`, each of its own seed."""
    requests = [Request(Prompt(tuple(PROMPT)), seed=row) for row in range(ROWS)]
    outputs: list[Output] = engine.generate(requests, do_sample=True, max_new_tokens=NEW, **options)
    return outputs


def accepted(outputs: Sequence[Output]) -> int:
    """Accepted draft tokens of all answers."""
    return sum(output.stats.accepted_tokens for output in outputs)


def p_of_answers(outputs: Sequence[Output], layers: int = 1, model: Any = None, **options: Any) -> float:
    """How likely the target draws such answers under these options."""
    counts = histogram(torch.tensor([output.tokens for output in outputs]), SMALL)
    return p_value(counts, exact(model or small_model(1, layers=layers), PROMPT, NEW, processed(**options)))
