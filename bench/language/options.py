"""The options of ``python -m bench language_model``."""

from __future__ import annotations

import argparse
from pathlib import Path

from gtco.cli.arguments import positive
from gtco.search.language.model import SHIPPED

from ..harness.suite import available_threads

HOUR = 3600
SYSTEMS = ("language model", "search", "analytic", "random", "MetaSchedule")  # of ``live``
# of ``whole``: held-out models that other benchmarks name too
WHOLE = ("vit-s-16", "deit-s-16", "dinov2-s-14", "segformer-b0", "beit-b-16", "mobilevit-s")


def parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench language_model",
        description=str(doc).split("\n")[0],
    )
    steps = parser.add_subparsers(metavar="STEP", required=True, dest="step")
    for name, what in (
        ("sample", "stages of the workloads, and sentences with random decisions about them"),
        ("pretrain", "the base model, on these sentences"),
        ("rank", "rankings of drawn configs by the analytic price, to learn from"),
        ("measure", "sentences about training stages, fine-tuning again and again (Fig. 8)"),
        ("finetune", "the base model, on picks of the policy and on what was measured"),
        ("evaluate", "a model beside the policy and chance, by what was measured"),
        ("ablate", "short trainings that differ in one thing"),
        ("live", "a model beside other searches, measured on this machine (Tables 2 and 3)"),
        ("whole", "whole models: the model that ships beside the search (Fig. 11)"),
    ):
        step = steps.add_parser(name, help=what)
        step.add_argument("--folder", type=Path, default=Path("build/language_model"))
        step.add_argument("--seconds", type=positive, default=HOUR, help="at most; %(default)s")
        step.add_argument("--seed", type=int, default=0)
        if name in ("pretrain", "finetune"):
            step.add_argument("--epochs", type=positive, default=2)
        if name == "pretrain":
            step.add_argument("--layers", type=positive, default=4)
            step.add_argument("--width", type=positive, default=128)
            step.add_argument("--name", default="base", help="of the file that is made")
        elif name in ("sample", "finetune", "evaluate"):
            step.add_argument(
                "--records",
                type=Path,
                nargs="*",
                default=[],
                metavar="FILE",
                help="files of records, or exports of them (.jsonl)",
            )
        if name in ("finetune", "evaluate", "ablate"):
            step.add_argument("--readings", type=Path, nargs="*", default=[], metavar="FILE")
        if name in ("finetune", "evaluate"):
            step.add_argument(
                "--shipped", action="store_true", help="also the records that come with gtco"
            )
        if name == "sample":
            step.add_argument(
                "--vocabulary", type=Path, metavar="FILE", help="of this model, to train it further"
            )
        if name == "measure":
            step.add_argument(
                "--model", type=Path, metavar="FILE", help="to begin with; default base.ranked.npz"
            )
            step.add_argument("file", type=Path, metavar="FILE.records", help="made or continued")
            step.add_argument("--stages", type=positive, default=64, help="so many; %(default)s")
            step.add_argument("--trials", type=positive, default=16, help="of a stage in a turn")
            step.add_argument("--threads", type=positive, default=available_threads())
        if name == "finetune":
            step.add_argument("--name", default="finetuned", help="of the file that is made")
            step.add_argument("--base", default="base", help="the name of the base model")
            step.add_argument(
                "--seeds", type=positive, default=2, help="so many trainings on what was measured"
            )
            step.add_argument(
                "--best-only", action="store_true", help="imitate the best sentences alone"
            )
        if name in ("evaluate", "ablate"):
            step.add_argument("--json", type=Path, metavar="FILE")
        if name in ("evaluate", "live"):
            step.add_argument("--model", type=Path, default=SHIPPED, metavar="FILE")
        if name == "live":
            step.add_argument("file", type=Path, metavar="FILE.jsonl", help="made or continued")
            step.add_argument("--stages", type=positive, default=12, help="so many; %(default)s")
            step.add_argument("--trials", type=positive, default=64, help="of each; %(default)s")
            step.add_argument(
                "--most", type=positive, default=1000, help="of the search and of MetaSchedule"
            )
            step.add_argument("--threads", type=positive, default=available_threads())
            step.add_argument("--each", type=positive, default=HOUR, help="seconds of a search")
            step.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
        if name == "whole":
            step.add_argument("file", type=Path, metavar="FILE.jsonl", help="made or continued")
            step.add_argument("--models", default=",".join(WHOLE), help="by comma; %(default)s")
            step.add_argument("--sentences", type=positive, nargs="+", default=(1, 10, 32))
            step.add_argument("--threads", type=positive, default=available_threads())
        if name == "evaluate":
            step.add_argument("--draws", type=positive, default=4, help="without masks, a stage")
    return parser
