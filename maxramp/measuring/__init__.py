"""What was measured on runs, and what it says about the batch of another."""
