"""A whole node by itself: both halves in one process (tree.py), and where it keeps what it keeps."""
