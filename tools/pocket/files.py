"""Writing a file so that a kill leaves the old one or the new one, never half of each."""

import os
from pathlib import Path
from typing import Any

import torch


def save(value: Any, path: Path) -> None:
    """`torch.save` under a temporary name, then renamed into place."""
    part = path.with_suffix(path.suffix + ".part")
    torch.save(value, part)
    os.replace(part, path)
