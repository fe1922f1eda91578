#!/usr/bin/env bash
# Version: ai 6.0.326 with @ai-sdk/openai-compatible 2.0.92 (npm)
# Behaviour: createOpenAICompatible sends an output's schema only with supportsStructuredOutputs: true. Without it the schema is dropped and
#   any JSON object asked for; generateText then fails by its own check where the object is another one. A warning alone says so.
# Seen:
#   sent by default: {"type":"json_object"}
#   warned: JSON response format schema is only supported with structuredOutputs
#   and then: AI_NoObjectGeneratedError
#   sent with supportsStructuredOutputs: json_schema, strict true
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" ai@6.0.326 @ai-sdk/openai-compatible@2.0.92
cat > "$folder/see.mjs" <<'PROGRAM'
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output } from "ai";

let sent, content;
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  sent = JSON.parse(body).response_format;
  const choices = [{ index: 0, message: { role: "assistant", content }, finish_reason: "stop" }];
  const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({ id: "1", object: "chat.completion", created: 0, model: "m", choices, usage }));
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const properties = { height: { type: "integer" } };
const schema = jsonSchema(
  { type: "object", properties, required: ["height"] },
  { validate: (value) => ({ success: "height" in value, value, error: new Error("no height") }) },
);

async function ask(settings, answer) {
  content = answer;
  const model = createOpenAICompatible({ baseURL, name: "local", ...settings })("m");
  return generateText({ model, prompt: "How high?", output: Output.object({ schema }), maxRetries: 0 });
}

globalThis.AI_SDK_LOG_WARNINGS = false;
const { warnings } = await ask({}, '{"height": 1}');
console.log("sent by default:", JSON.stringify(sent));
console.log("warned:", warnings[0].details);
assert.deepEqual(sent, { type: "json_object" });
const failure = await ask({}, '{"width": 1}').then((result) => result.output).catch((problem) => problem);
console.log("and then:", failure.name);
assert.equal(failure.name, "AI_NoObjectGeneratedError");
await ask({ supportsStructuredOutputs: true }, '{"height": 1}');
console.log(`sent with supportsStructuredOutputs: ${sent.type}, strict ${sent.json_schema.strict}`);
assert.deepEqual(sent.json_schema.schema.properties, properties);
server.close();
PROGRAM
node "$folder/see.mjs"
