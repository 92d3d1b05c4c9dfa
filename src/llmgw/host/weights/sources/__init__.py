"""Where weights come from: the hub, and any other web server."""
