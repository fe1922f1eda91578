"""What older supported versions of transformers cannot do."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version


def since(version: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test on versions before this one; on it and newer ones, what cannot be loaded fails."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_older, reason=f"before {version}, {reason}")


MLLAMA = since("5.18", "Mllama asks for one truth of a mask of many tokens")
DIFFUSION_GEMMA = since("5.20", "a small Diffusion Gemma cannot be made of its configuration")
OPACITY = since("5.21", "processors drop opacity, which is laid over white here")
