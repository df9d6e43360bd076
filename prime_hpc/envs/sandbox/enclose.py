"""The walls of a sandbox that a container runtime begins: run by the image's own Python, as a plain script.

    python3 -I -c SOURCE JSON      {"network", "disk", "shm", "shown": [[place here, path inside], ...]}

The runtime has mounted the image and nothing of the node but what is named, in a user namespace of its own. Here the
rest is made, as bubblewrap makes it: process, mount, network, IPC, UTS and cgroup namespaces, the image read-only,
/work and /dev/shm in memory and limited, no further namespaces, no capability. Then this process's child, process 1
inside, takes the guest from the host. Every failure ends it: there is no sandbox that lacks a part.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
REMOUNT, BIND, REC, PRIVATE = 32, 4096, 16384, 1 << 18
DETACH = 2
SET_PDEATHSIG, CAPBSET_DROP, SET_NO_NEW_PRIVS = 1, 24, 38
USER = 1000
NEW = "/tmp"
"""In the image, where the new root is put together."""
OWN = ("proc", "dev", "sys", "tmp", "run", "work", ".shown", ".singularity.d", "singularity", "environment")
"""Of the container's root: what is made here, or says what the node is like."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
OF_NODE = ("passwd", "group", "resolv.conf", "hosts")
"""Below /etc: what container runtimes take from the node."""
OF_NETWORK = ("resolv.conf", "hosts")
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def call(name: str, *arguments: Any) -> None:
    """Call into the C library; OSError where it refuses."""
    if getattr(LIBC, name)(*arguments) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{arguments[:3]}: {os.strerror(error)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount; OSError where that is refused."""
    call("mount", source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)


def map_user(uid: int, gid: int) -> None:
    """In a new user namespace be its user 1000."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {uid} 1"), ("gid_map", f"{USER} {gid} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)


def bind(source: str, target: str) -> None:
    """Show a file or folder, with what is mounted in it, read-only and without devices."""
    target = os.path.realpath(target)
    if not target.startswith(NEW + "/"):
        raise OSError(f"the image leads {target} out of the sandbox")
    mount(source, target, "", BIND | REC)
    found = [(place, row) for place, row in mounts() if place == target or place.startswith(target + "/")]
    for place, row in found:
        noexec = NOEXEC if "noexec" in row[5].split(",") else 0
        mount("", place, "", REMOUNT | BIND | RDONLY | NOSUID | NODEV | noexec)
    if target not in [place for place, _ in found]:
        raise OSError(f"{target} cannot be made read-only")


def mounts() -> list[tuple[str, list[str]]]:
    """Mount points with their rows of mountinfo."""
    with open("/proc/self/mountinfo") as file:
        rows = [line.split() for line in file]
    return [(row[4].encode().decode("unicode_escape").encode("latin-1").decode(), row) for row in rows]


def refuse_what_is_the_node_s() -> None:
    """Nothing is mounted but the image and what was asked for: a site may have its containers show more."""
    known = ["/etc/" + name for name in OF_NODE]
    for place, _ in mounts():
        if place != "/" and place.split("/")[1] not in OWN and place not in known:
            raise OSError(
                f"the node shows {place} in every container (bind path of apptainer.conf, or no overlay): no sandbox "
                "can be made there"
            )


def make_place(path: str, source: str) -> None:
    """Make what a thing is mounted on, and the folders above."""
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    elif not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def show_image(network: bool) -> None:
    """Everything of the image's root, without what its runtime has added of the node."""
    for name in os.listdir("/"):
        path, inside = "/" + name, NEW + "/" + name
        if name in OWN:
            continue
        if os.path.islink(path):
            os.symlink(os.readlink(path), inside)
        elif os.path.isdir(path):
            os.mkdir(inside)
            bind(path, inside)
    for name in OF_NODE:
        inside = NEW + "/etc/" + name
        if os.path.isfile(inside) and not os.path.islink(inside) and not (network and name in OF_NETWORK):
            bind("/dev/null", inside)  # without devices: nobody can open it


def make_devices(shm: int) -> None:
    """Make a /dev with little in it."""
    os.mkdir(NEW + "/dev")
    mount("tmpfs", NEW + "/dev", "tmpfs", NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        if os.path.exists("/dev/" + name):
            make_place(NEW + "/dev/" + name, "/dev/" + name)
            mount("/dev/" + name, NEW + "/dev/" + name, "", BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, NEW + "/dev/" + name)
    for name in ("pts", "shm"):
        os.mkdir(NEW + "/dev/" + name)
    mount("devpts", NEW + "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", NEW + "/dev/ptmx")
    mount("tmpfs", NEW + "/dev/shm", "tmpfs", NOSUID | NODEV, f"mode=755,size={shm}")
    mount("", NEW + "/dev", "", REMOUNT | BIND | RDONLY | NOSUID)


def enter_root(order: dict[str, Any]) -> None:
    """Put the new root together and have no other."""
    refuse_what_is_the_node_s()
    mount("none", "/", "", REC | PRIVATE)
    mount("tmpfs", NEW, "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    show_image(order["network"])
    os.mkdir(NEW + "/proc")
    mount("proc", NEW + "/proc", "proc", NOSUID | NODEV | NOEXEC)
    make_devices(order["shm"])
    os.mkdir(NEW + "/work")
    mount("tmpfs", NEW + "/work", "tmpfs", NOSUID | NODEV, "mode=755,size={}".format(order["disk"]))
    os.mkdir(NEW + "/work/.tmp")
    os.symlink("work/.tmp", NEW + "/tmp")
    for place, path in order["shown"]:
        make_place(NEW + path, place)
        bind(place, NEW + path)
    mount("", NEW, "", REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir(NEW)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/work")


def raise_loopback() -> None:
    """Have the only interface of a new network namespace work."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def give_up_powers() -> None:
    """No further user namespaces, no capability, no way to get one."""
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("1")
    call("unshare", NEWUSER)
    map_user(USER, USER)
    for capability in range(64):
        if LIBC.prctl(CAPBSET_DROP, capability, 0, 0, 0) == -1:
            break
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    with open("/proc/self/status") as file:
        held = [line for line in file if line.startswith("Cap") and int(line.split()[1], 16)]
    if held:
        raise OSError(f"capabilities are left: {held}")


def become_first(order: dict[str, Any]) -> None:
    """In process 1 of the sandbox: never returns."""
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    enter_root(order)
    call("sethostname", b"sandbox", 7)
    if not order["network"]:
        raise_loopback()
    give_up_powers()
    exec(order["boot"], {"__name__": "boot"})


def main() -> None:
    """Make the sandbox, wait for its end."""
    order = json.loads(sys.argv[1])
    call("prctl", SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.closerange(3, 65536)
    uid, gid = os.getuid(), os.getgid()
    own = 0 if order["network"] else NEWNET
    call("unshare", NEWUSER | NEWNS | NEWPID | NEWIPC | NEWUTS | NEWCGROUP | own)
    map_user(uid, gid)
    first = os.fork()
    if first == 0:
        try:
            become_first(order)
        except BaseException as error:  # noqa: BLE001 - said to the host, and there is no sandbox
            os.write(2, f"sandbox: {error}\n".encode())
        finally:
            os._exit(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.waitpid(first, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
