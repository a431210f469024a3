"""A stand-in of the Hugging Face hub: the part of its HTTP interface that jaxlc uses, on loopback.

It has repositories of files with commits. Downloads can be interrupted, and repositories need a
token or are unknown. Uploads are commits of regular files or of files of LFS.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_stand_in"


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by hash: files by path
    messages: list[str] = field(default_factory=list)  # of the commits
    main: str = ""
    is_private: bool = False
    is_gated: bool = False  # known to all, and its files need a token

    def commit(
        self, files: dict[str, bytes], message: str = "", deleted: Set[str] = frozenset()
    ) -> str:
        """Deletes and adds files, and returns the hash of the commit."""
        before = self.commits.get(self.main, {})
        files = {path: before[path] for path in before if path not in deleted} | files
        self.main = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[self.main] = files
        self.messages.append(message)
        return self.main


@dataclass
class Hub:
    repos: dict[str, Repo] = field(default_factory=dict)  # "datasets/org/name", "models/org/name"
    objects: dict[str, bytes] = field(default_factory=dict)  # of LFS
    requests: list[str] = field(default_factory=list)  # "METHOD PATH"
    cut_bytes: int = 0  # the next download of a file ends after so many bytes
    url: str = ""
    writers: frozenset[str] = frozenset({"org"})  # to whose repositories the token may write


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Runs a hub in a thread."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None: ...

    def do_HEAD(self) -> None:
        self._file(is_head=True)

    def do_GET(self) -> None:
        path = self._path()
        if path == "/api/whoami-v2":
            return self._whoami()
        if match := re.fullmatch(r"/api/models/([^/]+)/[^/]+/auth-check/write", path):
            may_write = self._has_token and match[1] in self.hub.writers
            return self._json({}) if may_write else self._error(403, "")
        if match := re.fullmatch(
            r"/api/(\w+/[^/]+/[^/]+)(?:/(revision|tree|refs)(?:/(.+))?)?", path
        ):
            return self._api(*match.groups())
        return self._file()

    def do_POST(self) -> None:
        path, body = self._path(), self.rfile.read(int(self.headers["Content-Length"] or 0))
        if not self._has_token and "paths-info" not in path:
            return self._error(401, "")
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := re.fullmatch(
            r"/api/(\w+/[^/]+/[^/]+)/(paths-info|preupload|commit)/(.+)", path
        ):
            name, action, revision = match.groups()
            if (repo := self._repo(name, revision)) is None:
                return None
            return getattr(self, f"_{action.replace('-', '_')}")(repo, revision, body)
        if path.endswith("/info/lfs/objects/batch"):
            return self._lfs(json.loads(body))
        return self._error(404, "EntryNotFound")

    def do_PUT(self) -> None:
        path, body = self._path(), self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.objects[path.rpartition("/")[2]] = body
        self._json({})

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    @property
    def _has_token(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {TOKEN}"

    def _json(self, value: object, status: int = 200, headers: dict[str, str] = {}) -> None:  # noqa: B006
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Type": "application/json"} | headers).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._json({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def _repo(self, name: str, revision: str | None, needs_files: bool = False) -> Repo | None:
        """The repository; None: an error was sent."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.is_private and not self._has_token):
            self._error(401 if not self._has_token else 404, "RepoNotFound")
        elif needs_files and repo.is_gated and not self._has_token:
            self._error(403, "GatedRepo")
        elif revision not in (None, "main", *repo.commits):
            self._error(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _api(self, name: str, action: str | None, rest: str | None) -> None:
        revision, _, folder = (rest or "main").partition("/")
        if (repo := self._repo(name, revision)) is None:
            return None
        commit = repo.main if revision == "main" else revision
        files = repo.commits.get(commit, {})
        if action == "tree":
            return self._json(_entries(files, folder))
        if action == "refs":
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.main}
            return self._json({"branches": [main], "tags": [], "converts": []})
        siblings = [{"rfilename": path} for path in files]
        info = dict(private=repo.is_private, gated=repo.is_gated and "auto", tags=[], downloads=0)
        repo_id = name.partition("/")[2]
        return self._json(dict(id=repo_id, sha=commit, siblings=siblings, **info))

    def _paths_info(self, repo: Repo, revision: str, body: bytes) -> None:
        files = repo.commits[repo.main if revision == "main" else revision]
        text = body.decode()
        is_json = text.startswith("{")
        paths = json.loads(text)["paths"] if is_json else re.findall(r"paths=([^&]*)", text)
        named = [unquote(path.replace("+", " ")) for path in paths]
        self._json(
            [_entry(files, x) for x in named if any(f"{y}/".startswith(f"{x}/") for y in files)]
        )

    def _file(self, is_head: bool = False) -> None:
        path = self._path() if is_head else unquote(urlsplit(self.path).path)
        match = re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if match is None:
            return self._error(404, "EntryNotFound")
        kind, repo_id, revision, name = match.groups()
        repo = self._repo(f"{kind or 'models'}/{repo_id}", revision, needs_files=True)
        if repo is None:
            return None
        commit = repo.main if revision == "main" else revision
        if (content := repo.commits[commit].get(name)) is None:
            return self._error(404, "EntryNotFound")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        begin, last = asked.groups() if asked else (0, "")
        part = content[int(begin) : int(last) + 1 if last else None]
        self.send_response(206 if asked else 200)
        if asked:
            span = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}"
            self.send_header("Content-Range", span)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if is_head:
            return None
        if self.hub.cut_bytes and len(part) > self.hub.cut_bytes:
            part, self.hub.cut_bytes = part[: self.hub.cut_bytes], 0
            self.close_connection = True
        self.wfile.write(part)
        return None

    def _whoami(self) -> None:
        if not self._has_token:
            return self._error(401, "")
        orgs = [{"name": name, "roleInOrg": "write"} for name in sorted(self.hub.writers)]
        return self._json({"type": "user", "name": "somebody", "orgs": orgs, "auth": {}})

    def _create(self, asked: dict) -> None:
        owner = asked.get("organization") or "somebody"
        name = f"{asked.get('type', 'model')}s/{owner}/{asked['name']}"
        if owner not in (*self.hub.writers, "somebody"):
            return self._error(403, "")
        url = f"{self.hub.url}/{owner}/{asked['name']}"
        if name in self.hub.repos:
            return self._json({"url": url}, 409)
        repo = self.hub.repos[name] = Repo(is_private=asked.get("visibility") == "private")
        repo.commit({".gitattributes": b""}, "initial commit")
        return self._json({"url": url})

    def _preupload(self, repo: Repo, revision: str, body: bytes) -> None:
        files = [
            dict(path=file["path"], uploadMode=mode, shouldIgnore=False)
            for file in json.loads(body)["files"]
            for mode in ("lfs" if file["path"].endswith(".safetensors") else "regular",)
        ]
        self._json({"files": files})

    def _lfs(self, asked: dict) -> None:
        objects = [
            dict(x, actions={"upload": {"href": f"{self.hub.url}/lfs/{x['oid']}"}})
            for x in asked["objects"]
        ]
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: Repo, revision: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        message, files, deleted = "", {}, set[str]()
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                deleted.add(value["path"])
        commit = repo.commit(files, message, deleted)
        repo_id = "/".join(self.path.split("/")[3:5])
        url = f"{self.hub.url}/{repo_id}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})


def _entries(files: dict[str, bytes], folder: str) -> list[dict]:
    """The files and directories in a folder, "" for the root."""
    prefix = f"{folder}/" if folder else ""
    inside = [path for path in files if path.startswith(prefix)]
    names = dict.fromkeys(prefix + path[len(prefix) :].partition("/")[0] for path in inside)
    return [_entry(files, path) for path in names]


def _entry(files: dict[str, bytes], path: str) -> dict:
    if path not in files:
        return dict(
            type="directory", path=path, size=0, oid=hashlib.sha1(path.encode()).hexdigest()
        )
    oid = hashlib.sha1(files[path]).hexdigest()
    return dict(type="file", path=path, size=len(files[path]), oid=oid)
