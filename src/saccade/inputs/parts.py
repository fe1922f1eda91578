"""Tokenizer, image settings and chat template of a checkpoint: load, save and fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import ModelError
from saccade.inputs.families import family_of


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything of a checkpoint that makes its inputs."""

    config: Any  # the model's Hugging Face configuration
    tokenizer: Any  # its tokenizer
    image_processor: Any = None  # its image processor; None for language models
    video_settings: Mapping[str, Any] = field(default_factory=dict)  # content of its video configuration file
    chat_template: str | None = None  # Jinja source, where it is not the tokenizer's own
    eos_token_ids: tuple[int, ...] | None = None  # ids that end an answer
    composite: Any = None  # its whole Hugging Face processor, for families outside the registry only


def load_parts(path: str) -> Parts:
    """Read a checkpoint's parts."""
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

    if not path:
        raise ModelError(
            "The model does not say which checkpoint it is from; make its inputs with InputProcessor.from_parts."
        )
    config = _loaded(AutoConfig, path, "configuration")
    tokenizer = _loaded(AutoTokenizer, path, "tokenizer")
    family = family_of(config)
    image_processor = composite = None
    if family.is_composite:
        composite = _loaded(AutoProcessor, path, f"processor of the family {family.name}, which is not built in,")
    elif family.reads_images:
        image_processor = _loaded(AutoImageProcessor, path, "image processor", config=config)
    processor_config = _json(path, "processor_config.json")
    video: Any = {}
    if family.video_defaults is not None:
        video = (
            processor_config.get("video_processor")
            or _json(path, "video_preprocessor_config.json")
            or _json(path, "preprocessor_config.json")
        )
    return Parts(
        config,
        tokenizer,
        image_processor,
        clean_video_settings(video),
        _chat_template(path, processor_config),
        _generation_eos(path),
        composite,
    )


def read_eos(parts: Parts) -> tuple[int, ...]:
    """Ids that end an answer: the generation configuration's, else the model's, else the tokenizer's."""
    text = parts.config.get_text_config(decoder=True)
    for value in (
        parts.eos_token_ids,
        getattr(parts.config, "eos_token_id", None),
        getattr(text, "eos_token_id", None),
        getattr(parts.tokenizer, "eos_token_id", None),
    ):
        if value is not None:
            return tuple(int(i) for i in value) if isinstance(value, (list, tuple)) else (int(value),)
    return ()


def _loaded(auto: Any, path: str, what: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        first_line = "".join(str(error).strip().splitlines()[:1])
        reason = first_line.split(". ")[0].rstrip(".: ")[:300]
        raise ModelError(
            f"The {what} of {path} cannot be loaded ({reason}); give a complete checkpoint directory "
            "or a model id that can be reached."
        ) from error


def _find(path: str, name: str) -> Path | None:
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    from transformers.utils import cached_file

    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None


def _json(path: str, name: str) -> dict[str, Any]:
    file = _find(path, name)
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ModelError(f"{name} of {path} is not valid JSON; download the checkpoint again.") from None
    return content if isinstance(content, dict) else {}


def _chat_template(path: str, processor_config: Mapping[str, Any]) -> str | None:
    """The processor's template, which may differ from the tokenizer's."""
    file = _find(path, "chat_template.jinja")
    if file is not None:
        return file.read_text(encoding="utf-8")
    template = _json(path, "chat_template.json").get("chat_template") or processor_config.get("chat_template")
    return template if isinstance(template, str) else None


def clean_video_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a video configuration that are not None; SmolVLM has its sampling in a nested part."""
    settings = {k: v for k, v in content.items() if v is not None}
    sampling = settings.pop("video_sampling", None)
    if sampling:
        settings.update(num_frames=sampling["max_frames"], fps=sampling["fps"])
        settings.setdefault("size", sampling["video_size"])
    return settings


def _generation_eos(path: str) -> tuple[int, ...] | None:
    value = _json(path, "generation_config.json").get("eos_token_id")
    if value is None:
        return None
    return tuple(value) if isinstance(value, list) else (int(value),)


def save_parts(parts: Parts, folder: Path) -> None:
    """Write tokenizer, image and video settings and chat template into a checkpoint folder.

    `saccade.inputs.parts.load_parts` finds the same parts there; the end of an answer belongs to
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


_NAMES = ("image_processor_type", "video_processor_type", "feature_extractor_type", "processor_class")
"""Class names, which change with the version of transformers and not with behaviour."""


def settings_digest(parts: Parts) -> str:
    """Hash of a checkpoint's image and video settings and its chat template."""
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
