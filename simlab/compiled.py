"""numba's compiled code, kept on disk from one command to the next: whole, or compiled anew with a warning.

numba trusts what it reads back and raises what it meets while writing. Here every file has a checksum, and a cache
that is damaged, full or not to be written costs a warning and the time of compiling.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

from simlab.errors import SimlabWarning

Function = TypeVar("Function", bound=Callable[..., Any])
_DIGEST_BYTES = hashlib.sha256().digest_size


def compiled(function: Function, **how: Any) -> Function:
    """`function`, compiled by numba when it is first called, and kept where numba may write: beside its source, or in
    the user's folder for such files. `how`: what `numba.njit` takes."""
    made: Any = njit(**how)(function)
    try:
        made._cache = _Cache(function)
    except RuntimeError as error:  # numba finds no folder to write to
        _warn(f"compiled code cannot be kept ({error})")
    return made


def _warn(what: str) -> None:
    warnings.warn(f"{what}; compiling it anew, and going on", SimlabWarning, stacklevel=2)


class _Files(IndexDataCacheFile):
    """A function's files, each with its key and a checksum."""

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        if found is not None and found[0] != key:
            raise ValueError("it is of another function")
        return found and found[1]

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("its checksum differs")
        return pickle.loads(body)

    def _save_data(self, name: str, data: Any) -> None:
        body = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(body + hashlib.sha256(body).digest())


class _Cache(FunctionCache):
    """numba's cache of one function, of which no failure is the caller's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp, name = self._impl.locator.get_source_stamp(), self._impl.filename_base
        self._cache_file = _Files(self._cache_path, f"{name}.simlab", stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling what is damaged may raise anything
            _warn(f"{self._cache_path}: compiled code there is damaged ({error or type(error).__name__})")
            self._quietly(self.flush)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._quietly(lambda: super(_Cache, self).save_overload(sig, data))

    def _quietly(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # as above, of the index
            why = getattr(error, "strerror", None) or error or type(error).__name__
            _warn(f"{self._cache_path}: compiled code cannot be kept there ({why})")
