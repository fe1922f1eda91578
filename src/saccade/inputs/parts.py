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
from saccade.wording import first_line


@dataclass(frozen=True, slots=True)
class ProcessorParts:
    """Everything of a checkpoint that makes its inputs."""

    config: Any  # the model's Hugging Face configuration
    tokenizer: Any  # its tokenizer
    image_processor: Any = None  # its image processor; None for language models
    video_settings: Mapping[str, Any] = field(default_factory=dict)  # content of its video configuration file
    chat_template: str | None = None  # Jinja source, where it is not the tokenizer's own
    eos_token_ids: tuple[int, ...] | None = None  # ids that end an answer
    composite: Any = None  # its whole Hugging Face processor, for families outside the registry only


def load_parts(path: str) -> ProcessorParts:
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
    file = _find(path, "chat_template.jinja")  # the processor's template may differ from the tokenizer's
    if file is not None:
        template: Any = file.read_text(encoding="utf-8")
    else:
        template = _json(path, "chat_template.json").get("chat_template") or processor_config.get("chat_template")
    template = template if isinstance(template, str) else None
    eos = _json(path, "generation_config.json").get("eos_token_id")
    video = clean_video_settings(video)
    return ProcessorParts(config, tokenizer, image_processor, video, template, _ids(eos), composite)


def read_eos(parts: ProcessorParts) -> tuple[int, ...]:
    """Ids that end an answer: the generation configuration's, else the model's, else the tokenizer's."""
    text = parts.config.get_text_config(decoder=True)
    for value in (
        parts.eos_token_ids,
        getattr(parts.config, "eos_token_id", None),
        getattr(text, "eos_token_id", None),
        getattr(parts.tokenizer, "eos_token_id", None),
    ):
        if value is not None:
            return _ids(value) or ()
    return ()


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(int(i) for i in value) if isinstance(value, (list, tuple)) else (int(value),)


def _loaded(auto: Any, path: str, what: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        reason = first_line(error).split(". ")[0].rstrip(".: ")[:300]
        raise ModelError(
            f"The {what} of {path} cannot be loaded ({reason}); give a complete checkpoint directory "
            "or a model id that can be reached."
        ) from error


def _find(path: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return Path(file) if file else None


def _json(path: str, name: str) -> dict[str, Any]:
    file = _find(path, name)
    try:
        content = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ModelError(f"{name} of {path} is not valid JSON; download the checkpoint again.") from None
    return content if isinstance(content, dict) else {}


def clean_video_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a video configuration that are not None; SmolVLM has its sampling in a nested part."""
    settings = {k: v for k, v in content.items() if v is not None}
    sampling = settings.pop("video_sampling", None)
    if sampling:
        settings.update(num_frames=sampling["max_frames"], fps=sampling["fps"])
        settings.setdefault("size", sampling["video_size"])
    return settings


def save_parts(parts: ProcessorParts, folder: Path) -> None:
    """Write what `load_parts` reads, but for ``generation_config.json``, which is written with the weights."""
    parts.tokenizer.save_pretrained(folder)
    if parts.image_processor is not None:
        parts.image_processor.save_pretrained(folder)
    if parts.video_settings:
        text = json.dumps(dict(parts.video_settings), indent=2)
        (folder / "video_preprocessor_config.json").write_text(text, encoding="utf-8")
    if parts.chat_template is not None:
        (folder / "chat_template.jinja").write_text(parts.chat_template, encoding="utf-8")


_NAMES = ("image_processor_type", "video_processor_type", "feature_extractor_type", "processor_class")
"""Class names, which change with the version of transformers and not with behaviour."""


def settings_digest(parts: ProcessorParts) -> str:
    """Hash of a checkpoint's image and video settings and its chat template."""

    def plain(settings: Any) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if value is not None and name not in _NAMES}

    composite = [getattr(parts.composite, f"{kind}_processor", None) for kind in ("image", "video")]
    image, *others = ({} if each is None else plain(each.to_dict()) for each in (parts.image_processor, *composite))
    template = parts.chat_template or getattr(parts.tokenizer, "chat_template", None)
    content = json.dumps([image, plain(parts.video_settings), template, *others], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
