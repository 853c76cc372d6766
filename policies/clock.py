"""Queues with a second chance, and two segments: CLOCK, SIEVE, segmented LRU.

A batch's hits set a mark; then entries leave until the budget holds; then
its misses join the line's end in the order of their last occurrence, as the originals make room before they
insert. The batch's hits are passed over, mark and all. Sources below each; the rules for batches are this
project's, since the originals handle one access at a time.
"""

from simlab.policy import queue
from simlab.queues import (
    NONE,
    after,
    append,
    capacity,
    count,
    evict,
    held,
    is_own,
    line_of,
    oldest,
    oldest_other,
    over,
    remove,
    scalar,
    set_scalar,
)  # fmt: skip

_LINE, _PROTECTED = 0, 1


@queue(state={"used": 0}, source="Corbato 1968, as the second-chance FIFO it equals; policies.md")
def clock(cache, knobs):
    """CLOCK: first in first out, but an entry used since it was last looked at goes once more around."""
    own = 0
    for entry in cache.batch:
        hit = line_of(cache, entry) == _LINE
        cache.state[entry, 0] = hit
        own += hit
    while over(cache) > 0 and count(cache, _LINE) > own:
        hand = oldest(cache, _LINE)
        if is_own(cache, hand):
            append(cache, _LINE, hand)
        elif cache.state[hand, 0] > 0:
            cache.state[hand, 0] = 0
            append(cache, _LINE, hand)
        else:
            remove(cache, hand)
            evict(cache, hand)
    for entry in cache.batch:
        if line_of(cache, entry) == NONE:
            append(cache, _LINE, entry)


@queue(
    state={"used": 0}, scalars={"hand": -1}, source="Zhang and others, NSDI 2024, SIEVE is simpler than LRU"
)
def sieve(cache, knobs):
    """SIEVE: a hand goes from old to new, takes marks off and evicts the first entry without one; nothing moves."""
    own = 0
    for entry in cache.batch:
        hit = line_of(cache, entry) == _LINE
        cache.state[entry, 0] = hit
        own += hit
    hand = int(scalar(cache, 0))
    while over(cache) > 0 and count(cache, _LINE) > own:
        # From the newest entry the hand goes on to the oldest.
        at = hand if hand != NONE else oldest(cache, _LINE)
        hand = after(cache, at)
        if is_own(cache, at):
            continue
        if cache.state[at, 0] > 0:
            cache.state[at, 0] = 0
        else:
            remove(cache, at)
            evict(cache, at)
    # Past the newest entry, it goes on from the oldest before this batch's misses join.
    set_scalar(cache, 0, hand)
    for entry in cache.batch:
        if line_of(cache, entry) == NONE:
            append(cache, _LINE, entry)


@queue(source="Karedla, Love and Wherry 1994; policies.md")
def slru(cache, knobs):
    """Segmented LRU: a second use protects, up to 80 % of the bytes; the least recent unprotected entry goes first.

    At a batch's end its entries become the most recent of their segments, its hits protected. What is then
    protected beyond 80 % of the budget loses that, least recent first, and becomes the most recent of the
    unprotected. Once nothing unprotected is left to evict, the least recent protected entry goes.
    """
    for i in range(len(cache.batch)):
        append(cache, _PROTECTED if cache.hits[i] else _LINE, cache.batch[i])
    while held(cache, _PROTECTED) > capacity(cache) * 8 // 10:
        append(cache, _LINE, oldest(cache, _PROTECTED))
    while over(cache) > 0:
        victim = oldest_other(cache, _LINE)
        if victim == NONE:
            victim = oldest_other(cache, _PROTECTED)
        if victim == NONE:
            break
        remove(cache, victim)
        evict(cache, victim)
