"""Methods: named settings of one composition of drafter, tree, rule and pruning."""

from saccade.methods.registry import (
    METHODS,
    Method,
    Needs,
    build,
    default,
    get,
    is_lossless,
    needs,
    options,
    special_ids,
)

__all__ = [
    "METHODS",
    "Method",
    "Needs",
    "build",
    "default",
    "get",
    "is_lossless",
    "needs",
    "options",
    "special_ids",
]
