"""An index: whatever happened on the way, it holds what its pictures say, and only what changed is embedded anew."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CAPTIONS
from PIL import Image

import vlretrieval
from vlretrieval.deploy.index import build as building
from vlretrieval.deploy.index.build import Report, Share, build
from vlretrieval.deploy.index.made import Settings, identity, restored
from vlretrieval.deploy.index.nearest import Exact, best
from vlretrieval.deploy.index.opened import Index
from vlretrieval.deploy.index.sources import Folder, Shards, source_of
from vlretrieval.deploy.index.store import COMMIT, EMBEDDINGS, KEPT, LOG, THUMBS, map_rows, read_commit
from vlretrieval.deploy.search import read_gallery, search_images

Run = Callable[..., tuple[int, str, str]]
FULL = Settings("float32", "float32", thumbs=16)


def draw(folder: Path, numbers: range | list[int], shift: int = 0) -> Path:
    """Pictures that all differ: ``shift`` gives the same names another content."""
    folder.mkdir(exist_ok=True, parents=True)
    for number in numbers:
        pixels = np.random.default_rng(number + 1000 * shift).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((24, 20)).save(folder / f"{number:03}.png")
    return folder


@pytest.fixture(scope="session")
def model(tiny_export: Path) -> vlretrieval.deploy.loaded.LoadedModel:
    return vlretrieval.load_model(tiny_export)


@pytest.fixture
def make(model: vlretrieval.deploy.loaded.LoadedModel, tiny_export: Path) -> Callable[..., Report]:
    def run(images: Path | str, output: Path, settings: Settings = FULL, **options: object) -> Report:
        options = {"batch_size": 4, **options}
        origin = {"model": str(tiny_export)}
        return build(model, identity(tiny_export), source_of(str(images)), output, settings, sources=origin, **options)

    return run


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of every file but the log's time stamps."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (COMMIT, LOG)}
    files[LOG] = json.dumps([json.loads(line)["id"] for line in (folder / LOG).read_text().splitlines()]).encode()
    return files


def by_id(index: Index) -> dict[str, np.ndarray]:
    rows = map_rows(index.folder, index.commit, EMBEDDINGS)
    return {item.id: np.array(rows[item.row]) for item in index.state.items.values()}


class Killed(BaseException):
    pass


def test_a_model_of_graphs_is_known_by_every_graph(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": {}, "preprocess": {}}))
    seen = set()
    for image, scorer, readme in (("a", "b", "c"), ("a", "x", "c"), ("y", "b", "c"), ("a", "b", "z")):
        files = {"image.onnx": image, "scorer.onnx": scorer, "tokenizer.json": "t", "README.md": readme}
        (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
        seen.add(identity(tmp_path))
    assert len(seen) == 3, "the model card is no part of it"


def test_an_index_killed_again_and_again_holds_the_same_bits_as_one_built_in_one_go(
    make: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = draw(tmp_path / "images", range(30))
    make(images, tmp_path / "whole")
    chance = random.Random(0)
    kills = 0
    for _ in range(12):
        monkeypatch.setattr(building, "COMMIT_EVERY_S", chance.choice([0, 100]))
        at = chance.randrange(1, 5)
        calls = 0

        def tell(done: int, total: int, at: int = at) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed

        try:
            report = make(images, tmp_path / "killed", tell=tell)
            break
        except Killed:
            kills += 1
            with (tmp_path / "killed" / EMBEDDINGS).open("ab") as file:
                file.write(b"half a row")
    assert kills >= 3 and report.total == 30
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_only_what_changed_is_embedded_and_the_rest_is_not_even_read(
    make: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, output = draw(tmp_path / "images", range(20)), tmp_path / "index"
    make(images, output)
    before = by_id(Index.open(output))
    draw(images, range(20, 25))
    draw(images, [3], shift=1)
    (images / "007.png").unlink()
    (images / "000.png").rename(images / "moved.png")
    os.utime(images / "005.png", (1, 1))
    read: list[str] = []
    original = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, id: read.append(id) or original(self, id))
    report = make(images, output)
    assert (report.added, report.changed, report.gone, report.copied, report.touched) == (5, 1, 2, 1, 1)
    assert report.total == 24 and report.unchanged == 16
    assert sorted(read) == ["003.png", "005.png", *(f"{n:03}.png" for n in range(20, 25)), "moved.png"]
    after = by_id(Index.open(output))
    fresh_folder = tmp_path / "fresh"
    make(images, fresh_folder)
    fresh = by_id(Index.open(fresh_folder))
    assert after.keys() == fresh.keys() == {path.name for path in images.iterdir()}
    for name, row in after.items():
        np.testing.assert_allclose(row, fresh[name], atol=1e-6)
    assert not np.allclose(after["003.png"], before["003.png"], atol=1e-3)
    np.testing.assert_array_equal(after["moved.png"], before["000.png"])
    again = make(images, output)
    assert (again.embedded, again.unchanged, again.total) == (0, 24, 24)


def test_a_changed_file_with_the_old_size_and_time_is_found_by_verify(
    make: Callable[..., Report], tmp_path: Path
) -> None:
    images = draw(tmp_path / "images", range(3))
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    path = images / "000.bmp"  # equally many bytes whatever it shows
    Image.fromarray(pixels).save(path)
    make(images, tmp_path / "index")
    was = path.stat()
    Image.fromarray(pixels + 200).save(path)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert make(images, tmp_path / "index").embedded == 0
    assert make(images, tmp_path / "index", verify=True).changed == 1


def test_unreadable_pictures_are_told_once_and_tried_again_when_they_change(
    make: Callable[..., Report], tmp_path: Path
) -> None:
    images = draw(tmp_path / "images", range(6))
    (images / "002.png").write_bytes(b"no picture")
    (images / "empty.jpg").touch()
    first = make(images, tmp_path / "index")
    assert [name for name, _ in first.broken] == ["002.png", "empty.jpg"] and first.total == 5
    assert make(images, tmp_path / "index").broken == []
    draw(images, [2])
    assert make(images, tmp_path / "index").added == 1
    assert len(Index.open(tmp_path / "index")) == 6


def test_several_processes_make_the_index_that_one_makes(make: Callable[..., Report], tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(30))
    make(images, tmp_path / "one")
    for rank in (2, 1, 0):  # in turn: each embeds its part, and the first puts them together at the end
        report = make(images, tmp_path / "three", share=Share(rank, 3))
    assert report.added == 30 and report.copied == 0
    assert content(tmp_path / "three") == content(tmp_path / "one")
    assert not list((tmp_path / "three").glob("part-*"))


def test_shards_give_the_rows_that_a_folder_gives(make: Callable[..., Report], tmp_path: Path) -> None:
    from vlretrieval.data.shards import write_shard

    images = draw(tmp_path / "images", range(10))
    for number in range(2):
        files = sorted(images.iterdir())[5 * number : 5 * number + 5]
        some = [(path.stem, {"png": path.read_bytes(), "txt": b"a caption"}) for path in files]
        write_shard(tmp_path / f"s-{number:03}.tar", some)
    make(f"{tmp_path}/s-{{000..001}}.tar", tmp_path / "shards")
    make(images, tmp_path / "folder", batch_size=4)
    shards, folder = Index.open(tmp_path / "shards"), Index.open(tmp_path / "folder")
    assert shards.ids[:1] == ["s-000.tar/000"] and len(shards) == 10
    for name, row in by_id(shards).items():
        np.testing.assert_allclose(row, by_id(folder)[f"{name[-3:]}.png"], atol=1e-6)
    assert shards.picture("s-001.tar/007") == (images / "007.png").read_bytes()


@pytest.mark.parametrize("top_k", [0, 3, 12])
def test_searching_an_index_equals_searching_the_folder(
    make: Callable[..., Report], model: vlretrieval.deploy.loaded.LoadedModel, tmp_path: Path, top_k: int
) -> None:
    images = draw(tmp_path / "images", range(12))
    make(images, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    gallery = read_gallery(model, sorted(images.iterdir()))
    for weight in (None, 0.5):
        expected = search_images(model, CAPTIONS[0], gallery, 12, top_k, weight)
        hits = index.search(CAPTIONS[0], top=12, top_k=top_k, weight=weight)
        assert [hit.id for hit in hits] == [Path(hit.item).name for hit in expected]
        for hit, want in zip(hits, expected, strict=True):
            assert hit.cosine == pytest.approx(want.cosine, abs=1e-6)
            assert (hit.match is None) == (want.match is None)
            assert hit.match is None or hit.match == pytest.approx(want.match, abs=1e-5)
    assert sorted(hit.place for hit in hits) == list(range(1, 13))
    several = index.search_texts(CAPTIONS, top=5, top_k=top_k)
    assert [[h.id for h in found.hits] for found in several] == [
        [h.id for h in index.search(text, top=5, top_k=top_k)] for text in CAPTIONS
    ]


def test_pictures_are_opened_again_where_nothing_is_kept(make: Callable[..., Report], tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(8))
    make(images, tmp_path / "kept")
    make(images, tmp_path / "none", Settings("float32", "none"))
    assert not (tmp_path / "none" / KEPT).exists()
    kept, none = (Index.open(tmp_path / name).search(CAPTIONS[0]) for name in ("kept", "none"))
    assert [hit.id for hit in kept] == [hit.id for hit in none]
    assert [hit.match for hit in kept] == pytest.approx([hit.match for hit in none], abs=1e-5)


def test_halves_and_bytes_cost_what_they_say(make: Callable[..., Report], tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(12))
    found = {}
    for kind in ("float32", "float16", "int8"):
        make(images, tmp_path / kind, Settings(kind, "float16"))
        index = Index.open(tmp_path / kind)
        found[kind] = restored(index.exact.rows, index.exact.scales)
        assert (tmp_path / kind / EMBEDDINGS).stat().st_size == 12 * 8 * np.dtype(kind).itemsize
        assert len(index.search(CAPTIONS[0], top=12)) == 12
    np.testing.assert_allclose(found["float16"], found["float32"], atol=5e-4)
    np.testing.assert_allclose(found["int8"], found["float32"], atol=1 / 254 + 1e-6)


def test_a_picture_finds_itself(make: Callable[..., Report], tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(9))
    make(images, tmp_path / "index")
    hits = Index.open(tmp_path / "index").search(image=images / "004.png", top=3)
    assert hits[0].id == "004.png" and hits[0].cosine == pytest.approx(1, abs=1e-5) and hits[0].match is None
    with pytest.raises(ValueError, match="either a text or an image"):
        Index.open(tmp_path / "index").search()


def test_the_best_rows_are_those_of_a_full_sort_ties_included() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 3, 7, 40):
        score = rng.integers(0, 5, (20, 30)).astype(np.float32)
        place = np.broadcast_to(np.arange(30), score.shape)
        top, at = best(score, place, count)
        expected = np.argsort(-score, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(at, expected)
        np.testing.assert_array_equal(top, np.take_along_axis(score, expected, axis=1))


def test_streamed_blocks_find_what_one_block_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(-3, 4, (100, 4)).astype(np.float16)
    live = np.flatnonzero(rng.random(100) < 0.8)
    queries = rng.integers(-3, 4, (5, 4)).astype(np.float32)
    whole = Exact(rows, None, live)(queries, 10)
    monkeypatch.setattr("vlretrieval.deploy.index.nearest.BLOCK", 7)
    monkeypatch.setattr("vlretrieval.deploy.index.nearest.HELD_BYTES", 0)
    streamed = Exact(rows, None, live)(queries, 10)
    for one, other in zip(whole, streamed, strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(whole[0].ravel()) <= set(live)


@pytest.mark.parametrize("kind", ["faiss", "usearch"])
def test_an_approximate_index_finds_nearly_all_and_is_refused_when_stale(
    make: Callable[..., Report], tmp_path: Path, kind: str
) -> None:
    pytest.importorskip(kind, reason=f"{kind} is an extra")
    from vlretrieval.deploy.index.opened import approximate

    images = draw(tmp_path / "images", range(40))
    make(images, tmp_path / "index")
    (images / "011.png").unlink()
    make(images, tmp_path / "index")
    with pytest.raises(ValueError, match=f"has no {kind} index; make it with"):
        Index.open(tmp_path / "index", nearest=kind)
    approximate(tmp_path / "index", kind)
    exact, near = Index.open(tmp_path / "index"), Index.open(tmp_path / "index", nearest=kind)
    for text in CAPTIONS:
        expected, found = (index.search(text, top=10, top_k=0) for index in (exact, near))
        assert len({hit.id for hit in expected} & {hit.id for hit in found}) >= 9
        assert all(hit.id != "011.png" for hit in found)
    assert len(near.search(CAPTIONS[0], top=100)) == 39
    draw(images, [77])
    make(images, tmp_path / "index")
    with pytest.raises(ValueError, match="is stale: pictures came or went"):
        Index.open(tmp_path / "index", nearest=kind)


def test_beyond_a_graph_faiss_quantises_and_the_order_is_still_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss", reason="faiss is an extra")
    from vlretrieval.deploy.index.nearest import open_approximate, write_approximate

    monkeypatch.setattr("vlretrieval.deploy.index.nearest.GRAPH_UP_TO", 100)
    rng = np.random.default_rng(0)
    middles = rng.standard_normal((20, 16))
    rows = middles[rng.integers(0, 20, 3000)] + 0.3 * rng.standard_normal((3000, 16))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)
    exact = Exact(rows, None, np.arange(1, 3000))
    write_approximate(tmp_path, exact, "faiss", {"rows": 3000})
    near = open_approximate(tmp_path, exact, "faiss", {"rows": 3000})
    assert (tmp_path / "faiss.index").stat().st_size < 3000 * (8 + 8) + 40_000  # 8 bytes a row and its id
    queries = rows[:20].astype(np.float32)
    (expected, scores), (found, near_scores) = exact(queries, 10), near(queries, 10)
    shared = [len(set(one) & set(other)) for one, other in zip(expected.tolist(), found.tolist(), strict=True)]
    assert np.mean(shared) >= 5
    assert (np.diff(near_scores, axis=1) <= 0).all() and (near_scores <= scores + 1e-6).all()
    assert 0 not in found


@pytest.mark.slow
def test_a_process_that_is_really_killed_and_two_that_share_the_work(tiny_export: Path, tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(600))
    words = [f"model={tiny_export}", f"images={images}", "batch_size=4", "device=cpu"]
    command = [sys.executable, "-m", "vlretrieval.commands.index", *words]
    subprocess.run([*command, f"output={tmp_path}/whole"], check=True)
    for _ in range(3):
        process = subprocess.Popen([*command, f"output={tmp_path}/killed"])
        deadline = time.monotonic() + 60
        while not (tmp_path / "killed" / LOG).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.Random(0).random())
        process.kill()
        process.wait()
    subprocess.run([*command, f"output={tmp_path}/killed"], check=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, "-m", *command[2:], f"output={tmp_path}/two"], check=True)
    assert content(tmp_path / "killed") == content(tmp_path / "two") == content(tmp_path / "whole")


def test_what_is_stale_damaged_or_no_index_is_refused_by_name(
    make: Callable[..., Report], tmp_path: Path, tiny_checkpoint: Path, dual_checkpoint: Path
) -> None:
    from vlretrieval.deploy.export import export

    images, output = draw(tmp_path / "images", range(5)), tmp_path / "index"
    make(images, output)
    other = export(dual_checkpoint, tmp_path / "other")
    with pytest.raises(ValueError, match="is stale: it was made with another model"):
        Index.open(output, model=other)
    model = vlretrieval.load_model(other)
    with pytest.raises(ValueError, match="is stale: it was made with another model .* give another output="):
        build(model, identity(other), Folder(images), output, FULL)
    with pytest.raises(ValueError, match='has embeddings="float32", not "int8"; give another output='):
        make(images, output, Settings("int8", "float32", 16))
    with pytest.raises(ValueError, match="is no index: it has no index.json"):
        Index.open(images)
    with pytest.raises(ValueError, match="holds other files"):
        make(images, images)
    for name in (EMBEDDINGS, KEPT, THUMBS, LOG):
        broken = Path(shutil.copytree(output, tmp_path / f"broken-{name}"))
        os.truncate(broken / name, (broken / name).stat().st_size - 1)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            Index.open(broken)
    (output / COMMIT).write_text("{")
    with pytest.raises(ValueError, match="index.json cannot be read"):
        Index.open(output)


def test_two_writers_do_not_meet(make: Callable[..., Report], tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(9))

    def second(done: int, total: int) -> None:
        with pytest.raises(ValueError, match="is being written by another process"):
            make(images, tmp_path / "index")

    assert make(images, tmp_path / "index", tell=second).total == 9


def test_a_reader_goes_on_with_what_it_opened(make: Callable[..., Report], tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(9))
    make(images, tmp_path / "index")
    index = Index.open(tmp_path / "index")
    before = index.search(CAPTIONS[0])
    draw(images, range(9, 14))
    (images / "000.png").unlink()
    make(images, tmp_path / "index")
    assert index.search(CAPTIONS[0]) == before and len(Index.open(tmp_path / "index")) == 13


def test_ids_of_a_hostile_index_lead_nowhere(tmp_path: Path) -> None:
    from vlretrieval.data.images import BadImage

    images = draw(tmp_path / "images", range(1))
    (tmp_path / "secret.png").write_bytes(b"secret")
    for id in ("../secret.png", f"{tmp_path}/secret.png", "a/../../secret.png", "a\0"):
        with pytest.raises(BadImage, match="points out of the folder"):
            Folder(images).read(id)
    os.mkfifo(images / "pipe.png")
    assert [entry.id for entry in Folder(images).entries()] == ["000.png"]
    with pytest.raises(BadImage, match="no such file"):
        Folder(images).read("pipe.png")
    with pytest.raises(ValueError, match="no such shard"):
        Shards(f"{tmp_path}/none.tar")


def test_a_dual_encoder_is_indexed_without_kept_values(tmp_path: Path, dual_checkpoint: Path) -> None:
    from vlretrieval.deploy.export import export

    folder = export(dual_checkpoint, tmp_path / "dual")
    images = draw(tmp_path / "images", range(5))
    made = build(vlretrieval.load_model(folder), identity(folder), Folder(images), tmp_path / "index")
    assert made.total == 5 and read_commit(tmp_path / "index").made.kept == "none"
    hits = Index.open(tmp_path / "index", model=folder).search("a star")
    assert len(hits) == 5 and all(hit.match is None for hit in hits)


def test_the_commands_build_plan_and_search(run_command: Run, tiny_export: Path, tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(7))
    (images / "bad.png").write_text("no picture")
    words = (f"model={tiny_export}", f"images={images}", "output=index")
    status, out, err = run_command("index", *words, "dry_run=true", "plan.pictures=[1000000000]")
    assert status == 0 and "to do: 8 new" in out and "1,000,000,000 pictures:" in out and "MQA" in out
    assert not (tmp_path / "index").exists()
    status, out, err = run_command("index", *words, "thumbs=16")
    assert status == 0 and "index: 7 pictures; 7 added" in out and "1 unreadable" in out
    assert "note: left out bad.png: not an image of a known kind" in err
    status, out, _ = run_command("search", "index=index", "it's red, isn't it?", "top=3", "rerank.top_k=5")
    lines = out.splitlines()
    assert status == 0 and lines[0] == "3 of 7: re-ranked by match"
    assert lines[1].split() == ["rank", "match", "cosine", "place"] and len(lines) == 6
    assert lines[-1].startswith("ms: encode ") and "rerank" in lines[-1] and "in all" in lines[-1]
    status, out, _ = run_command("search", "index=index", "text=a star", "format=json", "rerank.top_k=0")
    (answer,) = json.loads(out)
    assert answer["query"] == "a star" and len(answer["hits"]) == 7 and answer["hits"][0]["match"] is None
    status, out, _ = run_command("search", "index=index", f"image={images}/003.png")
    assert status == 0 and out.splitlines()[2].endswith("003.png")
    (tmp_path / "queries.txt").write_text("a star\na <b>circle</b>\n")
    status, out, _ = run_command("search", "index=index", "queries=queries.txt", "format=html", "output=sheet.html")
    page = (tmp_path / "sheet.html").read_text()
    assert status == 0 and page.count("<img") == 14 and "a &lt;b&gt;circle" in page and "p50 / p95 of 2" in page
    assert "src='http" not in page and "<script" not in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["index", "model=MODEL", "images=nowhere", "output=x"], "images=nowhere: no such folder"),
        (["index", "model=MODEL", "images=EMPTY", "output=x"], "holds no picture"),
        (["index", "model=MODEL", "images=IMAGES", "output=x", "embeddings=int4"], "embeddings=int4 is not known"),
        (["index", "model=MODEL", "images=IMAGES", "output=x", "thumbs=-1"], "thumbs=-1 is not from 0 to 1024"),
        (["index", "model=MODEL", "images=IMAGES", "output=x", "nearest=near"], "nearest=near is not known"),
        (["index", "model=MODEL", "images=IMAGES", "output=IMAGES"], "holds other files"),
        (["index", "images=IMAGES", "output=x"], "model has no value"),
        (["search", "index=nowhere", "a star"], "nowhere is no index"),
        (["search", "index=nowhere"], "with index= give one of"),
        (["search", "index=nowhere", "a star", "image=x.png"], "with index= give one of"),
        (["search", "index=nowhere", "a star", "format=pdf"], "format=pdf is not known"),
        (["search", "model=MODEL", "images=IMAGES", "a star", "format=json"], "need an index"),
    ],
)
def test_what_is_wrong_is_one_line(
    run_command: Run, tiny_export: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    images = draw(tmp_path / "images", range(1))
    (tmp_path / "empty").mkdir()
    name, *rest = (w.replace("MODEL", str(tiny_export)).replace("IMAGES", str(images)) for w in words)
    status, out, err = run_command(name, *(word.replace("EMPTY", "empty") for word in rest))
    assert status == 2 and out == "" and len(err.splitlines()) == 1 and said in err


def test_a_word_that_is_no_key_and_no_flags_value_is_the_text() -> None:
    from vlretrieval.commands.launch import with_key

    words = ["index=x", "two dogs", "--config-dir", "folder", "-m", "~top"]
    assert with_key(words, "text") == ["index=x", "text=two dogs", "--config-dir", "folder", "-m", "~top"]
    assert with_key(words, None) == words


def test_the_index_is_part_of_the_package() -> None:
    assert vlretrieval.Index is Index
    with pytest.raises(AttributeError, match="no attribute 'Indx'"):
        vlretrieval.Indx  # noqa: B018
    assert torch.is_inference_mode_enabled() is False
