"""What the benchmarks have in common. The lowest room: nothing here imports a script or another room."""
