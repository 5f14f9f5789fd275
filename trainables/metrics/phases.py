"""The phases of a step, in order. They are separate from `phase_timer` so that naming them needs no torch."""

PHASES = ("data", "h2d", "augment", "teacher", "student", "backward", "optimizer")
RECEIVE = "receive"
"""A later pipeline stage's wait for the first stage's next batch. It replaces `data`, as such a stage has no loader."""
BUBBLE = "bubble"
"""A pipeline stage's wait for its neighbors within a step; not recorded without pipeline stages."""
ALL_PHASES = (*PHASES, RECEIVE, BUBBLE)
