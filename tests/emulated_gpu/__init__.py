"""An emulated GPU for tests on machines without one: torch's CUDA build runs unchanged on a runtime that has the device's memory
on the host. Kernels are counted and do nothing; with `--numbers` each operation is computed on the CPU in the same memory.

    python -m tests.emulated_gpu [--numbers] COMMAND …

| variable | means | default |
|---|---|---|
| EMULATED_GPU_COUNT | devices | 1 |
| EMULATED_GPU_MEMORY_GIB | memory of each, beyond which it is out of memory | 78 |

It shows what torch does on a GPU and in which order: launches, copies, synchronisations, captures, memory, and with
TORCH_CUDA_SANITIZER=1 races between streams. It shows no speed and nothing of a kernel's own arithmetic.
"""
