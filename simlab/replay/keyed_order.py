"""In which order entries would leave, batch by batch, where all lanes know the same of them.

Keys are worked out by JAX, put into one number with a place that settles which of equal keys goes first, and sorted
by NumPy, which sorts numbers several times faster than it finds their order.

Shapes: `P` batches, `N` entries of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from simlab.replay.programs import kept
from simlab.replay.shape import Tree
from simlab.replay.shared_order import LAST_USE
from simlab.routing import entry_facts, eviction_key, first_state
from simlab.types import Array, EvictionPolicy

PLACE = "place in order"
"""As `LAST_USE` is, a name that no state of a policy has."""
_SIGN = 1 << 63


class Block(NamedTuple):
    """What is known at some batches in a row."""

    start: int
    """The first of them."""
    known: dict[str, NDArray[Any]]
    """By name `[size, N]`, past the last batch its row again; `PLACE` has a number for each, ascending by last use."""
    entry: NDArray[np.int64]
    """Of each place the entry."""

    @property
    def bits(self) -> int:
        """Bits of a place."""
        return len(self.entry).bit_length()


def blocks(
    first: Mapping[str, NDArray[Any]],
    batch: NDArray[np.int64],
    entry: NDArray[np.int64],
    new: Mapping[str, NDArray[Any]],
    n: int,
    size: int,
) -> Iterator[Block]:
    """`n` batches, `size` at a time.

    Args:
        first: by name `[N]`, before the first batch; `LAST_USE` among them, -1 for never. batch, entry:
            `[U]`, uses in the order in which they were made. new: by name `[U]`, what stands after them.
    """
    now = {name: v.copy() for name, v in first.items()}
    for start in range(0, n, size):
        mine = slice(*np.searchsorted(batch, (start, start + size)))
        # Of equal keys the entry used longest ago goes first: by last use so far, and then as they are used.
        so_far = np.argsort(now[LAST_USE], kind="stable")
        now[PLACE] = np.empty(len(so_far), np.int64)
        now[PLACE][so_far] = np.arange(len(so_far))
        of_place = np.concatenate([so_far, entry[mine]])
        fresh = {name: v[mine] for name, v in new.items()}
        fresh[PLACE] = np.arange(len(so_far), len(of_place))
        known = {
            name: _at_batches(v, batch[mine] - start, entry[mine], fresh[name], size)
            for name, v in now.items()
        }
        yield Block(start, known, of_place)


def _at_batches(
    now: NDArray[Any], batch: NDArray[np.int64], entry: NDArray[np.int64], values: NDArray[Any], n: int
) -> NDArray[Any]:
    """What stands for each entry at each of `n` batches, `[n, N]`; `now` `[N]` is brought up to date."""
    found = np.empty((n, len(now)), now.dtype)
    ends = np.searchsorted(batch, np.arange(n), side="right")
    start = 0
    for one, stop in enumerate(ends.tolist()):
        now[entry[start:stop]] = values[start:stop]
        found[one] = now
        start = stop
    return found


def packed_keys(
    policy: EvictionPolicy, known: Tree, facts: Tree, batch: Array, bits: Array, knobs: Tree
) -> tuple[Array, Array, Array, Array]:
    """Numbers `[P, N]` in the order of (key, place), entries that were never used last; whether by the whole of each
    key; the keys; and bool `[P]`, whether one may be none (`simlab.routing.is_wrong`).

    Args:
        known: by name `[P, N]`, as a `Block` has it. facts: by name `[N]`. batch: int64 `[P]`. bits: of a place.
    """
    stamp, place = known[LAST_USE], known[PLACE]

    def one(known: Tree, batch: Array) -> tuple[Array, Array]:
        return _key(policy, known, facts, batch, knobs)

    key, wrong = kept(jax.vmap(one))({name: v for name, v in known.items() if name != PLACE}, batch)
    above = kept(_whole)(key)
    above = above - above.min()
    room, bits = 62 - bits, bits.astype(jnp.uint64)
    cut = jnp.maximum(64 - lax.clz(above.max()).astype(jnp.int32) - room, 0)
    most = (jnp.uint64(1) << room.astype(jnp.uint64)) - jnp.uint64(1)
    above = jnp.where(stamp < 0, most + jnp.uint64(1), above >> cut.astype(jnp.uint64))
    return (above << bits | place.astype(jnp.uint64)).astype(jnp.int64), cut == 0, key, wrong


def whole_keys(
    policy: EvictionPolicy, known: Tree, first: Array, batch: Array, knobs: Tree, *, n: int, n_expert: int
) -> tuple[Array, Array]:
    """uint64 `[P, N]` in the order of keys, equal where these are; and bool `[P]`, whether a key may be none.

    Args:
        known: by name `[P, N]`, `LAST_USE` among them; what the key makes nothing of may be missing. first: int32
            `[P]`, the first layer of each batch's cache. batch: int64 `[P]`.
    """
    at = np.arange(n, dtype=np.int32)
    rest = first_state(policy.state, (n,)) | {LAST_USE: np.zeros(n, np.int64)}
    nothing = np.zeros(n, bool)

    def one(known: Tree, first: Array, batch: Array) -> tuple[Array, Array]:
        facts = entry_facts(policy, first + at // n_expert, jnp.asarray(at % n_expert), nothing, nothing)
        return _key(policy, rest | known, facts, batch, knobs)

    key, wrong = jax.vmap(one)(known, first, batch)
    return _whole(key), wrong


def wrong_entry(policy: EvictionPolicy, known: Tree, facts: Tree, batch: int, knobs: Any) -> int | None:
    """The first entry used so far whose key at a batch is none (`simlab.routing.is_wrong`), `known` and facts `[N]`."""
    state = {name: v for name, v in known.items() if name != LAST_USE} | facts
    with np.errstate(all="ignore"):
        _, wrong = eviction_key(np, policy, state, known[LAST_USE], np.int64(batch), knobs)
    used = np.flatnonzero(wrong & (known[LAST_USE] >= 0)) if wrong is not None else []
    return int(used[0]) if len(used) else None


def _key(policy: EvictionPolicy, known: Tree, facts: Tree, batch: Array, knobs: Tree) -> tuple[Array, Array]:
    """The keys of one batch, `[N]`, and whether one may be none: of an entry that was never used it is not asked."""
    state = {name: v for name, v in known.items() if name != LAST_USE} | facts
    key, wrong = eviction_key(jnp, policy, state, known[LAST_USE], batch, SimpleNamespace(**knobs))
    return key, jnp.bool_(False) if wrong is None else wrong.any()


def _whole(key: Array) -> Array:
    """uint64 in the order of keys, equal where these are."""
    if jnp.issubdtype(key.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(key, jnp.int64 if key.dtype == jnp.float64 else jnp.int32)
        # Zero has no sign here; by its bits, since to XLA the smallest numbers are zero too.
        bits = jnp.where(bits == jnp.iinfo(bits.dtype).min, 0, bits)
        key = jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)
    if jnp.issubdtype(key.dtype, jnp.unsignedinteger):
        return key.astype(jnp.uint64)
    return key.astype(jnp.int64).astype(jnp.uint64) ^ jnp.uint64(_SIGN)


def in_order(
    packed: NDArray[np.int64], key: NDArray[Any] | None, entry: NDArray[np.int64], bits: int, n: int
) -> NDArray[np.int64]:
    """The first `n` entries of each batch to leave, `[P, n]`.

    Args:
        packed: `[P, N]`, as `packed_keys` has it. key: the keys, where `packed` has not the whole of each. entry: of
            each place the entry.
    """
    first = packed
    if n < packed.shape[1]:
        # One more, to be told apart from the last.
        first = np.partition(packed, n, axis=1)[:, : n + 1]
    first = np.sort(first, axis=1)
    found = entry[first & ((1 << bits) - 1)]
    if key is not None:
        # Keys a last bit apart may have come in the order of their places.
        above = first >> bits
        same = (above[:, 1:] == above[:, :-1]) & (first[:, 1:] >> 62 == 0)
        row, at = np.nonzero(same)
        wrong = key[row, found[row, at]] != key[row, found[row, at + 1]]
        if n < packed.shape[1]:
            wrong |= at == n - 1
        for one in np.unique(row[wrong]):
            found[one] = _of_batch(packed[one], key[one], bits, entry)[: found.shape[1]]
    return found[:, :n]


def _of_batch(
    packed: NDArray[np.int64], key: NDArray[Any], bits: int, entry: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The entries of one batch, `[N]`, by whole keys and then places."""
    place = packed & ((1 << bits) - 1)
    return entry[place[np.lexsort((place, key, packed >> 62))]]
