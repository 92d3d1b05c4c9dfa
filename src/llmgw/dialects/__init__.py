"""The families of client APIs, pure: how each says no, writes events, and is translated."""
