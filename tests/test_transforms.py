"""Transforms: the same as torchvision's, every draw from the key, no mirror image for a caption that names a side."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_zoo import encoded
from PIL import Image
from tiny_data import tiny_split
from torchvision.transforms import v2

from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.data.datasets import Step, TrainPairs
from vlretrieval.data.images import open_image
from vlretrieval.data.pictures import FilePictures, MemoryPictures, decode_all
from vlretrieval.data.sides import names_a_side
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.data.transforms import CropTransform, EvalTransform, TrainTransform, to_tensor


def photo(width=90, height=61, seed=0) -> Image.Image:
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return Image.fromarray(np.clip(np.asarray(smooth) + rng.normal(0, 8, (height, width, 3)), 0, 255).astype(np.uint8))


def usual(mode: str, size: int):
    """What most people write, up to the floats: Pillow pictures through torchvision's v2."""
    cubic = v2.InterpolationMode.BICUBIC
    if mode == "squash":
        return v2.Compose([v2.Resize((size, size), cubic, antialias=True), v2.PILToTensor()])
    return v2.Compose([v2.Resize(size, cubic, antialias=True), v2.CenterCrop(size), v2.PILToTensor()])


@pytest.mark.parametrize("mode", ["squash", "crop"])
@pytest.mark.parametrize("shape", [(90, 61), (61, 90), (64, 64), (33, 200), (20, 24)])
@pytest.mark.parametrize("size", [16, 32, 40])
def test_evaluation_resizes_as_torchvision_does_to_the_last_bit_of_a_byte(mode, shape, size):
    image = photo(*shape)
    ours, theirs = EvalTransform(size, mode)(image), usual(mode, size)(image)
    assert ours.dtype == torch.uint8 and ours.shape == (3, size, size) and ours.is_contiguous()
    difference = (ours.int() - theirs.int()).abs()
    assert difference.max() <= 2 and difference.float().mean() < 0.4, (difference.max(), difference.float().mean())


def test_padding_keeps_the_whole_picture_and_fills_the_rest():
    result = EvalTransform(32, "pad", fill=(1, 2, 3))(photo(64, 32))
    assert (result[:, :8] == torch.tensor([1, 2, 3])[:, None, None]).all() and (
        result[:, 24:, 0].T == torch.tensor([1, 2, 3])
    ).all()
    assert (
        EvalTransform(16, "squash")(photo(64, 32))[:, ::2].float().mean() - result[:, 8:24].float().mean()
    ).abs() < 3


@pytest.mark.parametrize("shape", [(1, 1), (1, 2000), (2000, 1), (3, 5)])
@pytest.mark.parametrize("mode", ["squash", "crop", "pad"])
def test_tiny_and_extreme_pictures_come_through(shape, mode):
    assert EvalTransform(16, mode)(photo(*shape)).shape == (3, 16, 16)
    assert TrainTransform(16)(to_tensor(photo(*shape)), key=5).shape == (3, 16, 16)


def test_a_training_picture_follows_from_its_key_alone():
    transform = TrainTransform(24, scale=(0.3, 0.9), flip=0.5, colour=0.3, grey=0.2, randaugment_ops=2)
    pixels = to_tensor(photo())
    torch.manual_seed(1)
    first = [transform(pixels, key) for key in range(20)]
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert all(torch.equal(transform(pixels, key), before) for key, before in enumerate(first))
    assert len({picture.numpy().tobytes() for picture in first}) == 20
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left as it was"


@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    key=st.integers(0, 2**64 - 1),
    low=st.floats(0.05, 1),
    high=st.floats(0.05, 1),
)
def test_a_crop_lies_within_the_picture_and_keeps_the_area_asked_for(width, height, key, low, high):
    low, high = sorted((low, high))
    top, left, cut_h, cut_w = TrainTransform(16, scale=(low, high)).crop(height, width, key)
    assert 0 <= top <= top + cut_h <= height and 0 <= left <= left + cut_w <= width and cut_h and cut_w
    if min(width, height) > 150 and max(width, height) < 1.2 * min(width, height) and high < 0.7:
        assert low * 0.95 <= cut_h * cut_w / (width * height) <= high * 1.05


def test_crops_are_drawn_as_torchvisions_are():
    transform = TrainTransform(16, scale=(0.2, 0.9))
    ours = np.array([transform.crop(100, 140, key) for key in range(4000)], dtype=float)
    torch.manual_seed(0)
    theirs = v2.RandomResizedCrop(16, scale=(0.2, 0.9))
    image = torch.zeros(3, 100, 140)
    drawn = (theirs.make_params([image]) for _ in range(4000))
    expected = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in drawn], dtype=float)
    assert np.abs(ours.mean(0) - expected.mean(0)).max() < 1
    assert np.abs(ours.std(0) - expected.std(0)).max() < 1


def test_scaled_decoding_cuts_the_same_place_and_never_enlarges():
    transform = TrainTransform(32, scale=(0.4, 0.9))
    data, reduced = encoded(photo(640, 480), "JPEG", quality=95), 0
    for key in range(12):
        small = open_image(data, at_least=lambda w, h, key=key: transform.shorter_side_needed(w, h, key))
        _, _, cut_h, cut_w = transform.crop(small.size[1], small.size[0], key)
        assert min(cut_h, cut_w) >= 31
        reduced += small.size != (640, 480)
        there = np.array(transform.crop(480, 640, key)) / (480, 640, 480, 640)
        here = np.array(transform.crop(small.size[1], small.size[0], key)) / (small.size[::-1] * 2)
        assert np.abs(there - here).max() <= 1.5 / min(small.size)
    assert reduced == 12


def test_turned_pictures_are_asked_by_their_upright_size():
    exif = Image.Exif()
    exif[0x0112] = 6
    asked = []
    open_image(encoded(photo(64, 32), "JPEG", exif=exif), at_least=lambda w, h: asked.append((w, h)) or 8)
    assert asked == [(32, 64)]


def test_a_plain_crop_is_a_part_of_the_picture_and_every_part_comes_up():
    pixels = torch.arange(3 * 6 * 7, dtype=torch.uint8).reshape(3, 6, 7)
    crop, seen = CropTransform(4), set()
    for key in range(400):
        cut = crop(pixels, key)
        top, left = divmod(int(cut[0, 0, 0]), 7)
        assert torch.equal(cut, pixels[:, top : top + 4, left : left + 4])
        seen.add((top, left))
    assert seen == {(top, left) for top in range(3) for left in range(4)}
    assert torch.equal(CropTransform(4, flip=1.0)(pixels, 5), crop(pixels, 5).flip(-1))
    assert torch.equal(CropTransform(4, flip=1.0)(pixels, 5, may_flip=False), crop(pixels, 5))
    with pytest.raises(ValueError, match="a picture of 7 x 6 is too small to cut 8 x 8"):
        CropTransform(8)(pixels, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a red circle left of a blue square", True),
        ("A dog on the RIGHT.", True),
        ("狗在猫的左边", True),
        ("右边有一只猫", True),
        ("a bright light", False),
        ("leftovers and copyright", False),
        ("一只狗", False),
    ],
)
def test_captions_that_name_a_side_are_found(text, expected):
    assert names_a_side([text]).tolist() == [expected]


def sided_split() -> Split:
    captions = ["a dog on the left", "a dog", "a cat to the right", "a cat"]
    return Split("train", ["a", "b", "c", "d"], captions, np.arange(4), lambda index: photo(32, 32, index))


@pytest.mark.parametrize("kept_in_memory", [True, False])
def test_a_picture_is_not_mirrored_for_a_caption_that_names_a_side(kept_in_memory):
    split, transform = sided_split(), TrainTransform(32, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=1.0)
    plain = EvalTransform(32)
    pictures = (
        MemoryPictures(decode_all(split, plain, 32), transform)
        if kept_in_memory
        else FilePictures(split, plain, transform)
    )
    tokenizer = BpeTokenizer().fit(split.captions)
    for keep_sides, mirrored in ((True, [False, True, False, True]), (False, [True] * 4)):
        batch = TrainPairs(split, tokenizer, pictures, keep_sides=keep_sides)[Step(0, np.arange(4))]
        for row, mirror in enumerate(mirrored):
            expected = plain(split.picture(row))
            assert torch.equal(batch.pixels[row], expected.flip(-1) if mirror else expected)


class Given:
    def __init__(self, split):
        self.given = split

    def split(self, name):
        return self.given

    def fingerprint(self):
        return {}


def test_mirroring_captions_that_name_a_side_warns(caplog):
    data = RetrievalData(
        Given(sided_split()), BpeTokenizer(), 24, 4, augment=TrainTransform(24, flip=0.5), keep_sides=False
    )
    data.setup("fit")
    assert "2 captions (50.00 %) say left or right, and flip=0.5 makes them false" in caplog.text
    caplog.clear()
    data = RetrievalData(Given(sided_split()), BpeTokenizer(), 24, 4, augment=TrainTransform(24, flip=0.5))
    data.setup("fit")
    assert "false" not in caplog.text
    assert data.pairs.pictures.pixels.shape == (4, 3, 27, 27)  # an eighth more, for the crop
    assert next(iter(data.train_dataloader())).pixels.shape == (4, 3, 24, 24)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvalTransform(16, "stretch"), "resize='stretch' is not known; choose squash, crop or pad"),
        (lambda: EvalTransform(0), "image_size=0 must be at least 1"),
        (lambda: TrainTransform(16, scale=(0.0, 1.0)), "scale=.* must be two shares of the area"),
        (lambda: TrainTransform(16, ratio=(2.0, 1.0)), "ratio=.* must be 0 < smallest <= largest"),
        (lambda: TrainTransform(16, flip=1.5), "flip=1.5 must be from 0 to 1"),
        (
            lambda: RetrievalData(Given(tiny_split()), BpeTokenizer(), 16, 4, augment=TrainTransform(24)),
            "augment makes pictures of 24, but image_size=16",
        ),
        (
            lambda: RetrievalData(Given(tiny_split()), BpeTokenizer(), 16, 4, stored_size=20),
            "has no effect without augment",
        ),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message):
        make()
