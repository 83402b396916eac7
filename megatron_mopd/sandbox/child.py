"""The parent of one sandboxed program; runs as a script, imports nothing of this project.

    python -I -S child.py STATUS_FD TIMEOUT_S CPU_S MEMORY_BYTES OUTPUT_BYTES COMMAND...

It asks the kernel for namespaces of its own (user, network, process ids, IPC), in which there is no network and nothing
outlives the program; forks; limits the child and becomes COMMAND there. It kills the child at the time-out, and writes
one line to STATUS_FD: how the child ended, and whether the namespaces were granted.
"""

import ctypes
import os
import resource
import signal
import sys

NEWIPC, NEWUSER, NEWPID, NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
MAX_PROCESSES, MAX_FILES = 64, 64


def main() -> None:
    status_fd, timeout_s, cpu_s, memory_bytes, output_bytes = (int(word) for word in sys.argv[1:6])
    os.set_inheritable(status_fd, False)
    isolated = isolate()
    child = os.fork()
    if child == 0:
        limit(cpu_s, memory_bytes, output_bytes, isolated)
        os.execve(sys.argv[6], sys.argv[6:], {"PATH": os.defpath})
    ended = wait(child, timeout_s)
    os.write(status_fd, f"{ended} {int(isolated)}".encode())


def isolate() -> bool:
    """Whether the kernel lets this user have namespaces; without them the program has the machine's network."""
    uid, gid = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(NEWUSER | NEWPID | NEWNET | NEWIPC) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def limit(cpu_s: int, memory_bytes: int, output_bytes: int, isolated: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: output_bytes,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if isolated:  # elsewhere it would count all processes of the user
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def wait(child: int, timeout_s: int) -> str:
    """The child's exit code, "killed" by a signal, or "timeout"."""

    def overdue(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, overdue)
    signal.alarm(timeout_s)
    try:
        _, code = os.waitpid(child, 0)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "timeout"
    signal.alarm(0)
    return str(os.WEXITSTATUS(code)) if os.WIFEXITED(code) else "killed"


if __name__ == "__main__":
    main()
