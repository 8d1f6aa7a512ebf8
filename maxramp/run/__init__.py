"""What surrounds the loop: the schedule of a job, its output, metrics, pictures."""
