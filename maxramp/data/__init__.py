"""What there is to train on (`sources`) and which of it a step trains on (`loader`)."""
