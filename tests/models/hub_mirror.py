"""A small Hugging Face Hub on loopback: the few routes that downloads use, over a folder of files."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


@dataclass
class Mirror:
    """What is served, and what was asked.

    Attributes:
        folder: holds `owner/repo/..` and, for OLD_COMMIT, `owner/repo@old/..`.
        token: needed for repositories of the owner "private".
        gated: repositories that ask for consent, beside those of the owner "gated".
        damaged: names of files whose first byte is sent changed.
        breaks: bytes after which each of the next GETs of weights loses its connection.
        requests: (method, path, Range header or None), in order.
        url: of the server.
    """

    folder: Path
    token: str = "hf_secret"
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    breaks: list[int] = field(default_factory=list)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def sent(self, name: str) -> list[str | None]:
        """The ranges of all GETs of a file of that name."""
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(name)]

    def files(self, repo: str, revision: str) -> Path | None:
        """The folder of a repository at a revision."""
        if revision in ("old", OLD_COMMIT):
            return self.folder / f"{repo}@old"
        return self.folder / repo if revision in ("main", COMMIT) else None


@contextmanager
def mirror_of(folder: Path) -> Iterator[Mirror]:
    """Serves a folder until the block ends."""
    mirror = Mirror(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"mirror": mirror}))
    server.daemon_threads = True
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_LARGE = (".gguf", ".bin", ".safetensors")


def _etag(path: Path) -> str:
    """sha256 of a large file, the id of git's blob of a small one."""
    data = path.read_bytes()
    if path.name.endswith(_LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _size(path: Path) -> dict:
    size = path.stat().st_size
    lfs = {"lfs": {"size": size, "sha256": _etag(path), "pointerSize": 134}} if path.name.endswith(_LARGE) else {}
    return {"size": size, "blobId": "0" * 40, **lfs}


class _Handler(http.server.BaseHTTPRequestHandler):
    mirror: Mirror
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Quiet."""

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        path = self.path.partition("?")[0]
        self.mirror.requests.append((self.command, path, self.headers.get("Range")))
        if found := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self._file(*found.groups())
        elif found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(revision|tree)/([^/]+))?", path):
            self._listing(found[1], found[2], found[3] or "main")
        else:
            self._refuse(404, "EntryNotFound")

    def _repository(self, repo: str, revision: str, *, listed: bool = False) -> Path | None:
        """Its folder, or None after an error was sent; a gated one is listed for everybody."""
        known = self.headers.get("Authorization") == f"Bearer {self.mirror.token}"
        allowed = not repo.startswith("private/") or known
        if not listed and self._gated(repo) and not known:
            self._refuse(401, "GatedRepo")
        elif not (self.mirror.folder / repo).is_dir() or not allowed:
            self._refuse(404 if allowed else 401, "RepoNotFound")
        elif (files := self.mirror.files(repo, revision)) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return files
        return None

    def _gated(self, repo: str) -> bool:
        return repo.startswith("gated/") or repo in self.mirror.gated

    def _file(self, repo: str, revision: str, name: str):
        files = self._repository(repo, revision)
        if files is None:
            return
        path = files / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data, etag = path.read_bytes(), _etag(path)
        if path.name in self.mirror.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start, end = (int(asked[1]), int(asked[2] or len(data) - 1) + 1) if asked else (0, len(data))
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT if files.name == repo.split("/")[1] else OLD_COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._send(data[start:end], name)

    def _send(self, data: bytes, name: str):
        if not name.endswith(_LARGE) or not self.mirror.breaks:
            self.wfile.write(data)
            return
        self.wfile.write(data[: self.mirror.breaks.pop(0)])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(2)

    def _listing(self, repo: str, what: str | None, revision: str):
        files = self._repository(repo, revision, listed=True)
        if files is None:
            return
        names = sorted(p.relative_to(files).as_posix() for p in files.rglob("*") if p.is_file())
        commit = OLD_COMMIT if files.name.endswith("@old") else COMMIT
        if what == "tree":
            rows = [{"type": "file", "path": n, "size": (files / n).stat().st_size, "oid": "0" * 40} for n in names]
            self._json(rows)
        else:
            siblings = [{"rfilename": n, **_size(files / n)} for n in names]
            gated, tags = "manual" if self._gated(repo) else False, ["license:apache-2.0"]
            self._json({"id": repo, "sha": commit, "siblings": siblings, "gated": gated, "tags": tags})

    def _json(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
