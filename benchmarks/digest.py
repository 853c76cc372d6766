"""How long the digest of a large model takes from disk: `python benchmarks/digest.py [GB]`, 4 by default.

Writes a GGUF of that size into a temporary folder, the embedded model's layers over and over, has the kernel forget it,
and times `GgufModel.digest`. What a model of 20 GB with a real number of tensors takes follows from its samples.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import gguf

from simlab.record.engine import EMBEDDED_MODEL
from simlab.record.gguf import SAMPLE_BYTES, SAMPLES, read_gguf

REAL_TENSORS = 579
"""Of Qwen3-30B-A3B, some 18 GB at Q4_K_M."""


def write_repeated(path: Path, n_bytes: int) -> None:
    """The embedded model with its layers repeated until the tensors hold `n_bytes`."""
    model = gguf.GGUFReader(EMBEDDED_MODEL)
    layers: dict[str, list] = {}
    for tensor in model.tensors:
        layers.setdefault(tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "", []).append(
            tensor
        )
    rest = layers.pop("")
    n_layer = n_bytes * len(layers) // sum(t.n_bytes for of in layers.values() for t in of)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for field in model.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = n_layer if field.name.endswith(".block_count") else field.contents()
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, value)
        else:
            writer.add_key_value(field.name, value, field.types[0])
    for tensor in rest:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for i in range(n_layer):
        for tensor in layers[str(i % len(layers))]:
            name = ".".join(["blk", str(i), *tensor.name.split(".")[2:]])
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(gigabytes: float) -> None:
    """Write, forget, time five times."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "large.gguf"
        write_repeated(path, int(gigabytes * 1e9))
        model = read_gguf(path)
        seconds = []
        for _ in range(5):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
            began = time.perf_counter()
            model.digest()
            seconds.append(time.perf_counter() - began)
        median = sorted(seconds)[2]
        most = SAMPLES * len(model.tensors)
        real = SAMPLES * REAL_TENSORS
        size, n = path.stat().st_size / 1e9, len(model.tensors)
        print(f"{size:.2f} GB, {n:,} tensors, up to {most:,} samples of {SAMPLE_BYTES} bytes, from disk:")
        print(f"{median:.2f} s (median of 5, {min(seconds):.2f} to {max(seconds):.2f})")
        print(
            f"20 GB in {REAL_TENSORS} tensors, {real:,} samples: {median * real / most:.3f} s by their count"
        )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 4.0)
