"""The server: answers equal those of the index, what is bad or too much is refused, and it lives on."""

from __future__ import annotations

import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CAPTIONS
from PIL import Image
from test_index import draw

import vlretrieval
from vlretrieval.commands.serve import check_address, is_loopback
from vlretrieval.deploy.index.build import build
from vlretrieval.deploy.index.made import Settings, identity
from vlretrieval.deploy.index.opened import Index
from vlretrieval.deploy.index.sources import Folder
from vlretrieval.deploy.serve.attention import attention_of, words_of
from vlretrieval.deploy.serve.batching import Batcher, Busy

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")
pytest.importorskip("httpx", reason="httpx, which Starlette's test client needs, is not installed")


@pytest.fixture(scope="module")
def index(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("served")
    images = draw(folder / "images", range(12))
    draw(images / "a b", [50])
    model = vlretrieval.load_model(tiny_export)
    origin = {"model": str(tiny_export)}
    build(
        model, identity(tiny_export), Folder(images), folder / "index", Settings("float32", "float32"), sources=origin
    )
    return Index.open(folder / "index")


def client_of(index: Index, **options: Any) -> Any:
    from fastapi.testclient import TestClient

    from vlretrieval.deploy.serve.app import Limits, make_app

    limits = Limits(**options.pop("limits", {}))
    return TestClient(make_app(index, limits, **options), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(index: Index) -> Iterator[Any]:
    with client_of(index, limits={"upload_bytes": 50_000, "upload_pixels": 10_000}) as client:
        yield client


def png(width: int = 20, height: int = 20) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG's header of that size, and nothing behind it."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000))


def test_a_search_answers_what_the_index_answers(client: Any, index: Index) -> None:
    answer = client.get("/search", params={"text": CAPTIONS[0], "top": 5, "top_k": 8}).json()
    expected = index.search(CAPTIONS[0], top=5, top_k=8)
    assert [hit["id"] for hit in answer["hits"]] == [hit.id for hit in expected] and answer["size"] == 13
    for got, want in zip(answer["hits"], expected, strict=True):
        assert got["score"] == pytest.approx(want.score, abs=1e-5) and got["place"] == want.place
    assert set(answer["milliseconds"]) == {"encode", "shortlist", "read", "rerank"}


def test_a_picture_finds_itself_by_its_bytes(client: Any, index: Index) -> None:
    answer = client.post("/search", params={"top": 2}, content=index.picture("003.png")).json()
    assert answer["hits"][0]["id"] == "003.png" and answer["hits"][0]["cosine"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 422, "empty, 0 bytes"),
        (b"not an image", 422, "not an image of a known kind"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 422, "not an image of a known kind"),
        (png()[:60], 422, "broken"),
        (bomb(60_000, 60_000), 422, "pixels"),
        (bomb(101, 100), 422, "101 x 100 pixels are more than max_pixels=10000 allows"),
        (b"x" * 50_001, 413, "larger than 50000 bytes"),
    ],
)
def test_bad_uploads_are_refused_with_a_reason_and_the_server_lives_on(
    client: Any, body: bytes, status: int, said: str
) -> None:
    answer = client.post("/search", content=body)
    assert answer.status_code == status and said in answer.json()["detail"]
    assert client.post("/search", content=png()).status_code == 200


def test_a_body_without_a_length_is_not_read_beyond_the_limit(client: Any) -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        for _ in range(10_000):
            read += 1000
            yield b"x" * 1000

    assert client.post("/search", content=endless()).status_code == 413


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/search", 422),
        ("/search?text=", 422),
        ("/search?text=%20%20", 422),
        ("/search?text=a&top=0", 422),
        ("/search?text=a&top=100000", 422),
        ("/search?text=a&top_k=-1", 422),
        (f"/search?text={'a' * 2001}", 422),
        ("/items/nothing.png", 404),
        ("/items/..%2f..%2fetc%2fpasswd", 404),
        ("/items/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/items/%00", 404),
        ("/pictures/..%2findex%2findex.json", 404),
        ("/pictures//etc/passwd", 404),
        ("/pictures/000.png?side=100000", 422),
        ("/attention?id=nothing.png&text=a", 404),
        ("/attention?id=..%2f000.png&text=a", 404),
        ("/docs", 404),
    ],
)
def test_what_is_asked_wrongly_gets_a_4xx(client: Any, path: str, status: int) -> None:
    assert client.get(path).status_code == status


def test_pictures_and_items_are_given_by_id(client: Any, index: Index) -> None:
    answer = client.get("/pictures/a%20b/050.png", params={"side": 16})
    picture = Image.open(io.BytesIO(answer.content))
    assert answer.headers["content-type"] == "image/jpeg" and max(picture.size) == 16
    known = client.get("/items/a b/050.png").json()
    assert known["sha256"] == index.item("a b/050.png").sha256


def test_a_picture_whose_file_is_gone_is_told(tiny_export: Path, tmp_path: Path) -> None:
    images = draw(tmp_path / "images", range(3))
    model = vlretrieval.load_model(tiny_export)
    build(model, identity(tiny_export), Folder(images), tmp_path / "index", sources={"model": str(tiny_export)})
    (images / "001.png").unlink()
    with client_of(Index.open(tmp_path / "index")) as client:
        assert client.get("/pictures/001.png").status_code == 410
        assert client.get("/search?text=a").status_code == 200
        assert client.get("/attention?id=001.png&text=a").status_code == 200  # from the kept K/V


def test_attention_maps_are_weights_of_words_over_patches(client: Any, index: Index) -> None:
    text = "a red circle above a blue square"
    maps = client.get("/attention", params={"id": "002.png", "text": text}).json()
    assert maps["words"] == text.split() and maps["side"] == 4 and maps["resize"] == "squash"
    names = [(head["kind"], head["layer"], head["head"]) for head in maps["heads"]]
    assert names == [("text to image", layer, n) for layer in (1, 2) for n in (1, 2)] + [
        ("image to text", 1, n) for n in (1, 2)
    ]
    for head in maps["heads"]:
        last = (head["kind"], head["layer"]) == ("text to image", 2)
        assert len(head["whole"]) == 16 and min(head["whole"]) >= 0
        assert (head["words"] is None) == last
        if not last:
            assert [len(word) for word in head["words"]] == [16] * 7
            assert max(sum(word) for word in head["words"]) <= (1 if head["kind"] == "text to image" else 16) + 1e-3
    assert maps["match"] == pytest.approx(
        float(index.model.match([Image.open(io.BytesIO(index.picture("002.png")))], [text])), abs=1e-5
    )
    layers = [m for m in index.model.model.modules() if hasattr(m, "observer")]
    assert layers and all(layer.observer is None for layer in layers)


def test_words_are_put_together_of_their_tokens(index: Index) -> None:
    tokenizer = index.model.tokenizer
    for text in ("a red circle", "unheardof xyzzy words", "小红圆"):
        ids = tokenizer([text])[0]
        words, places = words_of(tokenizer, [*ids, 0, 0])
        assert "".join(words) == text.replace(" ", "")
        assert sorted(p for word in places for p in word) == list(range(1, len(ids) - 1))
    assert words_of(tokenizer, tokenizer(["a red circle"])[0])[0] == ["a", "red", "circle"]


def test_a_dual_encoder_has_no_maps(tmp_path: Path, dual_checkpoint: Path) -> None:
    from vlretrieval.deploy.export import export

    folder, images = export(dual_checkpoint, tmp_path / "dual"), draw(tmp_path / "images", range(3))
    build(vlretrieval.load_model(folder), identity(folder), Folder(images), tmp_path / "index")
    index = Index.open(tmp_path / "index", model=folder)
    with pytest.raises(ValueError, match="no cross-modal heads to look into"):
        attention_of(index, "000.png", "a")
    with client_of(index) as client:
        assert client.get("/attention?id=000.png&text=a").status_code == 422
        assert client.get("/healthz").json()["matches"] is False


def test_a_token_is_asked_for_where_one_is_set(index: Index) -> None:
    with client_of(index, token="secret") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert client.get("/search?text=a", headers=headers).status_code == 401
            assert client.get("/pictures/000.png", headers=headers).status_code == 401
        assert client.get("/search?text=a", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/healthz").status_code == client.get("/").status_code == 200


def test_on_loopback_another_host_name_is_refused(index: Index) -> None:
    with client_of(index, loopback="127.0.0.1") as client:
        assert client.get("/healthz", headers={"Host": "evil.example:8800"}).status_code == 421
        for host in ("127.0.0.1:8800", "localhost", "[::1]:8800"):
            assert client.get("/healthz", headers={"Host": host}).status_code == 200


def test_the_page_asks_nothing_of_the_world(client: Any) -> None:
    for path in ("/", "/page.css", "/page.js"):
        answer = client.get(path)
        assert answer.status_code == 200 and "http://" not in answer.text and "https://" not in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "style=" not in client.get("/").text and "onclick" not in client.get("/").text


def test_the_interface_is_described_and_counted(client: Any) -> None:
    described = client.get("/openapi.json").json()["paths"]
    assert {"/search", "/items/{id}", "/pictures/{id}", "/attention", "/healthz", "/metrics"} <= set(described)
    client.get("/search?text=a")
    text = client.get("/metrics").text
    assert 'vlretrieval_requests_total{route="/search",status="200"}' in text
    assert "vlretrieval_index_pictures 13" in text and 'le="+Inf"' in text and "passwd" not in text


def test_many_at_once_get_the_answers_of_single_requests_or_429(index: Index) -> None:
    texts = [" ".join(np.random.default_rng(n).choice(CAPTIONS[0].split(), 1 + n % 5)) for n in range(20)]
    with client_of(index, limits={"waiting": 8, "batch": 4}) as client:
        alone = {text: client.get("/search", params={"text": text}).json()["hits"] for text in texts}
        with ThreadPoolExecutor(24) as pool:
            found = list(
                pool.map(lambda n: (texts[n % 20], client.get("/search", params={"text": texts[n % 20]})), range(120))
            )
        assert {answer.status_code for _, answer in found} <= {200, 429}
        good = [(text, answer.json()["hits"]) for text, answer in found if answer.status_code == 200]
        assert len(good) >= 20
        for text, hits in good:
            for got, want in zip(hits, alone[text], strict=True):
                assert got["score"] == pytest.approx(want["score"], abs=1e-5)
        assert all(answer.headers["retry-after"] == "1" for _, answer in found if answer.status_code == 429)


def test_a_batch_is_what_came_in_meanwhile_and_one_bad_job_fails_alone() -> None:
    seen, go = [], threading.Event()

    def work(key: Any, payloads: Any) -> Any:
        go.wait(5)
        seen.append((key, list(payloads)))
        return [ValueError("bad") if p == "bad" else (key, p) for p in payloads]

    batcher = Batcher(work, largest=3, waiting=6)
    first = batcher.submit("a", 0)
    while batcher.waiting:
        time.sleep(0.001)
    futures = [batcher.submit(*job) for job in (("a", 1), ("b", 2), ("a", "bad"), ("a", 4), ("a", 5))]
    futures[1].cancel()
    batcher.submit("b", 6)
    with pytest.raises(Busy):
        batcher.submit("a", 7)
    go.set()
    batcher.close()
    assert first.result() == ("a", 0) and futures[3].result() == ("a", 4)
    with pytest.raises(ValueError, match="bad"):
        futures[2].result()
    assert seen == [("a", [0]), ("a", [1, "bad", 4]), ("b", [6]), ("a", [5])] or seen[1] == ("a", [1, "bad", 4])
    assert sorted(p for key, batch in seen for p in batch if isinstance(p, int)) == [0, 1, 4, 5, 6]
    with pytest.raises(Busy):
        batcher.submit("a", 8)


def test_an_error_of_the_work_reaches_all_of_its_batch_and_the_next_batch_is_done() -> None:
    def work(key: Any, payloads: Any) -> Any:
        if key == "bad":
            raise RuntimeError("broken")
        return payloads

    batcher = Batcher(work)
    with pytest.raises(RuntimeError, match="broken"):
        batcher.submit("bad", 1).result()
    assert batcher.submit("good", 2).result() == 2
    batcher.close()


def test_only_this_machine_is_let_in_unless_that_is_meant() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_address(host, 80, None, False)
        assert is_loopback(host)
    for host in ("0.0.0.0", "192.168.1.5", "example.org", "::"):
        with pytest.raises(ValueError, match="can be reached by others; set token="):
            check_address(host, 80, None, False)
        check_address(host, 80, "secret", False)
        check_address(host, 80, None, True)
    with pytest.raises(ValueError, match="port=70000"):
        check_address("127.0.0.1", 70000, None, False)
