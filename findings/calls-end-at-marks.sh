#!/usr/bin/env bash
# Version: transformers 5.23.0 (parse_response of transformers.utils.chat_parsing)
# Behaviour: a call ends at the first closing mark, be it inside of a JSON string of its arguments; and a thought without
#   its closing mark takes the whole answer, so that the message has no content.
# Seen: call as text: {"name": "write", "arguments": {"text": "It ends with
#       call as json: ValueError: json parser could not parse region as JSON.
#       thought: {'role': 'assistant', 'thinking': 'Four.'}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

from transformers.utils.chat_parsing import parse_response


def template(content: str) -> dict:
    call = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": content}
    thought = {"open": "<think>", "close": "</think>"}
    fields = {"thinking": thought, "tool_calls": call, "content": {"content": "text"}}
    return {"defaults": {"role": "assistant"}, "start_anchor": "assistant\n", "fields": fields}


written = {"name": "write", "arguments": {"text": "It ends with </tool_call>."}}
answer = f"<tool_call>{json.dumps(written)}</tool_call>"
message = parse_response(answer, template("text"), prefix="assistant\n")
(call,) = message["tool_calls"]
print("call as text:", call)
assert call == '{"name": "write", "arguments": {"text": "It ends with', message

try:
    parse_response(answer, template("json"), prefix="assistant\n")
    raise SystemExit("the mark in the string no longer ends the call")
except ValueError as problem:
    print("call as json: ValueError:", str(problem).splitlines()[0])

message = parse_response("Four.", template("json"), prefix="assistant\n<think>\n")
print("thought:", message)
assert message == {"role": "assistant", "thinking": "Four."}, message
PYTHON
