"""Model plug-ins of evaluators: lmms-eval (by the package's entry point) and VLMEvalKit (by a class)."""

from __future__ import annotations

from typing import Any


def lmms_eval_models() -> Any:
    """Return the manifest that lmms-eval's registry reads from the entry point ``lmms_eval.models``."""
    from lmms_eval.models.registry_v2 import ModelManifest

    place = f"{__name__}.lmms_models"
    return ModelManifest(
        model_id="saccade",
        simple_class_path=f"{place}.SaccadeSimple",
        chat_class_path=f"{place}.SaccadeChat",
    )
