"""The pocket world: generated pictures and videos with exact ground truth, and small VLMs trained on them.

Importing this needs Pillow and NumPy only.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.errors import ModelError

if TYPE_CHECKING:
    from saccade.pocket.sample import WORLD, Sample, Task, draw, lacks, score

__all__ = [
    "WORLD",
    "Sample",
    "Task",
    "adapter_path",
    "draft_path",
    "draw",
    "head_path",
    "head_paths",
    "lacks",
    "score",
    "target_path",
]

_WEIGHTS = Path(__file__).parent / "weights"


def __getattr__(name: str) -> Any:
    """Import the world only where something draws from it: the models are loaded without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("saccade.pocket.tasks")  # fills WORLD
    return getattr(import_module("saccade.pocket.sample"), name)


def target_path() -> Path:
    """Folder of the target VLM, for `from_pretrained`."""
    return _WEIGHTS / "target"


def draft_path() -> Path:
    """Folder of the draft VLM, for `from_pretrained`."""
    return _WEIGHTS / "draft"


def adapter_path() -> Path:
    """Folder of a LoRA of the target that answers in JSON, for PEFT."""
    return _WEIGHTS / "json"


def head_path(kind: str) -> Path:
    """Folder of the target's trained head of a kind."""
    paths = head_paths()
    if kind not in paths:
        raise ModelError(
            f"No trained {kind} head comes with the built-in pair (shipped: {', '.join(paths) or 'none'}); train one "
            f"with `saccade train {kind} -t pocket`, and give its folder."
        )
    return paths[kind]


def head_paths() -> dict[str, Path]:
    """Folders of all included heads, by kind."""
    if not _WEIGHTS.is_dir():
        return {}
    folders = sorted(f for f in _WEIGHTS.iterdir() if f.name not in ("target", "draft"))
    return {f.name: f for f in folders if (f / "config.json").is_file()}
