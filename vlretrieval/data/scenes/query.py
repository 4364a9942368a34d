"""The meaning of a caption, apart from its wording: things that a picture must hold, and how they stand.

A query is true of a scene if all of this holds:

- every thing is matched by objects of its own: distinct things need distinct objects;
- a thing of quantity 1 ("a red circle") asks for at least one object; a thing of quantity q > 1 ("two red circles")
  says that the scene holds exactly q such objects;
- with a relation, the objects of the first two things stand in it, clearly: their centres differ by more than a margin;
- an exhaustive query ("only ...", "... and nothing else") leaves no object of the scene unmatched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from vlretrieval.data.scenes.vocabulary import ANY


class Thing(NamedTuple):
    """Objects that a caption speaks of in one phrase; ANY leaves a property open."""

    shape: int = ANY
    colour: int = ANY
    size: int = ANY
    place: int = ANY
    quantity: int = 1


@cache
def thing(shape: int = ANY, colour: int = ANY, size: int = ANY, place: int = ANY, quantity: int = 1) -> Thing:
    """A ``Thing``, one object for equal values: a training split speaks of a million things, few of them different."""
    return Thing(shape, colour, size, place, quantity)


class Query(NamedTuple):
    """See the module. ``relation`` is that of ``things[0]`` to ``things[1]``, or ANY for none."""

    things: tuple[Thing, ...]
    relation: int = ANY
    exhaustive: bool = False

    @property
    def total(self) -> int:
        """How many objects the query speaks of."""
        return sum(thing.quantity for thing in self.things)


@dataclass(frozen=True)
class QueryTable:
    """M queries as arrays, for ``Truth``.

    things is (M, T, 5) int8 with the fields of ``Thing``; a row of quantity 0 is no thing. relation is (M,) int8,
    exhaustive (M,) bool.
    """

    things: np.ndarray
    relation: np.ndarray
    exhaustive: np.ndarray

    def __len__(self) -> int:
        return len(self.relation)

    def query(self, number: int) -> Query:
        """Row ``number`` as a query again."""
        things = tuple(Thing(*row) for row in self.things[number].tolist() if row[-1])
        return Query(things, int(self.relation[number]), bool(self.exhaustive[number]))


_NOTHING = (ANY, ANY, ANY, ANY, 0)


def tabulate(queries: Sequence[Query], width: int | None = None) -> QueryTable:
    """Queries as arrays, ``width`` things wide (as many as needed, if None).

    A relation with more than three things is not provided for.
    """
    if width is None:
        width = max((len(query.things) for query in queries), default=1)
    flat: list[int] = []
    fill = [_NOTHING * missing for missing in range(width + 1)]
    for query in queries:
        assert query.relation == ANY or 2 <= len(query.things) <= 3, query
        for said in query.things:
            flat += said
        flat += fill[width - len(query.things)]
    return QueryTable(
        np.array(flat, dtype=np.int8).reshape(len(queries), width, 5),
        np.array([query.relation for query in queries], dtype=np.int8),
        np.array([query.exhaustive for query in queries], dtype=bool),
    )


def stacked(tables: Sequence[QueryTable]) -> QueryTable:
    """Tables of one width, one below the other."""
    return QueryTable(
        np.concatenate([table.things for table in tables]),
        np.concatenate([table.relation for table in tables]),
        np.concatenate([table.exhaustive for table in tables]),
    )
