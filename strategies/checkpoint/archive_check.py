"""Checks whether a file of ``torch.save`` is undamaged. Plain Python, without torch.

It is an uncompressed zip file with a CRC-32 of each record; torch writes these and does not
compare them when it reads.
"""

import errno
import pickletools
import struct
import zipfile
import zlib
from typing import IO

from boltmesh.errors import CheckpointError

_MAGIC = b"PK\x03\x04"
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""In the first bytes of files of torch before 1.6, which have no checksums."""
_DAMAGED = "it is damaged, or was not written by torch.save"
_LOCAL_HEADER = struct.Struct("<4s22x2H")
"""Signature, then the lengths of the name and of the extra field that follow."""
_IS_UTF_8 = 0x800
_DAMAGE_ERRORS = {errno.EINVAL, errno.ELOOP, None}
"""Numbers of errors due to the file itself: a wrong offset, a pipe, a link out of its
folder. All others are due to the medium, the network or this user's rights."""
_BUFFER_BYTES = 1 << 18
"""Small enough for a core's cache: three times as fast as reading 16 MiB at a time."""


def check_values(file: IO[bytes], name: object) -> bool:
    """Compare all checksums of a file.

    Args:
        file: An open file that can seek.
        name: Its path or address, for errors.

    Returns:
        Whether it has checksums.

    Raises:
        CheckpointError: If the bytes are not those that were written.
    """
    if damage := find_damage(file):
        raise CheckpointError(f"{name} cannot be loaded: {damage}. Resume from another checkpoint.")
    return has_checksums(file)


def has_checksums(file: IO[bytes]) -> bool:
    """Whether an undamaged file has checksums."""
    return zipfile.is_zipfile(file) and _have_checksums(zipfile.ZipFile(file).infolist())


def find_damage(file: IO[bytes]) -> str | None:
    """Return a description of damage to a file; None if there is none, or no checksums.

    Raises:
        OSError: If the medium cannot be read.
    """
    file.seek(0)
    beginning = file.read(32)
    if not beginning:
        return "it is empty"
    if not beginning.startswith(_MAGIC):
        return None if _OLD_MAGIC in beginning else f"{_DAMAGED} (its first bytes are wrong)"
    try:
        records = zipfile.ZipFile(file).infolist()
        if not _have_checksums(records):
            return None
        buffer = bytearray(_BUFFER_BYTES)
        for record in records:
            if record.compress_type != zipfile.ZIP_STORED:
                return f"{_DAMAGED} ({record.filename!r} in it is compressed)"
            if not _is_whole(file, record, buffer):
                return (
                    f"it was damaged after it was written, the checksum of {record.filename!r} is "
                    f"wrong"
                )
    except OSError as error:
        if not is_damage(error):
            raise
        return f"{_DAMAGED} ({type(error).__name__}: {error})"
    except Exception as error:  # noqa: BLE001 - zipfile raises errors of any class for a damaged file
        return f"{_DAMAGED} ({type(error).__name__}: {error})"
    return None


def is_damage(error: OSError) -> bool:
    """Whether an error means that a file is damaged; else it could not be read and may be whole."""
    return error.errno in _DAMAGE_ERRORS


def find_step(file: IO[bytes]) -> int | None:
    """After which optimizer step Lightning saved a checkpoint; None if it does not tell.

    The pickle in it is only scanned: nothing is built, and no code is run.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
            is_next = False
            for opcode, value, _ in pickletools.genops(archive.read(name)):
                if is_next and "PUT" not in opcode.name and opcode.name != "MEMOIZE":
                    return value if isinstance(value, int) else None
                is_next = is_next or value == "global_step"
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile):
        pass
    return None


def _have_checksums(records: list[zipfile.ZipInfo]) -> bool:
    """Whether any is set: ``torch.serialization.set_crc32_options(False)`` makes all of them 0."""
    return any(record.CRC for record in records if record.file_size)


def _is_whole(file: IO[bytes], record: zipfile.ZipInfo, buffer: bytearray) -> bool:
    file.seek(record.header_offset)
    magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if magic != _MAGIC or record.compress_size != record.file_size:
        return False
    # A damaged name in the directory would lead to another record.
    encoding = "utf-8" if record.flag_bits & _IS_UTF_8 else "cp437"
    if file.read(name_bytes) != record.orig_filename.encode(encoding):
        return False
    file.seek(extra_bytes, 1)
    left, crc32 = record.file_size, 0
    view = memoryview(buffer)
    while left:
        count = file.readinto(view[: min(left, len(view))])  # type: ignore[attr-defined]
        if not count:
            return False
        crc32 = zlib.crc32(view[:count], crc32)
        left -= count
    return crc32 == record.CRC
