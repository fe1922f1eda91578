"""Number format and threads that suit this machine's processor."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from saccade.errors import InputError, ModelError
from saccade.files import write_file

SMALL_MODEL = 100_000_000
"""Parameters below which one thread is the default: a handover between threads costs more than a product."""

_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fphp", "asimdhp", "fp16"),
}
"""Names in `torch.cpu.get_capabilities` of the instructions that compute in a format."""
SWITCH = "SACCADE_CPU_BF16"
"""Environment variable: with 1 the processor counts as one that computes in bfloat16 (it emulates what it lacks), with
0 as one that does not, whatever its instructions and speed."""
_FASTER = 1.1  # times that a 16-bit format must be faster than float32 to be used where it is not requested


def suitable_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype in which weights stored in a format run fastest on this CPU without loss: it, or float32."""
    if stored in _INSTRUCTIONS and not computes_in(stored):
        return torch.float32
    return stored


def computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for a 16-bit format, and is faster with it than in float32."""
    if _switched(dtype) is not None or not has_instructions(dtype):
        return has_instructions(dtype)
    name = str(dtype).removeprefix("torch.")
    (speed,) = remember(f"{name} over float32", lambda: [_speed_over_float32(dtype)])
    return speed >= _FASTER


def remember(name: str, measure: Callable[[], Sequence[float]]) -> Sequence[float]:
    """Return numbers measured once per machine and version of torch, and read from a file from then on."""
    processor = f"{platform.machine()}|{_capabilities().get('cpu_name')}|{torch.__version__}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = base / "saccade" / f"processor-{hashlib.blake2b(processor.encode(), digest_size=6).hexdigest()}.json"
    findings = _findings(file)
    if name not in findings:
        findings[name] = [float(value) for value in measure()]
        with suppress(OSError, ModelError):  # a cache folder that cannot be written: measured again by the next process
            write_file(file, json.dumps(_findings.__wrapped__(file) | findings, indent=1) + "\n", error=ModelError)
    return findings[name]


@cache
def _findings(file: Path) -> dict[str, list[float]]:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        read = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): [float(value) for value in values] for name, values in read.items()}
    return {}


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in a 16-bit format, or counts as one that has (`SWITCH`)."""
    if (counts := _switched(dtype)) is not None:
        return counts
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11
        known = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return bool(known) and dtype == torch.bfloat16
    return any(_capabilities().get(name) for name in _INSTRUCTIONS[dtype])


def _switched(dtype: torch.dtype) -> bool | None:
    """Whether `SWITCH` lets this CPU count as one that computes in a format; None: the processor decides."""
    if (value := os.environ.get(SWITCH, "")) not in ("", "0", "1"):
        raise InputError(f"{SWITCH} must be 0 or 1, not {value!r}.")
    return value == "1" if value and dtype == torch.bfloat16 else None


def available_memory() -> int | None:
    """Bytes of main memory that programs can still take; None where the system does not say."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return 1024 * int(available.split()[1])
    return None


def check_threads(threads: int | None) -> None:
    """Raise `InputError` for anything but one thread or more."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise InputError(f"The number of threads must be a whole number of at least 1, not {threads!r}.")


def use_threads(threads: int | None, parameters: int) -> list[int]:
    """Set the number of CPU threads of this process; return the numbers between which its steps may choose.

    None is `OMP_NUM_THREADS` where set, else as many as cores are idle: a thread that shares its core with another
    program is waited for at every product, which can cost a hundredfold. For a model below `SMALL_MODEL` it is one,
    and every step may choose more.
    """
    check_threads(threads)
    if threads is None and os.environ.get("OMP_NUM_THREADS"):
        return [torch.get_num_threads()]
    is_open = threads is None and parameters < SMALL_MODEL
    if threads is None:
        threads = 1 if is_open else idle_cores()
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return [1 << power for power in range(usable_cores().bit_length())] if is_open else [threads]


def idle_cores() -> int:
    """Physical cores that this process may use and that other programs leave idle now; at least 1."""
    return max(1, usable_cores() - round(busy_cores()))


def usable_cores() -> int:
    """Physical cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, _capabilities().get("num_physical_cores") or usable)


def busy_cores(seconds: float = 0.1) -> float:
    """Cores that other programs use, over some time from now on; elsewhere than on Linux the last minute's load."""
    with suppress(OSError, ValueError, IndexError):
        before = _ticks()
        time.sleep(seconds)
        ticks = [after - earlier for after, earlier in zip(_ticks(), before, strict=True)]
        idle = ticks[3] + ticks[4]
        return (os.cpu_count() or 1) * (1 - idle / max(1, sum(ticks)))
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _ticks() -> list[int]:
    """Ticks of all cores since the system started (Linux), by what they did; the fourth and fifth are idle ones."""
    with open("/proc/stat", encoding="ascii") as file:
        return [int(value) for value in file.readline().split()[1:9]]


def _capabilities() -> dict[str, Any]:
    """Features of the processor by name; empty in versions of torch that do not list them."""
    return dict(getattr(torch.cpu, "get_capabilities", dict)())


def _speed_over_float32(dtype: torch.dtype) -> float:
    """Time of float32 products over those of a format, for a decoder's weights and a block of 8 tokens."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2048, 1024, generator=generator)
    tokens = torch.randn(8, 1024, generator=generator)
    products = [partial(linear, tokens.to(kind), weights.to(kind)) for kind in (torch.float32, dtype)]
    with torch.inference_mode():
        wide, narrow = shortest_times(*products)
    return wide / narrow


def shortest_times(*functions: Callable[[], object], repeats: int = 8) -> list[float]:
    """Shortest seconds of each function, called in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, seconds in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [min(seconds[1:]) for seconds in times]
