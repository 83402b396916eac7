"""Runs a server's module, and ends it for certain.

    python child.py LIFELINE_FD GRACE_S KEY_VARIABLE MODULE [arguments ...]

Started by the keeper as the leader of a process group, by path, in the interpreter of the server (SGLang has its own):
it imports nothing of this project. It forks once. The child becomes the server. The leader waits until the server ends
or until the lifeline, a socket whose other end the keeper holds, closes: because the keeper stops the server, or
because the keeper is gone. Then it gives the server GRACE_S seconds to end in order, says its exit code into the
lifeline, and kills the group, itself included. KEY_VARIABLE is for servers that take their key as an argument alone.

Promise: whichever process is killed, no other one of the group stays, if the leader or the keeper is there to see it.
SGLang alone does not promise that: its schedulers ask the kernel to be killed with their parent only after some seconds
of imports. Ranks that torchrun puts in groups of their own watch over it (`ranks.end_with_launcher`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import runpy
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
CHECK_S = 0.25


def main() -> None:
    lifeline, grace_s, key_variable, module, *arguments = sys.argv[1:]
    leader = os.getpid()
    server = os.fork()
    if server:
        watch(server, int(lifeline), float(grace_s))
    else:
        os.close(int(lifeline))
        become_server(leader, key_variable, module, arguments)


def watch(server: int, lifeline: int, grace_s: float) -> None:
    """The leader's work; does not return."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the lifeline decides
    code = None
    while code is None and not select.select([lifeline], [], [], CHECK_S)[0]:
        code = exit_code(server)
    if code is None and grace_s > 0:
        os.kill(server, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while (code := exit_code(server)) is None and time.monotonic() < deadline:
            time.sleep(CHECK_S)
    with contextlib.suppress(OSError):  # the keeper may be gone
        os.write(lifeline, str(code).encode())
    os.killpg(0, signal.SIGKILL)


def exit_code(server: int) -> int | None:
    """None while it runs; 128 + signal where one ended it."""
    pid, status = os.waitpid(server, os.WNOHANG)
    if pid == 0:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def become_server(leader: int, key_variable: str, module: str, arguments: list[str]) -> None:
    """`python -m MODULE`, in this process: its spawned children import that module, as SGLang's must."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:  # gone before the kernel was asked
        os._exit(1)
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # modules of this folder shadow no others
    if key_variable:
        key = os.environ[key_variable]
        arguments = [*arguments, "--api-key", key]  # not in the command line, which everyone on the machine can read
        hide(key)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def hide(key: str) -> None:
    """SGLang logs its arguments, the key among them."""
    make = logging.getLogRecordFactory()

    def without_key(*arguments: object, **options: object) -> logging.LogRecord:
        record = make(*arguments, **options)
        if key in record.getMessage():  # others keep their arguments, which formatters ask for
            record.msg, record.args = record.getMessage().replace(key, "***"), ()
        return record

    logging.setLogRecordFactory(without_key)


if __name__ == "__main__":
    main()
