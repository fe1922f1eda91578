"""Training of every head that the suites of docs/results compare, in one run that can be resumed."""

from tools.pocket import world  # noqa: F401  # whose tasks the suites draw
