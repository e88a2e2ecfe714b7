"""What uses a trained model: text and scores.

What computes a training step is in `extras.step`.
"""
