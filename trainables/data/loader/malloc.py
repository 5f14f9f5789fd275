"""glibc allocator settings for processes that repeatedly allocate and free images or activations."""

REUSE_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""Environment variables that make glibc reuse freed memory. The thresholds are the largest that mallopt(3) accepts.

By default glibc returns some memory to the kernel and maps it again, which costs 5 to 8 page faults per image that a loader
thread decodes, and a tenth of a training step on a CPU. The thresholds apply only to the main arena.
"""
