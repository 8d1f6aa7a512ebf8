"""What there is to train on (`opening`) and which of it a step trains on (`loader`)."""
