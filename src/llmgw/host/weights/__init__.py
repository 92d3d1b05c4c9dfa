"""Weights on this machine: fetched from their sources and from other nodes, kept on the disk, and given on."""
