"""Time and memory of the operators and of a training step, next to their peers and the machine."""
