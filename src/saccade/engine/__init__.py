"""The running batch: rows that come and go, one target forward a step."""

from saccade.engine.batch import RunningBatch
from saccade.engine.engine import Engine, Run
from saccade.engine.row import Request, Row

__all__ = ["Engine", "Request", "Row", "Run", "RunningBatch"]
