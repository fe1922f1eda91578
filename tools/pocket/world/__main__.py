"""`python -m tools.pocket.world`: the commands of `saccade`, with every task of the pocket world."""

import tools.pocket.world  # noqa: F401  # registers the tasks
from saccade.cli import main

if __name__ == "__main__":
    main()
