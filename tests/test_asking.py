"""The compiled half of the eval callback: which names it stops at, and what comes back to Python."""

from __future__ import annotations

import ctypes

import pytest

from simlab.record.asking import NodeFilter
from simlab.record.ggml import NAME_OFFSET, Tensor


@pytest.fixture
def asked():
    """(stops at a name?, pointers that were handed over)."""
    seen: list[int] = []
    nodes = NodeFilter(
        frozenset(f"ffn_moe_topk-{i}" for i in range(40)) | {"n" * 63},
        lambda pointer: seen.append(pointer) or len(seen) < 2,
    )
    callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(
        nodes.function
    )
    tensor = Tensor()

    def ask(name: bytes, ask: bool = True, behind: bytes = b"") -> bool:
        raw = (name + b"\0" + behind).ljust(64, b"\0")[:64]
        ctypes.memmove(ctypes.addressof(tensor) + NAME_OFFSET, raw, 64)
        return callback(ctypes.addressof(tensor), ask, nodes.user_data)

    yield ask, seen, ctypes.addressof(tensor)
    nodes.close()


@pytest.mark.parametrize("name", [b"ffn_moe_topk-0", b"ffn_moe_topk-39", b"n" * 63])
def test_it_stops_at_the_names_it_was_given(asked, name):
    assert asked[0](name)


@pytest.mark.parametrize(
    "name", [b"", b"ffn_moe_topk-40", b"ffn_moe_topk-", b"ffn_moe_topk-1 (view)", b"ffn_moe_top", b"n" * 62]
)
def test_it_passes_every_other_name(asked, name):
    assert not asked[0](name)


def test_what_an_earlier_name_left_behind_the_nul_does_not_count(asked):
    assert asked[0](b"ffn_moe_topk-3", behind=b"obs-3 (view)")
    assert not asked[0](b"ffn_moe_topk-", behind=b"3")


def test_a_computed_node_goes_to_the_observer_and_its_answer_back(asked):
    ask, seen, pointer = asked
    assert ask(b"ffn_moe_topk-3", ask=False)
    assert not ask(b"ffn_moe_topk-3", ask=False)
    assert seen == [pointer, pointer]
