"""What users call on a `Strategy`, by subject. Each part works on the `Process` that the Strategy is."""
