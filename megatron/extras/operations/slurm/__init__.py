"""Job arrays: what happens before, during and after one array task."""
