"""Reads parts of files from other processes of a job, over connections of its own.

Every process serves its folder in threads. A client must know the job's secret; a request is a
file's name, an offset and a number of bytes, as JSON.
"""

import contextlib
import json
import multiprocessing
import pathlib
import socket
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection

import jax
from jax._src import distributed  # whose address has no public name

from maxramp.checkpoints.pieces import read_part
from maxramp.errors import NEXT_START, PeerLostError

_CHUNK = 1 << 26  # bytes of a file in a request


def _own_host() -> str:
    """Returns the host at which other processes reach this one: of process 0 the coordinator's,
    of another that of its interface towards it. Called when JAX has joined the job.
    """
    address = distributed.global_state.coordinator_address or "127.0.0.1:0"
    host = address.rpartition(":")[0].strip("[]")
    if jax.process_index() == 0:
        return host
    family, *_, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]


def _family(host: str) -> str:
    return "AF_INET6" if ":" in host else "AF_INET"


class Server:
    """Serves the files of a folder until the process ends."""

    def __init__(self, folder: pathlib.Path, secret: bytes):
        self._folder, self._secret, host = folder, secret, _own_host()
        is_local = host.startswith("127.") or host in ("localhost", "::1")
        where = host if is_local else {"AF_INET": "", "AF_INET6": "::"}[_family(host)]
        self._listener = connection.Listener((where, 0), _family(host), backlog=128)
        self.address = host, self._listener.address[1]
        threading.Thread(target=self._accept, name="snapshots", daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the client has left
                link = self._listener.accept()
                threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link: connection.Connection) -> None:
        with link, contextlib.suppress(OSError, EOFError, multiprocessing.AuthenticationError):
            connection.deliver_challenge(link, self._secret)
            connection.answer_challenge(link, self._secret)
            while True:
                name, offset, size = json.loads(link.recv_bytes())
                link.send_bytes(read_part(self._folder / name, offset, size))


class Peer:
    """A connection to the server of another process, for one thread."""

    def __init__(self, process: int, address: Sequence, secret: bytes):
        self._process, (host, port) = process, address
        with self._report_loss():
            self._link = connection.Client((host, port), _family(host), authkey=secret)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Returns `size` bytes of a file of the peer, fewer at its end; a PeerLostError if it is
        gone."""
        with self._report_loss():
            self._link.send_bytes(json.dumps([name, offset, size]).encode())
            return self._link.recv_bytes()

    def read_file(self, name: str) -> Iterator[bytes]:
        """Yields a file in parts that fit into memory; raises as `read`."""
        offset, chunk = 0, self.read(name, 0, _CHUNK)
        while chunk:
            yield chunk
            offset += len(chunk)
            chunk = self.read(name, offset, _CHUNK)

    @contextlib.contextmanager
    def _report_loss(self) -> Iterator[None]:
        """Raises a PeerLostError if the connection fails or ends, as it does where the peer lacks
        the file."""
        try:
            yield
        except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
            raise PeerLostError(
                f"process {self._process} does not hand over its snapshot ({error or 'it ended'}); "
                f"{NEXT_START}"
            ) from None
