"""The file system of a path, and on Lustre: stripes by file size, and room by OST. Nothing happens elsewhere.

A large file on one OST is as fast and has as much room as that one OST; a small one over many costs each of them an
object. So the hidden directory in which a checkpoint or a weight version is written gets the layout that fits the size
of its files before the first of them is made (`set_stripes`), and a save asks whether its files fit the single OSTs,
not only their sum (`lack_of_room`): a file system with hundreds of GB free still fails when one OST is full.

Sub-directories by hash are not needed: a step, a weight version and a checkpoint are one directory each with a few
large files, old ones are pruned, and nothing lists a directory in a step. The fullest directory is that of a trainer's
logs, with two entries a rank.

`lfs` is asked with a deadline. When it fails or hangs, that is said once and not tried again in this process: a missing
stripe costs speed, never data.
"""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_hpc.store.io.disk import size_text

MIB, GIB = 2**20, 2**30
TIMEOUT_S = 15.0
STRIPES = ((512 * MIB, 1), (40 * GIB, 4))
"""Files below so many bytes get so many stripes; larger ones all OSTs (-1)."""
SMALL = "64M"
"""In a directory of large files the first part of each is on one OST, so that a small one beside them is too."""
FULL_SHARE = 0.9
"""An OST that is fuller is worth a warning: allocation gets slow, and some writers fail."""
_given_up: set[str] = set()


@dataclass(frozen=True)
class Ost:
    """One object storage target."""

    name: str
    size: int
    """Bytes."""
    available: int
    """Bytes that a user can still write."""

    @property
    def used_share(self) -> float:
        """0..1, from what is available."""
        return round(1 - self.available / self.size, 3) if self.size else 1.0


def mount_of(path: Path, table: str | None = None) -> tuple[str, str, str]:
    """Type, source and options of the file system that holds a path, from /proc/self/mountinfo."""
    if table is None:
        try:
            table = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return "unknown", "", ""
    best: tuple[int, tuple[str, str, str]] = (-1, ("unknown", "", ""))
    target = str(path.resolve())
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best[0]:  # of two mounts at one point the later one is on top
            best = len(point), (rest[0], rest[1].replace("\\040", " "), f"{fields[5]},{rest[2]}")
    return best[1]


def has_lfs(path: Path) -> bool:
    """Return whether the path is on Lustre and there is an `lfs` to ask."""
    return shutil.which("lfs") is not None and mount_of(path)[0] == "lustre"


def stripe_count(file_bytes: int) -> int:
    """Stripes of a file of this size; -1: all OSTs."""
    return next((count for limit, count in STRIPES if file_bytes < limit), -1)


def set_stripes(directory: Path, file_bytes: int) -> None:
    """Have new files in an empty directory, and in sub-directories made later, striped for this size.

    Args:
        directory: exists.
        file_bytes: about what its largest file will take.
    """
    if "setstripe" in _given_up or not has_lfs(directory):
        return
    count = stripe_count(file_bytes)
    plain = ["setstripe", "-c", str(count), str(directory)]
    progressive = ["setstripe", "-E", SMALL, "-c", "1", "-E", "-1", "-c", str(count), str(directory)]
    tries = [plain] if count == 1 else [progressive, plain]  # servers before 2.10 know no progressive layouts
    why = ""
    for words in tries:
        try:
            lfs(words)
        except subprocess.TimeoutExpired:
            why = f"no answer within {TIMEOUT_S:.0f} s"
            break
        except OSError as error:
            why = str(error)
        else:
            return
    _give_up("setstripe", f"{directory}: `lfs setstripe` failed ({why}): files keep the default stripes")


def osts(path: Path) -> list[Ost]:
    """Return the OSTs of the file system; [] where it is no Lustre, or does not answer."""
    if "df" in _given_up or not has_lfs(path):
        return []
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return parse_lfs_df(lfs(["df", str(path)]))
    except subprocess.TimeoutExpired:
        why = f"no answer within {TIMEOUT_S:.0f} s"
    except OSError as error:
        why = str(error)
    _give_up("df", f"{path}: `lfs df` failed ({why}): the room on single OSTs is not looked at")
    return []


def lack_of_room(
    path: Path, num_files: int, file_bytes: int, ask: Callable[[Path], Sequence[Ost]] = osts
) -> str | None:
    """Why files of this size do not fit the OSTs; None where they do, or where it is no Lustre.

    A file's objects are on different OSTs and of one size; an OST takes as many as fit what it has available.

    Args:
        num_files: of about one size.
        file_bytes: that size.
    """
    found = ask(path)
    if not found or file_bytes <= 0:
        return None
    count = stripe_count(file_bytes)
    count = len(found) if count < 0 else min(count, len(found))
    each = -(-file_bytes // count)
    places = sum(min(ost.available // each, num_files) for ost in found)
    if places >= num_files * count:
        return None
    worst = max(found, key=lambda ost: ost.used_share)
    return (
        f"{num_files} file(s) of {size_text(file_bytes)} in {count} stripe(s) do not fit the single OSTs, though "
        f"{size_text(sum(ost.available for ost in found))} are free in all (fullest: {worst.name}, "
        f"{worst.used_share:.0%}; see `lfs df`)"
    )


def full_osts(path: Path) -> str | None:
    """Return a sentence about OSTs that are nearly full; None where there are none."""
    found = osts(path)
    full = [ost for ost in found if ost.used_share > FULL_SHARE]
    if not full:
        return None
    worst = max(full, key=lambda ost: ost.used_share)
    return (
        f"{len(full)} of {len(found)} OSTs of {path} are over {FULL_SHARE:.0%} full (worst {worst.name}: "
        f"{worst.used_share:.0%}): writes may fail though space is left"
    )


def parse_lfs_df(text: str) -> list[Ost]:
    """OSTs from `lfs df` (1K-blocks): `NAME_UUID total used available use% mount[OST:n]`; no inactive ones."""
    found = []
    for line in text.splitlines():
        cells = line.split()
        if len(cells) >= 6 and "[OST:" in line and cells[1].isdigit() and cells[3].isdigit():
            found.append(Ost(cells[0].removesuffix("_UUID"), int(cells[1]) * 1024, int(cells[3]) * 1024))
    return found


def lfs(words: Sequence[str]) -> str:
    """Run `lfs` and return what it says.

    Raises:
        OSError: it cannot be started, or refuses; says why.
        subprocess.TimeoutExpired: no answer.
    """
    done = subprocess.run(
        ["lfs", *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise OSError(" ".join(done.stderr.decode(errors="replace").split())[:300] or f"exit code {done.returncode}")
    return done.stdout.decode(errors="replace").strip()


def _give_up(what: str, sentence: str) -> None:
    _given_up.add(what)
    logger.warning(sentence)
