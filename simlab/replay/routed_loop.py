"""The loop of a CPU over rows that lanes route by themselves, under LRU, compiled by numba.

It does what `recency.py` has XLA do. XLA's CPU runtime hands out some 60 small loops a step, which costs more than what
they do; here a step is plain code. A policy's own function has run before, in JAX, for all settings at once
(`routed_keys.py`): what is left is to take the best, and to keep the cache.

Lanes are walked in *tiles* of up to 32, row by row. A tile keeps a word per entry with a bit for each lane that has it
in RAM. The words of a layer, laid in the row's score order and turned by 90 degrees, are each lane's mask of residents,
best score first. Of those the first k can win a slot, and the first k of the others; both are in order already, so the
best k come of a merge.

Under LRU an entry is in RAM while its last occurrence lies above a *watermark*. Each lane keeps a *log* of what
occurred and for each entry the place of its last occurrence; evicting moves the watermark up the log, to the next place
that is *live*, whose entry has not occurred since. A log that is full is written anew with its live places alone.

A wrong guess at a branch costs a processor as much as ten look-ups, and so does memory outside a core's own cache:
there are few branches on what a lane finds, and numbers are as small as they can be.

Shapes: `T` tiles, `W` lanes of a tile, `B` MoE layers, `E` experts per layer, `C` caches, `n` rows, `S` settings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from simlab.replay.loops import loop, lowest_bit
from simlab.types import Array

TILE = 32
"""Most lanes of a tile, a bit of a word each."""
APART = 32
"""Places between what two cores write, or they would wait for each other: a cache line and more."""
_LIVE = 64
"""Places of a word of `Caches.live`."""
_NEVER_16 = np.iinfo(np.uint16).max
_WORD = 32
"""Ranks of a word once it is turned."""
TOLD: tuple[str, ...] = (
    "lookups",
    "hits",
    "cold_misses",
    "read_bytes",
    "reranked",
    "substituted",
    "evictions",
)
"""What is counted, in this order; the rest follows from it."""
_LOOKUPS, _HITS, _COLD, _READ_BYTES, _RERANKED, _SUBSTITUTED, _EVICTIONS = range(len(TOLD))


class Caches(NamedTuple):
    """What tiles keep from row to row, written in place. With a leading axis `T` in all."""

    here: Array
    """uint32 `[B * E]`: lanes that have the entry in RAM."""
    last: Array
    """uint16 or uint32 `[B * E, W]`: place in the log of the last occurrence, all bits before the first."""
    log: Array
    """The same `[W, C, places]`: entries in the order in which they occurred."""
    live: Array
    """uint64 `[W, C, places / 64]`: a bit for each place above the watermark whose entry has not occurred since."""
    mark: Array
    """int32 `[C, W]`: the watermark."""
    end: Array
    """int32 `[C, W]`: where the log ends."""
    room: Array
    """int32 `[C, W]`: places of the log that are used before it is written anew."""
    used: Array
    """int64 `[C, W]`: bytes."""

    @classmethod
    def first(cls, n_tiles: int, n_lanes: int, n_caches: int, n_layers: int, n_expert: int) -> Caches:
        """Empty ones."""
        n_entries = n_layers * n_expert
        places = 4 * (n_entries // n_caches + n_expert)
        # What a tile keeps shall stay in a core's cache. A log needs room for each entry once, and for two batches.
        small = n_entries + 2 * n_expert < _NEVER_16
        number = np.dtype(np.uint16 if small else np.uint32)
        if small:
            places = min(places, int(_NEVER_16))
        n_words = -(-places // _LIVE)
        # Lanes that nobody walks keep what two cores write a cache line apart.
        of_cache = (n_tiles, n_caches, n_lanes + APART)
        return cls(
            here=np.zeros((n_tiles, n_entries), np.uint32),
            last=np.full((n_tiles, n_entries, n_lanes), np.iinfo(number).max, number),
            log=np.zeros((n_tiles, n_lanes, n_caches, places), number),
            live=np.zeros((n_tiles, n_lanes, n_caches, n_words), np.uint64),
            mark=np.full(of_cache, -1, np.int32),
            end=np.zeros(of_cache, np.int32),
            room=np.full(of_cache, 4 * n_expert, np.int32),
            used=np.zeros(of_cache, np.int64),
        )

    def of_tile(self, tile: int) -> Caches:
        """A tile's, without the leading axis."""
        return Caches._make(x[tile] for x in self)


class Limits(NamedTuple):
    """What does not change."""

    budget: Array
    """int64 `[lanes, C]`: bytes."""
    off: Array
    """bool `[lanes]`: without a cache."""
    entry_bytes: Array
    """int64 `[B]`."""
    cache_of_layer: Array
    """int64 `[B]`."""
    n_expert: int


@loop
def _without_gaps(
    last: Any, log: Any, live: Any, mark: Any, end: Any, room: Any, lane: int, cache: int, n_expert: int
) -> None:
    """A lane's log written anew, with the places that are live alone."""
    n = 0
    for word in range((mark[cache, lane] + 1) // _LIVE, (end[cache, lane] + _LIVE - 1) // _LIVE):
        bits = live[lane, cache, word]
        while bits != 0:
            entry = log[lane, cache, word * _LIVE + lowest_bit(bits)]
            bits &= bits - np.uint64(1)
            log[lane, cache, n] = entry
            last[entry, lane] = n
            n += 1
    for word in range((end[cache, lane] + _LIVE - 1) // _LIVE):
        low = min(max(n - word * _LIVE, 0), _LIVE)
        live[lane, cache, word] = _low_bits(low)
    mark[cache, lane] = -1
    end[cache, lane] = n
    # As little as makes this rare, to stay in a processor's cache; a batch has room in any case.
    room[cache, lane] = min(4 * n + 4 * n_expert, log.shape[2])


@loop
def _low_bits(n: Any) -> Any:
    """uint64: the lowest n bits, of 64."""
    return np.uint64(0xFFFFFFFFFFFFFFFF) if n == _LIVE else (np.uint64(1) << np.uint64(n)) - np.uint64(1)


@loop
def _lay_masks(here: Any, order: Any, row: int, first: int, n_words: int, mask: Any) -> None:
    """uint32 `mask[lane, word]`: by rank what each lane has in RAM of the layer whose entries begin at `first`."""
    n_expert = order.shape[1]
    for word in range(n_words):
        for i in range(_WORD):
            rank = word * _WORD + i
            mask[i, word] = here[first + order[row, rank]] if rank < n_expert else np.uint32(0)
    # Squares of bits are turned by exchanging halves, then quarters, and so on; all words at once.
    half, low = 16, np.uint32(0x0000FFFF)
    while half > 0:
        for block in range(0, _WORD, 2 * half):
            for i in range(block, block + half):
                for word in range(n_words):
                    a, b = mask[i, word], mask[i + half, word]
                    changed = ((a >> np.uint32(half)) ^ b) & low
                    mask[i, word] = a ^ (changed << np.uint32(half))
                    mask[i + half, word] = b ^ changed
        half >>= 1
        low ^= np.uint32(low << np.uint32(half))


@loop
def _best_of_all(
    order: Any, key: Any, row: int, which: int, here: Any, lane: int, first: int, k: int, ranks: Any
) -> None:
    """The ranks of the k experts of largest key, ties to the lower id, whatever the order of the keys."""
    n = 0
    for rank in range(order.shape[1]):
        expert = order[row, rank]
        kind = np.int64((here[first + expert] >> np.uint32(lane)) & np.uint32(1))
        value = key[row, which, kind, rank]
        at = n
        while at > 0:
            other = order[row, ranks[at - 1]]
            of_other = np.int64((here[first + other] >> np.uint32(lane)) & np.uint32(1))
            theirs = key[row, which, of_other, ranks[at - 1]]
            if theirs > value or (theirs == value and other < expert):
                break
            if at < k:
                ranks[at] = ranks[at - 1]
            at -= 1
        if at < k:
            ranks[at] = rank
            n = min(n + 1, k)


@loop
def walk_rows(
    caches: Any, limits: Any, rows: Any, setting: Any, lanes: Any, k: int, n_used: int, counts: Any, sums: Any
) -> None:
    """Walk rows through the caches of a tile's lanes, each by its own routing.

    One function, since numba counts references to the arrays that another is handed, which takes longer than a step.

    Args:
        caches: the tile's. setting: int64, of each of all lanes. lanes: int64 `[W]`, the tile's. k: slots of a routed
            row. n_used: the model's own k. counts: int64 `[W, len(TOLD)]`, sums: float64 `[W, 3]`; added to.
    """
    here, last, log, live, mark, end, room, used = caches
    budgets, offs, entry_bytes, cache_of_layer, n_expert = limits
    layers, counteds, slots, router, router_k, router_rank, expert = rows[:7]
    key, actives, reach, before, is_plain, mass, regret = rows[7:]
    n_settings, never = actives.shape[1], (1 << 8 * last.itemsize) - 1
    mask = np.empty((_WORD, (n_expert + _WORD - 1) // _WORD), np.uint32)
    words = np.zeros(n_settings, np.int64)
    # Ranks of experts in RAM and of others; one more, to look at past the end.
    rank_a, rank_b, place_a = np.zeros(k + 1, np.int64), np.zeros(k + 1, np.int64), np.zeros(k + 1, np.int64)
    ran, ranks = np.zeros(router.shape[1], np.int64), np.zeros(k, np.int64)
    for row in range(len(layers)):
        n, layer, counted = slots[row], layers[row], counteds[row]
        first, cache, size = layer * n_expert, cache_of_layer[layer], entry_bytes[layer]
        most_words, router_first = 0, True
        for which in range(n_settings):
            if actives[row, which]:
                words[which] = (reach[row, which] + _WORD - 1) // _WORD
                most_words = max(most_words, words[which])
        if most_words > 0:
            _lay_masks(here, expert, row, first, most_words, mask)
            for slot in range(k):
                router_first = router_first and router_rank[row, slot] < k
        for lane in range(len(lanes)):
            number, shift = lanes[lane], np.uint32(lane)
            which = setting[number]
            active, new = actives[row, which], 0
            for slot in range(n):
                ran[slot] = router[row, slot]

            # Which experts: the best k of two lists in order, of experts in RAM and of others.
            if active:
                if is_plain[row, which]:
                    n_a, n_b = 0, 0
                    for word in range(words[which]):
                        bits = mask[lane, word]
                        others = ~bits
                        if word == n_expert // _WORD:
                            others &= (np.uint32(1) << np.uint32(n_expert % _WORD)) - np.uint32(1)
                        others = np.uint32(others)
                        while bits != 0 and n_a < k:
                            rank = word * _WORD + lowest_bit(bits)
                            bits = np.uint32(bits & (bits - np.uint32(1)))
                            rank_a[n_a] = rank
                            place_a[n_a] = before[row, which, rank]
                            n_a += 1
                        while others != 0 and n_b < k:
                            rank_b[n_b] = word * _WORD + lowest_bit(others)
                            others = np.uint32(others & (others - np.uint32(1)))
                            n_b += 1
                        if n_a == k and n_b == k:
                            break
                    i, j = 0, 0
                    for slot in range(k):
                        mine = np.int64(((place_a[i] <= rank_b[j]) & (i < n_a)) | (j >= n_b))
                        # By arithmetic, since a compiler makes a branch of a choice here.
                        ranks[slot] = rank_b[j] + mine * (rank_a[i] - rank_b[j])
                        i += mine
                        j += 1 - mine
                else:
                    _best_of_all(expert, key, row, which, here, lane, first, k, ranks)
                # The router's own are mostly the first k; else they are looked for.
                if router_first:
                    for slot in range(k):
                        new += np.int64(ranks[slot] >= k)
                else:
                    new = k
                    for slot in range(k):
                        for other in range(k):
                            new -= np.int64(router_rank[row, other] == ranks[slot])
                if new > 0:
                    for slot in range(k):
                        ran[slot] = expert[row, ranks[slot]]

            # Look them up, and put them at the log's end.
            hits, cold, evicted = 0, 0, 0
            if offs[number]:
                for i in range(n):
                    cold += np.int64(last[first + ran[i], lane] == never)
                    last[first + ran[i], lane] = 0
            else:
                if end[cache, lane] + n > room[cache, lane]:
                    _without_gaps(last, log, live, mark, end, room, lane, cache, n_expert)
                base = np.int64(end[cache, lane])
                for i in range(n):
                    entry = first + ran[i]
                    in_ram, was = here[entry], np.int64(last[entry, lane])
                    hit = np.int64((in_ram >> shift) & np.uint32(1))
                    hits += hit
                    cold += np.int64(was == never)
                    here[entry] = in_ram | np.uint32(np.uint32(1) << shift)
                    last[entry, lane] = base + i
                    log[lane, cache, base + i] = entry
                    # Of what is not in RAM no place is live: nothing is taken off the first word then.
                    word = hit * (was // _LIVE)
                    live[lane, cache, word] &= ~(np.uint64(hit) << np.uint64(was % _LIVE))
                stop = base + n
                for word in range(base // _LIVE, (stop + _LIVE - 1) // _LIVE):
                    low = _low_bits(max(base - word * _LIVE, 0))
                    live[lane, cache, word] |= _low_bits(min(stop - word * _LIVE, _LIVE)) & ~low
                end[cache, lane] = stop

                # Evict: up to the base, as the batch's own entries do not leave.
                held, budget = used[cache, lane] + (n - hits) * size, budgets[number, cache]
                if held > budget:
                    word = (mark[cache, lane] + 1) // _LIVE
                    bits_left = live[lane, cache, word]
                    while held > budget:
                        while bits_left == 0 and word * _LIVE < base:
                            live[lane, cache, word] = 0
                            word += 1
                            bits_left = live[lane, cache, word]
                        place = word * _LIVE + lowest_bit(bits_left)
                        if place >= base:
                            break
                        mark[cache, lane] = place
                        bits_left &= bits_left - np.uint64(1)
                        entry = np.int64(log[lane, cache, place])
                        here[entry] &= np.uint32(~(np.uint32(1) << shift))
                        held -= entry_bytes[np.uint32(entry) // np.uint32(n_expert)]
                        evicted += 1
                    live[lane, cache, word] = bits_left
                used[cache, lane] = held

            if not counted:
                continue
            counts[lane, _LOOKUPS] += n
            counts[lane, _HITS] += hits
            counts[lane, _COLD] += cold
            counts[lane, _READ_BYTES] += (n - hits) * size
            counts[lane, _EVICTIONS] += evicted
            counts[lane, _RERANKED] += np.int64(active) * k
            counts[lane, _SUBSTITUTED] += new

            # Against the router: agreement, and mass and regret slot by slot, as `routes.against_router` adds them.
            if router_k[row] == 0 or n == 0:
                continue
            if new == 0:
                for slot in range(k):
                    ranks[slot] = router_rank[row, slot]
            same = k - new
            if k != n_used:
                same = 0
                for slot in range(k):
                    for other in range(n_used):
                        if router_rank[row, other] == ranks[slot]:
                            same += 1
                            break
            sums[lane, 2] += same / router_k[row]
            if new > 0 or k != n_used:
                lost, worse = 0.0, 0.0
                for slot in range(max(k, n_used)):
                    a, b = 0.0, 0.0
                    if slot < n_used and router_rank[row, slot] >= 0:
                        a = mass[row, router_rank[row, slot]]
                        b = regret[row, router_rank[row, slot]]
                    if slot < k:
                        a -= mass[row, ranks[slot]]
                        b -= regret[row, ranks[slot]]
                    lost += a
                    worse += b
                sums[lane, 0] += lost
                sums[lane, 1] += worse
