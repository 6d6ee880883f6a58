"""Processes, on several hosts or one, that hold a model together: they meet, agree, watch each other and leave.

jaxlib aborts a process whose neighbour does not come, dies, or leaves at another time. So the processes meet on sockets
of their own, at the address of JAX's coordinator, and only a complete group calls `jax.distributed.initialize`. The
sockets stay open: process 0 says by them what it alone knows (`agreed`), and whoever sees one close ends with one line.
"""

import atexit
import contextlib
import hashlib
import json
import os
import queue
import re
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, NoReturn

from specsparse.errors import UserError, refuse

SECONDS = "SPECSPARSE_JOIN_SECONDS"
"""The environment variable with the seconds that processes wait for each other at the beginning, 60 without it."""
BEAT_S, SILENCE_S = 5.0, 60.0
"""Seconds between two signs of life, and without one until a process is given up."""
_GRACE_S = 3.0  # seconds in which the loss of another process is noticed, once it looks like a fault of this one
_NEVER_S = 10**6  # a limit of jaxlib's that ours come before


class Meeting(NamedTuple):
    """The place where the processes meet, their number, and the index of this one."""

    host: str
    port: int
    count: int
    index: int

    @property
    def at(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the host is this machine to itself; the port is opened for no other machine then."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def place_of(text: str) -> Meeting | None:
    """The place that a text names, None for auto. UserError: another form."""
    if text == "auto":
        return None
    found = re.fullmatch(r"(?:\[([^]\s]+)\]|([^]:,\s[]+)):([0-9]{1,5}),([0-9]{1,6}),([0-9]{1,6})", text)
    place = found and Meeting(found[1] or found[2], *map(int, found.groups()[2:]))
    if place is None or not (0 < place.port < 2**16 and place.index < place.count):
        form = "auto, or HOST:PORT,COUNT,INDEX with INDEX from 0 to COUNT - 1, such as 10.0.0.1:1234,2,0"
        raise UserError(f"distributed={text} must be {form}")
    return place


class _Peer:
    """The socket to another process. A message is a line of JSON; an empty one is a sign of life."""

    def __init__(self, connected: socket.socket, index: int = 0):
        self.socket, self.index = connected, index
        self._lines, self._lock = connected.makefile("rb"), threading.Lock()

    def say(self, *message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # who listens to it finds out that it has gone
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> list[Any]:
        """The next message. OSError: there will be none. ValueError: no process of ours says so."""
        while line := self._lines.readline():
            message = json.loads(line)
            if not isinstance(message, list):
                raise ValueError(message)
            if message:
                return message
        raise ConnectionError


class _Group:
    """The processes that have met; process 0 has a peer for each other one, the others have process 0.

    `kept` is open as long as the group is: the streams of a process that prints nothing, and its folder.
    """

    def __init__(self, place: Meeting, peers: Sequence[_Peer]):
        self.place, self.peers = place, peers
        self._heard: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._leaving, self._gone, self._ending = False, threading.Event(), threading.Lock()
        self.kept = contextlib.ExitStack()
        for peer in peers:
            peer.socket.settimeout(SILENCE_S)
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, *message: Any) -> None:
        for peer in self.peers:
            peer.say(*message)

    def agreed(self, value: Any) -> Any:
        if self.place.index == 0:
            self.say("value", value)
            return json.loads(json.dumps(value))
        return self._heard.get()[1]  # process 0 says nothing else until all others leave

    def begin(self, devices: Sequence[int] | None) -> None:
        """Joins JAX's processes. The standard output is Python's alone, and nobody's but process 0's."""
        import jax

        place = self.place
        _keep_stdout()
        if place.index:
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            for stream in (nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere)):
                self.kept.enter_context(stream)
        os.environ.setdefault("no_grpc_proxy", f"{place.host},127.0.0.1,localhost")  # no proxy leads to the neighbours
        jax.config.update("jax_check_proxy_envs", False)
        jax.config.update("jax_enable_preemption_service", False)  # else SIGTERM ends no process
        try:
            jax.distributed.initialize(
                place.at if place.index == 0 else _relay(place), place.count, place.index, devices,
                cluster_detection_method="deactivate", coordinator_bind_address=place.at if place.is_local else None,
                initialization_timeout=300, heartbeat_timeout_seconds=_NEVER_S,
            )  # fmt: skip
        except RuntimeError as error:
            raise UserError(f"{place.at}: JAX cannot join the processes: {error}") from error

    def leave(self) -> None:
        """Waits until all other processes leave as well."""
        if self.place.index:
            self.say("bye")
        for _ in self.peers:
            while self._heard.get() != ["bye"]:
                pass
        self._leaving = True
        if self.place.index == 0:
            self.say("bye")
        import jax

        jax.distributed.shutdown()
        self._close()
        self.kept.close()

    def fail(self, error: BaseException) -> None:
        """Leaves with an error; a mistake that all processes find is said by process 0 alone."""
        mistake = self._leaving = isinstance(error, UserError | SystemExit | KeyboardInterrupt | BrokenPipeError)
        if self.place.index == 0:
            if not mistake:
                time.sleep(_GRACE_S)  # another's loss looks like a fault of this one, and ends it here
            how = "was stopped" if isinstance(error, KeyboardInterrupt | BrokenPipeError) else "ended with an error"
            self.say("end", f"process 0 of {self.place.count} {how}")
        elif not self._gone.wait(_GRACE_S):
            self.kept.close()
            if isinstance(error, UserError):
                error.args = (f"process {self.place.index}: {error}",)
        self._leaving = True
        self._close()
        codes = ((KeyboardInterrupt, 130), (BrokenPipeError, 0), (UserError, 2), (BaseException, 1))
        code = error.code if isinstance(error, SystemExit) else next(c for kind, c in codes if isinstance(error, kind))
        code = code if isinstance(code, int) else 1
        atexit.register(os._exit, code)  # before JAX's own end, which waits for the others and aborts
        atexit.register(self.kept.close)

    def _close(self) -> None:
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.say()

    def _listen(self, peer: _Peer) -> None:
        why = f"process {peer.index} of {self.place.count} ended before the others"
        try:
            while True:
                message = peer.hear()
                if message[0] == "end":
                    why = message[1]
                    break
                self._heard.put(message)
        except TimeoutError:
            why = f"process {peer.index} of {self.place.count} gave no sign of life for {SILENCE_S:g} s"
        except (OSError, ValueError):
            pass
        self._gone.set()
        if not self._leaving:
            self.end(why)

    def end(self, why: str) -> NoReturn:
        """Ends this process with one line, whatever its other threads wait for."""
        with self._ending:
            self.say("end", why)
            os.write(2, f"specsparse: {why}\n".encode())
            with contextlib.suppress(Exception):
                self.kept.close()
            os._exit(2)


_group: _Group | None = None


def count() -> int:
    """The processes that hold a model together; 1 if nobody has joined others."""
    return 1 if _group is None else _group.place.count


def leads() -> bool:
    """Whether this process is the one that prints and writes files."""
    return _group is None or _group.place.index == 0


def agreed(value: Any) -> Any:
    """Process 0's value, in JSON's types, to all; everybody calls it at the same point, and what others give is unused.

    Steps that a process takes by what it alone has seen, as a time or its standard input, would part it from the rest.
    """
    return value if _group is None else _group.agreed(value)


def end(why: str) -> None:
    """Ends all processes with one line, from any thread."""
    assert _group is not None
    _group.end(why)


def scratch() -> str:
    """A folder for what a process that leads nobody writes; it goes with the process."""
    assert _group is not None
    return _group.kept.enter_context(tempfile.TemporaryDirectory(prefix="specsparse-"))


def mesh_of(mesh: int | None) -> int | None:
    """The devices of a model's mesh: all that the processes have, if nobody says how many."""
    if mesh is not None or count() == 1:
        return mesh
    import jax

    return jax.device_count()


@contextlib.contextmanager
def joined(text: str | None = None, words: Sequence[str] = ()) -> Generator[None]:
    """Joins the processes of `text` as `join` does; at the end of the block the processes leave together.

    In the block of another process than 0 nothing is printed.
    """
    outer = _group  # a block inside another one, or after it, has no group of its own
    try:
        join(text, words)
        yield
    except BaseException as error:
        if _group is not None and outer is None:
            _group.fail(error)
        raise
    else:
        if _group is not None and outer is None:
            _group.leave()


def join(text: str | None, words: Sequence[str] = ()) -> None:
    """Joins the processes that `text` says, once; before JAX looks for a device. None: no others. UserError: another
    form, a port that is taken, or processes that did not come in time or were told other things.

    Args:
        text: auto, or HOST:PORT,COUNT,INDEX.
        words: of the command line, which all have in common but for `text`.
    """
    global _group
    if text is None or _group is not None:
        return
    place, devices = place_of(text), None
    given = os.environ.get(SECONDS, "60")
    if not re.fullmatch("[1-9][0-9]{0,5}", given):
        raise UserError(f"{SECONDS}={given} must be a whole number of seconds")
    if place is None:
        place, devices = _detected(int(given))
    same = hashlib.sha256(json.dumps([word.replace(text, "") for word in words]).encode()).hexdigest()
    peers = _gather(place, same, int(given)) if place.index == 0 else [_reach(place, same, int(given))]
    _group = _Group(place, peers)
    _group.begin(devices)


def _detected(seconds: int) -> tuple[Meeting, Sequence[int] | None]:
    """The place by JAX's own detection, and the devices that this process is to use there, None for all."""
    from jax._src.clusters import ClusterEnv  # by its public name JAX detects and joins at once, and aborts

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            given = os.environ.get("JAX_COORDINATOR_ADDRESS")
            found = ClusterEnv.auto_detect_unset_distributed_params(given, None, None, None, None, seconds)
        except Exception as error:  # of the cluster's own interface
            raise UserError(f"distributed=auto: {error or type(error).__name__}") from error
    address, number, index, devices = found
    if address is None or number is None or index is None:
        more = "; ".join(f" ({warning.message})" for warning in said)
        raise UserError(
            f"distributed=auto: JAX finds no Slurm, Kubernetes, Open MPI or Cloud TPU here{more}: give "
            "HOST:PORT,COUNT,INDEX"
        )
    host, _, port = address.rpartition(":")
    own = "JAX_LOCAL_DEVICE_IDS" in os.environ  # JAX reads it itself
    return Meeting(host.strip("[]"), int(port), number, index), None if own else devices


def _gather(place: Meeting, same: str, seconds: int) -> list[_Peer]:
    """Process 0 waits for all other processes, and returns the connections to them."""
    came: list[_Peer] = []
    try:
        with _opened(place) as listener:
            if place.count > 1:
                waits = f"specsparse: {place.at} waits {seconds} s for {place.count - 1} of {place.count} processes"
                print(waits, file=sys.stderr, flush=True)
            end = time.monotonic() + seconds
            while missing := sorted({*range(1, place.count)} - {peer.index for peer in came}):
                listener.settimeout(max(end - time.monotonic(), 1e-3))
                try:
                    connected, _ = listener.accept()
                except TimeoutError:
                    some = f"{', '.join(map(str, missing[:8]))}{', ..' if len(missing) > 8 else ''} of {place.count}"
                    late = f"process {some} did not come within {seconds} s ({SECONDS} sets another time)"
                    raise UserError(f"{place.at}: {late}") from None
                connected.settimeout(5)
                peer = _Peer(connected)
                try:
                    peer.index, number, theirs = peer.hear()
                except (OSError, ValueError):  # no process of ours
                    connected.close()
                    continue
                came.append(peer)
                refuse({
                    f"process {peer.index} was told of {number} processes, process 0 of {place.count}":
                        number != place.count,
                    f"two processes were given the index {peer.index}": peer.index not in missing,
                    f"process {peer.index} was started with other arguments than process 0": theirs != same,
                }, place.at)  # fmt: skip
    except UserError as error:
        for peer in came:
            peer.say("end", str(error))
        raise
    for peer in came:
        peer.say("go")
    return came


def _opened(place: Meeting) -> socket.socket:
    both = not place.is_local and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or place.host == "::1" else socket.AF_INET
    try:
        address = (place.host if place.is_local else "", place.port)
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise UserError(f"{place.at}: process 0 cannot open its port {place.port}: {why}") from None


def _reach(place: Meeting, same: str, seconds: int) -> _Peer:
    """Another process waits for process 0, and with it for all others."""
    end, late = time.monotonic() + seconds, f"{place.at}: process 0 did not answer within {seconds} s"
    while True:
        try:
            connected = socket.create_connection(place[:2], timeout=max(end - time.monotonic(), 0.1))
            if connected.getsockname() == connected.getpeername():  # a port of this machine, unheard
                connected.close()
                raise ConnectionRefusedError("nobody listens")
            break
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(f"{late} ({error.strerror or error}; {SECONDS} sets another time)") from None
            time.sleep(0.1)
    connected.settimeout(seconds + 5)
    peer = _Peer(connected)
    peer.say(place.index, place.count, same)
    try:
        kind, *why = peer.hear()
    except TimeoutError:
        raise UserError(late) from None
    except (OSError, ValueError):
        raise UserError(f"{place.at}: who answers is no process 0 of specsparse, or it has ended") from None
    if kind != "go":
        raise UserError(f"process 0: {why[0] if why else kind}")
    return peer


def _relay(place: Meeting) -> str:
    """An address of this process whose connections lead to the place, and stay open if that ends: jaxlib aborts where
    its connection to the coordinator ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            while True:
                try:
                    far = socket.create_connection(place[:2])
                    break
                except OSError:  # the coordinator is about to start
                    time.sleep(0.05)
            kept.append((near, far))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    kept: list[tuple[socket.socket, socket.socket]] = []
    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _keep_stdout() -> None:
    """Leaves the standard output to Python: Gloo says there who is connected, amid what is for the user."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.fileno() == 1:
            sys.stdout.flush()
            form = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
            kept = open(os.dup(1), "w", buffering=1 if os.isatty(1) else -1, **form)  # noqa: SIM115
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            sys.stdout = kept
