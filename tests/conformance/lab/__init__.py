"""What the tests of a running llmgw share: clients without manners (wire.py) and the program itself (running.py)."""
