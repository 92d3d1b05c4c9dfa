"""What an operator writes in files, checked as a whole: node.yaml (load.py) and models (definition.py)."""
