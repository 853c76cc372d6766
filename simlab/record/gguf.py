"""What the engine needs of a GGUF file: a few metadata values and where every tensor lies. Read by ggml itself."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from simlab.errors import InputError
from simlab.record.ggml import gguf_params, libraries
from simlab.record.llama import log_error, silence_logs

_INTEGERS = {2: "u16", 4: "u32", 5: "i32", 10: "u64"}
_STRING = 8
_OF_ARCH = ("block_count", "expert_count", "expert_used_count")
SAMPLES, SAMPLE_BYTES = 3, 4096
"""Pieces read of every tensor for the digest, evenly spread from its first byte to its last, and the size of each."""


class TensorPlace(NamedTuple):
    """Where one tensor's bytes are."""

    path: Path
    offset: int
    """From the start of the file, bytes."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class GgufModel:
    """A mixture-of-experts GGUF."""

    path: Path
    arch: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    tensors: Mapping[str, TensorPlace]

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds tensors."""
        return tuple(sorted({place.path for place in self.tensors.values()}))

    def read_dense_ahead(self) -> None:
        """Ask the kernel for the pages of everything but the experts; llama.cpp's mapping reads nothing ahead."""
        for path in self.files:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                for name, place in self.tensors.items():
                    if place.path == path and "_exps." not in name:
                        os.posix_fadvise(descriptor, place.offset, place.size, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def digest(self) -> str:
        """What tells this model from another: metadata and tensor table whole, and a sample of every tensor's bytes.

        The files' names do not count. Two fine-tunes of one shape differ wherever a
        sample does; a change that no sample meets, such as one byte of a large tensor, is not seen. Reads
        `SAMPLES * SAMPLE_BYTES` of each tensor, so that 20 GB take well under a second.

        Raises:
            InputError: a file cannot be read.
        """
        found = hashlib.sha256()
        for path in self.files:
            places = sorted((p.offset, p.size, name) for name, p in self.tensors.items() if p.path == path)
            pieces = [
                (min(SAMPLE_BYTES, size), offset + at) for offset, size, _ in places for at in _spread(size)
            ]
            try:
                with path.open("rb", buffering=0) as file:
                    descriptor = file.fileno()
                    # The kernel fetches all pieces at once, and nothing around them.
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                    for size, offset in pieces:
                        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
                    found.update(hashlib.sha256(os.pread(descriptor, places[0][0], 0)).digest())
                    for size, offset in pieces:
                        found.update(os.pread(descriptor, size, offset))
            except OSError as error:
                raise InputError(f"{path}: {error.strerror}") from error
        return found.hexdigest()[:32]

    def layer_bytes(self, layer: int) -> int:
        """Bytes of all tensors of one layer."""
        return sum(p.size for name, p in self.tensors.items() if name.startswith(f"blk.{layer}."))


def _spread(size: int) -> list[int]:
    """Where in a tensor of so many bytes the samples begin."""
    last = max(size - SAMPLE_BYTES, 0)
    return sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})


def read_gguf(path: Path) -> GgufModel:
    """Read a model's metadata, all shards of it when `path` is the first of several, as its `split.count` says.

    Raises:
        InputError: no such file, not a GGUF, cut short, a shard that is missing or of another place than its name
            says, or a model without experts.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such model file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise InputError(f"{path}: not a GGUF file (it starts with {magic!r})")
    silence_logs()
    tensors: dict[str, TensorPlace] = {}
    values = _read_one(path, tensors)
    count = int(values["split.count"] or 1)
    others = _shards(path, count, int(values["split.no"] or 0))[1:] if count > 1 else []
    for index, shard in enumerate(others, start=1):
        if not shard.is_file():
            raise InputError(f"{shard}: this shard of {path.name} is missing")
        place = _read_one(shard, tensors)
        if (place["split.no"], place["split.count"]) != (index, count):
            raise InputError(
                f"{shard}: its split.no is {place['split.no']} and its split.count {place['split.count']}, not "
                f"{index} and {count}; it is not shard {index + 1} of {path.name}"
            )
    n_expert, n_used = values["expert_count"], values["expert_used_count"]
    if not n_expert or not n_used:
        raise InputError(
            f"{path}: a {values['arch']} model without experts; simlab streams mixture-of-experts models only"
        )
    return GgufModel(
        path, str(values["arch"]), int(values["block_count"] or 0), int(n_expert), int(n_used), tensors
    )


def _shards(path: Path, count: int, index: int) -> list[Path]:
    """The files of a split model, given `split.count` and `split.no` of one; llama.cpp finds them by name."""
    end = f"-{index + 1:05d}-of-{count:05d}.gguf"
    if not path.name.endswith(end):
        raise InputError(f"{path}: shard {index + 1} of {count} by its split.no; its name must end in {end}")
    stem = path.name.removesuffix(end)
    if index != 0:
        raise InputError(f"{path}: give the first shard, {stem}-00001-of-{count:05d}.gguf")
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _read_one(path: Path, tensors: dict[str, TensorPlace]) -> dict[str, int | str | None]:
    base, _ = libraries()
    context = base.gguf_init_from_file(str(path).encode(), gguf_params())
    if not context:
        raise InputError(f"{path}: not a readable GGUF file, it may be cut short: {log_error()}")
    try:
        data = base.gguf_get_data_offset(context)
        end_of_file = path.stat().st_size
        for i in range(base.gguf_get_n_tensors(context)):
            name = base.gguf_get_tensor_name(context, i).decode(errors="replace")
            place = TensorPlace(
                path, data + base.gguf_get_tensor_offset(context, i), base.gguf_get_tensor_size(context, i)
            )
            if place.offset + place.size > end_of_file:
                raise InputError(f"{path}: cut short, tensor {name} ends beyond the end of the file")
            tensors[name] = place
        arch = _value(base, context, "general.architecture")
        return {
            "arch": arch,
            **{k: _value(base, context, f"{arch}.{k}") for k in _OF_ARCH},
            **{k: _value(base, context, k) for k in ("split.no", "split.count")},
        }
    finally:
        base.gguf_free(context)


def _value(base: ctypes.CDLL, context: int, key: str) -> int | str | None:
    index = base.gguf_find_key(context, key.encode())
    if index < 0:
        return None
    kind = base.gguf_get_kv_type(context, index)
    if kind == _STRING:
        return base.gguf_get_val_str(context, index).decode(errors="replace")
    if kind in _INTEGERS:
        return int(getattr(base, f"gguf_get_val_{_INTEGERS[kind]}")(context, index))
    return None
