"""What a server must survive while it decodes: broken, huge, slow and leaving requests, and many at once."""

import json
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx

BROKEN = (
    b"", b"{", b"[1]", b"null", b'{"prompt": NaN}', b"\xff\xfe", b"[" * 50_000, b'{"prompt": "a", "n": 1e999}',
    b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": {"a": 1}}', b'{"prompt": ["a", 1]}',
    b'{"prompt": "a", "logit_bias": {"-1": 1}}', b'{"messages": 3}',
)  # fmt: skip
HEAD = {"Content-Type": "application/json"}


def attack(url: str, *, tokens: int = 1000, leaving: int = 4, many: int = 40) -> Counter:
    """Everything at once; how often each status came ("left": a stream that was given up, "slow": half a body).

    Args:
        url: of the server.
        tokens: that a request asks for whose client leaves after its first piece.
        leaving, many: clients that leave, and that want two tokens each at the same time.
    """
    found, lock = Counter(), threading.Lock()

    def add(status: object) -> None:
        with lock:
            found[status] += 1

    def post(data: bytes) -> None:
        add(httpx.post(f"{url}/v1/completions", content=data, headers=HEAD, timeout=120).status_code)

    def leave(_: int) -> None:
        body = {"prompt": "one two three", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            if answer.status_code == 200:
                next(answer.iter_lines())
            add("left" if answer.status_code == 200 else answer.status_code)

    def slow(_: int) -> None:
        with half_a_body(url):
            add("slow")

    small = json.dumps({"prompt": "one", "max_tokens": 2, "ignore_eos": True}).encode()
    huge = b'{"prompt": "' + b"a" * (9 * 2**20) + b'"}'
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(leave, i) for i in range(leaving)]
        jobs += [pool.submit(slow, i) for i in range(4)]
        jobs += [pool.submit(post, data) for data in (*BROKEN, huge)]
        jobs += [pool.submit(post, small) for _ in range(many)]
        for job in jobs:
            job.result()
    return found


def half_a_body(url: str) -> socket.socket:
    """A connection whose request says 100 bytes and has sent 10."""
    place = urlsplit(url)
    out = socket.create_connection((place.hostname, place.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    out.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt":'.encode())
    return out
