"""Observations as bytes, for a pipe or a file: first a whole one, then only changes.

::

    boltmesh-frames 1 0.1.0            a line: the version of this format, and boltmesh's own
    length:u32 crc32:u32 payload       one frame, big-endian; the payload is msgpack
    length:u32 crc32:u32 payload
    ...

A payload is a list that begins with its kind: a key frame can be read by itself, a delta only
after the frame before it, an error says why there is nothing to show, a list of jobs is what
``boltmesh jobs`` shows, and a hello says which job follows. What a frame holds of an observation is
in ``patches.py``.

Nothing in a frame is trusted, from any writer: lengths are capped, every frame has a checksum,
every value is checked against the type of its field, and a job's id can be no path.
"""

import struct
import zlib
from collections.abc import Sequence
from importlib import metadata
from typing import Any, BinaryIO, Final

import msgspec

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.job import is_job_id
from boltmesh.telemetry.reader.reader import JobSummary
from boltmesh.telemetry.sanitize import clean
from boltmesh.tui.sources.live import Observation
from boltmesh.tui.sources.patches import Patcher, PatchError

VERSION: Final = 1
"""Raised when older readers would misread a frame; a field more in a snapshot does not."""

MAGIC: Final = b"boltmesh-frames "
MAX_MAGIC_BYTES: Final = 100
MAX_FRAME_BYTES: Final = 64 << 20
"""A key frame of a thousand ranks with full rings has half of it."""

_HEADER: Final = struct.Struct(">II")
_KEY, _DELTA, _ERROR, _JOBS, _HELLO = range(5)

# Raw leaves the content undecoded: a scan skips over it.
_SCANNED: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw, msgspec.Raw])
_PATCH: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class RemoteError(TelemetryError):
    """An error that the other side sent instead of a frame; its text can be shown as it is."""


class VersionError(TelemetryError):
    """Frames of another version of this format."""


class Hello(msgspec.Struct, frozen=True):
    """Header of a stream, sent before its first observation."""

    job: str
    """Id of the job that follows."""
    host: str
    python: str | None
    """The interpreter of the job, in the words of that host."""
    others: tuple[str, ...] = ()
    """Ids of other running jobs there, where the job was not named."""


class FrameEncoder:
    """Makes the frames of one stream; keeps the last observation to find changes."""

    def __init__(self) -> None:
        self._patcher = Patcher(Observation)
        self._last: Observation | None = None
        self._number = 0

    def encode(self, seen: Observation, *, is_key: bool = False) -> bytes:
        """Return the payload of the next frame; the first one is a key frame in any case."""
        last = None if is_key else self._last
        patch = self._patcher.diff(last, seen)
        self._last = seen
        if last is None:
            self._number = 0
            return msgspec.msgpack.encode([_KEY, self._patcher.fields, patch])
        self._number += 1
        return msgspec.msgpack.encode([_DELTA, self._number, patch])


class FrameDecoder:
    """Reads the frames of one stream, in their order."""

    def __init__(self) -> None:
        self._patcher = Patcher(Observation)
        self._last: Observation | None = None
        self._number = 0

    def decode(self, payload: bytes) -> Observation:
        """Return the observation of the frame.

        Raises:
            RemoteError: The frame is an error that the other side met.
            TelemetryError: It cannot be read; from here on only a key frame can.
        """
        last, self._last = self._last, None
        kind, body = _open_payload(payload)
        if kind == _KEY and len(body) == 2:
            self._number = 0
            seen = self._apply(None, body[1], fields=body[0])
        elif kind == _DELTA and len(body) == 2:
            if last is None or body[0] != self._number + 1:
                raise TelemetryError("a frame is missing before this one.")
            self._number += 1
            seen = self._apply(last, body[1])
        else:
            raise TelemetryError(f"a frame of kind {kind!r} does not belong here.")
        self._last = seen
        return seen

    def _apply(self, last: Observation | None, patch: object, fields: object = None) -> Observation:
        try:
            if fields is not None:
                self._patcher.translate(fields)
            seen: Observation = self._patcher.apply(last, patch)
        except PatchError as error:
            raise TelemetryError(f"a frame cannot be read: {error}.") from error
        if not is_job_id(seen.job.id):  # viewers name files by it
            shown = clean(seen.job.id, 100)
            raise TelemetryError(f"a frame cannot be read: {shown!r} is no id of a job.")
        return seen


class FrameScanner:
    """Returns when each frame of one stream was made, in their order; decodes nothing else."""

    def __init__(self) -> None:
        self._place: int | None = None
        self._time = 0.0

    def scan(self, payload: bytes) -> tuple[float, bool]:
        """Return the time of a frame, and whether it is a key frame.

        Raises:
            TelemetryError: It is no frame of an observation.
        """
        try:
            kind, first, patch = _SCANNED.decode(payload)
            if kind == _KEY:
                names = msgspec.msgpack.decode(first, type=dict[str, list[str]])
                self._place = names[Observation.__name__].index("time")
            elif kind != _DELTA or self._place is None:
                raise TelemetryError(f"a frame of kind {kind} does not belong here.")
            # A field that a delta leaves out is unchanged.
            fields = _PATCH.decode(patch)
            for number, value in zip(fields[::2], fields[1::2], strict=True):
                if msgspec.msgpack.decode(number, type=int) == self._place:
                    self._time = msgspec.msgpack.decode(value, type=float)
                    break
        except (msgspec.DecodeError, RecursionError, KeyError, ValueError) as error:
            raise TelemetryError(f"a frame cannot be read: {clean(error)}.") from error
        return self._time, kind == _KEY


def encode_error(message: str) -> bytes:
    """Return the payload that says why there is nothing to show."""
    return msgspec.msgpack.encode([_ERROR, clean(message)])


def encode_jobs(jobs: Sequence[JobSummary]) -> bytes:
    """Return the payload that lists jobs."""
    return msgspec.msgpack.encode([_JOBS, list(jobs)])


def decode_jobs(payload: bytes) -> list[JobSummary]:
    """Return the jobs of a frame that lists them.

    Raises:
        RemoteError: The frame is an error that the other side met.
        TelemetryError: It cannot be read.
    """
    kind, body = _open_payload(payload)
    if kind != _JOBS or len(body) != 1:
        raise TelemetryError("a frame that is to list jobs holds something else.")
    try:
        return msgspec.convert(body[0], list[JobSummary])
    except (msgspec.ValidationError, RecursionError) as error:
        raise TelemetryError(f"a list of jobs cannot be read: {clean(error)}.") from error


def encode_hello(hello: Hello) -> bytes:
    """Return the payload that introduces a job."""
    return msgspec.msgpack.encode([_HELLO, hello])


def decode_hello(payload: bytes) -> Hello:
    """Return the header of a stream.

    Raises:
        RemoteError: It is an error that the other side met.
        TelemetryError: It cannot be read.
    """
    kind, body = _open_payload(payload)
    if kind != _HELLO or len(body) != 1:
        raise TelemetryError("a frame that is to introduce a job holds something else.")
    try:
        return msgspec.convert(body[0], Hello)
    except (msgspec.ValidationError, RecursionError) as error:
        raise TelemetryError(f"a job's introduction cannot be read: {clean(error)}.") from error


def magic_line() -> bytes:
    """Return the line that comes before the first frame."""
    return MAGIC + f"{VERSION} {_own_version()}\n".encode("ascii", "replace")


def check_magic(line: bytes) -> None:
    """Check the line before the first frame.

    Raises:
        VersionError: It introduces frames of another version.
        TelemetryError: It introduces no frames.
    """
    words = line.split()
    if not line.startswith(MAGIC) or not line.endswith(b"\n") or len(words) < 2:
        raise TelemetryError("these are no frames of boltmesh.")
    if words[1] != str(VERSION).encode():
        theirs = clean(b" ".join(words[2:3]).decode("ascii", "replace"), 40) or "another"
        number = clean(words[1].decode("ascii", "replace"), 20)
        raise VersionError(
            f"boltmesh {theirs} there writes frames of version {number}, and boltmesh "
            f"{_own_version()} here reads version {VERSION}. Use the same boltmesh on both sides."
        )


def read_magic(stream: BinaryIO) -> None:
    """Read and check the magic line at the very beginning of a file."""
    check_magic(stream.readline(MAX_MAGIC_BYTES))


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """Write one frame; does not flush.

    Raises:
        TelemetryError: It is too long for any reader.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise TelemetryError(
            f"a frame of {len(payload) >> 20} MiB is more than the {MAX_FRAME_BYTES >> 20} MiB "
            f"that a reader takes."
        )
    stream.write(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next payload, or None where the stream ends between two frames.

    Raises:
        TelemetryError: The stream ends within a frame, or what it holds is damaged.
    """
    header = _read(stream, _HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise TelemetryError("the stream ends within a frame.")
    length, checksum = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise TelemetryError(f"a frame that claims {length} bytes is none.")
    payload = _read(stream, length)
    if len(payload) < length:
        raise TelemetryError("the stream ends within a frame.")
    if zlib.crc32(payload) != checksum:
        raise TelemetryError("a frame is damaged: its checksum does not match.")
    return payload


def _own_version() -> str:
    try:
        return metadata.version("boltmesh")
    except metadata.PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read exactly ``size`` bytes, or the remaining ones; a claimed length reserves no memory."""
    parts = []
    while size and (part := stream.read(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _open_payload(payload: bytes) -> tuple[int, list[Any]]:
    try:
        content = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise TelemetryError(f"a frame cannot be read: {clean(error)}.") from error
    if not isinstance(content, list) or not content or type(content[0]) is not int:
        raise TelemetryError("a frame cannot be read: it has no kind.")
    kind, body = content[0], content[1:]
    if kind == _ERROR and len(body) == 1:
        raise RemoteError(clean(body[0]))
    return kind, body
