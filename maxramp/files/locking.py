"""Keeping two processes from writing one folder."""

import errno
import fcntl
from typing import IO

# What flock says on network and FUSE file systems that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def lock(file: IO) -> str:
    """Locks an open file; the lock is gone when the file is closed or the process ends.

    Returns:
      "", or a warning: the file system has no locks, and nothing is locked.

    Raises:
      BlockingIOError: another process holds the lock.
      OSError: the file cannot be locked.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return (
            f"{file.name}: this file system has no locks ({error.strerror}); make sure that no "
            "other process writes to this folder"
        )
    return ""
