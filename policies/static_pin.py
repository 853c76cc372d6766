"""A fixed set: the experts most often picked in a training part are kept, all others leave after their batch.

The set is filled in order of count, then lower (layer, expert), as long as the next entry still fits the
budget (each layer's own with scope per_layer); experts the training part never picked come last. It starts
empty: a pinned entry is read on its first use and never evicted. Needs `--train`; trained on the very tokens
it is measured on it is a diagnostic, and labelled so. Source: policies.md. Uncertain: the spec does not say
whether experts never seen in training fill what room is left; here they do.
"""

import numpy as np

from simlab.policy import queue
from simlab.queues import evict


def most_used(counts, sizes, capacity, knobs):
    """Pin by count while the next entry fits."""
    order = np.argsort(-counts, kind="stable")
    pinned = np.zeros(len(counts), np.int64)
    pinned[order] = np.cumsum(sizes[order]) <= capacity
    return {"pinned": pinned}


@queue(state={"pinned": 0}, needs={"training"}, prepare=most_used, bypass=True, source="policies.md")
def static_pin(cache, knobs):
    """The most used experts of a training part stay for good, all others leave at their batch's end."""
    for entry in cache.batch:
        if cache.state[entry, 0] == 0:
            evict(cache, entry)
