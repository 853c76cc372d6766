"""Random eviction that live and replay agree on: entries are ranked by a hash, not by a generator's state.

Knob `seed`. The key is a uint32 hash of (seed, batch, layer, expert): the three numbers after the seed are
mixed in one after the other, each by xor and MurmurHash3's finaliser, all in arithmetic modulo 2^32, which
NumPy and XLA do alike. Every batch that evicts draws anew. Source: policies.md, which leaves the hash open.
"""

from simlab.policy import eviction
from simlab.types import Knob
from simlab.xp import helper, i8

_WORD = 0xFFFFFFFF


@helper
def mixed(h):
    """Of a whole number below 2^32, one of which every bit depends on every bit of `h` (MurmurHash3's finaliser)."""
    # Products wrap modulo 2^64, of which the lower half is the product modulo 2^32.
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


@eviction(
    "dynamic",
    knobs={"seed": Knob(0, 0, 2**31 - 1, integer=True, help="another seed, another draw")},
    source="policies.md",
)
def random(entry, state, knobs):
    """Random, seeded. Key: a uint32 hash of (seed, batch, layer, expert)."""
    expert = i8(entry.expert)
    h = mixed(expert * 0 + knobs.seed)
    h = mixed(h ^ (entry.batch & _WORD))
    return mixed(mixed(h ^ entry.layer) ^ expert)
