"""The HTTP application: search by text or picture, pictures, attention maps, health, metrics, and the page.

Nothing a client sends becomes a path: ids are looked up in the index. What is too large is refused before it is read
whole, what is too much by 429. The page's files are part of the package; no request leaves the machine.
"""

import asyncio
import hmac
import io
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vlretrieval.data.images import BadImage, open_image
from vlretrieval.deploy.index.answers import SIDE
from vlretrieval.deploy.index.look import thumbnail
from vlretrieval.deploy.index.opened import Found, Index
from vlretrieval.deploy.serve.attention import attention_of
from vlretrieval.deploy.serve.batching import Batcher, Busy
from vlretrieval.deploy.serve.metrics import Metrics, resident_bytes

if TYPE_CHECKING:
    from fastapi import FastAPI

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
OPEN_ROUTES = {*PAGE, "/healthz"}  # need no token: they tell nothing of the pictures
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LONGEST_TEXT = 2000  # characters
READ_AWAY = 8  # times as many bytes as may be uploaded
MOST = 200  # results of a request, and the longest shortlist


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    Args:
        upload_bytes: of a picture's file.
        upload_pixels: width x height of a picture, by its header.
        batch: requests worked on together.
        waiting: requests that may wait; further ones are answered by 429.
        cached_bytes: of thumbnails held in memory.
    """

    upload_bytes: int = 8 << 20
    upload_pixels: int = 24_000_000
    batch: int = 16
    waiting: int = 64
    cached_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"limits.{name}={value} must be at least 1")


def make_app(
    index: Index,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    token: str | None = None,
    loopback: str | None = None,
) -> "FastAPI":  # annotations are real ones here: FastAPI reads those of the routes
    """The application; whoever runs it starts and stops its worker by the lifespan.

    Args:
        token: what a client must send as ``Authorization: Bearer TOKEN``; None lets everyone in who can connect.
        loopback: the address of this machine alone that it is served on. Requests that name another host are then
            refused: a page from elsewhere could reach the server by a name that was made to point here.
    """
    from fastapi import FastAPI, HTTPException, Query, Request
    from fastapi.responses import PlainTextResponse, Response

    batcher = Batcher(lambda key, payloads: work(index, limits, key, payloads), limits.batch, limits.waiting)
    metrics = Metrics()
    pictures = Pictures(index, limits.cached_bytes)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)

    # the usual /docs would load its script from elsewhere
    app = FastAPI(
        title="vlretrieval", description=__doc__, docs_url=None, redoc_url=None, lifespan=lifespan, version="1"
    )
    hosts = None if loopback is None else {"localhost", "127.0.0.1", "::1", loopback}
    app.add_middleware(Guard, metrics=metrics, token=token, hosts=hosts)

    async def answer(key: tuple, payload: Any) -> Any:
        try:
            return await asyncio.wrap_future(batcher.submit(key, payload))
        except Busy:
            raise HTTPException(429, "too many requests wait; try again", {"Retry-After": "1"}) from None
        except BadImage as error:
            raise HTTPException(422, f"the picture cannot be used: {error.reason}") from None
        except KeyError:
            raise HTTPException(404, "no such picture in the index") from None
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    how_many = Query(24, ge=1, le=MOST, description="results")
    shortlist = Query(50, ge=0, le=MOST, description="candidates that the cross-modal heads put in order; 0: none")
    some_text = Query(min_length=1, max_length=LONGEST_TEXT, pattern=r"\S")

    @app.get("/search", summary="Pictures for a text")
    async def search(text: str = some_text, top: int = how_many, top_k: int = shortlist) -> Response:
        found = await answer(("text", top, top_k), text)
        return as_json({"query": text, "size": len(index), **as_data(found)})

    @app.post(
        "/search",
        summary="Pictures like a picture, which is the body of the request",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def search_by_image(request: Request, top: int = how_many) -> Response:
        if batcher.full:  # before anything is read
            raise HTTPException(429, "too many requests wait; try again", {"Retry-After": "1"})
        found = await answer(("image", top), await body_of(request, limits.upload_bytes))
        return as_json({"query": None, "size": len(index), **as_data(found)})

    @app.get("/items/{id:path}", summary="What the index knows of a picture")
    async def item(id: str) -> Response:
        if id not in index.state.items:
            raise HTTPException(404, "no such picture in the index")
        known = index.item(id)
        return as_json({"id": id, "sha256": known.sha256, "bytes": known.stamp[0] if len(known.stamp) == 2 else None})

    @app.get("/pictures/{id:path}", summary="A picture as JPEG, its longer side at most `side` pixels")
    async def picture(id: str, side: int = Query(SIDE, ge=16, le=1600)) -> Response:
        if id not in index.state.items:
            raise HTTPException(404, "no such picture in the index")
        try:
            return Response(await pictures(id, side), media_type="image/jpeg", headers={"Cache-Control": "private"})
        except Busy:
            raise HTTPException(429, "too many requests wait; try again", {"Retry-After": "1"}) from None
        except BadImage as error:
            raise HTTPException(410, f"the picture's file cannot be read any more: {error.reason}") from None

    @app.get("/attention", summary="Which patches each word's heads look at")
    async def attention(id: str = Query(max_length=LONGEST_TEXT), text: str = some_text) -> Response:
        return as_json(await answer(("attention",), (id, text)))

    @app.get("/healthz", summary="Whether it works, and on what")
    async def healthz() -> Response:
        figures = {"status": "ok", "pictures": len(index), "complete": index.complete, "matches": index.model.can_match}
        return as_json(figures)

    @app.get("/metrics", summary="Counts and times, for Prometheus")
    async def figures() -> Response:
        gauges = {
            "index_pictures": len(index),
            "waiting": batcher.waiting,
            "batches": batcher.batches,
            "batched_requests": batcher.done,
            "resident_bytes": resident_bytes(),
            "thumbnail_cache_bytes": pictures.held,
        }
        return PlainTextResponse(metrics.text(gauges), media_type="text/plain; version=0.0.4")

    for route, (name, kind) in PAGE.items():
        app.add_api_route(route, page_file(name, kind), include_in_schema=False)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return as_json({"detail": "an error of the server's own; its log says more"}, 500)

    return app


def page_file(name: str, kind: str) -> Callable[[], Any]:
    """A route that gives a file of the package."""
    from fastapi.responses import Response

    content = files("vlretrieval.deploy.serve").joinpath("page", name).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=kind)

    return page


def as_json(data: Any, status: int = 200) -> Any:
    """A JSON response; ASCII, since an id may hold what UTF-8 cannot."""
    from fastapi.responses import Response

    return Response(json.dumps(data), status, media_type="application/json")


async def body_of(request: Any, most: int) -> bytes:
    """The body of a request, not held beyond ``most`` bytes.

    What is a little too large is read to its end and thrown away: a client that is cut off while it still sends sees
    a broken connection, and not the answer.
    """
    from fastapi import HTTPException

    told = request.headers.get("content-length", "")
    too_large, body, read = told.isdigit() and int(told) > most, bytearray(), 0
    if not told.isdigit() or int(told) <= READ_AWAY * most:
        async for chunk in request.stream():
            read += len(chunk)
            too_large = too_large or read > most
            if read > READ_AWAY * most:
                break
            if too_large:
                body.clear()
            else:
                body += chunk
    if too_large:
        raise HTTPException(413, f"the picture's file is larger than {most} bytes")
    if not body:
        raise HTTPException(422, "the picture cannot be used: empty, 0 bytes")
    return bytes(body)


def work(index: Index, limits: Limits, key: tuple, payloads: Sequence[Any]) -> Sequence[Any]:
    """A batch of one kind of request, on the model's thread; an Exception among the results is one request's own."""
    if key[0] == "text":
        return index.search_texts(list(payloads), top=key[1], top_k=key[2])
    if key[0] == "image":
        opened = [one_or_error(partial(open_image, body, max_pixels=limits.upload_pixels)) for body in payloads]
        good = [image for image in opened if not isinstance(image, Exception)]
        found = iter(index.search_images(good, top=key[1]) if good else [])
        return [image if isinstance(image, Exception) else next(found) for image in opened]
    return [one_or_error(partial(attention_of, index, *pair)) for pair in payloads]


def one_or_error(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (ValueError, KeyError) as error:
        return error


def as_data(found: Found) -> dict[str, Any]:
    laps = {stage: round(value, 2) for stage, value in found.milliseconds.items()}
    return {"hits": [asdict(hit) for hit in found.hits], "milliseconds": laps}


class Pictures:
    """JPEGs of the index's pictures, the latest held in memory; two are made at a time, few may wait."""

    def __init__(self, index: Index, most_bytes: int, waiting: int = 256) -> None:
        self.index, self.most_bytes, self.most_waiting = index, most_bytes, waiting
        self.held = 0
        self._made: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._turn = asyncio.Semaphore(2)
        self._waiting = 0

    async def __call__(self, id: str, side: int) -> bytes:
        if (id, side) in self._made:
            self._made.move_to_end((id, side))
            return self._made[id, side]
        if self._waiting >= self.most_waiting:
            raise Busy
        self._waiting += 1
        try:
            async with self._turn:
                jpeg = await asyncio.to_thread(self._make, id, side)
        finally:
            self._waiting -= 1
        if (id, side) not in self._made:
            self._made[id, side] = jpeg
            self.held += len(jpeg)
            while self.held > self.most_bytes:
                self.held -= len(self._made.popitem(last=False)[1])
        return jpeg

    def _make(self, id: str, side: int) -> bytes:
        stored = self.index.thumbnail(id) if side <= self.index.commit.made.thumbs else None
        if stored is not None:
            return stored
        return thumbnail(open_image(io.BytesIO(self.index.picture(id)), name=id, at_least=side), side)


class Guard:
    """Around every request: the token, headers that bind the browser, and the counting."""

    def __init__(self, app: Any, metrics: Metrics, token: str | None, hosts: set[str] | None) -> None:
        self.app, self.metrics, self.token, self.hosts = app, metrics, token, hosts

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at, status = time.perf_counter(), 500

        async def sending(message: dict) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name.lower() for name, _ in message["headers"]}
                new = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items() if k.lower().encode() not in given]
                message = {**message, "headers": [*message["headers"], *new]}
            await send(message)

        try:
            if self.hosts is not None and self._host(scope) not in self.hosts:
                await as_json({"detail": "this server is known by another name"}, 421)(scope, receive, sending)
            elif self.token is not None and scope["path"] not in OPEN_ROUTES and not self._known(scope):
                refusal = as_json({"detail": "a token is needed: Authorization: Bearer TOKEN"}, 401)
                await refusal(scope, receive, sending)
            else:
                await self.app(scope, receive, sending)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.add(route, status, time.perf_counter() - started_at)

    @staticmethod
    def _host(scope: dict) -> str:
        """The name that the client knows the server by, without its port."""
        given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1").lower()
        return given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]

    def _known(self, scope: dict) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        assert self.token is not None
        return hmac.compare_digest(given, b"Bearer " + self.token.encode())
