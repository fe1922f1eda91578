#!/usr/bin/env bash
# Version: anthropic 2.14.0 (Python)
# Behaviour: The package has no temperature, top_p and top_k (they need extra_body), sends its API key as Authorization: Bearer instead of
#   X-Api-Key, and drops events of a stream without a line "event: ..." silently, although their JSON says their type.
# Seen:
#   key: {'Authorization': 'Bearer KEY'}
#   refused by the package: ['temperature', 'top_k', 'top_p']
#   events of a stream: with names 7, without 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q anthropic==2.14.0 2>/dev/null
cat > "$folder/see.py" <<'PROGRAM'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from anthropic import Anthropic

MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
MESSAGE |= {"stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 1}}
DELTA = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 1}}
EVENTS = [
    {"type": "message_start", "message": MESSAGE},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", **DELTA},
    {"type": "message_stop"},
]
named, headers = True, {}


class Stub(BaseHTTPRequestHandler):
    def do_POST(self):
        headers.update(self.headers)
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kind, data = "application/json", json.dumps(MESSAGE)
        if asked.get("stream"):
            kind, data = "text/event-stream", ""
            for event in EVENTS:
                data += f"event: {event['type']}\n" * named + f"data: {json.dumps(event)}\n\n"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Stub)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="KEY", max_retries=0)
asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
client.messages.create(**asked)
key = {name: value for name, value in headers.items() if "KEY" in value}
print("key:", key)
refused = []
for name in ("temperature", "top_k", "top_p"):
    try:
        client.messages.create(**asked, **{name: 1})
    except TypeError:
        refused.append(name)
print("refused by the package:", refused)
counts = []
for named in (True, False):
    with client.messages.stream(**asked) as stream:
        counts.append(len(list(stream)))
print(f"events of a stream: with names {counts[0]}, without {counts[1]}")
assert key == {"Authorization": "Bearer KEY"}
assert refused == ["temperature", "top_k", "top_p"]
assert counts == [7, 0]
PROGRAM
"$folder/venv/bin/python" "$folder/see.py"
