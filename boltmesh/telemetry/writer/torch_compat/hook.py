"""Shows every collective of this process to its observers.

Every collective and point-to-point call, from Python or from C++, is an operator of the ``c10d``
namespace. A kernel at the dispatch key ``BackendSelect`` sees each of them on every device, in
inference mode and in autograd's threads, and passes the call on to the keys below. It never runs
a kernel object itself: ``call_boxed`` keeps the interpreter lock while it waits, and gloo's
threads need that lock to free tensors, so that deadlocks.

[Note: When a collective is done]
A call that the caller waits for is waited for in the kernel; the caller's own wait then returns at
once. For any other call gloo's future says when it is done, by a callback in one of gloo's threads.
That thread needs the interpreter lock, and every microsecond for which it holds it delays the
thread that trains: so the callback is C code only, ``__getitem__`` of a ``defaultdict`` whose
default is the monotonic clock, which stores the time under the call's number. ``settle`` passes the
times on, in a thread that runs Python anyway, at the next collective and wherever a phase changes.
Until then such a collective looks unfinished. The future is not kept: it holds the tensors, and
what is gathered next would go to new pages, which the system has to clear first.

Used on torch 2.11 and 2.13. What is missing in another version is found at install, and then
nothing is counted and the reason is kept: a wrong number is worse than none.
"""

import contextlib
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from boltmesh.errors import TelemetryError
from boltmesh.telemetry.writer.torch_compat.operators import (
    ANY_SOURCE,
    PAYLOAD,
    PEER_ARGUMENTS,
    UNTIMED,
    lies_on_host,
    payload_bytes,
)

Ticket = tuple[int, ...]

_MAX_UNSOURCED: Final = 64
"""Any-source receives whose source has not been read yet; older ones are given up."""

_NO_TIMEOUT: Final = timedelta(0)

_KEY: Final = "BackendSelect"
_ON_DONE: Final = torch._C.Future.add_done_callback
_SELF_TEST_GROUP: Final = "boltmesh-self-test"


class CollectiveObserver(Protocol):
    """Observer of collectives. Called from any thread; must not raise."""

    def enqueued(
        self,
        operator: str,
        group: dist.ProcessGroup,
        payload_bytes: int,
        is_synchronous: bool,
        is_timed: bool,
        peer: int | None = None,
        *,
        is_wait_told: bool = False,
    ) -> Ticket | None:
        """Take note of a call before it runs; return the ticket for the other methods.

        With ``is_wait_told`` only ``waited`` follows. Otherwise exactly one of ``returned`` (not
        timed) and ``completed`` or ``lost`` (timed) does, unless a timed call fails. ``peer`` is
        the other side of a point-to-point call, as a rank within the group, or ``ANY_SOURCE``;
        ``found_peer`` may follow then.
        """

    def returned(self, ticket: Ticket) -> None:
        """Take note that a call whose completion cannot be seen was launched, or failed."""

    def completed(self, ticket: Ticket, done_ns: int) -> None:
        """Take note of when, on the monotonic clock, a call was done."""

    def waited(self, ticket: Ticket, begin_ns: int, done_ns: int) -> None:
        """Take note of when the caller began to wait for a call, and when it had its result."""

    def lost(self, ticket: Ticket) -> None:
        """Take note that the completion of a call will not be seen after all."""

    def found_peer(self, ticket: Ticket, group: dist.ProcessGroup, peer: int) -> None:
        """Note the source of an any-source receive, as a rank within the group."""


Noted = list[tuple[CollectiveObserver, Ticket]]
"""Observers of a call, and the ticket that each gets with later events."""


class CollectiveHook:
    """The one set of kernels of this process, shared by all observers.

    A second registration at the same operator and key would replace the first and silence it, so
    observers come and go while the kernels are installed once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: torch.library.Library | None = None
        self._observers: tuple[CollectiveObserver, ...] = ()
        self.done: defaultdict[int, int] = defaultdict(time.monotonic_ns)
        """When each call was done, by its number, until it is reported."""
        self._note_done: Callable[[int], int] = self.done.__getitem__
        self._awaited: dict[int, Noted] = {}
        self._numbers = itertools.count()
        self._unsourced: deque[_Unsourced] = deque(maxlen=_MAX_UNSOURCED)

    @property
    def is_installed(self) -> bool:
        """Whether kernels of ours are in torch's dispatcher."""
        return self._library is not None

    def attach(self, observer: CollectiveObserver) -> None:
        """Start to tell ``observer`` of every collective of this process.

        Raises:
            TelemetryError: This torch lacks something, so nothing can be counted.
        """
        with self._lock:
            if not self.is_installed:
                self._install()
            self._observers = (*self._observers, observer)

    def detach(self, observer: CollectiveObserver) -> None:
        """Stop telling ``observer``; remove the kernels with the last one."""
        with self._lock:
            self.settle()
            self.find_sources()
            self._observers = tuple(each for each in self._observers if each is not observer)
            if not self._observers:
                self._uninstall()

    # Operators that go past the dispatcher.

    def note_message(
        self, operator: str, group: dist.ProcessGroup, num_bytes: int, peer: int
    ) -> None:
        """Tell the observers of a message to or from a rank that goes past the dispatcher.

        To be called before it is posted: a call that hangs has to be known.
        """
        for observer, ticket in self._notify(operator, group, num_bytes, False, False, peer):
            observer.returned(ticket)

    def post(
        self, operator: str, group: dist.ProcessGroup, num_bytes: int, post: Callable[[], dist.Work]
    ) -> dist.Work:
        """Tell the observers of a collective over the CPU that goes past the dispatcher.

        Args:
            operator: Its name in the dispatcher, without the last underscore.
            group: This rank's.
            num_bytes: Its payload.
            post: Posts it.

        Returns:
            Work that the caller has to wait for; the wait is reported, too.
        """
        if self.done:
            self.settle()
        noted = self._notify(operator, group, num_bytes, False, True, is_wait_told=True)
        work = post()
        return _ObservedWork(work, noted) if noted else work

    def settle(self) -> None:
        """Tell the observers which calls are done. See [Note: When a collective is done]."""
        done = self.done
        while done:
            try:
                number, done_ns = done.popitem()
            except KeyError:  # another thread was faster
                return
            for observer, ticket in self._awaited.pop(number, ()):
                observer.completed(ticket, done_ns)

    def find_sources(self) -> None:
        """Report the sources of any-source receives that the caller has waited for."""
        for _ in range(len(self._unsourced)):
            try:
                each = self._unsourced.popleft()
            except IndexError:  # another thread was faster
                return
            if not each.work.is_completed():
                self._unsourced.append(each)
                continue
            with contextlib.suppress(RuntimeError):  # a backend that does not tell
                peer = each.work._source_rank()
                for observer, ticket in each.noted:
                    observer.found_peer(ticket, each.group, peer)

    def _notify(
        self,
        operator: str,
        group: dist.ProcessGroup,
        num_bytes: int,
        is_synchronous: bool,
        is_timed: bool,
        peer: int | None = None,
        *,
        is_wait_told: bool = False,
    ) -> Noted:
        """Notify the observers of a call before it runs; return those that get more of it."""
        noted = []
        for observer in self._observers:
            ticket = observer.enqueued(
                operator,
                group,
                num_bytes,
                is_synchronous,
                is_timed,
                peer,
                is_wait_told=is_wait_told,
            )
            if ticket is not None:
                noted.append((observer, ticket))
        return noted

    def _time(self, work: dist.Work, noted: Noted, is_synchronous: bool) -> None:
        """Notify the observers when a call is done."""
        if not is_synchronous:
            self._await(work, noted)
            return
        work.wait()  # as the caller does next
        done_ns = time.monotonic_ns()
        for observer, ticket in noted:
            observer.completed(ticket, done_ns)

    def _await(self, work: dist.Work, noted: Noted) -> None:
        number = next(self._numbers)
        self._awaited[number] = noted
        # Called with the future, which ``next`` takes for its default and does not return: the map
        # has one value, the time.
        note_done = partial(next, map(self._note_done, (number,)))
        try:
            _ON_DONE(work.get_future(), note_done)  # its Python wrapper only adds to the cost
        except (RuntimeError, TypeError):  # a backend without futures, gloo has them
            self._awaited.pop(number, None)
            for observer, ticket in noted:
                observer.lost(ticket)

    def _install(self) -> None:
        try:
            kernels = {name: self._kernel(name, index) for name, index in PAYLOAD.items()}
            self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
            for name, kernel in kernels.items():
                self._library.impl(name, kernel, _KEY, with_keyset=True)  # type: ignore[no-untyped-call]
            self._test_itself()
        except TelemetryError:
            self._uninstall()
            raise
        except Exception as error:
            self._uninstall()
            raise TelemetryError(
                f"torch {torch.__version__} does not let its collectives be observed: {error}"
            ) from error

    def _uninstall(self) -> None:
        library, self._library = self._library, None
        self._awaited.clear()
        self._unsourced.clear()
        self.done.clear()
        if library is not None:
            library._destroy()  # type: ignore[no-untyped-call]

    def _kernel(self, name: str, payload_at: int | None) -> Callable[..., Any]:
        packet = getattr(torch.ops.c10d, name, None)
        if packet is None:
            raise TelemetryError(f"torch {torch.__version__} has no operator c10d::{name}")
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", _KEY):
            raise TelemetryError(f"something else already observes c10d::{name}")
        arguments = [each.name for each in packet.default._schema.arguments]
        if "process_group" not in arguments:
            raise TelemetryError(
                f"c10d::{name} of torch {torch.__version__} has no process_group argument"
            )
        group_at = arguments.index("process_group")
        # An argument that equals its default (True) is left out of the call.
        wait_at = arguments.index("async_op") if "async_op" in arguments else len(arguments)
        redispatch = packet.default._handle.redispatch_boxed
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
        operator = name.rstrip("_")
        unbox, unbox_work = dist.ProcessGroup.unbox, dist.Work.unbox
        plain, strided = torch.Tensor, torch.strided
        has_future = name not in UNTIMED
        if name in PEER_ARGUMENTS:
            return self._peer_kernel(name, arguments, redispatch, after)

        def kernel(keys: Any, *args: Any) -> Any:
            # Sizes are read before the call, which may resize or free.
            value = None if payload_at is None else args[payload_at]
            if type(value) is list and len(value) == 1:
                value = value[0]
            if type(value) is plain and value.layout is strided:
                # The case of FSDP2's gathers, DDP's reductions and Lightning's broadcasts, many
                # times a step: no call is made here, for each costs several times this branch.
                size, is_on_host = value.nbytes, value.is_cpu
            else:
                size = 0 if value is None else payload_bytes(value)
                is_on_host = lies_on_host(args)
            is_synchronous = len(args) > wait_at and args[wait_at] is False
            # A future on CUDA is complete when the work is launched: it shows nothing.
            is_timed = has_future and is_on_host
            group = unbox(args[group_at])
            if self.done:
                self.settle()
            noted = self._notify(operator, group, size, is_synchronous, is_timed)
            try:
                result = redispatch(keys & after, *args)
            finally:
                if not is_timed:
                    for observer, ticket in noted:
                        observer.returned(ticket)
            if is_timed and noted:
                work = unbox_work(result[-1] if isinstance(result, (tuple, list)) else result)
                self._time(work, noted, is_synchronous)
            return result

        return kernel

    def _peer_kernel(
        self, name: str, arguments: list[str], redispatch: Callable[..., Any], after: Any
    ) -> Callable[..., Any]:
        """Return the kernel of a point-to-point operator, whose completion cannot be seen."""
        peer_name = PEER_ARGUMENTS[name]
        if peer_name is not None and peer_name not in arguments:
            raise TelemetryError(
                f"c10d::{name} of torch {torch.__version__} has no {peer_name} argument"
            )
        peer_at = arguments.index(peer_name) if peer_name is not None else None
        group_at = arguments.index("process_group")
        operator = name.rstrip("_")
        unbox = dist.ProcessGroup.unbox
        plain, strided = torch.Tensor, torch.strided

        def kernel(keys: Any, *args: Any) -> Any:
            value = args[0]
            if type(value) is list and len(value) == 1:
                value = value[0]
            if type(value) is plain and value.layout is strided:
                size = value.nbytes  # no call, as above: pipelines come here many times a step
            else:
                size = payload_bytes(value)
            group = unbox(args[group_at])
            peer = ANY_SOURCE if peer_at is None else args[peer_at]
            if self.done:
                self.settle()
            noted = self._notify(operator, group, size, False, False, peer)
            try:
                result = redispatch(keys & after, *args)
            finally:
                for observer, ticket in noted:
                    observer.returned(ticket)
            if peer_at is None and noted:
                self._unsourced.append(_Unsourced(dist.Work.unbox(result), group, noted))
            return result

        return kernel

    def _test_itself(self) -> None:
        probe = _SelfTest()
        self._observers = (probe,)
        try:
            group = dist.ProcessGroup(torch._C._distributed_c10d.HashStore(), 0, 1)
            fake = torch._C._distributed_c10d.FakeProcessGroup._create_internal(0, 1)
            custom = dist.ProcessGroup.BackendType.CUSTOM
            group._register_backend(torch.device("cpu"), custom, fake)
            group._set_default_backend(custom)
            group._set_group_name(_SELF_TEST_GROUP)  # type: ignore[arg-type]
            group.allreduce([torch.zeros(3)], dist.AllreduceOptions()).wait()
            self.settle()
        finally:
            self._observers = ()
        if probe.seen != [("allreduce", _SELF_TEST_GROUP, 12)] or probe.num_completed != 1:
            raise TelemetryError(
                f"torch {torch.__version__} shows one all-reduce of 12 bytes as {probe.seen}"
            )


class _ObservedWork(dist.Work):
    """A call whose observers are notified of the wait for it."""

    def __init__(self, work: dist.Work, noted: Noted) -> None:
        super().__init__()
        self._work = work
        self._noted = noted

    @override
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        begin_ns = time.monotonic_ns()
        result = self._work.wait(timeout)
        done_ns = time.monotonic_ns()
        noted, self._noted = self._noted, []
        for observer, ticket in noted:
            observer.waited(ticket, begin_ns, done_ns)
        return result

    @override
    def is_completed(self) -> bool:
        return self._work.is_completed()


class _Unsourced(NamedTuple):
    """An any-source receive whose source rank has not been read yet."""

    work: dist.Work
    group: dist.ProcessGroup
    noted: Noted


class _SelfTest:
    """Notes what the self-test shows it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.num_completed = 0

    def enqueued(
        self, operator: str, group: dist.ProcessGroup, payload_bytes: int, *_: Any, **__: Any
    ) -> Ticket | None:
        self.seen.append((operator, group.group_name, payload_bytes))
        return (0,)

    def returned(self, ticket: Ticket) -> None:
        pass

    def completed(self, ticket: Ticket, done_ns: int) -> None:
        self.num_completed += 1

    def waited(self, ticket: Ticket, begin_ns: int, done_ns: int) -> None:
        pass

    def lost(self, ticket: Ticket) -> None:
        pass

    def found_peer(self, ticket: Ticket, group: dist.ProcessGroup, peer: int) -> None:
        pass


COLLECTIVES: Final = CollectiveHook()
"""The hook of this process."""
