"""Checkpoints in and out: what a folder holds and for which target, and heads in the layouts of other engines."""

from saccade.checkpoints.exporting import EXPORTS, export_head
from saccade.checkpoints.inspecting import inspect_checkpoint

__all__ = ["EXPORTS", "export_head", "inspect_checkpoint"]
