"""A row: its options as `generate` resolves them, its request, and its output, which ends as plain decoding does."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from saccade.draft.prediction import Prediction
from saccade.draft.request_drafts import MOST, RequestDrafts
from saccade.errors import InputError
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import MediaOptions
from saccade.output import FinishReason, Mark, Output, Stats, TicketChunk, Times
from saccade.processors import criterion_of_row, of_row
from saccade.target_model.adapter import Target
from saccade.verify.rule import RowProcessing
from saccade.wording import first_line, meant

DEFAULT_NEW_TOKENS = 256  # limit when neither the caller nor the checkpoint sets one

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
    do_sample: bool = False  # sampling instead of greedy decoding


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
) -> list[RowPlan]:
    """Resolve every row's options against the checkpoint's defaults, by the model's own code; in any thread."""
    model = target.model
    requested = options.pop("eos_token_id", None)
    if requested is None:
        requested = getattr(generation_config, "eos_token_id", None)
    with _RESOLVING, _refusals():
        ends = ends_of(model, tokenizer, requested)
        config, unknown = model._prepare_generation_config(generation_config, **_check_ranges(options))
    for name in unknown:
        if name in ELSEWHERE:
            raise InputError(f"The option {name} is called {ELSEWHERE[name]} here, as in `generate`; give that.")
    if unknown:
        known = [*vars(config), *MediaOptions.__dataclass_fields__]
        names = ", ".join(f"{name}{meant(name, known)}" for name in sorted(unknown))
        raise InputError(
            f"Unknown generation option{'s' if len(unknown) > 1 else ''} {names}; expected options of Hugging Face's "
            "GenerationConfig. (Options of the method belong to saccade.load or VLM.using.)"
        )
    check_options(config)
    sources = (options.get("max_length"), getattr(generation_config, "max_length", None))
    # Not the resolved one, which defaults to `generate`'s 20.
    longest = next((n for n in (*sources, model.generation_config.max_length) if n is not None), None)
    limits = [_new_tokens(config.max_new_tokens, longest, len(p), target.traits.limits.context) for p in prompts]
    rows = []
    for index, prompt in enumerate(prompts):
        config.max_new_tokens = limits[index]
        config.max_length = len(prompt) + limits[index]
        if config.min_new_tokens is not None:
            config.min_length = len(prompt) + config.min_new_tokens
        processors = [of_row(p, index, len(prompts)) for p in logits_processor]
        criteria = [criterion_of_row(c, index, len(prompts)) for c in stopping_criteria]
        allowed = prefix_allowed_tokens_fn and _allowed_in(prefix_allowed_tokens_fn, index)
        _settle(config, ends, processors)
        with _RESOLVING, _refusals():
            rows.append(_row_plan(target, config, prompt, processors, allowed, criteria, tokenizer))
    return rows


def sampling_of(defaults: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of sampling by a checkpoint's GenerationConfig and a caller's options; empty for greedy decoding."""
    settings = {
        "do_sample": False,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
        "min_p": None,
    }
    for name in settings:
        for value in (getattr(defaults, name, None), options.get(name)):
            if value is not None:
                settings[name] = value
    if not settings.pop("do_sample"):
        return {}
    return {name: value for name, value in settings.items() if value is not None}


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
    others = [c for c in stopping if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
    return RowPlan(
        max_new_tokens=config.max_new_tokens,
        eos=frozenset(config.eos_token_id or ()),
        processors=tuple(resolved),
        criteria=tuple(_behind(config.min_length or 0, c) for c in others),
        do_sample=bool(config.do_sample),
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


@dataclass(frozen=True, slots=True)
class Request:
    """Request of one row."""

    prompt: Prompt  # the target's prompt
    draft_prompt: Prompt | None = None  # the drafter's; the target's prompt when None
    seed: int = 0  # of the row's random generator, when sampling
    prediction: tuple[int, ...] = ()  # the expected answer, which drafts are copied from
    salt: str = ""  # what caches hold is reused by requests of the same salt alone; see `salted`
    is_last: bool = False  # whether no later request will have that salt

    def salted(self, salt: str, is_last: bool = False) -> Request:
        """The same request with a salt, which keeps its prefixes and the features of its media apart."""
        draft_prompt = self.draft_prompt and self.draft_prompt.salted(salt)
        return replace(self, prompt=self.prompt.salted(salt), draft_prompt=draft_prompt, salt=salt, is_last=is_last)

    @property
    def drafter_prompt(self) -> Prompt:
        """The drafter's prompt."""
        return self.draft_prompt or self.prompt


class Row:
    """A row from its request to its end."""

    def __init__(
        self, request: Request, plan: RowPlan, device: torch.device, vocab_size: int = sys.maxsize, drafts: bool = True
    ) -> None:
        self.request, self.plan, self.do_sample = request, plan, plan.do_sample
        self.ids = list(request.prompt.ids)  # prompt and emitted tokens; the last one is the root of the next tree
        self.output: list[int] = []  # emitted tokens
        self.marks: list[Mark] = []  # origin of each
        self.stats = Stats(prompt_tokens=len(self.ids))  # counts so far
        self.error: BaseException | None = None  # cause of the row's failure; None without one
        self.slot: int | None = None  # of the batch's caches; None before admission and after the row's end
        self.overtaken = 0  # how often others have gone ahead of it, for memory or with their prompts
        self.steps: list[TicketChunk] = []  # unread steps, oldest first; readers remove them
        self.processing = RowProcessing(plan.processors, plan.eos)
        self.request_drafts: RequestDrafts | None = None  # of its grammar and its prediction, where it has one
        prediction = Prediction(request.prediction, vocab_size, plan.eos) if request.prediction else None
        if drafts and (prediction is not None or self.processing.grammars):
            self.request_drafts = RequestDrafts(self.processing, prediction, len(self.ids))
        self.generator = torch.Generator().manual_seed(request.seed)  # random generator, on the host
        self._device = device
        self.done = False  # whether it has ended, for any reason
        self._reason: FinishReason | None = None
        self.submitted = time.perf_counter()
        self._begun = self._ended = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted; 0 once the row has ended."""
        return 0 if self.done else self.plan.max_new_tokens - len(self.output)

    @property
    def max_entries(self) -> int:
        """Upper bound of the cache entries of prompt and answer."""
        return len(self.request.prompt) + self.plan.max_new_tokens

    @property
    def request_nodes(self) -> int:
        """Upper bound of the nodes that its request adds to a drafter's trees."""
        return 0 if self.request_drafts is None else MOST

    def begin(self, slot: int) -> None:
        """Record the row's admission."""
        self.slot, self.overtaken = slot, 0
        self._begun = time.perf_counter()

    def record_pass(self, accepted: int) -> None:
        """Record one verification pass after prefill."""
        stats = self.stats
        stats.target_passes += 1
        histogram = stats.accepted_histogram
        histogram.extend([0] * (accepted + 1 - len(histogram)))
        histogram[accepted] += 1

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add stage times of a step in which the row took part."""
        for name, spent in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def emit(self, tokens: Sequence[int], marks: Sequence[Mark]) -> list[int]:
        """Append tokens with their marks up to the row's end; return those that plain decoding would emit."""
        emitted: list[int] = []
        if not self.output:
            self.stats.first_token_seconds = time.perf_counter() - self.submitted
        for token, mark in zip(tokens, marks, strict=True):
            self.ids.append(token)
            self.output.append(token)
            self.marks.append(mark)
            emitted.append(token)
            self.stats.accepted_tokens += mark != "target"
            self.stats.loosened_tokens += mark in ("loose", "shifted")
            reason: FinishReason | None = None
            if token in self.plan.eos:
                reason = "eos"
            elif self.plan.criteria and self._is_stopped():
                reason = "stop"
            elif len(self.output) >= self.plan.max_new_tokens:
                reason = "length"
            if reason is not None:
                self.end(reason)
                break
        self.stats.new_tokens = len(self.output)
        return emitted

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Record the row's end."""
        self.done, self._reason, self.error = True, reason, error
        self._ended = time.perf_counter()

    def _is_stopped(self) -> bool:
        """Whether a stopping criterion ends the row after its last token."""
        ids, scores = torch.tensor([self.ids], device=self._device), cast("Any", None)
        return any(bool(torch.as_tensor(criterion(ids, scores)).any()) for criterion in self.plan.criteria)

    def finish(self, lossless: bool = True) -> Output:
        """Return the output so far."""
        now = self._ended or time.perf_counter()
        begun = self._begun or now
        self.stats.queue_seconds = begun - self.submitted
        self.stats.times = Times(**self._seconds, total=now - begun)
        return Output(
            tokens=self.output,
            marks=self.marks,
            finish_reason=self._reason or "interrupted",
            lossless=lossless,
            stats=self.stats,
        )


def ends_of(model: Any, tokenizer: Any, requested: Any = None) -> frozenset[int]:
    """Ids that end an answer: those requested, else the generation configuration's and the special ones of others.

    Transformers' `generate` ends at the generation configuration's alone. A model's configuration and its tokenizer may
    name more. The configuration's class may as well, by a default that is a word in a checkpoint's own vocabulary.
    """
    if requested is not None:
        return _ids(requested)
    ends = _ids(model.generation_config.eos_token_id)
    if tokenizer is None:
        return ends
    for part in (model.config, model.config.get_text_config(decoder=True), tokenizer):
        for end in _ids(getattr(part, "eos_token_id", None)):
            if tokenizer.decode([end]) != tokenizer.decode([end], skip_special_tokens=True):
                ends |= {end}
    return ends


def _settle(config: Any, ends: frozenset[int], processors: Iterable[Any]) -> None:
    """Give a row's generation configuration its ends, or those of its grammar, which nothing else ends.

    The table of what happens where ends meet is in docs/serve.md.
    """
    own = frozenset[int]()
    for processor in processors:
        if hasattr(processor, "ends"):  # a grammar's
            own |= processor.ends
            config.stop_strings = None
    config.eos_token_id = sorted(own or ends) or None


def _behind(minimum: int, criterion: Any) -> Any:
    """A criterion, which ends nothing up to a number of ids if it is one of stop strings."""
    if not isinstance(criterion, StopStringCriteria):
        return criterion
    return lambda ids, scores: ids.shape[1] > minimum and criterion(ids, scores)


def _ids(value: Any) -> frozenset[int]:
    return frozenset(() if value is None else torch.as_tensor(value).flatten().tolist())
