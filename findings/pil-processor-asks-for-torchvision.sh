#!/usr/bin/env bash
# Version: transformers 5.17.0, torch 2.11.0, without torchvision
# Behaviour: the PIL image processors of SmolVLM and Idefics3 need no torchvision, but their names in `transformers` ask for
#   it: a comment in their files names the torchvision backend. The same classes work from their own modules.
# Seen: SmolVLMImageProcessorPil: asks for torchvision; from its module: made
#       Idefics3ImageProcessorPil: asks for torchvision; from its module: made
#       LlavaNextImageProcessorPil: made
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.11.0 transformers==5.17.0 pillow
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from importlib import import_module

import transformers

for kind, name in (("smolvlm", "SmolVLM"), ("idefics3", "Idefics3")):
    named = f"{name}ImageProcessorPil"
    try:
        getattr(transformers, named)()
    except ImportError as problem:
        assert "Torchvision library" in str(problem), problem
    else:
        raise SystemExit(f"{named} is made by its name in transformers")
    getattr(import_module(f"transformers.models.{kind}.image_processing_pil_{kind}"), named)()
    print(f"{named}: asks for torchvision; from its module: made")
transformers.LlavaNextImageProcessorPil()
print("LlavaNextImageProcessorPil: made")
PYTHON
