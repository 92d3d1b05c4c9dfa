"""The way between a server and its agents: what an agent dials, and what is said and carried over it.

An agent opens one control link (control.py: a websocket of messages) and a few trunks (mux.py, trunk.py: the bytes of
requests), all by TLS with certificates on both sides (tls.py). dialer.py is the agent's end; listener.py, sessions.py
and revoked.py are the server's.
"""
