"""What surrounds the loop: output, metrics, signals."""
