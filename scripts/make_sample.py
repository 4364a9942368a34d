"""Draws data/sample: a dozen tiny pictures with captions, in every format that the readers know.

python scripts/make_sample.py          writes data/sample anew; the same bytes each time (the hub format's apart)
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

from vlretrieval.data.convert import convert
from vlretrieval.data.records import Record, Records

OUT = Path(__file__).resolve().parent.parent / "data" / "sample"
SIZE = (96, 72)
COLOURS = {"red": (205, 45, 40), "blue": (40, 80, 200), "green": (40, 150, 70), "yellow": (235, 200, 60)}
CHINESE = {
    "red": "红色",
    "blue": "蓝色",
    "green": "绿色",
    "yellow": "黄色",
    "circle": "圆",
    "square": "方块",
    "triangle": "三角形",
}
SHAPES = ("circle", "square", "triangle")
SPLITS = ("train",) * 8 + ("val",) * 2 + ("test",) * 2


def draw(colour: str, shape: str, ground: str) -> Image.Image:
    image = Image.new("RGB", SIZE, tuple(200 + channel // 5 for channel in COLOURS[ground]))
    pen, box = ImageDraw.Draw(image), (30, 18, 66, 54)
    if shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    else:
        pen.polygon([(30, 54), (66, 54), (48, 18)], fill=COLOURS[colour])
    return image


class Drawn:
    """A reader of the twelve pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Record] = []
        for number, split in enumerate(SPLITS):
            colour, shape = list(COLOURS)[number % 4], SHAPES[number % 3]
            ground = list(COLOURS)[(number // 4 + number + 1) % 4]
            name = f"{split}/{number:02d}_{colour}_{shape}.png"
            captions = (
                f"A {colour} {shape} on pale {ground} ground.",
                f"the {shape} is {colour}",
                f"浅{CHINESE[ground]}背景上的{CHINESE[colour]}{CHINESE[shape]}。",
            )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            draw(colour, shape, ground).save(folder / name, optimize=True)
            self.made.append(Record(name, captions, name, split))

    def records(self) -> Iterator[Record]:
        return iter(self.made)

    def open(self, image: str) -> Path:
        return self.folder / image

    def fingerprint(self) -> dict:
        return {"drawn": len(self.made)}


def main(out: Path = OUT) -> None:
    shutil.rmtree(out, ignore_errors=True)
    images = out / "images"
    source = Records(Drawn(images))
    for to in ("jsonl", "csv", "tsv", "karpathy", "coco"):
        convert(source, to, str(out / "made"))
        shutil.rmtree(out / "made" / "images")  # one folder of pictures serves these five
        for file in (out / "made").iterdir():
            if file.name != "convert.json":
                file.rename(out / file.name)
        shutil.rmtree(out / "made")
    for to in ("folder", "shards", "huggingface"):
        try:
            convert(source, to, str(out / to), per_shard=6)
        except ValueError as error:
            print(f"{to} left out: {error}", file=sys.stderr)
            shutil.rmtree(out / to)
            continue
        (out / to / "convert.json").unlink()
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(json.dumps({"folder": str(out), "bytes": total}))


if __name__ == "__main__":
    main(*(Path(word) for word in sys.argv[1:2]))
