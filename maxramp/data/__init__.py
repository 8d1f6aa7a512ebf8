"""Which rows there are (`sources`) and which of them a step trains on (`loader`)."""
