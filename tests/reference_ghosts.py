"""Independent eviction policies that remember more than RAM holds: the golden values of the real ones.

Written from the papers and the docstrings of `policies/`, with lists (oldest first), dicts and Python numbers;
they share no code with them. One object is the memory of one cache (`reference_eviction.PerCache`).
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

from reference_eviction import Close, Entry, Evicter, by_position, taken


def total(entries: list[Entry], c: Close) -> int:
    return sum(c.sizes[e] for e in entries)


@functools.cache
def exact(fraction: float) -> Fraction:
    """The fraction as it is written: 0.9 is nine tenths."""
    return Fraction(str(fraction))


def part(fraction: float, c: Close) -> int:
    """That share of the budget in whole bytes."""
    return math.floor(exact(fraction) * c.capacity)


def forget(ghosts: list[Entry], limit: int, c: Close) -> None:
    """The oldest go until the others fit."""
    while total(ghosts, c) > limit:
        ghosts.pop(0)


def others(entries: list[Entry], c: Close) -> list[Entry]:
    """Those that may leave."""
    return [e for e in entries if e not in c.touched]


class TwoQ(Evicter):
    """Johnson and Shasha, full version: A1in, A1out, Am."""

    def __init__(self, first: float = 0.25, ghosts: float = 0.5) -> None:
        self.first, self.ghosts = first, ghosts
        self.a1in: list[Entry] = []
        self.a1out: list[Entry] = []
        self.am: list[Entry] = []

    def close(self, c: Close) -> list[Entry]:
        new = set(c.touched) - set(self.a1in) - set(self.am)
        for x in by_position(c.touched, c):
            if x in self.am:
                self.am.remove(x)
                self.am.append(x)
            elif x in self.a1out:
                self.a1out.remove(x)
                self.am.append(x)
            elif x not in self.a1in:
                self.a1in.append(x)
        over, victims = c.over, []
        while over > 0 and others(self.a1in + self.am, c):
            waiting, main = others(self.a1in, c), others(self.am, c)
            too_many = total([e for e in self.a1in if e not in new], c) > part(self.first, c)
            if waiting and (too_many or not main):
                y = waiting[0]
                self.a1in.remove(y)
                self.a1out.append(y)
            else:
                y = main[0]
                self.am.remove(y)
            victims.append(y)
            over -= c.sizes[y]
        forget(self.a1out, part(self.ghosts, c), c)
        return victims


class S3Fifo(Evicter):
    """Yang and others, algorithm 1: S, M, G."""

    def __init__(self, first: float = 0.1, ghosts: float = 0.9) -> None:
        self.first, self.ghosts = first, ghosts
        self.s: list[Entry] = []
        self.m: list[Entry] = []
        self.g: list[Entry] = []
        self.freq: dict[Entry, int] = {}

    def close(self, c: Close) -> list[Entry]:
        new = set(c.touched) - set(self.s) - set(self.m)
        for x in by_position(c.touched, c):
            if x not in new:
                self.freq[x] = min(self.freq[x] + 1, 3)
                continue
            self.freq[x] = 0
            if x in self.g:
                self.g.remove(x)
                self.m.append(x)
            else:
                self.s.append(x)
        over, victims = c.over, []
        while over > 0 and others(self.s + self.m, c):
            small, main = others(self.s, c), others(self.m, c)
            full = total([e for e in self.s if e not in new], c) >= part(self.first, c)
            if small and (full or not main):
                t = small[0]
                self.s.remove(t)
                if self.freq[t] > 1:
                    self.freq[t] = 0
                    self.m.append(t)
                    continue
                self.g.append(t)
            else:
                t = main[0]
                self.m.remove(t)
                if self.freq[t] > 0:
                    self.freq[t] -= 1
                    self.m.append(t)
                    continue
            victims.append(t)
            over -= c.sizes[t]
        forget(self.g, part(self.ghosts, c), c)
        return victims


class Arc(Evicter):
    """Megiddo and Modha, figure 4: T1, T2, B1, B2, p."""

    def __init__(self) -> None:
        self.t1: list[Entry] = []
        self.t2: list[Entry] = []
        self.b1: list[Entry] = []
        self.b2: list[Entry] = []
        self.p = 0.0

    def close(self, c: Close) -> list[Entry]:
        b1, b2 = total(self.b1, c), total(self.b2, c)
        in_b1 = [x for x in c.touched if x in self.b1]
        in_b2 = [x for x in c.touched if x in self.b2]
        if in_b1:
            self.p += total(in_b1, c) * max(b2 / b1, 1)
        if in_b2:
            self.p -= total(in_b2, c) * max(b1 / b2, 1)
        self.p = min(max(self.p, 0), c.capacity)
        for x in by_position(c.touched, c):
            to = self.t1
            for listed in (self.t1, self.t2, self.b1, self.b2):
                if x in listed:
                    listed.remove(x)
                    to = self.t2
            to.append(x)
        over, victims = c.over, []
        while over > 0 and others(self.t1 + self.t2, c):
            t1, t2 = others(self.t1, c), others(self.t2, c)
            size = total(t1, c)
            if t1 and (size > self.p or (in_b2 and size == self.p) or not t2):
                victim, listed, ghosts = t1[0], self.t1, self.b1
            else:
                victim, listed, ghosts = t2[0], self.t2, self.b2
            listed.remove(victim)
            ghosts.append(victim)
            victims.append(victim)
            over -= c.sizes[victim]
        while self.b1 and total(self.t1 + self.b1, c) > c.capacity:
            self.b1.pop(0)
        while self.b2 and total(self.t1 + self.b1 + self.t2 + self.b2, c) > 2 * c.capacity:
            self.b2.pop(0)
        return victims


class Lirs(Evicter):
    """Jiang and Zhang: the stack S from its bottom, the queue Q from its front."""

    def __init__(self, hir: float = 0.01, ghosts: float = 2) -> None:
        self.hir, self.ghosts = hir, ghosts
        self.s: list[Entry] = []
        self.q: list[Entry] = []
        self.lir: list[Entry] = []

    def close(self, c: Close) -> list[Entry]:
        limit = c.capacity - max(part(self.hir, c), max(c.sizes.values()))
        known = set(self.s)
        batch = by_position(c.touched, c)
        self.q = others(self.q, c)
        self.s = others(self.s, c) + batch
        self.lir += [x for x in batch if x in known and x not in self.lir]
        for x in batch:
            if x in self.lir:
                continue
            if total([*self.lir, x], c) <= limit:
                self.lir.append(x)
            else:
                self.q.append(x)
        while total(self.lir, c) > limit:
            bottom = next(e for e in self.s if e in self.lir)
            self.lir.remove(bottom)
            self.s.remove(bottom)
            self.q.append(bottom)
        kept = [e for e in self.s if e in self.lir]
        victims = taken(others(self.q, c) + others(kept, c), c)
        self.q = [e for e in self.q if e not in victims]
        self.lir = [e for e in self.lir if e not in victims]
        while self.s and self.s[0] not in self.lir:
            self.s.pop(0)
        remembered = [e for e in self.s if e not in self.lir and e not in self.q]
        forget(remembered, part(self.ghosts, c), c)
        self.s = [e for e in self.s if e in self.lir or e in self.q or e in remembered]
        return victims


class WTinyLfu(Evicter):
    """Einziger, Friedman and Manes: a window before an SLRU, exact counts."""

    def __init__(self, window: float = 0.01, sample: float = 10) -> None:
        self.share, self.sample = window, sample
        self.window: list[Entry] = []
        self.probation: list[Entry] = []
        self.protected: list[Entry] = []
        self.uses: dict[Entry, int] = {}
        self.seen = 0

    def close(self, c: Close) -> list[Entry]:
        for x in c.touched:
            self.uses[x] = min(self.uses.get(x, 0) + 1, 15)
            self.seen += c.sizes[x]
        if self.seen >= part(self.sample, c):
            self.uses = {x: n // 2 for x, n in self.uses.items()}
            self.seen = 0
        to_main = [x for x in by_position(c.touched, c) if x in self.probation + self.protected]
        to_window = [x for x in by_position(c.touched, c) if x not in to_main]
        self.window = others(self.window, c) + to_window
        self.probation = others(self.probation, c)
        self.protected = others(self.protected, c) + to_main
        limit = part(self.share, c)
        while total(self.protected, c) > 0.8 * (c.capacity - limit):
            self.probation.append(self.protected.pop(0))

        over, victims = c.over, []
        while True:
            new, main = others(self.window, c), others(self.probation, c) + others(self.protected, c)
            overflows = bool(new) and total(self.window, c) > limit
            if over <= 0 and overflows:
                self.window.remove(new[0])
                self.probation.append(new[0])
                continue
            if over <= 0 or not new + main:
                return victims
            if not overflows:
                victim = (main + new)[0]
            elif main and self.uses[new[0]] > self.uses[main[0]]:
                self.window.remove(new[0])
                self.probation.append(new[0])
                victim = main[0]
            else:
                victim = new[0]
            for segment in (self.window, self.probation, self.protected):
                if victim in segment:
                    segment.remove(victim)
            victims.append(victim)
            over -= c.sizes[victim]


class Gdsf(Evicter):
    """Cherkasova: H = L + uses / size, in units of which the largest entry's use is 2^20."""

    def __init__(self) -> None:
        self.h: dict[Entry, int] = {}
        self.uses: dict[Entry, int] = {}
        self.inflation = 0

    def use(self, entry: Entry, c: Close) -> None:
        self.uses[entry] = self.uses.get(entry, 0) + 1
        self.h[entry] = self.inflation + self.uses[entry] * (max(c.sizes.values()) * 2**20 // c.sizes[entry])

    def close(self, c: Close) -> list[Entry]:
        for x in c.hits:
            self.use(x, c)
        order = sorted(others(list(c.held), c), key=lambda e: (self.h[e], c.held[e]))
        victims = taken(order, c)
        for x in victims:
            self.inflation = max(self.inflation, self.h[x])
            del self.uses[x]
        for x in set(c.touched) - c.hits:
            self.use(x, c)
        return victims
