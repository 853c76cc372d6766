"""Window TinyLFU: who leaves is settled between the newest and the oldest, by how often each was used.

New entries wait in a small LRU window. What the window no longer holds is a candidate for the main cache, a
segmented LRU: while the budget is kept it gets in; else it stands against the entry the main cache would evict,
and the one used less often leaves, on a tie the candidate. Uses are counted, up to 15, whether an entry is in
RAM or not, and all counts are halved each time `sample` budgets' worth of bytes has been looked up.

What this project decided: the paper counts in a sketch, approximately; here every entry is known and has a
counter of its own, so there is no sketch and no doorkeeper. Sizes are bytes. A batch's uses are counted first;
its misses become the most recent of the window, its hits those of their segment, protected where they were in
the main cache; protected entries beyond 80 % of the main cache lose that, least recent first. The batch's own
entries are no candidates and no victims. What look-ahead read and nobody asked for yet is the window's oldest.
"""

from simlab.policy import whole_cache
from simlab.types import Knob
from simlab.whole_cache import held, join, lowest, move_in_order, of, repeat, share

_NOWHERE, _WINDOW, _PROBATION, _PROTECTED = 0, 1, 2, 3
_MOST_USES = 15
_PROTECTED_TENTHS = 8
_FAR = 2**62


@whole_cache(
    state={"segment": 0, "place": 0, "uses": 0},
    scalars={"end": 1, "seen": 0},
    knobs={
        "window": Knob(0.01, 0, 1, help="share of the budget that the window keeps"),
        "sample": Knob(10, 0.1, 1000, help="budgets' worth of lookups after which counts are halved"),
    },
    source="Einziger, Friedman and Manes, ACM TOS 2017, TinyLFU",
)
def wtinylfu(xp, cache, state, knobs):
    """W-TinyLFU: a new entry displaces an old one only if it was used more often of late."""
    touched, sizes = cache.touched, cache.bytes
    seen = state["seen"] + held(xp, touched, sizes)
    uses = xp.minimum(state["uses"] + touched, _MOST_USES)
    full = seen >= share(xp, knobs.sample, cache.capacity)
    uses, seen = xp.where(full, uses // 2, uses), xp.where(full, 0, seen)

    before = state["segment"]
    place, end = join(xp, cache, touched, state["place"], state["end"])
    segment = xp.where(touched, xp.where(before > _WINDOW, _PROTECTED, _WINDOW), before)
    window = share(xp, knobs.window, cache.capacity)
    protected = cache.resident & (segment == _PROTECTED)
    over = held(xp, protected, sizes) - (cache.capacity - window) * _PROTECTED_TENTHS // 10
    demoted, place, end = move_in_order(xp, protected, place, sizes, over, place, end)
    segment = xp.where(demoted, _PROBATION, segment)

    def parts(c):
        """What may leave of the window and of the main cache, and whether the window holds too much."""
        stay = cache.resident & ~c["leaving"]
        in_window = stay & (c["segment"] <= _WINDOW)
        others = stay & ~touched
        return others & in_window, others & ~in_window, held(xp, in_window, sizes) > window

    def going(c):
        new, main, too_many = parts(c)
        return (too_many & new.any(axis=0)) | ((c["over"] > 0) & (new | main).any(axis=0))

    def step(c):
        new, main, too_many = parts(c)
        # An entry in RAM that is in no segment was read ahead.
        oldest = lowest(xp, new, xp.where(c["segment"] == _WINDOW, c["place"], 0))
        candidate = oldest & too_many
        victim = lowest(xp, main, xp.where(c["segment"] == _PROTECTED, _FAR, 0) + c["place"])
        is_candidate, is_victim = candidate.any(axis=0), victim.any(axis=0)
        wins = is_victim & (of(xp, candidate, uses) > of(xp, victim, uses))
        loser = xp.where(is_candidate & ~wins, candidate, xp.where(is_victim, victim, oldest))
        gone = loser & (c["over"] > 0)
        admitted = candidate & ~gone
        return {
            "leaving": c["leaving"] | gone,
            "over": c["over"] - of(xp, gone, sizes),
            "segment": xp.where(gone, _NOWHERE, xp.where(admitted, _PROBATION, c["segment"])),
            "place": xp.where(admitted, c["end"], c["place"]),
            "end": c["end"] + 1,
        }

    start = {"leaving": touched & False, "over": cache.over, "segment": segment, "place": place, "end": end}
    c = repeat(xp, going, step, start)
    return c["leaving"], {
        "segment": c["segment"], "place": c["place"], "uses": uses, "end": c["end"], "seen": seen,
    }  # fmt: skip
