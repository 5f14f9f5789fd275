"""The parts of a step, in their order. Apart from `timing`, which measures them, so that naming them needs no torch."""

PHASES = ("data", "h2d", "augment", "teacher", "student", "backward", "optimizer")
BUBBLE = "bubble"
"""What a pipeline stage waits for its neighbours; not recorded where there are none."""
ALL_PHASES = (*PHASES, BUBBLE)
