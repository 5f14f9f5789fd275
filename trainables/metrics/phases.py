"""The parts of a step, in their order. Apart from `phase_timer`, which measures them, so that naming them needs no torch."""

PHASES = ("data", "h2d", "augment", "teacher", "student", "backward", "optimizer")
RECEIVE = "receive"
"""What a later pipeline stage waits for the first one's next batch, in place of `data`: it has no loader."""
BUBBLE = "bubble"
"""What a pipeline stage waits for its neighbours within a step; not recorded where there are none."""
ALL_PHASES = (*PHASES, RECEIVE, BUBBLE)
