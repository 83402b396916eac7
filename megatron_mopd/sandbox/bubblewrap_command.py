"""Command lines for bubblewrap: what a program sees of the machine, and the kernel's limits on it.

A program sees /usr, the folders of programs and libraries, an /etc that is made for it, its workspace as /work, /tmp
and /dev/shm, and what the configuration adds; all but the workspace read-only. It has namespaces of its own (user,
mount, process ids, network, IPC, host name, cgroup), no capabilities, no way to more of them, and no environment but
PATH, HOME, LANG and what the configuration adds.

A driver that is root gives all of it up first: programs run as `user`, so that no file of root's opens to them, and the
kernel's limit on processes, which root is exempt from, holds.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_mopd.errors import UserError
from megatron_mopd.sandbox.limits import Limits

BOUND = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
STAGE = "/run"
"""Where a root driver's workspace is seen by the user that it becomes, who may not pass through root's folders."""
STAGING = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
number=0 count=$1
shift
while [ $number -lt $count ]; do
    if [ -d "$1" ]; then mkdir "/run/$number"; else : > "/run/$number"; fi
    mount --bind "$1" "/run/$number"
    number=$((number + 1))
    shift
done
exec "$@"
"""
"""Binds the sources and becomes what follows them. Not one bubblewrap around another: the outer one, which has given up
its capabilities, cannot end another user's process with itself, and a killed driver's programs would go on."""
AGENT = 1000
"""User and group inside."""
LESS_URGENT = ("choom", "-n", "1000", "--", "nice", "-n", "5")
"""The first to end when memory is short, and the last to compute. What root says of memory no other user takes back."""
ETC = {
    "passwd": f"agent:x:{AGENT}:{AGENT}::/work:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n",
    "group": f"agent:x:{AGENT}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
ETC_COPIED = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "services")


@dataclass(frozen=True)
class Bubblewrap:
    """`owner`: whose the files are and who runs, for a driver that is root; None: the driver's own user."""

    program: str
    etc: Path
    limits: Limits
    read_only: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    owner: int | None = None

    def command(self, state: Path, status_fd: int, filter_fd: int, words: Sequence[bytes]) -> list[bytes | str]:
        """Runs `words` over the folders work and tmp of `state`."""
        shown: dict[str, Path] = {"/work": state / "work", "/tmp": state / "tmp", "/etc": self.etc}
        shown |= {str(path): path for path in self.read_only}
        start: list[str] = []
        if self.owner is not None:
            start, shown = self._as_owner(shown)
        ends = ["--json-status-fd", str(status_fd), "--seccomp", str(filter_fd)]
        return [*LESS_URGENT, *start, self.program, *ends, *self._view(shown), "--", *self._limited(), *words]

    def _as_owner(self, shown: Mapping[str, Path]) -> tuple[list[str], dict[str, Path]]:
        """What brings every source to a place that the owner can reach, and becomes the owner."""
        staged = {place: Path(STAGE, str(number)) for number, place in enumerate(shown)}
        stage = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", STAGING, "sh"]
        stage += [str(len(shown)), *map(str, shown.values())]
        become = ["setpriv", f"--reuid={self.owner}", f"--regid={self.owner}", "--clear-groups", "--"]
        return [*stage, *become], staged

    def _view(self, shown: Mapping[str, Path]) -> list[str]:
        words = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(AGENT), "--gid", str(AGENT)]
        words += ["--hostname", "workspace", "--die-with-parent", "--new-session", "--clearenv"]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LANG": "C.UTF-8", **self.environment}
        for name, value in environment.items():
            words += ["--setenv", name, value]
        words += ["--ro-bind", "/usr", "/usr"]
        for name in BOUND:
            path = Path("/", name)
            if path.is_symlink():
                words += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                words += ["--ro-bind", str(path), str(path)]
        # /proc/1 is bubblewrap itself, of the same user: who wrote to its memory could outlive the driver.
        words += ["--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1", "--dev", "/dev"]
        for place, path in shown.items():
            words += ["--bind" if place in ("/work", "/tmp") else "--ro-bind", str(path), place]
        words += ["--bind", str(shown["/tmp"]), "/dev/shm"]
        return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"]

    def _limited(self) -> list[str]:
        limits = self.limits
        held = {
            "cpu": limits.cpu_s,
            "as": limits.address_space_mb << 20,
            "fsize": limits.disk_bytes,
            "nproc": limits.max_processes,
            "nofile": limits.open_files,
            "core": 0,
            "memlock": 0,
            "rtprio": 0,
        }
        return ["prlimit", *(f"--{name}={value}:{value}" for name, value in held.items()), "--"]


def find_program(name: str = "bwrap") -> str:
    """Raises UserError where one of the programs that make a sandbox is absent."""
    for needed, package in (
        (name, "bubblewrap"),
        ("setpriv", "util-linux"),
        ("unshare", "util-linux"),
        ("choom", "util-linux"),
        ("prlimit", "util-linux"),
    ):
        if shutil.which(needed) is None:
            raise UserError(f"workspaces need the program {needed}: apt-get install -y {package}")
    return str(shutil.which(name))


def write_etc(folder: Path) -> None:
    """The /etc of programs: who they are, what finds libraries and alternatives; nothing of this machine's users."""
    folder.mkdir()
    folder.chmod(0o755)
    for name, text in ETC.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
    for name in ETC_COPIED:
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True)
        elif source.is_file():
            shutil.copy(source, folder / name)
