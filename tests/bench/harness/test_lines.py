"""Files of one JSON object a line, which a kill may cut off."""

from __future__ import annotations

from pathlib import Path

from bench.harness import lines


def test_a_row_behind_a_line_that_was_cut_off_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    assert lines.read(file) == []
    lines.append(file, {"row": 1})
    lines.append(file, {"row": 2})
    assert file.read_bytes() == b'{"row": 1}\n{"row": 2}\n'
    file.write_bytes(file.read_bytes()[:-4])
    lines.append(file, {"row": 3})
    assert lines.read(file) == [{"row": 1}, {"row": 3}]
