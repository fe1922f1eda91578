"""Where the shipped pocket models lie: the one place that names their folders."""

from pathlib import Path

_WEIGHTS = Path(__file__).parent / "weights"


def target_path() -> Path:
    """The folder of the target VLM, ready for `from_pretrained`."""
    return _WEIGHTS / "target"


def draft_path() -> Path:
    """The folder of the draft VLM, ready for `from_pretrained`."""
    return _WEIGHTS / "draft"
