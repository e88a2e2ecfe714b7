"""Other trainers' flags, configuration files and launch scripts."""
