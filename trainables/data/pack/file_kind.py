"""What a file is by its first bytes, and what to run where it is not what a reader needs."""

import shlex
import tarfile
import zipfile
from pathlib import Path

from trainables.errors import DataError

ARCHIVE = r"(?i).+\.(zip|tar|tgz|tar\.(gz|bz2|xz|zst))"
_COMPRESSED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd --rm"}
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_INFLATE = "import sys, zlib; p = sys.argv[1]; d = zlib.decompress(open(p, 'rb').read()); open(p, 'wb').write(d)"


def not_readable(path: Path, what: str, reason: str, *, cut_off: bool = False) -> DataError:
    """The refusal of a file that is not whole, or not `what` its name says: by its first bytes, or else for `reason`."""
    with open(path, "rb") as file:
        head = file.read(64)
    quoted = shlex.quote(str(path))
    if head.startswith(b"version https://git-lfs"):
        return DataError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository")
    if suffix := next((suffix for magic, suffix in _MAGIC.items() if head.startswith(magic)), None):
        return DataError(
            f"{path} is compressed, so that its samples cannot be read one by one: run `{_decompress(path, suffix)}`"
        )
    if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2]) % 31 == 0:
        return DataError(f'{path} is compressed with zlib: run `python -c "{_INFLATE}" {quoted}`')
    if head.lstrip()[:1] == b"<":
        return DataError(f"{path} is a web page, not {what}: the server answered its download with an error; download it again")
    if cut_off or not head:
        return DataError(f"{path} is cut off ({reason}); download it again")
    return DataError(f"{path} is damaged, or not {what} ({reason}); use another copy")


def _decompress(path: Path, suffix: str) -> str:
    """The command that puts the content of a compressed file in its place; its name may lack the `suffix` that tools ask for."""
    quoted, command = shlex.quote(str(path)), _COMPRESSED[suffix]
    if path.suffix in (suffix, ".tgz"):
        return f"{command} {quoted}"
    return f"mv {quoted} {quoted}{suffix} && {command} {quoted}{suffix}"


def archive_error(path: Path) -> DataError:
    """The refusal of an archive: the line that unpacks it into a folder of its own, and which folder to give then."""
    dest = path.with_name(path.name.partition(".")[0] or "unpacked")
    quoted, folder = shlex.quote(str(path)), shlex.quote(str(dest))
    line = (
        f"unzip -q {quoted} -d {folder}"
        if path.suffix.lower() == ".zip"
        else f"mkdir -p {folder} && tar -xf {quoted} -C {folder}"
    )
    if top := _top_folder(path):
        dest /= top
    return DataError(
        f"{path} is an archive: run `{line}` and give {dest}, a folder with train/CLASS/* and val/CLASS/* or another layout"
    )


def _top_folder(path: Path) -> str:
    """The one folder in which an archive has its files, or ''. A tar is read as far as its first file alone."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        else:
            with tarfile.open(path) as tar:
                first = tar.next()
                names = [first.name + "/" * first.isdir()] if first else []
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError):
        return ""
    tops = {"".join(name.removeprefix("./").partition("/")[:2]) for name in names if not name.startswith("__MACOSX/")}
    top = tops.pop().rstrip("/") if len(tops) == 1 and all("/" in name for name in tops) else ""
    return "" if top in ("train", "val") else top
