"""Object storages on this machine: real servers, behind a proxy that can fail and be slow.

The servers are packages of the index (`pip install '.[storage-test]'`). Google's emulator knows no
preconditions, on which claims rest: the proxy keeps those, as the storage's documentation has them.
"""

import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator

BUCKET = "bucket"
_SERVERS = {"gs": "gcp-storage-emulator", "s3": "moto_server"}


def missing(scheme: str) -> str:
    """What is not installed of a storage's server and client, "" if nothing."""
    try:
        __import__({"gs": "gcsfs", "s3": "s3fs"}[scheme])
    except ImportError as error:
        return str(error)
    return "" if _server(scheme) else f"{_SERVERS[scheme]} is not installed"


def _server(scheme: str) -> str | None:
    return shutil.which(_SERVERS[scheme], path=os.path.dirname(sys.executable))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A client that was killed is no news."""


class Storage:
    """A server and its proxy.

    Attributes:
      environment: what sends clients there.
      status: with which every request is answered; 0 passes them on.
      seconds: by which every answer is late.
      requests: "METHOD path" of every request so far.
    """

    def __init__(self, scheme: str, port: int):
        self.scheme, self.address = scheme, f"{scheme}://{BUCKET}/runs"
        self.status, self.seconds, self.requests = 0, 0.0, []
        self._port, self._changing = port, threading.Lock()
        storage = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                size = int(self.headers.get("Content-Length") or 0)
                storage._answer(self, self.rfile.read(size) if size else _chunks(self))

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = answer

            def log_message(self, *arguments):
                pass

        self._proxy = _Server(("127.0.0.1", 0), Handler)
        url = f"http://127.0.0.1:{self._proxy.server_port}"
        self.environment = {
            "gs": {
                **{"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url},
                **{"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "FSSPEC_GCS_TOKEN": "anon"},
            },
            "s3": {
                **{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"},
                **{"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"},
                "AWS_ENDPOINT_URL": url,
            },
        }[scheme]
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()

    def _answer(self, handler, body: bytes) -> None:
        self.requests.append(f"{handler.command} {handler.path}")
        time.sleep(self.seconds)
        if self.status:
            answer = self.status, [("Content-Type", "application/json")], b'{"error": "away"}'
        else:
            answer = self._pass_on(handler, body)
        status, headers, data = answer
        with contextlib.suppress(OSError):  # the client is gone
            handler.send_response(status)
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    handler.send_header(name, value)
            if handler.command == "HEAD":
                length = dict((n.lower(), v) for n, v in headers).get("content-length", "0")
            else:
                length = str(len(data))
            handler.send_header("Content-Length", length)
            handler.end_headers()
            if handler.command != "HEAD":
                handler.wfile.write(data)

    def _pass_on(self, handler, body: bytes):
        url = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if self.scheme == "s3":
            return self._ask(handler.command, handler.path, body, dict(handler.headers))
        name = query.get("name")
        if path := re.search(r"/b/[^/]+/o/([^/?]+)$", url.path):
            name = urllib.parse.unquote(path[1])
        expected = query.get("ifGenerationMatch")
        with self._changing if handler.command != "GET" else contextlib.nullcontext():
            if expected is not None and expected != self._generation(name):
                return 412, [], b'{"error": {"code": 412, "message": "conditionNotMet"}}'
            answer = self._ask(handler.command, handler.path, body, dict(handler.headers))
        if query.get("alt") == "media" and answer[0] < 300:
            answer[1].append(("x-goog-generation", self._generation(name)))
        return answer

    def _generation(self, name: str) -> str:
        path = f"/storage/v1/b/{BUCKET}/o/{urllib.parse.quote(name, safe='')}"
        status, _, data = self._ask("GET", path, b"", {})
        return json.loads(data)["generation"] if status == 200 else "0"

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        kept = {k: v for k, v in headers.items() if k.lower() != "transfer-encoding"}
        connection.request(method, path, body, kept | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), data


def _chunks(handler) -> bytes:
    """The body of a request without a length."""
    data = b""
    if handler.headers.get("Transfer-Encoding", "").lower() == "chunked":
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            data += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
    return data


@contextlib.contextmanager
def running(scheme: str) -> Iterator[Storage]:
    """A storage with an empty bucket."""
    port = free_port()
    options = {
        "gs": ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory"],
        "s3": ["-H", "127.0.0.1", "-p", str(port)],
    }[scheme]
    server = subprocess.Popen(
        [_server(scheme), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    storage = Storage(scheme, port)
    try:
        make = {
            "gs": ("POST", "/storage/v1/b?project=p", json.dumps({"name": BUCKET}).encode()),
            "s3": ("PUT", f"/{BUCKET}", b""),
        }[scheme]
        for _ in range(200):
            try:
                status, _, data = storage._ask(*make, {"Content-Type": "application/json"})
                assert status == 200, data
                break
            except OSError:
                time.sleep(0.1)
        yield storage
    finally:
        storage.close()
        server.kill()
        server.wait()
