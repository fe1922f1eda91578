#!/usr/bin/env bash
# Version: Pillow 13.0.0
# Behaviour: `Image.convert("RGB")` clips grey of 16 bits, 32 bits and floats at 0 and 255 instead of scaling it: a 16-bit PNG
#   becomes almost all white, floats of 0..1 black.
#   The bands of a LAB picture are L, A and B, so that an "A" among the bands does not mean opacity.
# Seen: 16-bit [0, 256, 32768, 65535] -> [0, 255, 255, 255]
#       floats [0.0, 0.25, 0.5, 1.0] -> [0, 0, 0, 1]
#       LAB: bands ('L', 'A', 'B')
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pillow==13.0.0 numpy
"$folder/venv/bin/python" - <<'PROGRAM'
import io

import numpy as np
from PIL import Image


def shown(values, kind):
    image = Image.fromarray(np.array([values], kind))
    if image.mode == "I;16":  # as a file
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        image = Image.open(buffer)
    return np.asarray(image.convert("RGB"))[0, :, 0].tolist()


wide, part = [0, 256, 32768, 65535], [0.0, 0.25, 0.5, 1.0]
print("16-bit", wide, "->", shown(wide, np.uint16))
print("floats", part, "->", shown(part, np.float32))
lab = Image.new("LAB", (1, 1))
print(f"LAB: bands {lab.getbands()}")
assert shown(wide, np.uint16) == [0, 255, 255, 255], "16 bits are no longer clipped"
assert shown(part, np.float32) == [0, 0, 0, 1], "floats are no longer taken for 0..255"
assert lab.getbands() == ("L", "A", "B"), "the bands have other names"
PROGRAM
