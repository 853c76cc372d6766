"""Random eviction that live and replay agree on: entries are ranked by a hash, not by a generator's state.

Knob `seed`. The key is a uint32 hash of (seed, batch, layer, expert): the three numbers after the seed are
mixed in one after the other, each by xor and MurmurHash3's finaliser, all in arithmetic modulo 2^32, which
NumPy and XLA do alike. Every batch that evicts draws anew. Source: policies.md, which leaves the hash open.
"""

from simlab.policy import eviction
from simlab.types import Knob


def mixed(xp, h):
    """uint32 of which every bit depends on every bit of `h` (the finaliser of MurmurHash3)."""
    h = (h ^ (h >> 16)) * xp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * xp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


@eviction(
    knobs={"seed": Knob(0, 0, 2**31 - 1, integer=True, help="another seed, another draw")},
    needs={"ids"},
    source="policies.md",
)
def random(xp, state, last_position, batch, knobs):
    """Random, seeded. Key: a uint32 hash of (seed, batch, layer, expert)."""
    expert = state["expert"].astype(xp.uint32)
    # Arrays throughout: NumPy warns of scalars that wrap.
    h = mixed(xp, expert * 0 + xp.asarray(knobs.seed).astype(xp.uint32))
    h = mixed(xp, h ^ xp.asarray(batch).astype(xp.uint32))
    h = mixed(xp, h ^ state["layer"].astype(xp.uint32))
    return mixed(xp, h ^ expert).astype(xp.int64)
