"""``python -m llmgw`` is the same program as the console script."""

from llmgw.cli import main

if __name__ == "__main__":
    main()
