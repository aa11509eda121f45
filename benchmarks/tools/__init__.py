"""What the benchmarks have in common; the lowest room: nothing here imports a script or another room."""
