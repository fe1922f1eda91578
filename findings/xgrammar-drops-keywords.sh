#!/usr/bin/env bash
# Version: xgrammar 0.2.9, jsonschema 4.26.0
# Behaviour: xgrammar compiles ordinary valid schemas without an error and drops constraints of them: a required name
#   that is no property, anyOf beside properties, a bound beside an enum, and (with a warning in its log) all of an
#   allOf with two members. Its matcher accepts answers that jsonschema rejects.
# Seen:
#   required, no property  accepts {"a": 1}, which jsonschema rejects
#   anyOf beside others    accepts {"a": 1}, which jsonschema rejects
#   a bound beside an enum accepts 10, which jsonschema rejects
#   allOf of two           accepts 3, which jsonschema rejects
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 xgrammar==0.2.9 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import xgrammar
from jsonschema import Draft202012Validator

LETTERS = [chr(code) for code in range(32, 127)]
info = xgrammar.TokenizerInfo([*LETTERS, "</s>"], stop_token_ids=[len(LETTERS)])


def accepts(schema: dict, answer: str) -> bool:
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(LETTERS.index(letter)) for letter in answer) and matcher.accept_token(len(LETTERS))


one = {"type": "object", "properties": {"a": {"type": "integer"}}}
cases = {
    "required, no property": ({**one, "required": ["a", "z"]}, '{"a": 1}'),
    "anyOf beside others": ({**one, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}, '{"a": 1}'),
    "a bound beside an enum": ({"enum": [1, 2, 3, 10], "maximum": 3}, "10"),
    "allOf of two": ({"allOf": [{**one, "required": ["a"]}, {"type": "object", "required": ["b"]}]}, "3"),
}
for name, (schema, answer) in cases.items():
    Draft202012Validator.check_schema(schema)
    wrong = not Draft202012Validator(schema).is_valid(json.loads(answer))
    if not (wrong and accepts(schema, answer)):
        sys.exit(f"{name}: no longer so")
    print(f"{name:22} accepts {answer}, which jsonschema rejects")
PYTHON
