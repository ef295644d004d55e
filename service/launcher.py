"""The launcher: a process that has imported the modules of all roles, and forks the roles.

supervisor (imports, frozen heap) ──fork──▶ launcher ──fork──▶ role

A process shares the supervisor's pages until it writes to them, and a role starts without importing. The
launcher runs no event loop, has no threads and opens no files. It ends when its socket closes, and its
roles end with it (`fleetcast.fleet.process.watch_parent`). Without a launcher, the supervisor starts each
role as a new program.

    to the launcher    the name of a role, with the pipe of its report (`fleetcast.fleet.process.report_ready`)
    from the launcher  {"pid": 7} or {"error": "why not"} for each name in order,
                       {"pid": 7, "code": -9} for each end
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleetcast.fleet.process import PARENT_VARIABLE, READY_VARIABLE, watch_parent

MESSAGE_BYTES = 4096
ROLE_SIGNALS = {signal.SIGTERM, signal.SIGINT}
ENDED_WITH_LAUNCHER = "the end of the launcher"


class LauncherEndedError(OSError):
    """The error for a request to a launcher that has ended."""

    def __init__(self) -> None:
        super().__init__("the launcher has ended")


@dataclass(slots=True)
class LaunchedProcess:
    """The process of a role that the launcher forked.

    code: a future with the exit code. As in `subprocess`, it is negative if a signal ended the process.
    """

    pid: int
    code: "asyncio.Future[int | str]" = field(repr=False)

    async def wait(self) -> int | str:
        return await asyncio.shield(self.code)

    def terminate(self) -> None:
        """Send SIGTERM. Raises ProcessLookupError if the process has ended."""
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL. Raises ProcessLookupError if the process has ended."""
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        if self.code.done() and isinstance(self.code.result(), int):
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)


class Launcher:
    """The supervisor's connection to the launcher. Use it within one event loop."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        self._line = line
        self.pid = pid
        self._asked: deque[asyncio.Future[LaunchedProcess]] = deque()
        self._running: dict[int, LaunchedProcess] = {}
        self.is_alive = True

    def start_receiving(self) -> None:
        """Begin to receive the launcher's messages in the running event loop."""
        self._line.setblocking(False)
        asyncio.get_running_loop().add_reader(self._line, self._receive_message)

    async def start_role(self, role: str, pipe: int) -> LaunchedProcess:
        """Fork a role that reports through the pipe, and return its process. Raises OSError."""
        if not self.is_alive:
            raise LauncherEndedError
        answer: asyncio.Future[LaunchedProcess] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        try:
            socket.send_fds(self._line, [role.encode()], [pipe])
        except OSError:
            self._asked.remove(answer)
            raise
        return await answer

    def close(self) -> None:
        """End the launcher. Roles that still run end by themselves."""
        with contextlib.suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()

    def _receive_message(self) -> None:
        try:
            data = self._line.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._record_launcher_end()
            return
        message = json.loads(data)
        if "error" in message:  # no memory, too many processes
            self._asked.popleft().set_exception(OSError(message["error"]))
            return
        pid, code = message["pid"], message.get("code")
        if code is None:
            process = self._running[pid] = LaunchedProcess(pid, asyncio.get_running_loop().create_future())
            self._asked.popleft().set_result(process)
        elif pid in self._running:
            self._running.pop(pid).code.set_result(code)

    def _record_launcher_end(self) -> None:
        """Record that the launcher has ended. Its roles end soon, and pending starts fail."""
        self.is_alive = False
        asyncio.get_running_loop().remove_reader(self._line)
        for answer in self._asked:
            answer.set_exception(LauncherEndedError())
        for process in self._running.values():
            process.code.set_result(ENDED_WITH_LAUNCHER)
        self._asked.clear()
        self._running.clear()


def fork_launcher(modules: Iterable[str]) -> Launcher | str:
    """Import the modules of the roles, and fork the launcher.

    Call it before there are threads, event loops or open files. It returns the Launcher in the calling
    process. In each forked process, it returns the name of the role that the process must run.
    """
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to every page, here and there
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None where the file descriptor was closed before this program began
            stream.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Launcher(ours, pid)
    ours.close()
    os.setsid()  # Ctrl-C is for the supervisor, which ends the roles
    signal.pthread_sigmask(signal.SIG_BLOCK, ROLE_SIGNALS)  # pending in a new role until it has handlers of its own
    return _fork_requested_roles(theirs)


def _fork_requested_roles(line: socket.socket) -> str:
    """Fork each requested role until the socket closes.

    In the new process, return the name of its role.
    """
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([line, wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                wake.recv(MESSAGE_BYTES)
            _report_ends(line)
        if line in ready:
            try:
                name, pipes, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 1)
            except OSError:  # the supervisor was killed before it read our last messages
                name = b""
            if not name:
                os._exit(0)
            if _fork_role(line, pipes[0]):
                for end in (line, wake, woken):
                    end.close()
                return name.decode()


def _fork_role(line: socket.socket, pipe: int) -> bool:
    """Fork, and report the process id. Returns True in the new process."""
    launcher = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(pipe)
        _send_message(line, {"error": f"cannot fork: {error.strerror}"})
        return False
    if pid:
        os.close(pipe)
        _send_message(line, {"pid": pid})
        return False
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ROLE_SIGNALS)
    os.environ[READY_VARIABLE], os.environ[PARENT_VARIABLE] = str(pipe), str(launcher)
    watch_parent()
    return True


def _report_ends(line: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _send_message(line, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _send_message(line: socket.socket, message: Mapping[str, int | str]) -> None:
    with contextlib.suppress(OSError):  # the supervisor is gone: the next read of the socket says so
        line.send(json.dumps(message).encode())
