"""A server on the loopback address with the calls of the Hugging Face hub that downloads use, for tests."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """The contents of a hub, and what was requested from it.

    Attributes:
        url: the address of the server, for HF_ENDPOINT.
        requests: "METHOD path" of each request, and the Range header where there is one.
        cut: names of files of which the next answer ends after half of its bytes.
        gated: ids whose files are refused.
    """

    def __init__(self):
        self.revisions: dict[tuple[str, str], dict[str, str]] = {}  # (kind, id): branch -> commit
        self.files: dict[tuple[str, str, str], dict[str, bytes]] = {}  # (kind, id, commit)
        self.requests: list[str] = []
        self.cut: set[str] = set()
        self.gated: set[str] = set()
        hub = self

        class Handler(_Handler):
            contents = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add(self, kind: str, name: str, files: dict[str, bytes]) -> str:
        """Add a commit of a repository ("models" or "datasets") with these files on its branch main; return the commit."""
        names = json.dumps({k: hashlib.sha1(v).hexdigest() for k, v in files.items()})
        commit = hashlib.sha1(f"{kind} {name} {names}".encode()).hexdigest()
        self.revisions.setdefault((kind, name), {})["main"] = commit
        self.files[kind, name, commit] = files
        return commit

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    contents: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self._answer(body=True, posted=data)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def _answer(self, *, body: bool, posted: str = "") -> None:
        path, _, query = self.path.partition("?")
        path = urllib.parse.unquote(path)
        span = self.headers.get("Range", "")
        self.contents.requests.append(f"{self.command} {path} {span}".rstrip())
        if match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([\w-]+)/([^/]+))?(?:/(.*))?", path
        ):
            return self._api(*match.groups(), query, posted, body)
        if match := re.fullmatch(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(match[1] or "models", *match.groups()[1:], body)
        self._send(404, b"{}", body)

    def _api(self, kind, name, call, revision, under, query, posted, body) -> None:
        commit = self._commit(kind, name, revision or "main", body)
        if commit is None:
            return None
        files = self.contents.files[kind, name, commit]
        entries = [_entry(path, content) for path, content in files.items()]
        if call in (None, "revision"):
            siblings = [{"rfilename": path} for path in files]
            info = dict(id=name, sha=commit, siblings=siblings, private=False, gated=False, tags=[])
            return self._send(200, json.dumps(info).encode(), body)
        if call == "tree":
            under = f"{under}/" if under else ""
            inside = [e for e in entries if e["path"].startswith(under)]
            if "recursive=true" not in query.lower():
                folders = {
                    e["path"][len(under) :].split("/")[0]
                    for e in inside
                    if "/" in e["path"][len(under) :]
                }
                inside = [e for e in inside if "/" not in e["path"][len(under) :]]
                inside += [
                    dict(type="directory", path=under + f, oid="0" * 40, size=0)
                    for f in sorted(folders)
                ]
            if under and not inside:
                return self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
            return self._send(200, json.dumps(inside).encode(), body)
        if call == "paths-info":
            fields = urllib.parse.parse_qs(posted)
            wanted = (
                json.loads(posted)["paths"] if posted.startswith("{") else fields.get("paths", [])
            )
            wanted = [wanted] if isinstance(wanted, str) else wanted
            found = [e for e in entries if e["path"] in wanted]
            folders = {
                p.rstrip("/")
                for p in wanted
                if any(e["path"].startswith(p.rstrip("/") + "/") for e in entries)
            }
            found += [dict(type="directory", path=f, oid="0" * 40, size=0) for f in sorted(folders)]
            return self._send(200, json.dumps(found).encode(), body)
        return self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})

    def _commit(self, kind, name, revision, body) -> str | None:
        revisions = self.contents.revisions.get((kind, name))
        if revisions is None:
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            return None
        commit = revisions.get(revision, revision)
        if (kind, name, commit) not in self.contents.files:
            self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit

    def _file(self, kind, name, revision, path, body) -> None:
        commit = self._commit(kind, name, revision, body)
        if commit is None:
            return None
        if name in self.contents.gated:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        content = self.contents.files[kind, name, commit].get(path)
        if content is None:
            return self._send(
                404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
            )
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(match[1]), int(match[2] or len(content) - 1)
            last = min(last, len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        cut = body and path in self.contents.cut
        self.contents.cut -= {path} if cut else set()
        return self._send(status, content, body, headers, cut=cut)

    def _send(self, status, content, body, headers=None, *, cut=False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return dict(type="file", path=path, size=len(content), oid=hashlib.sha1(content).hexdigest())
