"""Products with weights in the memory layout, and steps with the threads, that are fastest on this CPU.

A forward of speculative decoding multiplies every weight with a few rows, which mostly waits for the weights. A
float32 weight of a 16-bit checkpoint is kept once more in float16 and multiplied in float32 by fbgemm, which reads half
as much: the product of the very same numbers, as long as float16 holds each times one power of two, or an int8 step of
each output's scale. Other weights are packed by oneDNN. Which layout is faster for which numbers of rows is measured
once per machine, how many threads are fastest all the time. Changed weights and modules are noticed by snapshots.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import repeat, starmap
from operator import attrgetter, contains, is_, methodcaller
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from saccade import cpu
from saccade.target_model.int8 import int8_of

ROWS = (1, 4, 16, 64, 128)  # numbers of rows that are measured, but for the last; each represents those up to the next
SMALLEST = 1 << 16  # elements below which a weight stays as it is: entering oneDNN takes longer than the product saves
SHARE = 0.5  # most of the free memory that copies may take
_GAIN = 0.9  # share of the time of the weight as it is, below which a copy is used
_DIGITS = 15  # binary ones before the point of the largest number in a halved copy; float16 holds one more
_CHECKED = 1 << 10  # rows of a weight that are compared at a time
_LARGEST = 1 << 26  # bytes of weights that are multiplied in turn while measuring: more than most caches hold
_SAMPLES = 16
LOST = 0.01  # share of the time that trials of another number of threads may lose
_PROCESS = os.getpid()  # in its forks, OpenMP waits for threads that only it has
GAIN = 0.9  # share of the usual time that a trial must take at most to change the number


class Linear:
    """The product ``x @ weight.T + bias``, with a copy of the weight for the numbers of rows that gain by it."""

    __slots__ = ("_copy", "_factor", "_layouts", "_rows", "_sample", "_version", "_view", "bias", "sources", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, sources: Sequence[Tensor] = ()) -> None:
        self.weight = weight  # `[out, in]`; read at every call, never changed
        self.bias = bias  # `[out]`, or None
        self.sources = sources or (weight,)
        self._version = 0
        self._layouts: Mapping[str, range] = {}
        self._copy: Any = None  # product with the copy
        self._factor = 1.0
        self._rows = range(0)
        self._view: Tensor | None = None
        self._sample: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[T, out]`` of ``[T, in]``."""
        factor = self.factor(x.shape[0])
        return self.product(x if factor == 1 else x * factor)

    def factor(self, rows: int) -> float:
        """Power of two by which to multiply the rows that `product` takes, or what it returns if there is no bias."""
        return self._factor if rows in self._rows else 1.0

    def product(self, x: Tensor) -> Tensor:
        """Return ``[T, out]`` of ``[T, in]`` times `factor`."""
        if x.shape[0] in self._rows:
            product: Tensor = self._copy(x, self.bias)
            return product
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out]`` of ``[..., in]``; with gradients by the weight as it is."""
        if not torch.is_inference_mode_enabled():
            return F.linear(x, self.weight, self.bias)
        product: Tensor = self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return product

    def pack(self, layouts: Mapping[str, range]) -> int:
        """Copy the weight in the first of some `LAYOUTS` that holds it, for numbers of rows; return its bytes."""
        weight = self.weight.detach()
        self._layouts, self._copy, self._rows = layouts, None, range(0)
        self.note_weight()
        for name, rows in layouts.items():
            layout, size = LAYOUTS[name]
            if copied := layout(weight, max(rows.start, 8)):
                self._rows, (self._copy, self._factor) = rows, copied
                return int(size * weight.nbytes)
        return 0

    def unpack(self) -> None:
        """Drop the packed copy."""
        self._copy, self._rows, self._view = None, range(0), None

    def refresh(self) -> None:
        """Copy the weight again if it was changed in place since."""
        if self.has_changed:
            self._copy_again()

    @property
    def has_changed(self) -> bool:
        """Whether the weight was changed in place since it was noted."""
        if self._view is None or self._sample is None:
            return False
        moved = self._view.data_ptr() != self.weight.data_ptr()
        # Changes by way of ``.data``, which torch does not count, are seen by a few of the elements.
        return moved or self._version != self._versions() or not torch.equal(self._view, self._sample)

    def _copy_again(self) -> None:
        self.pack(self._layouts)

    def note_weight(self) -> None:
        """Note what tells later whether the weight is still the one that was copied."""
        weight = self.weight.detach()
        self._view = weight.view(-1)[:: max(1, weight.numel() // _SAMPLES)]
        self._sample = self._view.clone()
        self._version = self._versions()

    def _versions(self) -> int:
        """Number of changes of the sources that torch has counted; it counts none of tensors made in inference mode."""
        return sum([source._version for source in self.sources if not source.is_inference()])


class WeightWatch:
    """Noted weights of many products; whether any has changed takes a few calls for all of them."""

    def __init__(self, products: Sequence[Linear]) -> None:
        self.products = products
        self._views: list[Tensor | None] | None = None  # as of the last look

    def changed(self) -> list[Linear]:
        """Return the products whose weights were changed in place since they were noted."""
        if self._is_as_before():
            return []
        changed = [product for product in self.products if product.has_changed]
        if not changed:
            held = [product for product in self.products if product._view is not None]
            self._views = list(map(_VIEW, self.products))
            self._weights = [product.weight for product in held]
            self._addresses = list(map(_ADDRESS, self._weights))
            self._sources = [s for product in held for s in product.sources if not s.is_inference()]
            self._versions = list(map(_VERSION, self._sources))
            self._samples = [(product._view, product._sample) for product in held]
        return changed

    def _is_as_before(self) -> bool:
        return (
            self._views is not None
            and all(map(is_, map(_VIEW, self.products), self._views))
            and list(map(_ADDRESS, self._weights)) == self._addresses
            and list(map(_VERSION, self._sources)) == self._versions
            and all(starmap(torch.equal, self._samples))
        )


_VIEW, _VERSION, _ADDRESS = attrgetter("_view"), attrgetter("_version"), methodcaller("data_ptr")


class AdaptedLinear(Linear):
    """A product with those of LoRAs on top, each over the outputs of one of the modules that are fused in it."""

    __slots__ = ("_base", "_parts")

    def __init__(self, base: Linear, parts: Sequence[tuple[slice, Linear, Linear, float]]) -> None:
        super().__init__(base.weight, base.bias)
        self._base = base
        self._parts = parts

    def product(self, x: Tensor) -> Tensor:
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
    def running(self, looks: bool = True) -> Iterator[None]:
        """Replace the modules' forwards, whose hooks still fire; ``looks``: for changes of the weights, too."""
        for module, product in self._packed:
            if module.weight is product.weight and product.weight.device.type == "cpu":
                if looks:
                    product.refresh()
                vars(module)["forward"] = product.forward
        try:
            yield
        finally:
            for module, _ in self._packed:
                vars(module).pop("forward", None)


Product = Callable[[Tensor, Tensor | None], Tensor]
"""The product of rows ``[T, in]`` with a copy of a weight, plus a bias ``[out]``."""


def packed(weight: Tensor, rows: int) -> tuple[Product, float]:
    """Copy a weight in the order in which oneDNN reads it for about ``rows`` rows."""
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
        return out

    return product, 1.0


def halved(weight: Tensor, rows: int = 0) -> tuple[Product, float] | None:
    """Copy a float32 weight in float16, over a power of two or as int8 steps; None where that loses a number."""
    largest = float(torch.stack(weight.aminmax()).abs().max())
    if weight.dtype != torch.float32 or not largest < 1 << _DIGITS:
        return None
    scale = 2.0 ** min(_DIGITS - math.frexp(largest)[1], 2 * _DIGITS)
    for part in weight.split(_CHECKED):
        scaled = part * scale
        if not torch.equal(scaled.half().float(), scaled):
            return _stepped(weight)
    return _half_product(lambda: weight * scale), 1 / scale


def _stepped(weight: Tensor) -> tuple[Product, float] | None:
    """Copy a weight that was rounded to int8 steps as these, which are scaled by output after the product."""
    for part in weight.split(_CHECKED):
        steps, scale = int8_of(part)
        if not torch.allclose(steps * scale, part, rtol=4 * torch.finfo(torch.float32).eps, atol=0):
            return None
    held, scale = _half_product(lambda: int8_of(weight)[0].float()), int8_of(weight)[1].flatten()

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        out = held(x, None)
        return out.mul_(scale) if bias is None else torch.addcmul(bias, out, scale)

    return product, 1.0


def _half_product(weight: Callable[[], Tensor]) -> Product:
    """The product in float32 with numbers that float16 holds."""
    one_thread = torch.fbgemm_pack_gemm_matrix_fp16(weight())
    several: list[Any] = []  # for several threads, once there are

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.get_num_threads() == 1:  # entered in one microsecond, not in ten
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, one_thread, bias)
        if not several:
            several.append(torch.ops.quantized.linear_prepack_fp16(weight(), None))
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, several[0])
        return out if bias is None else out.add_(bias)

    return product


_Layout = Callable[[Tensor, int], tuple[Product, float] | None]  # of a weight, for about a number of rows
LAYOUTS: dict[str, tuple[_Layout, float]] = {"halved": (halved, 0.5), "packed": (packed, 1)}
"""Copies of weights by name, those that are tried first in front, and their size beside the weight's."""


@torch.inference_mode(False)
@torch.no_grad()
def pack_where_faster(products: Iterable[Linear]) -> list[Linear]:
    """Copy the weights that gain by it, as far as memory allows, and return them; none on other devices than CPUs."""
    here = [p for p in products if p.weight.device.type == "cpu" and p.weight.is_contiguous()]
    together, free = sum(p.weight.nbytes for p in here), cpu.available_memory()
    left = math.inf if free is None else SHARE * free
    copied = []
    for product in here:
        if product.weight.nbytes <= left and (size := product.pack(faster_rows(product.weight, together))):
            left -= size
            copied.append(product)
    return copied


def faster_rows(weight: Tensor, together: int = 0) -> dict[str, range]:
    """Numbers of rows by layout for which it is faster on this CPU, in a model with ``together`` bytes of weights."""
    layouts = [name for name in LAYOUTS if works(name, weight.dtype)]
    if weight.numel() < SMALLEST or not layouts:
        return {}
    out, width = weight.shape
    copies = max(1, min(1 << together.bit_length(), _LARGEST) // weight.nbytes)
    dtype, threads = str(weight.dtype).removeprefix("torch."), torch.get_num_threads()
    name = f"{' or '.join(layouts)}: {copies} of {out}x{width} {dtype} {threads} threads"
    ends = [int(end) for end in cpu.remember(name, lambda: _measure(layouts, weight, copies))]
    return {layout: range(*ends[2 * at : 2 * at + 2]) for at, layout in enumerate(layouts) if ends[2 * at + 1]}


@cache
def works(layout: str, dtype: torch.dtype) -> bool:
    """Whether this machine multiplies with such copies: oneDNN packs no bfloat16 on processors with AVX2 alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's names of fbgemm's products are deprecated, each once
        try:
            copied = LAYOUTS[layout][0](torch.ones(64, 64, dtype=dtype), 8)
            return copied is not None and copied[0](torch.ones(1, 64, dtype=dtype), None).shape == (1, 64)
        except (RuntimeError, AttributeError):
            return False


def _measure(layouts: Sequence[str], weight: Tensor, copies: int) -> list[int]:
    """First number of rows from which each layout beats all after it and none, and the first beyond; from memory."""
    generator = torch.Generator().manual_seed(0)
    like = torch.randn(weight.shape, generator=generator).bfloat16().to(weight.dtype)  # float16 holds it, too
    weights = [like.clone() for _ in range(copies)]
    kinds: list[list[Any]] = [
        [copied[0] for w in weights if (copied := LAYOUTS[layout][0](w, 8))] for layout in layouts
    ]
    kinds.append([partial(_multiply, w) for w in weights])
    seconds = []
    with torch.inference_mode():
        for rows in ROWS[:-1]:
            x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype)
            seconds.append(cpu.shortest_times(*(partial(_run, kind, x) for kind in kinds), repeats=3))
    ends: list[int] = []
    for at in range(len(layouts)):
        ends += _longest([times[at] < _GAIN * min(times[at + 1 :]) for times in seconds])
    return ends


def _multiply(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _run(products: Iterable[Product], x: Tensor) -> None:
    for product in products:
        product(x, None)


def _longest(pays: Sequence[bool]) -> tuple[int, int]:
    """First number of rows of the longest stretch of `ROWS` that pays, and the first beyond."""
    first, best = 0, range(0)
    for index, gains in enumerate(pays):
        if not gains:
            first = index + 1
        elif index + 1 - first > len(best):
            best = range(first, index + 1)
    return (ROWS[best[0]], ROWS[best[-1] + 1]) if best else (0, 0)


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


_GET: Any = dict.get  # typed for a map over both lists


class ModuleGuard:
    """Snapshot of a model's decoder and head, compared with the model before every forward."""

    def __init__(self, model: nn.Module, replaced: Sequence[nn.Module], fused: Iterable[Tensor]) -> None:
        inside = {m for root in replaced for m in root.modules()}
        around = {m for m in model.modules() if any(root in set(m.modules()) for root in replaced)}
        modules = [*inside, *(around - inside)]
        # Dictionaries of the modules themselves, compared by C code: a tenth of the time of visiting the modules.
        self._hooks: list[dict[Any, Any]] = [m._forward_hooks for m in modules]
        self._hooks += [m._forward_pre_hooks for m in modules]
        # Global hooks would not see the replaced modules, either.
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._attributes = [m.__dict__ for m in modules]
        parts: list[tuple[dict[str, Any], str, Any]] = [
            (m._modules, name, child) for m in modules for name, child in m._modules.items() if child in inside | around
        ]
        parts += [(m._parameters, name, p) for m in inside for name, p in m._parameters.items()]
        self._owners, self._names, self._parts = ([part[i] for part in parts] for i in range(3))
        self._fused = list(fused)
        self._addresses = [t.data_ptr() for t in self._fused]
        self._lists = [m._modules for m in inside if isinstance(m, nn.ModuleList)]
        self._lengths = [len(children) for children in self._lists]

    @property
    def is_current(self) -> bool:
        """Whether no part was replaced, added, cast, moved, hooked, or given a forward of its own."""
        return (
            not any(self._hooks)
            and not any(map(contains, self._attributes, repeat("forward")))
            and all(map(is_, map(_GET, self._owners, self._names), self._parts))
            and [t.data_ptr() for t in self._fused] == self._addresses
            and list(map(len, self._lists)) == self._lengths
        )


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
