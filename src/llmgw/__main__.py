"""The program, as ``llmgw`` and as ``python -m llmgw``: it imports next to nothing before it can take a Ctrl-C."""

import sys


def main() -> None:
    """Run it. Ctrl-C ends it with status 130 and no word, also while it is still being loaded."""
    try:
        from llmgw.cli import main as run_command  # noqa: PLC0415

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        import signal  # noqa: PLC0415

        # Nothing is left to be put in order: the wait for whoever reads the last words is not to end in a traceback.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
