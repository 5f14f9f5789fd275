"""The teacher of a job: a network, an ensemble of several, outputs cached on disk, or a client of the teacher service."""
