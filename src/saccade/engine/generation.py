"""Generation options of each row, resolved as `generate` resolves them."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from saccade.errors import InputError
from saccade.inputs.prompt import Prompt
from saccade.processors import criterion_of_row, of_row
from saccade.target_model.adapter import Target
from saccade.wording import first_line

DEFAULT_NEW_TOKENS = 256
"""Limit when neither the caller nor the checkpoint sets one."""

UNSUPPORTED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "guidance_scale": None,
    "watermarking_config": None,
    "token_healing": False,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "constraints": None,
    "force_words_ids": None,
}
"""Options of GenerationConfig that do not fit greedy decoding or sampling, with their neutral values."""

ELSEWHERE = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
"""Names of options in vLLM and OpenAI's interface -> Hugging Face's, which are used here."""

_WHOLE = "a whole number greater than 0"
RANGES: dict[str, tuple[type, float, float, str]] = {
    "max_new_tokens": (int, 1, math.inf, _WHOLE),
    "max_length": (int, 1, math.inf, _WHOLE),
    "top_k": (int, 0, math.inf, "a whole number, 0 for no limit"),
    "top_p": (float, 0, 1, "a number from 0 to 1"),
    "min_p": (float, 0, 1, "a number from 0 to 1"),
    "temperature": (float, -math.inf, math.inf, "a number above 0"),  # its range is checked when sampling
    "repetition_penalty": (float, sys.float_info.min, math.inf, "a number above 0"),
}
"""Options with type, least and greatest value, and their description; `generate` accepts some out of range."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Decoding options of one row."""

    max_new_tokens: int  # hard limit
    eos: frozenset[int]  # ids that end the row
    processors: tuple[Any, ...]  # logits processors in `generate`'s order
    criteria: tuple[Any, ...]  # stopping criteria besides length and EOS, called after every token as in `generate`


@dataclass(frozen=True, slots=True)
class DecodingPlan:
    """Decoding options of a batch."""

    do_sample: bool  # sampling instead of greedy decoding
    rows: tuple[RowPlan, ...]  # one plan per row


_RESOLVING = threading.Lock()
"""Held while options are resolved: caches of transformers are not made for several threads."""


def plan(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    generation_config: Any = None,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> DecodingPlan:
    """Resolve options against the checkpoint's defaults, by the model's own code where it has some; in any thread."""
    model = target.model
    with _RESOLVING, _refusals():
        config, unknown = model._prepare_generation_config(generation_config, **_check_ranges(options))
    for name in unknown:
        if name in ELSEWHERE:
            raise InputError(f"The option {name} is called {ELSEWHERE[name]} here, as in `generate`; give that.")
    if unknown:
        raise InputError(
            f"Unknown generation option{'s' if len(unknown) > 1 else ''} {', '.join(sorted(unknown))}; "
            "expected options of Hugging Face's GenerationConfig."
        )
    check_options(config)
    sources = (options.get("max_length"), getattr(generation_config, "max_length", None))
    # Not the resolved one, which defaults to `generate`'s 20.
    longest = next((n for n in (*sources, model.generation_config.max_length) if n is not None), None)
    limits = [_new_tokens(config.max_new_tokens, longest, len(p), target.traits.context) for p in prompts]
    rows = []
    for index, prompt in enumerate(prompts):
        config.max_new_tokens = limits[index]
        config.max_length = len(prompt) + limits[index]
        if config.min_new_tokens is not None:
            config.min_length = len(prompt) + config.min_new_tokens
        processors = [of_row(p, index, len(prompts)) for p in logits_processor]
        criteria = [criterion_of_row(c, index, len(prompts)) for c in stopping_criteria]
        allowed = prefix_allowed_tokens_fn and _allowed_in(prefix_allowed_tokens_fn, index)
        with _RESOLVING, _refusals():
            rows.append(_row_plan(target, config, prompt, processors, allowed, criteria, tokenizer))
    return DecodingPlan(do_sample=bool(config.do_sample), rows=tuple(rows))


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert errors of transformers on option values to `InputError`."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError) as problem:
        reason = first_line(problem)
        raise InputError(f"The generation options cannot be used together or as they are: {reason}.") from problem


def check_given(options: Mapping[str, Any]) -> None:
    """Raise `InputError` for options that no checkpoint decodes with; `plan` resolves them against one."""
    absent = {"stop_strings": None, "do_sample": None, "temperature": None}
    check_options(SimpleNamespace(**{**absent, **_check_ranges(dict(options))}))


def _check_ranges(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options after checking their types and ranges."""
    for name, (kind, least, most, words) in RANGES.items():
        value = options.get(name)
        if value is None:
            continue
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise InputError(f"{name} must be {words}, not {value!r}.")
    return options


def check_options(config: Any) -> None:
    """Raise `InputError` for an unsupported decoding mode."""
    for name, neutral in UNSUPPORTED.items():
        value = getattr(config, name, neutral)
        if value not in (neutral, None) and not (name == "guidance_scale" and value == 1):
            raise InputError(
                f"{name}={value!r} is not supported; speculative decoding does greedy decoding and sampling."
            )
    if "" in (config.stop_strings if isinstance(config.stop_strings, list) else [config.stop_strings]):
        raise InputError("An empty stop string would end every answer after its first token; leave it out.")
    if config.do_sample and config.temperature is not None and config.temperature <= 0:
        raise InputError(
            f"temperature must be above 0 for sampling, not {config.temperature}; use do_sample=False for greedy "
            "(--temperature 0 on the command line)."
        )


def _allowed_in(
    allowed: Callable[[int, torch.Tensor], list[int]], row: int
) -> Callable[[int, torch.Tensor], list[int]]:
    """The caller's prefix constraint for one row, which is a batch of its own here."""
    return lambda _, ids: allowed(row, ids)


def _row_plan(
    target: Target,
    config: Any,
    prompt: Prompt,
    processors: Sequence[Any],
    allowed: Callable[[int, torch.Tensor], list[int]] | None,
    criteria: Sequence[Any],
    tokenizer: Any,
) -> RowPlan:
    """Build one row's plan from a resolved GenerationConfig with that row's lengths."""
    model, device = target.model, target.device
    ids = torch.tensor([prompt.ids], device=device)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=device, batch_size=1)
    resolved = model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=len(prompt),
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=allowed,
        logits_processor=LogitsProcessorList(processors),
        device=device,
        model_kwargs={},  # no attention mask: rows are not padded, and nodes of a tree are a batch of their own
    )
    stopping = model._get_stopping_criteria(
        generation_config=config, stopping_criteria=StoppingCriteriaList(criteria), tokenizer=tokenizer
    )
    eos = config.eos_token_id
    ends = frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else [int(e) for e in eos])
    return RowPlan(
        max_new_tokens=config.max_new_tokens,
        eos=ends,
        processors=tuple(resolved),
        criteria=tuple(c for c in stopping if type(c) not in (EosTokenCriteria, MaxLengthCriteria)),
    )


def _new_tokens(requested: int | None, longest: int | None, prompt_length: int, context: int | None) -> int:
    """Limit of a row's new tokens: as requested, else up to ``max_length``, else the default within the context."""
    if requested is not None:
        return requested
    if longest is None:
        room = DEFAULT_NEW_TOKENS if context is None else context - prompt_length
        return max(1, min(DEFAULT_NEW_TOKENS, room))
    if longest <= prompt_length:
        raise InputError(
            f"max_length={longest} leaves no room after a prompt of {prompt_length} tokens; raise it or use "
            "max_new_tokens."
        )
    return longest - prompt_length
