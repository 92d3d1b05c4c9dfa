"""The agent's hands: processes, ports, log files, disks, and what is remembered between starts."""
