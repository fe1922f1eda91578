"""Whether prompts are still made in the same way."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from saccade.inputs.loading import Parts

_NAMES = ("image_processor_type", "video_processor_type", "feature_extractor_type", "processor_class")
"""What a class is called says nothing about what it does, and changes with the version of transformers."""


def settings_digest(parts: Parts) -> str:
    """Of a checkpoint's image and video settings and its chat template."""
    composite = parts.composite
    settings = [
        _settings(parts.image_processor),
        _plain(parts.video_settings),
        parts.chat_template or getattr(parts.tokenizer, "chat_template", None),
        *(_settings(getattr(composite, f"{kind}_processor", None)) for kind in ("image", "video")),
    ]
    content = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _settings(processor: Any) -> dict[str, Any]:
    return {} if processor is None else _plain(processor.to_dict())


def _plain(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None and name not in _NAMES}
