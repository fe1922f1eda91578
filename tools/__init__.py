"""Tools of the repository, and the settings of the published pages."""

import tomllib
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("results").joinpath("settings.toml").read_text("utf-8")
)
"""By tool, `heads` and `results`: defaults of its options."""
