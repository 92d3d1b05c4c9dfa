"""What an operator writes in files, checked as a whole: node.yaml, server.yaml, agent.yaml, and models."""
