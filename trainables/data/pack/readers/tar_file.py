"""The files in a tar, without reading them: names, and where their bytes lie."""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import Piece
from trainables.data.split_names import is_hidden
from trainables.errors import DataError


def tar_files(root: Path, path: Path, raw: IO[bytes], inner: Piece | None = None) -> Iterator[Piece]:
    """The files of the tar `path`, which is open as `raw`, or of the tar in it at `inner`; hidden ones are left out.

    Raises DataError where the tar is damaged or cut off, or a file in it is stored as a link or with holes.
    """
    file = str(path.relative_to(root))
    begin, end = (inner.offset, inner.offset + inner.size) if inner else (0, path.stat().st_size)
    try:
        raw.seek(begin)
        with tarfile.open(fileobj=raw, mode="r:") as tar:
            for member in tar:
                if member.offset >= end:
                    return  # an inner tar without an end of its own
                name = member.name.removeprefix("./")
                if member.isdir() or any(map(is_hidden, name.split("/"))):
                    continue
                if not member.isreg() or member.issparse():
                    raise DataError(f"{path}: {name} is a link or no plain file; write the tar with `tar --hard-dereference -h`")
                yield Piece(file, member.offset_data, member.size, name)
            raw.seek(tar.offset)
            block = raw.read(tarfile.BLOCKSIZE)
            if tar.offset > end:
                raise not_readable(path, "a tar", "its last file is not whole", cut_off=True)
            if tar.offset < end and block.strip(b"\0"):  # tarfile takes a damaged header for the end
                raise not_readable(path, "a tar", f"at byte {tar.offset}", cut_off=len(block) < tarfile.BLOCKSIZE)
    except (tarfile.TarError, OSError) as error:
        is_cut_off = any(words in str(error) for words in ("end of data", "truncated", "empty header"))
        raise not_readable(path, "a tar", str(error), cut_off=is_cut_off) from None
