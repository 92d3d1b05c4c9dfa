"""Who is who in a cluster: the authority of its own, and the certificates of its server and nodes."""
