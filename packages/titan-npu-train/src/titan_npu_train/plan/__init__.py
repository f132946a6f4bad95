"""What a run will need of every device, before it starts."""
