"""What runs train for: a file for each objective, with all that is known of it but arithmetic."""
