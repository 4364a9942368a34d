"""Pictures a second and core for each path of the data, against what most people write. Ratios are paired.

    python scripts/bench/data.py                    # about 2 minutes on one free core
    python scripts/bench/data.py --memory 1000000   # what 4 workers add to one copy of a million records; a minute more

The pictures are photo-like noise made on the spot, of the size and weight of COCO's (640 x 480 JPEG, about 170 kB).
Both ways of a pair work on the same pictures in turn, and processor time is compared: a busy machine slows both. Usual
is Pillow with torchvision v2 and one float picture at a time; ours stays uint8 until a batch is normalised as one, and
that is in its time.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402  (after the threads are set)
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from vlretrieval.data.images import open_image  # noqa: E402
from vlretrieval.data.packed import PackedStrings, PackedTokens  # noqa: E402
from vlretrieval.data.pictures import MemoryPictures  # noqa: E402
from vlretrieval.data.shards import ShardFile, read_index, sample_json, samples, write_shard  # noqa: E402
from vlretrieval.data.transforms import CropTransform, EvalTransform, TrainTransform, to_tensor  # noqa: E402

CUBIC = v2.InterpolationMode.BICUBIC
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Work = Callable[[], object]


def photo(rng: np.random.Generator, width: int = 640, height: int = 480) -> bytes:
    """A JPEG with a photo's spectrum: amplitudes fall with frequency."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    fall = 1 / np.maximum(np.hypot(rows, columns), 1 / width)
    planes = [np.fft.irfft2(fall * np.exp(2j * np.pi * rng.random(fall.shape)), s=(height, width)) for _ in range(3)]
    pixels = np.stack(planes, -1)
    pixels = 0.6 * pixels.mean(-1, keepdims=True) + 0.4 * pixels
    pixels = (pixels - pixels.mean()) / pixels.std() * 50 + 128
    buffer = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=87)
    return buffer.getvalue()


def normalised(batch: list[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """What the image encoder does with a batch of bytes."""
    pixels = (torch.stack(batch) if isinstance(batch, list) else batch).float()
    mean, std = (torch.tensor(v)[:, None, None] * 255 for v in (MEAN, STD))
    return pixels.sub_(mean).div_(std)


def usual(photos: list[bytes], *first: v2.Transform) -> Work:
    steps = v2.Compose([*first, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    return lambda: torch.stack([steps(Image.open(io.BytesIO(data)).convert("RGB")) for data in photos])


def ours_eval(photos: list[bytes], size: int) -> Work:
    transform = EvalTransform(size)
    return lambda: normalised([transform(open_image(data)) for data in photos])


def ours_train(photos: list[bytes], size: int) -> Work:
    transform = TrainTransform(size, flip=0.5)

    def one(data: bytes, key: int) -> torch.Tensor:
        needed = open_image(data, at_least=lambda w, h: transform.shorter_side_needed(w, h, key))
        return transform(to_tensor(needed), key)

    return lambda: normalised([one(data, key) for key, data in enumerate(photos)])


def from_memory(photos: list[bytes], stored: int, augment: TrainTransform | CropTransform) -> Work:
    pixels = np.stack([EvalTransform(stored)(open_image(data)).numpy() for data in photos])
    pictures, rows = MemoryPictures(pixels, augment), np.arange(len(photos))
    # Not normalised here: a model on a GPU does that, and on bytes it costs a twentieth of the rest.
    return lambda: pictures(rows, rows.astype(np.uint64), rows >= 0)


def paired(name: str, goal: float, theirs: Work, ours: Work, count: int, rounds: int, unit: str = "pictures") -> bool:
    """Time both in turn; print things a second of each, and the median ratio."""
    ratios, best = [], [float("inf"), float("inf")]
    for _ in range(rounds):
        times = []
        for work in (theirs, ours):
            started = time.process_time()
            work()
            times.append(max(time.process_time() - started, 1e-9))
        ratios.append(times[0] / times[1])
        best = [min(b, t) for b, t in zip(best, times, strict=True)]
    ratio = statistics.median(ratios)
    verdict = "ok" if ratio >= goal else "BELOW"
    rates = f"{count / best[0]:>11,.0f}{count / best[1]:>11,.0f}"
    print(f"{name:<58}{rates} {unit:<9}{ratio:>7.2f} x   goal {goal:g}   {verdict}", flush=True)
    return ratio >= goal


def pictures(rounds: int, count: int) -> list[bool]:
    rng = np.random.default_rng(0)
    photos = [photo(rng) for _ in range(count)]
    print(f"{count} pictures of {np.mean([len(data) for data in photos]) / 1e3:.0f} kB; a second and core: usual, ours")
    crop = lambda size: (v2.RandomResizedCrop(size, (0.5, 1), interpolation=CUBIC), v2.RandomHorizontalFlip())  # noqa: E731
    squash = v2.Resize((224, 224), CUBIC, antialias=True)
    results = [
        paired("224 px, evaluation, same result", 1.6, usual(photos, squash), ours_eval(photos, 224), count, rounds),
        paired(
            "224 px, random crop, same result", 1.6, usual(photos, *crop(224)), ours_train(photos, 224), count, rounds
        ),
        paired(
            "128 px, random crop, scaled decoding", 2, usual(photos, *crop(128)), ours_train(photos, 128), count, rounds
        ),
    ]
    import open_clip

    theirs = open_clip.image_transform(224, is_train=True)
    work: Work = lambda: torch.stack([theirs(Image.open(io.BytesIO(data))) for data in photos])  # noqa: E731
    results.append(
        paired("224 px, against open_clip's training transform", 2, work, ours_train(photos, 224), count, rounds)
    )
    resized, cut = TrainTransform(224, flip=0.5), CropTransform(224, flip=0.5)
    base = usual(photos, *crop(224))
    results.append(
        paired("224 px from a cache of 256, resized crop", 6, base, from_memory(photos, 256, resized), count, rounds)
    )
    results.append(
        paired("224 px from a cache of 256, plain crop", 20, base, from_memory(photos, 256, cut), count, rounds)
    )
    return results


def shards(rounds: int, folder: Path, count: int = 2000) -> list[bool]:
    rng = np.random.default_rng(1)
    small = photo(rng, 96, 72)
    path = folder / "x-000000.tar"
    write_shard(path, ((f"{i:06d}", {"jpg": small, "json": sample_json({"captions": ["a"]})}) for i in range(count)))
    (folder / "plain").mkdir()
    for i in range(count):
        (folder / "plain" / f"{i:06d}.jpg").write_bytes(small)

    def ours() -> int:
        shard = ShardFile(str(path))
        found = samples(path, read_index(path))
        return sum(len(shard.read(part.start, part.size)) for _, parts in found for part in parts.values())

    results = []
    try:
        import webdataset
    except ImportError:
        print("webdataset is not installed: left out")
    else:
        read: Work = lambda: [sample["jpg"] for sample in webdataset.WebDataset(str(path), shardshuffle=False)]  # noqa: E731
        name = "samples of a local shard, against webdataset"
        results.append(paired(name, 5, read, ours, count, rounds, "samples"))
    shard = ShardFile(str(path))
    places = [member for member in read_index(path) if member.extension == "jpg"]
    files: Work = lambda: [open_image(folder / "plain" / f"{i:06d}.jpg") for i in range(count)]  # noqa: E731
    tar: Work = lambda: [open_image(shard.read(m.start, m.size)) for m in places]  # noqa: E731
    results.append(paired("opened pictures of a shard, against a folder", 1, files, tar, count, rounds))
    return results


def tokens(rounds: int, count: int = 2000) -> list[bool]:
    from vlretrieval.data.tokenizers import BpeTokenizer, pad

    captions = [f"a dog number {i} runs beside a brown horse near the {i % 7} trees" for i in range(count)]
    tokenizer = BpeTokenizer(512, 64).fit(captions)
    packed, rows = PackedTokens(tokenizer(captions), 0), np.arange(count)
    each: Work = lambda: pad(tokenizer(captions), 0)  # noqa: E731
    return [
        paired(
            "captions tokenised once, not each step", 5, each, lambda: packed.gather(rows), count, rounds, "captions"
        )
    ]


def proportional_bytes(pid: int | str) -> int:
    """Memory of a process, shared pages counted in parts."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def _reads_all(strings: PackedStrings, packed: PackedTokens, ready: object, go: object) -> None:
    for start in range(0, len(strings), 4096):
        rows = np.arange(start, min(start + 4096, len(strings)))
        packed.gather(rows)
        for row in rows[::16]:
            _ = strings[int(row)]
    ready.release()  # type: ignore[attr-defined]
    go.wait()  # type: ignore[attr-defined]


def memory(count: int, workers: int = 4) -> bool:
    """How much ``workers`` forked readers of all records add to one copy of them."""
    strings = PackedStrings(f"a caption of some length, as they are, with number {i} in it" for i in range(count))
    packed = PackedTokens(([1, *range(5, 19), i % 30000, 2] for i in range(count)), 0)
    context = multiprocessing.get_context("fork")

    def total(texts: PackedStrings, ids: PackedTokens) -> int:
        ready, go = context.Semaphore(0), context.Event()
        children = [context.Process(target=_reads_all, args=(texts, ids, ready, go)) for _ in range(workers)]
        for child in children:
            child.start()
        for _ in children:
            ready.acquire()
        used = proportional_bytes("self") + sum(proportional_bytes(child.pid or "self") for child in children)
        go.set()
        for child in children:
            child.join()
        return used

    copy = strings.nbytes + packed.nbytes
    # What workers cost without reading; the one copy is in it.
    empty, full = total(PackedStrings([]), PackedTokens([], 0)), total(strings, packed)
    added = (full - empty) / copy
    told = f"{count:,} records, {copy / 1e6:.0f} MB a copy; {workers} workers that read all of it"
    print(f"{told} add {added:+.1%} (goal < 10 %)")
    return added < 0.1


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--count", type=int, default=24, help="pictures a round")
    words.add_argument("--memory", type=int, default=0, help="records of the memory test; 0 leaves it out")
    args = words.parse_args()
    torch.set_num_threads(1)
    results = pictures(args.rounds, args.count)
    with tempfile.TemporaryDirectory() as folder:
        results += shards(args.rounds, Path(folder))
    results += tokens(args.rounds)
    if args.memory:
        results.append(memory(args.memory))
    print(f"{sum(results)} of {len(results)} goals met")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
