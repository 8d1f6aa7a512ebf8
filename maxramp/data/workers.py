"""Processes that read elements for this one."""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import queue
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from maxramp.errors import ConfigError, TrainingError


def read(elements: Any, index: Any) -> Any:
    """`elements[index]`.

    Raises:
      ConfigError: a file is not what it should be.
      TrainingError: the element cannot be read for another reason.
      MemoryError: the host has too little for it.
    """
    try:
        return elements[index]
    except (ConfigError, TrainingError, MemoryError):
        raise
    except Exception as error:  # whatever a file or a library raises
        raise _failure(elements, index, str(error) or type(error).__name__) from None


def _failure(elements: Any, index: Any, reason: str) -> TrainingError:
    reason = " ".join(reason.split())[:300]
    return TrainingError(f"{elements} {index} could not be read: {reason}")


class Workers:
    """Worker processes, each of so many threads. A pipe leads to every thread."""

    def __init__(self, elements: Any, processes: int, threads: int):
        """Starts the processes; they get a copy of the elements."""
        self._elements, pickled = elements, pickle.dumps(elements, protocol=5)
        self._idle: queue.SimpleQueue[tuple[BaseProcess, Connection]] = queue.SimpleQueue()
        self._processes: list[BaseProcess] = []
        self._ending = threading.Lock()
        context = multiprocessing.get_context("spawn")
        starting = []
        for _ in range(processes):
            pipes = [context.Pipe() for _ in range(1 + threads)]
            (start, *ours), theirs = zip(*pipes, strict=True)
            process = context.Process(target=_serve, args=theirs, daemon=True)
            process.start()
            for connection in theirs:
                connection.close()  # so that the death of the process closes the pipe
            for connection in ours:
                self._idle.put((process, connection))
            self._processes.append(process)
            starting.append(start)
        # An interpreter that ends waits for its children, and these end for nobody who asks.
        arguments = (self._processes,)
        self._kill = multiprocessing.util.Finalize(self, _kill, arguments, exitpriority=1)
        # In a thread: the processes take it when they are up.
        threading.Thread(target=_hand_out, args=(pickled, starting), daemon=True).start()

    def read(self, index: Any) -> Any:
        """What `read` returns or raises, by the next thread that has nothing to do."""
        process, connection = self._idle.get()
        try:
            _send(connection, index)
            element = _receive(connection)
        except (EOFError, OSError):  # the process is dead, or is being ended
            with self._ending:  # one thread alone can wait for it
                process.join()
            reason = f"a worker process ended with exit code {process.exitcode}"
            raise _failure(self._elements, index, reason) from None
        finally:
            self._idle.put((process, connection))
        if isinstance(element, Exception):
            raise element
        return element

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        self._kill()


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(pickle.dumps(value, protocol=5))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _hand_out(pickled: bytes, starting: Sequence[Connection]) -> None:
    for connection in starting:
        with contextlib.suppress(OSError):  # of a process that is dead: who reads hears of it
            connection.send_bytes(pickled)


def _serve(start: Connection, *connections: Connection) -> None:
    """A worker: serves until its parent ends, even by a kill, and not before it.

    Signals that ask for an end often go to all processes of a job, but the parent saves first.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError):  # the parent has ended by now
        elements = _receive(start)
        for connection in connections:
            threading.Thread(target=_answer, args=(elements, connection), daemon=True).start()
    multiprocessing.parent_process().join()
    os._exit(1)


def _answer(elements: Any, connection: Connection) -> None:
    """A thread of a worker: reads what is asked for."""
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while True:
            index = _receive(connection)
            try:
                element = read(elements, index)
            except (ConfigError, TrainingError, MemoryError) as error:
                element = error
            _send(connection, element)
