"""Arrays as people dump them from vLLM, SGLang and transformers: `.npz`, `.npy`, `.safetensors`.

Ids `[tokens, layers, k]`, and where there are any, weights of that shape, scores and gate probabilities
`[tokens, layers, n_expert]` (layers first if `axes` of the facts says so) and, per token, turn, phase, step (context
position), graph and token (vocabulary id). `NAMES` lists what an array may be called; `columns` of the facts names
any other.

NumPy's files are parsed here, by NumPy's header reader, because `numpy.load` makes room for whatever size a header
claims before it looks how much data there is. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from simlab.bounds import require_memory
from simlab.errors import InputError, SimlabWarning
from simlab.trace.facts import LAYERS_FIRST, TOKENS_FIRST, Facts
from simlab.trace.reading import one_line, read_bytes, shown
from simlab.trace.routings import Routings

NAMES: dict[str, tuple[str, ...]] = {
    "ids": (
        "ids", "experts", "expert", "expert_ids", "expert_id", "topk_ids", "topk_indices", "topk_idx",
        "selected_experts", "routed_experts", "router_experts",
    ),
    "weights": (
        "weights", "weight", "topk_weights", "topk_probs", "expert_weights", "routing_weights", "selected_probs",
    ),
    "scores": ("scores", "router_scores", "router_logits", "router_probs", "gate_logits", "logits", "probs"),
    "gate_probs": ("gate_probs",),
    "turn": ("turn", "turns"),
    "phase": ("phase", "phases"),
    "step": ("step", "steps", "position", "positions"),
    "graph": ("graph", "graphs", "batch"),
    "token": ("token", "token_ids", "input_ids"),
}  # fmt: skip
"""Our name of an array, and what files call it."""
PER_TOKEN = ("turn", "phase", "step", "graph", "token")
_ZIP, NPY = b"PK\x03\x04", b"\x93NUMPY"
_MOST_DEFLATED = 1040
"""Deflate makes at most 1,032 bytes of one."""
_VALUE_BYTES = 25
"""Memory of a value at the most that is held of one at once, from the file to the rows of a trace; measured."""
_MOST_AXES, _LONGEST = 32, (1 << 63) - 1
"""What every NumPy can hold."""
_WIDE = ("ids", "weights", "scores", "gate_probs")
_MOST_COMPARED, _SURE = 256, 5.0
"""Tokens, layers and slots that are compared to tell one axis from the other; standard errors between them."""

Load = Callable[[], NDArray[Any]]


def is_arrays(path: Path, head: bytes) -> bool:
    """Whether a file that begins like this holds arrays."""
    return (
        head.startswith((_ZIP, b"PK\x05\x06", NPY))
        or path.suffix in (".npz", ".npy")
        or is_safetensors(path, head)
    )


def is_safetensors(path: Path, head: bytes) -> bool:
    """Whether it is a safetensors file: by its name, or by the JSON header after eight bytes of its length."""
    return path.suffix == ".safetensors" or (len(head) > 9 and head[5:10] == b'\0\0\0{"')


def read_arrays(paths: Sequence[Path], facts: Facts) -> Routings:
    """Routings from one npz or safetensors file, or from npy files of one array each.

    Raises:
        InputError: a file cannot be read, or its arrays do not belong together.
    """
    held: dict[str, tuple[Path, Load]] = {}
    for path in paths:
        for name, load in _open(path).items():
            if name in held:
                raise InputError(f"{path}: a second array '{name}' beside {held[name][0]}")
            held[name] = (path, load)
    names = pick_names(paths[0], list(held), NAMES, facts, "array")
    if "ids" not in names and len(held) == 1 and paths[0].suffix == ".npy" and not facts.columns:
        names = {"ids": next(iter(held))}
    if "ids" not in names:
        raise InputError(
            f"{paths[0]}: no array of expert ids among {shown(sorted(held))}; name it with --columns ids=NAME"
        )
    return _Arrays(
        paths[0], names, {ours: _load(*held[theirs]) for ours, theirs in names.items()}, facts
    ).routings()


def pick_names(
    path: Path, found: Sequence[str], known: Mapping[str, tuple[str, ...]], facts: Facts, word: str
) -> dict[str, str]:
    """Our names to the file's: those of `columns`, then those everybody uses.

    Raises:
        InputError: a name of `columns` that we or the file do not have, or two that would both do.
    """
    for ours, theirs in facts.columns.items():
        if ours not in known:
            raise facts.refuse("columns", f"{shown(ours)} is unknown; there are {', '.join(known)}")
        if theirs not in found:
            raise facts.refuse(
                "columns", f"{path} has no {word} {shown(theirs)}; it has {shown(sorted(found))}"
            )
    names = dict(facts.columns)
    taken = set(names.values())
    for ours, candidates in known.items():
        if ours in names:
            continue
        here = [name for name in found if name.lower() in candidates and name not in taken]
        if len(here) > 1:
            raise InputError(
                f"{path}: {word}s {' and '.join(map(repr, here))} could both be the {ours}; "
                f"choose with --columns {ours}=NAME"
            )
        if here:
            names[ours] = here[0]
            taken.add(here[0])
    return names


# ---------------------------------------------------------------------------------------------------------
# Files


def _open(path: Path) -> dict[str, Load]:
    head = read_bytes(path, 16)
    if head.startswith(NPY):
        data = read_bytes(path)
        return {_stem(path): lambda: _parse_npy(path, io.BytesIO(data), len(data), cut_is_told=True)}
    if head.startswith((_ZIP, b"PK\x05\x06")):
        return _open_npz(path, read_bytes(path))
    if is_safetensors(path, head):
        return _open_safetensors(path)
    raise InputError(f"{path}: begins like no npz, npy or safetensors file; is it cut, or of another kind?")


def _stem(path: Path) -> str:
    """An npy file's array name: `ids` of `ids.npy` and, of longer names, what is known at their end."""
    stem = path.stem.lower()
    known = sorted((name for names in NAMES.values() for name in names), key=len, reverse=True)
    return next((n for n in known if stem == n or stem.endswith(("-" + n, "_" + n, "." + n))), path.stem)


def _open_npz(path: Path, data: bytes) -> dict[str, Load]:
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        members = {info.filename: info for info in archive.infolist()}
    except Exception as error:  # what zipfile raises on damaged bytes is a dozen types
        raise InputError(f"{path}: not a readable npz, cut short or damaged: {one_line(error)}") from error

    def load(name: str) -> Callable[[], NDArray[Any]]:
        def read() -> NDArray[Any]:
            info = members[name]
            if info.file_size > _MOST_DEFLATED * (info.compress_size + 64):
                raise InputError(
                    f"{path}, array '{name}': claims {info.file_size} bytes, which it cannot hold"
                )
            require_memory(2 * info.file_size, f"{path}, array '{name}': {info.file_size} bytes", len(data))
            try:
                with archive.open(info) as member:
                    where = f", array '{name.removesuffix('.npy')}'"
                    return _parse_npy(path, member, info.file_size, where, on_disk=len(data))
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"{path}, array '{name}': cannot be read: {one_line(error)}") from error

        return read

    return {name.removesuffix(".npy"): load(name) for name in members if name.endswith(".npy")}


def _open_safetensors(path: Path) -> dict[str, Load]:
    try:
        import ml_dtypes  # noqa: F401  teaches NumPy bfloat16; JAX brings it
        import safetensors
    except ImportError as error:
        raise InputError(
            f"{path}: reading safetensors needs {error.name}; install simlab with its extra 'arrays'"
        ) from error

    def load(name: str) -> Load:
        def read() -> NDArray[Any]:
            try:
                with safetensors.safe_open(str(path), framework="numpy") as file:
                    n_values = math.prod(file.get_slice(name).get_shape())
                    _require_room(path, f", array '{name}'", n_values)
                    return file.get_tensor(name)
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"{path}, array '{name}': cannot be read: {one_line(error)}") from error

        return read

    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            names = list(file.keys())
    except Exception as error:
        raise InputError(f"{path}: not a readable safetensors file: {one_line(error)}") from error
    return {name: load(name) for name in names}


def _require_room(path: Path, where: str, n_values: int, on_disk: int | None = None) -> None:
    require_memory(n_values * _VALUE_BYTES, f"{path}{where}: {n_values} values", on_disk)


def _parse_npy(
    path: Path,
    file: IO[bytes],
    size: int,
    where: str = "",
    *,
    cut_is_told: bool = False,
    on_disk: int | None = None,
) -> NDArray[Any]:
    """An array of a npy file of `size` bytes; one that ends early keeps its whole tokens where `cut_is_told`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers as Python 2 wrote them, which read well
            version = np.lib.format.read_magic(file)
            read_header = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read_header is None:
                raise InputError(
                    f"{path}{where}: npy version {version[0]}.{version[1]}, simlab reads 1.0 and 2.0"
                )
            shape, fortran, dtype = read_header(file)
    except InputError:
        raise
    except Exception as error:  # the header is a Python literal, and fails in as many ways
        raise InputError(f"{path}{where}: not a readable npy array: {one_line(error)}") from error
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        hint = "; is it bfloat16? save it as float32" if dtype.kind == "V" else ""
        raise InputError(f"{path}{where}: of type {dtype}, must be whole numbers or floats{hint}")
    impossible = InputError(f"{path}{where}: shape {shown(list(shape))} is impossible")
    if len(shape) > _MOST_AXES or any(isinstance(n, bool) or not 0 <= n <= _LONGEST for n in shape):
        raise impossible
    _require_room(path, where, min(math.prod(shape), size // dtype.itemsize), on_disk)
    content = file.read()
    held = len(content)
    needed = math.prod(shape) * dtype.itemsize
    if held < needed:
        per_token = needed // shape[0] if shape else 0
        whole = held // per_token if per_token else 0
        if not cut_is_told or fortran or not whole:
            raise InputError(f"{path}{where}: cut short, {held} of {needed} bytes are there")
        text = f"{path}{where}: cut short at its end; using its {whole} complete tokens of {shape[0]}"
        warnings.warn(text, SimlabWarning, stacklevel=2)
        shape = (whole, *shape[1:])
    flat = np.frombuffer(content, dtype, math.prod(shape))
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError:  # nothing in it, but axes that NumPy cannot multiply
        raise impossible from None


def _load(path: Path, load: Load) -> NDArray[Any]:
    try:
        return load()
    except MemoryError as error:
        raise InputError(f"{path}: does not fit into memory") from error


# ---------------------------------------------------------------------------------------------------------
# Shapes and types


def _shared(ids: NDArray[Any], axis: int) -> NDArray[np.int64]:
    """How many experts neighbours along an axis have in common, of a part of the rows."""
    part = np.moveaxis(ids[:_MOST_COMPARED, :_MOST_COMPARED], axis, 0)
    found = np.zeros((part.shape[0] - 1, part.shape[1]), np.int64)
    for slot in range(part.shape[2]):
        found += (part[1:] == part[:-1, :, slot, None]).any(axis=2)
    # Rows of one number throughout are placeholders, of padding or of dense layers.
    routed = (part != part[:, :, :1]).any(axis=2) | (part.shape[2] == 1)
    kept = found[routed[1:] & routed[:-1]]
    return kept if kept.size else np.zeros(1, np.int64)


class _Arrays:
    """The arrays of one dump, checked against each other."""

    def __init__(
        self, path: Path, names: dict[str, str], arrays: dict[str, NDArray[Any]], facts: Facts
    ) -> None:
        if facts.axes == LAYERS_FIRST:
            arrays = {n: a.swapaxes(0, 1) if n in _WIDE and a.ndim == 3 else a for n, a in arrays.items()}
        self.path, self.names, self.arrays, self.facts = path, names, arrays, facts

    def refuse(self, ours: str, problem: str) -> InputError:
        return InputError(f"{self.path}, array '{self.names[ours]}': {problem}")

    def routings(self) -> Routings:
        ids = self.arrays["ids"]
        if ids.dtype.kind not in "iu":
            raise self.refuse("ids", f"of type {ids.dtype}, and expert ids are whole numbers")
        if ids.ndim != 3 or 0 in ids.shape:
            raise self.refuse(
                "ids", f"of shape {list(ids.shape)}, must be [tokens, layers, k], none of them 0"
            )
        n_tokens, n_layers, k = ids.shape
        if self.facts.axes is None and (why := self._looks_swapped(ids)):
            raise self.refuse(
                "ids",
                f"of shape {list(ids.shape)}, and axes that look like [layers, tokens, k]: {why}; say --axes "
                f"{LAYERS_FIRST} or --axes {TOKENS_FIRST}",
            )
        layers = self._layers(n_layers)
        wide = {name: self._floats(name) for name in ("weights", "scores", "gate_probs")}
        n_rows = n_tokens * n_layers

        def where(name: str, row: int, slot: int | None) -> str:
            at = f", slot {slot}" if slot is not None else ""
            array = self.names.get(name, name)
            return (
                f"{self.path}, array '{array}', token {row // n_layers}, layer {layers[row % n_layers]}{at}"
            )

        per_token, last_token = self._per_token(n_tokens)
        limit = int(np.iinfo(ids.dtype).max)
        if ids.dtype.itemsize == 8 and ids.dtype.kind == "u":
            ids = np.minimum(ids, np.uint64(np.iinfo(np.int64).max))
        return Routings(
            path=self.path,
            token=np.repeat(np.arange(n_tokens), n_layers),
            layer=np.tile(np.array(layers, np.int64), n_tokens),
            layers=layers,
            experts=ids.astype(np.int64).reshape(n_rows, k),
            n_tokens=n_tokens,
            where=where,
            **{n: None if a is None else a.reshape(n_rows, a.shape[2]) for n, a in wide.items()},
            tokens=per_token,
            last_token=last_token,
            id_limit=limit,
        )

    def _looks_swapped(self, ids: NDArray[Any]) -> str | None:
        """Why the first axis may be the layers, None where it may not."""
        n_tokens, n_layers, k = ids.shape
        facts = self.facts
        said = [facts.n_layer] + [
            len(given)
            for given in (facts.moe_layers, facts.expert_bytes, facts.dense_bytes)
            if isinstance(given, Sized)
        ]
        if n_layers in said:
            return None
        if n_tokens in said:
            return f"{n_tokens} layers are named"
        if n_layers > n_tokens:
            return "more layers than tokens"
        if k > _MOST_COMPARED or min(n_tokens, n_layers) < 2:
            return None
        # A token routes much as the one before it; layers number their experts each in its own way.
        along_tokens, along_layers = (_shared(ids, axis) for axis in (0, 1))
        error = math.sqrt(along_tokens.var() / along_tokens.size + along_layers.var() / along_layers.size)
        if along_layers.mean() - along_tokens.mean() > _SURE * error:
            return (
                f"neighbours along the second axis share {along_layers.mean():.2f} of {k} experts, along the first "
                f"{along_tokens.mean():.2f}"
            )
        return None

    def _layers(self, n_layers: int) -> tuple[int, ...]:
        """Numbers of all layers there are; those of `moe_layers` may be some of them, which are picked later."""
        layers = self.facts.moe_layers
        if layers is None or (len(layers) != n_layers and layers[-1] < n_layers):
            return tuple(range(n_layers))
        if len(layers) != n_layers:
            raise self.refuse(
                "ids", f"{n_layers} layers, but {self.facts.said['moe_layers']} says {len(layers)}"
            )
        return layers

    def _floats(self, name: str) -> NDArray[np.float32] | None:
        if name not in self.names:
            return None
        array = self.arrays[name]
        ids = self.arrays["ids"].shape
        if array.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
            raise self.refuse(name, f"of type {array.dtype}, must be float16, bfloat16, float32 or float64")
        last = ids[2] if name == "weights" else "n_expert"
        if array.ndim != 3 or array.shape[:2] != ids[:2] or (name == "weights" and array.shape[2] != ids[2]):
            raise self.refuse(
                name, f"of shape {list(array.shape)}, must be [{ids[0]}, {ids[1]}, {last}], as the ids are"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            single = array.astype(np.float32)
            lost = np.isinf(single) & ~np.isinf(array) if array.dtype == np.float64 else np.zeros(1, bool)
        if lost.any():
            token, layer, _ = np.argwhere(lost)[0].tolist()
            raise self.refuse(name, f"a number too large for float32 at token {token}, layer {layer}")
        if name == "scores" and array.dtype.itemsize == 2:
            text = (
                f"{self.path}, array '{self.names[name]}': {array.dtype.name} has few digits, so near-ties are "
                "ties; margins act on the rounded scores"
            )
            warnings.warn(text, SimlabWarning, stacklevel=2)
        return single

    def _per_token(self, n_tokens: int) -> tuple[dict[str, NDArray[np.int64]], int | None]:
        out: dict[str, NDArray[np.int64]] = {}
        last_token: int | None = None
        for name in PER_TOKEN:
            if name not in self.names:
                continue
            array = self.arrays[name]
            if array.dtype.kind not in "iu":
                raise self.refuse(name, f"of type {array.dtype}, must be whole numbers")
            # The last sampled token is never evaluated, so it has an id and no routing.
            one_more = name == "token" and array.shape == (n_tokens + 1,)
            if array.shape != (n_tokens,) and not one_more:
                raise self.refuse(name, f"of shape {list(array.shape)}, must be [{n_tokens}], one per token")
            if array.dtype == np.uint64:
                array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))
            values = array.astype(np.int64)
            if one_more:
                last_token, values = int(values[-1]), values[:-1]
                if not 0 <= last_token <= np.iinfo(np.int32).max:
                    raise self.refuse(name, f"{last_token} at token {n_tokens} is no id of a vocabulary")
            out[name] = values
        return out, last_token
