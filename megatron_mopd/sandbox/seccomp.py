"""The filter of system calls for programs in a bubblewrap workspace, as the kernel's own byte code.

Namespaces and limits leave ways out that only this closes: sockets that no network namespace holds (AF_VSOCK reaches
the host of a virtual machine), memory that no limit counts (System V segments outlive their process), writes into other
processes, and the parts of the kernel in which most escapes were found (BPF, io_uring, mounts, keys).

Promise (tests/unit/test_sandbox_escapes.py): a call that is refused fails with EPERM, one through another
architecture's entry ends the program, and all others are as without the filter.
"""

from __future__ import annotations

import platform
import struct
from socket import AF_INET, AF_INET6, AF_UNIX

from megatron_mopd.errors import UserError

AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
SOCKET = {"x86_64": 41, "aarch64": 198}
FAMILIES = (AF_UNIX, AF_INET, AF_INET6)
REFUSED = {  # name: (number on x86_64, on aarch64), from the kernel's unistd.h
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"kcmp": (312, 272), "pidfd_getfd": (438, 438)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "memfd_secret": (447, 447)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)},
    **{"open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442)},
    **{"fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433)},
    **{"unshare": (272, 97), "setns": (308, 268), "syslog": (103, 116), "kexec_load": (246, 104)},
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262)},
    **{"swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60)},
}

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001


def system_call_filter(machine: str | None = None) -> bytes:
    """For `bwrap --seccomp`. Raises UserError on a machine whose system calls are not listed here."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCHITECTURES:
        raise UserError(
            f"bubblewrap workspaces know the system calls of {' and '.join(AUDIT_ARCHITECTURES)}, not of {machine}; "
            "use a remote service of workspaces"
        )
    column = list(AUDIT_ARCHITECTURES).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, X32_BIT),
        (_RETURN, 0, 0, _KILL),
    ]
    for numbers in REFUSED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
    program += [(_EQUAL, 1, 0, SOCKET[machine]), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _ARGUMENT_AT)]
    for family in FAMILIES:
        program += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _EPERM))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
