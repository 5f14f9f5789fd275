"""The teacher of a job: a network, an ensemble of several, logits cached on disk, or a client of the teacher service."""
