"""Measurement of every suite on one revision, and the pages of docs/results."""

from tools.pocket import world  # noqa: F401  # whose tasks the suites draw
from tools.results import lexicon  # noqa: F401  # a relevance of theirs
