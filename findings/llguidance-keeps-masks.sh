#!/usr/bin/env bash
# Version: llguidance 1.9.1
# Behaviour: a matcher keeps its last mask through a rollback. Where it is then moved to another place with as many parts
#   read and the same state of its lexer, it repeats that mask: tokens are missing that it would accept. A copy made
#   before the mask has the right one.
# Seen:
#   behind '{"a": ' after '{ "a" ': [' ', ':'] instead of [' ', '1']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")
schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
options = {"whitespace_flexible": True, "whitespace_pattern": "[ ]{0,3}"}
grammar = LLMatcher.grammar_from_json_schema(schema, defaults=options)


def read(matcher: LLMatcher, text: str) -> LLMatcher:
    assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    return matcher


def allowed(matcher: LLMatcher) -> list[str]:
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return [chr(byte) for byte in range(128) if bits >> byte & 1]


before, text = '{ "a" ', '{"a": '
matcher = read(LLMatcher(tokenizer, grammar), before)
allowed(matcher)
matcher.rollback(len(before))
copied = read(LLMatcher(tokenizer, grammar), before)
allowed(copied.deep_copy())
copied.rollback(len(before))
seen, right = allowed(read(matcher, text)), allowed(read(LLMatcher(tokenizer, grammar), text))
if seen == right or allowed(read(copied, text)) != right or not read(LLMatcher(tokenizer, grammar), text + "1"):
    sys.exit("no longer so")
print(f"behind {text!r} after {before!r}: {seen} instead of {right}")
PYTHON
