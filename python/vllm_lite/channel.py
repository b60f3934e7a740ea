"""The line between a parent and one child process: a socket pair carrying JSON lines both ways.

The child ends when the parent's end closes, whatever the parent died of and whatever the child is
doing (``_core.exit_when_hung_up``, a thread that needs no interpreter). PR_SET_PDEATHSIG is not
used: it fires when the *thread* that started the child ends, and an engine may be made in any
thread.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vllm_lite import _core, log

logger = logging.getLogger(__name__)


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> dict[str, Any]:
        """Blocks for the next message. Raises ChannelClosed at the end."""
        while b"\n" not in self._buffer:
            try:
                data = self._socket.recv(65536)
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def pending(self) -> bool:
        """A whole message has already been read from the socket."""
        return b"\n" in self._buffer


class Child:
    """A child process started as ``python -m <module>`` and the parent's end of its channel.

    ``directory``: the child removes it if the parent ends without having done so.
    """

    def __init__(
        self,
        role: str,
        module: str,
        pass_fds: tuple[int, ...] = (),
        directory: Path | None = None,
    ) -> None:
        self.role = role
        ours, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-P", "-m", module, "--channel-fd", str(theirs.fileno())]
            if directory is not None:
                command += ["--directory", str(directory)]
            # A session of its own: a terminal's Ctrl-C goes to the parent alone, which then ends
            # its children in order.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _python_path()},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = Channel(ours)

    def describe_exit(self, timeout: float = 5.0) -> str:
        """How the process ended, for which its channel has closed; kills it if it lives on."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"the {self.role} closed its channel and did not end"
        if code < 0:
            return f"the {self.role} was killed by {signal.Signals(-code).name}"
        return f"the {self.role} exited with code {code}"

    def stop(self, timeout: float = 2.0) -> None:
        """Closes the channel, on which the child exits; kills it if it does not."""
        self.channel.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def open_standard_fds() -> None:
    """Opens on /dev/null what of standard input, output and error the program was started without.

    Otherwise the next descriptors get these numbers, and a child's are replaced at its start.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(fd, True)


def stop_all(children: list[Child]) -> None:
    """Ends children, all at the same time."""
    for child in children:
        child.channel.close()
    for child in children:
        child.stop()


def _python_path() -> str:
    """PYTHONPATH for a child: it finds what this process finds, however that came by its path.

    An empty entry, the current directory, is left out: the child may not run a file that lies
    there.
    """
    package_parent = str(Path(__file__).resolve().parents[1])
    entries = [os.path.abspath(entry) for entry in sys.path if entry]
    return os.pathsep.join(dict.fromkeys([*entries, package_parent]))


def run_child(role: str, serve: Callable[[Channel], None]) -> NoReturn:
    """A child's main program: ``serve(channel)``, and its failure told to the parent."""
    channel = connect_to_parent()
    log.configure(role)
    code = 0
    try:
        serve(channel)
    except (ChannelClosed, EOFError):
        pass  # the parent is gone
    except Exception as error:
        # A sentence for the user is enough for bad input; anything else is a bug.
        level = logging.DEBUG if isinstance(error, (ValueError, OSError)) else logging.ERROR
        logger.log(level, "the %s failed", role, exc_info=True)
        report_failure(channel, error)
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    # No interpreter shutdown: threads may be blocked in C, and all that is held goes with the
    # process.
    os._exit(code)


def report_failure(channel: Channel, error: BaseException) -> None:
    """Tells the parent why this process is about to end."""
    with contextlib.suppress(ChannelClosed):
        channel.send({"event": "error", "message": str(error) or type(error).__name__})


def connect_to_parent() -> Channel:
    """In a child: the channel named on the command line; the process now ends with the parent."""
    parser = argparse.ArgumentParser(
        description="A child process of vllm_lite; not for use by hand."
    )
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--directory", default="")
    options = parser.parse_args()
    fd = options.channel_fd
    os.set_inheritable(fd, False)
    _core.exit_when_hung_up(fd, 0, options.directory)
    return Channel(socket.socket(fileno=fd))
