"""A hub on the loopback: the few endpoints that huggingface_hub's client uses to push and to load, in memory.

As on the real one, large files travel by Git LFS (content-addressed, kept even if no commit follows), small ones
inside the commit; a private repository does not exist for a stranger. Xet, the other way of large files, has no open
server: its clients are told `HF_HUB_DISABLE_XET`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Repository:
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((len(self.commits), sorted(self.files))).encode()).hexdigest()


@dataclass
class Hub:
    """The hub's memory. `stored`: large files by sha256. `received`: sha256 of every upload, in order.

    `dies_after`: large files it takes before it stops in the middle of the next one; None: it lives.
    """

    token: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    dies_after: int | None = None

    def __enter__(self) -> Hub:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Requests,), {"hub": self}))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, home: object, token: str | None = None) -> dict[str, str]:
        """The environment of a client process of this hub, with its own empty cache."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": self.token}
        return kept | ours | ({} if token is None else {"HF_TOKEN": token})


class Requests(BaseHTTPRequestHandler):
    """One route for each endpoint: `(method, pattern, handler)`; the groups of the pattern are its arguments."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def handle_request(self) -> None:
        body, path = self.read_body(), urlsplit(self.path).path
        anonymous = "Authorization" not in self.headers and self.command != "POST"  # uploads go to signed addresses
        if not (anonymous or self.is_known):
            return self.answer(401, {"error": "Invalid username or password."})
        for method, pattern, handler in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return getattr(self, handler)(body, *match.groups())
        self.answer(404, {"error": f"no such endpoint: {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    @property
    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, data: object, **headers: str) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass

    def repository(self, name: str) -> Repository | None:
        """The repository; None, after an answer that says so, where it is not there for this client."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self.is_known):
            self.answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        return found

    # --- the endpoints

    def whoami(self, _: bytes) -> None:
        self.answer(200, {"type": "user", "name": "me", "orgs": []})

    def validate(self, body: bytes) -> None:
        import yaml

        text = json.loads(body)["content"]
        front = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
        errors = [] if front and isinstance(yaml.safe_load(front[1]), dict) else [{"message": "no YAML"}]
        self.answer(400 if errors else 200, {"errors": errors, "warnings": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        status = 409 if name in self.hub.repositories else 200
        self.hub.repositories.setdefault(name, Repository(private))
        self.answer(status, {"url": f"{self.hub.url}/{name}", "name": name})

    def preupload(self, body: bytes, name: str) -> None:
        if repository := self.repository(name):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if is_large(path) else "regular" for path in files}
            there = {path: {"oid": object_id(path, content)} for path, content in repository.files.items()}
            answers = [
                {"path": path, "uploadMode": modes[path], "shouldIgnore": False} | there.get(path, {}) for path in files
            ]
            self.answer(200, {"files": answers})

    def batch(self, body: bytes, name: str) -> None:
        if self.repository(name):
            objects = [
                {"oid": one["oid"], "size": one["size"]}
                | ({} if one["oid"] in self.hub.stored else {"actions": self.actions(one["oid"])})
                for one in json.loads(body)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})

    def actions(self, oid: str) -> dict[str, dict[str, str]]:
        return {verb: {"href": f"{self.hub.url}/lfs/{verb}/{oid}"} for verb in ("upload", "verify")}

    def upload(self, body: bytes, oid: str) -> None:
        if self.hub.dies_after is not None and len(self.hub.received) >= self.hub.dies_after:
            self.hub.server.socket.close()  # nobody is there any more, in the middle of an upload
            self.close_connection = True
            self.connection.close()
            return
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(400, {"error": "content does not match its sha256"})
        self.hub.received.append(oid)
        self.hub.stored[oid] = body
        self.answer(200, {})

    def verify(self, body: bytes, oid: str) -> None:
        self.answer(200 if len(self.hub.stored.get(oid, b"")) == json.loads(body)["size"] else 404, {})

    def commit(self, body: bytes, name: str) -> None:
        repository = self.repository(name)
        if repository is None:
            return
        files = dict(repository.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
        repository.commits.append(files)
        url = f"{self.hub.url}/{name}/commit/{repository.sha}"
        self.answer(200, {"success": True, "commitOid": repository.sha, "commitUrl": url})

    def info(self, _: bytes, name: str) -> None:
        if repository := self.repository(name):
            siblings = [{"rfilename": path} for path in sorted(repository.files)]
            self.answer(200, {"id": name, "sha": repository.sha, "private": repository.private, "siblings": siblings})

    def tree(self, _: bytes, name: str) -> None:
        if repository := self.repository(name):
            files = [
                {"type": "file", "path": path, "size": len(content), "oid": object_id(path, content)}
                for path, content in sorted(repository.files.items())
            ]
            self.answer(200, files)

    def resolve(self, _: bytes, name: str, path: str) -> None:
        repository = self.repository(name)
        if repository is None:
            return
        if path not in repository.files:
            self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=repository.sha)
            return
        content = repository.files[path]
        self.answer(200, content, ETag=f'"{object_id(path, content)}"', X_Repo_Commit=repository.sha)


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def object_id(path: str, content: bytes) -> str:
    """The name of a file's content: of a large file its sha256, of another the one that git gives it."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


REPOSITORY = r"([\w.-]+/[\w.-]+)"
ROUTES = [
    (("GET",), r"/api/whoami-v2", "whoami"),
    (("POST",), r"/api/validate-yaml", "validate"),
    (("POST",), r"/api/repos/create", "create"),
    (("POST",), rf"/api/models/{REPOSITORY}/preupload/main", "preupload"),
    (("POST",), rf"/{REPOSITORY}\.git/info/lfs/objects/batch", "batch"),
    (("PUT",), r"/lfs/upload/(\w+)", "upload"),
    (("POST",), r"/lfs/verify/(\w+)", "verify"),
    (("POST",), rf"/api/models/{REPOSITORY}/commit/main", "commit"),
    (("GET",), rf"/api/models/{REPOSITORY}(?:/revision/\w+)?", "info"),
    (("GET",), rf"/api/models/{REPOSITORY}/tree/\w+", "tree"),
    (("GET", "HEAD"), rf"/{REPOSITORY}/resolve/\w+/(.+)", "resolve"),
]
