"""``python -m gtco.cli`` is ``gtco``."""

from gtco.cli import main

raise SystemExit(main())
