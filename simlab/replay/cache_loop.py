"""What stays: one cache in the compiled loop, from a batch's misses to its victims. Rules: engine-semantics, section 3.

A static key is pushed when its entry is used and taken from an array that is a queue as long as keys come in order,
and a heap from the first time that they do not; a place in it is out of date where the entry has been used since.
Dynamic keys are worked out at a batch's end for what is in RAM. Queue policies do as they say (`simlab.queues`).
"""

from __future__ import annotations

import numpy as np

from simlab.queues import Cache
from simlab.replay.compiled import loop, pointer

STATIC, DYNAMIC, QUEUE = range(3)
(
    POSITION, BATCH_POSITION, PASS_POSITION, COLDEST, NAN_ROW, N_VICTIMS, N_MEMBERS, ROW, WRONG_ROW, WRONG_AT,
    N_NUMBERS,
) = range(11)  # fmt: skip
"""Places in `Lane.numbers`. `ROW` is the row under way; a policy's first value that is none (`note_wrong`) was made in
`WRONG_ROW`, of the expert `WRONG_AT`, or of the entry below -1 by it."""


@loop
def note_wrong(numbers, at):
    """Note a value of NaN, or of +inf made from finite input, unless there was one before; -inf masks."""
    if numbers[WRONG_AT] == -1:
        numbers[WRONG_ROW], numbers[WRONG_AT] = numbers[ROW], at


@loop
def _less(key, place, other_key, other_place):
    return key < other_key or (key == other_key and place < other_place)


@loop
def _sink(keys, places, entries, n, i):
    """Put the record at `i` where it belongs among those below it."""
    key, place, entry = keys[i], places[i], entries[i]
    while 2 * i + 1 < n:
        c = 2 * i + 1
        if c + 1 < n and _less(keys[c + 1], places[c + 1], keys[c], places[c]):
            c += 1
        if not _less(keys[c], places[c], key, place):
            break
        keys[i], places[i], entries[i] = keys[c], places[c], entries[c]
        i = c
    keys[i], places[i], entries[i] = key, place, entry


@loop
def _heapify(keys, places, entries, n):
    for i in range(n // 2 - 1, -1, -1):
        _sink(keys, places, entries, n, i)


@loop
def _push(s, lane, c, key, place, entry):
    """Put an entry's new key and last occurrence into the order of its cache."""
    keys, places, entries = lane.keys[c], lane.places[c], lane.entries[c]
    head, n = lane.heads[c], lane.counts[c]
    # What is out of date is cleared before it is most of what there is: a small array stays in a core's own cache.
    if n - head > 2 * lane.n_held[c] + 64 or n == keys.shape[0]:
        m = 0
        for x in range(head, n):
            if lane.resident[entries[x]] and places[x] == lane.stamp[entries[x]]:
                keys[m], places[m], entries[m] = keys[x], places[x], entries[x]
                m += 1
        head, n = 0, m
        if lane.is_heap[c]:
            _heapify(keys, places, entries, n)
    if not lane.is_heap[c] and n > head and key < keys[n - 1]:
        for x in range(head, n):
            keys[x - head], places[x - head], entries[x - head] = keys[x], places[x], entries[x]
        n -= head
        head = 0
        lane.is_heap[c] = True
        _heapify(keys, places, entries, n)
    i = n
    if lane.is_heap[c]:
        while i > 0:
            above = (i - 1) >> 1
            if not _less(key, place, keys[above], places[above]):
                break
            keys[i], places[i], entries[i] = keys[above], places[above], entries[above]
            i = above
    keys[i], places[i], entries[i] = key, place, entry
    lane.heads[c], lane.counts[c] = head, n + 1


@loop
def _pop(lane, c):
    """The entry of the least key in a cache's order, taken out, and its place."""
    keys, places, entries = lane.keys[c], lane.places[c], lane.entries[c]
    head = lane.heads[c]
    entry, place = np.int64(entries[head]), places[head]
    if lane.is_heap[c]:
        n = lane.counts[c] - 1
        keys[0], places[0], entries[0] = keys[n], places[n], entries[n]
        _sink(keys, places, entries, n, 0)
        lane.counts[c] = n
    else:
        lane.heads[c] = head + 1
    return entry, place


@loop
def _enter(s, lane, c, layer, entry):
    """Make an entry resident."""
    lane.resident[entry] = True
    lane.used[c] += lane.layer_bytes[layer]
    lane.n_in_layer[layer] += 1
    lane.n_held[c] += 1
    if s.kind != STATIC:
        n = lane.numbers[N_MEMBERS]
        lane.members[n], lane.spot[entry] = entry, n
        lane.numbers[N_MEMBERS] = n + 1


@loop
def _leave(s, lane, c, entry):
    """Let an entry go, and note that it went."""
    layer = lane.layer_of[entry]
    lane.resident[entry] = False
    if lane.marks[entry]:
        lane.marks[entry] = False
        lane.any_marks[0] -= 1
    lane.used[c] -= lane.layer_bytes[layer]
    lane.n_in_layer[layer] -= 1
    lane.n_held[c] -= 1
    if s.kind != STATIC:
        n = lane.numbers[N_MEMBERS] - 1
        last = lane.members[n]
        lane.members[lane.spot[entry]], lane.spot[last] = last, lane.spot[entry]
        lane.numbers[N_MEMBERS] = n
    lane.victims[lane.numbers[N_VICTIMS]] = entry
    lane.numbers[N_VICTIMS] += 1


@loop
def _key_of(key, s, lane, entry, batch):
    layer = np.int64(lane.layer_of[entry])
    found = key(
        pointer(lane.entry_state, entry * lane.entry_state.shape[1]), lane.stamp[entry], layer,
        entry - layer * s.n_expert,
        lane.stamp[entry] >= lane.numbers[PASS_POSITION], lane.marks[entry], batch,
        pointer(lane.evict_knobs, 0),
    )  # fmt: skip
    if found != found or found == np.inf:
        note_wrong(lane.numbers, -2 - entry)
    return found


@loop
def bring_in(key, s, lane, layer, expert, batch):
    """Make an entry resident at the least recent end, before its layer's batch is judged; False if it was already."""
    entry, c = layer * s.n_expert + expert, layer if s.per_layer else 0
    if lane.resident[entry] or s.off:
        return False
    _enter(s, lane, c, layer, entry)
    lane.marks[entry] = True
    lane.numbers[COLDEST] -= 1
    lane.stamp[entry] = lane.numbers[COLDEST]
    if s.kind == STATIC:
        _push(s, lane, c, _key_of(key, s, lane, entry, batch), lane.stamp[entry], entry)
    return True


@loop
def close_batch(key, close, s, lane, layer, batch, hits, number):
    """Insert a batch's misses and evict; how many left.

    Args:
        batch: int64 `[n]`, its entries, put in the order of their last occurrence here. hits: bool `[n]`, of them.
    """
    lane.numbers[N_VICTIMS] = 0
    if s.off:
        return 0
    c, stamp, n = layer if s.per_layer else 0, lane.stamp, batch.shape[0]
    for i in range(1, n):
        entry, hit, j = batch[i], hits[i], i
        while j > 0 and stamp[batch[j - 1]] > stamp[entry]:
            batch[j], hits[j] = batch[j - 1], hits[j - 1]
            j -= 1
        batch[j], hits[j] = entry, hit
    for i in range(n):
        if not hits[i]:
            _enter(s, lane, c, layer, batch[i])
    limit = lane.limit[c]
    if s.kind == STATIC:
        if not s.bypass:
            _evict_static(s, lane, c, limit)
        for i in range(n):
            _push(s, lane, c, _key_of(key, s, lane, batch[i], number), stamp[batch[i]], batch[i])
        if s.bypass:
            _evict_static(s, lane, c, limit)
    elif s.kind == DYNAMIC:
        if lane.used[c] > limit:
            _evict_dynamic(key, s, lane, c, layer, limit, number)
    else:
        _evict_queue(close, s, lane, c, layer, limit, batch, hits)
    return lane.numbers[N_VICTIMS]


@loop
def _evict_static(s, lane, c, limit):
    """Without a bypass the batch's own entries are pushed only after this, so that none of them can leave."""
    while lane.used[c] > limit and lane.counts[c] > lane.heads[c]:
        entry, place = _pop(lane, c)
        if lane.resident[entry] and place == lane.stamp[entry]:
            _leave(s, lane, c, entry)


@loop
def _evict_dynamic(key, s, lane, c, layer, limit, number):
    keys, places, entries, n = lane.keys[0], lane.places[0], lane.entries[0], 0
    own = lane.numbers[BATCH_POSITION]
    among = s.n_expert if s.per_layer else lane.numbers[N_MEMBERS]
    for i in range(among):
        entry = layer * s.n_expert + i if s.per_layer else lane.members[i]
        if lane.resident[entry] and (s.bypass or lane.stamp[entry] < own):
            keys[n], places[n], entries[n] = _key_of(key, s, lane, entry, number), lane.stamp[entry], entry
            n += 1
    _heapify(keys, places, entries, n)
    while lane.used[c] > limit and n > 0:
        entry = np.int64(entries[0])
        n -= 1
        keys[0], places[0], entries[0] = keys[n], places[n], entries[n]
        _sink(keys, places, entries, n, 0)
        _leave(s, lane, c, entry)


@loop
def _evict_queue(close, s, lane, c, layer, limit, batch, hits):
    # What was read ahead and not used yet, the last to come in first.
    while lane.used[c] > limit and lane.any_marks[0] > 0:
        coldest = -1
        for i in range(lane.numbers[N_MEMBERS]):
            entry = lane.members[i]
            mine = not s.per_layer or lane.layer_of[entry] == layer
            if lane.marks[entry] and mine and (coldest < 0 or lane.stamp[entry] < lane.stamp[coldest]):
                coldest = entry
        if coldest < 0:
            break
        _leave(s, lane, c, coldest)
    numbers = lane.queue_numbers
    numbers[0], numbers[1], numbers[2], numbers[3] = lane.used[c] - limit, limit, lane.largest[c], c
    numbers[4], numbers[5], numbers[6] = 0, lane.numbers[BATCH_POSITION], s.n_expert
    numbers[7] = layer * s.n_expert if s.per_layer else 0
    numbers[8] = numbers[7] + s.n_expert if s.per_layer else lane.stamp.shape[0]
    cache = Cache(
        batch, hits, lane.entry_state, lane.cache_state, lane.resident, numbers, lane.stamp, lane.layer_bytes,
        lane.older, lane.newer, lane.line, lane.held, lane.lengths, lane.going,
    )  # fmt: skip
    close(cache, pointer(lane.evict_knobs, 0))
    for i in range(numbers[4]):
        _leave(s, lane, c, lane.going[i])
