"""Runs whose length is a time."""
