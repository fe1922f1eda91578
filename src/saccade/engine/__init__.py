"""The running batch: rows that come and go, one target forward a step."""

from saccade.engine.batch import Engine, Run, RunningBatch
from saccade.engine.row import Request, Row

__all__ = ["Engine", "Request", "Row", "Run", "RunningBatch"]
