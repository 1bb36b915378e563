"""Makes every Python process of a node into one of a fake machine. ``$FAKE_MACHINE`` is a folder;
its name is the machine's host name, and files in it say how it behaves:

- ``lying``: its CPU is another one than it was when it joined;
- ``slow``: what times candidates takes a second longer;
- ``hanging``: what times candidates makes the file ``started`` and never ends.
"""

import os
import pathlib
import platform
import sys
import time

folder = pathlib.Path(os.environ["FAKE_MACHINE"])
platform.node = lambda: folder.name
read = pathlib.Path.read_text


def read_text(self, *arguments, **keywords):
    text = read(self, *arguments, **keywords)
    if str(self) == "/proc/cpuinfo" and (folder / "lying").exists():
        return text.replace("stepping\t: ", "stepping\t: 9")
    return text


pathlib.Path.read_text = read_text
if "gtco.tuning.timing" in sys.orig_argv:
    if (folder / "slow").exists():
        time.sleep(1.0)
    if (folder / "hanging").exists():
        (folder / "started").touch()
        time.sleep(600.0)
