"""Workshop of the pocket models: train them, and inflate them to the size of big models."""

from tools.pocket import world  # noqa: F401  # registers its tasks, in workers' processes as well
