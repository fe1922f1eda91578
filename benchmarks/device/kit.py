"""A run of the parts: the time that is left, pieces whose errors stay theirs, and clocks of host and device."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.device.records import SHARES, Records, frames, sentence
from saccade.errors import SaccadeWarning

PRETEND = "pretend"
Finding = dict[str, Any]  # what a piece found; ``line`` says it in words
Piece = tuple[str, Callable[[], Iterator[Finding]]]


@dataclass(eq=False)
class Kit:
    """A run: where it computes, where it writes, and until when."""

    records: Records
    device: torch.device
    small: bool
    ends: float  # `time.time` of the end of the run
    pretend: Any = None  # the open pretend device
    part_ends: float = 0.0  # of the part under way
    part: str = ""

    @property
    def left(self) -> float:
        """Seconds left for the part under way."""
        return self.part_ends - time.time()

    def begin(self, part: str) -> None:
        """Begin a part, or go on with it after its process ended, until its share of the time is over."""
        self.part = part
        known = [r["ends"] for r in self.records.read() if r["kind"] == "part" and r["part"] == part]
        names = list(SHARES)
        later = sum(SHARES[name] for name in names[names.index(part) :])
        self.part_ends = known[-1] if known else time.time() + (self.ends - time.time()) * SHARES[part] / later
        if not known:
            self.records.write("part", part, ends=self.part_ends)

    def run(self, name: str, work: Callable[[], Iterator[Finding]]) -> bool:
        """Run a piece; False where the device cannot be used any more by this process."""
        if self.left <= 0:
            self.records.write("left out", self.part, name, line="no time left")
            print(f"{self.part:6} {name}: left out, no time left", flush=True)
            return True
        self.records.write("begin", self.part, name)
        begun, lines, usable = time.time(), list[str](), True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for finding in work():
                    self.records.write("finding", self.part, name, **finding)
                    lines.append(str(finding["line"]))
            except Exception as error:
                lines.append(f"ERROR {type(error).__name__}: {sentence(error)}")
                found = {"error": type(error).__name__, "line": sentence(error), "frames": frames(error)}
                self.records.write("error", self.part, name, **found)
                usable = self.recover()
        ours = [warning.message for warning in caught if issubclass(warning.category, SaccadeWarning)]
        for words in dict.fromkeys(sentence(each) for each in ours if isinstance(each, Warning)):
            self.records.write("warning", self.part, name, line=words)
            lines.append(f"WARNING: {words}")
        self.records.write("end", self.part, name, seconds=round(time.time() - begun, 2))
        print(f"{self.part:6} {name} ({time.time() - begun:.1f} s): {'; '.join(lines)[:220]}", flush=True)
        return usable

    def recover(self) -> bool:
        """Free what a failed piece held; whether the device still computes."""
        gc.collect()
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            return bool(torch.ones(2, device=self.device).sum().item() == 2)
        except Exception:  # an assertion or an illegal access on the device, after which nothing runs in this process
            return False

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(
        self, call: Callable[[], Any], after: Callable[[], Any] = lambda: None, rounds: int = 15, warm: int = 5
    ) -> Finding:
        """Milliseconds of a call: until it returns, on the device, and until its results are there; medians.

        ``after`` undoes it between rounds. Launches and waits are those that the pretend device counts.
        """
        rounds = 2 if self.small else rounds
        for _ in range(warm):  # a forward is captured when it comes for the third time
            call()
            after()
        is_cuda, spent = self.device.type == "cuda", list[tuple[float, float, float]]()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []
        for _ in range(rounds):
            self.sync()
            begun = time.perf_counter()
            for event in events[:1]:
                event.record()
            call()
            for event in events[1:]:
                event.record()
            returned = time.perf_counter()
            self.sync()
            ended = time.perf_counter()
            on_device = events[0].elapsed_time(events[1]) / 1000 if events else ended - begun
            spent.append((returned - begun, on_device, ended - begun))
            after()
        host, device, whole = (round(1000 * median(column), 3) for column in zip(*spent, strict=True))
        found: Finding = {"host_ms": host, "device_ms": device, "ms": whole}
        if self.pretend is not None:
            with self.pretend.counting() as counts:
                call()
            after()
            found |= {"launches": counts.launches.total(), "waits": counts.waits.total()}
        return found


def described(spent: Finding) -> str:
    """Time in words; on the pretend device, whose time is the CPU's, launches and waits."""
    if "launches" in spent:
        return f"{spent['launches']} launches, {spent['waits']} wait{'s' * (spent['waits'] != 1)}"
    return f"{spent['ms']:.3g} ms ({spent['host_ms']:.3g} of the host)"


@contextmanager
def device_of(name: str) -> Iterator[tuple[torch.device, Any]]:
    """The device that is asked for, and the pretend device while it is open."""
    if name != PRETEND:
        yield torch.device(name), None
        return
    from pretend_device import PretendDevice
    from recorded_graphs import captured_on
    from saccade.target_model import exact, graphs

    torch.__future__.set_overwrite_module_params_on_conversion(True)  # its tensors cannot change their dtype in place
    with PretendDevice() as pretend:
        graphs.CAPTURES[PRETEND] = captured_on(pretend)
        exact.DEVICES = (*exact.DEVICES, PRETEND)
        yield torch.device(PRETEND), pretend
