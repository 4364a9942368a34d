"""The training loader: order, draws, resume, ranks and workers. All of it follows from (seed, epoch, step) alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_data import picture, tiny_records, tiny_split

from vlretrieval.data.datamodule import RetrievalData
from vlretrieval.data.datasets import Batch, Step, TrainPairs
from vlretrieval.data.images import BadImage, open_image
from vlretrieval.data.loader import TrainLoader, ignore_stop_signals
from vlretrieval.data.ordering import EpochOrder, keyed_draw
from vlretrieval.data.pictures import FilePictures, MemoryPictures, decode_all
from vlretrieval.data.tokenizers import BpeTokenizer
from vlretrieval.data.transforms import EvalTransform, TrainTransform
from vlretrieval.data.worker_faults import WorkerLost

TOKENIZER = BpeTokenizer(300, 32).fit(tiny_split().captions)


def make_pairs(images=12, negatives=2, **settings) -> TrainPairs:
    split = tiny_split(images, negatives=negatives)
    pictures = FilePictures(split, EvalTransform(8), TrainTransform(8, flip=0.5))
    settings = {"negatives_per_caption": negatives and 3, **settings}
    return TrainPairs(split, TOKENIZER, pictures, **settings)


def make_loader(batch_size=4, rank=0, world_size=1, seed=0, num_workers=0, **settings) -> TrainLoader:
    pairs = make_pairs(seed=seed, **settings)
    return TrainLoader(pairs, EpochOrder(len(pairs), batch_size, seed, rank, world_size), num_workers=num_workers)


def content(batch: Batch) -> list:
    values = (getattr(batch, name) for name in Batch.__dataclass_fields__)
    return [value.tolist() for value in values if value is not None]


def contents(loader: TrainLoader, epochs: int = 1) -> list:
    return [content(batch) for _ in range(epochs) for batch in loader]


def test_a_batch_holds_what_it_says():
    batch = next(iter(make_loader()))
    split = tiny_split(negatives=2)
    assert batch.pixels.shape == (4, 3, 8, 8) and batch.pixels.dtype == torch.uint8
    assert batch.image_ids.tolist() == split.caption_image[batch.index].tolist()
    for row, caption in enumerate(batch.index.tolist()):
        ids = batch.token_ids[row][batch.token_mask[row]].tolist()
        assert ids == TOKENIZER([split.captions[caption]])[0]
        own = {
            tuple(TOKENIZER([t])[0])
            for t, c in zip(split.negatives.texts, split.negatives.caption, strict=True)
            if c == caption
        }
        drawn = [
            tuple(ids[mask].tolist())
            for ids, mask in zip(batch.negative_token_ids[row], batch.negative_token_mask[row], strict=True)
        ]
        assert set(drawn) - {()} == own and drawn.count(()) == 3 - len(own)
    assert batch.token_ids.shape[1] % 4 == 0 and batch.token_mask.any(0)[:-4].all()


@pytest.mark.parametrize(("mode", "samples"), [("one", 12), ("first", 12), ("all", 60)])
def test_an_epoch_gives_every_sample_once(mode, samples):
    loader = make_loader(captions_per_image=mode)
    for _ in range(2):
        batches = list(loader)
        images = torch.cat([batch.image_ids for batch in batches]).tolist()
        captions = torch.cat([batch.index for batch in batches]).tolist()
        assert len(set(captions)) == len(captions) == samples
        assert sorted(images) == sorted(list(range(12)) * (samples // 12))
        if mode == "first":
            assert sorted(captions) == list(range(0, 60, 5))


def test_one_caption_is_drawn_anew_each_epoch_and_all_come_up():
    loader = make_loader()
    seen = [set(torch.cat([batch.index for batch in loader]).tolist()) for _ in range(30)]
    assert seen[0] != seen[1]
    assert set().union(*seen) == set(range(60))


def test_epochs_differ_and_seeds_differ_and_equal_seeds_are_equal():
    first, second = contents(make_loader(), 2)[:3], contents(make_loader(), 2)[3:]
    assert first != second
    assert contents(make_loader(seed=1)) != first
    assert contents(make_loader()) == first


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_batches(num_workers):
    assert contents(make_loader(num_workers=num_workers), 2) == contents(make_loader(), 2)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_a_resumed_loader_goes_on_with_the_very_next_batch(stop, num_workers):
    whole = contents(make_loader(), 3)
    loader, seen = make_loader(), []
    while len(seen) < stop:
        for batch in loader:
            seen.append(content(batch))
            if len(seen) == stop:
                break
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make_loader(num_workers=num_workers)
    resumed.load_state_dict(state)
    iter(resumed)  # Lightning calls it early; nothing may be lost by it
    rest = []
    while len(seen) + len(rest) < len(whole):
        rest += contents(resumed)
    assert seen + rest == whole


def test_the_state_counts_what_was_handed_out_and_not_what_workers_made_ahead():
    loader = make_loader(num_workers=2)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["handed_out"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 .* is 1 now"),
        ({"batch_size": 3}, "batch_size was 4 .* is 3 now"),
        ({"images": 13}, "samples was 12 .* 13"),
    ],
)
def test_a_position_means_nothing_for_other_data_and_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_loader(**change).load_state_dict(make_loader().state_dict())


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_each_global_batch_and_lose_and_double_nothing(world_size):
    whole = [batch.index.tolist() for batch in make_loader()]
    shares = [[batch.index.tolist() for batch in make_loader(rank=r, world_size=world_size)] for r in range(world_size)]
    assert [sum(parts, []) for parts in zip(*shares, strict=True)] == whole


def test_another_number_of_ranks_can_go_on_in_the_middle():
    whole = [batch.index.tolist() for batch in make_loader()]
    one = make_loader()
    next(iter(one))
    rest = []
    for rank in range(2):
        loader = make_loader(rank=rank, world_size=2)
        loader.load_state_dict(one.state_dict())
        rest.append([batch.index.tolist() for batch in loader])
    assert [sum(parts, []) for parts in zip(*rest, strict=True)] == whole[1:]


def test_an_epoch_cut_short_from_outside_is_followed_by_the_next():
    whole = contents(make_loader(), 2)
    loader = make_loader()
    next(iter(loader))
    assert contents(loader) == whole[3:]
    resumed = make_loader()
    cut = make_loader()
    next(iter(cut))
    resumed.load_state_dict(cut.state_dict())
    resumed.sampler.set_epoch(1)
    assert contents(resumed) == whole[3:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 13}, "batch_size=13 is more than the 12 samples of an epoch; use 12 or less"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 5, "world_size": 2}, "does not divide by 2; use 4"),
        ({"captions_per_image": "two"}, "captions_per_image='two' is not known"),
        ({"negatives": 0, "negatives_per_caption": 2}, "brings no hard negatives; set it to 0"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_loader(**settings)
    assert "\n" not in str(caught.value)


def test_images_without_captions_and_unusable_images_take_no_part():
    split = tiny_split(6, 2)
    keep = np.repeat([True, True, False, True, True, True], 2)  # image 2 loses its captions
    split = type(split)(
        "train",
        split.image_ids,
        [c for c, k in zip(split.captions, keep, strict=True) if k],
        split.caption_image[keep],
        picture,
    )
    usable = np.array([True, False, True, True, True, True])
    pairs = TrainPairs(split, TOKENIZER, FilePictures(split, EvalTransform(8)), usable=usable)
    assert sorted(split.caption_image[pairs.captions_of(Step(0, np.arange(len(pairs))))]) == [0, 3, 4, 5]


def test_memory_and_files_give_the_same_pixels():
    split = tiny_split()
    transform = EvalTransform(8)
    files, memory = FilePictures(split, transform), MemoryPictures(decode_all(split, transform, 8))
    images, keys = np.array([3, 3, 0, 11]), np.array([1, 2, 3, 2**63], dtype=np.uint64)
    assert torch.equal(files(images, keys, keys > 0), memory(images, keys, keys > 0))


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=4))
def test_a_keyed_draw_depends_on_every_part_and_on_their_order(parts):
    drawn = int(keyed_draw(*parts))
    assert drawn == int(keyed_draw(*parts))
    for place in range(len(parts)):
        changed = [part + (i == place) for i, part in enumerate(parts)]
        assert int(keyed_draw(*changed)) != drawn


def test_keyed_draws_are_even():
    draws = keyed_draw(0, 1, np.arange(60_000)) % np.uint64(6)
    counts = np.bincount(draws.astype(np.int64), minlength=6)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 20.5  # chi square, 5 degrees of freedom, 0.1 %


@settings(max_examples=30)
@given(size=st.integers(1, 50), batch=st.integers(1, 50), epoch=st.integers(0, 3))
def test_the_steps_of_an_epoch_are_distinct_samples(size, batch, epoch):
    if batch > size:
        return
    order = EpochOrder(size, batch, seed=5)
    seen = np.concatenate([order.batch(epoch, step) for step in range(len(order))])
    assert len(set(seen.tolist())) == len(seen) == size // batch * batch


def test_workers_leave_stop_signals_to_the_main_process():
    pid = os.fork()
    if pid == 0:
        ignore_stop_signals(0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_the_datamodule_fits_the_tokenizer_on_train_captions_alone(tmp_path):
    source = tiny_records(tmp_path)
    asked = []
    split = source.split
    source.split = lambda name: (asked.append(name), split(name))[1]
    data = RetrievalData(source, BpeTokenizer(300, 32), image_size=16, batch_size=4)
    data.setup("fit")
    assert set(asked) == {"train"}
    assert data.tokenizer.to_dict() == BpeTokenizer(300, 32).fit(split("train").captions).to_dict()
    assert next(iter(data.train_dataloader())).pixels.shape == (4, 3, 16, 16)


def test_a_fitted_tokenizer_is_not_fitted_again(tmp_path):
    tokenizer = BpeTokenizer(300, 32).fit(["other words"])
    before = tokenizer.to_dict()
    RetrievalData(tiny_records(tmp_path), tokenizer, 16, 4).setup("fit")
    assert tokenizer.to_dict() == before


def test_too_large_for_memory_is_said_and_gives_the_same_batches(tmp_path, caplog):
    source = tiny_records(tmp_path)
    kept = RetrievalData(source, TOKENIZER, 16, 4)
    not_kept = RetrievalData(source, TOKENIZER, 16, 4, cache_limit_bytes=100)
    one, other = next(iter(kept.train_dataloader())), next(iter(not_kept.train_dataloader()))
    assert torch.equal(one.pixels, other.pixels)
    assert "cache_limit_bytes=100" in caplog.text


def test_a_setting_repeated_for_the_command_line_must_be_one_of_the_source(tmp_path):
    source = tiny_records(tmp_path)
    file = source.reader.json
    assert RetrievalData(source, TOKENIZER, 16, 4, json=file, restval="train").source is source
    with pytest.raises(ValueError, match="data.jsn='x' has no effect: Records has no such setting"):
        RetrievalData(source, TOKENIZER, 16, 4, jsn="x")
    with pytest.raises(ValueError, match="data.json='x', but the source was given"):
        RetrievalData(source, TOKENIZER, 16, 4, json="x")


def break_pictures(source, count: int) -> list[str]:
    split = source.split("train")
    broken = [split.image_ids[i] for i in range(count)]
    for image_id in broken:
        (source.reader.open(image_id)).write_bytes(b"not a picture")
    return broken


@pytest.mark.parametrize("cache_in_memory", [True, False])
def test_a_bad_picture_stops_training_by_name(tmp_path, cache_in_memory):
    source = tiny_records(tmp_path)
    (name,) = break_pictures(source, 1)
    data = RetrievalData(source, TOKENIZER, 16, 12, cache_in_memory=cache_in_memory)
    with pytest.raises(ValueError, match=f"{name}: not an image"):
        list(data.train_dataloader())


@pytest.mark.parametrize("cache_in_memory", [True, False])
def test_skipped_pictures_are_listed_counted_and_never_replaced(tmp_path, caplog, cache_in_memory):
    source = tiny_records(tmp_path)
    broken = break_pictures(source, 2)
    listed = tmp_path / "run" / "bad_samples.jsonl"
    settings = {"on_bad_image": "skip", "bad_samples_file": str(listed), "cache_in_memory": cache_in_memory}
    data = RetrievalData(source, TOKENIZER, 16, 10, max_bad_share=0.2, **settings)
    batch = next(iter(data.train_dataloader()))
    assert sorted(batch.image_ids.tolist()) == list(range(2, 12))
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [line["image_id"] for line in lines] == broken and all("not an image" in line["reason"] for line in lines)
    assert "2 of 12 pictures (16.67 %) cannot be used: 2 x not an image" in caplog.text
    with pytest.raises(ValueError, match="more than max_bad_share=0.1"):
        RetrievalData(source, TOKENIZER, 16, 10, max_bad_share=0.1, **settings).setup("fit")


def test_evaluation_never_skips(tmp_path):
    source = tiny_records(tmp_path)
    split = source.split("test")
    source.reader.open(split.image_ids[0]).write_bytes(b"")
    data = RetrievalData(source, TOKENIZER, 16, 4, on_bad_image="skip", bad_samples_file=str(tmp_path / "bad.jsonl"))
    with pytest.raises(ValueError, match="empty, 0 bytes"):
        data.split("test").picture(0)


class Failing:
    """Pictures that end each worker at its second batch."""

    def __init__(self, end):
        self.end, self.asked = end, 0

    def __call__(self, images, keys, may_flip):
        self.asked += 1
        if self.asked == 2:
            self.end()
        return torch.zeros(len(images), 3, 8, 8, dtype=torch.uint8)


def no_room():
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"loader worker [01] \(process \d+\) was killed by SIGKILL, "
         r"most likely by the system for want of memory; make data.num_workers \(now 2\) .*batch \d of epoch 0"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), r"killed by SIGBUS, .*/dev/shm.*--shm-size=8g"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV, .*data.num_workers=0 shows where"),
        (lambda: os._exit(3), "left with exit code 3"),
        (no_room, r"batches do not fit into shared memory \(/dev/shm\): .*No space left.*--shm-size=8g.*\(now 2\)"),
    ],
    ids=["killed", "bus error", "segmentation fault", "left", "no room"],
)  # fmt: skip
def test_a_lost_worker_is_told_in_one_line_with_the_way_out(end, message):
    pairs = TrainPairs(tiny_split(), TOKENIZER, Failing(end))
    loader = TrainLoader(pairs, EpochOrder(12, 2, 0), num_workers=2)
    with pytest.raises(WorkerLost, match=message) as caught:
        list(loader)
    assert "\n" not in str(caught.value)


def test_a_worker_that_ends_while_a_step_is_computed_is_told_too():
    """torch raises where the main process is at that moment, which is seldom in the loader."""
    pairs = TrainPairs(tiny_split(), TOKENIZER, FilePictures(tiny_split(), EvalTransform(8)))
    loader = TrainLoader(pairs, EpochOrder(12, 2, 0), num_workers=1)
    batches = iter(loader)
    next(batches)
    assert loader.lost_worker(RuntimeError("another")) is None
    with pytest.raises(RuntimeError, match="killed by signal") as raised:
        os.kill(loader._running._workers[0].pid, signal.SIGKILL)
        for _ in range(200):  # a step
            time.sleep(0.05)
    assert "killed by SIGKILL" in str(loader.lost_worker(raised.value))


def test_an_error_of_a_picture_stays_what_it_was():
    pairs = TrainPairs(tiny_split(), TOKENIZER, Failing(lambda: open_image(b"")))
    with pytest.raises(BadImage, match="empty, 0 bytes"):
        list(TrainLoader(pairs, EpochOrder(12, 2, 0), num_workers=2))


SMALL_SHARED_MEMORY = """
import numpy as np, torch
from vlretrieval.data.datasets import TrainPairs
from vlretrieval.data.loader import TrainLoader
from vlretrieval.data.ordering import EpochOrder
from vlretrieval.data.splits import Split
from vlretrieval.data.tokenizers import BpeTokenizer
split = Split("train", list("abcd"), list("abcd"), np.arange(4), None)
pictures = lambda images, keys, flip: torch.zeros(len(images), 3, 900, 900, dtype=torch.uint8)
pairs = TrainPairs(split, BpeTokenizer(300, 8).fit(["a"]), pictures)
try:
    list(TrainLoader(pairs, EpochOrder(4, 2, 0), num_workers=1))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_full_shared_memory_ends_the_run_and_does_not_hang_it():
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "bash", "-c", mount]).returncode:
        pytest.skip("needs the right to mount a small /dev/shm of its own")
    program = f"{mount} && exec {sys.executable} -c '{SMALL_SHARED_MEMORY}'"
    done = subprocess.run(["unshare", "-rm", "bash", "-c", program], capture_output=True, text=True, timeout=300)
    assert "batches do not fit into shared memory (/dev/shm)" in done.stdout and "--shm-size" in done.stdout
