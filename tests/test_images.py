"""Opening pictures: every kind of the zoo comes out right, or is refused with its name and the reason."""

import io
import multiprocessing
import pickle
import resource
import time
import warnings

import numpy as np
import pytest
from image_zoo import BAD, BLUE, GOOD, GREEN, RED, WHITE, encoded, odd_files, quarters, real_bomb
from PIL import Image

from vlretrieval.data.images import BadImage, open_image


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    width, height = image.size
    spots = [(2, 2), (width - 3, 2), (2, height - 3), (width - 3, height - 3)]
    return [tuple(255 * (channel > 127) for channel in image.getpixel(spot)) for spot in spots]


@pytest.mark.parametrize("name", [*(f"exif_{i}" for i in range(1, 9)), "png_exif_6", "bmp", "avif"])
def test_every_picture_stands_upright(name):
    if name not in GOOD:
        pytest.skip(f"this Pillow has no {name}")
    image = open_image(GOOD[name])
    assert image.size == (48, 32)
    assert corners(image) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("name", GOOD, ids=str)
def test_every_good_picture_opens_as_rgb_from_bytes_file_and_path(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(GOOD[name])
    images = [open_image(GOOD[name]), open_image(path), open_image(str(path)), open_image(io.BytesIO(GOOD[name]))]
    assert {image.mode for image in images} == {"RGB"}
    assert len({image.tobytes() for image in images}) == 1


@pytest.mark.parametrize("background", [WHITE, (0, 0, 0), (12, 200, 7)])
@pytest.mark.parametrize("name", ["rgba", "la", "palette_transparency", "rgba_webp"])
def test_transparent_parts_show_the_background_and_not_the_hidden_colour(name, background):
    pixels = np.asarray(open_image(GOOD[name], background=background))
    assert (pixels[:, 4:] == background).all()
    assert (pixels[:, :4] == ((0, 0, 0) if name == "la" else RED)).all()


def test_a_colour_named_transparent_shows_the_background():
    assert (np.asarray(open_image(GOOD["rgb_transparency"], background=BLUE)) == BLUE).all()


def test_sixteen_bit_grey_is_scaled_and_not_clipped():
    pixels = np.asarray(open_image(GOOD["grey16"]))[..., 0].reshape(-1)
    expected = np.linspace(0, 255, 64)
    assert np.abs(pixels - expected).max() <= 1
    assert abs(int(np.asarray(open_image(GOOD["grey16_tiff"]))[0, 0, 0]) - 128) <= 1
    floats = np.asarray(open_image(GOOD["float_tiff"]))[..., 0].reshape(-1)
    assert np.abs(floats - expected).max() <= 1


@pytest.mark.parametrize("name", ["cmyk", "cmyk_tiff"])
def test_cmyk_red_is_red(name):
    red, green, blue = np.asarray(open_image(GOOD[name])).reshape(-1, 3).mean(0)
    assert red > 200 and green < 60 and blue < 60


@pytest.mark.parametrize("name", ["gif_animated", "webp_animated", "png_animated"])
def test_of_an_animation_the_first_frame_is_taken(name):
    assert (np.asarray(open_image(GOOD[name])) == RED).all()


@pytest.mark.parametrize("name", BAD, ids=str)
def test_a_bad_file_is_refused_by_name_at_once(name, tmp_path):
    path = tmp_path / f"{name}.jpg"
    path.write_bytes(BAD[name])
    started_s = time.perf_counter()
    with pytest.raises(BadImage) as caught:
        open_image(path)
    assert time.perf_counter() - started_s < 1
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(BadImage, match="my name"):
        open_image(BAD[name], name="my name")


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    found = odd_files(tmp_path)
    for name, path in found.items():
        with pytest.raises(BadImage) as caught:
            open_image(path)
        assert caught.value.reason, name
    assert len(found) == 8


def test_heic_without_its_plugin_says_what_to_install():
    pytest.importorskip("PIL")
    try:
        import pillow_heif  # noqa: F401
    except ImportError:
        with pytest.raises(BadImage, match="pillow-heif"):
            open_image(BAD["heic"])


def _rise(path, told) -> None:
    open_image(GOOD["tiny"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        open_image(path)
        told.send(("opened", 0))
    except BadImage as bad:
        told.send((bad.reason, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


@pytest.mark.parametrize("size", [(10_000, 10_000), (19_000, 10_000), (20_000, 20_000)])
def test_a_bomb_is_refused_by_its_header(size, tmp_path):
    # In a process of its own: the peak of memory is one for the whole life of a process.
    (tmp_path / "bomb.png").write_bytes(real_bomb(*size))
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_rise, args=(tmp_path / "bomb.png", there))
    child.start()
    there.close()  # so that a child that dies ends the wait
    reason, rise_mb = here.recv()
    child.join()
    assert "max_pixels" in reason
    assert rise_mb < 100


def test_the_pixel_limit_is_the_callers_and_warnings_made_errors_change_nothing():
    data = encoded(Image.new("RGB", (100, 100)), "PNG")
    assert open_image(data, max_pixels=10_000).size == (100, 100)
    with pytest.raises(BadImage, match="100 x 100 pixels are more than max_pixels=9999"):
        open_image(data, max_pixels=9_999)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadImage, match="max_pixels"):
            open_image(real_bomb(10_000, 10_000))


def test_a_jpeg_may_be_decoded_at_reduced_scale_but_never_below_the_size_asked_for():
    data = encoded(quarters(640, 480), "JPEG")
    sizes = {wanted: open_image(data, at_least=wanted).size for wanted in (60, 61, 120, 121, 240, 241, 480, 1000)}
    assert sizes == {
        60: (80, 60), 61: (160, 120), 120: (160, 120), 121: (320, 240), 240: (320, 240), 241: (640, 480),
        480: (640, 480), 1000: (640, 480),
    }  # fmt: skip
    assert corners(open_image(data, at_least=60)) == [RED, GREEN, BLUE, WHITE]


def test_broken_exif_does_not_lose_a_good_picture():
    data = encoded(quarters(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff\x00\x00")
    assert open_image(data).size == (48, 32)


def test_a_bad_image_crosses_processes_with_its_name_and_reason():
    bad = pickle.loads(pickle.dumps(BadImage("a.jpg", "broken")))
    assert (bad.name, bad.reason, str(bad)) == ("a.jpg", "broken", "a.jpg: broken")
