"""Settings of glibc's allocator for processes that allocate and free images or activations again and again."""

REUSE_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""Environment variables: freed memory is reused. The thresholds are the largest that mallopt(3) takes.

By default glibc returns some of it to the kernel and maps it again, page fault by page fault: 5 to 8 for each image that a loader
thread decodes, and a tenth of the time of a training step on a CPU. The thresholds count in the main arena alone.
"""
