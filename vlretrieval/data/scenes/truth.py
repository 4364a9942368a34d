"""Which captions are true of which scenes, computed from the objects; ``query`` says what true means.

Objects of a scene are bits of one byte, so a thing's candidates in a scene are four look-ups and three ANDs.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from vlretrieval.data.scenes.layout import Scene
from vlretrieval.data.scenes.query import QueryTable
from vlretrieval.data.scenes.vocabulary import COLOURS, PLACES, RELATIONS, SHAPES, SIZES

# Centres must differ by this share of the side for a relation to hold. In a grid, whatever the jitter, objects of
# one column (row) differ by less and those of different columns (rows) by more, so that no case is doubtful there.
MARGIN = 1 / 6
_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)
_CHUNK = 1 << 20


class Truth:
    """The truth about N scenes.

    Args:
        scenes: at most eight objects each.
        margin: the share of the side by which centres must differ for a relation to hold.
    """

    def __init__(self, scenes: Sequence[Scene], margin: float = MARGIN) -> None:
        count = len(scenes)
        width = max(len(scene) for scene in scenes)
        assert width <= 8, "objects are bits of a byte"
        # Properties -1 (ANY) reach the last column, in which every object has its bit.
        masks = [np.zeros((count, len(names) + 1), dtype=np.uint8) for names in (SHAPES, COLOURS, SIZES, PLACES)]
        centre = np.full((count, width, 2), np.nan)  # a missing object stands in no relation
        places_of_cell = [[p for p, cells in enumerate(PLACES.values()) if cells >> cell & 1] for cell in range(9)]
        for row, scene in enumerate(scenes):
            for bit, placed in enumerate(scene):
                own = (placed.shape, placed.colour, placed.size)
                for mask, value in zip(masks, own, strict=False):
                    mask[row, value] |= 1 << bit
                for place in places_of_cell[placed.cell]:
                    masks[3][row, place] |= 1 << bit
                centre[row, bit] = placed.x, placed.y
            for mask in masks:
                mask[row, -1] = (1 << len(scene)) - 1
        self._masks = masks
        self._everything = masks[0][:, -1]
        difference = centre[:, None, :, :] - centre[:, :, None, :]  # (N, i, j, 2): from i to j
        with np.errstate(invalid="ignore"):
            right_of_me, below_me = difference[..., 0] > margin, difference[..., 1] > margin
        holds = (right_of_me, right_of_me.swapaxes(1, 2), below_me, below_me.swapaxes(1, 2))  # as RELATIONS
        bits = (1 << np.arange(width)).astype(np.uint8)
        # (N, 4, O): the objects j to which object i stands in the relation.
        self._related = np.stack([(table * bits).sum(-1, dtype=np.uint8) for table in holds], axis=1)
        assert len(RELATIONS) == len(holds)

    def __len__(self) -> int:
        return len(self._everything)

    def holds(self, queries: QueryTable, query: np.ndarray, scene: np.ndarray) -> np.ndarray:
        """(P,) bool: is query ``query[p]`` true of scene ``scene[p]``?"""
        result = np.zeros(len(query), dtype=bool)
        for start in range(0, len(query), _CHUNK):
            part = slice(start, start + _CHUNK)
            result[part] = self._holds(queries, query[part], scene[part])
        return result

    def pairs(self, queries: QueryTable) -> np.ndarray:
        """(P, 2) int64: all (query, scene) pairs that are true, sorted."""
        first, group = np.unique(queries.things[:, 0], axis=0, return_inverse=True)
        order = np.argsort(group.reshape(-1), kind="stable")
        bounds = np.searchsorted(group.reshape(-1)[order], np.arange(len(first) + 1))
        everywhere = np.arange(len(self))
        found, waiting, size = [], [], 0
        for number, thing in enumerate(first):  # queries that begin with the same thing share its candidates
            scenes = np.flatnonzero(_enough(self._candidates(thing[None], everywhere), thing[None, 4]))
            members = order[bounds[number] : bounds[number + 1]]
            waiting.append((np.repeat(members, len(scenes)), np.tile(scenes, len(members))))
            size += len(scenes) * len(members)
            if size > _CHUNK or number == len(first) - 1:
                query, scene = (np.concatenate(column) for column in zip(*waiting, strict=True))
                keep = self.holds(queries, query, scene)
                found.append(np.stack([query[keep], scene[keep]], axis=1))
                waiting, size = [], 0
        pairs = np.concatenate(found) if found else np.zeros((0, 2), dtype=np.int64)
        return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]

    def _candidates(self, thing: np.ndarray, scene: np.ndarray) -> np.ndarray:
        """uint8 bits of the objects that fit the things (rows of ``thing``) in the scenes."""
        fits = self._everything[scene]
        for number, mask in enumerate(self._masks):
            fits = fits & mask[scene, thing[:, number]]
        return fits

    def _holds(self, queries: QueryTable, query: np.ndarray, scene: np.ndarray) -> np.ndarray:
        alive = np.arange(len(query))
        fitting: list[np.ndarray] = []
        for column in range(queries.things.shape[1]):
            thing = queries.things[query[alive], column]
            fits = self._candidates(thing, scene[alive])
            fits[thing[:, 4] == 0] = 0
            keep = _enough(fits, thing[:, 4])
            alive = alive[keep]
            fitting = [earlier[keep] for earlier in fitting] + [fits[keep]]
        counts = queries.things[query[alive], :, 4]
        ok = _distinct(fitting, counts)
        total = counts.sum(1)
        ok &= ~queries.exhaustive[query[alive]] | (_POPCOUNT[self._everything[scene[alive]]] == total)
        relation = queries.relation[query[alive]]
        with_relation = np.flatnonzero(ok & (relation >= 0))
        if len(with_relation):
            related = self._related[scene[alive[with_relation]], relation[with_relation]]  # (R, O)
            ok[with_relation] = _stand([fits[with_relation] for fits in fitting[:3]], related)
        result = np.zeros(len(query), dtype=bool)
        result[alive] = ok
        return result


def _enough(fits: np.ndarray, quantity: np.ndarray) -> np.ndarray:
    """Quantity 1 asks for at least one fitting object, a higher one for exactly so many, 0 for nothing."""
    found = _POPCOUNT[fits]
    return np.where(quantity > 1, found == quantity, found >= quantity)


def _distinct(fitting: list[np.ndarray], counts: np.ndarray) -> np.ndarray:
    """Can every thing have objects of its own? Hall's theorem: any things together fit at least as many objects
    as they ask for."""
    ok = np.ones(len(counts), dtype=bool)
    used = np.flatnonzero(counts.any(0)).tolist()
    for size in range(2, len(used) + 1):
        for chosen in combinations(used, size):
            union = np.bitwise_or.reduce([fitting[t] for t in chosen])
            # A thing of quantity 0 adds neither objects nor demand, so its subsets repeat those without it.
            ok &= _POPCOUNT[union] >= counts[:, chosen].sum(1)
    return ok


def _stand(fitting: list[np.ndarray], related: np.ndarray) -> np.ndarray:
    """Are there objects i of the first and j of the second thing with i related to j, and another for the third?"""
    found = np.zeros(len(related), dtype=bool)
    objects = related.shape[1]
    first, second = fitting[0], fitting[1]
    third = fitting[2] if len(fitting) > 2 else np.zeros_like(first)
    for i in range(objects):
        for j in range(objects):
            if i != j:
                rest = third & np.uint8(255 ^ (1 << i | 1 << j))
                hit = (first >> i & 1) & (second >> j & 1) & (related[:, i] >> j & 1)
                found |= (hit == 1) & ((third == 0) | (rest != 0))
    return found
