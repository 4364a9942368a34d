"""Readers: the same records in every format, and for every fault one line that says where."""

import json
import logging

import pytest
from image_zoo import encoded
from tiny_data import picture, write_karpathy

from vlretrieval.data.convert import FORMATS, convert
from vlretrieval.data.images import BadImage
from vlretrieval.data.readers.coco import CocoCaptions
from vlretrieval.data.readers.folder import Folder
from vlretrieval.data.readers.huggingface import HuggingFaceDataset
from vlretrieval.data.readers.jsonl import JsonLines
from vlretrieval.data.readers.karpathy import KarpathyJson
from vlretrieval.data.readers.shards import TarShards
from vlretrieval.data.readers.table import Table
from vlretrieval.data.records import HardNegative, Record, Records, Region, merged

HARD_CAPTIONS = [
    "a dog, brown; with \"quotes\" and 'more'",
    "NA",
    "null",
    "nan",
    "一只狗在雪地里奔跑。",
    "a dog 🐶",
    "كلب يركض",
    "e\u0301te\u0301",
    "tab\there",
    "  blanks around  ",
]


def ten_records(rich: bool = False) -> list[Record]:
    """Ten records whose captions have broken a reader; with ``rich``, all that a record can hold."""
    made = []
    for number, hard in enumerate(HARD_CAPTIONS):
        split = ("train", "train", "train", "val", "test")[number % 5]
        name = f"{split}/{'sub/' if number % 2 else ''}picture {number:02d}.png"
        captions = (hard, f"picture {number}", *([""] if number == 3 else []))
        extra = {}
        if rich:
            extra = {
                "language": ("en", "zh")[number % 2],
                "regions": (Region("a dog", (0.0, 1.5, 20.0, 10.0)), Region("狗", (1.0, 2.0, 3.0, 4.0))),
                "negatives": tuple((HardNegative(f"not {caption}", "swap"),) * (number % 3) for caption in captions),
            }
        made.append(Record(name, captions, f"id-{number}" if rich else name, split, **extra))
    return sorted(made, key=lambda record: ("train", "val", "test").index(record.split))


class Given:
    """A reader of records that are there already."""

    def __init__(self, records, folder):
        self.given, self.folder = records, folder
        for number, record in enumerate(records):
            path = folder / record.image
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(number).save(path)

    def records(self):
        return iter(self.given)

    def open(self, image):
        return self.folder / image

    def fingerprint(self):
        return {"given": len(self.given)}


def reader_of(to: str, folder):
    """The reader for what ``convert`` wrote."""
    images = str(folder / "images")
    splits = [name for name in ("train", "val", "test")]
    return {
        "jsonl": lambda: JsonLines(str(folder / "data.jsonl"), images),
        "csv": lambda: Table(str(folder / "data.csv"), images),
        "tsv": lambda: Table(str(folder / "data.tsv"), images),
        "karpathy": lambda: KarpathyJson(str(folder / "data.json"), images),
        "coco": lambda: CocoCaptions({s: str(folder / f"captions_{s}.json") for s in splits}, images),
        "folder": lambda: Folder(str(folder)),
        "shards": lambda: TarShards({s: str(folder / f"{s}-*.tar") for s in splits}),
        "huggingface": lambda: HuggingFaceDataset(str(folder)),
    }[to]()


def as_read(records):
    """Records without the order in which a format keeps its splits."""
    return {record.image_id: record for record in merged(records)}


@pytest.mark.parametrize("to", FORMATS)
def test_the_same_ten_records_read_back_equal_from_every_format(to, tmp_path):
    if to == "huggingface":
        pytest.importorskip("datasets")
    source = Records(Given(ten_records(), tmp_path / "source"))
    done = convert(source, to, str(tmp_path / "out"), per_shard=2)
    assert (done.records, done.lost) == (10, {})
    reader = reader_of(to, tmp_path / "out")
    assert as_read(reader.records()) == as_read(ten_records())
    again = Records(reader)
    for name in ("train", "val", "test"):
        before, after = source.split(name), again.split(name)
        assert set(after.captions) == set(before.captions)
        for place, image_id in enumerate(after.image_ids):
            same = before.picture(list(before.image_ids).index(image_id))
            assert after.picture(place).tobytes() == same.tobytes()
    if to != "folder":  # a folder is read in the order of its paths
        assert [again.split(name).hash for name in ("train", "val", "test")] == [
            source.split(name).hash for name in ("train", "val", "test")
        ]


@pytest.mark.parametrize("to", ["jsonl", "karpathy", "coco", "shards", "huggingface"])
def test_formats_that_can_hold_everything_do(to, tmp_path):
    if to == "huggingface":
        pytest.importorskip("datasets")
    records = ten_records(rich=True)
    done = convert(Records(Given(records, tmp_path / "source")), to, str(tmp_path / "out"))
    assert done.lost == {}
    assert as_read(reader_of(to, tmp_path / "out").records()) == as_read(records)


def test_what_a_format_cannot_hold_is_counted_and_said(tmp_path, caplog):
    records = ten_records(rich=True)
    done = convert(Records(Given(records, tmp_path / "source")), "csv", str(tmp_path / "out"))
    assert done.lost == {"regions": 10, "hard negatives": 10}
    assert "csv cannot hold regions: lost in 10 records" in caplog.text


def test_a_chain_of_conversions_comes_back_to_where_it_began(tmp_path):
    source = Records(Given(ten_records(), tmp_path / "source"))
    for number, to in enumerate(["shards", "csv", "folder", "coco", "jsonl", "karpathy"]):
        convert(source, to, str(tmp_path / str(number)), per_shard=3)
        source = Records(reader_of(to, tmp_path / str(number)))
    assert as_read(source.reader.records()) == as_read(ten_records())


@pytest.mark.parametrize("to", ["jsonl", "shards"])
def test_a_stopped_conversion_goes_on_and_ends_the_same(to, tmp_path):
    source = Records(Given(ten_records(), tmp_path / "source"))

    def stops(records, total):
        for number, record in enumerate(records):
            if number == 5:
                raise KeyboardInterrupt
            yield record

    out, whole = tmp_path / "out", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        convert(source, to, str(out), per_shard=2, progress=stops)
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".tar", ".png")}
    assert kept and not list(out.glob("data.jsonl"))
    convert(source, to, str(out), per_shard=2)
    convert(source, to, str(whole), per_shard=2)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    written = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert {
        path.relative_to(out): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and ".part" not in path.name
    } == written


def test_a_folder_that_holds_something_else_is_not_written_into(tmp_path):
    source = Records(Given(ten_records(), tmp_path / "source"))
    convert(source, "csv", str(tmp_path / "out"))
    with pytest.raises(ValueError, match="holds another conversion"):
        convert(source, "jsonl", str(tmp_path / "out"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty; give another folder"):
        convert(source, "jsonl", str(tmp_path / "mine"))
    with pytest.raises(ValueError, match="to='xml' is not a known format; choose jsonl, csv"):
        convert(source, "xml", str(tmp_path / "new"))


def test_a_hugging_face_set_with_a_row_a_caption_and_equal_file_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    first, other = encoded(picture(1), "PNG"), encoded(picture(2), "PNG")
    rows = {
        "image": [{"bytes": data, "path": "a.png"} for data in (first, first, other)],
        "text": ["one", "two", "three"],
    }
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image(decode=False)).save_to_disk(
        str(tmp_path / "d")
    )
    split = Records(HuggingFaceDataset(str(tmp_path / "d"))).split("train")
    assert split.caption_image.tolist() == [0, 0, 1] and list(split.captions) == ["one", "two", "three"]
    assert [split.picture(i).getpixel((0, 0))[0] for i in range(2)] == [1, 2]
    with pytest.raises(ValueError, match="no column 'title'; there are image, text; set data.caption_column"):
        list(HuggingFaceDataset(str(tmp_path / "d"), caption_column="title").records())
    with pytest.raises(ValueError, match="has no split 'test'; it has train"):
        list(HuggingFaceDataset(str(tmp_path / "d"), splits={"test": "test"}).records())


# ----- tables


def table(tmp_path, text, name="data.csv", **settings):
    (tmp_path / "a.jpg").write_bytes(b"x")
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(Table(str(path), **settings).records())


@pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
def test_the_separator_is_told_from_the_first_line(separator, tmp_path, caplog):
    text = f"filepath{separator}title\na.jpg{separator}a dog\n"
    with caplog.at_level(logging.INFO, logger="vlretrieval"):
        (record,) = table(tmp_path, text)
    assert (record.image, record.captions, record.split) == ("a.jpg", ("a dog",), "train")
    assert "image_column=filepath caption_column=title" in caplog.text and "set data.separator" in caplog.text


def test_words_that_other_readers_take_for_nothing_stay_words(tmp_path):
    words = ["NA", "null", "nan", "None", "N/A", "", "0", "True", "1e3"]
    records = table(tmp_path, "image,caption\n" + "".join(f"a.jpg,{word}\n" for word in words))
    assert [record.captions[0] for record in records] == words


def test_rows_of_one_picture_become_one_image(tmp_path):
    table(tmp_path, "image,caption,split\na.jpg,one,test\nb.jpg,two,test\na.jpg,three,test\n")
    split = Records(Table(str(tmp_path / "data.csv"))).split("test")
    assert list(split.image_ids) == ["a.jpg", "b.jpg"] and list(split.captions) == ["one", "three", "two"]


def test_a_table_without_header_has_numbered_columns(tmp_path):
    records = table(tmp_path, "a.jpg,a dog\nb.jpg,a cat\n", header=False)
    assert [record.captions for record in records] == [("a dog",), ("a cat",)]
    (record,) = table(tmp_path, "7,a dog,a.jpg\n", header=False, image_column="2", id_column="0")
    assert (record.image, record.image_id) == ("a.jpg", "7")


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("a,b\n1,2\n", {}, r"cannot tell which of a, b is the image; set data.image_column"),
        ("image,b\n1,2\n", {}, r"cannot tell which of image, b is the caption; set data.caption_column"),
        ("image,caption\n1,2\n", {"image_column": "file"}, r"no column 'file'; there are image, caption"),
        ("image,caption\na.jpg,x\na.jpg\n", {}, r"data.csv:3: 1 cells, but 2 columns \(image, caption\)"),
        ("image,caption\na.jpg,x,y\n", {}, r"data.csv:2: 3 cells"),
        (b"image,caption\na.jpg,\xff\xfe\n", {}, r"data.csv:2: not UTF-8 \(byte 20\)"),
        ("image,caption\na.jpg,x\0y\n", {}, r"data.csv:2: column 'caption': a NUL character"),
        ("image,caption\na.jpg," + "x" * 200_000 + "\n", {}, r"csv:2: column 'caption': 200000 characters"),
        ("image,caption\na.jpg," + "x" * 2_000_000 + "\n", {}, r"data.csv:2: field larger than field limit"),
        ("image,caption\n,x\n", {}, r"data.csv:2: column 'image' is empty"),
        ('image,caption\na.jpg,"x\nb.jpg,y\n', {}, r"data.csv:2: unexpected end of data; .*set data.quote=null"),
        ('image,caption\na.jpg,"x"y\n', {}, r"data.csv:2: ',' expected after '\"'"),
        ("image,caption,image_id\na.jpg,x,1\nb.jpg,y,1\n", {}, r"csv:3: image id '1' is 'b.jpg' here .*:2"),
        ("image,image\n1,2\n", {}, r"two columns have the same name"),
        ("", {}, r"data.csv: empty"),
        ("word\n", {"header": False}, r"one column only, 'word'; set data.separator"),
        ("a,b\n", {"separator": "::"}, r"separator='::' must be one character"),
    ],
)  # fmt: skip
def test_a_fault_of_a_table_is_named_by_line_and_column(text, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        table(tmp_path, text, **settings)
    assert "\n" not in str(caught.value)


def test_quotes_can_be_plain_text(tmp_path):
    (record,) = table(tmp_path, 'image\tcaption\na.jpg\ta 5" disk\n', quote=None)
    assert record.captions == ('a 5" disk',)
    (record,) = table(tmp_path, b'\xef\xbb\xbfimage,caption\r\na.jpg,"a ""dog"", brown\nand old"\r\n')
    assert record.captions == ('a "dog", brown\nand old',)


# ----- JSON


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"image": "a.jpg", "caption": "x"}\n{"image": ', r"data.jsonl:2: not JSON"),
        ('{"image": "a.jpg", "caption": "x"}\n[1]', r"data.jsonl:2: an object is needed, got list"),
        ('{"image": "a.jpg", "caption": "x"}\n{"image": "b.jpg"}', r"jsonl:2: no field 'caption'; there are image"),
        ('{"image": 3, "caption": "x"}', r"data.jsonl:1: field 'image' must be the picture's path"),
        ('{"image": "a.jpg", "caption": null}', r"jsonl:1: field 'caption': a caption must be text, got NoneType"),
        ('{"image": "a.jpg", "captions": ["x", 5]}', r"jsonl:1: field 'captions'\[1\]: a caption must"),
        ('{"image": "a.jpg", "caption": "x", "regions": [{"label": "a"}]}', r"data.jsonl:1: regions are"),
        ('{"url": "a.jpg", "alt": "x"}', r"cannot tell which of url, alt is the image; set data.image_key"),
        (
            '{"image": "a.jpg", "caption": "x", "image_id": 1}\n{"image": "b.jpg", "caption": "x", "image_id": 1}',
            r":2: image id '1' is",
        ),
        ("\n\n", r"data.jsonl: empty"),
    ],
)  # fmt: skip
def test_a_fault_of_json_lines_is_named_by_line_and_field(text, message, tmp_path):
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(JsonLines(str(tmp_path / "data.jsonl")).records())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", r"data.json:1: not JSON"),
        ("[]", r'no list "images" at the top; is it Karpathy JSON\?'),
        ('{"images": [{"split": "train", "sentences": []}]}', r'images\[0\] has no str "filename"'),
        ('{"images": [{"filename": "a", "split": "train"}]}', r'images\[0\] has no list "sentences"'),
        (
            '{"images": [{"filename": "a", "split": "train", "sentences": [{"tokens": []}]}]}',
            r"sentences\[0\]: a caption must be text",
        ),
    ],
)  # fmt: skip
def test_a_fault_of_karpathy_json_is_named_by_entry_and_field(data, message, tmp_path):
    (tmp_path / "data.json").write_text(data)
    with pytest.raises(ValueError, match=message):
        list(KarpathyJson(str(tmp_path / "data.json"), str(tmp_path)).records())


def test_restval_counts_as_train_and_folders_of_coco_are_kept(tmp_path):
    entries = [
        {"filename": "a.jpg", "filepath": "val2014", "split": "restval", "sentences": [{"raw": "x"}]},
        {"filename": "a.jpg", "filepath": "train2014", "split": "train", "sentences": [{"raw": "y"}]},
    ]
    (tmp_path / "data.json").write_text(json.dumps({"images": entries}))
    source = Records(KarpathyJson(str(tmp_path / "data.json"), str(tmp_path)))
    assert list(source.split("train").image_ids) == ["val2014/a.jpg", "train2014/a.jpg"]
    apart = Records(KarpathyJson(str(tmp_path / "data.json"), str(tmp_path), restval="restval"))
    assert sorted(apart.splits()) == ["restval", "train"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"images": []}, 'no list "annotations"'),
        ({"images": [{"id": 1}], "annotations": []}, r'images\[0\] has no "file_name"'),
        ({"images": [{"id": 1, "file_name": "a"}] * 2, "annotations": []}, r"images\[1\] repeats id 1"),
        ({"images": [], "annotations": [{"image_id": 4, "caption": "x"}]}, r"\[0\] is of image 4, which is not among"),
        ({"images": [{"id": 4}], "annotations": [{"image_id": 4}]}, r'annotations\[0\] has no "caption"'),
    ],
)  # fmt: skip
def test_a_fault_of_coco_json_is_named_by_list_and_entry(data, message, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        list(CocoCaptions({"train": str(tmp_path / "c.json")}, str(tmp_path)).records())


def test_coco_may_have_a_folder_for_each_split(tmp_path):
    for number, split in enumerate(("train", "val")):
        (tmp_path / split).mkdir()
        picture(number).save(tmp_path / split / "1.png")
        data = {"images": [{"id": 1, "file_name": "1.png"}], "annotations": [{"image_id": 1, "caption": split}]}
        (tmp_path / f"{split}.json").write_text(json.dumps(data))
    splits = ("train", "val")
    reader = CocoCaptions({s: str(tmp_path / f"{s}.json") for s in splits}, {s: str(tmp_path / s) for s in splits})
    source = Records(reader)
    assert [source.split(s).picture(0).getpixel((0, 0))[0] for s in splits] == [0, 1]


# ----- folders, sources, fix lists


def test_a_folder_says_what_is_out_of_place(tmp_path):
    (tmp_path / "train").mkdir()
    picture(0).save(tmp_path / "train" / "a.png")
    picture(1).save(tmp_path / "train" / "b.png")
    (tmp_path / "train" / "a.txt").write_text("a dog\na cat\n")
    records = list(Folder(str(tmp_path)).records())
    assert [(record.image, record.captions) for record in records] == [
        ("train/a.png", ("a dog", "a cat")),
        ("train/b.png", ()),
    ]
    (tmp_path / "train" / "c.txt").write_text("x")
    with pytest.raises(ValueError, match=r"train/c.txt: no picture of that name beside it"):
        list(Folder(str(tmp_path)).records())
    (tmp_path / "train" / "c.txt").unlink()
    picture(0).save(tmp_path / "d.png")
    with pytest.raises(ValueError, match=r"d.png is in no split; put it into .*/train, or set data.splits=false"):
        list(Folder(str(tmp_path)).records())
    assert {record.split for record in Folder(str(tmp_path), splits=False, default_split="all").records()} == {"all"}
    picture(0).save(tmp_path / "train" / "a.jpg")
    with pytest.raises(ValueError, match="share one side-car text"):
        list(Folder(str(tmp_path), splits=False).records())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: KarpathyJson(str(t / "no.json"), str(t)), r"data.json=.*no.json: no such file"),
        (lambda t: KarpathyJson(str(t), str(t)), r"data.json=.*: a folder, not a file"),
        (lambda t: KarpathyJson(str(t / "here.json"), str(t / "no")), r"data.images=.*no: no such folder"),
        (lambda t: Table(str(t / "no.csv")), r"data.table=.*no.csv: no such file"),
        (lambda t: Folder(str(t / "no")), r"data.folder=.*no: no such folder"),
        (lambda t: Records(JsonLines(str(t / "here.json")), exclude=str(t / "no")).splits(), r"data.exclude=.*no: no"),
    ],
)  # fmt: skip
def test_a_missing_file_is_named_with_its_key(make, message, tmp_path):
    (tmp_path / "here.json").write_text('{"image": "a.png", "caption": "x"}')
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


def test_an_unknown_or_empty_split_names_those_that_exist(tmp_path):
    file, images = write_karpathy(tmp_path, {"train": 3, "val": 2})
    source = Records(KarpathyJson(str(file), str(images)))
    with pytest.raises(
        ValueError, match=r"no split 'test' in .*data.json; it has train \(3 images\), val \(2 images\)"
    ):
        source.split("test")
    file, images = write_karpathy(tmp_path, {"train": 3, "test": 2}, captions=0)
    with pytest.raises(ValueError, match="split 'train' of .* is empty: 3 images, no captions"):
        Records(KarpathyJson(str(file), str(images))).split("train")


def test_a_missing_picture_is_named(tmp_path):
    file, images = write_karpathy(tmp_path, {"train": 3})
    (images / "001.png").unlink()
    with pytest.raises(BadImage, match=r"001.png: no such file"):
        Records(KarpathyJson(str(file), str(images))).split("train").picture(1)


def test_empty_captions_follow_the_policy(tmp_path, caplog):
    text = "image,caption\na.jpg,\na.jpg,a dog\nb.jpg,   \nc.jpg,a cat\n"
    table(tmp_path, text)
    reader = Table(str(tmp_path / "data.csv"))
    dropped = Records(reader).split("train")
    assert list(dropped.captions) == ["a dog", "a cat"] and list(dropped.image_ids) == ["a.jpg", "b.jpg", "c.jpg"]
    assert dropped.notes["captions_empty"] == 2 and "2 empty captions left out" in caplog.text
    assert list(Records(reader, empty_captions="keep").split("train").captions) == ["", "a dog", "   ", "a cat"]
    with pytest.raises(ValueError, match="image 'a.jpg' has an empty caption; .*empty_captions=drop"):
        Records(reader, empty_captions="error").split("train")
    with pytest.raises(ValueError, match="empty_captions='no' is not known"):
        Records(reader, empty_captions="no")


def test_a_fix_list_leaves_out_pictures_and_captions_and_says_so(tmp_path, caplog):
    file, images = write_karpathy(tmp_path, {"train": 3, "val": 2}, captions=2)
    listed = tmp_path / "fix.jsonl"
    lines = [
        {"split": "train", "image_id": "001.png", "reason": "a copy"},
        {"image_id": "003.png", "caption": "picture 3 said way 1"},
        {"split": "train", "image_id": "nobody.png"},
    ]
    listed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = Records(KarpathyJson(str(file), str(images)), exclude=str(listed))
    assert list(source.split("train").image_ids) == ["000.png", "002.png"]
    assert len(source.split("val").captions) == 3
    assert "2 entries of the fix list left out" in caplog.text and "1 entries name nothing that is there" in caplog.text
    listed.write_text("[]\n")
    with pytest.raises(ValueError, match="fix.jsonl:1: not .* is it a fix list"):
        Records(KarpathyJson(str(file), str(images)), exclude=str(listed)).splits()


def test_an_id_that_is_two_pictures_is_refused():
    with pytest.raises(ValueError, match="image id '1' of split 'train' is 'a.jpg' and 'b.jpg'; an id is one picture"):
        list(merged([Record("a.jpg", ("x",), "1", "train"), Record("b.jpg", ("y",), "1", "train")]))


def test_a_known_set_of_the_wrong_size_says_so(tmp_path, caplog):
    file, images = write_karpathy(tmp_path, {"train": 6, "val": 2, "test": 2}, captions=1)
    file.write_text(file.read_text().replace('"dataset": "tiny"', '"dataset": "flickr8k"'))
    Records(KarpathyJson(str(file), str(images))).splits()
    assert "flickr8k: split 'test' has 2 images, 1000 in the published one" in caplog.text
