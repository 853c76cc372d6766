"""Compiling: loops over arrays, and policies as function pointers of fixed signatures, all kept on disk.

What is kept lies in a folder named by a digest of the whole package, since numba itself compares a function's own file
alone and would take the old code of what that calls. A policy becomes a pointer by way of a small module of adapters
that is written there too, named by a digest of the policy's file and of the modules beside it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

import simlab
from simlab.errors import InputError, SimlabWarning
from simlab.policy_check import attribute, one_line
from simlab.queues import Cache
from simlab.types import EvictionPolicy, Knob, RoutingPolicy

Function = TypeVar("Function", bound=Callable[..., Any])

f4, f8, i8, b1 = types.float32, types.float64, types.int64, types.boolean
# Arrays by value would take seven words each, at every call.
_FLOATS, _DOUBLES = types.CPointer(f4), types.CPointer(f8)
CANDIDATE = (f4, i8, i8, b1, f4, f4, f4)
"""value, expert, rank, resident, weight, mass, lighter."""
ROW = (i8, i8, f4, f4, i8, f4)
"""k, layer, top, range, n_resident, heaviest."""
CHOOSE = types.Tuple((f4, i8, b1))(*CANDIDATE, *ROW, _FLOATS, _FLOATS, _DOUBLES)
"""(candidate, row, state, learned, knobs) -> (value, tier or flag, active)."""
UPDATE = types.void(*ROW, _FLOATS, _DOUBLES)
"""(row, state, knobs): state is changed in place."""
TOUCH = types.void(_DOUBLES, i8, b1, b1, f4, i8, i8, i8, i8, i8, _DOUBLES)
"""(state, access, knobs): state is changed in place."""
KEY = f8(_DOUBLES, i8, i8, i8, b1, b1, i8, _DOUBLES)
"""(state, entry, knobs) -> key."""
_INT64S, _BOOLS = types.Array(i8, 1, "C"), types.Array(b1, 1, "C")
_TABLE, _TABLES = types.Array(i8, 2, "C"), types.Array(f8, 2, "C")
CACHE = types.NamedTuple(
    (_INT64S, _BOOLS, _TABLES, _TABLES, _BOOLS, *[_INT64S] * 3, *[_TABLE] * 5, _INT64S),
    Cache,
)
CLOSE = types.void(CACHE, _DOUBLES)
"""(cache, knobs): a queue policy at a batch's end."""


def _digest(paths: list[Path]) -> str:
    found = hashlib.sha256(f"{numba.__version__} {np.__version__}".encode())
    for path in sorted(paths):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@functools.cache
def cache_folder() -> Path:
    """Where compiled code is kept: in the user's cache, else in a folder of this process."""
    folder = Path(simlab.__file__).parent
    code = [*folder.glob("*.py"), *(folder / "replay").glob("*.py")]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simlab" / "compiled"
    try:
        (base / _digest(code)).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base / _digest(code)) as file:
            file.write(bytes(4096))
    except OSError as error:
        base = Path(tempfile.mkdtemp(prefix="simlab-compiled-"))
        warnings.warn(
            SimlabWarning(f"compiled code cannot be kept ({error.strerror}); every command compiles anew"),
            stacklevel=2,
        )
    return base / _digest(code)


setattr(config, "CACHE_DIR", str(cache_folder()))  # noqa: B010 - numba declares none of its settings


_HOW: Any = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}


def loop(function: Function) -> Function:
    """`function`, compiled by numba when it is first called, without Python's lock, and kept on disk."""
    # Arrays are the caller's all the way down: counting references to them would cost more than the work.
    compiled: Any = njit(**_HOW)(function)
    return compiled


class Ref(types.Type):
    """A pointer to a NamedTuple that the caller holds: what has many arrays is passed as one word."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(name=f"Ref({of})")


@register_model(Ref)
class _RefModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.of).get_value_type().as_pointer())


@infer_getattr
class _RefAttribute(AttributeTemplate):
    key = Ref

    def generic_resolve(self, ref: Any, name: str) -> Any:
        return ref.of.types[ref.of.fields.index(name)] if name in ref.of.fields else None


@lower_getattr_generic(Ref)
def _field(_context: Any, builder: Any, ref: Any, pointer: Any, name: str) -> Any:
    place = ref.of.fields.index(name)
    zero = ir.Constant(ir.IntType(32), 0)
    return builder.load(builder.gep(pointer, [zero, ir.Constant(ir.IntType(32), place)], inbounds=True))


def _ref(_typing: Any, of: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return cgutils.alloca_once_value(builder, arguments[0])

    return Ref(of)(of), generate


ref: Any = intrinsic(_ref)
"""A `Ref` to a NamedTuple, for as long as the function runs that asks for it."""


def _pointer(_typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        found = context.make_array(array)(context, builder, arguments[0])
        return builder.gep(found.data, [arguments[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


pointer: Any = intrinsic(_pointer)
"""Where an array's item of a number lies, of a contiguous array of any dimensions."""


def _pin(_typing: Any, of: Any, address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value, place = arguments
        builder.store(value, builder.inttoptr(place, value.type.as_pointer()))
        return place

    return types.int64(of, types.int64), generate


_store: Any = intrinsic(_pin)


@loop
def _store_at(of: Any, address: int) -> int:
    return _store(of, address)


class Pinned:
    """A NamedTuple of arrays whose address stays, so that a call takes a number and not all of the arrays."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self._memory = np.zeros(16 * len(of) + 16, np.int64)
        self.address = _store_at(of, self._memory.ctypes.data)


def ref_at(example: Any) -> Any:
    """What makes, in compiled code, a `Ref` of the address of a pinned tuple of the same types as `example`."""
    of = numba.typeof(example)

    def at(_typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(of).as_pointer())

        return Ref(of)(address), generate

    return intrinsic(at)


# -- policies ------------------------------------------------------------------------------------------------

_HEAD = """
from collections import namedtuple
from numba import cfunc, njit
from numpy import float32 as f4, float64 as f8, int64 as i8
from simlab.replay import compiled
from simlab.types import Access, Candidate, Entry, Row
LOWEST = float("-inf")
Knobs = namedtuple("Knobs", {knobs!r}, module=__name__)
Learned = namedtuple("Learned", {learned!r}, module=__name__)
decide = njit(error_model="numpy", _nrt=False)(function)
change = njit(error_model="numpy", _nrt=False)(other)
"""
_CHOOSE = """
@cfunc(compiled.CHOOSE, cache=True, error_model="numpy", _nrt=False)
def first(value, expert, rank, resident, weight, mass, lighter, k, layer, top, range, n_resident, heaviest,
          state, learned, knobs):
    candidate = Candidate(value, expert, rank, resident, weight, mass, lighter, Learned({learned}))
    found = decide(candidate, Row(k, layer, top, range, n_resident, heaviest), ({state}), Knobs({knobs}))
    return {returned}
"""
_UPDATE = """
@cfunc(compiled.UPDATE, cache=True, error_model="numpy", _nrt=False)
def second(k, layer, top, range, n_resident, heaviest, state, knobs):
    found = change(Row(k, layer, top, range, n_resident, heaviest), ({state}), Knobs({knobs}))
{stored}
"""
_KEY = """
@cfunc(compiled.KEY, cache=True, error_model="numpy", _nrt=False)
def first(state, position, layer, expert, in_pass, speculative, batch, knobs):
    key = f8(decide(Entry(position, layer, expert, in_pass, speculative, batch), ({state}), Knobs({knobs})))
    return LOWEST if key != key else key
"""
_TOUCH = """
@cfunc(compiled.TOUCH, cache=True, error_model="numpy", _nrt=False)
def second(state, position, first, hit, weight, batch, layer, expert, next_position, next_batch, knobs):
    access = Access(position, first, hit, weight, batch, layer, expert, next_position, next_batch)
    found = change(({state}), access, Knobs({knobs}))
{stored}
"""
_CLOSE = """
@cfunc(compiled.CLOSE, cache=True, error_model="numpy", _nrt=False)
def first(cache, knobs):
    decide(cache, Knobs({knobs}))
"""
_RETURNED = {
    "rerank": "f4(found.value), i8(found.tier), bool(found.active)",
    "swap": "f4(found.value), i8(found.replace), bool(found.active)",
    "drop": "f4(0), i8(found), True",
}


def routing_pointers(policy: RoutingPolicy) -> tuple[Any, Any]:
    """What asks about a candidate (`CHOOSE`) and what changes a layer's state (`UPDATE`, or None)."""
    state = "".join(f"f4(state[{i}]), " for i in range(len(policy.state)))
    learned = ", ".join(f"learned[{i}]" for i in range(len(policy.learns)))
    text = _HEAD.format(knobs=_names(policy.knobs), learned=list(policy.learns))
    words = {"state": state, "knobs": _knobs(policy.knobs), "learned": learned}
    text += _CHOOSE.format(returned=_RETURNED[policy.stage], **words)
    if policy.update is not None:
        text += _UPDATE.format(stored=_stored(policy.state), **words)
    return _pointers(policy, text, policy.function, policy.update)


def eviction_pointers(policy: EvictionPolicy) -> tuple[Any, Any]:
    """What gives an entry's key (`KEY`) or closes a batch (`CLOSE`), and what touches state (`TOUCH`, or None)."""
    state = "".join(
        f"{'i8' if isinstance(first, int) else 'f8'}(state[{i}]), "
        for i, first in enumerate(policy.state.values())
    )
    text = _HEAD.format(knobs=_names(policy.knobs), learned=[])
    words = {"state": state, "knobs": _knobs(policy.knobs)}
    text += (_CLOSE if policy.kind == "queue" else _KEY).format(**words)
    if policy.touch is not None:
        text += _TOUCH.format(stored=_stored(policy.state), **words)
    return _pointers(policy, text, policy.function, policy.touch)


def _names(knobs: Mapping[str, Knob]) -> list[str]:
    return list(map(attribute, knobs))


def _knobs(knobs: Mapping[str, Knob]) -> str:
    return ", ".join(f"{'i8' if k.integer else 'f4'}(knobs[{i}])" for i, k in enumerate(knobs.values()))


def _stored(state: Mapping[str, float]) -> str:
    return "\n".join(f"    state[{i}] = found[{i}]" for i in range(len(state))) or "    return"


_POINTERS: dict[str, tuple[Any, Any]] = {}


def _pointers(policy: Any, text: str, function: Any, other: Any) -> tuple[Any, Any]:
    """The two pointers of an adapter module, compiled or from disk."""
    name = f"simlab_{policy.name.partition('@')[0]}_{_code_digest(text, function, other)}"
    if name not in _POINTERS:
        path = cache_folder() / f"{name}.py"
        if not path.exists():
            whole = path.with_suffix(f".{os.getpid()}")
            whole.write_text(text)
            os.replace(whole, path)
        # What numba reads from disk looks for the classes of this module by its name.
        sys.modules[name] = module = ModuleType(name)
        found = vars(module)
        found |= {"function": function, "other": other or (lambda: 0), "__file__": str(path)}
        try:
            exec(compile(text, str(path), "exec"), found)
        except NumbaError as error:
            raise InputError(f"policy {policy.name}: {_reason(error, function, other)}") from error
        _POINTERS[name] = found["first"], found.get("second")
    return _POINTERS[name]


def _code_digest(*parts: Any) -> str:
    """Of an adapter's text and of the files its policy's functions are from, with the modules beside them."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            found.update(part.encode())
        elif part is not None:
            found.update(repr(_code(part.__code__)).encode())
            folder = Path(part.__code__.co_filename).parent
            beside = [getattr(m, "__file__", None) or "" for m in list(sys.modules.values())]
            for file in sorted({Path(f) for f in beside if Path(f).parent == folder and f.endswith(".py")}):
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _code(code: CodeType) -> Any:
    constants = [_code(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames


def _reason(error: Exception, *functions: Any) -> str:
    """Why numba did not compile a policy, and where, on one line."""
    text = str(error)
    for function in functions:
        if function is not None and Path(function.__code__.co_filename).name in text:
            after = text.rpartition(Path(function.__code__.co_filename).name)[2]
            line = "".join(c for c in after[:40] if c.isdigit())
            break
    else:
        line = ""
    where = f"line {line}: " if line else ""
    return (
        f"{where}cannot be compiled; compute with operators, comparisons and simlab.xp (where, minimum, isfinite ...), "
        f"not with if or NumPy ({one_line(error)[:120]})"
    )


# What stands in where a setting has no policy of a kind.


@numba.cfunc(CHOOSE, cache=True)
def no_choice(
    value, expert, rank, resident, weight, mass, lighter, k, layer, top, range, n_resident, heaviest, state, learned,
    knobs,
):  # fmt: skip
    return value, 0, False


@numba.cfunc(UPDATE, cache=True)
def no_update(k, layer, top, range, n_resident, heaviest, state, knobs):
    return


@numba.cfunc(TOUCH, cache=True)
def no_touch(state, position, first, hit, weight, batch, layer, expert, next_position, next_batch, knobs):
    return


@numba.cfunc(KEY, cache=True)
def no_key(state, position, layer, expert, in_pass, speculative, batch, knobs):
    return 0.0


@numba.cfunc(CLOSE, cache=True)
def no_close(cache, knobs):
    return
