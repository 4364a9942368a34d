"""Which samples a step gets: a pure function of (seed, epoch, step, rank), and of nothing that ran before.

So a resumed run, another number of loader workers, or another number of processes sees the same global batches.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keyed_draw(*parts: int | np.ndarray) -> np.ndarray:
    """Uniform uint64 that depends on nothing but ``parts`` (broadcast together): random numbers without a state.

    Each part is folded in by the finaliser of SplitMix64 (Steele et al., 2014), whose outputs pass BigCrush.
    """
    with np.errstate(over="ignore"):
        drawn = np.zeros((), dtype=np.uint64)
        for part in parts:
            drawn = drawn ^ np.asarray(part).astype(np.int64).astype(np.uint64)
            drawn = drawn + _GOLDEN
            drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            drawn = (drawn ^ (drawn >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            drawn = drawn ^ (drawn >> np.uint64(31))
        return drawn


class EpochOrder:
    """Global batches of one epoch, and a rank's slice of each.

    Args:
        size: samples an epoch.
        batch_size: samples a step, over all ranks together.
        seed: of the permutation.
        rank, world_size: this process among how many.
        shuffle: False keeps the stored order (for looking at data, not for training).
        shards: (size,) int, the shard that each sample lies in; the order is then that of ``shard_order``. None: one
            permutation of all samples.
        together: shards that are mixed as one.

    The last, partial batch is left out: with in-batch negatives a shorter batch is another loss.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        *,
        shards: np.ndarray | None = None,
        together: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if batch_size > size:
            raise ValueError(f"batch_size={batch_size} is more than the {size} samples of an epoch; use {size} or less")
        if batch_size % world_size:
            fits = batch_size // world_size * world_size or world_size
            raise ValueError(
                f"batch_size={batch_size} counts the samples of all processes and does not divide by {world_size}; "
                f"use {fits}"
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world_size, self.shuffle = rank, world_size, shuffle
        self.shards, self.together = shards, 0 if shards is None else together
        self._cached: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.size // self.batch_size

    def permutation(self, epoch: int) -> np.ndarray:
        """(size,) int64, the order of ``epoch``."""
        if self._cached is None or self._cached[0] != epoch:
            order = np.arange(self.size)
            if self.shuffle and self.shards is not None:
                order = shard_order(self.shards, self.seed, epoch, self.together)
            elif self.shuffle:
                np.random.Generator(np.random.PCG64([self.seed, epoch])).shuffle(order)
            self._cached = (epoch, order)
        return self._cached[1]

    def batch(self, epoch: int, step: int) -> np.ndarray:
        """(batch_size / world_size,) int64: this rank's samples of step ``step`` of ``epoch``."""
        share = self.batch_size // self.world_size
        start = step * self.batch_size + self.rank * share
        return self.permutation(epoch)[start : start + share]


def shard_order(shards: np.ndarray, seed: int, epoch: int, together: int = 4) -> np.ndarray:
    """A permutation that reads shards in sequence: shards in random order, ``together`` of them mixed as one.

    For a set larger than memory. Of such a set one permutation of all samples finds nothing in memory that an earlier
    read brought along, and reads several times the set's bytes; this one reads each byte once.

    Args:
        shards: (N,) int, the shard that each sample lies in.
        seed, epoch: the permutation follows from these alone.
        together: shards that are read, and mixed, at a time; memory should hold them.

    Returns:
        (N,) int64.
    """
    rng = np.random.Generator(np.random.PCG64([seed, epoch, 1]))
    names, shard = np.unique(shards, return_inverse=True)
    turn = rng.permutation(len(names)) // together  # which group each shard belongs to
    return np.lexsort((rng.permutation(len(shards)), turn[shard]))
