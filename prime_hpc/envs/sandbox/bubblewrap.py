"""The command that makes a sandbox with bubblewrap, and why a node cannot.

New user, process, mount, network, IPC, UTS and cgroup namespaces, no way to make others inside, no capability. Visible,
read-only: /usr, a few files of /etc, the Python that runs there, what the configuration names. Writable: /work alone
(with /tmp in it) and /dev/shm, both in memory and limited.

Where this process is root's, sandboxes belong to `nobody`, for the kernel limits no process of root's; what a sandbox
may read is then shown to `nobody` in a mount namespace of its own, since a Python below /root is not.
"""

import functools
import os
import re
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.errors import EnvError, EnvNodeError
from prime_hpc.runtime.slurm_warning import DEAF, is_led

LEAST_VERSION = (0, 8, 0)
"""Of bwrap: the first that lets nobody make namespaces inside."""
NOBODY = 65534
SHM_MIB = 16
ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "mime.types",
    "ssl/certs",
    "ssl/openssl.cnf",
)
"""Below /etc: what programs need and what says nothing of users and machines."""
ETC_OF_NETWORK = ("resolv.conf", "hosts", "nsswitch.conf", "services", "protocols", "ca-certificates", "pki")
ANSWER_S = 20.0
"""Longest wait for `bwrap --version` and for the mounts of a stage, on slow file systems."""
PYTHON_LINKS = "/opt/prime-hpc/bin"
"""Inside: `python` and `python3` are this interpreter, also where the system's own `python3` is another version."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A library that starts a thread for each core of the node meets the limits at once."""
_LINKS = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")

_SYSCTLS = (
    ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces is 0"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone is 0"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "kernel.apparmor_restrict_unprivileged_userns is 1 (bwrap needs an AppArmor profile that allows userns)",
    ),
)


def find_bwrap() -> str:
    """Return the path of bwrap. Raises EnvError: it is not installed, too old, or does not answer."""
    path, node = shutil.which("bwrap"), socket.gethostname()
    if path is None:
        raise EnvNodeError(
            f"there is no bubblewrap (bwrap) on {node}: install it on every node that plays environments, as root "
            "(apt-get install bubblewrap, dnf install bubblewrap), or put a bwrap into the PATH of the job"
        )
    said, version = ask_version(path)
    if version < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise EnvNodeError(
            f"{path} on {node} is {said.stdout.strip() or 'no bubblewrap'}; sandboxes need {least} or newer, where "
            "namespaces cannot be made inside"
        )
    return path


def ask_version(program: str) -> tuple["subprocess.CompletedProcess[str]", tuple[int, ...]]:
    """Return what a program says of its version, and its numbers; none where it tells none.
    Raises EnvError: it does not answer."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvError(f"{program} on {socket.gethostname()} does not answer: {error}") from error
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", said.stdout)
    return said, tuple(map(int, numbers.groups())) if numbers else ()


def explain_refusal(said: str) -> str:
    """Return why bwrap could not make a sandbox on this node, and what an administrator can do."""
    reasons = [reason for path, value, reason in _SYSCTLS if _read(path) == value]
    if not reasons and "namespace" not in said and "Operation not permitted" not in said and "setting up" not in said:
        return said or "it ended without a word"
    why = "; ".join(reasons) or "the kernel or the container around it refuses user namespaces"
    return (
        f"{said or 'it ended without a word'}: this node gives users no namespaces ({why}). Code runs in no sandbox "
        "without them: have them allowed (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), or play "
        "this environment on nodes that have them"
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def python_of(config: SandboxConfig) -> list[str]:
    """Return the start of a Python command inside: this interpreter, isolated, with its packages if they are wanted."""
    if config.packages:
        return [sys.executable, "-I"]
    return [str(Path(sys._base_executable).resolve()), "-I", "-S"]  # type: ignore[attr-defined]


def shown_paths(config: SandboxConfig) -> list[str]:
    """Return what is read-only inside besides the system: the interpreter, its packages, what the config names.
    Raises EnvError: a path that the config names is not there."""
    for path in config.read_only:
        if not Path(path).exists():
            raise EnvNodeError(f"sandbox.read_only: {path} is not there, or cannot be seen, on {socket.gethostname()}")
    paths = [sys.base_prefix, str(Path(python_of(config)[0]).resolve().parent.parent)]
    if config.packages:
        paths += [sys.prefix, str(Path(sys.prefix).resolve())]
    found: list[str] = []
    for path in [*paths, *config.read_only]:
        inside = Path("/usr") in (Path(path), *Path(path).parents)
        if not inside and path not in found:
            found.append(path)
    return found


def environment(config: SandboxConfig) -> dict[str, str]:
    """Return all variables of a command's environment."""
    programs = [PYTHON_LINKS, str(Path(python_of(config)[0]).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    return {"PATH": ":".join(programs), "HOME": "/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", **ONE_THREAD}


@functools.cache
def guest_code() -> CodeType:
    """Return the program of a sandbox's first process; its Python is of the same release as this one."""
    path = Path(__file__).with_name("guest.py")
    return compile(path.read_text(encoding="utf-8"), "guest.py", "exec")


_COVERED = ("/sys", "/mnt", "/media", "/srv")
"""Folders of which a sandbox shows nothing; in a stage's namespace one of them holds the paths that are shown."""
_MOUNT = """
trap "" TERM USR1
at=$1 number=0
shift
mount -t tmpfs -o mode=755,size=1m sandboxes "$at" || exit 1
for path; do
    if [ -d "$path" ]; then mkdir "$at/$number"; else : >"$at/$number"; fi || exit 1
    mount --bind "$path" "$at/$number" || exit 1
    number=$((number + 1))
done
echo ready
exec cat >/dev/null
"""


class Stage:
    """The user that makes the sandboxes, and the places at which that user finds what is shown in them.

    For an ordinary user: itself, and the paths as they are. For root: `nobody`, in a mount namespace in which the paths
    are mounted where `nobody` reaches them; a process of ours holds it open, and ends with this one. Nothing of it is
    in the node's own files: who is killed cannot remove any.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.prefix: list[str] = []
        self.sources = {path: path for path in paths}
        self._holder: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            self._enter()

    def _enter(self) -> None:
        place = next((at for at in _COVERED if Path(at).is_dir() and not self._is_above_a_source(at)), None)
        if place is None:
            raise EnvError(f"root's sandboxes need one of the folders {', '.join(_COVERED)} that no shown path is in")
        argv = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _MOUNT, "sh", place, *self.sources]
        try:
            self._holder = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise EnvError(f"root's sandboxes belong to nobody, which needs util-linux's unshare: {error}") from error
        told = self._holder.stdout
        assert told is not None
        poll = select.poll()  # `select` itself knows no file numbers above 1023
        poll.register(told, select.POLLIN)
        if not poll.poll(ANSWER_S * 1000):
            self._holder.kill()  # not waited for: what hangs in the kernel ends with it
            self._holder = None
            raise EnvNodeError(
                f"what root's sandboxes show cannot be mounted within {ANSWER_S:g} s on {socket.gethostname()}: does a "
                f"file system hang ({', '.join(self.sources)})?"
            )
        said = told.readline().decode(errors="replace").strip()
        if said != "ready":
            self.close()
            raise EnvNodeError(f"root's sandboxes need a mount namespace, which this node refuses: {said}")
        self.sources = {path: f"{place}/{number}" for number, path in enumerate(self.sources)}
        place_of = f"--mount=/proc/{self._holder.pid}/ns/mnt"
        self.prefix = ["nsenter", place_of, "--setuid", str(NOBODY), "--setgid", str(NOBODY), "--"]

    def _is_above_a_source(self, folder: str) -> bool:
        return any(Path(folder) in (Path(path).resolve(), *Path(path).resolve().parents) for path in self.sources)

    def close(self) -> None:
        """Give it up; sandboxes that run go on."""
        if self._holder is not None:
            assert self._holder.stdin is not None and self._holder.stdout is not None
            self._holder.stdin.close()
            self._holder.stdout.close()
            self._holder.wait()
            self._holder = None


def command(bwrap: str, config: SandboxConfig, stage: Stage) -> list[str]:
    """Return the command up to the program that is to be process 1."""
    argv = [*(DEAF if is_led() else ()), *stage.prefix, bwrap]
    argv += ["--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"]
    argv += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    argv += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    if config.network:
        argv += ["--share-net"]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in _LINKS:
        link = Path("/", name)
        if link.is_symlink():
            argv += ["--symlink", str(link.readlink()), str(link)]
        elif link.is_dir():
            argv += ["--ro-bind", str(link), str(link)]
    argv += ["--dir", "/etc"]
    for name in (*ETC, *(ETC_OF_NETWORK if config.network else ())):
        file = Path("/etc", name)
        if file.exists():
            argv += ["--ro-bind", str(file.resolve()), str(file)]
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHM_MIB << 20), "--tmpfs", "/dev/shm"]
    argv += ["--remount-ro", "/dev", "--size", str(config.disk_mib << 20), "--tmpfs", "/work"]
    argv += ["--dir", "/work/.tmp", "--symlink", "work/.tmp", "/tmp", "--chdir", "/work"]
    if not config.packages:  # a virtual environment has them, and is found by its own path alone
        for name in ("python", "python3"):
            argv += ["--symlink", python_of(config)[0], f"{PYTHON_LINKS}/{name}"]
    for path, source in stage.sources.items():
        argv += ["--ro-bind", source, path]
    for name, value in environment(config).items():
        argv += ["--setenv", name, value]
    return [*argv, "--remount-ro", "/", "--"]
