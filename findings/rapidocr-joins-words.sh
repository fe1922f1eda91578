#!/usr/bin/env bash
# Version: rapidocr-onnxruntime 1.4.4, onnxruntime 1.32.0
# Behaviour: the text of a line depends on the other lines of the picture: lines are recognised in batches, padded to the widest of each,
#   and the space between two words gets lost in one batch and not in another.
# Seen: alone    ['Olive oil'] ['Rye bread']
#       together ['Oliveoil', 'Rye bread', 'Greentea']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet rapidocr-onnxruntime==1.4.4 onnxruntime==1.32.0 opencv-python==5.0.0.93 pillow==13.0.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rapidocr_onnxruntime import RapidOCR

engine, font = RapidOCR(), ImageFont.load_default(24)


def read(*lines):
    page = Image.new("RGB", (900, 80 + 48 * len(lines)), "white")
    for number, line in enumerate(lines):
        ImageDraw.Draw(page).text((60, 40 + 48 * number), line, font=font, fill="black")
    found, _ = engine(np.array(page))
    return [text for _, text, _ in found]


alone, bread = read("Olive oil"), read("Rye bread")
together = read("Olive oil", "Rye bread", "Green tea")
print("alone   ", alone, bread)
print("together", together)
assert alone == ["Olive oil"], "the line alone is read otherwise"
assert "Oliveoil" in together, "the line among others keeps its space"
PROGRAM
