"""What only a GPU can settle, as one command: `python -m tests.gpu`. See docs/gpu-checks.md."""
