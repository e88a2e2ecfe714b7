"""What follows from a configuration, before anything runs."""
