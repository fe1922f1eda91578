"""Programs of `test_client_packages.py`, which run where the packages are: ``client_programs.py NAME URL ...``.

Each asks the model `pocket` as the package's own documentation does. It calls no functions of its own accord, so calls
are demanded.
"""

import asyncio
import base64
import json
import os
import struct
import sys
import zlib
from typing import Any, Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # which it would download
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "true"
QUESTION = "Read the values from the bar chart."
ASKED: Any = [{"role": "user", "content": QUESTION}]
KEY, MOST = "none", 200


class Bar(BaseModel):
    """Report a bar of the chart."""

    model_config = ConfigDict(extra="forbid")  # or a model that has learnt no JSON goes on with fields of its own

    colour: Literal["red", "green", "blue"] = Field(description="of the bar")
    height: int = Field(ge=0, le=9)
    is_last: bool


TOOLS: Any = [pydantic_function_tool(Bar)]


def openai(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key=KEY, max_retries=0)


def expected(url: str) -> str:
    """The answer to the question."""
    answer = openai(url).chat.completions.create(model="pocket", messages=ASKED, max_tokens=MOST)
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def check(arguments: Any) -> None:
    """Check the arguments of a call."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert Bar.model_validate(values).model_dump() == values


def openai_structured(url: str) -> None:
    chat, asked = openai(url).chat.completions, {"model": "pocket", "messages": ASKED, "max_tokens": MOST}
    bar = chat.parse(**asked, response_format=Bar).choices[0].message.parsed
    assert isinstance(bar, Bar)
    with chat.stream(**asked, response_format=Bar) as stream:
        assert [event.parsed for event in stream if event.type == "content.done"] == [bar]


def openai_tools(url: str) -> None:
    chat, asked = openai(url).chat.completions, {"model": "pocket", "max_tokens": MOST, "tools": TOOLS}
    for choice in ("required", {"type": "function", "function": {"name": "Bar"}}):
        message = chat.parse(**asked, messages=ASKED, tool_choice=choice).choices[0].message
        called = message.tool_calls[0].function.parsed_arguments
        assert isinstance(called, Bar)
        with chat.stream(**asked, messages=ASKED, tool_choice=choice) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert done[0].parsed_arguments == called
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "recorded"}
    answer = chat.parse(**asked, messages=[*ASKED, message, result], tool_choice="none").choices[0].message
    assert answer.content
    assert not answer.tool_calls


def openai_responses(url: str) -> None:
    responses, asked = openai(url).responses, {"model": "pocket", "max_output_tokens": MOST}
    assert responses.create(**asked, input=QUESTION).output_text == expected(url)
    bar = responses.parse(**asked, input=QUESTION, text_format=Bar).output_parsed
    assert isinstance(bar, Bar)
    with responses.stream(**asked, input=QUESTION, text_format=Bar) as stream:
        assert [event.parsed for event in stream if event.type == "response.output_text.done"] == [bar]
    found = responses.parse(**asked, input=QUESTION, tools=TOOLS, tool_choice="required")
    assert isinstance(found.output[0].parsed_arguments, Bar)
    result: Any = {"type": "function_call_output", "call_id": found.output[0].call_id, "output": "recorded"}
    assert responses.create(**asked, input=[result], previous_response_id=found.id).output_text


def langchain(url: str, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="pocket", base_url=url, api_key=KEY, max_tokens=MOST, max_retries=0, **options)


def langchain_chat(url: str) -> None:
    text = expected(url)
    for options in ({}, {"use_responses_api": True}):
        model = langchain(url, **options)
        answer = model.invoke(QUESTION)
        assert answer.text == "".join(chunk.text for chunk in model.stream(QUESTION)) == text
        assert answer.usage_metadata["output_tokens"] > 0
        assert [each.text for each in model.batch([QUESTION, QUESTION])] == [text, text]


def langchain_tools(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    for options in ({}, {"use_responses_api": True}):
        for choice in ("required", "Bar"):
            model = langchain(url, **options).bind_tools([Bar], tool_choice=choice)
            answer = model.invoke(QUESTION)
            check(answer.tool_calls[0]["args"])
            first, *more = model.stream(QUESTION)
            assert sum(more, first).tool_calls[0]["args"] == answer.tool_calls[0]["args"]
        result = ToolMessage("recorded", tool_call_id=answer.tool_calls[0]["id"])
        assert langchain(url, **options).invoke([HumanMessage(QUESTION), answer, result]).text


def langchain_structured(url: str) -> None:
    for options in ({}, {"use_responses_api": True}):
        for method in ("function_calling", "json_schema"):
            model = langchain(url, **options).with_structured_output(Bar, method=method)
            assert isinstance(model.invoke(QUESTION), Bar), (method, options)


def litellm(url: str) -> dict[str, Any]:
    return {"model": "openai/pocket", "api_base": url, "api_key": KEY, "num_retries": 0}


def litellm_chat(url: str) -> None:
    from litellm import completion, stream_chunk_builder

    for model in ("openai/pocket", "hosted_vllm/pocket"):
        asked = {**litellm(url), "model": model, "messages": ASKED, "max_tokens": MOST}
        text = completion(**asked).choices[0].message.content
        chunks = list(completion(**asked, stream=True))
        assert stream_chunk_builder(chunks, messages=ASKED).choices[0].message.content == text == expected(url)
        check(completion(**asked, response_format=Bar).choices[0].message.content)


def litellm_tools(url: str) -> None:
    from litellm import completion, stream_chunk_builder

    asked = {**litellm(url), "max_tokens": MOST, "tools": TOOLS}
    message = completion(**asked, messages=ASKED, tool_choice="required").choices[0].message
    check(message.tool_calls[0].function.arguments)
    chunks = list(completion(**asked, messages=ASKED, tool_choice="required", stream=True))
    streamed = stream_chunk_builder(chunks, messages=ASKED).choices[0].message
    assert streamed.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "recorded"}
    answer = completion(**asked, messages=[*ASKED, message, result], tool_choice="none")
    assert answer.choices[0].message.content


def litellm_responses(url: str) -> None:
    from litellm import responses

    asked: Any = {**litellm(url), "input": QUESTION, "max_output_tokens": MOST}
    assert responses(**asked).output_text == expected(url)
    *_, last = responses(**asked, stream=True)
    assert last.type == "response.completed"
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    check(responses(**asked, tools=tools, tool_choice="required").output[0].arguments)


def llama_index(url: str, **options: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    kinds = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, "max_retries": 0}
    given = {"model": "pocket", "api_base": url, "api_key": KEY, "max_tokens": MOST, "temperature": 0.0}
    return OpenAILike(**given, **kinds, **options)


def llama_index_chat(url: str) -> None:
    from llama_index.core.llms import ChatMessage

    model, messages = llama_index(url), [ChatMessage(role="user", content=QUESTION)]
    text = model.chat(messages).message.content
    assert text == "".join(chunk.delta or "" for chunk in model.stream_chat(messages)) == expected(url)


def llama_index_tools(url: str) -> None:
    from llama_index.core.tools import FunctionTool

    def record(colour: Literal["red", "green", "blue"], height: Literal[1, 2, 3]) -> str:
        """Record a bar."""
        return f"{height} {colour}"

    tool, model = FunctionTool.from_defaults(record), llama_index(url)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    *_, last = model.stream_chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    assert model.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
    called = model.predict_and_call([tool], user_msg=QUESTION, tool_required=True)
    assert str(called) == record(**call.tool_kwargs)


def llama_index_structured(url: str) -> None:
    from llama_index.core.prompts import PromptTemplate

    for by_schema in (False, True):
        model = llama_index(url, should_use_structured_outputs=by_schema)
        assert isinstance(model.structured_predict(Bar, PromptTemplate("{it}"), it=QUESTION), Bar)


def anthropic(url: str, key: str = KEY) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)


def anthropic_messages(url: str) -> None:
    messages, asked = anthropic(url).messages, {"model": "pocket", "messages": ASKED, "max_tokens": MOST}
    answer = messages.create(**asked, system=[{"type": "text", "text": ""}])
    assert answer.content[0].text == expected(url)
    assert answer.stop_reason == "end_turn"
    with messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected(url)
        whole = stream.get_final_message()
    used = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (answer, whole)]
    assert used == [messages.count_tokens(model="pocket", messages=ASKED).input_tokens] * 2
    long = [messages.create(**asked, system="Read everything exactly as it is. " * 9).usage for _ in range(2)]
    assert long[1].cache_read_input_tokens > 0
    assert len({each.input_tokens + each.cache_read_input_tokens for each in long}) == 1
    word = expected(url).split()[1]
    stopped = messages.create(**asked, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert [model.id for model in anthropic(url).models.list()] == ["pocket"]
    assert anthropic(url).models.retrieve("pocket").type == "model"
    sampled = messages.create(**asked, extra_body={"temperature": 0, "speculation": "off"})
    assert sampled.content[0].text == expected(url)
    assert anthropic(url).beta.messages.create(**asked, betas=["x-2026-01-01"]).content[0].text == expected(url)


def png(size: int = 64) -> str:
    """A picture as base64."""
    rows = b"".join(b"\0" + bytes((0, 4 * y, 128)) * size for y in range(size))
    chunks = [
        (b"IHDR", struct.pack(">2I5B", size, size, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def anthropic_pictures(url: str) -> None:
    data = png()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    block: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    asked: Any = {"model": "pocket", "messages": [{"role": "user", "content": block}]}
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    seen: Any = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
    chat = openai(url).chat.completions.create(model="pocket", messages=seen, max_tokens=MOST)
    answer = anthropic(url).messages.create(**asked, max_tokens=MOST)
    assert answer.content[0].text == chat.choices[0].message.content
    assert anthropic(url).messages.count_tokens(**asked).input_tokens == chat.usage.prompt_tokens


def anthropic_tools(url: str) -> None:
    messages, tool = anthropic(url).messages, TOOLS[0]["function"]
    tools = [{"name": "Bar", "description": tool["description"], "input_schema": tool["parameters"]}]
    asked: Any = {"model": "pocket", "max_tokens": MOST, "tools": tools}
    once = {"disable_parallel_tool_use": True}
    for choice in ({"type": "any", **once}, {"type": "tool", "name": "Bar"}):
        answer = messages.create(**asked, messages=ASKED, tool_choice=choice)
        (call,) = answer.content
        check(call.input)
        assert answer.stop_reason == "tool_use"
        with messages.stream(**asked, messages=ASKED, tool_choice=choice) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_message().content[0].input == call.input
        assert {"content_block_start", "input_json", "message_stop"} <= set(kinds)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "recorded"}]}
    turns = [*ASKED, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = messages.create(**asked, messages=turns, tool_choice={"type": "none"})
    assert [block.type for block in after.content] == ["text"]
    parsed = messages.parse(model="pocket", messages=ASKED, max_tokens=MOST, output_format=Bar)
    assert isinstance(parsed.parsed_output, Bar)


def anthropic_errors(url: str) -> None:
    import anthropic as package

    messages = anthropic(url).messages
    asked: Any = {"model": "pocket", "messages": ASKED, "max_tokens": MOST}
    wrong: Any = [
        (package.NotFoundError, {"model": "other"}),
        (package.BadRequestError, {"max_tokens": 20_000}),
        (package.BadRequestError, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (package.BadRequestError, {"extra_body": {"nonsense": 1}}),
    ]
    for kind, change in wrong:
        for stream in (False, True):
            raised = None
            try:
                messages.create(**{**asked, **change}, stream=stream)
            except kind as problem:
                raised = problem
            assert raised is not None, change
            assert raised.body["type"] == "error"
    assert messages.create(**asked, thinking={"type": "disabled"}).content[0].text == expected(url)


def anthropic_thoughts(url: str, bias: str) -> None:
    """Of a model that thinks, with biases against the marks of its thoughts."""
    messages = anthropic(url).messages
    asked: Any = {"model": "thinker", "messages": ASKED, "max_tokens": 12, "thinking": {"type": "adaptive"}}
    asked["extra_body"] = {"logit_bias": json.loads(bias), "temperature": 0}
    (block,) = messages.create(**asked).content
    assert block.type == "thinking"
    with messages.stream(**asked) as stream:
        events = list(stream)
        assert stream.get_final_message().content[0].thinking == block.thinking
    assert "".join(event.thinking for event in events if event.type == "thinking") == block.thinking
    asked["messages"] = [*ASKED, {"role": "assistant", "content": [block, {"type": "text", "text": "It"}]}, *ASKED]
    counted = {name: asked[name] for name in ("model", "messages", "thinking")}
    answer, count = messages.create(**asked), messages.count_tokens(**counted).input_tokens
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == count
    asked["thinking"] = {"type": "disabled"}
    assert [block.type for block in messages.create(**asked).content] == ["text"]


def expected_of_picture(url: str) -> str:
    """The answer to the question about the picture."""
    place = {"url": f"data:image/png;base64,{png()}"}
    content: Any = [{"type": "image_url", "image_url": place}, {"type": "text", "text": QUESTION}]
    asked: Any = [{"role": "user", "content": content}]
    answer = openai(url).chat.completions.create(model="pocket", messages=asked, max_tokens=MOST)
    return answer.choices[0].message.content or ""


def pydantic_ai(url: str, responses: bool = False, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIResponsesModel if responses else OpenAIChatModel
    model = kind("pocket", provider=OpenAIProvider(base_url=url, api_key=KEY))
    return Agent(model, model_settings={"max_tokens": MOST}, retries=0, **options)


def pydantic_ai_chat(url: str) -> None:
    from pydantic_ai import BinaryContent

    async def streamed(agent: Any) -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([text async for text in result.stream_text(delta=True, debounce_by=None)])

    for responses in (False, True):
        agent = pydantic_ai(url, responses)
        result = agent.run_sync(QUESTION)
        assert result.output == asyncio.run(streamed(agent)) == expected(url)
        assert result.usage.output_tokens > 0
        seen = agent.run_sync([BinaryContent(base64.b64decode(png()), media_type="image/png"), QUESTION])
        assert seen.output == expected_of_picture(url)
        again = agent.run_sync("And now?", message_history=result.all_messages())
        assert again.output


def pydantic_ai_structured(url: str) -> None:
    from pydantic_ai import NativeOutput, ToolOutput

    for responses in (False, True):
        for form in (Bar, ToolOutput(Bar), NativeOutput(Bar)):
            assert isinstance(pydantic_ai(url, responses, output_type=form).run_sync(QUESTION).output, Bar), form


def agents(url: str, responses: bool, **options: Any) -> Any:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    settings = ModelSettings(max_tokens=MOST, tool_choice="required" if options.get("tools") else None)
    return Agent(name="reader", model=kind("pocket", client), model_settings=settings, **options)


def agents_chat(url: str) -> None:
    from agents import Runner

    async def ask(agent: Any) -> None:
        text = (await Runner.run(agent, QUESTION)).final_output
        result, streamed = Runner.run_streamed(agent, QUESTION), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                streamed += event.data.delta
        assert text == streamed == result.final_output == expected(url)
        place = f"data:image/png;base64,{png()}"
        image = {"type": "input_image", "image_url": place, "detail": "auto"}
        content = [image, {"type": "input_text", "text": QUESTION}]
        seen: Any = [{"role": "user", "content": content}]
        assert (await Runner.run(agent, seen)).final_output == expected_of_picture(url)

    for responses in (False, True):
        asyncio.run(ask(agents(url, responses)))


def agents_tools(url: str) -> None:
    from agents import Runner, function_tool

    called = []

    @function_tool
    def record(colour: Literal["red", "green", "blue"], height: Literal[1, 2, 3]) -> str:
        """Record a bar."""
        called.append((colour, height))
        return f"{height} {colour}"

    for responses in (False, True):
        result = Runner.run_sync(agents(url, responses, tools=[record]), QUESTION, max_turns=3)
        assert called
        assert result.final_output
        called.clear()
        assert isinstance(Runner.run_sync(agents(url, responses, output_type=Bar), QUESTION).final_output, Bar)


def haystack(url: str, **options: Any) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    settings = {"max_tokens": MOST, **options.pop("settings", {})}
    given = {"model": "pocket", "api_base_url": url, "api_key": Secret.from_token(KEY), "max_retries": 0}
    return OpenAIChatGenerator(**given, generation_kwargs=settings, **options)


def haystack_chat(url: str) -> None:
    from haystack.dataclasses import ChatMessage, ImageContent

    chunks: list[str] = []
    (reply,) = haystack(url).run([ChatMessage.from_user(QUESTION)])["replies"]
    streaming = haystack(url, streaming_callback=lambda chunk: chunks.append(chunk.content))
    (streamed,) = streaming.run([ChatMessage.from_user(QUESTION)])["replies"]
    assert reply.text == streamed.text == "".join(chunks) == expected(url)
    image = ImageContent(png(), mime_type="image/png")
    (seen,) = haystack(url).run([ChatMessage.from_user(content_parts=[image, QUESTION])])["replies"]
    assert seen.text == expected_of_picture(url)


def haystack_tools(url: str) -> None:
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool

    tool = Tool("Bar", "Report a bar.", Bar.model_json_schema(), function=lambda **bar: json.dumps(bar))
    model, asked = haystack(url, tools=[tool], settings={"tool_choice": "required"}), [ChatMessage.from_user(QUESTION)]
    for options in ({}, {"streaming_callback": lambda _: None}):
        (reply,) = model.run(asked, **options)["replies"]
        check(reply.tool_calls[0].arguments)
        result = ChatMessage.from_tool("recorded", origin=reply.tool_calls[0])
        assert haystack(url).run([*asked, reply, result])["replies"][0].text
    form = {"response_format": Bar}
    (reply,) = haystack(url, settings=form).run(asked)["replies"]
    check(reply.text)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
