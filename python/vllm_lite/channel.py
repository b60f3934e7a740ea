"""The line between a parent and one child process: a socket pair carrying JSON lines both ways.

The child ends when the parent's end closes, whatever the parent died of and whatever the child is doing
(``_core.exit_when_hung_up``, a thread that needs no interpreter). PR_SET_PDEATHSIG is not used: it fires when the
*thread* that started the child ends, and an engine may be made in any thread.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from vllm_lite import _core


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
    """A child process started as ``python -m <module>`` and the parent's end of its channel."""

    def __init__(self, role: str, module: str, pass_fds: tuple[int, ...] = ()) -> None:
        self.role = role
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", module, "--channel-fd", str(theirs.fileno())]
            # A session of its own: a terminal's Ctrl-C goes to the parent alone, which then ends its children in order.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                start_new_session=True,
            )
        self.channel = Channel(ours)

    def describe_exit(self) -> str:
        """How the process ended; waits for it."""
        code = self.process.wait()
        if code < 0:
            return f"the {self.role} was killed by {signal.Signals(-code).name}"
        return f"the {self.role} exited with code {code}"

    def stop(self, timeout: float = 5.0) -> None:
        """Closes the channel, on which the child exits; kills it if it does not."""
        self.channel.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def connect_to_parent() -> Channel:
    """In a child: the channel named on the command line, armed so that the process ends with the parent."""
    parser = argparse.ArgumentParser(description="A child process of vllm_lite; not for use by hand.")
    parser.add_argument("--channel-fd", type=int, required=True)
    fd = parser.parse_args().channel_fd
    os.set_inheritable(fd, False)
    _core.exit_when_hung_up(fd, 0)
    return Channel(socket.socket(fileno=fd))
