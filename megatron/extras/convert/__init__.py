"""Models in the format of Hugging Face: export, import, and the comparison of both sides."""
