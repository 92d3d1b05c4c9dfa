"""The floor under the edges that move bytes: one epoll and one task (loop.py), and what they move (transports.py)."""
