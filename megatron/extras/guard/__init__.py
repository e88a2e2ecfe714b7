"""The spike guard: it finds bad steps, drops them, or rolls the run back."""
