"""The watchdog of `--hang-timeout`, which names the ranks that the others wait for."""
