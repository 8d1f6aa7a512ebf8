"""Files and key=value -> one checked configuration."""
