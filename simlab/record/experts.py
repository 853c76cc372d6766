"""The engine's own memory for expert tensors.

Each expert tensor's `data` is pointed at a reserved anonymous range and its expert stride widened by two
pages, with `address = file offset` modulo the page size. Every slice then has pages of its own: a direct
read lands in place, and giving an expert back frees all of its pages and none of its neighbours'.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from pathlib import Path

from simlab.errors import RunError
from simlab.record.ggml import MAP_NORESERVE, Tensor
from simlab.record.gguf import GgufModel
from simlab.record.reads import PAGE, Slice, page_window

_SHORT_NAMES = {
    "ffn_gate_exps": "gate",
    "ffn_up_exps": "up",
    "ffn_down_exps": "down",
    "ffn_gate_up_exps": "gate_up",
}


class ExpertMemory:
    """Takes over the expert tensors of a loaded model.

    Args:
        tensors: per model layer, the pointers of its expert tensors by suffix (`ffn_gate_exps`, ...).
    """

    def __init__(self, model: GgufModel, tensors: Mapping[int, Mapping[str, int]]) -> None:
        self._regions: list[mmap.mmap] = []
        self._bases: list[int] = []
        self._originals: list[tuple[int, int, int, int]] = []
        self.slices: dict[tuple[int, int], tuple[Slice, ...]] = {}
        """Per (model layer, expert), its projections."""
        for layer, by_suffix in sorted(tensors.items()):
            columns = [
                self._take_over(model, layer, suffix, pointer) for suffix, pointer in by_suffix.items()
            ]
            for expert, parts in enumerate(zip(*columns, strict=True)):
                self.slices[layer, expert] = parts
        self._pages = {entry: [self._pages_of(s) for s in parts] for entry, parts in self.slices.items()}
        self.entry_bytes = {layer: sum(s.size for s in self.slices[layer, 0]) for layer in sorted(tensors)}
        """Exact bytes of one entry per layer."""

    def _take_over(self, model: GgufModel, layer: int, suffix: str, pointer: int) -> list[Slice]:
        place = model.tensors[f"blk.{layer}.{suffix}.weight"]
        tensor = Tensor.from_address(pointer)
        n_expert, size = tensor.ne[2], tensor.nb[2]
        if size * n_expert != place.size:
            raise RunError(
                f"{place.path}: blk.{layer}.{suffix}.weight is {place.size} bytes in the file but "
                f"{size * n_expert} in memory; the weights were repacked, which the engine cannot stream"
            )
        stride = size + 2 * PAGE
        region = mmap.mmap(
            -1, n_expert * stride + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        )
        # A huge page would keep neighbours' pages resident.
        region.madvise(mmap.MADV_NOHUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(region))
        self._originals.append((pointer, tensor.data, tensor.nb[2], tensor.nb[3]))
        tensor.data = base + place.offset % PAGE
        tensor.nb[2] = stride
        tensor.nb[3] = stride * n_expert
        index = len(self._regions)
        self._regions.append(region)
        self._bases.append(base)
        return [
            Slice(
                layer=layer,
                expert=e,
                projection=_SHORT_NAMES.get(suffix, suffix),
                path=place.path,
                offset=place.offset + e * size,
                size=size,
                address=tensor.data + e * stride,
                region=index,
            )
            for e in range(n_expert)
        ]

    def _pages_of(self, s: Slice) -> tuple[mmap.mmap, int, int]:
        first, last = page_window(s.address, s.size)
        return self._regions[s.region], first - self._bases[s.region], last - first

    def release(self, layer: int, expert: int) -> None:
        """Give all pages of an entry back to the system."""
        for region, start, length in self._pages[layer, expert]:
            region.madvise(mmap.MADV_DONTNEED, start, length)

    def window_bytes(self, layer: int, direct: bool) -> tuple[int, ...]:
        """Per expert of a layer, the bytes its reads ask the device for: nothing past the end of a file."""
        chosen = [parts for (at, _expert), parts in sorted(self.slices.items()) if at == layer]
        ends = {path: path.stat().st_size for path in {s.path for parts in chosen for s in parts}}

        def window(s: Slice) -> int:
            first, last = page_window(s.offset, s.size)
            return min(last, ends[s.path]) - first if direct else s.size

        return tuple(sum(map(window, parts)) for parts in chosen)

    def page_bytes(self, layer: int, expert: int) -> int:
        """Resident bytes of an entry, rounded out to its pages."""
        windows = (page_window(s.address, s.size) for s in self.slices[layer, expert])
        return sum(last - first for first, last in windows)

    def resident_bytes(self) -> int:
        """Resident bytes of the expert memory, as the kernel counts them in /proc/self/smaps."""
        spans = [(base, base + len(region)) for base, region in zip(self._bases, self._regions, strict=True)]
        total, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = line.split(" ", 1)[0]
            if "-" in head and not head.endswith(":"):
                first, last = (int(x, 16) for x in head.split("-"))
                inside = any(first < stop and start < last for start, stop in spans)
            elif inside and head == "Rss:":
                total += int(line.split()[1]) * 1024
        return total

    def overwrite(self, layer: int, expert: int, data: bytes) -> None:
        """Write over the start of an entry's first projection: the sabotage that gates must catch."""
        s = self.slices[layer, expert][0]
        ctypes.memmove(s.address, data, min(len(data), s.size))

    def restore(self) -> None:
        """Point the tensors back at the model's own mapping and give the memory back."""
        for pointer, data, stride, outer in self._originals:
            tensor = Tensor.from_address(pointer)
            tensor.data, tensor.nb[2], tensor.nb[3] = data, stride, outer
        self._originals = []
        for region in self._regions:
            region.close()
        self._regions = []
