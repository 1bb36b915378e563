"""``gtco``, and ``python -m gtco``: the command line as a process.

Imports nothing before :func:`main`, since Ctrl-C while the commands are imported is Ctrl-C too.
"""

import signal
import sys


def main() -> int:
    """Run the command that ``sys.argv`` names; its exit code (``gtco/cli``)."""
    try:
        from gtco.cli import main as command
        from gtco.support.pipes import until_closed

        return until_closed(command)
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        print("interrupted", file=sys.stderr)
        return 130
    finally:  # the exit code is decided: from here on Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    raise SystemExit(main())
