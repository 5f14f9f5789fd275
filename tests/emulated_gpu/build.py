"""Builds the emulated CUDA libraries: `runtime.c`, `libraries.c`, and generated functions for all else that torch imports."""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = (Path(__file__).with_name("runtime.c"), Path(__file__).with_name("libraries.c"))
BUILD_FOLDER = Path(__file__).parents[2] / "build" / "emulated_gpu"
LIBRARY = "libcuda.so.1"
NAMES_TO_OPEN = ("libnvidia-ml.so.1",)
"""Further names by which the library is opened; the driver's own name is its file's."""
TORCH_LIBRARIES = ("c10_cuda", "caffe2_nvrtc", "torch_cpu", "torch_cuda", "torch_cuda_linalg", "torch_nvshmem", "torch_python")
HEADERS = (("nvidia", "cu13/include"), ("nvidia", "cudnn/include"), ("triton", "backends/nvidia/include"))
"""Packages and their folders; the last one has what the first lacks."""

OF_CUDA = re.compile("(__cuda|cu|nccl|nvrtc|nvshmem)")
SUCCEED = "int {name}(void) {{ return 0; }}"
GENERATED = {
    r"cu[A-Z]": SUCCEED,
    r"cuda(Ipc|Malloc|StreamBeginCapture|Graph)": "int {name}(void) {{ return 801; }}",
    r"\w+SetStream": "int {name}(void **handle, void *stream) {{ *handle = stream; return 0; }}",
    r"\w+GetStream": "int {name}(void **handle, void **stream) {{ *stream = *handle; return 0; }}",
    r"cublasGet(Math|Pointer)Mode": "int {name}(void *handle, int *mode) {{ *mode = 0; return 0; }}",
    r"(cudnnCreate|cublasCreate_v2|cusolverDnCreate|cusparseCreate)$": (
        "int {name}(void **handle) {{ *handle = calloc(1, sizeof(void *)); return 0; }}"
    ),
    r"\w+(Create|CommInit)": "int {name}(void **object) {{ *object = nothing; return 0; }}",
    r"cublas\w*(gemm|gemv|Gemm|dot|axpy|scal|nrm2|trsm)|cudnn(Convolution(Forward|Backward|Bias)|BatchNormalization|Pooling)": (
        "int {name}(void **handle) {{ return emulated_gpu_launch(*handle); }}"
    ),
    "": SUCCEED,
}
"""By the beginning of a function's name, the first that fits: a handle is the stream that was set last, an object is nothing.
What would return memory or a graph is refused, as cudaErrorNotSupported."""
GENERATED_HEAD = "#include <stdlib.h>\nstatic char nothing[65536];\nextern int emulated_gpu_launch(void *stream);\n"


def obstacle() -> str | None:
    """Why there is no emulated GPU on this machine; None: there can be one."""
    reasons = {
        "torch has no CUDA build": torch.version.cuda is None,
        "it is no Linux x86_64": (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        "there is no C compiler": shutil.which("cc") is None or shutil.which("nm") is None,
        "the environment has no headers of CUDA 13": len(_header_folders()) < len(HEADERS),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def build() -> Path:
    """The folder of the libraries, which are built where they are missing."""
    # Imports differ by torch's version, functions by the sources'.
    contents = [torch.__version__.encode(), *(path.read_bytes() for path in (*SOURCES, Path(__file__)))]
    folder = BUILD_FOLDER / hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    if not folder.exists():
        BUILD_FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD_FOLDER) as scratch:
            _compile(Path(scratch), Path(scratch) / "built")
            try:
                os.rename(Path(scratch) / "built", folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder


def _compile(scratch: Path, built: Path) -> None:
    built.mkdir()
    includes = [f"-I{folder}" for folder in _header_folders()]
    compiler = ["cc", "-std=gnu11", "-O1", "-Wall", "-fPIC"]
    objects = [scratch / f"{source.stem}.o" for source in SOURCES]
    for source, compiled in zip(SOURCES, objects, strict=True):
        subprocess.run([*compiler, *includes, "-c", source, "-o", compiled], check=True)
    imported = {name for name in _symbols("--undefined-only", _torch_libraries()) if OF_CUDA.match(name)}
    missing = sorted(imported - _symbols("--defined-only", objects))
    generated = scratch / "generated.c"
    generated.write_text(GENERATED_HEAD + "".join(map(_generated, missing)))
    subprocess.run([*compiler, "-shared", generated, *objects, "-o", built / LIBRARY, "-lpthread", "-ldl"], check=True)
    for name in NAMES_TO_OPEN:
        (built / name).symlink_to(LIBRARY)


def _generated(name: str) -> str:
    text = next(text for pattern, text in GENERATED.items() if re.match(pattern, name))
    return text.format(name=name) + "\n"


def _symbols(which: str, libraries: list[Path]) -> set[str]:
    dynamic = ["--dynamic"] if which == "--undefined-only" else []
    listed = subprocess.run(["nm", *dynamic, which, *libraries], check=True, capture_output=True, text=True).stdout
    names = (line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip() and not line.endswith(":"))
    return {name for name in names if name.isidentifier()}


def _torch_libraries() -> list[Path]:
    folder = Path(torch.__file__).parent / "lib"
    paths = (folder / f"lib{name}.so" for name in TORCH_LIBRARIES)
    return [path for path in paths if path.exists()]


@functools.cache
def _header_folders() -> list[Path]:
    found = []
    for package, folder in HEADERS:
        spec = importlib.util.find_spec(package)
        roots = list(spec.submodule_search_locations or ()) if spec is not None else []
        found += [path for path in (Path(root) / folder for root in roots) if path.exists()][:1]
    return found
