"""The first minutes on a device: exactness, kernels, costs of steps and a server under load, as records and a page.

Runs from a checkout without installation: what `src` and `tests` hold is found from here.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
if find_spec("saccade") is None:
    sys.path.insert(0, str(ROOT / "src"))
sys.path.append(str(ROOT / "tests"))  # makers of tiny models, and the pretend device
