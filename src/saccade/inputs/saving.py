"""A model's inputs written as a checkpoint has them, for another model that takes the same."""

from __future__ import annotations

import json
from pathlib import Path

from saccade.inputs.loading import Parts


def save_parts(parts: Parts, folder: Path) -> None:
    """Write tokenizer, image and video settings and chat template into a checkpoint folder.

    `saccade.inputs.loading.load_parts` finds the same parts there; the end of an answer belongs to
    ``generation_config.json``, which is written with the weights.
    """
    parts.tokenizer.save_pretrained(folder)
    if parts.image_processor is not None:
        parts.image_processor.save_pretrained(folder)
    if parts.video_settings:
        _write(folder / "video_preprocessor_config.json", json.dumps(dict(parts.video_settings), indent=2))
    if parts.chat_template is not None:
        _write(folder / "chat_template.jinja", parts.chat_template)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
