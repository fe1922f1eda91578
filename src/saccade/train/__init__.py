"""Training of drafter heads and draft VLMs on the target's own answers."""

from saccade.train.data import Listed, Source, TrainingSample
from saccade.train.recipe import Recipe, Stage, read_recipe
from saccade.train.trainer import Outcome, Trainer

__all__ = ["Listed", "Outcome", "Recipe", "Source", "Stage", "Trainer", "TrainingSample", "read_recipe"]
