"""The floor under the edges that move bytes: one epoll and one task (loop.py), what they move (transports.py), and who
we are to whom it is moved (credentials.py)."""
