"""Who answers for the teacher: a network, several, a cache on disk, or a service."""
