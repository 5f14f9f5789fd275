"""The experiment and its sweep: schema, files, rules, error messages."""
