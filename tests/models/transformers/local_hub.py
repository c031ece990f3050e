"""A hub on this machine: of the Hugging Face hub's addresses those that an upload asks for, over HTTP."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0" * 39 + "1"


class LocalHub(ThreadingHTTPServer):
    """`files`: of every repository, as the last commits left them; `asked`: the JSON of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.asked: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        """What HF_ENDPOINT is set to."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Repositories are made, files fetched, sorted, stored and committed."""

    server: LocalHub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """repos/create, preupload, commit, validate-yaml and LFS's batches."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/commit/main"):
            return self._commit(body)
        data = json.loads(body or "{}")
        self.server.asked.append((self.path, data))
        if self.path == "/api/repos/create":
            name = "/".join(filter(None, (data.get("organization"), data["name"])))
            self.server.files.setdefault(name, {})
            return self._answer({"url": f"{self.server.url}/{name}", "name": name, "id": name})
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in data["files"]
            ]
            return self._answer({"files": files})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        self._answer({}, 404)

    def do_GET(self) -> None:
        """A file of a repository, or what the hub knows of one."""
        if self.path.startswith("/api/models/"):
            return self._answer({"id": self.path.split("/models/")[1], "sha": COMMIT, "siblings": []})
        repo, _, name = self.path.strip("/").partition("/resolve/main/")
        content = self.server.files.get(repo, {}).get(name)
        if content is None:
            return self._answer({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        tag = hashlib.sha1(content).hexdigest()
        self._send(content, 200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET  # noqa: N815

    def _commit(self, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        self.server.asked.append((self.path, lines[0]))
        repo = self.path.removeprefix("/api/models/").removesuffix("/commit/main")
        for line in lines:
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.files[repo][line["value"]["path"]] = content
        self._answer({"commitUrl": f"{self.server.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    def _answer(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(data).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Nothing is printed."""


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """A hub that runs until the body ends."""
    with LocalHub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
