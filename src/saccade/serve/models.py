"""Served models: the method of every request, its decoding options, and jobs from bodies."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from saccade import methods
from saccade.draft.heads.mtp import mtp_config
from saccade.engine.row import ends_of
from saccade.engine.row import plan as plan_rows
from saccade.errors import SaccadeError
from saccade.grammar import Rollback, json_schema, lark
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import InputProcessor, MediaOptions, RowInput
from saccade.methods.settings import GROUPS
from saccade.serve.answers import Choice, StopText
from saccade.serve.configuration import Limits, ModelEntry
from saccade.serve.logit_processors import LogprobRecorder, Penalties, ThoughtBudget
from saccade.serve.owner import Event, Job, Planned
from saccade.serve.refusals import Json, invalid
from saccade.serve.replies import ReplyParser
from saccade.serve.schemas import (
    AnyRequest,
    ChatRequest,
    ChatToTokenize,
    DetokenizeRequest,
    Prompting,
    TextToTokenize,
    conversation,
)
from saccade.serve.tools import ReplyFormat, structure_rule
from saccade.serve.workers import PromptWorkers
from saccade.wording import unknown_name

if TYPE_CHECKING:
    from saccade.vlm import VLM

CHARACTERS_PER_TOKEN = 100
"""No tokenizer's tokens are longer on average: text beyond it is refused before it is tokenized."""
GREEDY_BELOW = 1e-5  # temperatures below this are greedy decoding, as in vLLM; smaller ones overflow
MOST_SCHEMAS = 64
MOST_SCHEMA_BYTES = 64 * 1024
MOST_METHODS = 64  # composed methods that are remembered per model


class Setting(NamedTuple):
    """A method with its options, as one request uses it."""

    key: tuple[str, str]  # of its lane
    vlm: VLM  # the model with this method


class ServedModel:
    """A loaded model, its profiles and the methods that fit."""

    def __init__(
        self, entry: ModelEntry, vlm: VLM, limits: Limits, reading: MediaOptions, workers: PromptWorkers | None = None
    ) -> None:
        self.entry, self.vlm, self._reading, self._workers = entry, vlm, reading, workers
        self.created = int(time.time())
        self.label = vlm.adapter or entry.label  # in requests
        self.profiles = {"off": {"method": "plain"}, **entry.profiles}  # that requests may choose besides the default
        self.planner = Planner(vlm, limits)
        self._most_option = limits.max_option
        self._composed = lru_cache(MOST_METHODS)(self._compose)
        self._lock = threading.Lock()
        for name in self.profiles:
            self.setting(name)  # a profile that does not fit the loaded parts is a mistake of the configuration

    def labels(self, vlm: VLM) -> tuple[str, str, str]:
        """Values of `owner.LABELS` for answers of the model with a method."""
        return self.label, vlm.method, str(vlm.lossless).lower()

    @cached_property
    def open_methods(self) -> list[str]:
        """Methods of `saccade methods` that fit the loaded parts and that requests may choose."""
        config, fitting = self.vlm.target.config, list[str]()
        for name in methods.METHODS if self.entry.open_methods else ():
            with suppress(SaccadeError):
                if name == "mtp":  # whose weights are read when it is first asked for
                    mtp_config(config, config.name_or_path)
                else:
                    self.vlm.using(name)
                fitting.append(name)
        return fitting

    @property
    def lossy(self) -> list[str]:
        """Those of `profiles` and `open_methods` whose answers may differ from the target's own."""
        profiles = [name for name in self.profiles if not self.setting(name).vlm.lossless]
        return profiles + [name for name in self.open_methods if not methods.METHODS[name].lossless]

    def setting(self, speculation: str | Json | None) -> Setting:
        name, options = self._chosen(speculation)
        with self._lock:
            return self._composed(name, json.dumps(options, sort_keys=True))

    def _setting(self, body: AnyRequest) -> Setting:
        """The method of a request; errors as of `setting`, and 400 where it asks for exactness that it cannot have."""
        setting = self.setting(body.speculation)
        if body.exact and not self.vlm.target.exact:
            raise invalid(
                "exact: this model was not loaded in exact mode, which holds for all of its requests or none; leave it "
                "out, or start the server with --exact (exact = true under [[models]]).",
                "exact",
            )
        if body.exact and not setting.vlm.lossless:
            method = setting.vlm.method
            raise invalid(f"exact: the method {method} is lossy; choose another, or leave exact out.", "exact")
        return setting

    def _chosen(self, speculation: str | Json | None) -> tuple[str, Json]:
        if speculation is None:
            return "", {}
        options = {"method": speculation} if isinstance(speculation, str) else dict(speculation)
        name = options.pop("method", "")
        if not isinstance(name, str):
            raise invalid("speculation.method must be the name of a method.", "speculation.method")
        if name not in ("", *self.profiles) and (not self.entry.open_methods or name not in methods.METHODS):
            known = unknown_name(name[:60], [*self.profiles, *self.open_methods])
            raise invalid(f"This server has no method {known}.", "speculation.method")
        for option, value in options.items():
            self._check_option(name, option, value)
        return name, options

    def _check_option(self, name: str, option: str, value: Any) -> None:
        """Refuse options that name files or are too expensive; the method checks the rest."""
        where = f"speculation.{option[:60]}"
        if not self.entry.open_methods or name == "off":
            raise invalid(f"{where}: options of a method cannot be chosen here; leave it out.", where)
        known = next((group[option] for group in GROUPS.values() if option in group), None)
        if known is None or not (known.choices or isinstance(known.default, (bool, int, float))):
            raise invalid(f"{where} is no option that a request can choose; leave it out.", where)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > self._most_option:
            raise invalid(f"{where} may be at most {self._most_option} here; lower it.", where)
        if not isinstance(value, (str, bool, int, float)):
            raise invalid(f"{where} must be a number, a word, or true or false.", where)

    def _compose(self, name: str, settings: str) -> Setting:
        key, options = (self.label, f"{name} {settings}"), json.loads(settings)
        if not name and not options:
            return Setting(key, self.vlm)
        default = {"method": self.vlm.method, "head": self.entry.head, **self.entry.options}
        profile = dict(self.profiles.get(name, {"method": name})) if name else default
        return Setting(key, self.vlm.using(profile.pop("method"), **{**profile, **options}))

    # -- jobs ----------------------------------------------------------------------------------------------

    def jobs(self, body: AnyRequest, deliver: Callable[[int, Event], None], client: str | None = "") -> list[Job]:
        """Make the jobs of a request, ``n`` per prompt in order; decodes the media of a conversation.

        ``client`` is with whom cached prefixes are shared; empty: with all; None: with nobody.
        """
        setting, begun = self._setting(body), ""
        if isinstance(body, ChatRequest):
            options = self._template(body)
            expected = "" if body.prediction is None else body.prediction.text
            self._check_size(len(expected), "prediction")
            rows = [replace(self._row(body, setting.vlm, options), prediction=expected)]
            begun = self._begun(body, options)
        else:
            self._check_size(max(len(prompt) for prompt in body.prompts), "prompt")
            rows = [RowInput(self._raw(prompt), options=self._reading) for prompt in body.prompts]
        seed, jobs = secrets.randbits(62) if body.seed is None else body.seed, list[Job]()
        for row in rows:
            shared = setting.vlm.request(row, 0)
            for _ in range(body.n):
                request = replace(shared, seed=(seed + len(jobs)) & (2**63 - 1))
                if salt := _salt(client, body.cache_salt):
                    request = request.salted(salt, is_last=client is None)
                plan, send = partial(self.planner.plan, body, request.prompt, begun), partial(deliver, len(jobs))
                jobs.append(Job(setting.key, setting.vlm, request, plan(), plan, send, body.saccade.trace))
        return jobs

    def _template(self, body: Prompting) -> MediaOptions:
        """How a conversation is read, with the variables of its chat template."""
        variables = body.model_dump(include={"reasoning_effort"}, exclude_none=True) | body.chat_template_kwargs
        if body.policy.functions and self.planner.replies.reads_tools:
            variables["tools"] = body.policy.as_templates_take_them
        if body.continue_final_message:
            variables |= {"continue_final_message": True, "add_generation_prompt": False}
        elif body.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        return replace(self._reading, num_frames=body.num_frames, fps=body.fps, template_options=variables)

    def choices(self, body: AnyRequest, jobs: Sequence[Job]) -> list[Choice]:
        """Make the empty answers of a request's jobs."""
        chat, tokenizer = isinstance(body, ChatRequest), self.planner.replies.tokenizer
        choices = list[Choice]()
        for job in jobs:
            parser, hidden = self.planner.parser(body, job.planned.begun)
            about = (stops_of(body), chat, body.num_logprobs, body.saccade.trace)
            choice = Choice(tokenizer, *about, parser=parser, hidden=hidden, minimum=body.min_tokens)
            if body.echo:
                choice.text = self._echo(body, job.request.prompt)
            choices.append(choice)
        return choices

    def _begun(self, body: ChatRequest, options: MediaOptions) -> str:
        """Text of the answer that its prompt has: the chat template's for any answer, or the message to continue."""
        if self.planner.replies.is_plain:
            return ""
        turns = conversation(body.messages)
        if body.continue_final_message:
            return _text(turns[-1])
        turns = self.planner.replies.messages(turns, body.policy)
        return self.vlm.processor.generation_prompt(turns, options)

    def _echo(self, body: AnyRequest, prompt: Prompt) -> str:
        """The text that an answer continues: the last message's, or the prompt's."""
        if not isinstance(body, ChatRequest):
            return self.vlm.processor.decode(prompt.ids)
        return _text(conversation(body.messages)[-1])

    def _row(self, body: Prompting, vlm: VLM, options: MediaOptions) -> RowInput:
        """Input of a conversation; its media are decoded by a worker, where there are some."""
        tools = body.model_dump(include={"tools", "chat_template_kwargs"}, exclude_defaults=True).values()
        self._check_size(_characters(body.messages) + sum(map(len, map(str, tools))), "messages")
        turns = self.planner.replies.messages(conversation(body.messages), body.policy)
        if self._workers is not None and body.has_media:
            return self._workers.row(turns, _readers(vlm), options)
        return RowInput(self.vlm.processor.load_media(turns, options), options=options)

    def ids(self, body: Prompting) -> Sequence[int]:
        """Ids of a conversation's prompt."""
        vlm = self.setting("off").vlm
        return vlm.request(self._row(body, vlm, self._template(body)), 0).prompt.ids

    def tokenize(self, body: TextToTokenize | ChatToTokenize) -> Json:
        """Answer of ``/tokenize``, in vLLM's form."""
        processor = self.vlm.processor
        ids: Sequence[int]
        if isinstance(body, TextToTokenize):
            self._check_size(len(body.prompt), "prompt")
            special = {"text_as_text": self._reading.text_as_text, "add_special_tokens": body.add_special_tokens}
            ids = processor.encode(body.prompt, **special)
        else:
            ids = self.ids(body)
        strings = processor.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.planner.context, "tokens": list(ids), "token_strs": strings}

    def detokenize(self, body: DetokenizeRequest) -> Json:
        """Answer of ``/detokenize``: the text of any ids, control tokens included."""
        self._check_size(len(body.tokens), "tokens")
        if max(body.tokens, default=0) >= self.vlm.target.vocab_size:
            raise invalid(f"tokens: every id must be below {self.vlm.target.vocab_size}.", "tokens")
        return {"prompt": self.vlm.processor.tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)}

    def _check_size(self, characters: int, field: str) -> None:
        context = self.planner.context
        if context is not None and characters > CHARACTERS_PER_TOKEN * context:
            raise invalid(
                f"The text has {characters} characters, far more than this model's context of {context} tokens; "
                "shorten it.",
                field,
                "context_length_exceeded",
            )

    def _raw(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            prompt = list(self.vlm.processor.encode(prompt, text_as_text=self._reading.text_as_text))
        visual = set(self.vlm.target.family.visual_ids.values())
        size = self.vlm.target.vocab_size
        if any(not 0 <= token < size or token in visual for token in prompt):
            raise invalid(f"prompt: every token id must be from 0 to {size - 1}, and of text.", "prompt")
        return Prompt(tuple(prompt))


def stops_of(body: AnyRequest) -> Sequence[str]:
    """Stop strings of an answer; one that has a form is ended by it alone."""
    return () if body.structures or body.policy.forced else body.stops


class Planner:
    def __init__(self, vlm: VLM, limits: Limits) -> None:
        self._vlm, self._default, self._most = vlm, limits.default_max_tokens, limits.max_tokens
        self.context = vlm.target.traits.limits.context  # tokens; None without a limit
        self._tokenizer = vlm.processor.tokenizer
        template = vlm.processor.chat_template or getattr(self._tokenizer, "chat_template", None)
        texts = template.values() if isinstance(template, dict) else [template or ""]
        self.replies = ReplyFormat(self._tokenizer, "\n".join(texts))
        self._compiled = lru_cache(MOST_SCHEMAS)(self._compile)

    def plan(self, body: AnyRequest, prompt: Prompt, begun: str) -> Planned:
        (row,) = plan_rows(self._vlm.target, [prompt], tokenizer=self._tokenizer, **self.options(body, prompt, begun))
        recorder = None
        if body.num_logprobs is not None:
            recorder = LogprobRecorder(body.num_logprobs)
            row = replace(row, processors=(recorder, *row.processors))
        return Planned(row, recorder, begun)

    def options(self, body: AnyRequest, prompt: Prompt, begun: str) -> dict[str, Any]:
        """Return a request's options under the names of `saccade.stream.GenerationOptions`."""
        limit = self._limit(body, len(prompt))
        options: dict[str, Any] = {"max_new_tokens": limit, **self._sampling(body)}
        if body.min_tokens:
            if body.min_tokens > limit:
                raise invalid(f"min_tokens is {body.min_tokens}, above max_tokens of {limit}; lower it.", "min_tokens")
            options["min_new_tokens"] = body.min_tokens
        if body.repetition_penalty is not None:
            options["repetition_penalty"] = body.repetition_penalty
        size = self._vlm.target.vocab_size
        for name in body.logit_bias:
            if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= size:
                raise invalid(f"logit_bias: {name[:40]!r} is no token id below {size}.", "logit_bias")
        if body.logit_bias:
            options["sequence_bias"] = {(int(name),): float(value) for name, value in body.logit_bias.items()}
        processors: list[Any] = []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(Penalties(len(prompt), body.presence_penalty, body.frequency_penalty))
        ends = set(body.stop_token_ids)
        if any(end >= size for end in ends):
            raise invalid(f"stop_token_ids: {max(ends)} is no token id below {size}.", "stop_token_ids")
        grammar = self._grammar(body, begun)
        if grammar is not None:
            processors.append(grammar)
        if isinstance(body, ChatRequest) and body.thinking_token_budget >= 0:
            if self.replies.thought is None:
                raise invalid(
                    "thinking_token_budget: this model writes no thoughts, or its marks are unknown; leave it out.",
                    "thinking_token_budget",
                )
            hidden = self.parser(body, begun)[1]
            processors.append(ThoughtBudget(self.replies, body.thinking_token_budget, begun, hidden))
        if ends or body.ignore_eos:
            known = () if body.ignore_eos else ends_of(self._vlm.target.model, self._tokenizer)
            options["eos_token_id"] = sorted(ends.union(known))
        if processors:
            options["logits_processor"] = processors
        if stops := stops_of(body):
            parts = (len(prompt), len(prompt) + body.min_tokens, *self.parser(body, begun))
            options["stopping_criteria"] = [StopText(self._tokenizer, stops, *parts)]
        return options

    def parser(self, body: AnyRequest, begun: str) -> tuple[ReplyParser | None, frozenset[int]]:
        """Parser of an answer, None where all of it is content, and ids of tokens without a text."""
        policy, parser = body.policy, None
        hidden = frozenset(() if body.structures or policy.has_grammar else body.stop_token_ids)  # text in a grammar
        if isinstance(body, ChatRequest):
            parser = self.replies.parser(policy, begun)
        return parser, hidden | self.replies.dropped if parser else hidden

    def _grammar(self, body: AnyRequest, begun: str) -> Rollback | None:
        """Return the processor of what an answer may be; None where it may be anything."""
        policy, structure = body.policy, next(iter(body.structures), None)
        if structure is None and not policy.has_grammar:
            return None
        thinks = isinstance(body, ChatRequest) and self.replies.thought is not None
        is_whole = structure is not None and not policy.functions and not thinks  # of the answer
        if structure is not None and structure.kind == "grammar":
            if not is_whole:
                raise invalid(
                    "A grammar constrains the whole answer, which leaves no place for reasoning or tools; give a "
                    "schema, a regex or a choice.",
                    "structured_outputs",
                )
            return self._compiled(structure.value)
        if structure is not None and structure.kind == "json" and is_whole:
            schema = structure.value  # unsorted: answers follow the properties' order
            return self._compiled(schema if isinstance(schema, str) else json.dumps(schema), structure.whitespace)
        form = None if structure is None else partial(structure_rule, structure)
        return self._compiled(self.replies.grammar(policy, begun, form, thinks))

    def _compile(self, text: str, whitespace: bool | None = None) -> Rollback:
        """Compile a grammar, or a schema, whose JSON may or may not have white space."""
        if len(text) > MOST_SCHEMA_BYTES:
            raise invalid(f"The schema is longer than {MOST_SCHEMA_BYTES} bytes; shorten it.", "response_format")
        size = self._vlm.target.vocab_size
        if whitespace is None:
            return lark(text, self._tokenizer, size)
        return json_schema(text, self._tokenizer, size, whitespace=whitespace)

    def _limit(self, body: AnyRequest, prompt_length: int) -> int:
        if body.max_tokens is not None:
            if self._most is not None and body.max_tokens > self._most:
                raise invalid(f"This server answers with at most {self._most} tokens; lower max_tokens.", "max_tokens")
            return body.max_tokens
        most = min(self._default, self._most or self._default)
        return most if self.context is None else max(min(most, self.context - prompt_length), 1)

    def _sampling(self, body: AnyRequest) -> dict[str, Any]:
        """Greedy decoding at temperature 0; sampling with any other sampling field; else the checkpoint's own."""
        defaults = self._vlm.target.model.generation_config
        if body.temperature is not None and body.temperature < GREEDY_BELOW:
            return {"do_sample": False}
        fields = ("temperature", "top_p", "top_k", "min_p")
        options = {name: value for name in fields if (value := getattr(body, name)) is not None}
        if options.get("top_k") == -1:
            options["top_k"] = 0
        if not options and not defaults.do_sample:
            return {"do_sample": False}
        if defaults.top_k is None:
            options.setdefault("top_k", 0)  # no limit, in place of `generate`'s silent 50
        return {"do_sample": True, **options}


def _salt(client: str | None, cache_salt: str | None) -> str:
    """Salt of a row's prefixes; empty where they are shared with everyone."""
    if client is None:
        return secrets.token_hex(16)
    if not client and not cache_salt:
        return ""
    return hashlib.blake2b(f"{client} {cache_salt or ''}".encode(), digest_size=16).hexdigest()


def _readers(vlm: VLM) -> list[InputProcessor]:
    """Processors of the prompts that `VLM.request` makes of media: the target's, and that of a drafter that sees."""
    draft = vlm.draft_model
    sees = draft is not None and vlm.drafts_from_prompts and family_of(draft.config).signature is not None
    return [vlm.processor, *([vlm.draft_processor] if sees and vlm.draft_processor is not None else [])]


def _text(message: Json) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _characters(messages: Sequence[Json]) -> int:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    texts = [*contents, *(part.get("text") for part in parts if isinstance(part, Mapping))]
    calls = sum(len(str(message.get("tool_calls", ""))) for message in messages)
    return calls + sum(len(text) for text in texts if isinstance(text, str))
