"""Methods: named settings of one composition of drafter, tree, rule and pruning."""

from saccade.methods.added import add_head, add_rule, add_tree
from saccade.methods.registry import METHODS, Method, build, check, get, is_lossless, options, special_ids
from saccade.methods.settings import fit, known_options, needs

__all__ = [
    "METHODS",
    "Method",
    "add_head",
    "add_rule",
    "add_tree",
    "build",
    "check",
    "fit",
    "get",
    "is_lossless",
    "known_options",
    "needs",
    "options",
    "special_ids",
]
