"""What a head's map says, as pure functions of its weights: B pairs, H heads, Lq queries, Lk keys.

Every measure of rows is averaged over the queries that count (``rows``), one figure a pair and head: (B, H), NaN for a
pair without such a query. Weights are those of :func:`vlretrieval.model.attention.attention_weights`: rows sum to 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLAT = 0.01  # nats: maps nearer to an even spread than this have nothing in them that a place could explain


def over_rows(values: Tensor, rows: Tensor) -> Tensor:
    """(B, H, Lq) figures of queries and (B, Lq) bool which count -> (B, H) means, NaN without any."""
    weight = rows[:, None].to(values.dtype)
    total = (torch.nan_to_num(values) * weight).sum(-1)
    return total / weight.sum(-1).masked_fill(~rows.any(-1)[:, None], math.nan)


def row_entropy(weights: Tensor) -> Tensor:
    """(B, H, Lq, Lk) -> (B, H, Lq) nats: 0 for a query that looks at one key, log Lk for an even spread."""
    return -torch.xlogy(weights, weights).sum(-1)


def entropy(weights: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """(B, H) mean entropy of a query as a share of the highest there is: 0 one key, 1 all of its keys alike.

    Args:
        rows: (B, Lq) bool, queries that count. keys: (B, Lk) bool, keys that are there; one key alone gives 0.
    """
    highest = keys.sum(-1).clamp(min=2).log()[:, None]
    return over_rows(row_entropy(weights), rows) / highest


def mean_distance(weights: Tensor, rows: Tensor, distance: Tensor) -> Tensor:
    """(B, H) how far away a query looks, in the unit of ``distance`` (tokens, patches).

    Args:
        distance: (Lq, Lk), NaN where one of the two has no place (a class token): such keys are left out.
    """
    placed = ~distance.isnan()
    mass = weights * placed
    # a query without a place, or one that looks at none of the placed keys, has no distance
    counted = rows[:, None] & (mass.sum(-1) > 0)  # (B, H, Lq)
    found = (mass * distance.nan_to_num()).sum(-1) / mass.sum(-1).clamp(min=1e-12)
    return (found * counted).sum(-1) / counted.sum(-1).to(found.dtype).masked_fill(~counted.any(-1), math.nan)


def share_near(weights: Tensor, rows: Tensor, distance: Tensor, reach: float = 1.0) -> Tensor:
    """(B, H) share of a query's weight on keys within ``reach`` of it, itself among them; of queries with a place."""
    near = distance <= reach  # NaN is not
    return over_rows((weights * near).sum(-1), rows & near.any(-1))


def share_near_by_chance(rows: Tensor, keys: Tensor, distance: Tensor, reach: float = 1.0) -> Tensor:
    """(B,) the same of a head that looks at all keys alike."""
    near = distance <= reach
    even = (near & keys[:, None]).sum(-1) / keys.sum(-1, keepdim=True).clamp(min=1)  # (B, Lq)
    return over_rows(even[:, None], rows & near.any(-1))[:, 0]


def share_on(weights: Tensor, rows: Tensor, chosen: Tensor) -> Tensor:
    """(B, H) share of the weight on the keys ``chosen`` (B, Lk) bool."""
    return over_rows((weights * chosen[:, None, None]).sum(-1), rows)


def largest_column(weights: Tensor, rows: Tensor) -> Tensor:
    """(B, H) share of all queries' weight on the one key that gets most of it: 1 if all look at the same place.

    NaN with fewer than two queries, where it says nothing.
    """
    weight = rows[:, None, :, None].to(weights.dtype)
    columns = (weights * weight).sum(2) / weight.sum(2).clamp(min=1)
    return columns.amax(-1).masked_fill((rows.sum(-1) < 2)[:, None], math.nan)


def explained_by_position(mean_map: Tensor, visits: Tensor, entropy_sum: Tensor, freedom_sum: Tensor) -> Tensor:
    """(H,) how far the maps of a head are explained by position alone: 0 not at all, 1 wholly; NaN for a flat head.

    A map's distance from an even spread, in nats (Kullback-Leibler), splits into the distance of the mean map from it,
    which place alone gives, and the mean distance of the single maps from the mean map, which only content can give.

    Args:
        mean_map: (H, Lq, Lk) mean weights by place of query and key.
        visits: (Lq,) how many queries there were at each place.
        entropy_sum: (H,) sum of all their entropies in nats.
        freedom_sum: scalar, sum of the logs of how many keys each had.
    """
    queries = visits.sum().clamp(min=1)
    of_mean = (-torch.xlogy(mean_map, mean_map).sum(-1) * visits).sum(-1) / queries  # (H,)
    single = entropy_sum / queries
    whole = freedom_sum / queries - single
    share = 1 - (of_mean - single) / whole.clamp(min=1e-12)
    return share.clamp(0, 1).masked_fill(whole < FLAT, math.nan)


def named_map(weights: Tensor, pair: Tensor, queries: Tensor) -> Tensor:
    """(M, H, Lk) mean map of the queries of each of M mentions.

    Args:
        pair: (M,) which of the B pairs each mention belongs to. queries: (M, Lq) bool, at least one each.
    """
    share = queries.to(weights.dtype) / queries.sum(-1, keepdim=True)
    return torch.einsum("mhqk,mq->mhk", weights.index_select(0, pair), share)


def mass_on(maps: Tensor, inside: Tensor) -> Tensor:
    """(M, H) share of each map's weight inside: 1 for a head that looks at nothing else. inside: (M, Lk) bool."""
    return (maps * inside[:, None]).sum(-1)


def points_at(maps: Tensor, inside: Tensor, allowed: Tensor) -> Tensor:
    """(M, H) 1 where the allowed key with the most weight lies inside, else 0: the pointing game (arXiv:1608.00507).

    Args:
        allowed: (M, Lk) bool, keys that may win (patches, not the class token). Where the highest weight is shared,
            the share of those keys that lie inside: a flat map points nowhere, and wins by chance alone.
    """
    masked = maps.masked_fill(~allowed[:, None], -1.0)
    best = masked >= masked.amax(-1, keepdim=True) - 1e-7
    return (best & inside[:, None]).sum(-1) / best.sum(-1)


def js_divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions over the last axis, in bits: 0 equal, 1 without anything in common."""
    mean = (first + second) / 2
    entropies = [-torch.xlogy(p, p).sum(-1) for p in (mean, first, second)]
    return ((entropies[0] - (entropies[1] + entropies[2]) / 2) / math.log(2)).clamp(0, 1)
