"""What surrounds the trainer. The core never imports it, and works without it."""
