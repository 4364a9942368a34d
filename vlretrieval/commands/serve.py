"""Serve an index over HTTP, with a page to search it."""

from __future__ import annotations

import ipaddress
import os
import sys

from omegaconf import DictConfig

from vlretrieval.commands.launch import command


@command("serve", literal=("index", "model", "images", "host", "token"))
def main(cfg: DictConfig) -> None:
    """``vlretrieval-serve index=INDEX``"""
    token = cfg.token or os.environ.get("VLRETRIEVAL_TOKEN") or None
    check_address(cfg.host, cfg.port, token, cfg.open_to_all)
    try:
        import uvicorn
    except ImportError:
        raise ValueError("serving needs fastapi and uvicorn; pip install 'vlretrieval[serve]'") from None
    from vlretrieval.deploy.index.opened import Index
    from vlretrieval.deploy.serve.app import Limits, make_app

    limits = Limits(**cfg.limits)
    index = Index.open(cfg.index, model=cfg.model, nearest=cfg.nearest, images=cfg.images)
    if not index.complete:
        print(f"note: {cfg.index} is not finished; run vlretrieval-index again to add the rest", file=sys.stderr)
    app = make_app(index, limits, token, None if cfg.open_to_all or not is_loopback(cfg.host) else cfg.host)
    settings = uvicorn.Config(
        app,
        host=cfg.host,
        port=cfg.port,
        log_level="warning",
        server_header=False,
        limit_concurrency=cfg.connections,
        timeout_graceful_shutdown=cfg.stop_s,
    )
    server = uvicorn.Server(settings)
    sock = settings.bind_socket()
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"{len(index):,} pictures at http://{shown}:{port}/ (Ctrl-C stops)", flush=True)
    server.run([sock])


def check_address(host: str, port: int, token: str | None, open_to_all: bool) -> None:
    """Refuse to show the pictures to others unless that is meant.

    Raises:
        ValueError: the address is not this machine's own and no token is asked for.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port} is not from 0 to 65535")
    if not is_loopback(host) and not token and not open_to_all:
        raise ValueError(
            f"host={host} can be reached by others; set token=SECRET (or VLRETRIEVAL_TOKEN), or open_to_all=true"
        )


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
