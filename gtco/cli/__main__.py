"""``python -m gtco.cli`` is ``gtco``."""

from gtco.cli import main
from gtco.support.pipes import until_closed

raise SystemExit(until_closed(main))
