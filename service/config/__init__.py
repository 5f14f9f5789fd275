"""What a user may write: the experiment, its sweep, their rules, and the one line that a wrong value gets."""
