// Programs of `test_client_packages.py` for Node, as `client_programs.py` has them: `client_programs.mjs NAME URL`.

import assert from "node:assert/strict";
import { deflateSync, crc32 } from "node:zlib";
import OpenAI from "openai";

const QUESTION = "Read the values from the bar chart.";
const ASKED = [{ role: "user", content: QUESTION }];
const MOST = 200;
const SCHEMA = {
  type: "object",
  properties: { colour: { type: "string", enum: ["red", "green", "blue"] }, height: { type: "integer", enum: [1, 2, 3] } },
  required: ["colour", "height"],
  additionalProperties: false,
};

const openai = (url) => new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });

function check(bar) {
  assert.deepEqual(Object.keys(bar).sort(), ["colour", "height"]);
  assert(SCHEMA.properties.colour.enum.includes(bar.colour) && SCHEMA.properties.height.enum.includes(bar.height));
}

/** A PNG of stripes. */
function picture() {
  const part = (kind, data) => {
    const body = Buffer.concat([Buffer.from(kind), data]);
    const [length, sum] = [Buffer.alloc(4), Buffer.alloc(4)];
    length.writeUInt32BE(data.length);
    sum.writeUInt32BE(crc32(body));
    return Buffer.concat([length, body, sum]);
  };
  const header = Buffer.from([0, 0, 0, 64, 0, 0, 0, 64, 8, 0, 0, 0, 0]);
  const row = Buffer.from([0, ...Array.from({ length: 64 }, (_, column) => 255 * ((column >> 3) % 2))]);
  const rows = deflateSync(Buffer.concat(Array(64).fill(row)));
  const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
  return Buffer.concat([signature, part("IHDR", header), part("IDAT", rows), part("IEND", Buffer.alloc(0))]);
}

async function expected(url, messages = ASKED) {
  const answer = await openai(url).chat.completions.create({ model: "pocket", messages, max_tokens: MOST });
  assert(answer.choices[0].message.content);
  return answer.choices[0].message.content;
}

function seen() {
  const url = `data:image/png;base64,${picture().toString("base64")}`;
  return [{ role: "user", content: [{ type: "image_url", image_url: { url } }, { type: "text", text: QUESTION }] }];
}

const programs = {
  async openai_chat(url) {
    const text = await expected(url);
    const chat = openai(url).chat.completions;
    const stream = chat.stream({ model: "pocket", messages: ASKED, max_tokens: MOST });
    let streamed = "";
    for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(streamed, text);
    assert.equal(await stream.finalContent(), text);
    assert(await expected(url, seen()));
    const responses = openai(url).responses;
    const asked = { model: "pocket", input: QUESTION, max_output_tokens: MOST };
    assert.equal((await responses.create(asked)).output_text, text);
    assert.equal((await responses.stream(asked).finalResponse()).output_text, text);
  },

  async openai_tools(url) {
    const client = openai(url);
    const tools = [{ type: "function", function: { name: "Bar", parameters: SCHEMA, strict: true } }];
    const asked = { model: "pocket", messages: ASKED, max_tokens: MOST };
    const { message } = (await client.chat.completions.create({ ...asked, tools, tool_choice: "required" })).choices[0];
    check(JSON.parse(message.tool_calls[0].function.arguments));
    const streamed = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
    assert.equal((await streamed.finalFunctionToolCall()).arguments, message.tool_calls[0].function.arguments);
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "recorded" };
    const again = { ...asked, messages: [...ASKED, message, result], tools, tool_choice: "none" };
    assert((await client.chat.completions.create(again)).choices[0].message.content);
    const response_format = { type: "json_schema", json_schema: { name: "Bar", schema: SCHEMA, strict: true } };
    check((await client.chat.completions.parse({ ...asked, response_format })).choices[0].message.parsed);
  },

  async ai_chat(url) {
    const { generateText, streamText } = await import("ai");
    const content = [{ type: "image", image: picture() }, { type: "text", text: QUESTION }];
    for (const model of await models(url)) {
      const asked = { model, maxOutputTokens: MOST, maxRetries: 0 };
      const text = await expected(url);
      const answer = await generateText({ ...asked, prompt: QUESTION });
      assert.equal(answer.text, text);
      assert(answer.usage.outputTokens > 0);
      let streamed = "";
      for await (const piece of streamText({ ...asked, prompt: QUESTION }).textStream) streamed += piece;
      assert.equal(streamed, text);
      const about = await generateText({ ...asked, messages: [{ role: "user", content }] });
      assert.equal(about.text, await expected(url, seen()));
    }
  },

  async ai_tools(url) {
    const { generateText, streamText, jsonSchema, Output, stepCountIs, tool } = await import("ai");
    for (const model of await models(url)) {
      const called = [];
      const execute = async (bar) => (called.push(bar), "recorded");
      const tools = { Bar: tool({ description: "Report a bar.", inputSchema: jsonSchema(SCHEMA), execute }) };
      const asked = { model, prompt: QUESTION, maxOutputTokens: MOST, maxRetries: 0 };
      const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
      const answer = await generateText({ ...asked, tools, prepareStep, stopWhen: stepCountIs(2) });
      assert(answer.text);
      const stream = streamText({ ...asked, tools, toolChoice: "required" });
      await stream.consumeStream();
      assert.equal(called.length, 2);
      called.forEach(check);
      const output = Output.object({ schema: jsonSchema(SCHEMA) });
      check((await generateText({ ...asked, output })).output);
      check(await streamText({ ...asked, output }).output);
    }
  },
};

/** The model by each of the SDK's providers. */
async function models(url) {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const given = { baseURL: url, apiKey: "none" };
  const compatible = createOpenAICompatible({ ...given, name: "local", supportsStructuredOutputs: true });
  const provider = createOpenAI(given);
  return [compatible("pocket"), provider.chat("pocket"), provider.responses("pocket")];
}

globalThis.AI_SDK_LOG_WARNINGS = false;
await programs[process.argv[2]](process.argv[3]);
