"""Products with weights in the memory layout, and steps with the threads, that are fastest on this CPU.

A forward of speculative decoding multiplies every weight with a few rows. torch's own product packs the weight again at
every call there, which takes longer than the product; a weight that was packed once, by oneDNN, saves that. One row,
and the many rows of prefill, are as fast or faster with the weight as it is. Which layout wins from how many rows on
depends on the processor and on the shape, so it is measured, once per machine. How many threads are fastest depends on
what else runs, too, and is measured all the time.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade import cpu

ROWS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows that are measured; each represents those up to the next one
SMALLEST = 1 << 16  # elements below which a weight stays as it is: entering oneDNN takes longer than the product saves
SHARE = 0.5  # most of the free memory that packed copies may take
_GAIN = 0.9  # share of the time of the weight as it is, below which a packed copy is used
_SAMPLES = 16
LOST = 0.01  # share of the time that trials of another number of threads may lose
_PROCESS = os.getpid()  # in its forks, OpenMP waits for threads that only it has
GAIN = 0.9  # share of the usual time that a trial must take at most to change the number


class Linear:
    """The product ``x @ weight.T + bias``, with a packed copy of the weight for the numbers of rows that gain by it."""

    __slots__ = ("_packed", "_rows", "_sample", "_sources", "_version", "_view", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, sources: Sequence[Tensor] = ()) -> None:
        self.weight = weight  # `[out, in]`; read at every call, never changed
        self.bias = bias  # `[out]`, or None
        self._sources = sources or (weight,)
        self._version = 0
        self._packed: Any = None
        self._rows = range(0)
        self._view: Tensor | None = None
        self._sample: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[T, out]`` of ``[T, in]``."""
        if x.shape[0] in self._rows:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out]`` of ``[..., in]``; with gradients by the weight as it is."""
        if not torch.is_inference_mode_enabled():
            return F.linear(x, self.weight, self.bias)
        product: Tensor = self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return product

    def pack(self, rows: range) -> None:
        """Use a packed copy of the weight, of the same size, for some numbers of rows."""
        self._packed = reordered(self.weight.detach(), max(rows.start, 8))
        self._rows = rows
        self._note_weight()

    def refresh(self) -> None:
        """Copy the weight again if it was changed in place since."""
        if self._view is None or self._sample is None:
            return
        moved = self._view.data_ptr() != self.weight.data_ptr()
        # Changes by way of ``.data``, which torch does not count, are seen by a few of the elements.
        if moved or self._version != self._versions() or not torch.equal(self._view, self._sample):
            self._copy_again()

    def _copy_again(self) -> None:
        self.pack(self._rows)

    def _note_weight(self) -> None:
        """Note what tells later whether the weight is still the one that was copied."""
        weight = self.weight.detach()
        self._view = weight.view(-1)[:: max(1, weight.numel() // _SAMPLES)]
        self._sample = self._view.clone()
        self._version = self._versions()

    def _versions(self) -> int:
        """Number of changes of the sources that torch has counted; it counts none of tensors made in inference mode."""
        return sum(0 if source.is_inference() else source._version for source in self._sources)


class AdaptedLinear(Linear):
    """A product with those of LoRAs on top, each over the outputs of one of the modules that are fused in it."""

    __slots__ = ("_base", "_parts")

    def __init__(self, base: Linear, parts: Sequence[tuple[slice, Linear, Linear, float]]) -> None:
        super().__init__(base.weight, base.bias)
        self._base = base
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        out = self._base(x)
        for columns, down, up, scale in self._parts:
            out[:, columns] += up(down(x.to(down.weight.dtype))) * scale
        return out

    @classmethod
    def of(cls, base: Linear, modules: Sequence[Any], product: Callable[..., Linear]) -> Linear:
        """Return the product of some modules, those of them that PEFT has wrapped with their LoRAs."""
        parts, stop = [], 0
        for module in modules:
            start, stop = stop, stop + module.weight.shape[0]
            for name in getattr(module, "active_adapters", ()):
                down, up = (product(part.weight, part.bias) for part in (module.lora_A[name], module.lora_B[name]))
                parts.append((slice(start, stop), down, up, module.scaling[name]))
        return cls(base, parts) if parts else base


class PackedModules:
    """Linear modules of a model that run on packed copies of their weights while a context is open."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        plain = [m for m in modules if type(m) is nn.Linear and type(m.weight) is nn.Parameter]
        products = {id(m): Linear(m.weight, m.bias) for m in plain if "forward" not in vars(m)}
        packed = {id(product) for product in pack_where_faster(products.values())}
        self._packed = [(m, p) for m in plain if (p := products.get(id(m))) is not None and id(p) in packed]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace the modules' forwards, whose hooks still fire."""
        for module, product in self._packed:
            if module.weight is product.weight and product.weight.device.type == "cpu":
                product.refresh()
                vars(module)["forward"] = product.forward
        try:
            yield
        finally:
            for module, _ in self._packed:
                vars(module).pop("forward", None)


def reordered(weight: Tensor, rows: int) -> Any:
    """Return a copy of a weight packed by oneDNN for about ``rows`` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)


@torch.inference_mode(False)
@torch.no_grad()
def pack_where_faster(products: Iterable[Linear]) -> list[Linear]:
    """Pack the weights that gain by it, and return them; none on other devices than CPUs or with too little memory."""
    here = [p for p in products if p.weight.device.type == "cpu" and p.weight.is_contiguous()]
    chosen = [(p, rows) for p in here if (rows := packed_rows(p.weight))]
    size, free = sum(p.weight.nbytes for p, _ in chosen), cpu.available_memory()
    if free is not None and size > SHARE * free:
        return []
    for product, rows in chosen:
        product.pack(rows)
    return [product for product, _ in chosen]


def packed_rows(weight: Tensor) -> range:
    """Numbers of rows for which a packed copy of a weight is faster on this CPU; empty for none."""
    if weight.numel() < SMALLEST or not _can_pack(weight.dtype):
        return range(0)
    out, width = weight.shape
    dtype, threads = str(weight.dtype).removeprefix("torch."), torch.get_num_threads()
    first, last = cpu.remember(
        f"packed {out}x{width} {dtype} {threads} threads", lambda: _measure(out, width, weight.dtype)
    )
    return range(int(first), int(last))


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and packs weights of a dtype on this processor: not bfloat16 on one with AVX2 alone."""
    try:
        weight = torch.zeros(64, 64, dtype=dtype)
        return torch.backends.mkldnn.is_available() and reordered(weight, 8) is not None
    except RuntimeError:
        return False


def _measure(out: int, width: int, dtype: torch.dtype) -> Sequence[int]:
    """First number of rows for which packing pays, and the first beyond; the longest such stretch of `ROWS`."""
    generator = torch.Generator().manual_seed(0)
    product = Linear(torch.randn(out, width, generator=generator).to(dtype))
    packed = Linear(product.weight)
    packed.pack(range(1, 1 << 62))
    first, best = 0, range(0)
    with torch.inference_mode():
        for index, rows in enumerate(ROWS):
            x = torch.randn(rows, width, generator=generator).to(dtype)
            plain, ours = cpu.shortest_times(partial(product, x), partial(packed, x))
            if ours >= _GAIN * plain:
                first = index + 1
            elif index + 1 - first > len(best):
                best = range(first, index + 1)
    return (ROWS[best[0]], 2 * ROWS[best[-1]]) if best else (0, 0)


class _Runs:
    """Runs of one stage at about one size."""

    def __init__(self, counts: Sequence[int], best: int) -> None:
        self.best = best
        self._counts = counts
        self._recent: deque[float] = deque(maxlen=5)  # seconds with the best number
        self._ratios: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=3))  # of trials to them
        self._total = 0.0  # seconds
        self._lost = defaultdict[int, float](float)  # by trials

    def next(self) -> int:
        """Threads of the next run: the best number, or its double or half where the time of a trial is saved."""
        near = [count for count in (2 * self.best, self.best // 2) if count in self._counts]
        saved = [count for count in near if self._lost[count] <= LOST * self._total]
        if not saved or not self._recent:
            return self.best
        return min(saved, key=lambda count: len(self._ratios[count]))

    def add(self, threads: int, seconds: float) -> None:
        """Record a run."""
        self._total += seconds
        if threads == self.best:
            self._recent.append(seconds)
            return
        usual, ratios = median(self._recent), self._ratios[threads]
        self._lost[threads] += max(0.0, seconds - usual)
        ratios.append(seconds / usual)
        if len(ratios) > 1 and median(ratios) < GAIN:
            self.best = threads
            self._recent.clear()
            self._ratios.clear()


class StepThreads:
    """Numbers of threads of a step's stages by size: the fastest as measured, also while other programs come and go.

    Trials of another number lose at most `LOST` of the time, on average.
    """

    def __init__(self, counts: Sequence[int], timer: Callable[[], float] = time.perf_counter) -> None:
        self._counts, self._timer = counts, timer
        self._runs: dict[tuple[str, int], _Runs] = {}

    @contextmanager
    def on(self, stage: str, tokens: int) -> Iterator[None]:
        """Run a stage of so many tokens with the number of threads that it is fastest with, or a trial of another."""
        if len(self._counts) < 2 or not tokens or os.getpid() != _PROCESS:
            yield
            return
        before = torch.get_num_threads()
        runs = self._of(stage, tokens.bit_length())
        threads = runs.next()
        started = self._timer()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
        runs.add(threads, self._timer() - started)

    def _of(self, stage: str, size: int) -> _Runs:
        runs = self._runs.get((stage, size))
        if runs is None:
            smaller = [n for name, n in self._runs if name == stage and n < size]
            best = self._counts[0]
            if smaller:
                best = self._runs[stage, max(smaller)].best
            runs = self._runs[stage, size] = _Runs(self._counts, best)
        return runs
