"""What a thing computed from a split's pictures was made of, and whether it still holds."""

import hashlib
import logging
from typing import Any

from vlretrieval.data.splits import Split
from vlretrieval.data.transforms import EvalTransform

log = logging.getLogger(__name__)


def made_of(split: Split, transform: EvalTransform) -> dict[str, Any]:
    """What anything made of a split's pictures depends on: which they are, their files, and how they are resized."""
    digest = hashlib.sha256()
    for image_id in split.image_ids:
        raw = image_id.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return {
        "split": split.name,
        "pictures": len(split.image_ids),
        "image_ids": digest.hexdigest()[:16],
        "files": split.stamp(),
        "resize": transform.mode,
        "size": transform.image_size,
        "fill": list(transform.fill),
    }


def difference(written: dict[str, Any], now: dict[str, Any], split: Split) -> str | None:
    """The first thing that was otherwise when something was ``written``, as a phrase; None: it still holds.

    Files copied elsewhere (to a node's own disk at the start of each job, say) have other times of change. Then all are
    read, and pass if their contents are those that were ``written`` as ``contents``.
    """
    for name, value in now.items():
        if written.get(name) == value:
            continue
        if name == "files" and "contents" in written and written["contents"] == split.stamp(contents=True):
            log.info("split %s: its files have other times of change than when read, and the same contents", split.name)
            continue
        return f"{name} is {value!r} now and was {written.get(name)!r}"
    return None
