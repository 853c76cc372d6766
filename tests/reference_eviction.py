"""Independent eviction policies in plain Python, the golden values of the real ones.

Written from policies.md and the docstrings of `policies/`, with dicts, lists and Python numbers; they share no
code with them. One object is one policy's whole memory. `reference.py` calls `touch` for each entry a row
walks and `close` at the end of each batch, which answers with the victims in order.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Entry = tuple[int, int]
"""(MoE layer index, expert)."""
NEVER = float("inf")


@dataclass
class Touch:
    """One entry walked by one row."""

    entry: Entry
    position: int
    first: bool
    hit: bool
    weight: Any
    batch: int


@dataclass
class Close:
    """A batch's end, in the cache it fell into."""

    cache: int
    """The layer with budgets per layer, else 0."""
    held: dict[Entry, int]
    """Entries in RAM, the batch's included, with the position of their last occurrence."""
    touched: dict[Entry, int]
    """The batch's own entries with the position of their last occurrence."""
    hits: set[Entry]
    sizes: dict[Entry, int]
    """Of every entry of this cache, in RAM or not."""
    over: int
    capacity: int
    batch: int
    position: int
    """Positions handed out so far."""


class Evicter:
    """LRU, and the frame of whatever ranks entries by a number."""

    own_may_leave = False

    def touch(self, t: Touch) -> None:
        """Note a use."""

    def key(self, entry: Entry, c: Close) -> Any:
        """The smallest goes first."""
        return 0

    def close(self, c: Close) -> list[Entry]:
        """Victims until nothing is over."""
        left = [e for e in c.held if self.own_may_leave or e not in c.touched]
        left.sort(key=lambda e: (self.key(e, c), c.held[e], e))
        return taken(left, c)


def taken(order: list[Entry], c: Close) -> list[Entry]:
    """As many of `order` as it takes."""
    over, victims = c.over, []
    for entry in order:
        if over <= 0:
            break
        victims.append(entry)
        over -= c.sizes[entry]
    return victims


class Fifo(Evicter):
    def __init__(self) -> None:
        self.entered: dict[Entry, int] = {}

    def touch(self, t: Touch) -> None:
        if t.first and not t.hit:
            self.entered[t.entry] = t.position

    def key(self, entry: Entry, c: Close) -> int:
        return self.entered[entry]


def hashed(*words: int) -> int:
    """A uint32: the words mixed in one after the other by the finaliser of MurmurHash3."""
    h = 0
    for word in words:
        h ^= word
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        h ^= h >> 16
    return h


class Random(Evicter):
    def __init__(self, seed: float = 0) -> None:
        self.seed = int(seed)

    def key(self, entry: Entry, c: Close) -> int:
        return hashed(self.seed, c.batch, *entry)


class Lfu(Evicter):
    def __init__(self) -> None:
        self.uses: dict[Entry, int] = {}
        self.date: dict[Entry, int] = {}

    def touch(self, t: Touch) -> None:
        if t.first:
            self.uses[t.entry] = self.uses.get(t.entry, 0) + 1
            self.date[t.entry] = t.batch

    def key(self, entry: Entry, c: Close) -> Any:
        return self.uses[entry]


class Lfru(Lfu):
    def key(self, entry: Entry, c: Close) -> float:
        return self.uses[entry] / (c.batch - self.date[entry] + 1)


class LfuDecay(Evicter):
    """Every use keeps its date, and all are added up anew each time."""

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self.dates: dict[Entry, list[int]] = {}

    def touch(self, t: Touch) -> None:
        if t.first:
            self.dates.setdefault(t.entry, []).append(t.batch)

    def key(self, entry: Entry, c: Close) -> float:
        worth = sum(2.0 ** (-(c.batch - date) / self.half_life) for date in self.dates[entry])
        # Sums that are equal on paper come out an ulp or two apart, depending on how they were made.
        return round(worth, 12)


class WeightedLfu(Evicter):
    def __init__(self) -> None:
        self.weight: dict[Entry, float] = {}

    def touch(self, t: Touch) -> None:
        self.weight[t.entry] = self.weight.get(t.entry, 0.0) + float(t.weight)

    def key(self, entry: Entry, c: Close) -> float:
        return self.weight[entry]


class Foresight(Evicter):
    """Told the whole walk beforehand: (entry, batch) by position."""

    def __init__(self, walk: list[tuple[Entry, int]]) -> None:
        self.walk = walk
        self.places: dict[Entry, list[int]] = {}
        for position, (entry, _) in enumerate(walk):
            self.places.setdefault(entry, []).append(position)

    def next_use(self, entry: Entry, c: Close) -> float:
        places = self.places[entry]
        at = bisect.bisect_left(places, c.position)
        return places[at] if at < len(places) else NEVER

    def key(self, entry: Entry, c: Close) -> Any:
        return -self.next_use(entry, c)


class ForesightBypass(Foresight):
    own_may_leave = True


class LookAhead(Foresight):
    def __init__(self, walk: list[tuple[Entry, int]], m: float) -> None:
        super().__init__(walk)
        self.m = m

    def key(self, entry: Entry, c: Close) -> tuple[int, float]:
        place = self.next_use(entry, c)
        if place != NEVER and self.walk[int(place)][1] - c.batch <= self.m:
            return (1, -place)
        return (0, c.held[entry])


class Pinned(Evicter):
    def __init__(self, pinned: set[Entry]) -> None:
        self.pinned = pinned

    def close(self, c: Close) -> list[Entry]:
        return [e for e in c.held if e not in self.pinned]


class PerCache(Evicter):
    """A policy that remembers a whole cache: a memory of its own for each."""

    def __init__(self, make: Callable[[], Evicter]) -> None:
        self.make = make
        self.of_cache: dict[int, Evicter] = {}

    def close(self, c: Close) -> list[Entry]:
        if c.cache not in self.of_cache:
            self.of_cache[c.cache] = self.make()
        return self.of_cache[c.cache].close(c)


def by_position(entries: Iterable[Entry], c: Close) -> list[Entry]:
    """Some of a batch's own entries in the order of their last occurrence."""
    return sorted(entries, key=lambda e: c.touched[e])


class SecondChance(Evicter):
    """A line, oldest first, and the entries used since they were last looked at; misses join after evictions."""

    def __init__(self) -> None:
        self.line: list[Entry] = []
        self.used: set[Entry] = set()

    def close(self, c: Close) -> list[Entry]:
        self.used |= c.hits
        over, victims = c.over, []
        while over > 0 and any(e not in c.touched for e in self.line):
            victim = self.look(c)
            if victim is not None:
                victims.append(victim)
                over -= c.sizes[victim]
        self.line += by_position(set(c.touched) - c.hits, c)
        return victims

    def look(self, c: Close) -> Entry | None:
        """CLOCK: look at the oldest; the victim, or None if it got a second chance."""
        entry = self.line.pop(0)
        if entry in c.touched or entry in self.used:
            self.line.append(entry)
            if entry not in c.touched:
                self.used.discard(entry)
            return None
        return entry


class Sieve(SecondChance):
    def __init__(self) -> None:
        super().__init__()
        self.hand = 0

    def look(self, c: Close) -> Entry | None:
        entry, victim = self.line[self.hand], None
        if entry in c.touched:
            self.hand += 1
        elif entry in self.used:
            self.used.discard(entry)
            self.hand += 1
        else:
            victim = self.line.pop(self.hand)
        if self.hand >= len(self.line):
            self.hand = 0
        return victim


class Slru(Evicter):
    def __init__(self) -> None:
        self.probation: list[Entry] = []
        self.protected: list[Entry] = []

    def close(self, c: Close) -> list[Entry]:
        probation = [e for e in self.probation if e not in c.touched]
        protected = [e for e in self.protected if e not in c.touched]
        probation += by_position(set(c.touched) - c.hits, c)
        protected += by_position(c.hits, c)
        while sum(c.sizes[e] for e in protected) > 0.8 * c.capacity:
            probation.append(protected.pop(0))
        victims = taken([e for e in probation + protected if e not in c.touched], c)
        self.probation = [e for e in probation if e not in victims]
        self.protected = [e for e in protected if e not in victims]
        return victims


def pinned_set(
    counts: dict[Entry, int], entries: list[Entry], sizes: dict[Entry, int], capacity: int
) -> set[Entry]:
    """The most used entries whose bytes together fit, up to the first that does not."""
    found: set[Entry] = set()
    for entry in sorted(entries, key=lambda e: (-counts.get(e, 0), e)):
        capacity -= sizes[entry]
        if capacity < 0:
            break
        found.add(entry)
    return found
