"""Where samples come from: folders, packed records, small sets in memory."""
