"""What operators do around a run: watching it, keeping its copies in step, taking it back. Nothing here trains."""
