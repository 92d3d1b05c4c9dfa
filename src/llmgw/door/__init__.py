"""The client port: the road of requests to engines.

Read in this order: exchange.py (one request from its head to its last word), steps.py (what an exchange may ask for),
drive.py (carries that out), answer.py (one request to an engine), client.py and upstream.py (the two connections),
relay.py (what happens to the bytes between), http1.py (the only place that knows HTTP's grammar), listener.py (accepts,
counts, drains).
"""
