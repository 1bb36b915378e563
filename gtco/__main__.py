"""``python -m gtco`` is ``gtco``."""

from gtco.cli import main

raise SystemExit(main())
