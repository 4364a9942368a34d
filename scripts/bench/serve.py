"""Load on a server of ours, on this machine: requests at once, errors, times, memory, answers against single ones.

    python scripts/bench/serve.py INDEX           200 requests at once, three times over
    python scripts/bench/serve.py INDEX --rounds 10 --queries texts.txt

Starts vlretrieval-serve on a free port of the loopback address and stops it at the end. Exit status 1 if anything but
200 and 429 is answered, an answer differs from a single request's, memory grows, or a bad upload is not refused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

QUERIES = [
    "two dogs on snow", "a man in a red shirt", "children play in water", "a woman on a bicycle", "a black dog",
    "a crowd at a concert", "someone climbs a rock", "a football player", "a boat on a lake", "a city street",
]  # fmt: skip


async def fetch(port: int, target: str, body: bytes | None = None) -> tuple[int, bytes, float]:
    """(status, body, seconds) of one request over a connection of its own."""
    started_at = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            f"{'GET' if body is None else 'POST'} {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        )
        if body is not None:
            head += f"Content-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + (body or b""))
        with contextlib.suppress(ConnectionError):  # refused before all was sent: there is an answer all the same
            await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
    top, _, content = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), content, time.perf_counter() - started_at


def path_of(text: str) -> str:
    return "/search?" + urllib.parse.urlencode({"text": text, "top": 10, "top_k": 32})


async def resident(port: int) -> float:
    """MiB that the server holds, as it says itself."""
    _, text, _ = await fetch(port, "/metrics")
    return float(re.search(rb"^vlretrieval_resident_bytes (\S+)$", text, re.M).group(1)) / 2**20  # type: ignore[union-attr]


def same(one: Any, other: Any) -> bool:
    """Whether two answers rank the same pictures with the same scores (to 1e-4); equal scores may change places."""
    pairs = list(zip(one["hits"], other["hits"], strict=True))
    close = all(abs((a["score"] or 0) - (b["score"] or 0)) < 1e-4 for a, b in pairs)
    return close and all(a["id"] == b["id"] or abs((a["score"] or 0) - (b["score"] or 0)) < 1e-4 for a, b in pairs)


async def loaded(port: int, texts: list[str], at_once: int, rounds: int) -> list[str]:
    """What went wrong."""
    wrong = []
    alone, single = {}, []
    for text in texts:
        status, content, seconds = await fetch(port, path_of(text))
        alone[text] = json.loads(content)
        single.append(seconds)
    print(f"one at a time: p50 {1e3 * statistics.median(single):.0f} ms over {len(single)} requests")
    memory = [await resident(port)]
    draw = random.Random(0)
    for number in range(rounds):
        chosen = [draw.choice(texts) for _ in range(at_once)]
        started_at = time.perf_counter()
        answers = await asyncio.gather(*(fetch(port, path_of(text)) for text in chosen))
        elapsed_s = time.perf_counter() - started_at
        counts = Counter(status for status, _, _ in answers)
        good = [(t, json.loads(c), s) for t, (status, c, s) in zip(chosen, answers, strict=True) if status == 200]
        differing = sum(not same(answer, alone[text]) for text, answer, _ in good)
        memory.append(await resident(port))
        times = sorted(s for _, _, s in good)
        print(
            f"{at_once} at once, round {number + 1}: {dict(counts)}, {len(good) / elapsed_s:.0f} answers a second, "
            f"p50 {1e3 * times[len(times) // 2]:.0f} ms, p95 {1e3 * times[int(0.95 * len(times))]:.0f} ms, "
            f"{differing} differ from single requests, {memory[-1]:.0f} MiB"
        )
        if set(counts) - {200, 429}:
            wrong.append(f"statuses {dict(counts)}")
        if differing:
            wrong.append(f"{differing} answers differ from single requests")
    # the first round warms the allocator and the threads up
    if len(memory) > 2 and memory[-1] > memory[1] * 1.05 + 8:
        wrong.append(f"memory grew from {memory[1]:.0f} to {memory[-1]:.0f} MiB")
    return wrong


async def abused(port: int) -> list[str]:
    """Bad uploads and ids: what was not answered by 4xx."""
    wrong = []
    targets: list[tuple[str, bytes | None]] = [
        ("/search", body) for body in (b"", b"no image", b"\x89PNG\r\n\x1a\n", b"x" * (9 << 20))
    ]
    targets += [
        (f"/{room}/{id}", None)
        for room in ("items", "pictures")
        for id in ("..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "%00", "a" * 5000)
    ]
    for target, body in targets:
        status, _, _ = await fetch(port, target, body)
        if not 400 <= status < 500:
            wrong.append(f"{target[:60]} with {None if body is None else len(body)} bytes: {status}")
    status, _, _ = await fetch(port, "/healthz")
    print(f"{len(targets)} bad uploads and ids: {'all 4xx' if not wrong else wrong}; then /healthz {status}")
    return wrong + ([] if status == 200 else ["the server is gone"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("index")
    parser.add_argument("--at-once", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", help="a text file, one query a line")
    parser.add_argument("words", nargs="*", help="further key=value for vlretrieval-serve")
    arguments = parser.parse_args()
    if not 1 <= arguments.rounds <= 100 or not 1 <= arguments.at_once <= 1000:
        parser.error("--rounds is 1 to 100, --at-once 1 to 1000")
    texts = QUERIES
    if arguments.queries:
        texts = [line for line in Path(arguments.queries).read_text(encoding="utf-8").splitlines() if line.strip()][
            :200
        ]
    command = [
        sys.executable,
        "-m",
        "vlretrieval.commands.serve",
        f"index={arguments.index}",
        "port=0",
        *arguments.words,
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", server.stdout.readline())
        if found is None:
            print("the server did not start", file=sys.stderr)
            return 1
        port = int(found.group(1))
        deadline = time.monotonic() + 60
        while True:
            try:
                asyncio.run(fetch(port, "/healthz"))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        wrong = asyncio.run(loaded(port, texts, arguments.at_once, arguments.rounds)) + asyncio.run(abused(port))
        if server.poll() is not None:
            wrong.append("the server ended")
    finally:
        started_at = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        status = server.wait(30)
        print(f"stopped in {time.perf_counter() - started_at:.1f} s, status {status}")
    for said in wrong:
        print(f"WRONG    {said}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
