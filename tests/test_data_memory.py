"""Memory with loader workers: a forked worker that reads the whole set shares the main process's copy of it."""

import gc
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from vlretrieval.data.packed import NameIndex, PackedStrings, PackedTokens

IMAGES, CAPTIONS = 40_000, 5


def own_bytes() -> int:
    """Memory of this process that it shares with no other: what a fork did not have to copy is not counted."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))


def growth_in_a_worker(read) -> int:
    """Bytes that a forked process makes its own by calling ``read``."""
    gc.collect()
    gc.freeze()  # as a collection would write to every object's header
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        gc.disable()
        before = own_bytes()
        read()
        os.write(theirs, str(own_bytes() - before).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        growth = int(told.read())
    os.waitpid(pid, 0)
    gc.unfreeze()
    return growth


def growths() -> tuple[int, int, int]:
    """Bytes of the data, and what a worker makes its own by reading it packed, and as lists of Python's strings."""
    texts = [f"caption {c} of picture {i} in words of its own" for i in range(IMAGES) for c in range(CAPTIONS)]
    names = [f"folder/{number:09d}.jpg" for number in range(IMAGES)]
    captions, ids = PackedStrings(texts), PackedStrings(names)
    index = NameIndex(names)
    tokens = PackedTokens(([1, *range(3, 15), 2] for _ in texts), 0)

    def read_packed():
        for start in range(0, len(texts), 512):
            tokens.gather(np.arange(start, min(start + 512, len(texts))))
        for number in range(0, IMAGES, 7):
            assert index[ids[number]] == number
        for caption in captions:
            assert caption

    def read_lists():
        for caption in texts:
            assert caption

    size = captions.nbytes + ids.nbytes + tokens.nbytes
    return size, growth_in_a_worker(read_packed), growth_in_a_worker(read_lists)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux")
def test_a_worker_that_reads_a_whole_set_copies_next_to_nothing_of_it():
    # in an interpreter of its own: a heap with holes from other tests is written all over by the smallest new object
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        size, packed, lists = fresh.submit(growths).result()
    assert packed < 0.1 * size
    assert lists > 0.5 * size  # what this spares: Python's own strings are copied by reading
