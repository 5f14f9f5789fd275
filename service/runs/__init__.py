"""A run carried out: planned, checked, trained stage by stage, shown, and kept in a directory."""
