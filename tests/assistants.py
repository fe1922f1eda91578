"""Random assistants of tiny Gemma 4 targets."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from families import FAMILIES, _sharpen
from saccade.loading import adapt, share_every_layer
from saccade.target_model.adapter import Target


def assistant_model(name: str, *, ordered: bool = False, **changes: Any) -> Any:
    """A random assistant of a family's target, or of another one with these changes."""
    theirs = FAMILIES[name].model().config.get_text_config()
    text = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": theirs.sliding_window,
        "num_kv_shared_layers": 3,
        "model_type": theirs.model_type,
        **changes,
    }
    if name == "gemma4":
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    more = {"use_ordered_embeddings": True, "num_centroids": 24, "centroid_intermediate_top_k": 6} if ordered else {}
    config = transformers.AutoConfig.for_model(
        f"{name}_assistant",
        text_config=text,
        backbone_hidden_size=changes.get("backbone_hidden_size", theirs.hidden_size),
        tie_word_embeddings=False,
        **more,
    )
    share_every_layer(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        _sharpen(model)
        if ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(theirs.vocab_size))
    return model.eval()


@cache
def assistant(name: str, ordered: bool = False) -> Target:
    return adapt(assistant_model(name, ordered=ordered), drafts=True)


def small(model_type: str, **more: Any) -> dict[str, Any]:
    """Two layers over five tokens."""
    return {
        "model_type": model_type,
        "vocab_size": 5,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 4,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        **more,
    }


@cache
def small_target() -> Any:
    return spread(transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**small("gemma4_text")), 1)


@cache
def small_assistant() -> Target:
    text = small("gemma4_text", num_kv_shared_layers=2)
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=16)
    share_every_layer(config)
    return adapt(spread(transformers.Gemma4AssistantForCausalLM, config, 2), drafts=True)


def spread(kind: Any, config: Any, seed: int) -> Any:
    """A model whose logits differ by about one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.4)
    model.generation_config.eos_token_id = None
    return model.eval()
