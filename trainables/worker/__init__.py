"""What runs in a Ray Train worker, and the call that starts it. On the workers' side only this package knows ray."""
