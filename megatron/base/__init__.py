"""What every package may use: errors, files that survive a power cut, locks, sizes as text."""
