"""Where the true answers stand: exact ranks by counting, both directions from one pass over the score matrix.

No score matrix is kept and nothing is sorted: a block of about 1024 x 1024 scores is made, each query's count of
better wrong candidates is taken from it along the rows and along the columns, and it is thrown away. Memory is the
block, and a few numbers a query.

The ranks are those of the *exact* dot products of the float32 embeddings. A float32 matrix product is only a filter:
its rounding differs with the shape of the block and with the matrix library, so that a positive's score taken from
another product than its rivals' loses or wins ties by its last bit. Here a rival further from the positive's score than
the rounding can reach is counted as it stands; the few that are closer are scored again in double precision, pair by
pair, and are called tied when they agree to 12 digits. So the ranks cannot depend on the block size, on the order of
the captions, or on how a positive's own score was computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlretrieval.metrics.counting import BoolBlock, count_true, where_few
from vlretrieval.metrics.scores import Embeddings, IntArray, pair_scores, row_norms, rows_float32

TieRule = Literal["pessimistic", "expected", "optimistic"]

BLOCK = 1024
TIE = 1e-12  # scores this close, relative to the two norms, are one score: double precision is good for 1e-13 here
FEW = 1 / 128  # share of a block's scores up to which those that count are looked at one by one
DENSE = 0.01  # share of a block's scores in doubt from which the whole block is done again in double precision


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of each query's best positive among the wrong candidates.

    A query's other positives are left out of the count: they are no rivals. ``query`` holds the queries that have a
    positive at all, ascending; the others are left out and counted in ``left_out``.
    """

    query: IntArray  # (Q,) indices of the queries ranked
    above: IntArray  # (Q,) wrong candidates that score higher than the best positive
    tied: IntArray  # (Q,) wrong candidates that score the same
    good: IntArray  # (Q,) positives at that score, 1 or more
    gallery: int  # candidates in all
    left_out: int = 0  # queries without a positive

    def __len__(self) -> int:
        return len(self.query)

    def rank(self, ties: TieRule = "pessimistic") -> npt.NDArray[np.float64]:
        """(Q,) ranks, 1 is best. Ties: wrong candidates first, in random order (the mean), or last."""
        if ties == "pessimistic":
            return (1 + self.above + self.tied).astype(np.float64)
        if ties == "optimistic":
            return (1 + self.above).astype(np.float64)
        # t wrong and p right answers in random order: t / (p + 1) wrong ones stand before the first right one
        return 1 + self.above + self.tied / (1 + self.good)

    def hits(self, k: int, ties: TieRule = "pessimistic") -> npt.NDArray[np.float64]:
        """(Q,) 1 where a positive is among the first k, else 0; under "expected" the chance of it."""
        if k < 1:
            raise ValueError(f"k={k}: recall needs k of 1 or more")
        if ties != "expected":
            return (self.rank(ties) <= k).astype(np.float64)
        # the first k - above places fall within the tied group: chance that not all of them are wrong
        places = np.clip(k - self.above, 0, None)
        missed = np.ones(len(self))
        group = self.tied + self.good
        for place in range(int(min(k, places.max(initial=0)))):
            left = np.clip(self.tied - place, 0, None) / np.maximum(group - place, 1)
            missed = np.where(place < places, missed * left, missed)
        return 1 - missed

    @property
    def tied_share(self) -> float:
        """Share of queries whose best positive shares its score with a wrong candidate, 0 to 1."""
        return float(np.mean(self.tied > 0)) if len(self) else 0.0


@dataclass(frozen=True, slots=True)
class Probes:
    """Scores to count rivals against: probe i asks how many candidates of its query score above ``score[i]``."""

    row: IntArray  # (n,) query of each probe, ascending
    score: npt.NDArray[np.float64]  # (n,)


def check_positives(positives: npt.ArrayLike, texts: int, images: int) -> IntArray:
    """(P, 2) unique (caption, image) pairs, sorted; errors name the first pair out of range."""
    pairs = np.asarray(positives, dtype=np.int64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
        raise ValueError(f"positives have shape {pairs.shape}; wanted (P, 2) pairs (caption, image), at least one")
    outside = np.flatnonzero(((pairs < 0) | (pairs >= np.array([texts, images]))).any(1))
    if len(outside):
        bad = pairs[outside[0]].tolist()
        raise ValueError(f"positive pair {outside[0]} is {bad}, but there are {texts} captions and {images} images")
    flat = np.unique(pairs[:, 0] * images + pairs[:, 1])  # one number a pair sorts ten times faster than rows
    return np.stack([flat // images, flat % images], axis=1)


def rank_both(text: Embeddings, image: Embeddings, positives: npt.ArrayLike, block: int = BLOCK) -> tuple[Ranks, Ranks]:
    """Ranks of the best positives, text to image and image to text.

    Args:
        text: (M, E) caption embeddings; scores are dot products, so cosines for unit vectors.
        image: (N, E) image embeddings.
        positives: (P, 2) pairs (caption index, image index), any number to a caption or an image.
        block: rows and columns of a block of scores; changes memory and speed, never a rank.

    Returns:
        (t2i, i2t): each caption's rank over images, each image's over captions.

    Raises:
        NonFiniteEmbedding: naming the first row with NaN or infinity.
        ValueError: on shapes or pairs that do not fit.
    """
    text_norms, image_norms = check_embeddings(text, image)
    pairs = check_positives(positives, len(text), len(image))
    own = pair_scores(text, image, pairs[:, 0], pairs[:, 1])
    reach = TIE * text_norms[pairs[:, 0]] * image_norms[pairs[:, 1]]
    t2i_probe, t2i_good = best_probes(pairs[:, 0], own, reach)
    i2t_probe, i2t_good = best_probes(pairs[:, 1], own, reach)
    (t2i_above, t2i_tied), (i2t_above, i2t_tied) = count_rivals(
        text, image, pairs, t2i_probe, i2t_probe, text_norms, image_norms, block
    )
    return (
        Ranks(t2i_probe.row, t2i_above, t2i_tied, t2i_good, len(image), len(text) - len(t2i_probe.row)),
        Ranks(i2t_probe.row, i2t_above, i2t_tied, i2t_good, len(text), len(image) - len(i2t_probe.row)),
    )


def check_embeddings(text: Embeddings, image: Embeddings) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Norms of both, after the checks that they are finite and of one width."""
    text_norms, image_norms = row_norms(text, "text"), row_norms(image, "image")
    if text.shape[1] != image.shape[1]:
        raise ValueError(f"text embeddings are {text.shape[1]} wide, image embeddings {image.shape[1]}; need one space")
    if text_norms.max() * image_norms.max() > 1e37:
        raise ValueError("scores of these embeddings overflow float32; scale them down, or to unit vectors")
    return text_norms, image_norms


def best_probes(
    query: IntArray, score: npt.NDArray[np.float64], reach: npt.NDArray[np.float64]
) -> tuple[Probes, IntArray]:
    """Each query's best positive score, and how many of its positives share it."""
    order = np.lexsort((-score, query))
    query, score, reach = query[order], score[order], reach[order]
    first = np.flatnonzero(np.r_[True, query[1:] != query[:-1]])
    sizes = np.diff(np.r_[first, len(query)])
    best = score[first]
    same = score >= np.repeat(best, sizes) - reach
    return Probes(query[first], best), np.add.reduceat(same.astype(np.int64), first)


def count_rivals(
    text: Embeddings,
    image: Embeddings,
    pairs: IntArray,
    text_probes: Probes,
    image_probes: Probes,
    text_norms: npt.NDArray[np.float64],
    image_norms: npt.NDArray[np.float64],
    block: int = BLOCK,
) -> tuple[tuple[IntArray, IntArray], tuple[IntArray, IntArray]]:
    """Count the wrong candidates above and level with each probe, both directions from the same blocks.

    Args:
        pairs: (P, 2) all true (caption, image) pairs, unique and sorted; they are never counted.
        text_probes: captions that ask over images; image_probes: images that ask over captions.

    Returns:
        ((above, tied) of the text probes, (above, tied) of the image probes), int64.
    """
    if block < 8:
        raise ValueError(f"block={block}: blocks of fewer than 8 x 8 scores are all overhead; 1024 is a good size")
    width = text.shape[1]
    sides = (
        _Side(text_probes, text_norms, float(image_norms.max()), width),
        _Side(image_probes, image_norms, float(text_norms.max()), width),
    )
    columns = -(-len(image) // block)
    key = pairs[:, 0] // block * columns + pairs[:, 1] // block
    order = np.argsort(key, kind="stable")
    key, pairs = key[order], pairs[order]
    scores = np.empty(block * block, dtype=np.float32)
    masks = np.empty((2, block * block), dtype=np.bool_)

    for top in range(0, len(text), block):
        text_block = rows_float32(text, top, top + block)
        for left in range(0, len(image), block):
            image_block = rows_float32(image, left, left + block)
            shape = (len(text_block), len(image_block))
            product = np.matmul(text_block, image_block.T, out=scores[: shape[0] * shape[1]].reshape(shape))
            number = top // block * columns + left // block
            own = pairs[np.searchsorted(key, number) : np.searchsorted(key, number + 1)] - (top, left)
            product[own[:, 0], own[:, 1]] = -np.inf  # a true pair is no rival, from either side
            tile = _Tile(text_block, image_block, product, own)
            for axis, side in enumerate(sides):
                side.count(tile, axis, top if axis == 0 else left, masks)
    return (sides[0].above, sides[0].tied), (sides[1].above, sides[1].tied)


@dataclass
class _Tile:
    """One block of scores, and what it was made from."""

    text: npt.NDArray[np.float32]  # (r, E)
    image: npt.NDArray[np.float32]  # (c, E)
    product: npt.NDArray[np.float32]  # (r, c), -inf at true pairs
    own: IntArray  # (n, 2) the true pairs

    @cached_property
    def exact(self) -> npt.NDArray[np.float64]:
        """(r, c) the same in double precision."""
        scores = self.text.astype(np.float64) @ self.image.astype(np.float64).T
        scores[self.own[:, 0], self.own[:, 1]] = -np.inf
        return scores


def rounding(width: int) -> float:
    """How far a float32 dot product of ``width`` terms can be from the exact one, relative to the two norms.

    The bound that holds with any order of summation, n u / (1 - n u) with u = 2^-24 (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., eq. 3.5 and Cauchy-Schwarz).
    """
    unit = 2.0**-24
    return width * unit / (1 - width * unit)


class _Side:
    """One direction's probes and counts while the blocks go by."""

    def __init__(self, probes: Probes, norms: npt.NDArray[np.float64], longest: float, width: int) -> None:
        self.probes = probes
        self.above = np.zeros(len(probes.row), dtype=np.int64)
        self.tied = np.zeros(len(probes.row), dtype=np.int64)
        self.reach = norms[probes.row] * longest  # times TIE or rounding: the doubt about a score of this query
        # the second term: products that fall below float32's range
        doubt = rounding(width) * self.reach + width * 2.0**-149
        # one step outward, so that rounding the bounds themselves to float32 cannot let a doubtful score slip by
        self.high = np.nextafter((probes.score + doubt).astype(np.float32), np.float32(np.inf))
        self.low = np.nextafter((probes.score - doubt).astype(np.float32), np.float32(-np.inf))

    def count(self, tile: _Tile, axis: int, offset: int, masks: BoolBlock) -> None:
        """Add what a block holds: its rows (axis 0) or columns (axis 1) are queries ``offset`` and following."""
        size = tile.product.shape[axis]
        start, stop = np.searchsorted(self.probes.row, (offset, offset + size)).tolist()
        # no more probes at a time than the block has queries: a query may have many positives
        for first in range(start, stop, size):
            self._count(tile, axis, offset, slice(first, min(first + size, stop)), masks)

    def _count(self, tile: _Tile, axis: int, offset: int, chosen: slice, masks: BoolBlock) -> None:
        rows = self.probes.row[chosen] - offset
        whole = len(rows) == tile.product.shape[axis] and bool((rows == np.arange(len(rows))).all())
        scores = tile.product if whole else np.take(tile.product, rows, axis=axis)
        spread = (slice(None), None) if axis == 0 else (None, slice(None))
        near, sure = (mask[: scores.size].reshape(scores.shape) for mask in masks)
        reached = int(np.count_nonzero(np.greater_equal(scores, self.low[chosen][spread], out=near)))
        if not reached:
            return
        if reached <= FEW * scores.size:  # a good model: most blocks hold next to nothing that reaches the positives
            at = where_few(near)
            probe = at // scores.shape[1] if axis == 0 else at % scores.shape[1]
            over = scores.reshape(-1)[at] > self.high[chosen][probe]
            self.above[chosen] += np.bincount(probe[over], minlength=len(rows))
            self._settle(tile, axis, chosen, rows, at[~over])
            return
        surely_above = count_true(np.greater(scores, self.high[chosen][spread], out=sure), 1 - axis)
        self.above[chosen] += surely_above
        in_doubt = reached - int(surely_above.sum())
        if in_doubt > DENSE * scores.size:
            target, reach = self.probes.score[chosen], TIE * self.reach[chosen]
            distance = np.take(tile.exact, rows, axis=axis) - target[spread]
            level = np.abs(distance) <= reach[spread]
            self.above[chosen] += count_true((distance > 0) & ~level, 1 - axis) - surely_above
            self.tied[chosen] += count_true(level, 1 - axis)
        elif in_doubt:
            self._settle(tile, axis, chosen, rows, where_few(np.not_equal(near, sure, out=near)))

    def _settle(self, tile: _Tile, axis: int, chosen: slice, rows: IntArray, at: IntArray) -> None:
        """Score the doubtful pairs, at flat places of this part of the block, in double precision and count them."""
        text_at, image_at = np.divmod(at, tile.product.shape[1] if axis == 0 else len(rows))
        probe = text_at if axis == 0 else image_at
        if axis == 0:
            text_at = rows[probe]
        else:
            image_at = rows[probe]
        distance = pair_scores(tile.text, tile.image, text_at, image_at) - self.probes.score[chosen][probe]
        level = np.abs(distance) <= TIE * self.reach[chosen][probe]
        self.above[chosen] += np.bincount(probe[(distance > 0) & ~level], minlength=len(rows))
        self.tied[chosen] += np.bincount(probe[level], minlength=len(rows))
