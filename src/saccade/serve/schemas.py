"""Request bodies of the API: fields, ranges, and refusals that name the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from saccade.inputs.processor import check_fields, sampling_of
from saccade.serve.refusals import Json, Refusal, invalid

MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
MOST_TOOLS = 128

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Part(BaseModel):
    """An object of a body, all of whose fields are known."""

    model_config = ConfigDict(strict=True, extra="forbid")


class NoFields(Part):
    """Body of a route that takes none."""


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Extension(Part):
    """Saccade's own options of an answer."""

    trace: bool = False  # whether every chunk has its tokens with their marks, and the step's draft tree
    stats: bool = False  # whether the answer ends with its statistics


class JsonSchema(Part):
    """A schema in OpenAI's wrapping."""

    name: str | None = None
    description: str | None = None
    schema_: Json = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """Form of an answer; compact JSON unless white space is allowed."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    whitespace: bool | None = None


class StructuredOutputs(Part):
    """vLLM's forms of an answer, one of them."""

    json_: str | Json | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None


class Structure(NamedTuple):
    """Form that an answer must have."""

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any  # a schema, an expression, a list of texts, or a grammar in Lark
    whitespace: bool = False  # whether JSON may have some between its parts


class Function(Part):
    """A function that the client can call for the model."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: Json | None = None  # a JSON schema; None: none
    strict: bool | None = None  # whether its calls follow the schema in any case

    @property
    def arguments(self) -> Json:
        """JSON schema of its arguments."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(Part):
    type: Literal["function"]
    function: Function


class NamedTool(Tool):
    """Choice of a function, by its name, that must be called."""


class AllowedTools(Part):
    """Functions, by their names, some of which may or must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(Part):
    """Choice among some of the tools, all of which the model is told of."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


@dataclass(frozen=True)
class CallPolicy:
    """Functions that an answer may or must call."""

    functions: Sequence[Function] = ()
    forced: Sequence[Function] = ()  # of one or more of which the answer consists, where there are any
    parallel: bool = True  # whether it may have several calls
    told: Sequence[Function] = ()  # those that the model is told of, where it may not call some of them

    @property
    def has_grammar(self) -> bool:
        return bool(self.forced or self.told) or any(function.strict for function in self.functions)

    @property
    def as_templates_take_them(self) -> list[Json]:
        tools = []
        for function in self.told or self.functions:
            about = {"name": function.name, "description": function.description or ""}
            tools.append({"type": "function", "function": {**about, "parameters": function.arguments}})
        return tools


class PredictedText(Part):
    type: Literal["text"]
    text: str


class PredictedContent(Part):
    """The answer that the client expects, in OpenAI's form."""

    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Decoding(BaseModel):
    """Fields that both endpoints share. Null is the same as a field left out."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count = 1
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field([])
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({})
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    echo: bool = False  # whether the answer begins with the text that it continues
    speculation: str | Json | None = None  # `off`
    saccade: Extension = Extension()  # see `Extension`
    exact: bool = False  # whether the answer needs exact mode, in which its model must be loaded
    # prefixes are shared with requests of the same salt alone
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    @property
    def answers(self) -> int:
        return self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def structures(self) -> list[Structure]:
        """Forms that the answer must have, of which a request has one at most."""
        form, outputs = self.response_format, self.structured_outputs
        schemas = [self.guided_json, outputs.json_, {"type": "object"} if outputs.json_object else None]
        found = [Structure("json", schema) for schema in schemas if schema is not None]
        if form.type != "text":
            schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
            found.append(Structure("json", schema, bool(form.whitespace)))
        for kind in ("regex", "choice", "grammar"):
            values = (getattr(self, f"guided_{kind}"), getattr(outputs, kind))
            found += [Structure(kind, value) for value in values if value is not None]
        return found


class Prompting(BaseModel):
    """Fields that decide the prompt of a conversation."""

    messages: Annotated[list[Json], Field(min_length=1, max_length=10_000)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Json = Field({})
    reasoning_effort: str | None = None  # a variable of chat templates
    num_frames: Count | None = None
    fps: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None

    @property
    def policy(self) -> CallPolicy:
        """What the answer may or must call."""
        if not self.tools or self.tool_choice == "none":
            return CallPolicy()
        mode, functions = self.tool_choice, [tool.function for tool in self.tools]
        if isinstance(mode, NamedTool):
            named = [function for function in functions if function.name == mode.function.name]
            return CallPolicy(functions, named, parallel=False)
        allowed = functions
        if isinstance(mode, AllowedChoice):
            names = [tool.function.name for tool in mode.allowed_tools.tools]
            allowed, mode = [function for function in functions if function.name in names], mode.allowed_tools.mode
        told = functions if len(allowed) < len(functions) else ()
        return CallPolicy(allowed, allowed if mode == "required" else (), self.parallel_tool_calls, told)

    @property
    def has_media(self) -> bool:
        """Whether a message has parts besides text."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return any(not isinstance(part, Mapping) or str(part.get("type")) not in TEXTS for part in parts)


class ChatRequest(Decoding, Prompting):
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    prediction: PredictedContent | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] = -1  # of each thought; -1: no limit

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives with their log-probabilities per token; None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(Decoding):
    """Body of ``/v1/completions``: prompts as they are, without a chat template."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    best_of: Count | None = None
    policy: ClassVar[CallPolicy] = CallPolicy()  # it calls nothing

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if is_one else list(prompt)

    @property
    def answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


AnyRequest = ChatRequest | CompletionRequest


class TextToTokenize(Part):
    """Body of ``/tokenize`` for a text without chat template."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ChatToTokenize(Prompting, Part):
    """Body of ``/tokenize`` for a conversation."""

    model: str | None = None
    add_special_tokens: Literal[False] = False  # besides the template's
    return_token_strs: bool = False


class DetokenizeRequest(Part):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


IDLE: dict[str, Sequence[Any] | None] = {
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier")),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")),
    **dict.fromkeys(("request_id", "client_metadata")),
    **dict.fromkeys(("functions", "bad_words", "allowed_token_ids", "logits_processors"), ([],)),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "return_token_ids", "background"), (False,)),
    **dict.fromkeys(("audio", "web_search_options", "prompt_logprobs", "chat_template", "documents"), ()),
    **dict.fromkeys(("conversation", "prompt", "moderation", "prediction"), ()),
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens", "include_reasoning", "detokenize"), (True,)
    ),
    **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs"), ({},)),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "length_penalty": (1,),
    "priority": (0,),
    "suffix": ("",),
    "speed": ("standard",),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}
"""Fields of OpenAI, Anthropic and vLLM that are not supported -> the values that change no answer; None: all."""

Body = TypeVar("Body", bound=Decoding)
Kind = TypeVar("Kind", bound=BaseModel)


def checked(kind: type[Body], fields: Json | bytes, others: Sequence[str] = ()) -> Body:
    """Check the body of a request for an answer; ``others`` are names that may be meant besides the kind's own.

    A field that is neither one of the kind's nor changes nothing is refused.
    """
    body = validated(kind, fields)
    for name, value in (body.model_extra or {}).items():
        if name not in IDLE:
            raise unknown(name, [*kind.model_fields, *others])
        values = IDLE[name]
        if values is not None and value not in values:
            raise invalid(f"The field {name} is not supported here; leave it out.", name, "unsupported_parameter")
    _check_together(body)
    return body


def unknown(name: str, known: Iterable[str], what: str = "field") -> Refusal:
    """Refusal of a field, or a parameter, with the one that may be meant."""
    close = get_close_matches(name, list(known), 1, 0.85) if len(name) < 50 else []
    advice = f"{close[0]} may be meant" if close else "leave it out"
    return invalid(f"The {what} {name[:100]} is unknown; {advice}.", name[:100], "unknown_parameter")


def refuse_renamed(fields: Iterable[str], names: Mapping[str, str]) -> None:
    """Refuse fields of chat requests that an API has by other names."""
    for name in fields:
        if name in names:
            raise invalid(f"The field {name} is unknown; {names[name]} may be meant.", name, "unknown_parameter")


def text_field(fields: Any, name: str, where: str) -> str:
    """A text among the fields of an object, which is at ``where`` of the body."""
    text = fields.get(name) if isinstance(fields, Mapping) else None
    if not isinstance(text, str):
        raise invalid(f"{where}.{name} must be text.", f"{where}.{name}")
    return text


def prompting(kind: type[Kind], content: bytes) -> Kind:
    """Check the body of a request that counts, which has the fields that decide a prompt alone."""
    body = validated(kind, content)
    for name in (body.model_extra or {}).keys() - Prompting.model_fields.keys() - IDLE.keys():
        raise unknown(name, kind.model_fields)
    return body


def to_tokenize(content: bytes) -> TextToTokenize | ChatToTokenize:
    """Check the body of ``/tokenize``."""
    fields = _object(content)
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        raise invalid("Give either prompt or messages.", "prompt")
    if fields.get("messages") is None:
        return validated(TextToTokenize, fields)
    body = validated(ChatToTokenize, fields)
    check_conversation(body)
    return body


def _object(content: Mapping[str, Any] | bytes) -> Mapping[str, Any]:
    try:
        fields = from_json(content, allow_inf_nan=False) if isinstance(content, bytes) else content
    except ValueError as problem:
        raise invalid(f"The body is not valid JSON ({str(problem)[:200]}); send one object.") from None
    if not isinstance(fields, Mapping):
        raise invalid("The body must be a JSON object, such as one with model and messages.")
    return fields


def validated(kind: type[Kind], content: Mapping[str, Any] | bytes) -> Kind:
    """Check fields, or those of a body, one by one; null is the same as a field left out."""
    try:
        return kind.model_validate({name: value for name, value in _object(content).items() if value is not None})
    except ValidationError as problem:
        raise _wrong(problem, kind) from None


def _wrong(problem: ValidationError, kind: type[BaseModel]) -> Refusal:
    """Refusal that names the first wrong field, with all forms that it may have."""
    errors = []
    for error in problem.errors(include_url=False, include_input=False, include_context=False):
        places = [str(place) for place in error["loc"]]
        form = next((i for i, place in enumerate(places) if place in _JSON_FORMS or "[" in place), len(places))
        errors.append((".".join(places[:form])[:200], error))
    path, first = errors[0]
    field = path.partition(".")[0]
    if field in EXPECTED:
        return invalid(f"The field {field} is wrong: expected {EXPECTED[field]}.", field)
    if first["type"] == "missing":
        return invalid(f"The field {path} is missing.", path)
    if first["type"] == "extra_forbidden":
        return unknown(path, kind.model_fields)
    begin = "Input should be "
    forms = [_FORMS.get(error["type"], error["msg"].removeprefix(begin)) for where, error in errors if where == path]
    words = (begin if first["msg"].startswith(begin) else "") + " or ".join(dict.fromkeys(forms))
    return invalid(f"The field {path} is wrong: {words}.", path)


EXPECTED = {
    "tool_choice": "none, auto or required, or an object with type function and function.name, or with type "
    "allowed_tools, allowed_tools.mode (auto or required) and allowed_tools.tools",
    "prediction": "an object with type content, and with content, which is a string or a list of parts of type text",
}
"""Fields of several forms -> all of them."""
_JSON_FORMS = ("str", "bool", "int", "float")
"""Forms of a field in pydantic's places, after the client's own keys and indices."""
_FORMS = {"model_type": "an object", "dict_type": "an object"}  # kinds of pydantic's errors -> the form in JSON's words


def _check_together(body: Decoding) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream: true; leave it out, or stream.", "stream_options")
    if len(body.stops) > MOST_STOPS or any(not stop or len(stop) > 1000 for stop in body.stops):
        raise invalid(f"The field stop takes up to {MOST_STOPS} strings of 1 to 1000 characters; shorten it.", "stop")
    form = body.response_format
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise invalid("response_format needs json_schema exactly when its type is json_schema.", "response_format")
    if len(body.structures) > 1:
        raise invalid(
            "response_format, structured_outputs and the guided fields give the answer more than one form; keep one.",
            "structured_outputs",
        )
    if body.ignore_eos and body.structures:
        raise invalid(
            "ignore_eos would go on after the end of the JSON; leave it or response_format out.", "ignore_eos"
        )
    if isinstance(body, ChatRequest):
        check_conversation(body)
        if body.tools and body.ignore_eos:
            raise invalid("ignore_eos would go on after the calls; leave it or tools out.", "ignore_eos")
        if body.echo and not body.continue_final_message:
            raise invalid("echo repeats the message that is continued; it needs continue_final_message: true.", "echo")
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs needs logprobs: true; give both or none.", "top_logprobs")
        if len({body.max_tokens, body.max_completion_tokens} - {None}) > 1:
            raise invalid("max_tokens and max_completion_tokens differ; give one of them.", "max_tokens")
        body.max_tokens = body.max_tokens or body.max_completion_tokens
    if isinstance(body, CompletionRequest) and body.best_of not in (None, body.n):
        raise invalid("best_of other than n is not supported; leave it out.", "best_of")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise invalid("echo with logprobs needs those of the prompt, which are not supported; leave one out.", "echo")


def check_conversation(body: Prompting) -> None:
    """Check the fields of a conversation against each other."""
    names = [tool.function.name for tool in body.tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise invalid(f"tools has {twice} twice; give every function a name of its own.", "tools")
    choice = body.tool_choice
    chosen: list[Tool] = [choice] if isinstance(choice, NamedTool) else []
    if isinstance(choice, AllowedChoice):
        chosen = choice.allowed_tools.tools
    unknown = next((tool.function.name for tool in chosen if tool.function.name not in names), None)
    if unknown is not None:
        raise invalid(f"tool_choice names {unknown[:60]!r}, which is not among the tools.", "tool_choice")
    if choice == "required" and not names:
        raise invalid("tool_choice is required, but there are no tools; give some, or leave it out.", "tool_choice")
    if body.continue_final_message and body.messages[-1].get("role") != "assistant":
        raise invalid("continue_final_message needs a last message of the assistant.", "continue_final_message")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other.", "continue_final_message")
    reserved = sorted(RESERVED & body.chat_template_kwargs.keys())
    if reserved:
        raise invalid(f"chat_template_kwargs cannot set {reserved[0]}; leave it out.", "chat_template_kwargs")


RESERVED = {
    *("messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("add_generation_prompt", "continue_final_message", "processor_kwargs"),
}
"""Arguments of transformers' `apply_chat_template` that are no variables of templates, or have fields of their own."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of requests -> roles of chat templates."""
MESSAGE = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content", "function_call")
"""Fields of messages, the reasoning's by vLLM's two names."""
MEDIA = {"image": {"image_url", "input_image"}, "video": {"video_url", "input_video"}}
"""Kinds of media -> types of parts."""
TEXTS = {"text", "input_text", "output_text", "refusal"}


def conversation(messages: Sequence[Json]) -> list[Json]:
    """Return messages for `InputProcessor.load_media`, which reads their media as of clients."""
    return [template_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def template_message(message: Json, where: str) -> Json:
    """Return a message as chat templates take it; refusals name it by its place in the request."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}.", f"{where}.role")
    if message.get("function_call"):
        raise invalid(f"{where}.function_call is of an older form; give tool_calls.", where)
    for name in message.keys() - MESSAGE:
        if get_close_matches(name, MESSAGE, 1, 0.85):  # the rest is what clients keep beside answers
            raise replace(unknown(f"{where}.{name}", [f"{where}.{known}" for known in MESSAGE]), param=where)
    made: Json = {"role": ROLES[role]}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if isinstance(message.get(name), str):
            made["reasoning_content" if name == "reasoning" else name] = message[name]
    if role == "tool" and "tool_call_id" not in made:
        raise invalid(f"{where}.tool_call_id is missing; give the id of the call that this answers.", where)
    content = message.get("content")
    if message.get("tool_calls"):
        made["tool_calls"] = _calls(message["tool_calls"], where)
        content = content or ""
    if role == "assistant" and "content" in message:
        content = content or ""  # of an answer that is a thought alone, for one
    if content is None:
        raise invalid(f"{where}.content is missing; give text, or a list of parts.", f"{where}.content")
    if isinstance(content, str):
        return {**made, "content": content}
    if not isinstance(content, list) or not content:
        raise invalid(f"{where}.content must be text or a list of parts.", f"{where}.content")
    return {**made, "content": [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]}


def _calls(calls: Any, where: str) -> list[Json]:
    """Calls of a message in the form that chat templates take, with their arguments as an object."""
    made = []
    for number, call in enumerate(calls if isinstance(calls, list) else [None]):
        place = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(f"{place} must be an object with id, type and function.", place)
        arguments = arguments_of(function.get("arguments") or "{}")
        if arguments is None:
            raise invalid(f"{place}.function.arguments must be a JSON object as text.", place)
        about = {"name": function["name"], "arguments": arguments}
        made.append({"id": str(call.get("id", "")), "type": "function", "function": about})
    return made


def arguments_of(text: Any) -> Json | None:
    """Arguments of a call, those that it got to where it was cut; None where they are no object in JSON."""
    try:
        arguments = from_json(text, allow_partial="trailing-strings")
    except (ValueError, TypeError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _part(part: Any, where: str) -> Json:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in TEXTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise invalid(f"{where}.text must be text.", f"{where}.text")
        return {"type": "text", "text": text}
    for medium, kinds in MEDIA.items():
        if isinstance(kind, str) and kind in kinds:
            check_fields(part, medium)
            source = part.get(f"{medium}_url")
            url = source.get("url") if isinstance(source, Mapping) else source
            if not isinstance(url, str) or not url:
                raise invalid(f"{where}.{medium}_url.url is missing; give a data: URI.", where)
            return {"type": medium, medium: url, **(sampling_of(part) if medium == "video" else {})}
    raise invalid(f"{where}.type must be text, image_url or video_url.", f"{where}.type")
