"""`python -m tests.gpu [--only 2,3] [--minutes 9]`: measure what waits for a GPU, piece by piece; see docs/gpu-checks.md."""

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

# before torch is imported; in this process and all that it starts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # as workers on GPUs, see `trainables.worker.trainer.GPU_NCCL`

from rich.console import Console

from tests.gpu.checks import CHECKS
from tests.gpu.contract import Check, Piece, Settings
from tests.gpu.page import counts, page, terminal_table
from tests.gpu.photos import remove_all
from tests.gpu.results import Folder, Record
from trainables.rundir import write_atomic, write_json

ROOT = Path(__file__).parents[2]
LEFT_OVER = 3
"""The exit code where pieces are left for the next call."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything chosen is measured and holds; 1: something is missed; 3: pieces are left, run the same command again."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="What only a GPU can settle.")
    parser.add_argument("--only", default="", metavar="2,3,4-bf16", help="checks, or pieces by how their names begin")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small twins, which test the checks")
    parser.add_argument("--minutes", type=float, default=9.0, help="that this call may take; the next one goes on")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="DIR", help="records of one machine, and the page")
    parser.add_argument("--again", action="store_true", help="measure the chosen pieces anew")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    out = args.out.resolve()
    if args.piece:
        return measure_here(named(args.piece), Settings(args.device, out / "made"), out)
    checks = chosen(args.only)
    if not checks:
        parser.error(f"no check or piece {args.only}: choose from {', '.join(p.name for c in CHECKS for p in c.pieces)}")
    folder, console = Folder(out, args.device), Console(width=None if sys.stdout.isatty() else 150)
    pieces = [piece for check in checks for piece in check.pieces]
    if args.again:
        for piece in pieces:
            folder.record_file(piece).unlink(missing_ok=True)
    longest = max((piece.minutes for piece in pieces), default=0.0)
    if args.device == "cuda" and args.minutes < longest:
        parser.error(f"--minutes {args.minutes:g}: the longest of the chosen pieces may take {longest:g}")
    try:
        left = run(pieces, folder, 60 * args.minutes, console)
    finally:
        write_json(out / "results.json", folder.summary(CHECKS))
        write_atomic(out / "results.html", page(folder, CHECKS).encode())
    rows = list(folder.rows(checks))
    console.print(terminal_table(rows))
    console.print(f"{counts(rows)}; {out / 'results.json'}, {out / 'results.html'}", soft_wrap=True)
    if left:
        console.print(
            f"{len(left)} pieces are left ({', '.join(left)}): run the same command again, without --again", soft_wrap=True
        )
        return LEFT_OVER
    remove_all(Settings(args.device, out / "made"))
    return 1 if any(row.verdict == "MISSED" for row in rows) else 0


def chosen(only: str) -> list[Check]:
    """The checks with those of their pieces that `--only` names; all by default."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    found = []
    for check in CHECKS:
        pieces = tuple(
            piece
            for piece in check.pieces
            if not words or str(check.number) in words or any("-" in word and piece.name.startswith(word) for word in words)
        )
        if pieces:
            found.append(Check(check.number, check.title, pieces))
    return found


def named(name: str) -> Piece:
    return next(piece for check in CHECKS for piece in check.pieces if piece.name == name)


def run(pieces: Sequence[Piece], folder: Folder, seconds: float, console: Console) -> list[str]:
    """Measure what has no record yet, each piece in a process of its own. Returns the names of those left for the next call."""
    until, begun, left = time.monotonic() + seconds, False, list[str]()
    for piece in pieces:
        if folder.read(piece) is not None:
            continue
        settings = Settings(folder.device, folder.root / "made")
        if (reason := piece.lacks(settings)) is not None:
            folder.write(piece, Record("skipped", reason=reason))
            continue
        remaining_s = until - time.monotonic()
        if begun and remaining_s < (60 * piece.minutes if folder.device == "cuda" else 1):
            left.append(piece.name)
            continue
        begun = True
        console.print(f"{piece.name} …", end=" ")
        began = time.monotonic()
        record = measure_in_child(piece, folder, min(remaining_s, 60 * piece.minutes))
        if record is None and time.monotonic() - began < 60 * piece.minutes - 1:  # it had less time than it may take
            console.print("stopped")
            left.append(piece.name)
            continue
        record = record or Record("failed", 60 * piece.minutes, reason=f"took longer than {piece.minutes:g} minutes")
        folder.write(piece, record)
        console.print(f"{record.status}, {record.seconds:.0f} s {record.reason}", soft_wrap=True, markup=False)
    return left


def measure_in_child(piece: Piece, folder: Folder, seconds: float) -> Record | None:
    """A piece's record; None: it was ended after so many seconds. Its processes end with it, whatever happens."""
    command = [sys.executable, "-m", "tests.gpu", "--piece", piece.name, "--device", folder.device, "--out", str(folder.root)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    with (
        open(folder.log_file(piece), "wb") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child,
    ):
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_session(child)
    record = folder.read(piece)
    if record is None:
        reason = f"its process ended with exit code {code}, see {folder.log_file(piece)}"
        return Record("failed", time.monotonic() - began, reason=reason)
    return record


def end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a child's session, ranks of its own among them."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def measure_here(piece: Piece, settings: Settings, out: Path) -> int:
    """Measure a piece in this process, and write its record."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    folder, began = Folder(out, settings.device), time.monotonic()
    try:
        record = Record("measured", measured=piece.measure(settings))
    except Exception as error:  # a finding of its own, with its stack trace in the log
        traceback.print_exc()
        record = Record("failed", reason=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    folder.write(piece, Record(record.status, time.monotonic() - began, record.measured, record.reason))
    return 0


def stop(number: int, frame: object) -> None:
    """SIGTERM ends this process as Ctrl-C does, its children with it."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
