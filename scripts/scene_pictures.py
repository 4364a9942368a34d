"""Write pictures of the test split a checkpoint belongs to, and one caption of each, for something to search in.

``python scripts/scene_pictures.py CHECKPOINT FOLDER COUNT`` makes FOLDER/0000.png, ... and FOLDER/captions.txt.
"""

import sys
from pathlib import Path

from vlretrieval.evaluation.subject import open_subject


def main(checkpoint: str, folder: str, count: str) -> None:
    """The first ``count`` pictures; line i of captions.txt belongs to picture i."""
    split = open_subject(checkpoint).source().split("test")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    captions = []
    for index in range(min(int(count), len(split.image_ids))):
        split.picture(index).save(target / f"{index:04}.png")
        captions.append(split.captions[int(split.captions_of_image[index])])
    (target / "captions.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    print(f"{len(captions)} pictures of the test split in {target}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit("usage: python scripts/scene_pictures.py CHECKPOINT FOLDER COUNT")
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
