"""Text to indexed data, on one machine or on many."""
