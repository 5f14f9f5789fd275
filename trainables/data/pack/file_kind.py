"""Identify a file by its first bytes, and say what to run if a reader cannot use it."""

import re
import shlex
from pathlib import Path

from trainables.errors import DataError

ARCHIVE = r"(?i).+\.(zip|tar|tgz|tar\.(gz|bz2|xz|zst))"
_ARRAYS = {
    "NumPy arrays": r"np[yz]",
    "MATLAB arrays": r"mat",
    "HDF5": r"h5|hdf5|hdf",
    "a pickle": r"pkl|pickle",
    "MNIST's IDX arrays": r"gz|idx[13]-ubyte",
}
ARRAYS = r"(?i).+[.-](" + "|".join(_ARRAYS.values()) + ")"
_COMPRESSED = {
    b"\x1f\x8b": (".gz", "gunzip"),
    b"BZh": (".bz2", "bunzip2"),
    b"\xfd7zXZ\0": (".xz", "unxz"),
    b"\x28\xb5\x2f\xfd": (".zst", "unzstd --rm"),
}
_INFLATE = "import sys, zlib; p = sys.argv[1]; d = zlib.decompress(open(p, 'rb').read()); open(p, 'wb').write(d)"


def not_readable(path: Path, what: str, reason: str, *, cut_off: bool = False) -> DataError:
    """Return the error for a file that is incomplete or not `what` it should be, from its first bytes or else `reason`."""
    with open(path, "rb") as file:
        head = file.read(64)
    quoted = shlex.quote(str(path))
    if head.startswith(b"version https://git-lfs"):
        return DataError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository")
    for magic, (suffix, command) in _COMPRESSED.items():
        if head.startswith(magic):
            # the tools require their own suffix
            rename = "" if path.suffix in (suffix, ".tgz") else f"mv {quoted} {quoted}{suffix} && "
            line = f"{rename}{command} {quoted}{suffix if rename else ''}"
            return DataError(f"{path} is compressed, so its samples cannot be read individually: run `{line}`")
    if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2]) % 31 == 0:
        return DataError(f'{path} is compressed with zlib: run `python -c "{_INFLATE}" {quoted}`')
    if head.lstrip()[:1] == b"<":
        return DataError(f"{path} is a web page, not {what}: the server answered with an error page; download it again")
    if cut_off or not head:
        return DataError(f"{path} is truncated ({reason}); download it again")
    return DataError(f"{path} is damaged, or not {what} ({reason}); use another copy")


def archive_error(path: Path, root: Path | None = None) -> DataError:
    """Return the error for an archive, with the command that unpacks it into a folder of its own.

    With `root`, it is the first of several below that folder.
    """
    dest = path.with_name(path.name.partition(".")[0] or "unpacked")
    quoted, folder = shlex.quote(str(path)), shlex.quote(str(dest))
    line = f"mkdir -p {folder} && tar -xf {quoted} -C {folder}"
    if path.suffix.lower() == ".zip":
        line = f"unzip -q {quoted} -d {folder}"
    if root is not None:
        return DataError(f"{path} is the first of several archives: run `{line}`, unpack the others alike, and give {root}")
    return DataError(
        f"{path} is an archive: run `{line}` and give {dest}, or the folder in it that has train/CLASS/* and val/CLASS/* or "
        "another layout"
    )


def datasets_error(path: Path) -> DataError:
    """The refusal of an Arrow file of Hugging Face's datasets, from `save_to_disk` or its cache."""
    return DataError(
        f"{path} is of Hugging Face's datasets, whose Arrow files cannot be read: write each split as Parquet "
        "(datasets.load_from_disk(FOLDER)[SPLIT].to_parquet(f'OUT/{SPLIT}.parquet')), then run `distill pack OUT PACKED`"
    )


def arrays_error(path: Path) -> DataError:
    """The refusal of a file of arrays, by its name."""
    kind = next(kind for kind, ending in _ARRAYS.items() if re.fullmatch(rf"(?i).+[.-]({ending})", path.name))
    return DataError(
        f"{path} is {kind}, which cannot be read: save images as files in train/CLASS/ and val/CLASS/, or labels of files as "
        "lists train.csv and val.csv of path,label; docs/data.md (Arrays) shows how"
    )
