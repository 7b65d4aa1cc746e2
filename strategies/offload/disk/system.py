"""The calls to the system that a swap file needs, in one object that a test can replace."""

import errno
import fcntl
import os


class FileCalls:
    """Each method is one call to the operating system, with its arguments and its errors."""

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill ``into`` from the file; returns how many bytes came."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write ``data``; returns how many bytes went."""
        return os.pwritev(fd, [data], offset)

    def allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """Take the space of a range of the file for good."""
        os.posix_fallocate(fd, offset, num_bytes)

    def free_bytes(self, fd: int) -> int:
        """What the file system of the file has left for this user."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def sync(self, fd: int) -> None:
        """Return once the data is on the disk, or raise what went wrong on the way."""
        os.fdatasync(fd)

    def make_direct(self, fd: int) -> bool:
        """Ask for transfers around the page cache. Returns whether the file system agrees."""
        direct = getattr(os, "O_DIRECT", 0)
        if not direct:
            return False
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True
