"""Sizes of well-known splits, so that a set that is not the published one says so before its numbers are compared."""

from collections.abc import Mapping

# Pictures of train, val and test in the splits of Karpathy and Fei-Fei (arXiv:1412.2306); COCO with restval in train.
KNOWN_SIZES: dict[str, dict[str, int]] = {
    "flickr8k": {"train": 6000, "val": 1000, "test": 1000},
    "flickr30k": {"train": 29000, "val": 1014, "test": 1000},
    "coco": {"train": 113287, "val": 5000, "test": 5000},
}
_PUBLISHED_TOTALS = {8000: "flickr8k", 31014: "flickr30k", 123287: "coco"}


def known_as(name: str | None, sizes: Mapping[str, int]) -> str | None:
    """Which known set this is: by its own name ("flickr8k-cn" too), or by its total."""
    for known in KNOWN_SIZES:
        if name and known in name.lower().replace("_", "").replace("mscoco", "coco"):
            return known
    return _PUBLISHED_TOTALS.get(sum(sizes.values()))


def size_faults(name: str | None, sizes: Mapping[str, int]) -> list[str]:
    """A sentence for each split whose size is not the published one; empty for unknown sets.

    Args:
        name: what the set calls itself.
        sizes: pictures of each split.
    """
    known = known_as(name, sizes)
    if known is None:
        return []
    expected = KNOWN_SIZES[known]
    faults = [
        f"{known}: split {split!r} has {sizes[split]} images, {count} in the published one"
        for split, count in expected.items()
        if split in sizes and sizes[split] != count
    ]
    total = sum(expected.values())
    faults += [
        f"{known}: split {split!r} holds the whole set ({count} images)"
        for split, count in sizes.items()
        if count == total
    ]
    return faults
