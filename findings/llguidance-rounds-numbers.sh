#!/usr/bin/env bash
# Version: llguidance 1.9.1, jsonschema 4.26.0
# Behaviour: numbers of a schema beyond 2^53 are rounded to float64: of a const or an enum the matcher allows another
#   number than the schema's, and not the schema's own. An exclusive bound that is whole is allowed itself where the
#   other bound is less than 1 from it.
# Seen:
#   {"const": 9007199254740993} allows 9007199254740992
#   {"enum": [1234567890123456789]} allows 1234567890123456768
#   {"type": "number", "exclusiveMinimum": 3, "maximum": 3.5} allows 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import llguidance
from jsonschema import Draft202012Validator

tokenizer = llguidance.LLTokenizer("byte")


def allows(schema: dict, answer: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    tokens = tokenizer.tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


cases = [
    ({"const": 9007199254740993}, "9007199254740992"),
    ({"enum": [1234567890123456789]}, "1234567890123456768"),
    ({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}, "3"),
]
for schema, answer in cases:
    Draft202012Validator.check_schema(schema)
    wrong = not Draft202012Validator(schema).is_valid(json.loads(answer))
    if not (wrong and allows(schema, answer)):
        sys.exit(f"{json.dumps(schema)}: no longer so")
    print(json.dumps(schema), "allows", answer)
if allows(cases[0][0], "9007199254740993"):
    sys.exit("the schema's own number is allowed")
PYTHON
