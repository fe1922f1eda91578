"""Train the pocket pair from nothing: `python -m saccade.pocket.train --out DIR`.

A run that was killed goes on where it stopped when it is started again with the same folder.
"""

import argparse
from pathlib import Path

import torch

from saccade.pocket.train.recipe import Recipe, quick_recipe
from saccade.pocket.train.run import STAGES, run


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m saccade.pocket.train", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for stage files and the finished pair"
    )
    parser.add_argument("--quick", action="store_true", help="toy sizes: try every stage in half a minute")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--minutes-scale", type=float, default=1.0, help="multiply every stage's minutes")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to run")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    recipe = (quick_recipe() if options.quick else Recipe()).scaled(options.minutes_scale)
    run(recipe, options.out, options.until)


main()
