"""The bench: what is started (servers), how it is loaded (scenarios), what is said about it (report)."""
