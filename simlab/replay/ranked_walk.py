"""A group of cells whose order of eviction is fixed: finds the order, for `ranked.py` or `shared_loop.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simlab.replay.batches import WORD, padded
from simlab.replay.programs import compiled
from simlab.replay.ranked import RankedShape, run
from simlab.replay.shape import Tree
from simlab.replay.shared_loop import WORD_64, Batches, Caches, Ranks, walk_ranked
from simlab.replay.shared_walk import STEPS, SharedWalk, Uses, of_uses
from simlab.routing import entry_facts, eviction_key


class _Order(NamedTuple):
    """The order in which entries would leave: first those used before a stretch, `S` of them, then all uses, `U`."""

    seen: NDArray[np.int64]
    """`[S]`: entries in the order of their last use."""
    cache: NDArray[np.int64]
    """`[S + U]`."""
    rank: NDArray[np.int64]
    """`[S + U]`: within the cache, the first to leave first."""
    counts: NDArray[np.int64]
    """`[caches]`: ranks of each."""
    before: NDArray[np.int64]
    """`[U]`: where among the `S + U` the entry stands that is used, -1 where it was never used."""
    latest: NDArray[np.int64]
    """`[B * E]`: where among the `S + U` each entry stands after all uses, -1 for nowhere."""


class RankedWalk(SharedWalk):
    """Takes what `SharedWalk` does."""

    def _lay_out(self) -> None:
        program = self._program
        n_layers, units = program.n_layers, self.lanes["units"]
        line_sizes, line_of_layer = np.unique(units, return_inverse=True)
        entries = program.n_expert * (n_layers // self._n_caches)
        self._shape = RankedShape(
            n_layers=n_layers,
            n_expert=program.n_expert,
            n_slots=program.n_slots,
            per_layer=self._per_layer,
            n_lines=n_layers if self._per_layer else len(line_sizes),
            n_words=-(-(entries + self._most_uses) // WORD),
        )
        self._line = (np.arange(n_layers) if self._per_layer else line_of_layer).astype(np.int32)
        self.lanes |= {
            "line_units": units if self._per_layer else line_sizes.astype(np.int32),
            "line": self._line,
        }

    def _call(
        self,
        carry: Tree,
        moving: Tree,
        uses: Uses,
        steps: Tree,
        shared: NDArray[np.int64],
        lanes: Tree,
    ) -> Tree:
        shape, n_lanes = self._shape, carry["used"].shape[1]
        order = self._order(carry, uses)
        n_seen = len(order.seen)
        lying = np.full((self._n_caches, shape.n_words * WORD), -1, np.int32)
        lying[order.cache[:n_seen], order.rank[:n_seen]] = order.seen
        by_place = np.append(order.rank, -1).astype(np.int32)
        old, new = by_place[order.before], by_place[n_seen:-1]
        given = {"entry": lying, "rank": by_place[order.latest].reshape(carry["stamp"].shape)}
        layer_of_use = of_uses(uses.entry // shape.n_expert, steps["put"].max(axis=1), 0)
        rows = {name: x for name, x in steps.items() if name != "batch"} | {
            "look_up": of_uses(old, steps["look_up"], -1),
            "put": of_uses(new, steps["put"], -1),
            "line": self._line[steps["layer"]],
            "put_line": self._line[layer_of_use],
        }

        def function(carry: Tree, order: Tree, rows: Tree, n: Any, shared: Any, lanes: Tree) -> Tree:
            return run(shape, carry, order, rows, n, shared, lanes)

        call = compiled((shape.key, n_lanes), function)
        return call(moving, given, padded(rows, STEPS + 1), np.int32(len(rows["n"])), shared, lanes)

    def _loop(self, carry: Tree, uses: Uses, batches: Batches, caches: Caches) -> None:
        order = self._order(carry, uses)
        n_seen = len(order.seen)
        n_words = -(-order.counts // WORD_64)
        words = np.append(0, np.cumsum(n_words))
        place = words[order.cache] * WORD_64 + order.rank
        units = np.zeros(words[-1] * WORD_64, np.int32)
        units[place] = caches.units[np.concatenate([order.seen, uses.entry])]
        first = np.full(len(order.latest), -1, np.int64)
        first[order.seen] = place[:n_seen]
        place = np.append(place, -1)
        ranks = Ranks(
            words=words,
            groups=np.append(0, np.cumsum(-(-n_words // WORD_64))),
            old=place[order.before],
            new=place[n_seen:-1],
            units=units,
            before=first,
            after=place[order.latest],
        )
        walk_ranked(batches, ranks, caches)

    def _order(self, carry: Tree, uses: Uses) -> _Order:
        """The order in which entries would leave."""
        stamp = np.asarray(carry["stamp"]).reshape(-1)
        seen = np.flatnonzero(stamp >= 0)
        seen = seen[np.argsort(stamp[seen])]
        state = {
            name: np.concatenate([np.asarray(v).reshape(-1)[seen], uses.state[name]])
            for name, v in carry["eviction_state"].items()
        }
        entry = np.concatenate([seen, uses.entry])
        cache = self._cache[entry // self._program.n_expert]
        key = self._key(state, entry, np.concatenate([stamp[seen], uses.position]), uses.batch)
        # Of equal keys the entry used longest ago leaves first, which is how they stand.
        at = np.argsort(key, kind="stable")
        if self._n_caches > 1:
            at = at[np.argsort(cache[at].astype(np.uint16), kind="stable")]
        counts = np.bincount(cache, minlength=self._n_caches)
        rank = np.empty(len(at), np.int64)
        rank[at] = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        latest = np.full(len(stamp), -1, np.int64)
        latest[seen] = np.arange(len(seen))
        before = np.where(uses.before < 0, latest[uses.entry], len(seen) + uses.before)
        # Of several uses of an entry the last stands.
        latest[uses.entry] = len(seen) + np.arange(len(uses.entry))
        return _Order(seen, cache, rank, counts, before, latest)

    def _key(
        self,
        state: dict[str, NDArray[Any]],
        entry: NDArray[np.int64],
        position: NDArray[np.int64],
        batch: NDArray[np.int64],
    ) -> NDArray[Any]:
        """The keys of entries in that state; the last of them of these batches' uses."""
        program, n_expert = self._program, self._program.n_expert
        nothing = np.zeros(len(entry), bool)
        layer, expert = (entry // n_expert).astype(np.int32), (entry % n_expert).astype(np.int32)
        known = state | entry_facts(program.eviction, layer, expert, nothing, nothing)
        with np.errstate(all="ignore"):
            key, wrong = eviction_key(np, program.eviction, known, position, np.int64(0), self._knobs)
        if wrong is not None and wrong.any():
            at = int(np.argmax(wrong))
            # What was used before this piece was looked at then.
            raise self._refuse(
                int(entry[at]), int(np.append(np.zeros(len(entry) - len(batch), int), batch)[at])
            )
        return np.asarray(key)
