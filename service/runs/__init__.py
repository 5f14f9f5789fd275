"""A run carried out: planned, checked, trained stage by stage, shown, and written to a directory."""
